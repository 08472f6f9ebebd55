"""Values that are written to disk without ever being in memory."""

import os
import pickle

import pytest

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State
from gpuspill.errors import QuotaExceeded, StorageError, StorageFull
from gpuspill.storage.files import FileStore
from gpuspill.testing.managers import bench
from gpuspill.testing.stores import Pieces
from tests.things import Thing


@pytest.fixture
def kit():
    with bench() as kit:
        yield kit


def put(kit, key, number):
    """Store a thing whose bytes come in pieces."""
    stream = Pieces(*[bytes([number]) * 100] * 3)
    kit.manager.store_on_disk(key, pickle.dumps(Thing(number)), [stream], 300)
    return stream


def disk(kit):
    state = kit.manager._metadata.state.disk
    return state.used, state.reserved


def test_it_is_on_disk_and_comes_back_as_any_other(kit):
    put(kit, "a", 1)
    kit.manager.validate()
    assert kit.state("a") is State.SPILLED
    statistics = kit.manager.statistics()
    assert (statistics.host_nbytes, statistics.spilled_nbytes, statistics.disk_keys) == (0, 300, 1)
    assert (statistics.spills, statistics.spilled_total_nbytes) == (1, 300)
    record = kit.store.statistics().nbytes
    assert statistics.disk_nbytes == statistics.written_nbytes == statistics.raw_nbytes == record
    encoded = kit.manager.batch.fetch("a")
    assert bytes(encoded.frames[0]) == b"\x01" * 300
    assert kit.manager.get("a") == Thing(1)
    assert kit.state("a") is State.CLEAN
    kit.manager.discard("a")
    assert kit.records() == 0


def test_the_disk_limit_is_of_what_files_take_and_not_of_their_lengths(tmp_path):
    """Each of a few bytes takes a block."""
    store = FileStore(tmp_path)
    limit = 16 * store.block_nbytes
    with bench(store=store, disk_limit=limit) as kit:
        for number in range(40):
            kit.manager.store(number, Thing(number))
        kit.manager.limits.set_limit(0, limit)
        kit.idle()
        files = [os.stat(entry.path) for entry in os.scandir(store.path) if entry.name.isdigit()]
        assert kit.manager.spilled_count == len(files) == 16, "and each is less than a block long"
        assert sum(file.st_blocks * 512 for file in files) <= limit == kit.manager.statistics().disk_nbytes


def test_it_replaces_what_the_key_held(kit):
    kit.manager.store("a", Thing("old"))
    put(kit, "a", 1)
    assert kit.manager.memory_total() == 0
    put(kit, "a", 2)
    assert kit.records() == 1
    assert kit.manager.get("a") == Thing(2)


def test_it_is_reported_as_a_write():
    told = []
    with bench(observer=lambda *what: told.append(what)) as kit:
        put(kit, "a", 1)
        nbytes = kit.store.statistics().nbytes
        assert [what[0] for what in told] == ["disk-write"] * 3
        assert told[1:] == [("disk-write", 1, "count"), ("disk-write", nbytes, "bytes")]


@pytest.mark.fault("error of the disk", on="receive", outcome="an error; nothing changed")
@pytest.mark.fault("host memory runs out", on="receive", outcome="an error; nothing changed")
@pytest.mark.parametrize(
    "error", [StorageFull(28, "full"), StorageError(5, "broken"), MemoryError(), KeyboardInterrupt()]
)
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_write_that_fails_changes_nothing(kit, error, when):
    kit.manager.store("a", Thing("old"))

    def fail(*args):
        if args in (("write", when), (2,)):
            raise error

    stream = Pieces(b"x" * 100, b"y" * 100, b"z" * 100)
    if when == "between":
        stream.between = fail
    else:
        kit.store.hook = fail
    with pytest.raises(type(error)) as caught:
        kit.manager.store_on_disk("a", b"header", [stream], 300)
    assert caught.value is error
    kit.manager.validate()
    assert kit.manager.get("a") == Thing("old")
    assert kit.records() == 0
    assert disk(kit) == (0, 0)
    assert kit.manager.statistics().spills == 0
    kit.store.hook = lambda operation, when: None


def test_a_key_that_is_not_hashable_leaves_nothing(kit):
    with pytest.raises(TypeError):
        kit.manager.store_on_disk([], b"", [b"x"], 1)
    assert kit.records() == 0
    assert disk(kit) == (0, 0)


@pytest.mark.fault("disk limit used up", on="receive", outcome="refused before anything is read")
def test_the_quota_is_asked_before_anything_is_read():
    with bench(disk_limit=200) as kit:
        stream = Pieces(b"x" * 100, b"x" * 101)
        stream.between = lambda number: pytest.fail("a piece was asked for")
        with pytest.raises(QuotaExceeded, match=r"of 200 bytes \(disk_limit\)"):
            kit.manager.store_on_disk("a", b"", [stream], 201)
        assert "a" not in kit.manager
        kit.manager.store_on_disk("a", b"", [Pieces(b"x" * 100)], 100)


def test_a_disk_that_refused_others_is_not_asked():
    """Not by each one that comes, but when it is time to try again; see the contract on what is blocked."""

    def refuse(operation, when):
        raise StorageFull(28, "full")

    with bench(limit=0) as kit:
        kit.manager.store("a", bytearray(100), 100)
        kit.store.hook = refuse
        kit.engine.spill_all()
        asked = []
        kit.store.hook = lambda operation, when: asked.append(operation)
        with pytest.raises(StorageError, match=r"refused 1 other"):
            put(kit, "b", 1)
        assert asked == []
        assert "b" not in kit.manager
        kit.clock.advance(10)
        kit.engine.spill_all()
        assert kit.state("a") is State.SPILLED
        put(kit, "b", 1)
        assert kit.manager.get("b") == Thing(1)


def test_what_is_on_its_way_counts_against_the_quota():
    with bench(disk_limit=1000) as kit:
        kit.manager.store("a", bytearray(400), 400)
        stream = Pieces(b"x" * 350, b"x" * 350)

        def between(number):
            assert disk(kit) == (0, 701)
            with pytest.raises(QuotaExceeded):
                kit.manager.store_on_disk("b", b"", [bytes(300)], 300)
            kit.manager.limits.set_limit(0, 1000)
            kit.engine.spill_all()
            kit.manager.limits.set_limit(None, 1000)
            assert kit.state("a") is State.RESIDENT
            failures.append(kit.manager.statistics().spill_failures)

        failures = []
        stream.between = between
        kit.manager.store_on_disk("c", b"c", [stream], 700)
        assert failures[0] > 0
        assert disk(kit) == (701, 0)


def test_clean_copies_are_given_up_for_it():
    with bench(disk_limit=1000) as kit:
        kit.manager.store("a", bytearray(600), 600)
        kit.spill("a")
        assert kit.manager.get("a") == bytearray(600)
        assert kit.state("a") is State.CLEAN
        put(kit, "b", 1)
        kit.manager.store_on_disk("c", b"", [bytes(500)], 500)
        assert kit.state("a") is State.RESIDENT
        assert kit.records() == 2


def test_a_record_that_turns_out_too_large_is_given_up():
    with bench(disk_limit=150) as kit:
        write = kit.store.store.write
        kit.store.store.write = lambda header, frames: write(header + bytes(100), frames)  # a footer, for one
        with pytest.raises(QuotaExceeded, match=r"200 bytes"):
            kit.manager.store_on_disk("a", b"", [bytes(100)], 100)
        assert "a" not in kit.manager
        assert kit.records() == 0
        assert disk(kit) == (0, 0)


@pytest.mark.fault("closed meanwhile", on="receive", outcome="an error; nothing left on disk")
@pytest.mark.parametrize("when", ["before", "after"])
def test_closed_meanwhile(kit, when):
    kit.store.hook = lambda operation, at: kit.manager.close() if at == when else None
    with pytest.raises(StorageError, match=r"closed"):
        put(kit, "a", 1)
    assert "a" not in kit.manager
    assert disk(kit) == (0, 0)


def test_room_now_or_not_at_all():
    with bench(limit=1000) as kit:
        kit.manager.store("a", bytearray(600), 600)
        room = kit.manager.admission.reserve_now(400, Kind.TASK)
        assert room.granted
        assert not room.overrun
        assert kit.manager.admission.reserve_now(1, Kind.TASK) is None
        assert kit.manager.statistics().waiting == kit.manager.statistics().overruns == 0
        room.release()
        # It takes no room from those who wait, and does not wait behind them.
        waiting = kit.manager.admission.reserve(500, Kind.TASK)
        assert not waiting.granted
        assert kit.manager.admission.reserve_now(1, Kind.TASK) is None
        waiting.release()
        # Where there is a clean copy, there is room; where somebody would have to write, there is none.
        assert kit.manager.admission.reserve_now(500, Kind.TASK) is None
        assert kit.state("a") is State.RESIDENT
        kit.spill("a")
        kit.manager.get("a")
        with kit.manager.admission.reserve_now(500, Kind.TASK, outputs={"b": 500}) as room:
            assert kit.state("a") is State.SPILLED
            kit.manager.store("b", bytearray(500), 500)
            assert kit.manager.statistics().reserved_nbytes == 0
