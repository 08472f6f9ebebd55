"""Arrays whose library's memory objects cannot be weakly referenced, as CuPy's and RMM's cannot."""

import gc
import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from gpuspill.device.arrays import ArrayAdapter, ArrayRegistry
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.port import AllocationId, CopyPlan, Layout
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice
from gpuspill.storage.files import FileStore
from gpuspill.testing.fake_driver import FakeDriver
from gpuspill.tier import DeviceTier

NBYTES = 8000


class Memory:
    """Keeps what it is made of."""

    __slots__ = ("kept",)

    def __init__(self, kept):
        self.kept = kept


class Array:
    def __init__(self, memory, layout):
        self.memory, self.layout = memory, layout

    def part(self, start, stop):
        step = self.layout.strides[0]
        return Array(self.memory, replace(self.layout, offset=self.layout.offset + start * step, shape=(stop - start,)))

    def __cuda_array_interface__(self):
        raise AssertionError("nothing has to ask for it")


class Adapter(ArrayAdapter):
    name, library = "slotted", "slotted_look_alike"

    def types(self, library):
        return (Array,)

    def describe(self, value, registry):
        kept = value.memory.kept
        identity = AllocationId(kept.device.identity, kept.address, kept.nbytes)
        return self.describes(identity, value.memory, value.layout)

    def rebuild(self, memory, layout):
        return Array(Memory(memory), layout)


class Rig:
    def __init__(self, directory, monkeypatch):
        monkeypatch.setitem(sys.modules, Adapter.library, types.ModuleType(Adapter.library))
        self.simulated = SimulatedDevice(2**20, clock=ManualClock())
        self.driver = FakeDriver(self.simulated)
        self.device = GpuDevice(self.driver, plan=CopyPlan())
        self.host = ProxifyManager(
            limit=None, store=FileStore(directory), serializer=PickleSerializer(), sizeof=lambda value: 100
        )
        self.tier = DeviceTier(self.device, self.host, limit=None, registry=ArrayRegistry([Adapter()]))

    def make(self, number):
        """Return an array as the library makes it, on memory of its own."""
        allocation = self.driver.know(self.simulated.allocate(NBYTES))
        allocation.storage[:] = number
        return Array(Memory(allocation), Layout(0, (NBYTES,), (1,), "|u1", 1))

    def to_host(self):
        gc.collect()
        self.tier.settle()
        self.tier.manager.limits.evict_all()

    def bytes_of(self, array):
        address = array.memory.kept.address + array.layout.offset
        allocation = self.driver.find(address)
        return allocation.storage[address - allocation.address :][: array.layout.shape[0]]


@pytest.fixture
def rig(tmp_path, monkeypatch):
    rig = Rig(tmp_path, monkeypatch)
    yield rig
    rig.tier.validate()
    rig.tier.close()
    rig.host.close()
    rig.device.close()
    assert rig.simulated.statistics().live_bytes == 0
    assert rig.simulated.statistics().violations == 0


def test_memory_that_other_code_keeps_stays_where_it_is(rig):
    """When it is gone could not be noticed, so its address could mean other memory."""
    array = rig.make(1)
    view = array.part(10, 20)
    value = rig.tier.proxify([array])
    del array
    rig.to_host()
    assert rig.tier.statistics().device_nbytes == NBYTES
    assert rig.tier.proxify(view).units == value.units
    del view
    rig.to_host()
    assert rig.tier.statistics().device_nbytes == rig.simulated.statistics().live_bytes == 0
    assert rig.bytes_of(rig.tier.resolve(value)[0]).tolist() == [1] * NBYTES
    del value
    rig.tier.settle()


def test_what_was_built_anew_is_found_by_the_ports_own_memory_under_it(rig):
    """A view of a restored array keeps it although the unit has left: the unit is put back there, without a copy."""
    value = rig.tier.proxify([rig.make(2)])
    rig.to_host()
    view = rig.tier.resolve(value)[0].part(10, 20)
    gc.collect()
    rig.tier.settle()
    rig.tier.manager.limits.evict_all()
    statistics = rig.tier.statistics()
    assert (statistics.device_nbytes, statistics.lingering_nbytes) == (0, NBYTES)
    copies = rig.device.statistics().copies_to_device
    array = rig.tier.resolve(value)[0]
    assert rig.device.statistics().copies_to_device == copies
    rig.bytes_of(view)[0] = 5
    assert rig.bytes_of(array)[9:12].tolist() == [2, 5, 2]
    del array, view, value
    gc.collect()
    rig.tier.settle()


def test_an_address_that_comes_again_is_another_unit(rig):
    values, addresses = [], set()
    for number in range(6):
        array = rig.make(number)
        addresses.add(array.memory.kept.address)
        values.append(rig.tier.proxify([array]))
        del array
        rig.to_host()
    assert len(addresses) == 1
    assert rig.tier.statistics().units == 6
    for number, value in enumerate(values):
        np.testing.assert_array_equal(rig.bytes_of(rig.tier.resolve(value)[0]), np.full(NBYTES, number))
    del values, value
    gc.collect()
    rig.tier.settle()
