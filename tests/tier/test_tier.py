"""The device tier over a host manager and a store in memory, on the simulated device: no cluster."""

import dataclasses
import datetime
import gc
import logging
import threading
import weakref
from decimal import Decimal

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.port import CopyPlan, DeviceError
from gpuspill.errors import DataLostError, ManagerClosed
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import Encoded, PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.stores import Gate, GatedStore, MemoryStore
from gpuspill.tier import DeviceTier, Internal, Skeleton
from tests.threads import in_thread

KB = 1024


class Rig:
    """A device tier, the host's manager below it, and what keys hold."""

    def __init__(self, *, memory=64 * KB, limit=None, host_limit=None):
        self.device = SimulatedDevice(memory, bandwidth=1e6, latency=0.5, clock=ManualClock())
        self.disk = GatedStore(MemoryStore())
        self.host = ProxifyManager(
            limit=host_limit, store=self.disk, serializer=PickleSerializer(), sizeof=lambda value: 8
        )
        self.tier = DeviceTier(self.device, self.host, limit=limit)
        self.keys = {}

    def put(self, key, value):
        self.keys[key] = self.tier.proxify(value)
        self.tier.settle()

    def get(self, key):
        return self.tier.resolve(self.keys[key])

    def drop(self, key):
        del self.keys[key]
        self.tier.settle()

    def to_host(self):
        self.tier.settle()
        self.tier.manager.limits.evict_all()
        self.tier.settle()

    def to_disk(self):
        self.to_host()
        self.host.limits.evict_all()

    def live(self):
        return self.device.statistics().live_bytes

    def statistics(self):
        return self.tier.statistics()

    def close(self):
        self.tier.close()
        self.host.close()
        assert self.device.statistics().violations == 0
        self.device.validate()


@pytest.fixture
def make():
    rigs = []

    def make(**options):
        rig = Rig(**options)
        rigs.append(rig)
        context = simulated.use(rig.device)
        context.__enter__()
        contexts.append(context)
        return rig

    contexts = []
    yield make
    for rig in rigs:
        rig.tier.validate()
        rig.host.validate()
        rig.close()
    for context in reversed(contexts):
        context.__exit__(None, None, None)


@pytest.fixture
def rig(make):
    return make()


@pytest.mark.parametrize("value", [1, "x", [1, 2], {"a": np.ones(3)}, np.ones(3), {1}, object()])
def test_without_anything_on_the_device_a_value_is_left_alone(rig, value):
    assert rig.tier.proxify(value) is value
    assert rig.tier.resolve(value) is value
    assert rig.tier.is_ready(value)
    assert rig.statistics().units == 0


def test_an_array_is_the_same_object_while_it_is_on_the_device(rig):
    array = asarray(np.arange(10.0))
    rig.put("x", array)
    assert type(rig.keys["x"]) is Skeleton
    assert rig.get("x") is array
    assert rig.statistics().device_nbytes == 80


def test_three_tiers(rig):
    expected = np.arange(100.0)
    rig.put("x", asarray(expected))
    assert rig.live() == rig.statistics().device_nbytes == 800

    rig.to_host()
    assert rig.live() == rig.statistics().device_nbytes == 0
    assert rig.statistics().spilled_nbytes == 800
    assert 800 <= rig.host.memory_total() <= 900
    assert not rig.tier.is_ready(rig.keys["x"])

    rig.host.limits.evict_all()
    assert rig.host.memory_total() == 0
    assert rig.disk.statistics().payload_nbytes == 800

    np.testing.assert_array_equal(asnumpy(rig.get("x")), expected)
    assert rig.live() == rig.statistics().device_nbytes == 800
    # Nothing is left below: it would take room that others need.
    assert len(rig.host) == 0
    rig.drop("x")
    assert rig.live() == rig.statistics().device_nbytes == 0


def test_records_on_the_host_are_internal_keys(rig):
    rig.put("x", asarray(np.arange(10.0)))
    rig.to_host()
    assert [isinstance(key, Internal) for key in rig.host] == [True]
    rig.drop("x")
    assert len(rig.host) == 0


def test_views_share_an_allocation_through_all_tiers(rig):
    base = asarray(np.arange(24.0).reshape(4, 6))
    rig.put("base", base)
    rig.put("row", base[1])
    rig.put("mix", {"backwards": base[::-1, ::2], "again": [base, base.T]})
    del base
    assert rig.statistics().units == 1
    assert rig.statistics().device_nbytes == rig.live() == 192
    rig.to_disk()
    assert rig.live() == 0
    row, mix, base = rig.get("row"), rig.get("mix"), rig.get("base")
    assert row.allocation is base.allocation is mix["backwards"].allocation
    assert mix["again"][0] is base
    assert mix["backwards"].strides == (-48, 16)
    expected = np.arange(24.0).reshape(4, 6)
    np.testing.assert_array_equal(asnumpy(mix["backwards"]), expected[::-1, ::2])
    np.testing.assert_array_equal(asnumpy(mix["again"][1]), expected.T)
    base[1, 0] = -1.0
    assert asnumpy(row)[0] == -1.0  # one memory
    assert rig.live() == 192


def test_a_unit_lives_as_long_as_a_key_has_part_of_it(rig):
    base = asarray(np.arange(24.0))
    rig.put("a", base)
    rig.put("b", base[3:])
    del base
    rig.drop("a")
    rig.to_host()
    np.testing.assert_array_equal(asnumpy(rig.get("b")), np.arange(24.0)[3:])
    rig.drop("b")
    assert rig.statistics().units == 0
    assert rig.live() == 0


def test_containers_come_back_as_they_were(rig):
    @dataclasses.dataclass(frozen=True)
    class Frame:
        columns: dict
        index: object

    plain = np.ones(3)
    value = Frame({"x": asarray(np.arange(3)), "y": plain}, (asarray(np.zeros((2, 2), "f4")), {1, 2}))
    rig.put("f", value)
    del value
    rig.to_disk()
    found = rig.get("f")
    assert type(found) is Frame
    assert found.columns["y"] is plain
    assert found.index[1] == {1, 2}
    assert found.index[0].dtype == np.float32
    np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(3))


@pytest.mark.fault("held by user code", on="device→host", outcome="stays; others go instead")
def test_who_has_an_array_keeps_it_on_the_device(rig):
    array = asarray(np.arange(10.0))
    rig.put("x", array)
    rig.to_host()
    assert rig.tier.is_ready(rig.keys["x"])
    assert rig.get("x") is array
    del array
    rig.to_host()
    assert not rig.tier.is_ready(rig.keys["x"])


def test_what_was_let_go_and_built_again_keeps_it_too(rig):
    rig.put("x", asarray(np.arange(10.0)))
    array = rig.get("x")
    rig.to_host()
    assert rig.get("x") is array


def test_memory_under_a_view_lingers_and_counts_and_comes_back_without_a_copy(rig):
    array = asarray(np.arange(10.0))
    view = array[2:5]
    rig.put("x", array)
    del array
    rig.to_host()
    statistics = rig.statistics()
    assert (statistics.device_nbytes, statistics.lingering_nbytes) == (0, 80)
    assert rig.live() == 80
    copies = rig.device.statistics().copies_to_device
    found = rig.get("x")
    assert rig.device.statistics().copies_to_device == copies
    assert found.allocation is view.allocation
    statistics = rig.statistics()
    assert (statistics.device_nbytes, statistics.lingering_nbytes) == (80, 0)
    del found
    rig.to_host()
    del view
    statistics = rig.statistics()
    assert (statistics.device_nbytes, statistics.lingering_nbytes, rig.live()) == (0, 0, 0)
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(10.0))


def test_memory_that_lingers_and_was_changed_is_what_is_stored(rig):
    array = asarray(np.arange(10.0))
    view = array[2:5]
    rig.put("x", array)
    del array
    rig.to_host()
    view += 100
    rig.put("v", view)
    del view
    rig.to_host()
    assert rig.live() == 0
    np.testing.assert_array_equal(asnumpy(rig.get("v")), np.arange(102.0, 105.0))
    assert rig.statistics().loop_io == 0


def test_a_view_on_memory_that_lingers_joins_its_unit(rig):
    array = asarray(np.arange(10.0))
    view = array[2:5]
    rig.put("x", array)
    del array
    rig.to_host()
    rig.put("v", view)
    assert rig.statistics().units == 1
    assert rig.get("v").allocation is view.allocation
    del view
    rig.to_host()
    assert rig.live() == 0
    np.testing.assert_array_equal(asnumpy(rig.get("v")), [2.0, 3.0, 4.0])
    rig.get("x")
    assert rig.live() == 80


def test_deleted_memory_under_a_view_lingers(rig):
    array = asarray(np.arange(10.0))
    rig.put("x", array)
    view = array[1:]
    del array
    rig.drop("x")
    assert rig.statistics().lingering_nbytes == 80
    rig.put("y", view)
    assert (rig.statistics().lingering_nbytes, rig.statistics().device_nbytes) == (0, 80)
    del view
    rig.drop("y")
    assert rig.live() == 0


def test_an_address_that_is_used_again_is_another_unit(rig):
    first = asarray(np.zeros(10))
    identity = first.allocation.identity
    rig.put("first", first)
    del first
    rig.to_host()
    second = asarray(np.ones(10))
    assert second.allocation.identity == identity
    rig.put("second", second)
    del second
    assert rig.statistics().units == 2
    np.testing.assert_array_equal(asnumpy(rig.get("first")), np.zeros(10))
    np.testing.assert_array_equal(asnumpy(rig.get("second")), np.ones(10))


def test_the_limit_is_kept(make):
    rig = make(limit=4 * KB)
    for i in range(16):
        rig.put(i, asarray(np.full(128, float(i))))
        with rig.tier.manager.admission.reserve(0) as nothing:
            nothing.wait()
    wait_for_room(rig)
    assert rig.live() <= 4 * KB
    assert rig.statistics().device_nbytes == rig.live()
    for i in range(16):
        np.testing.assert_array_equal(asnumpy(rig.get(i)), np.full(128, float(i)))
    assert rig.statistics().restores >= 12


def wait_for_room(rig):
    """Wait until nothing has to leave any more: for that, nothing but admission has to be asked."""
    with rig.tier.manager.admission.reserve(1) as room:
        assert room.wait(60)
    rig.tier.settle()


def test_arrays_of_another_device_are_left_alone(rig):
    other = SimulatedDevice(KB)
    array = asarray(np.ones(3), device=other)
    assert rig.tier.proxify(array) is array
    mixed = rig.tier.proxify([array, asarray(np.ones(4))])
    assert mixed.tree[0] is array
    assert len(mixed.units) == 1


def test_a_value_that_cannot_be_rebuilt_is_left_alone(rig):
    class Odd(list):
        def __copy__(self):
            return self

    value = Odd([asarray(np.ones(4))])
    assert rig.tier.proxify(value) is value
    assert rig.statistics().units == 0


@pytest.mark.fault("value's code raises anything", on="device→host", outcome="left alone")
def test_a_value_whose_own_code_fails_is_left_alone(rig):
    @dataclasses.dataclass
    class Fragile:
        array: object

        def __copy__(self):
            raise ValueError("no")

    @dataclasses.dataclass
    class Lazy:
        array: object

        def __getattribute__(self, name):
            if name == "array":
                raise ValueError("no")
            return super().__getattribute__(name)

    for value in (Fragile(asarray(np.ones(4))), [Lazy(asarray(np.ones(4)))]):
        assert rig.tier.proxify(value) is value
        assert rig.tier.new_nbytes([Lazy(1)]) == 0
    assert rig.statistics().units == 0


def test_arrays_without_bytes(rig):
    rig.put("x", [asarray(np.ones((0, 3))), asarray(np.ones(2))])
    rig.to_disk()
    assert rig.get("x")[0].shape == (0, 3)


@pytest.mark.fault("device memory runs out", on="device→host", outcome="room is made")
def test_out_of_memory_spills_in_the_thread_that_allocates(make):
    rig = make(memory=4 * KB)
    for i in range(4):
        rig.put(i, asarray(np.full(128, float(i))))
    assert rig.live() == 4 * KB
    more = asarray(np.ones(256))  # twice what one of them has
    assert rig.statistics().out_of_memory == 1
    assert rig.statistics().out_of_memory_helped == 1
    assert rig.live() == 4 * KB
    assert rig.statistics().spills == 2
    del more
    for i in range(4):
        np.testing.assert_array_equal(asnumpy(rig.get(i)), np.full(128, float(i)))


@pytest.mark.fault("device memory runs out", on="host→device", outcome="room is made")
def test_out_of_memory_while_restoring(make):
    rig = make(memory=2 * KB)
    for i in range(6):
        rig.put(i, asarray(np.full(128, float(i))))
    for i in (*range(6), *range(6)):
        np.testing.assert_array_equal(asnumpy(rig.get(i)), np.full(128, float(i)))
    assert rig.live() <= 2 * KB
    assert rig.device.statistics().failed_allocations == 0


@pytest.mark.fault("device memory runs out", on="host→device", outcome="an error; not lost")
def test_a_restore_for_which_there_is_no_room_may_be_tried_again(make):
    rig = make(memory=2 * KB)
    rig.put("x", asarray(np.arange(128.0)))
    rig.to_host()
    mine = asarray(np.ones(256))
    with pytest.raises(MemoryError):
        rig.get("x")
    rig.tier.validate()
    assert rig.statistics().device_nbytes == 0
    del mine
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(128.0))


@pytest.mark.fault("copy on the device fails", on=("device→host", "host→device"), outcome="stays; tried again")
def test_a_copy_that_fails_leaves_the_unit_where_it_is(rig, monkeypatch):
    rig.put("x", asarray(np.arange(10.0)))
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise DeviceError("broken")

        patch.setattr(rig.device, "copy_to_host", fail)
        assert rig.tier.manager.limits.make_room(1) == 0
    assert rig.statistics().device_nbytes == rig.live() == 80
    assert rig.tier.manager.limits.make_room(1) == 80  # tried again
    assert rig.live() == 0
    with monkeypatch.context() as patch:
        patch.setattr(rig.device, "copy_to_device", fail)
        with pytest.raises(DeviceError):
            rig.get("x")
    assert rig.live() == 0
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(10.0))


@pytest.mark.parametrize("staged", [False, True])
def test_large_units_are_copied_in_pieces(rig, monkeypatch, staged):
    monkeypatch.setattr(SimulatedDevice, "plan", lambda device: CopyPlan(1000, staged))
    rig.put("x", asarray(np.arange(1000.0)))
    rig.to_disk()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(1000.0))
    assert rig.device.statistics().copies_to_host >= 8
    assert (rig.device.statistics().pinned_bytes > 0) == staged
    rig.tier.close()
    assert rig.device.statistics().pinned_bytes == 0


def test_out_of_memory_cascades_to_disk(make):
    rig = make(memory=2 * KB, host_limit=2 * KB)
    for i in range(8):
        rig.put(i, asarray(np.full(128, float(i))))
    assert rig.disk.statistics().payload_nbytes >= 4 * KB
    assert rig.host.memory_total() <= 2 * KB
    for i in range(8):
        np.testing.assert_array_equal(asnumpy(rig.get(i)), np.full(128, float(i)))


def test_out_of_memory_collects_garbage_once_and_then_says_what_is_there(make, caplog):
    rig = make(memory=2 * KB)

    class Cycle:
        def __init__(self):
            self.me = self
            self.array = asarray(np.ones(128))

    gc.collect()
    gc.disable()
    try:
        Cycle()
        Cycle()
        array = asarray(np.ones(256))
        assert rig.live() == 2 * KB
    finally:
        gc.enable()
    rig.put("x", array)  # in use, so it cannot leave
    with caplog.at_level(logging.WARNING, "gpuspill"):
        for _ in range(2):
            with pytest.raises(MemoryError):
                asarray(np.ones(1))
    (message,) = [record.message for record in caplog.records]
    for part in ("8 bytes were asked for", "2048 of 2048 bytes", "Largest: 2048 bytes"):
        assert part in message


def test_a_hook_that_a_library_dropped_is_installed_again(make):
    rig = make(memory=2 * KB)
    rig.put("x", asarray(np.ones(128)))
    rig.put("y", asarray(np.ones(128)))
    rig.to_host()
    kept = asarray(np.ones(128))
    rig.put("z", asarray(np.ones(128)))
    rig.device.drop_hooks()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.ones(128))
    del kept


def test_admission_pins_and_waits_for_room(make):
    rig = make(limit=4 * KB)
    for i in range(4):
        rig.put(i, asarray(np.full(128, float(i))))
    with rig.tier.admit("out", [rig.keys[0], 5], 2 * KB) as admission:
        assert admission.wait(60)
        rig.tier.settle()
        assert rig.live() <= 2 * KB
        assert rig.tier.is_ready(rig.keys[0])  # pinned
        assert rig.statistics().reserved_nbytes == 2 * KB
        rig.keys["out"] = rig.tier.proxify(asarray(np.ones(256)), "out")
        assert rig.statistics().reserved_nbytes == 0
        assert rig.live() <= 4 * KB
    assert rig.statistics().pinned_nbytes == 0


def send_in(rig, key, number):
    """Put a value of 1 KiB on the device into the host's manager as the bytes that somebody sent."""
    value = {"x": asarray(np.full(128, float(number))), "y": number}
    header, frames = PickleSerializer().dumps(value)
    frames = [memoryview(bytearray(frame)) for frame in frames]
    rig.host.store_encoded(key, Encoded(header, frames, 2 * KB, KB))


@pytest.mark.parametrize("spilled", [False, True])
def test_a_value_that_came_as_bytes_is_on_the_device_once_it_is_decoded(rig, spilled):
    send_in(rig, "x", 5)
    if spilled:
        rig.host.limits.evict_all()
    assert rig.live() == rig.statistics().units == 0
    skeleton = rig.host.get("x")
    assert type(skeleton) is Skeleton
    assert rig.host.nbytes("x") == KB  # what is not on the device
    assert rig.host.memory_total() == KB
    assert rig.live() == rig.statistics().device_nbytes == KB
    found = rig.tier.resolve(skeleton)
    assert found["y"] == 5
    np.testing.assert_array_equal(asnumpy(found["x"]), np.full(128, 5.0))
    del found
    rig.to_disk()
    assert rig.live() == 0
    np.testing.assert_array_equal(asnumpy(rig.tier.resolve(rig.host.get("x"))["x"]), np.full(128, 5.0))
    del skeleton
    rig.host.discard("x")
    rig.tier.settle()
    assert rig.statistics().units == 0


@pytest.mark.parametrize("later", [False, True])
def test_room_is_promised_to_what_is_going_to_be_decoded(make, later):
    rig = make(limit=8 * KB)
    for i in range(4):
        rig.put(i, asarray(np.full(128, float(i))))
    rig.to_host()
    send_in(rig, "x", 7)
    send_in(rig, "y", 8)
    with rig.tier.admit("out", [rig.keys[0]], KB, {"x": KB, "y": KB}) as admission:
        assert admission.wait(60)
        assert rig.statistics().reserved_nbytes == 4 * KB
        other = rig.tier.admit(None, [rig.keys[1]], 0, {"y": KB})  # promised to two: one of them decodes it
        assert rig.host.get("x") is rig.host.look("x")
        assert rig.statistics().reserved_nbytes == 3 * KB + 2 * KB
        other.release()
        values = {0: rig.keys[0], "x": rig.host.get("x"), "y": rig.host.get("y")}
        if later:
            found = rig.tier.resolve_later(values, admission).result(60)
        else:
            found = rig.tier.resolve_all(values, admission)
        assert [float(asnumpy(found[key]["x"])[0]) for key in "xy"] == [7, 8]
        assert rig.statistics().reserved_nbytes == KB  # for the output
        assert rig.live() <= 4 * KB
        del found, values
    assert rig.statistics().reserved_nbytes == rig.statistics().pinned_nbytes == 0


def test_deleted_while_pinned(rig):
    rig.put("x", asarray(np.arange(10.0)))
    admission = rig.tier.admit(None, [rig.keys["x"]])
    rig.drop("x")
    assert rig.live() == 80
    admission.release()
    assert rig.live() == 0


def test_resolving_later(rig):
    rig.put("x", asarray(np.arange(10.0)))
    rig.put("y", [asarray(np.arange(5.0)), 1])
    rig.to_disk()
    found = rig.tier.resolve_later({"x": rig.keys["x"], "y": rig.keys["y"], "z": 3}).result(60)
    np.testing.assert_array_equal(asnumpy(found["x"]), np.arange(10.0))
    np.testing.assert_array_equal(asnumpy(found["y"][0]), np.arange(5.0))
    assert found["z"] == 3
    assert rig.tier.resolve_later({"x": rig.keys["x"]}).done()
    assert rig.tier.resolve_later({"z": 3}).result(0) == {"z": 3}
    del found
    gc.collect()
    assert rig.statistics().pinned_nbytes == 0


def test_messages_call_what_has_no_key_by_what_it_is(rig):
    rig.put("x", asarray(np.ones(4)))
    rig.to_host()
    assert list(map(repr, rig.tier.manager.keys())) == ["<device allocation 1>"]
    assert list(map(repr, rig.host.keys())) == ["<bytes that left the device: record 1>"]


def test_a_lost_record_is_reported_under_the_key(rig, caplog):
    caplog.set_level(logging.CRITICAL, "gpuspill")  # what is logged is kept, and with it the traceback
    rig.put("x", asarray(np.arange(10.0)))
    rig.to_disk()
    rig.disk.store._records.clear()
    with pytest.raises(DataLostError) as caught:
        rig.tier.resolve_later({"x": rig.keys["x"]}).result(60)
    assert caught.value.key == "x"
    with pytest.raises(DataLostError):
        rig.get("x")
    del caught  # its traceback knows the skeleton
    gc.collect()
    rig.drop("x")
    assert rig.statistics().units == 0


def test_closing(rig):
    rig.put("x", asarray(np.arange(10.0)))
    rig.put("y", asarray(np.arange(10.0)))
    kept = rig.get("y")
    rig.to_host()
    rig.tier.close()
    rig.tier.close()
    assert rig.get("y") is kept
    with pytest.raises(ManagerClosed):
        rig.get("x")


# -- one allocation, several threads: each order made to happen ----------------------------------------


class Gates:
    """Stops copies of a device before or after they are made."""

    def __init__(self, device, monkeypatch):
        self.gates = {}
        for name in ("copy_to_host", "copy_to_device"):
            monkeypatch.setattr(device, name, self.gated(name, getattr(device, name)))

    def gated(self, name, copy):
        def gated(*args, **kwargs):
            gate = self.gates.get(name)
            if gate is not None:
                gate.pass_through()
            return copy(*args, **kwargs)

        return gated

    def close(self, name):
        self.gates[name] = gate = Gate()
        return gate


@pytest.fixture
def gates(rig, monkeypatch):
    return Gates(rig.device, monkeypatch)


def arrive(gate):
    assert gate.arrived.acquire(timeout=60)


@pytest.mark.fault("used meanwhile", on="device→host", outcome="stays")
@pytest.mark.fault("deleted meanwhile", on="device→host", outcome="nothing left")
@pytest.mark.fault("overwritten meanwhile", on="device→host", outcome="the new one is there")
@pytest.mark.parametrize("meanwhile", ["read", "delete", "overwrite", "join", "view"])
def test_during_a_spill(rig, gates, meanwhile):
    rig.put("x", asarray(np.arange(10.0)))
    gate = gates.close("copy_to_host")
    spill = in_thread(rig.tier.manager.limits.make_room, 1)
    arrive(gate)
    kept = None
    if meanwhile == "read":
        kept = rig.get("x")
    elif meanwhile == "delete":
        rig.drop("x")
    elif meanwhile == "overwrite":
        rig.put("x", asarray(np.ones(3)))
    elif meanwhile == "join":
        kept = rig.get("x")
        rig.put("y", kept[3:])
        kept = None
    else:
        kept = rig.get("x")[3:]
    gate.open()
    freed = spill()
    rig.tier.settle()
    assert freed == (0 if meanwhile == "read" else 80)
    live = {"read": 80, "delete": 0, "overwrite": 24, "join": 0, "view": 80}[meanwhile]
    assert rig.live() == live == rig.statistics().device_nbytes + rig.statistics().lingering_nbytes
    if meanwhile == "overwrite":
        np.testing.assert_array_equal(asnumpy(rig.get("x")), np.ones(3))
    elif meanwhile != "delete":
        np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(10.0))
    if meanwhile == "join":
        assert rig.get("y").allocation is rig.get("x").allocation
    assert len(rig.host) == 0


@pytest.mark.fault("used meanwhile", on="host→device", outcome="one object for all")
@pytest.mark.fault("deleted meanwhile", on="host→device", outcome="nothing left")
@pytest.mark.fault("overwritten meanwhile", on="host→device", outcome="the new one is there")
@pytest.mark.parametrize("meanwhile", ["read", "delete", "overwrite", "out of memory", "evict"])
def test_during_a_restore(rig, gates, meanwhile):
    rig.put("x", asarray(np.arange(10.0)))
    rig.to_disk()
    gate = gates.close("copy_to_device")
    restore = in_thread(rig.get, "x")
    arrive(gate)
    del gates.gates["copy_to_device"]
    other = None
    if meanwhile == "read":
        other = in_thread(rig.get, "x")
    elif meanwhile == "delete":
        rig.drop("x")
    elif meanwhile == "overwrite":
        rig.put("x", asarray(np.ones(3)))
    elif meanwhile == "evict":
        rig.tier.manager.limits.evict_all()
    else:
        # What is on its way is no victim, and nobody waits for it.
        with pytest.raises(MemoryError):
            simulated.empty(64 * KB, "u1")
    gate.open()
    found = restore()
    np.testing.assert_array_equal(asnumpy(found), np.arange(10.0))
    if other is not None:
        assert other() is found
    if meanwhile in ("delete", "overwrite"):
        del found
        rig.tier.settle()
        assert rig.live() == rig.statistics().device_nbytes == (0 if meanwhile == "delete" else 24)
    else:
        assert rig.get("x") is found


@pytest.mark.fault("closed meanwhile", on="host→device", outcome="whole, or an error")
def test_closed_during_a_restore(rig, gates):
    rig.put("x", asarray(np.arange(10.0)))
    rig.to_disk()
    gate = gates.close("copy_to_device")
    restore = in_thread(rig.get, "x")
    arrive(gate)
    close = in_thread(rig.tier.close)
    gate.open()
    np.testing.assert_array_equal(asnumpy(restore()), np.arange(10.0))
    close()


@pytest.mark.fault("host memory runs out", on="device→host", outcome="stays; tried again")
def test_a_host_without_memory_for_it_leaves_the_unit_where_it_is(make, monkeypatch):
    rig = make()
    rig.put("x", asarray(np.arange(10.0)))
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise MemoryError

        patch.setattr(rig.device, "copy_to_host", fail)
        assert rig.tier.manager.limits.make_room(1) == 0
    assert rig.statistics().device_nbytes == rig.live() == 80
    assert rig.tier.manager.limits.make_room(1) == 80
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(10.0))


def test_out_of_memory_waits_for_what_another_thread_is_spilling(make, monkeypatch):
    rig = make(memory=2 * KB)
    gates = Gates(rig.device, monkeypatch)
    rig.put("x", asarray(np.ones(256)))
    gate = gates.close("copy_to_host")
    spill = in_thread(rig.tier.manager.limits.make_room, 1)
    arrive(gate)
    hooked = threading.Event()
    settle = rig.tier._guard._settle
    rig.tier._guard._settle = lambda: (settle(), hooked.set())
    allocate = in_thread(lambda: asarray(np.zeros(256), device=rig.device))
    assert hooked.wait(60)
    gate.open()
    assert spill() == 2 * KB
    np.testing.assert_array_equal(asnumpy(allocate()), np.zeros(256))


def test_the_same_array_stored_by_two_threads_is_one_unit(rig, monkeypatch):
    array = asarray(np.arange(10.0))
    gate = Gate()
    enter = rig.tier._book.enter

    def gated(memory, **kwargs):
        if kwargs:
            gate.pass_through()
        return enter(memory, **kwargs)

    monkeypatch.setattr(rig.tier._book, "enter", gated)
    first, second = in_thread(rig.put, "a", array), in_thread(rig.put, "b", array)
    arrive(gate)
    arrive(gate)  # neither has found the other's
    gate.open()
    first()
    second()
    assert rig.statistics().units == 1
    assert rig.statistics().device_nbytes == 80
    assert rig.keys["a"].units == rig.keys["b"].units
    rig.drop("a")
    assert rig.get("b") is array


def test_what_dies_while_others_are_given_up_is_given_up_too(rig, monkeypatch):
    rig.put("x", asarray(np.arange(10.0)))
    rig.put("y", asarray(np.arange(10.0)))
    discard = rig.tier.manager.discard

    def also(unit):
        rig.keys.pop("y", None)
        discard(unit)

    monkeypatch.setattr(rig.tier.manager, "discard", also)
    rig.drop("x")
    assert rig.statistics().units == 0
    assert rig.live() == 0


def test_nothing_is_kept_by_the_tier_after_the_last_key(rig):
    array = asarray(np.arange(10.0))
    ref = weakref.ref(array.allocation)
    rig.put("x", array)
    del array
    rig.get("x")
    rig.drop("x")
    assert ref() is None
    assert not rig.tier._book._known
    assert not rig.tier._book._left
    assert not rig.tier._book._units


def test_large_containers_are_told_by_their_types(rig, monkeypatch):
    """What has nothing on the device is not looked at one by one; nor is the rest of what has something there."""
    asked = []
    described = ArrayRegistry.describe

    def describe(registry, item):
        asked.append(item)
        return described(registry, item)

    monkeypatch.setattr(ArrayRegistry, "describe", describe)
    numbers = list(np.arange(1000.0))
    for value in (numbers, [{"a": number} for number in numbers], [datetime.datetime(2020, 1, 1)] * 1000, Decimal(1)):
        assert rig.tier.new_nbytes(value) == 0
        assert rig.tier.proxify(value) is value
    assert not asked
    array = asarray(np.ones(10))
    skeleton = rig.tier.proxify([numbers, array])
    assert all(item is array for item in asked)
    whole, again = rig.tier.resolve(skeleton)
    assert whole is numbers
    assert again is array
