"""Many allocations leave and come back together: one wait for those who computed, one for the copies, one transaction.

What fails together is tried one by one, so a failure is that of one allocation.
"""

import threading

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.port import DeviceError, OutOfMemory
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.simulated.device.streams import SimulatedEvent
from gpuspill.testing.stores import MemoryStore
from gpuspill.tier import DeviceTier
from tests.threads import in_thread

COUNT, NBYTES = 20, 1024
EXPECTED = [np.full(NBYTES, number, np.uint8) for number in range(COUNT)]


class Watched(SimulatedDevice):
    """A device that does not know who computed where, and fails when it is told to."""

    def __init__(self, memory):
        super().__init__(memory, clock=ManualClock())
        self.synchronized = 0
        self.fail = lambda what, allocation: None

    def fence(self, allocation):
        return None

    def synchronize(self):
        self.synchronized += 1
        super().synchronize()

    def copy_to_host(self, allocation, host_buffer, stream, *, offset=0):
        self.fail("to_host", allocation)
        return super().copy_to_host(allocation, host_buffer, stream, offset=offset)

    def copy_to_device(self, host_buffer, allocation, stream, *, offset=0):
        self.fail("to_device", allocation)
        return super().copy_to_device(host_buffer, allocation, stream, offset=offset)

    def allocate(self, nbytes):
        self.fail("allocate", None)
        return super().allocate(nbytes)


class Rig:
    """A tier with one value of many arrays in it."""

    def __init__(self, host_limit=None):
        self.device = Watched(4 * COUNT * NBYTES)
        self.context = simulated.use(self.device)
        self.context.__enter__()
        self.host = ProxifyManager(
            limit=host_limit, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8
        )
        self.tier = DeviceTier(self.device, self.host, limit=None)
        self.skeleton = self.tier.proxify([asarray(part) for part in EXPECTED])

    def leave(self):
        self.tier.settle()
        return self.tier.manager.limits.make_room(COUNT * NBYTES)

    def check(self):
        value = self.tier.resolve(self.skeleton)
        np.testing.assert_array_equal([asnumpy(part) for part in value], EXPECTED)
        self.validate()

    def validate(self):
        self.tier.validate()
        self.host.validate()
        self.device.validate()

    @property
    def spilled(self):
        return self.tier.statistics().spilled_nbytes

    def close(self):
        self.tier.close()
        self.host.close()
        self.context.__exit__(None, None, None)
        assert self.device.statistics().violations == 0


@pytest.fixture
def make():
    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def waits(monkeypatch):
    """The events that were waited for."""
    found = []
    wait = SimulatedEvent.wait

    def counted(event, timeout=None):
        found.append(event)
        return wait(event, timeout)

    monkeypatch.setattr(SimulatedEvent, "wait", counted)
    return found


def once(what, error, *, number=0):
    """Return what fails the `number`-th time that something is done, and for the same allocation ever after."""
    seen = []
    bad = []

    def fail(done, allocation):
        if done != what:
            return
        if allocation is None or all(allocation is not known for known in seen):
            seen.append(allocation)
            if len(seen) == number + 1:
                bad.append(allocation)
                raise error
        elif any(allocation is known for known in bad):
            raise error

    return fail


def test_they_leave_by_one_wait_for_the_device_and_one_for_the_copies(make, waits):
    rig = make()
    before = rig.device.synchronized
    waits.clear()
    assert rig.leave() == COUNT * NBYTES
    assert rig.device.synchronized == before + 1
    # The device's streams were waited for, and the last copy; none of the others.
    copies = [event for event in waits if event.copy is not None]
    assert len(copies) == 1
    assert rig.device.statistics().copies_to_host == COUNT
    assert rig.spilled == COUNT * NBYTES
    rig.check()


def test_they_come_back_by_one_wait(make, waits):
    rig = make()
    rig.leave()
    waits.clear()
    value = rig.tier.resolve(rig.skeleton)
    assert len([event for event in waits if event.copy is not None]) == 1
    assert rig.tier.statistics().restores == COUNT
    assert len(rig.host) == 0  # and nothing of them is left below
    del value
    rig.check()


def test_they_come_back_by_one_wait_on_another_thread(make, waits):
    rig = make()
    rig.leave()
    waits.clear()
    found = rig.tier.resolve_later({"x": rig.skeleton}).result(30)
    assert len([event for event in waits if event.copy is not None]) == 1
    assert rig.tier.statistics().restores == COUNT
    np.testing.assert_array_equal([asnumpy(part) for part in found["x"]], EXPECTED)
    rig.validate()


def test_they_are_brought_ahead_of_use_by_one_wait(make, waits):
    rig = make()
    rig.leave()
    waits.clear()
    assert rig.tier.prefetch([rig.skeleton]) == COUNT
    rig.tier.resolve_later({"x": rig.skeleton}).result(30)
    assert len([event for event in waits if event.copy is not None]) == 1
    assert rig.tier.statistics().restores == COUNT
    rig.check()


def test_what_waits_in_line_is_taken_over_by_a_thread_that_needs_it(make):
    rig = make()
    rig.leave()
    manager = rig.tier.manager
    held, release = threading.Event(), threading.Event()

    def occupy():
        held.set()
        release.wait(30)

    for _ in range(2):  # every restore thread there is
        held.clear()
        manager.engine.submit(occupy)
        assert held.wait(30)
    later = rig.tier.resolve_later({"x": rig.skeleton})
    assert not later.done()
    rig.check()  # by this thread
    assert len(later.result(30)["x"]) == COUNT
    release.set()
    assert rig.tier.statistics().restores == COUNT


def test_what_went_to_disk_is_read_by_all_restore_threads(make, monkeypatch):
    rig = make(host_limit=0)
    rig.leave()
    readers, both = set(), threading.Barrier(2)
    read = rig.tier._records.read

    def watched(*args, **kwargs):
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            both.wait(30)
        return read(*args, **kwargs)

    monkeypatch.setattr(rig.tier._records, "read", watched)
    rig.tier.resolve_later({"x": rig.skeleton}).result(30)
    assert len(readers) == 2
    rig.check()


def test_what_a_reader_has_is_the_same_for_another(make):
    rig = make()
    rig.leave()
    start = threading.Barrier(2)

    def read():
        with simulated.use(rig.device):
            start.wait(30)
            return rig.tier.resolve(rig.skeleton)

    other = in_thread(read)
    mine = read()
    for one, two in zip(mine, other(), strict=True):
        assert one is two
    assert rig.tier.statistics().restores == COUNT
    rig.validate()


def test_one_that_cannot_be_copied_keeps_no_other(make):
    rig = make()
    rig.device.fail = once("to_host", DeviceError("broken"), number=3)
    rig.leave()
    assert rig.spilled == (COUNT - 1) * NBYTES
    rig.validate()
    rig.device.fail = lambda what, allocation: None
    rig.leave()
    assert rig.spilled == COUNT * NBYTES
    rig.check()


def test_one_that_does_not_fit_brings_no_other_to_nothing(make):
    rig = make()
    rig.leave()
    calls = []

    def fail(what, allocation):
        if what == "allocate":
            calls.append(what)
            if len(calls) == 3:
                raise OutOfMemory("no room just now")

    rig.device.fail = fail
    live = rig.device.statistics().live_bytes
    rig.check()
    assert len(calls) == 3 + COUNT  # two of the first attempt were given back
    assert rig.device.statistics().live_bytes <= live + COUNT * NBYTES


def test_a_copy_back_that_fails_is_told_to_who_reads_and_can_be_tried_again(make):
    rig = make()
    rig.leave()

    def broken(what, allocation):
        if what == "to_device":
            raise DeviceError("broken")

    rig.device.fail = broken
    with pytest.raises(DeviceError, match="broken"):
        rig.tier.resolve(rig.skeleton)
    rig.validate()
    assert rig.spilled == COUNT * NBYTES
    rig.device.fail = lambda what, allocation: None
    rig.check()


def test_who_interrupts_finds_all_where_they_were(make):
    rig = make()
    rig.device.fail = once("to_host", KeyboardInterrupt(), number=3)
    with pytest.raises(KeyboardInterrupt):
        rig.leave()
    rig.device.fail = lambda what, allocation: None
    rig.validate()
    assert rig.spilled == 0
    rig.leave()
    assert rig.spilled == COUNT * NBYTES

    rig.device.fail = once("to_device", KeyboardInterrupt(), number=3)
    with pytest.raises(KeyboardInterrupt):
        rig.tier.resolve(rig.skeleton)
    rig.device.fail = lambda what, allocation: None
    rig.validate()
    rig.check()


@pytest.mark.parametrize("room", [0, 3, COUNT // 2])
def test_without_room_for_all_each_goes_where_there_is_some(make, room):
    rig = make(host_limit=room * (NBYTES + 8))
    rig.leave()
    assert rig.spilled == COUNT * NBYTES
    assert rig.host.memory_total() <= room * (NBYTES + 8)
    assert rig.tier.statistics().direct_spills >= COUNT - room - 1
    rig.check()
