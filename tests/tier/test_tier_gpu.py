"""The device tier on the device of a GPU, with a driver of which only the boundary is real."""

import gc

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.adapters import SimulatedAdapter
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.past_host import PastHost, Trust
from gpuspill.device.port import CopyPlan
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.storage.files import FileStore
from gpuspill.testing.fake_driver import FakeDriver
from gpuspill.testing.fake_files import FakeFiles
from gpuspill.tier import DeviceTier

KB = 1024
MEMORY = 64 * KB


class Adapter(SimulatedAdapter):
    """Arrays whose memory is known to the driver by address, as that of any library is to CUDA."""

    def __init__(self, driver):
        self.driver = driver
        #: What a library's array does by itself: keep the port's allocation.
        self.kept = []

    def describe(self, value, registry):
        self.driver.know(value.allocation)
        return super().describe(value, registry)

    def rebuild(self, memory, layout):
        array = super().rebuild(self.driver.find(memory.address), layout)
        self.kept.append((array, memory))
        return array


class Rig:
    def __init__(self, directory, *, limit=None, staged=False, chunk=1000, past_host=False):
        self.simulated = SimulatedDevice(MEMORY, bandwidth=1e6, latency=1e-3, clock=ManualClock())
        self.driver = FakeDriver(self.simulated)
        self.device = GpuDevice(self.driver, plan=CopyPlan(chunk, staged))
        self.disk = FileStore(directory)
        self.host = ProxifyManager(limit=None, store=self.disk, serializer=PickleSerializer(), sizeof=lambda value: 100)
        self.adapter = Adapter(self.driver)
        files = FakeFiles(self.simulated, self.driver.find)
        self.past_host = PastHost(files, trust=Trust(minimum=1)) if past_host else None
        self.tier = DeviceTier(
            self.device,
            self.host,
            limit=limit,
            registry=ArrayRegistry([self.adapter]),
            past_host=self.past_host,
        )
        self.skeletons = {}

    def put(self, key, value):
        self.skeletons[key] = self.tier.proxify(value)

    def get(self, key):
        return self.tier.resolve(self.skeletons[key])

    def to_disk(self):
        gc.collect()
        self.adapter.kept.clear()
        self.tier.settle()
        self.tier.manager.limits.evict_all()
        self.host.limits.evict_all()

    def close(self):
        self.adapter.kept.clear()
        self.skeletons.clear()
        self.tier.close()
        self.host.close()
        self.device.validate()
        assert self.device.statistics().copies_in_flight == 0
        assert self.device.statistics().pinned_bytes == 0
        self.device.close()
        self.simulated.validate()
        assert self.simulated.statistics().violations == 0
        assert not self.driver.connected()


@pytest.fixture(params=[False, True], ids=["ordinary", "staged"])
def make(request, tmp_path):
    rigs = []

    def make(**options):
        rig = Rig(tmp_path, staged=request.param, **options)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make):
    rig = make()
    with simulated.use(rig.simulated):
        yield rig


def test_views_share_memory_again_after_the_disk(rig):
    """Computed on a stream that the port knows nothing of, copied late, in pieces."""
    array = asarray(np.arange(1000.0).reshape(20, 50)) + 1.0
    rig.put("whole", {"a": array, "b": [array.T, array[3:7, ::2]]})
    del array
    rig.to_disk()
    assert rig.tier.statistics().device_nbytes == rig.simulated.statistics().live_bytes == 0
    assert rig.disk.statistics().payload_nbytes >= 8000
    value = rig.get("whole")
    expected = np.arange(1000.0).reshape(20, 50) + 1
    np.testing.assert_array_equal(asnumpy(value["a"]), expected)
    np.testing.assert_array_equal(asnumpy(value["b"][0]), expected.T)
    value["a"][3, 0] = -1.0
    assert asnumpy(value["b"][1])[0, 0] == -1
    assert rig.tier.statistics().device_nbytes == rig.device.statistics().live_bytes == 8000


def test_straight_to_disk_when_the_host_is_full(rig):
    array = asarray(np.arange(1000.0).reshape(20, 50)) + 1.0
    rig.put("whole", {"a": array, "b": array[3:7, ::2]})
    del array
    rig.host.limits.set_limit(0, None)
    rig.to_disk()
    assert rig.tier.statistics().direct_spills == 1
    assert rig.host.memory_total() == rig.simulated.statistics().live_bytes == 0
    assert rig.disk.statistics().payload_nbytes == 8000
    assert rig.device.statistics().pinned_bytes == 2000  # two pieces, whatever is faster to ordinary memory
    value = rig.get("whole")
    np.testing.assert_array_equal(asnumpy(value["a"]), np.arange(1000.0).reshape(20, 50) + 1)
    value["a"][3, 0] = -1.0
    assert asnumpy(value["b"])[0, 0] == -1


def test_what_came_back_can_leave_again(rig):
    for number in range(5):
        rig.put(number, asarray(np.full(300, float(number))))
    for _ in range(3):
        rig.to_disk()
        assert rig.simulated.statistics().live_bytes == 0
        for number in range(5):
            np.testing.assert_array_equal(asnumpy(rig.get(number)), np.full(300, float(number)))


def test_a_library_that_runs_out_of_memory_makes_room(rig):
    for number in range(8):
        rig.put(number, asarray(np.full(KB, float(number))))
    assert rig.simulated.statistics().live_bytes == MEMORY
    more = asarray(np.ones(2 * KB))
    statistics = rig.tier.statistics()
    assert (statistics.out_of_memory, statistics.out_of_memory_helped) == (1, 1)
    del more
    for number in range(8):
        np.testing.assert_array_equal(asnumpy(rig.get(number)), np.full(KB, float(number)))


def test_memory_set_up_anew_is_noticed_before_the_next_use(rig):
    rig.simulated.drop_hooks()
    assert not rig.driver.connected()
    rig.tier.verify()
    assert rig.driver.connected()
    rig.simulated.drop_hooks()
    rig.put("x", asarray(np.ones(10)))
    assert rig.driver.connected()


def test_a_unit_that_is_larger_than_its_staging(make):
    rig = make(chunk=100)
    with simulated.use(rig.simulated):
        values = np.random.default_rng(1).random(4001)
        rig.put("x", asarray(values))
        rig.to_disk()
        np.testing.assert_array_equal(asnumpy(rig.get("x")), values)


def test_past_host_memory_when_the_host_is_full(tmp_path):
    """Of memory that is waited for as a whole, into memory that is waited for by the stream it was allocated on."""
    rig = Rig(tmp_path, past_host=True)
    with simulated.use(rig.simulated):
        array = asarray(np.arange(1000.0).reshape(20, 50)) + 1.0
        rig.put("whole", {"a": array, "b": array[3:7, ::2]})
        del array
        rig.host.limits.set_limit(0, None)
        for spills in (1, 2):
            rig.to_disk()
            assert rig.tier.statistics().past_host_spills == spills
            assert rig.simulated.statistics().live_bytes == 0
            value = rig.get("whole")
            np.testing.assert_array_equal(asnumpy(value["a"]), np.arange(1000.0).reshape(20, 50) + 1)
            np.testing.assert_array_equal(asnumpy(value["b"]), (np.arange(1000.0).reshape(20, 50) + 1)[3:7, ::2])
            assert rig.past_host.reads == spills
            del value
        assert rig.device.statistics().pinned_bytes == 0
    rig.close()
