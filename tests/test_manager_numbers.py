"""What is counted, charged and timed, and making room at once."""

import threading
from collections.abc import Iterator

import pytest

from gpuspill.core.residency import State, Tier
from gpuspill.errors import StorageFull
from gpuspill.testing.managers import ManagerKit
from tests.things import VALUES, Thing, fresh, squeeze


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


def test_everything_is_zero_in_the_end(kit):
    manager = kit.manager
    for kind in VALUES:
        manager.store(kind, fresh(kind))
        manager.store((kind, "lies"), Thing(kind), 10**6)
    squeeze(kit)
    for kind in list(VALUES)[::2]:
        manager.get(kind)
    with manager.admission.admit("output", list(VALUES)[::3], 1000):
        manager.store("output", Thing(), 777)
    for key in list(manager):
        manager.discard(key)
    assert kit.records() == 0
    stats = manager.statistics()
    for name in (
        "keys", "values", "host_keys", "disk_keys", "host_nbytes", "pinned_nbytes", "spilled_nbytes", "disk_nbytes",
        "reserved_nbytes", "waiting", "unspillable", "set_aside",
    ):  # fmt: skip
        assert getattr(stats, name) == 0, name


def test_a_hidden_size_is_learned_and_corrected(kit):
    manager = kit.manager
    manager.store("a", Thing(bytes(1_000_000)), 56)
    assert manager.memory_total() == 56
    kit.spill("a")
    assert manager.nbytes("a") >= 1_000_000
    assert manager.statistics().spilled_nbytes >= 1_000_000
    manager.get("a")
    assert manager.memory_total() >= 1_000_000
    manager.store("b", Thing(bytes(1_000_000)), 56)
    assert manager.nbytes("b") >= 1_000_000, "the next one of the type is charged so from the start"
    for key in "ab":
        manager.discard(key)
    assert manager.memory_total() == 0


def test_what_is_charged_too_much_for_what_others_hid_is_corrected_when_it_is_written(kit):
    manager = kit.manager
    manager.store("hides", Thing(bytes(1_000_000)), 56)
    kit.spill("hides")
    manager.store("honest", Thing(), 100)
    assert manager.nbytes("honest") > 100_000
    kit.spill("honest")
    assert manager.nbytes("honest") == 100
    manager.get("honest")
    assert manager.nbytes("honest") == 100
    assert manager.memory_total() == 100


def test_pinned_bytes_are_those_in_memory(kit):
    manager = kit.manager
    manager.store("a", Thing(), 100)
    manager.store("b", Thing(), 50)
    kit.spill("b")
    pins = manager.admission.pin(["a", "b", "unknown"])
    assert manager.statistics().pinned_nbytes == 100
    manager.get("b")
    assert manager.statistics().pinned_nbytes == 150
    pins.release()
    assert manager.statistics().pinned_nbytes == 0


def test_hits_misses_and_work_on_the_loop(kit):
    manager = kit.manager
    manager.loop_thread = threading.get_ident()
    manager.store("a", Thing())
    manager.get("a"), manager.peek("a"), manager.batch.get_many(["a"])
    stats = manager.statistics()
    assert (stats.hits, stats.misses, stats.loop_io) == (3, 0, 0)
    kit.spill("a")
    assert manager.peek("a") is None
    future = manager.batch.get_many(["a"])
    kit.idle()
    assert future.done()
    stats = manager.statistics()
    assert (stats.hits, stats.misses, stats.loop_io) == (3, 1, 0), "a restore thread has read it"


def test_reading_from_disk_on_the_loop_is_counted(kit):
    kit.manager.store("a", Thing())
    kit.spill("a")
    kit.manager.get("a")
    assert kit.manager.statistics().loop_io == 0
    kit.spill("a")
    kit.manager.loop_thread = threading.get_ident()
    kit.manager.get("a")
    kit.manager.get("a")
    assert kit.manager.statistics().loop_io == 1


def test_reading_touches_looking_does_not():
    for use in ("get", "peek", "get_many", "materialize", "look", "nbytes"):
        kit = ManagerKit()
        manager = kit.manager
        for key in "ab":
            manager.store(key, Thing(key))
        if use == "get_many":
            manager.batch.get_many(["a"])
        elif use == "materialize":
            manager.batch.materialize(admission := manager.admission.admit(None, ["a"]))
            admission.release()
        else:
            getattr(manager, use)("a")
        manager.limits.set_limit(100, None)
        kit.engine.spill_all()
        assert manager.keys_in(Tier.DISK) == (["a"] if use in ("look", "nbytes") else ["b"]), use
        kit.close()


def test_times_are_those_of_the_clock(kit):
    def hook(operation, when):
        if when == "before":
            kit.clock.advance(2 if operation == "write" else 3)

    kit.manager.store("a", Thing())
    kit.store.hook = hook
    kit.spill("a")
    kit.manager.get("a")
    stats = kit.manager.statistics()
    assert (stats.write_seconds, stats.read_seconds) == (2, 3)
    assert stats.written_nbytes == stats.read_nbytes == stats.disk_nbytes > 0


@pytest.mark.parametrize("awaited", [True, False])
def test_the_time_that_somebody_waited(awaited):
    """Not of those who go on whether there is room or not, as tasks do if admission is off."""
    kit = ManagerKit(100)
    kit.manager.store("a", Thing())
    kit.store.hook = lambda operation, when: kit.clock.advance(5)
    admission = kit.manager.admission.admit("out", (), 50)
    told = []
    if awaited:
        admission.add_done_callback(lambda: told.append(True))
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert admission.granted
    assert kit.manager.statistics().wait_seconds == (11 if awaited else 0)
    assert told == [True] * awaited
    admission.release()
    kit.close()


def test_making_room_evicts_what_is_asked_for_whatever_the_limit(kit):
    manager = kit.manager
    for key in range(5):
        manager.store(key, Thing(key))
    assert manager.limits.make_room(150) == 200
    assert manager.keys_in(Tier.DISK) == [0, 1]
    manager.get(0), manager.get(1)
    writes = kit.store.statistics().writes
    assert manager.limits.make_room(1) == 100
    manager.validate()
    assert kit.store.statistics().writes == writes + 1
    held = [manager.get(key) for key in range(5)]
    assert manager.limits.make_room(100) == 0, "everything is in use"
    held.clear()
    with manager.admission.pin(range(5)):
        assert manager.limits.make_room(100) == 0
    assert manager.limits.make_room(10_000) == 500
    assert manager.memory_total() == 0


def test_making_room_when_nothing_can_be_written(kit):
    def hook(operation, when):
        raise StorageFull(28, "full")

    kit.manager.store("a", Thing())
    kit.store.hook = hook
    assert kit.manager.limits.make_room(100) == 0
    kit.manager.validate()
    assert kit.state("a") is State.RESIDENT
