"""What is on the device before it is needed, and what leaves for it."""

import queue

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.core.budget import Kind
from gpuspill.core.residency import Tier
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy, run_kernel
from gpuspill.testing.stores import Gate, MemoryStore
from gpuspill.tier import DeviceTier

KB = 1024
BLOCK = 8 * KB


class Rig:
    """A device tier with blocks of one size in it, by key."""

    def __init__(self, limit=None):
        self.device = SimulatedDevice(64 * BLOCK, bandwidth=1e6, clock=ManualClock())
        self.host = ProxifyManager(
            limit=None, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8
        )
        self.tier = DeviceTier(self.device, self.host, limit=None if limit is None else limit * BLOCK)
        self.keys = {}
        self._ended = queue.Queue()
        manager, asked = self.tier.manager, set()
        admit, release = manager.admission.admit, manager.admission.release

        def noted_admit(*args, **kwargs):
            admission = admit(*args, **kwargs)
            asked.add(admission)
            return admission

        def noted_release(admission):
            yield from release(admission)  # in pieces
            if admission in asked:
                self._ended.put(admission)

        manager.admission.admit, manager.admission.release = noted_admit, noted_release

    def put(self, keys):
        for key in keys:
            self.keys[key] = self.tier.proxify(asarray(np.full(KB, float(ord(key)))))

    def expect(self, **orders):
        for key, order in orders.items():
            self.tier.expect_use(self.keys[key], None if order is None else (order,), key)

    def prefetch(self, keys):
        return self.tier.prefetch(self.keys[key] for key in keys)

    def brought(self):
        """Wait until the next unit that was asked for has come and nothing is kept for it any more."""
        self._ended.get(timeout=60)

    def on_device(self):
        manager = self.tier.manager
        return "".join(key for key, value in self.keys.items() if manager.tier_of(value.units[0]) is Tier.HOST)

    def spill(self, keys):
        """Make these leave, and no others."""
        others = [unit for key, value in self.keys.items() if key not in keys for unit in value.units]
        with self.tier.manager.admission.pin(others):
            self.tier.manager.limits.evict_all()

    def next_use(self, key):
        return self.tier.manager.uses.next(self.keys[key].units[0])

    def close(self):
        self.tier.validate()
        self.tier.close()
        self.host.close()
        assert self.device.statistics().violations == 0


@pytest.fixture
def make():
    rigs, contexts = [], []

    def make(**options):
        rigs.append(Rig(**options))
        contexts.append(simulated.use(rigs[-1].device))
        contexts[-1].__enter__()
        return rigs[-1]

    yield make
    for context in reversed(contexts):
        context.__exit__(None, None, None)
    for rig in rigs:
        rig.close()


def filled(make, limit, spilled, resident, **options):
    """Return a rig with blocks on the host and others on the device."""
    rig = make(**options)
    rig.put(spilled + resident)
    rig.spill(spilled)
    assert rig.on_device() == resident
    rig.tier.manager.limits.set_limit(limit * BLOCK, None)
    return rig


def test_what_is_needed_last_leaves_for_what_is_needed_next(make):
    rig = filled(make, 2, "ab", "cd")
    rig.expect(a=1, b=2, c=3, d=4)
    assert rig.prefetch("a") == 1
    rig.brought()
    assert rig.on_device() == "ac"
    assert rig.prefetch("a") == 0
    assert rig.tier.statistics().reserved_nbytes == 0
    np.testing.assert_array_equal(asnumpy(rig.tier.resolve(rig.keys["d"])), np.full(KB, float(ord("d"))))


@pytest.mark.parametrize("orders", [{"a": 5, "c": 1, "d": 2}, {"c": 1, "d": 2}])
def test_what_is_needed_sooner_stays(make, orders):
    rig = filled(make, 2, "a", "cd")
    rig.expect(**orders)
    assert rig.prefetch("a") == 0
    assert rig.on_device() == "cd"
    assert rig.tier.statistics().spills == 1


def gated(device, name, monkeypatch):
    """Return a gate before the copies of a device in one direction."""
    gate, copy = Gate(), getattr(device, name)

    def wait_and_copy(*args, **kwargs):
        gate.pass_through()
        return copy(*args, **kwargs)

    monkeypatch.setattr(device, name, wait_and_copy)
    return gate


def test_there_is_room_left_for_what_tasks_return(make, monkeypatch):
    rig = filled(make, 3, "a", "bc")
    rig.expect(a=1, b=2, c=3)
    rig.tier.ahead.headroom = BLOCK
    gate = gated(rig.device, "copy_to_device", monkeypatch)
    assert rig.prefetch("a") == 1
    assert gate.arrived.acquire(timeout=60)
    # Before it is there: tasks may have the rest.
    statistics = rig.tier.statistics()
    assert (statistics.device_nbytes, statistics.reserved_nbytes) == (2 * BLOCK, 0)
    gate.open()
    rig.brought()
    assert rig.on_device() == "ab"


def test_nothing_that_is_needed_sooner_leaves_for_what_tasks_return(make):
    rig = filled(make, 3, "a", "bc")
    rig.expect(b=1, c=2, a=3)
    rig.tier.ahead.headroom = BLOCK
    assert rig.prefetch("a") == 0
    rig.tier.ahead.headroom = 0
    assert rig.prefetch("a") == 1
    rig.brought()
    assert rig.on_device() == "abc"


def test_not_everything_at_once(make):
    rig = filled(make, 20, "abcdefghijkl", "")
    rig.tier.manager.batch.materialize_later = lambda admission: future
    future = type("Never", (), {"add_done_callback": lambda self, callback: callbacks.append(callback)})()
    callbacks = []
    assert rig.prefetch("abcdefghijkl") == 8
    assert rig.prefetch("abcdefghijkl") == 0
    callbacks[0](future)
    assert rig.prefetch("bcdefghijkl") == 1
    for callback in callbacks[1:]:
        callback(future)
    assert rig.tier.statistics().pinned_nbytes == rig.tier.statistics().reserved_nbytes == 0


def test_a_task_takes_the_place_of_what_was_asked_for_it(make, monkeypatch):
    rig = filled(make, 1, "a", "b")
    rig.expect(a=1, b=2)
    gate = gated(rig.device, "copy_to_host", monkeypatch)
    assert rig.prefetch("a") == 1
    assert gate.arrived.acquire(timeout=60)  # b is leaving
    assert rig.prefetch("a") == 0
    with rig.tier.admit("task", [rig.keys["a"]]) as admission:
        assert not admission.granted
        assert waiting(rig) == [Kind.TASK]
        gate.open()
        assert admission.wait(60)
        rig.tier.resolve_all({"a": rig.keys["a"]}, admission)
    assert rig.on_device() == "a"


def waiting(rig):
    with rig.tier.manager._metadata as state:
        return [reservation.kind for reservation in state.memory.line.waiting]


def test_what_is_given_up_meanwhile_is_not_brought(make):
    rig = filled(make, 2, "a", "b")
    skeleton = rig.keys.pop("a")
    rig.tier.manager.discard(skeleton.units[0])
    assert rig.tier.prefetch([skeleton]) == 0


def test_what_was_used_up_last_leaves_last(make):
    rig = make()
    rig.tier.grace = 1
    rig.put("abc")
    rig.expect(a=1, b=2, c=3)
    rig.expect(a=None)
    assert rig.next_use("a") == (1,)
    rig.expect(b=None)
    assert (rig.next_use("a"), rig.next_use("b")) == (None, (2,))
    rig.expect(b=None)  # told again
    assert rig.next_use("b") == (2,)
    for left in ("bc", "b", ""):
        rig.tier.manager.limits.make_room(1)
        assert rig.on_device() == left


def test_what_is_needed_again_is_not_used_up(make):
    rig = make()
    rig.tier.grace = 1
    rig.put("ab")
    rig.expect(a=1, b=2)
    rig.expect(a=None)
    rig.expect(a=3)
    rig.expect(b=None)
    assert (rig.next_use("a"), rig.next_use("b")) == ((3,), (2,))


def test_without_grace_what_was_used_up_leaves_first(make):
    rig = make()
    rig.put("abc")
    rig.expect(a=1, b=2)
    rig.expect(a=None)
    assert rig.next_use("a") is None
    for left in ("bc", "b", ""):
        rig.tier.manager.limits.make_room(1)
        assert rig.on_device() == left


@pytest.mark.parametrize("knows", [True, False])
def test_a_spill_waits_for_what_was_enqueued_for_its_unit(make, monkeypatch, knows):
    rig = make()
    if not knows:
        monkeypatch.setattr(rig.device, "fence", lambda allocation: None)
    x, start = asarray(np.zeros(KB)), rig.device.clock.now()
    with rig.device.use_stream(rig.device.new_stream("producer")):
        run_kernel(np.add, x, 1, out=x, writes=(x,), seconds=2.0)
    with rig.device.use_stream(rig.device.new_stream("somebody else")):
        run_kernel(np.zeros, 3, seconds=100.0)
    rig.keys["x"] = rig.tier.proxify(x)
    del x
    rig.tier.manager.limits.make_room(1)
    assert rig.on_device() == ""
    took = rig.device.clock.now() - start
    assert 2.0 <= took < 3.0 if knows else took >= 100.0
    np.testing.assert_array_equal(asnumpy(rig.tier.resolve(rig.keys["x"])), np.ones(KB))


def test_after_closing_nothing_is_brought(make):
    rig = filled(make, 2, "a", "b")
    rig.expect(a=1, b=2)
    rig.tier.close()
    rig.prefetch("a")
    assert rig.on_device() == "b"
    statistics = rig.tier.statistics()
    assert (statistics.pinned_nbytes, statistics.reserved_nbytes) == (0, 0)
