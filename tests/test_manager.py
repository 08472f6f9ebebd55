"""What the manager promises of each method, one at a time, and what happens in the middle of a move."""

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State, Tier
from gpuspill.errors import DataLostError, ManagerClosed, RecordCorrupt, StorageError, StorageFull
from gpuspill.serialization import PickleSerializer
from gpuspill.testing.managers import Bench


@pytest.fixture
def kit() -> Iterator[Bench]:
    kit = Bench()
    yield kit
    kit.close()


class Thing:
    """Can be weakly referenced; equal if it holds the same."""

    def __init__(self, content: object = 0, nbytes: int = 100) -> None:
        self.content = content
        self.nbytes = nbytes

    def __eq__(self, other: object) -> bool:
        return type(other) is Thing and other.content == self.content

    __hash__ = None  # type: ignore[assignment]


class Unpicklable(Thing):
    def __reduce__(self):
        raise TypeError("this is not for pickling")


def explode(message: str) -> None:
    raise ValueError(message)


class Unloadable(Thing):
    def __reduce__(self):
        return explode, ("cannot be rebuilt",)


VALUES: dict[str, Any] = {
    "bytes": b"some bytes",
    "empty bytes": b"",
    "bytearray": bytearray(b"more bytes"),
    "list": [1, [2, "three"]],
    "dict": {"a": (1, 2)},
    "None": None,
    "int": 7,
    "large int": 10**30,
    "float": 1.5,
    "true": True,
    "text": "some text that nobody interns",
    "class": Thing,
    "array": np.arange(100.0),
    "view": np.arange(200.0).reshape(10, 20)[2:5, ::2],
    "reversed": np.arange(50.0)[::-1],
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "zero size": np.zeros((0, 3)),
    "zero dimensions": np.array(5.0),
    "structured": np.zeros(5, dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([None, "a", 3], dtype=object),
    "dates": np.array(["2001-02-03", "NaT"], dtype="M8[D]"),
    "thing": Thing("content"),
}


def the_values() -> dict[str, Any]:
    return VALUES


# The interpreter itself refers to these, or the module above does by name: evicting them would free nothing.
SHARED = {"None", "int", "true", "class", "empty bytes"}


def fresh(kind: str) -> Any:
    """Return a value of a kind that nobody else refers to, unless it is one of a kind."""
    value = VALUES[kind]
    if isinstance(value, np.ndarray):
        copy = value.copy(order="K")
        if kind == "view":
            return np.arange(200.0).reshape(10, 20)[2:5, ::2]
        return copy[::-1].copy()[::-1] if kind == "reversed" else copy
    return pickle.loads(pickle.dumps(value))


def assert_same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    if isinstance(expected, np.ndarray):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
        assert value.flags.f_contiguous == expected.flags.f_contiguous or not expected.flags.forc
    else:
        assert value == expected


# -- values come back ----------------------------------------------------------------------------------


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


def test_a_size_that_makes_no_sense_is_refused(kit):
    with pytest.raises(ValueError, match="-1"):
        kit.manager.store("a", Thing(), -1)
    assert "a" not in kit.manager
    kit.manager.validate()


def test_sizeof_is_asked_once_and_outside_the_lock(kit):
    asked = []

    def sizeof(value):
        asked.append(value)
        assert not kit.manager._metadata._lock._is_owned()
        return 5

    kit.manager._sizeof = sizeof
    kit.manager.store("a", Thing())
    assert len(asked) == 1
    assert kit.manager.memory_total() == 5


# -- one object, several keys --------------------------------------------------------------------------


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


# -- held ----------------------------------------------------------------------------------------------


def squeeze(kit: Bench) -> float:
    """Ask for everything to be evicted, once."""
    kit.manager.set_limit(0, None)
    return kit.engine.spill_all()


@pytest.mark.parametrize("kind", sorted(VALUES.keys() - SHARED))
def test_a_value_that_somebody_holds_stays(kind):
    kit = Bench()
    value = fresh(kind)
    kit.manager.store("a", value, 100)
    pause = squeeze(kit)
    assert 0 < pause < float("inf"), "it has to be looked at again"
    assert kit.manager.is_resident("a")
    assert kit.manager.get("a") is value
    assert kit.records() == 0
    del value
    assert kit.engine.spill_all() <= pause, "before its time, nothing happens"
    assert kit.manager.is_resident("a")
    kit.clock.advance(pause)
    kit.engine.spill_all()
    assert not kit.manager.is_resident("a")
    assert_same(kit.manager.get("a"), VALUES[kind])
    kit.close()


def test_a_view_holds_what_it_views(kit):
    array = np.arange(100.0)
    kit.manager.store("a", array)
    view = array[10:20]
    del array
    squeeze(kit)
    assert kit.manager.is_resident("a")
    del view
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert not kit.manager.is_resident("a")


def test_a_container_outside_holds_what_is_in_it(kit):
    kit.manager.store("a", [1, 2])
    outside = {"deep": [kit.manager.get("a")]}
    squeeze(kit)
    assert kit.manager.is_resident("a")
    outside.clear()
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert not kit.manager.is_resident("a")


def test_one_that_is_held_stops_nobody(kit):
    held = Thing("held")
    kit.manager.store("held", held)
    for key in range(10):
        kit.manager.store(key, Thing(key))
    kit.manager.set_limit(100, None)
    kit.engine.spill_all()
    assert kit.manager.memory_total() == 100
    assert kit.manager.keys_in(Tier.HOST) == ["held"]


def test_held_while_it_is_written(kit):
    """Somebody takes it up in the middle of the write: it stays, and the record is a clean copy."""
    taken = []

    def hook(operation, when):
        if (operation, when) == ("write", "before"):
            taken.append(kit.manager.get("a"))

    kit.manager.store("a", Thing("a"))
    kit.store.hook = hook
    squeeze(kit)
    assert kit.state("a") is State.CLEAN
    assert kit.manager.get("a") is taken[0]
    taken.clear()
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED
    assert kit.manager.statistics().spills == 1, "evicting it again is no write"


class Knot(Thing):
    """Refers to itself."""

    def __init__(self, content: object = 0) -> None:
        super().__init__(content)
        self.me = self


def outlast_patience(kit: Bench) -> None:
    squeeze(kit)
    for _ in range(10):
        kit.clock.advance(1)
        kit.engine.spill_all()


def test_a_value_that_refers_to_itself_is_evicted_in_the_end(kit):
    kit.manager.store("a", Knot("a"))
    squeeze(kit)
    assert kit.manager.is_resident("a")
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    gc.collect()
    value = kit.manager.get("a")
    assert value.content == "a"
    assert value.me is value
    del value
    outlast_patience(kit)


def test_an_evicted_value_that_is_alive_comes_back_as_itself(kit):
    value = Knot()
    kit.manager.store("a", value)
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    reads = kit.store.statistics().reads
    assert kit.manager.get("a") is value
    assert kit.store.statistics().reads == reads
    kit.manager.validate()


@pytest.mark.parametrize("key", ["a", "b"])
def test_storing_an_evicted_value_that_is_alive_finds_it(kit, key):
    value = Knot()
    kit.manager.store("a", value)
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    kit.manager.set_limit(None, None)
    kit.manager.store(key, value)
    kit.manager.validate()
    assert kit.manager.get("a") is kit.manager.get(key) is value
    assert kit.manager.memory_total() == 100, "one value, charged once"
    kit.manager.validate()
    assert kit.store.statistics().reads == 0
    kit.manager.discard("a")
    kit.manager.validate()


def test_the_memory_of_an_evicted_value_may_be_used_for_another(kit):
    """What is remembered of the identity of a value that has died is not taken for another one."""
    for n in range(8):
        value = Knot(n)
        kit.manager.store("a", value)
        outlast_patience(kit)
        del value
        gc.collect()
        fresh = Knot("fresh")
        kit.manager.set_limit(None, None)
        kit.manager.store("b", fresh)
        assert kit.manager.get("b") is fresh
        assert kit.manager.get("a").content == n
        kit.manager.validate()
        del fresh
        kit.manager.discard("b")


def test_what_cannot_be_weakly_referenced_is_never_evicted_while_it_is_held(kit):
    knot: list[Any] = [1]
    knot.append(knot)
    kit.manager.store("knot", knot)
    held = b"some bytes that somebody holds" * 10
    kit.manager.store("held", held)
    del knot
    outlast_patience(kit)
    assert kit.manager.get("held") is held
    assert kit.manager.is_resident("knot"), "nobody can tell whether somebody holds it"
    kit.manager.get("knot").clear()


# -- what cannot be spilled, or not now ----------------------------------------------------------------


def test_what_cannot_be_pickled_stays_and_stops_nobody(kit, caplog):
    manager = kit.manager
    for key in range(5):
        manager.store(("bad", key), Unpicklable(key))
        manager.store(("good", key), Thing(key))
    assert squeeze(kit) == float("inf"), "trying again does not help"
    assert sorted(manager.keys_in(Tier.HOST)) == [("bad", key) for key in range(5)]
    assert manager.statistics().unspillable == 5
    assert len(caplog.records) == 1, "one warning for the type"
    assert "Unpicklable" in caplog.text
    assert "not for pickling" in caplog.text
    for key in range(5):
        manager.discard(("bad", key))
    assert manager.statistics().unspillable == 0


def test_what_cannot_be_rebuilt_says_so_each_time_and_is_not_lost(kit):
    kit.manager.store("a", Unloadable())
    kit.spill("a")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be rebuilt"):
            kit.manager.get("a")
        assert kit.state("a") is State.SPILLED
    assert kit.records() == 1
    assert kit.manager.memory_total() == 0


@pytest.mark.parametrize(
    "error", [StorageFull(28, "full"), StorageError(5, "broken"), OSError(4, "signal"), MemoryError()]
)
def test_a_disk_that_fails_is_tried_again_later(kit, error):
    def hook(operation, when):
        raise error

    writes = kit.store.store.statistics
    kit.manager.store("a", Thing("a"))
    kit.store.hook = hook
    pause = squeeze(kit)
    assert 0 < pause <= 0.2
    assert kit.manager.get("a") == Thing("a")
    kit.store.hook = lambda operation, when: None
    kit.engine.spill_all()
    assert writes().writes == 0, "not before its time"
    kit.clock.advance(pause)
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED


def test_a_disk_that_stays_full_is_not_asked_all_the_time(kit):
    asked = []

    def hook(operation, when):
        asked.append(operation)
        raise StorageFull(28, "no space")

    kit.store.hook = hook
    for key in range(10):
        kit.manager.store(key, Thing(key))
    pause = squeeze(kit)
    assert len(asked) == 10
    for _ in range(100):
        pause = kit.engine.spill_all()
    assert len(asked) == 10, "the clock stands still"
    seconds = 0.0
    while seconds < 10:
        kit.clock.advance(pause)
        seconds += pause
        pause = kit.engine.spill_all()
    assert len(asked) < 10 * 10 / 0.2 * 1.5, "ever less often, up to a limit"
    assert all(kit.manager.is_resident(key) for key in range(10))


def test_the_quota(kit, caplog):
    manager = kit.manager
    record = len(pickle.dumps(Thing("x"), protocol=5))
    for key in range(6):
        manager.store(key, Thing("x"))
    manager.set_limit(0, 3 * record)
    kit.engine.spill_all()
    stats = manager.statistics()
    assert (stats.disk_keys, stats.set_aside) == (3, 3)
    assert stats.disk_nbytes <= 3 * record
    assert len(caplog.records) == 1
    assert "max-spill" in caplog.text
    spilled = manager.keys_in(Tier.DISK)
    manager.discard(spilled[0])
    kit.engine.spill_all()
    assert manager.statistics().disk_keys == 3
    manager.set_limit(0, None)
    kit.engine.spill_all()
    assert manager.statistics().disk_keys == 5


def test_a_lower_quota_costs_clean_copies_only(kit):
    manager = kit.manager
    for key in range(4):
        manager.store(key, Thing(key))
    kit.spill()
    for key in (0, 1):
        manager.get(key)
    manager.set_limit(None, 1)
    manager.validate()
    assert kit.records() == 2
    assert [kit.state(key) for key in range(4)] == [State.RESIDENT] * 2 + [State.SPILLED] * 2
    for key in range(4):
        assert manager.get(key) == Thing(key)


def test_a_serialiser_that_is_interrupted_leaves_the_value_where_it_was(kit):
    class Interrupted(Thing):
        def __reduce__(self):
            raise KeyboardInterrupt

    kit.manager.store("a", Interrupted())
    kit.manager.set_limit(0, None)
    with pytest.raises(KeyboardInterrupt):
        kit.engine.spill()
    kit.manager.validate()
    assert kit.state("a") is State.RESIDENT
    kit.manager.set_limit(None, None)


# -- clean copies --------------------------------------------------------------------------------------


def test_evicting_an_unchanged_value_again_writes_nothing(kit):
    kit.manager.store("a", Thing())
    for _ in range(3):
        kit.spill("a")
        kit.manager.get("a")
    assert kit.store.statistics().writes == 1
    assert kit.manager.statistics().clean_drops == 2


def test_without_clean_copies_what_is_in_memory_is_what_is_written():
    kit = Bench(keep_clean=False)
    kit.manager.store("a", Thing(0))
    for n in range(1, 4):
        kit.spill("a")
        value = kit.manager.get("a")
        assert kit.records() == 0
        assert value.content == n - 1
        value.content = n
        del value
    assert kit.store.statistics().writes == 3
    kit.close()


def test_without_clean_copies_a_spill_that_is_no_longer_needed_leaves_nothing():
    kit = Bench(keep_clean=False)
    kit.manager.store("a", Thing(0))

    def hook(operation, when):
        if operation == "write":
            kit.manager.set_limit(None, None)

    kit.store.hook = hook
    squeeze(kit)
    assert kit.state("a") is State.RESIDENT
    assert kit.records() == 0
    kit.manager.get("a").content = 1
    kit.store.hook = lambda operation, when: None
    kit.spill("a")
    assert kit.manager.get("a").content == 1
    kit.close()


# -- loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_lost_value_is_lost_for_every_key_and_for_good(kit, how, caplog):
    manager, value = kit.manager, Thing()
    manager.store("a", value)
    manager.store("b", value)
    manager.store("other", Thing("other"))
    del value
    kit.spill()
    receipt = manager._metadata.slots[manager.proxy("a").pid].receipt
    if how == "gone":
        kit.store.delete(receipt)
    else:
        kit.store.damaged.add(receipt)
    for key in "abab":
        with pytest.raises(DataLostError) as caught:
            manager.get(key)
        assert caught.value.key == key
        assert repr(key) in str(caught.value)
        assert kit.state(key) is State.LOST
    future = manager.get_many(["other", "b"])
    kit.idle()
    with pytest.raises(DataLostError) as caught:
        future.result(0)
    assert caught.value.key == "b"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert manager.get("other") == Thing("other")
    manager.validate()
    stats = manager.statistics()
    assert stats.lost == 1
    assert stats.host_nbytes == 100, "what is lost takes no memory"
    assert stats.disk_keys == 0
    manager.discard("a")
    with pytest.raises(DataLostError, match="'b'"):
        manager.get("b")
    manager.store("b", Thing("again"))
    assert manager.get("b") == Thing("again")


def test_a_read_that_fails_is_tried_once_more_then_reported_and_nothing_is_lost(kit):
    failures = iter(["once", None, "first", "second"])

    def hook(operation, when):
        if when == "before" and (error := next(failures, None)):
            raise StorageError(5, error)

    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = hook
    assert kit.manager.get("a") == Thing("a")
    kit.store.hook = lambda operation, when: None
    kit.spill("a")
    kit.store.hook = hook
    with pytest.raises(StorageError, match="second"):
        kit.manager.get("a")
    assert kit.state("a") is State.SPILLED
    assert kit.manager.get("a") == Thing("a")


# -- accounting ----------------------------------------------------------------------------------------


def test_everything_is_zero_in_the_end(kit):
    manager = kit.manager
    for kind in VALUES:
        manager.store(kind, fresh(kind))
        manager.store((kind, "lies"), Thing(kind), 10**6)
    squeeze(kit)
    for kind in list(VALUES)[::2]:
        manager.get(kind)
    with manager.admit("output", list(VALUES)[::3], 1000):
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
    assert manager.quiet


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


def test_pinned_bytes_are_those_in_memory(kit):
    manager = kit.manager
    manager.store("a", Thing(), 100)
    manager.store("b", Thing(), 50)
    kit.spill("b")
    pins = manager.pin(["a", "b", "unknown"])
    assert manager.statistics().pinned_nbytes == 100
    manager.get("b")
    assert manager.statistics().pinned_nbytes == 150
    pins.release()
    assert manager.statistics().pinned_nbytes == 0


# -- pins ----------------------------------------------------------------------------------------------


def test_a_pinned_value_is_no_victim_and_outlives_its_keys(kit):
    manager = kit.manager
    manager.store("a", Thing("a"))
    kit.spill("a")
    admission = manager.admit(None, ["a"])
    manager.discard("a")
    assert "a" not in manager
    assert manager.materialize(admission) == {"a": Thing("a")}
    squeeze(kit)
    assert manager.memory_total() == 100
    admission.release()
    assert manager.memory_total() == kit.records() == 0


def test_admitting_an_unknown_key_pins_nothing(kit):
    kit.manager.store("a", Thing())
    with pytest.raises(KeyError, match="'b'"):
        kit.manager.admit("out", ["a", "b"], 10)
    stats = kit.manager.statistics()
    assert (stats.pinned_nbytes, stats.reserved_nbytes, stats.waiting) == (0, 0, 0)
    kit.spill("a")


def test_a_key_named_twice_and_two_keys_of_one_value_are_asked_room_for_once(kit):
    manager, value = kit.manager, Thing()
    manager.store("a", value)
    manager.store("b", value)
    del value
    kit.spill()
    admission = manager.admit(None, ["a", "a", "b"])
    assert manager.statistics().reserved_nbytes == 100
    future = manager.materialize_later(admission)
    kit.idle()
    assert future.result(0) == {"a": Thing(), "b": Thing()}
    admission.release()
    assert manager.statistics().pinned_nbytes == 0


# -- in the middle of a move ---------------------------------------------------------------------------


def test_deleted_while_it_is_written(kit):
    kit.manager.store("a", Thing())
    for when in ("before", "after"):
        kit.store.hook = lambda operation, at, when=when: kit.manager.discard("a") if at == when else None
        squeeze(kit)
        kit.store.hook = lambda operation, at: None
        assert "a" not in kit.manager
        assert kit.records() == kit.manager.memory_total() == 0
        kit.manager.store("a", Thing())


def test_overwritten_while_it_is_written(kit):
    def hook(operation, when):
        kit.store.hook = lambda operation, when: None
        kit.manager.store("a", Thing("new"))

    kit.manager.store("a", Thing("old"))
    kit.store.hook = hook
    squeeze(kit)
    assert kit.manager.get("a") == Thing("new")
    kit.manager.discard("a")
    assert kit.records() == 0


def test_deleted_while_it_is_read_is_delivered_and_leaves_nothing(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = lambda operation, when: kit.manager.discard("a") if when == "before" else None
    assert kit.manager.get("a") == Thing("a")
    assert "a" not in kit.manager
    assert kit.records() == kit.manager.memory_total() == 0


def test_overwritten_while_it_is_read(kit):
    """The reader asked for the value that the key held then; the key holds the new one."""
    kit.manager.store("a", Thing("old"))
    kit.spill("a")
    kit.store.hook = lambda operation, when: kit.manager.store("a", Thing("new")) if when == "before" else None
    assert kit.manager.get("a") == Thing("old")
    assert kit.manager.get("a") == Thing("new")
    assert kit.records() == 0
    assert kit.manager.memory_total() == 100


def test_deleted_while_its_read_fails(kit):
    def hook(operation, when):
        if "a" in kit.manager:
            kit.manager.discard("a")
        raise StorageError(5, "broken")

    kit.manager.store("a", Thing())
    kit.spill("a")
    kit.store.hook = hook
    with pytest.raises(StorageError):
        kit.manager.get("a")
    assert kit.records() == kit.manager.memory_total() == 0


def test_lost_and_overwritten_meanwhile(kit):
    def hook(operation, when):
        kit.manager.store("a", Thing("new"))
        raise RecordCorrupt("damaged")

    kit.manager.store("a", Thing("old"))
    kit.spill("a")
    kit.store.hook = hook
    with pytest.raises(DataLostError):
        kit.manager.get("a")
    assert kit.manager.get("a") == Thing("new")


def test_pinned_while_it_is_written_stays(kit):
    pins = []
    kit.manager.store("a", Thing("a"))
    kit.store.hook = lambda operation, when: pins.append(kit.manager.pin(["a"]))
    squeeze(kit)
    assert kit.state("a") is State.CLEAN
    for pin in pins:
        pin.release()
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED


def test_pinned_while_its_write_fails(kit):
    pins = []

    def hook(operation, when):
        pins.append(kit.manager.pin(["a"]))
        raise StorageFull(28, "full")

    kit.manager.store("a", Thing("a"))
    kit.store.hook = hook
    squeeze(kit)
    kit.manager.validate()
    assert kit.state("a") is State.RESIDENT
    kit.store.hook = lambda operation, when: None
    pins.pop().release()
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED


def test_closed_while_it_is_written(kit):
    kit.manager.store("a", Thing("a"))
    kit.store.hook = lambda operation, when: kit.manager.close()
    squeeze(kit)
    assert kit.manager.get("a") == Thing("a")
    assert kit.records() == 0


def test_closed_while_it_is_read(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = lambda operation, when: kit.manager.close() if when == "before" else None
    with pytest.raises(ManagerClosed):
        kit.manager.get("a")
    kit.manager.validate()


# -- between two steps of one call -----------------------------------------------------------------------


class Interposer:
    """Stands in for the metadata lock; does something once, right after its n-th release."""

    def __init__(self, lock: Any, nth: int, action: Any) -> None:
        self.lock, self.left, self.action = lock, nth, action
        self.depth = 0

    def acquire(self) -> None:
        self.lock.acquire()
        self.depth += 1

    def release(self) -> None:
        self.depth -= 1
        self.lock.release()
        if self.depth == 0:
            self.left -= 1
            if self.left == 0:
                self.action()

    def _is_owned(self) -> bool:
        return self.lock._is_owned()


ACTIONS = {
    "discard": lambda kit: kit.manager.discard("a"),
    "overwrite": lambda kit: kit.manager.store("a", Thing("new")),
    "alias": lambda kit: kit.manager.store("b", kit.manager.get("a")),
    "get": lambda kit: kit.manager.get("a"),
    "get_many": lambda kit: kit.manager.get_many(["a"]),
    "peek": lambda kit: kit.manager.peek("a"),
    "prefetch": lambda kit: kit.manager.prefetch(["a"]),
    "spill": lambda kit: kit.engine.spill(),
    "pin": lambda kit: kit.pins.append(kit.manager.pin(["a"])),
    "materialize": lambda kit: materialize(kit),
    "export": lambda kit: kit.futures.append(kit.manager.export(kit.manager.pin(["a"]))),
    "limit": lambda kit: kit.manager.set_limit(None, None),
    "close": lambda kit: kit.manager.close(),
}

#: These wait for a restore in flight, which in one thread would be for ever.
BLOCKING = {"get", "materialize", "alias"}


def materialize(kit: Bench) -> Any:
    with kit.manager.admit(None, ["a"]) as admission:
        return kit.manager.materialize(admission)


@pytest.mark.parametrize("start", ["in memory", "on disk", "clean"])
@pytest.mark.parametrize("first", sorted(ACTIONS))
def test_anything_between_any_two_steps_of_anything(first, start):
    """One call is cut at each place where it lets go of the lock, and another one is put in."""
    for second in sorted(ACTIONS):
        for nth in range(1, 12):
            kit = Bench()
            kit.pins, kit.futures = [], []
            manager = kit.manager
            manager.store("a", Thing("old"))
            manager.store("other", Thing("other"))
            if start != "in memory":
                kit.spill("a")
            if start == "clean":
                manager.get("a")
            manager.set_limit(100, None)
            happened = []

            def act(second=second, kit=kit, happened=happened):
                entry = kit.manager._ledger.keys.get("a")
                moving = entry is not None and entry.residency.state is State.RESTORING
                if second in BLOCKING and moving:
                    happened.append("not this one")
                    return
                happened.append(second)
                try:
                    ACTIONS[second](kit)
                except (KeyError, ManagerClosed) as error:
                    happened.append(type(error))

            interposer = Interposer(manager._metadata._lock, nth, act)
            manager._metadata._lock = interposer
            what = f"{second} after {nth} steps of {first}, {start}"
            try:
                result = ACTIONS[first](kit)
            except KeyError:
                assert second == "discard" or KeyError in happened, what
            except ManagerClosed:
                assert "close" in (first, second), what
            else:
                if first == "get":
                    assert result.content in ("old", "new"), what
            if not happened:
                break  # there are no more steps
            manager._metadata._lock = interposer.lock
            manager.validate()
            while kit.engine.restore():
                manager.validate()
            kit.engine.spill_all()
            manager.validate()
            for pin in kit.pins:
                pin.release()
            for future in kit.futures:
                assert future.done(), what
            manager.validate()
            for key in list(manager):
                while kit.engine.restore():
                    pass
                try:
                    assert manager.get(key).content in ("old", "new", "other"), what
                except ManagerClosed:
                    assert "close" in (first, second), what
                manager.discard(key)
            kit.futures.clear()
            if first != "export" and second != "export":
                assert manager.memory_total() == 0, what
                assert kit.records() == 0, what
            kit.close()


# -- get_many ------------------------------------------------------------------------------------------


def test_get_many_is_done_already_when_everything_is_in_memory(kit):
    values = {key: Thing(key) for key in range(5)}
    for key, value in values.items():
        kit.manager.store(key, value)
    future = kit.manager.get_many(values)
    assert future.done()
    assert future.result() == values
    assert kit.manager.get_many([]).result(0) == {}
    assert kit.manager.get_many(["unknown"], missing="omit").result(0) == {}


def test_get_many_reads_what_is_on_disk_and_lets_go_of_everything(kit):
    for key in range(5):
        kit.manager.store(key, Thing(key))
    kit.spill(0, 1, 2)
    future = kit.manager.get_many(range(5))
    assert not future.done()
    assert kit.manager.statistics().pinned_nbytes == 500
    while kit.engine.restore():
        kit.manager.validate()
    assert future.result(0) == {key: Thing(key) for key in range(5)}
    stats = kit.manager.statistics()
    assert (stats.pinned_nbytes, stats.reserved_nbytes) == (0, 0)


def test_get_many_of_an_unknown_key(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    with pytest.raises(KeyError, match="'b'"):
        kit.manager.get_many(["a", "b"])
    assert kit.manager.statistics().reserved_nbytes == 0
    future = kit.manager.get_many(["a", "b"], missing="omit")
    kit.engine.restore()
    assert future.result(0) == {"a": Thing("a")}


def test_get_many_delivers_what_is_deleted_or_overwritten_meanwhile(kit):
    for key in "ab":
        kit.manager.store(key, Thing(key))
    kit.spill()
    future = kit.manager.get_many("ab")
    kit.manager.discard("a")
    kit.manager.store("b", Thing("new"))
    kit.idle()
    assert future.result(0) == {"a": Thing("a"), "b": Thing("b")}
    future = None
    kit.manager.discard("b")
    assert kit.records() == kit.manager.memory_total() == 0


@pytest.mark.parametrize("when", ["waiting", "queued", "reading", "done"])
def test_cancelling_get_many_leaves_everything_in_order(when):
    kit = Bench(1000)
    manager = kit.manager
    manager.store("a", Thing("a"))
    kit.spill("a")
    if when == "waiting":
        held = Thing("held")
        manager.store("in the way", held, 1000)
        manager.store("could go", Thing(), 500)
    future = manager.get_many(["a"])
    if when == "waiting":
        assert manager.statistics().waiting == 1
    if when == "reading":
        kit.store.hook = lambda operation, at: future.cancel() if at == "before" else None
        kit.engine.restore()
    elif when == "done":
        kit.engine.restore()
        assert not future.cancel()
        assert future.result() == {"a": Thing("a")}
    else:
        assert future.cancel()
    if when != "done":
        with pytest.raises(CancelledError):
            future.result(0)
    manager.validate()
    kit.idle()
    stats = manager.statistics()
    assert (stats.pinned_nbytes, stats.reserved_nbytes, stats.waiting) == (0, 0, 0)
    assert manager.get("a") == Thing("a")
    kit.close()


def test_what_get_many_delivers_is_not_kept_alive(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    future = kit.manager.get_many(["a"])
    kit.engine.restore()
    gone = weakref.ref(future.result()["a"])
    del future
    kit.spill("a")
    assert gone() is None


def test_a_set_then_get_many_never_raises_and_a_delete_then_get_many_always_does(kit):
    for start in ("in memory", "on disk"):
        kit.manager.store("a", Thing(start))
        if start == "on disk":
            kit.spill("a")
        future = kit.manager.get_many(["a"])
        kit.idle()
        assert future.result(0) == {"a": Thing(start)}
        kit.manager.discard("a")
        with pytest.raises(KeyError):
            kit.manager.get_many(["a"])


def test_readers_of_one_value_share_one_read(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    futures = [kit.manager.get_many(["a"]) for _ in range(3)]
    assert kit.manager.prefetch(["a"]) == 0, "it is on its way"
    while kit.engine.restore():
        pass
    values = [future.result(0)["a"] for future in futures]
    assert values[0] is values[1] is values[2]
    assert kit.store.statistics().reads == 1


def test_a_failed_read_is_reported_to_all_who_wait_and_can_be_repeated(kit):
    def hook(operation, when):
        raise StorageError(5, "broken")

    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    futures = [kit.manager.get_many(["a"]) for _ in range(3)]
    kit.store.hook = hook
    while kit.engine.restore():
        pass
    for future in futures:
        with pytest.raises(StorageError, match="broken"):
            future.result(0)
    kit.store.hook = lambda operation, when: None
    assert kit.manager.get("a") == Thing("a")


# -- closing ---------------------------------------------------------------------------------------------


def test_after_closing(kit):
    manager = kit.manager
    manager.store("memory", Thing("memory"))
    manager.store("disk", Thing("disk"))
    kit.spill("disk")
    pending = manager.get_many(["memory", "disk"])
    manager.close()
    manager.close()
    assert kit.records() == 0
    assert pending.done()
    with pytest.raises(ManagerClosed):
        pending.result()
    assert manager.get("memory") == Thing("memory")
    with pytest.raises(ManagerClosed):
        manager.get("disk")
    with pytest.raises(ManagerClosed):
        manager.get_many(["disk"]).result(0)
    assert manager.prefetch(["disk"]) == 0
    manager.store("new", Thing("new"))
    assert manager.get("new") == Thing("new")
    admission = manager.admit("out", ["memory"], 10**9)
    assert admission.granted
    admission.release()
    for key in list(manager):
        manager.discard(key)
    assert manager.memory_total() == 0


def test_nothing_is_spilled_or_waited_for_after_closing(kit):
    kit.manager.store("a", Thing())
    kit.manager.close()
    kit.manager.set_limit(1, None)
    assert kit.manager.admit("out", (), 10**9).granted
    kit.manager.evict_all()
    assert kit.manager.is_resident("a")
    assert kit.store.statistics().writes == 0


def test_closing_grants_what_waits():
    kit = Bench(100)
    kit.manager.store("a", Thing())
    waits = kit.manager.admit("out", (), 50)
    assert not waits.granted
    kit.manager.close()
    assert waits.granted
    assert waits.wait(0)
    waits.release()


def test_a_closed_manager_lets_its_values_go(kit):
    value = Thing()
    gone = weakref.ref(value)
    other = Bench()
    other.manager.store("a", value)
    del value
    other.close()
    del other
    assert gone() is None


# -- the rest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 100])
def test_evict_all(kit, nbytes):
    """Also of values that take no memory at all, and with one in the way that cannot go."""
    manager = kit.manager
    for key in range(3):
        manager.store(key, Thing(key), nbytes)
    manager.store("bad", Unpicklable(), nbytes)
    held = Thing()
    manager.store("held", held, nbytes)
    manager.set_limit(10_000, None)
    manager.evict_all()
    assert sorted(map(str, manager.keys_in(Tier.HOST))) == ["bad", "held"] if nbytes else True
    assert manager.statistics().limit == 10_000
    manager.validate()


def test_prefetch_takes_free_room_only():
    kit = Bench(250)
    manager = kit.manager
    for key in "abcd":
        manager.store(key, Thing(key))
    kit.engine.spill_all()
    manager.validate()
    spilled = manager.keys_in(Tier.DISK)
    assert manager.prefetch([*manager.keys_in(Tier.HOST), "unknown", *spilled]) == 0
    manager.discard(manager.keys_in(Tier.HOST)[0])
    assert manager.prefetch(spilled) == 1
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
    assert kit.manager.prefetch(["a"]) == 1
    kit.engine.restore()
    kit.store.hook = lambda operation, when: None
    assert kit.manager.get("a") == Thing("a")


def test_a_known_use_keeps_a_value_in_memory():
    kit = Bench()
    manager = kit.manager
    for key in "abc":
        manager.store(key, Thing(key))
    manager.expect_uses("ac", (1.0,), "task")
    manager.set_limit(200, None)
    kit.engine.spill_all()
    assert manager.keys_in(Tier.DISK) == ["b"]
    manager.drop_uses("a", "task")
    manager.set_limit(100, None)
    kit.engine.spill_all()
    assert sorted(manager.keys_in(Tier.DISK)) == ["a", "b"]
    kit.close()


def test_the_offset_spills_and_memory_total_is_without_it():
    kit = Bench(250)
    for key in "ab":
        kit.manager.store(key, Thing(key))
    kit.manager.set_offset(100)
    kit.engine.spill_all()
    assert kit.manager.memory_total() == 100
    kit.manager.set_offset(-100)
    for key in "cde":
        kit.manager.store(key, Thing(key))
    kit.manager.set_offset(-500)
    assert kit.engine.spill_all() == float("inf")
    assert kit.manager.memory_total() == 400
    kit.close()


def test_work_is_reported_without_a_lock_held():
    told: list[tuple[str, float, str]] = []

    def observer(label, value, unit):
        assert not kit.manager._metadata._lock._is_owned()
        told.append((label, value, unit))

    kit = Bench(observer=observer)
    kit.manager.store("a", Thing())
    kit.manager.get("a")
    kit.spill("a")
    kit.manager.get("a")
    kit.manager.materialize(admission := kit.manager.admit(None, ["a"]))
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

    kit = Bench(allocate=allocate)
    kit.manager.store("a", np.arange(100.0))
    kit.spill("a")
    kit.manager.get("a")
    assert asked == [800]
    kit.close()


def test_tasks_come_before_transfers():
    kit = Bench(100)
    kit.manager.store("a", Thing(), 100)
    granted = []
    transfer = kit.manager.reserve(50, Kind.TRANSFER)
    task = kit.manager.admit("t", (), 60, kind=Kind.TASK)
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
    kit = Bench(serializer=Broken())
    kit.manager.store("a", [1, 2])
    kit.spill("a")
    assert kit.manager.get("a") == [1, 2]
    kit.close()


# -- numbers -----------------------------------------------------------------------------------------------


def test_hits_misses_and_work_on_the_loop(kit):
    manager = kit.manager
    manager.loop_thread = threading.get_ident()
    manager.store("a", Thing())
    manager.get("a"), manager.peek("a"), manager.get_many(["a"])
    stats = manager.statistics()
    assert (stats.hits, stats.misses, stats.loop_io) == (3, 0, 0)
    kit.spill("a")
    assert manager.peek("a") is None
    future = manager.get_many(["a"])
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
        kit = Bench()
        manager = kit.manager
        for key in "ab":
            manager.store(key, Thing(key))
        if use == "get_many":
            manager.get_many(["a"])
        elif use == "materialize":
            manager.materialize(admission := manager.admit(None, ["a"]))
            admission.release()
        else:
            getattr(manager, use)("a")
        manager.set_limit(100, None)
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


def test_the_time_that_somebody_waited():
    kit = Bench(100)
    kit.manager.store("a", Thing())
    kit.store.hook = lambda operation, when: kit.clock.advance(5)
    admission = kit.manager.admit("out", (), 50)
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert admission.granted
    assert kit.manager.statistics().wait_seconds == 11
    admission.release()
    kit.close()


# -- room at once ------------------------------------------------------------------------------------------


def test_making_room_evicts_what_is_asked_for_whatever_the_limit(kit):
    manager = kit.manager
    for key in range(5):
        manager.store(key, Thing(key))
    assert manager.make_room(150) == 200
    assert manager.keys_in(Tier.DISK) == [0, 1]
    manager.get(0), manager.get(1)
    writes = kit.store.statistics().writes
    assert manager.make_room(1) == 100
    manager.validate()
    assert kit.store.statistics().writes == writes + 1
    held = [manager.get(key) for key in range(5)]
    assert manager.make_room(100) == 0, "everything is in use"
    held.clear()
    with manager.pin(range(5)):
        assert manager.make_room(100) == 0
    assert manager.make_room(10_000) == 500
    assert manager.memory_total() == 0


def test_making_room_when_nothing_can_be_written(kit):
    def hook(operation, when):
        raise StorageFull(28, "full")

    kit.manager.store("a", Thing())
    kit.store.hook = hook
    assert kit.manager.make_room(100) == 0
    kit.manager.validate()
    assert kit.state("a") is State.RESIDENT
