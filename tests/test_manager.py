"""What the manager promises of each method, one at a time."""

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State, Tier
from gpuspill.core.sizes import UNKNOWN_NBYTES
from gpuspill.device.shared_memory import shared_memory
from gpuspill.errors import DataLostError, StorageError
from gpuspill.manager.ports import PickleSerializer
from gpuspill.manager.transaction import Bell
from gpuspill.testing.managers import ManagerKit, bench
from tests.things import SHARED, VALUES, Thing, Unpicklable, assert_same, fresh, squeeze, the_values
from tests.threads import in_thread


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


def test_every_kind_of_value_comes_back(kit):
    for kind in VALUES:
        kit.manager.store(kind, fresh(kind))
    for kind, expected in VALUES.items():
        assert_same(kit.manager.get(kind), expected)
    kit.spill(*VALUES.keys() - SHARED)
    kit.manager.validate()
    for kind, expected in VALUES.items():
        first = kit.manager.get(kind)
        assert_same(first, expected)
        assert kit.manager.get(kind) is first
    kit.manager.validate()


def test_a_restored_array_can_be_written_to(kit):
    kit.manager.store("x", np.zeros(1000))
    kit.spill("x")
    kit.manager.get("x")[:] = 1
    assert kit.manager.get("x").sum() == 1000


def test_store_get_delete(kit):
    manager = kit.manager
    assert len(manager) == 0
    assert list(manager) == manager.keys() == []
    value = Thing()
    manager.store("a", value)
    assert "a" in manager
    assert "b" not in manager
    assert len(manager) == 1
    assert list(manager) == ["a"]
    assert manager.get("a") is manager.peek("a") is value
    assert manager.peek("b", 5) == 5
    assert manager.nbytes("a") == manager.memory_total() == 100
    manager.discard("a")
    assert "a" not in manager
    for missing in (manager.get, manager.discard, manager.nbytes, manager.is_resident, manager.proxy):
        with pytest.raises(KeyError, match="'a'"):
            missing("a")
    assert manager.memory_total() == 0


@pytest.mark.parametrize("key", [("tuple", 1), 1, "1", b"1", 1.5, None, frozenset({1}), "\0/\udcff" * 100])
def test_keys_are_any_hashable(kit, key):
    kit.manager.store(key, Thing(key))
    kit.spill(key)
    assert kit.manager.get(key) == Thing(key)
    kit.manager.discard(key)
    assert kit.records() == 0


def test_a_key_that_is_not_hashable_changes_nothing(kit):
    with pytest.raises(TypeError):
        kit.manager.store([], Thing())
    assert kit.manager.memory_total() == 0
    kit.manager.validate()


def test_keys_that_are_equal_are_one(kit):
    kit.manager.store(1, Thing("int"))
    kit.manager.store(1.0, Thing("float"))
    assert len(kit.manager) == 1
    assert kit.manager.get(True) == Thing("float")


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), 10**30, "many"])
def test_a_size_that_makes_no_sense_is_taken_for_unknown(kit, size):
    """A task that returned a value of it has succeeded: refusing the value would lose it."""
    kit.manager.store("a", Thing(), size)
    assert kit.manager.memory_total() == UNKNOWN_NBYTES
    kit.manager.validate()
    kit.manager.discard("a")
    assert kit.manager.memory_total() == 0


def test_sizeof_is_asked_once_and_outside_the_lock(kit):
    asked = []

    def sizeof(value):
        asked.append(value)
        assert not kit.manager._metadata._lock._is_owned()
        return 5

    kit.manager._intake._sizeof = sizeof
    kit.manager.store("a", Thing())
    assert len(asked) == 1
    assert kit.manager.memory_total() == 5


def test_an_object_under_several_keys_is_charged_once_and_stays_one(kit):
    manager, value = kit.manager, Thing()
    for key in "abc":
        manager.store(key, value)
    del value
    assert manager.memory_total() == 100
    assert manager.get("a") is manager.get("b")
    kit.spill()
    assert kit.records() == 1
    assert manager.get("a") is manager.get("b") is manager.get("c")
    for key in "ab":
        manager.discard(key)
    assert manager.get("c") == Thing()
    manager.discard("c")
    assert manager.memory_total() == kit.records() == 0


def test_storing_the_same_object_over_itself(kit):
    value = Thing()
    for _ in range(3):
        kit.manager.store("a", value)
    assert kit.manager.memory_total() == 100
    assert kit.manager.get("a") is value


@pytest.mark.parametrize("key", ["x", "y"])
@pytest.mark.parametrize("when", ["clean", "while it is written", "while it is read", "evicted and alive"])
def test_a_value_that_was_changed_and_stored_again_is_what_comes_back(kit, unsure, when, key):
    """What is on disk, or on its way there, is what it was before. A task may return its input, under another key."""
    manager = kit.manager
    manager.store("x", Thing("before"))

    def change(value):
        kit.store.hook = lambda operation, at: None
        manager.limits.set_limit(None, None)
        value.content = "after"
        manager.store(key, value)

    if when == "while it is written":
        kit.store.hook = lambda operation, at: change(manager.peek("x")) if at == "after" else None
        squeeze(kit)
    elif when == "clean":
        kit.spill("x")
        value = manager.get("x")
        assert kit.state("x") is State.CLEAN
        change(value)
    else:
        value = manager.get("x")
        while manager.is_resident("x"):  # patience with who holds it comes to an end
            squeeze(kit)
            kit.clock.advance(1)
        manager.limits.set_limit(None, None)
        if when == "while it is read":
            assert manager.uses.prefetch(["x"]) == 1
            change(value)
            assert kit.engine.restore()
        else:
            change(value)
    assert kit.state("x") is State.RESIDENT
    assert kit.records() == 0
    value = None
    kit.spill()
    assert manager.get(key).content == "after"


@pytest.mark.parametrize("touched", [False, True])
def test_another_name_for_a_value_that_nobody_touched_keeps_its_record(kit, touched):
    kit.manager.store("x", Thing("content"))
    kit.spill("x")
    value = kit.manager.get("x")
    assert kit.state("x") is State.CLEAN
    kit.manager.store("y", value, touched=touched)
    del value
    assert kit.state("x") is kit.state("y") is (State.RESIDENT if touched else State.CLEAN)
    squeeze(kit)
    kit.manager.discard("x")
    assert kit.manager.get("y") == Thing("content")
    kit.manager.validate()


def test_what_two_keys_of_one_value_miss_is_counted_once(kit):
    kit.manager.store("x", value := Thing(nbytes=700))
    kit.manager.store("y", value)
    del value
    kit.spill("x", "y")
    with kit.manager.admission.pin(["x", "y"]) as pins:
        assert kit.manager.admission.missing_nbytes(pins.pids) == 700


def test_values_on_their_way_back_and_lost_ones_are_in_no_tier(kit):
    for key in "abc":
        kit.manager.store(key, Thing(key))
    kit.spill("a", "b")

    def numbers():
        statistics = kit.manager.statistics()
        return statistics.host_keys, statistics.disk_keys

    assert numbers() == (1, 2)
    kit.manager.uses.prefetch(["a"])
    assert numbers() == (1, 1)
    kit.engine.restore()
    assert numbers() == (2, 1)
    kit.store.damaged.add(kit.manager._metadata.slots[kit.manager.proxy("b").pid].receipt)
    with pytest.raises(DataLostError):
        kit.manager.get("b")
    assert numbers() == (2, 0)


def test_overwriting_lets_the_old_value_go(kit):
    old = Thing()
    gone = weakref.ref(old)
    kit.manager.store("a", old)
    del old
    kit.manager.store("a", Thing("new"))
    assert gone() is None
    kit.spill("a")
    kit.manager.store("a", Thing("newer"))
    assert kit.records() == 0
    assert kit.manager.get("a") == Thing("newer")


def test_a_value_dies_with_its_last_key(kit):
    value = Thing()
    gone = weakref.ref(value)
    kit.manager.store("a", value)
    kit.manager.store("b", value)
    del value
    kit.manager.discard("a")
    assert gone() is not None
    kit.manager.discard("b")
    assert gone() is None


@pytest.mark.parametrize("nbytes", [10, 10**6])
def test_a_spilled_value_dies(kit, nbytes):
    """Also one that is let go by another thread because it is large."""
    value = Thing(nbytes=nbytes)
    gone = weakref.ref(value)
    kit.manager.store("a", value)
    del value
    kit.spill("a")
    assert gone() is None
    gone = weakref.ref(kit.manager.get("a"))
    kit.manager.discard("a")
    kit.engine.reap_all()
    assert gone() is None


def test_values_that_turn_into_one_when_they_are_read(kit):
    """A record may yield an object that another key holds already."""

    class Odd(Thing):
        def __reduce__(self):
            return the_values, ()

    manager = kit.manager
    manager.store("one", VALUES)
    manager.store("other", Odd())
    kit.spill("other")
    assert manager.get("other") is VALUES
    manager.validate()
    manager.store("third", VALUES)
    manager.validate()
    for key in ("other", "third", "one"):
        assert manager.get(key) is VALUES
        manager.discard(key)
        manager.validate()
    assert manager.memory_total() == 0


def test_a_pinned_value_is_no_victim_and_outlives_its_keys(kit):
    manager = kit.manager
    manager.store("a", Thing("a"))
    kit.spill("a")
    admission = manager.admission.admit(None, ["a"])
    manager.discard("a")
    assert "a" not in manager
    assert manager.batch.materialize(admission) == {"a": Thing("a")}
    squeeze(kit)
    assert manager.memory_total() == 100
    admission.release()
    assert manager.memory_total() == kit.records() == 0


def test_admitting_an_unknown_key_pins_nothing(kit):
    kit.manager.store("a", Thing())
    with pytest.raises(KeyError, match="'b'"):
        kit.manager.admission.admit("out", ["a", "b"], 10)
    stats = kit.manager.statistics()
    assert (stats.pinned_nbytes, stats.reserved_nbytes, stats.waiting) == (0, 0, 0)
    kit.spill("a")


def test_a_key_named_twice_and_two_keys_of_one_value_are_asked_room_for_once(kit):
    manager, value = kit.manager, Thing()
    manager.store("a", value)
    manager.store("b", value)
    del value
    kit.spill()
    admission = manager.admission.admit(None, ["a", "a", "b"])
    assert manager.statistics().reserved_nbytes == 100
    future = manager.batch.materialize_later(admission)
    kit.idle()
    assert future.result(0) == {"a": Thing(), "b": Thing()}
    admission.release()
    assert manager.statistics().pinned_nbytes == 0


def test_evicting_all_twice_at_once_keeps_the_limit():
    """Of two, the one that began first ends first, while the other one is between two values."""
    arrived, goes_on = ({name: threading.Event() for name in ("first", "second")} for _ in range(2))

    def observe(label, value, unit):
        if (label, unit) == ("disk-write", "count"):
            name = threading.current_thread().name
            arrived[name].set()
            assert goes_on[name].wait(60)

    with bench(10_000, observer=observe) as kit:
        kit.manager.store(1, Thing(1), 100)
        kit.manager.store(2, Thing(2), 100)
        threads = [threading.Thread(target=kit.manager.limits.evict_all, name=name) for name in arrived]
        for thread in threads:
            thread.start()
            assert arrived[thread.name].wait(60)
        for thread in threads:
            goes_on[thread.name].set()
            thread.join(60)
            assert not thread.is_alive()
        assert kit.manager.statistics().limit == 10_000
        assert sorted(kit.manager.keys_in(Tier.DISK)) == [1, 2]


def test_who_makes_room_sleeps_until_another_thread_has_made_it(monkeypatch):
    writing, goes_on, asleep = (threading.Event() for _ in range(3))
    wait = Bell.wait

    def tell_and_wait(bell):
        asleep.set()
        wait(bell)

    class Slow(Thing):
        def __reduce__(self):
            writing.set()
            assert goes_on.wait(60)
            return Thing, (self.content,)

    monkeypatch.setattr(Bell, "wait", tell_and_wait)
    with bench(10_000) as kit:
        kit.manager.store(1, Slow(1), 100)
        first = in_thread(kit.manager.limits.make_room, 100)
        assert writing.wait(60)
        second = in_thread(kit.manager.limits.make_room, 100)
        assert asleep.wait(60)
        goes_on.set()
        assert first() == second() == 100


def test_a_bell_counts_rings_before_the_wait_and_forgets_those_before_a_look():
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait()
    bell.ring()
    bell.hush()
    woken = in_thread(bell.wait)
    bell.ring()
    woken()


@pytest.mark.parametrize("nbytes", [0, 100])
def test_evict_all(kit, nbytes):
    """Also of values that take no memory at all, and with one in the way that cannot go."""
    manager = kit.manager
    for key in range(3):
        manager.store(key, Thing(key), nbytes)
    manager.store("bad", Unpicklable(), nbytes)
    held = Thing()
    manager.store("held", held, nbytes)
    manager.limits.set_limit(10_000, None)
    manager.limits.evict_all()
    assert sorted(map(str, manager.keys_in(Tier.HOST))) == ["bad", "held"] if nbytes else True
    assert manager.statistics().limit == 10_000
    manager.validate()


def test_prefetch_takes_free_room_only():
    kit = ManagerKit(250)
    manager = kit.manager
    for key in "abcd":
        manager.store(key, Thing(key))
    kit.engine.spill_all()
    manager.validate()
    spilled = manager.keys_in(Tier.DISK)
    assert manager.uses.prefetch([*manager.keys_in(Tier.HOST), "unknown", *spilled]) == 0
    manager.discard(manager.keys_in(Tier.HOST)[0])
    assert manager.uses.prefetch(spilled) == 1
    assert kit.engine.restore()
    assert manager.is_resident(spilled[0])
    assert manager.statistics().prefetches == 1
    assert manager.statistics().spills == 2
    kit.close()


def test_a_prefetch_that_fails_troubles_nobody(kit):
    def hook(operation, when):
        raise StorageError(5, "broken")

    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = hook
    assert kit.manager.uses.prefetch(["a"]) == 1
    kit.engine.restore()
    kit.store.hook = lambda operation, when: None
    assert kit.manager.get("a") == Thing("a")


def test_a_known_use_keeps_a_value_in_memory():
    kit = ManagerKit()
    manager = kit.manager
    for key in "abc":
        manager.store(key, Thing(key))
    manager.uses.expect("ac", (1.0,), "task")
    manager.limits.set_limit(200, None)
    kit.engine.spill_all()
    assert manager.keys_in(Tier.DISK) == ["b"]
    manager.uses.drop("a", "task")
    manager.limits.set_limit(100, None)
    kit.engine.spill_all()
    assert sorted(manager.keys_in(Tier.DISK)) == ["a", "b"]
    kit.close()


def test_the_offset_spills_and_memory_total_is_without_it():
    kit = ManagerKit(250)
    for key in "ab":
        kit.manager.store(key, Thing(key))
    kit.manager.limits.set_offset(100)
    kit.engine.spill_all()
    assert kit.manager.memory_total() == 100
    kit.manager.limits.set_offset(-100)
    for key in "cde":
        kit.manager.store(key, Thing(key))
    kit.manager.limits.set_offset(-500)
    assert kit.engine.spill_all() == float("inf")
    assert kit.manager.memory_total() == 400
    kit.close()


def test_work_is_reported_without_a_lock_held():
    told: list[tuple[str, float, str]] = []

    def observer(label, value, unit):
        assert not kit.manager._metadata._lock._is_owned()
        told.append((label, value, unit))

    kit = ManagerKit(observer=observer)
    kit.manager.store("a", Thing())
    kit.manager.get("a")
    kit.spill("a")
    kit.manager.get("a")
    kit.manager.batch.materialize(admission := kit.manager.admission.admit(None, ["a"]))
    admission.release()
    assert {(label, unit) for label, _, unit in told} == {
        ("memory-read", "count"), ("memory-read", "bytes"), ("serialize", "seconds"), ("deserialize", "seconds"),
        ("disk-write", "count"), ("disk-write", "bytes"), ("disk-write", "seconds"),
        ("disk-read", "count"), ("disk-read", "bytes"), ("disk-read", "seconds"),
    }  # fmt: skip
    assert sum(value for label, value, unit in told if (label, unit) == ("memory-read", "count")) == 2
    kit.close()


def test_serialisers_and_destructors_run_without_a_lock_held(kit):
    manager = kit.manager
    free = []

    class Careful(Thing):
        def __reduce__(self):
            free.append(not manager._metadata._lock._is_owned())
            return Thing, ("careful",)

        def __del__(self):
            free.append(not manager._metadata._lock._is_owned())
            manager.store("from a destructor", 1)

    for nbytes in (10, 10**6):
        manager.store("a", Careful(nbytes=nbytes))
        manager.store("a", Careful(nbytes=nbytes))
        kit.spill("a")
        manager.store("a", Careful(nbytes=nbytes))
        manager.discard("a")
        kit.engine.reap_all()
    assert len(free) >= 8
    assert all(free)


def test_frames_are_what_the_allocator_gives():
    asked = []

    def allocate(nbytes):
        assert not kit.manager._metadata._lock._is_owned()
        asked.append(nbytes)
        return memoryview(bytearray(nbytes))

    kit = ManagerKit(allocate=allocate)
    kit.manager.store("a", np.arange(100.0))
    kit.spill("a")
    kit.manager.get("a")
    assert asked == [800]
    kit.close()


def test_tasks_come_before_transfers():
    kit = ManagerKit(100)
    kit.manager.store("a", Thing(), 100)
    granted = []
    transfer = kit.manager.admission.reserve(50, Kind.TRANSFER)
    task = kit.manager.admission.admit("t", (), 60, kind=Kind.TASK)
    for name, admission in (("transfer", transfer), ("task", task)):
        admission.add_done_callback(lambda name=name: granted.append(name))
    assert granted == []
    kit.engine.spill_all()
    assert granted == ["task", "transfer"]
    assert (task.overrun, transfer.overrun) == (False, True)
    task.release()
    transfer.release()
    kit.close()


class Broken(PickleSerializer):
    """Says one thing and does another."""

    def dumps(self, value):
        header, frames = super().dumps(value)
        return type("Odd", (tuple,), {})((header, [memoryview(b"")] * 3 + list(frames)))


def test_a_serialiser_may_add_empty_frames():
    kit = ManagerKit(serializer=Broken())
    kit.manager.store("a", [1, 2])
    kit.spill("a")
    assert kit.manager.get("a") == [1, 2]
    kit.close()


def test_small_values_go_last_and_are_waited_for_only_if_they_are_enough():
    """One writes 20,000 records for less than 500 kB, which takes seconds, while 40 MB are asked for."""
    with bench(100_000_000) as kit:
        manager = kit.manager
        for n in range(500):
            manager.store(("small", n), float(n), 24)
        for n in range(9):
            manager.store(("large", n), Thing(n), 10_000_000)
        with manager.admission.admit(None, (), 40_000_000) as admission:
            kit.engine.spill_all()
            assert admission.granted
            assert not admission.overrun
            assert [key[0] for key in manager.keys_in(Tier.DISK)] == ["large"] * 4
        in_use = [key for key in manager if key[0] == "large"]
        with manager.admission.pin(in_use), manager.admission.admit(None, (), 60_000_000) as admission:
            assert admission.overrun, "all 500 would not be enough"
            assert manager.statistics().spills == 4
        with manager.admission.pin(in_use), manager.admission.admit(None, (), 50_000_000 - 100 * 24) as admission:
            assert not admission.granted, "400 of them are enough"
            kit.engine.spill_all()
            assert admission.granted
            assert not admission.overrun
            assert len(manager.keys_in(Tier.DISK)) == 4 + 400
        manager.validate()


def test_where_the_limit_is_low_no_value_is_small(kit):
    """As in distributed's own tests, with a limit of one byte: nobody would spill anything there."""
    kit.manager.store("small", Thing(0), 24)
    kit.manager.store("large", Thing(1), 10_000_000)
    kit.manager.limits.set_limit(10_000_010, None)
    kit.engine.spill_all()
    assert kit.manager.keys_in(Tier.DISK) == ["small"]
    kit.manager.limits.set_limit(1, None)
    kit.engine.spill_all()
    assert kit.manager.keys_in(Tier.DISK) == ["small", "large"]


def test_a_small_view_of_a_large_array_is_not_small():
    with bench(100_000_000, shared=lambda value: shared_memory(value, 100)) as kit:
        kit.manager.store("small", Thing(0), 24)
        kit.manager.store("view", np.ones(12_000_000)[:100], 96_000_000)
        kit.manager.store("more", Thing(1), 10_000_000)
        kit.engine.spill_all()
        kit.engine.reap_all()
        assert kit.manager.keys_in(Tier.DISK) == ["view"]


class Last:
    """Looks, when it goes, at how long the list still is that it was in."""

    def __init__(self, found):
        self.found = found
        self.ident = None

    def __del__(self):
        self.found += [len(each) for each in gc.get_objects() if id(each) == self.ident]


@pytest.mark.parametrize("held", [False, True])
def test_a_long_list_is_let_go_in_pieces(kit, held):
    """Nothing else runs while one piece goes, not even the event loop."""
    found = []
    value = [*([] for _ in range(25_000)), Last(found)]
    value[-1].ident = id(value)
    kit.manager.store("list", value, 10**6)
    if not held:
        del value
    kit.manager.discard("list")
    kit.engine.reap_all()
    if held:
        assert len(value) == 25_001, "somebody else has it"
    else:
        assert found == [15_001]
