"""What cannot be written, now or ever, what cannot be read, and what is lost."""

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest

from gpuspill.core.residency import State, Tier
from gpuspill.errors import DataLostError, StorageError, StorageFull, cut_loose
from gpuspill.manager.ports import PickleSerializer
from gpuspill.testing.managers import ManagerKit, bench
from tests.things import Delegating, Endless, Exiting, Nested, Thing, Unloadable, Unpicklable, squeeze


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


@pytest.mark.fault("value cannot be serialised", on="host→disk", outcome="stays in memory; others go instead")
@pytest.mark.parametrize(
    ("kind", "message"), [(Unpicklable, "not for pickling"), (Endless, "RecursionError"), (Nested, "RecursionError")]
)
def test_what_cannot_be_pickled_stays_and_stops_nobody(kit, caplog, kind, message):
    manager = kit.manager
    for key in range(5):
        manager.store(("bad", key), kind(key))
        manager.store(("good", key), Thing(key))
    assert squeeze(kit) == float("inf"), "trying again does not help"
    assert sorted(manager.keys_in(Tier.HOST)) == [("bad", key) for key in range(5)]
    assert manager.statistics().unspillable == 5
    assert len(caplog.records) == 1, "one warning for the type"
    assert kind.__name__ in caplog.text
    assert message in caplog.text
    for key in range(5):
        manager.discard(("bad", key))
    assert manager.statistics().unspillable == 0


class _Unshowable(type):
    def __repr__(cls):
        raise ValueError("nor this")

    @property
    def __module__(cls):
        raise ValueError("nor where it comes from")


class _Mute(TypeError):
    def __str__(self):
        raise ValueError("no words")


class _Sulking(Thing, metaclass=_Unshowable):
    def __reduce__(self):
        raise _Mute


class _Key(str):
    __slots__ = ()

    def __repr__(self):
        raise ValueError("no name")


@pytest.mark.parametrize("key", ["bad", _Key("bad")])
def test_nothing_of_what_cannot_be_pickled_can_be_shown(kit, caplog, key):
    """Composing the message must not leave the spill in flight, for which others would wait for ever."""
    kit.manager.store(key, _Sulking())
    kit.manager.store("good", Thing())
    assert squeeze(kit) == float("inf")
    assert list(kit.manager.keys_in(Tier.HOST)) == ["bad"]
    assert kit.manager.statistics().unspillable == 1
    assert "<cannot be shown: ValueError>" in caplog.text
    assert kit.manager.admission.reserve(10**9).granted
    kit.manager.validate()


def test_the_message_of_an_error_is_not_the_whole_value(kit, caplog):
    class Talking(Thing):
        def __reduce__(self):
            raise TypeError("word " * 100_000)

    kit.manager.store("bad", Talking())
    squeeze(kit)
    assert len(caplog.text) < 2000
    assert "word word" in caplog.text


def test_a_value_that_would_end_the_thread_does_not(kit, caplog):
    kit.manager.store("bad", Exiting())
    kit.manager.store("good", Thing())
    thread = threading.Thread(target=kit.manager.limits.evict_all)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert list(kit.manager.keys_in(Tier.HOST)) == ["bad"]
    assert kit.manager.statistics().unspillable == 1
    assert "SystemExit: not here" in caplog.text


class KeepsItsErrors(PickleSerializer):
    """As dask does, which makes the error, its traceback and the frame in it refer to each other, and to the value."""

    def dumps(self, value):
        try:
            return super().dumps(value)
        except Exception as error:
            kept = error
            raise TypeError("could not serialise") from kept


def test_what_could_not_be_serialised_is_let_go_of_at_once():
    with bench(serializer=KeepsItsErrors()) as kit:
        value = Unpicklable()
        ghost = weakref.ref(value)
        kit.manager.store("a", value)
        del value
        gc.disable()
        try:
            squeeze(kit)
            assert kit.manager.statistics().unspillable == 1
            kit.manager.discard("a")
            assert ghost() is None
        finally:
            gc.enable()


class Wordy:
    """As some libraries do, it names in the error all that it is."""

    def __reduce__(self):
        raise TypeError("cannot pickle " + "a long value " * 1000)


def test_one_line_says_what_cannot_be_serialised_however_long_the_error(kit, caplog):
    kit.manager.store("a", Wordy())
    squeeze(kit)
    (line,) = [record.getMessage() for record in caplog.records if "cannot serialise" in record.getMessage()]
    assert "'a'" in line
    assert "Wordy" in line
    assert "cannot pickle a long value" in line
    assert len(line) < 1000


def test_errors_that_lead_to_themselves_are_cut_loose():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            first = error
            raise ValueError("second") from error
    except ValueError as error:
        second = error
    first.__cause__ = second
    second.__cause__ = second
    cut_loose(second)
    assert first.__traceback__ is None
    assert second.__traceback__ is None


@pytest.mark.fault("value cannot be rebuilt", on="disk→host", outcome="an error each time; not lost")
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [(Unloadable, ValueError, "cannot be rebuilt"), (Delegating, RecursionError, "maximum recursion depth")],
)
def test_what_cannot_be_rebuilt_says_so_each_time_and_is_not_lost(kit, kind, error, message):
    kit.manager.store("a", kind())
    kit.spill("a")
    for _ in range(2):
        with pytest.raises(error, match=message):
            kit.manager.get("a")
        assert kit.state("a") is State.SPILLED
    assert kit.records() == 1
    assert kit.manager.memory_total() == 0


@pytest.mark.fault("disk full", on="host→disk", outcome="stays in memory, tried again")
@pytest.mark.fault("host memory runs out", on="host→disk", outcome="stays in memory, tried again")
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
    assert 0.2 <= pause <= 0.3
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
    assert len(asked) - 10 <= 8 * 7, "a few of them after 0.25, 0.5, 1, 2, 4, 4 seconds"
    assert all(kit.manager.is_resident(key) for key in range(10))


class Disk:
    """A store's disk on which only values below a size find room; it notes when what was tried."""

    def __init__(self, kit: ManagerKit, room: float = 0) -> None:
        self.kit, self.room = kit, room
        self.refused: list[float] = []
        write = kit.store.write

        def write_if_it_fits(header, frames):
            if len(header) + sum(memoryview(frame).nbytes for frame in frames) > self.room:
                self.refused.append(kit.clock())
                raise StorageFull(28, "no space")
            return write(header, frames)

        kit.store.write = write_if_it_fits

    def pass_time(self, seconds: float, step: float = 0.01) -> None:
        for _ in range(round(seconds / step)):
            self.kit.clock.advance(step)
            self.kit.engine.spill_all()

    def waits(self) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.refused)]


def test_a_value_that_finds_no_room_on_disk_is_tried_ever_less_often(kit):
    disk = Disk(kit)
    kit.manager.store("a", Thing("a" * 1000))
    squeeze(kit)
    disk.pass_time(20)
    assert disk.waits() == pytest.approx([0.25, 0.5, 1, 2, 4, 4, 4, 4], abs=0.011)
    disk.room = 10_000
    disk.pass_time(4)
    assert kit.state("a") is State.SPILLED


def test_small_values_that_are_spilled_do_not_make_a_large_one_be_tried_more_often(kit):
    disk = Disk(kit, room=500)
    kit.manager.store("large", Thing("a" * 1000))
    squeeze(kit)
    for n in range(500):
        kit.manager.store(("small", n), Thing(n))
        disk.pass_time(0.01)
        assert kit.state(("small", n)) is State.SPILLED, "nobody waits for the large one"
    assert len(disk.refused) == 5, "at 0, 0.25, 0.75, 1.75 and 3.75 seconds of 5"


def test_using_a_value_makes_no_room_on_disk(kit):
    disk = Disk(kit)
    kit.manager.store("a", Thing("a"))
    squeeze(kit)
    for _ in range(20):
        kit.manager.admission.pin(["a"]).release()
        kit.manager.get("a")
        kit.engine.spill_all()
    kit.manager.validate()
    assert len(disk.refused) == 1
    assert kit.manager.statistics().set_aside == 1
    disk.room = 10_000
    disk.pass_time(0.3)
    assert kit.state("a") is State.SPILLED


def test_room_on_disk_that_was_freed_is_used_soon(kit):
    disk = Disk(kit, room=500)
    kit.manager.store("small", Thing("small"))
    kit.manager.store("large", Thing("a" * 1000))
    squeeze(kit)
    disk.pass_time(10)
    assert disk.waits()[-1] > 3
    kit.engine.reap_all()
    kit.manager.discard("small")  # leaves less room than the large one needs, but somebody else may have left more
    disk.room = 10_000
    kit.engine.spill_all()
    assert kit.state("large") is State.RESIDENT
    disk.pass_time(0.3)
    assert kit.state("large") is State.SPILLED


def test_records_that_go_again_and_again_are_no_reason_to_try_all_the_time(kit):
    disk = Disk(kit, room=500)
    kit.manager.store("large", Thing("a" * 100_000))
    squeeze(kit)
    for n in range(200):
        kit.manager.store(n, Thing(n))
        disk.pass_time(0.01)
        kit.manager.discard(n)
    assert 8 <= len(disk.refused) <= 10, "four times a second"


def test_when_the_disk_has_room_again_nobody_waits_for_his_turn(kit):
    disk = Disk(kit)
    for key in range(100):
        kit.manager.store(key, Thing(key))
    squeeze(kit)
    assert len(disk.refused) == 100
    disk.pass_time(60, step=1)
    # Each time eight of them.
    assert 100 + 8 * 10 < len(disk.refused) < 100 + 8 * 20
    disk.room = 10_000
    disk.pass_time(4, step=1)
    assert kit.manager.statistics().disk_keys == 100


def test_nobody_waits_for_a_disk_that_is_full(kit):
    disk = Disk(kit)
    for key in range(3):
        kit.manager.store(key, Thing(key))
    squeeze(kit)
    admission = kit.manager.admission.admit("task", [0], 100)
    kit.engine.spill_all()
    assert admission.granted
    assert admission.overrun
    assert len(disk.refused) == 3
    admission.release()


def test_the_disk_limit_is_said_to_be_used_up_once(kit, caplog):
    """Also if values that are smaller, or are needed no more, come and go meanwhile."""
    kit.manager.store("large", Thing("a" * 1000))
    kit.manager.limits.set_limit(0, 500)
    kit.engine.spill_all()
    for n in range(100):
        kit.manager.store(n, Thing(n))
        kit.clock.advance(0.1)
        kit.engine.spill_all()
        assert kit.state(n) is State.SPILLED
        kit.manager.discard(n)
    assert len(caplog.records) == 1


@pytest.mark.fault("disk limit used up", on="host→disk", outcome="stays in memory, tried again")
def test_the_quota(kit, caplog):
    manager = kit.manager
    record = len(pickle.dumps(Thing("x"), protocol=5))
    for key in range(6):
        manager.store(key, Thing("x"))
    manager.limits.set_limit(0, 3 * record)
    kit.engine.spill_all()
    stats = manager.statistics()
    assert (stats.disk_keys, stats.set_aside) == (3, 3)
    assert stats.disk_nbytes <= 3 * record
    assert len(caplog.records) == 1
    assert f"the disk limit of {3 * record} bytes (disk_limit) is used up" in caplog.text
    spilled = manager.keys_in(Tier.DISK)
    manager.discard(spilled[0])
    kit.engine.spill_all()
    assert manager.statistics().disk_keys == 3
    manager.limits.set_limit(0, None)
    kit.engine.spill_all()
    assert manager.statistics().disk_keys == 5


def test_a_lower_quota_costs_clean_copies_only(kit):
    manager = kit.manager
    for key in range(4):
        manager.store(key, Thing(key))
    kit.spill()
    for key in (0, 1):
        manager.get(key)
    manager.limits.set_limit(None, 1)
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
    kit.manager.limits.set_limit(0, None)
    with pytest.raises(KeyboardInterrupt):
        kit.engine.spill()
    kit.manager.validate()
    assert kit.state("a") is State.RESIDENT
    kit.manager.limits.set_limit(None, None)


def test_evicting_an_unchanged_value_again_writes_nothing(kit):
    kit.manager.store("a", Thing())
    for _ in range(3):
        kit.spill("a")
        kit.manager.get("a")
    assert kit.store.statistics().writes == 1
    assert kit.manager.statistics().clean_drops == 2


def test_without_clean_copies_what_is_in_memory_is_what_is_written():
    kit = ManagerKit(keep_clean=False)
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
    kit = ManagerKit(keep_clean=False)
    kit.manager.store("a", Thing(0))

    def hook(operation, when):
        if operation == "write":
            kit.manager.limits.set_limit(None, None)

    kit.store.hook = hook
    squeeze(kit)
    assert kit.state("a") is State.RESIDENT
    assert kit.records() == 0
    kit.manager.get("a").content = 1
    kit.store.hook = lambda operation, when: None
    kit.spill("a")
    assert kit.manager.get("a").content == 1
    kit.close()


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
    future = manager.batch.get_many(["other", "b"])
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


def test_a_read_that_fails_is_reported_and_nothing_is_lost(kit):
    failures = iter(["once"])

    def hook(operation, when):
        if when == "before" and (error := next(failures, None)):
            raise StorageError(5, error)

    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = hook
    with pytest.raises(StorageError, match="once"):
        kit.manager.get("a")
    assert kit.state("a") is State.SPILLED
    assert kit.manager.get("a") == Thing("a")


class _Complaining(Thing):
    def __del__(self):
        raise ValueError("not without a word")


@pytest.mark.fault("value's code raises anything", on="release", outcome="gone, too")
@pytest.mark.parametrize("spilled", [False, True])
def test_a_value_whose_destructor_raises_goes_like_any_other(kit, monkeypatch, spilled):
    complaints = []
    monkeypatch.setattr("sys.unraisablehook", lambda complaint: complaints.append(str(complaint.exc_value)))
    kit.manager.store("a", _Complaining("a"))
    kit.manager.store("b", Thing("b"))
    if spilled:
        kit.spill("a")
    kit.manager.discard("a")
    kit.engine.spill_all()
    assert complaints == ["not without a word"]
    assert "a" not in kit.manager
    assert kit.records() == 0
    assert kit.manager.statistics().values == 1
    assert kit.manager.get("b") == Thing("b")


def test_closing_waits_for_no_single_deletions():
    with bench(limit=None) as made:
        for number in range(50):
            made.manager.store(number, bytes(1000))
        made.spill()
        for number in range(50):
            made.manager.discard(number)
        assert made.store.statistics().records == 50  # on a disk that is slow
        made.manager.close()
        assert (made.store.statistics().records, made.store.statistics().deletes) == (0, 0)
