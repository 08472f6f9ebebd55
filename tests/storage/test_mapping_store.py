"""What a mapping may do to the records in it, and what becomes of them."""

from __future__ import annotations

import errno
import os

import pytest

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError, StorageFull
from gpuspill.storage.mapping import MappingStore


class Moody(dict):
    """Fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: dict[str, BaseException] = {}
        self.half = False

    def _maybe(self, what: str) -> None:
        if what in self.fault:
            raise self.fault[what]

    def __setitem__(self, key, value):
        if self.half:
            super().__setitem__(key, value[: len(value) // 2])
        self._maybe("set")
        super().__setitem__(key, value)

    def __getitem__(self, key):
        self._maybe("get")
        return super().__getitem__(key)

    def __delitem__(self, key):
        self._maybe("del")
        super().__delitem__(key)


@pytest.fixture
def records() -> Moody:
    return Moody()


@pytest.fixture
def store(records):
    with MappingStore(records) as store:
        yield store
        records.fault.clear()
    assert records == {}


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "no"), RuntimeError("no"), KeyError("no"), PermissionError(errno.EACCES, "no")]
)
def test_a_write_that_fails_leaves_nothing(store, records, error):
    records.fault["set"], records.half = error, True
    with pytest.raises(StorageError, match=r"failed: .*no.*stays in memory") as caught:
        store.write(b"h", [b"data"])
    assert caught.value.errno == (getattr(error, "errno", None) or errno.EIO)
    assert not isinstance(caught.value, StorageFull)
    assert records == {}
    assert (store.statistics().records, store.statistics().write_failures) == (0, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room(store, records, number):
    records.fault["set"] = OSError(number, "no room")
    with pytest.raises(StorageFull):
        store.write(b"h", [b"data"])


def test_an_interrupt_is_passed_on_and_leaves_nothing(store, records):
    records.fault["set"], records.half = KeyboardInterrupt(), True
    with pytest.raises(KeyboardInterrupt):
        store.write(b"h", [b"data"])
    assert records == {}


def test_a_record_that_was_removed_is_lost(store, records):
    receipt = store.write(b"h", [b"data"])
    dict.clear(records)
    with pytest.raises(RecordLost, match="is gone from"):
        store.read(receipt)


def test_reading_that_fails_may_work_again(store, records):
    receipt = store.write(b"h", [b"data"])
    records.fault["get"] = OSError(errno.ETIMEDOUT, "too slow")
    with pytest.raises(StorageError, match="too slow") as caught:
        store.read(receipt)
    assert not isinstance(caught.value, RecordLost)
    records.fault.clear()
    assert bytes(store.read(receipt)[1][0]) == b"data"


@pytest.mark.parametrize("length", [0, 1, 10])
def test_a_record_that_became_shorter_is_lost(store, records, length):
    receipt = store.write(b"h", [b"data" * 10])
    (name,) = records
    dict.__setitem__(records, name, records[name][:-length] if length else b"")
    with pytest.raises(RecordLost, match="bytes of"):
        store.read(receipt)


def test_every_byte_of_a_record_matters(store, records):
    receipt = store.write(b"header", [b"data", b"more"])
    (name,) = records
    whole = records[name]
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1
        dict.__setitem__(records, name, bytes(changed))
        with pytest.raises(RecordCorrupt):
            store.read(receipt)
    dict.__setitem__(records, name, whole + b"x")
    with pytest.raises(RecordCorrupt):
        store.read(receipt)


def test_records_of_another_store_in_the_same_mapping(store, records):
    with MappingStore(records) as other:
        mine, theirs = store.write(b"", [b"mine"]), other.write(b"", [b"theirs"])
        assert mine.number == theirs.number
        with pytest.raises(RecordLost):
            store.read(theirs)
        store.delete(theirs)
        assert bytes(other.read(theirs)[1][0]) == b"theirs"
    assert len(records) == 1
    assert bytes(store.read(mine)[1][0]) == b"mine"


def test_a_mapping_that_does_not_delete_is_no_reason_to_raise(store, records):
    receipt = store.write(b"", [b"data"])
    records.fault["del"] = OSError(errno.EIO, "no")
    store.delete(receipt)
    store.delete(receipt)
    assert store.statistics().delete_failures == 1
    assert store.statistics().records == 0
    dict.clear(records)


@pytest.mark.parametrize("write_fails", [False, True])
def test_what_could_not_be_deleted_goes_after_the_next_deletion(store, records, write_fails):
    other = store.write(b"", [b"other"])
    records.fault["del"] = OSError(errno.EIO, "no")
    if write_fails:
        records.fault["set"], records.half = OSError(errno.EIO, "no"), True
        with pytest.raises(StorageError):
            store.write(b"", [b"data"])
    else:
        store.delete(store.write(b"", [b"data"]))
    assert len(records) == 2
    records.fault.clear()
    store.delete(other)
    assert records == {}


def test_what_could_not_be_deleted_goes_on_closing(records):
    store = MappingStore(records)
    receipts = [store.write(b"", [b"data"]) for _ in range(3)]
    records.fault["del"] = OSError(errno.EIO, "no")
    for receipt in receipts:
        store.delete(receipt)
    assert len(records) == 3
    records.fault.clear()
    store.close()
    assert records == {}


def test_closing_ends_where_nothing_can_be_deleted(records):
    store = MappingStore(records)
    store.write(b"", [b"data"])
    records.fault["del"] = OSError(errno.EIO, "no")
    store.close()
    assert len(records) == 1


@pytest.mark.parametrize(
    "found", [None, "text", [1, 2], memoryview(b"abcd")[::2]], ids=lambda found: type(found).__name__
)
def test_what_is_no_bytes_is_a_damaged_record(store, records, found):
    receipt = store.write(b"h", [b"data"])
    (name,) = records
    dict.__setitem__(records, name, found)
    with pytest.raises(RecordCorrupt, match=f"{name} has no bytes"):
        store.read(receipt)
    assert store.statistics().corrupt == 1


def test_closed_in_the_middle_of_a_write():
    class Closing(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            store.close()

    records = Closing()
    store = MappingStore(records)
    with pytest.raises(StorageError, match="was closed"):
        store.write(b"", [b"data"])
    assert records == {}


def test_what_is_changed_while_it_is_written_is_whole():
    """Each byte is read back as it was at some moment, and the record is no damaged one."""
    data = bytearray(b"a" * 1000)

    class Changing(dict):
        def __setitem__(self, key, value):
            data[:] = b"b" * 1000
            super().__setitem__(key, value)

    with MappingStore(Changing()) as store:
        receipt = store.write(b"", [data])
        assert bytes(store.read(receipt)[1][0]) in (b"a" * 1000, b"b" * 1000)


def test_a_child_reads_and_leaves_the_records_to_its_parent(store, records):
    receipt = store.write(b"", [b"data"])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert bytes(store.read(receipt)[1][0]) == b"data"
            with pytest.raises(StorageError, match="belongs to process"):
                store.write(b"", [b"more"])
            store.delete(receipt)
            store.close()
            assert len(records) == 1
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(store.read(receipt)[1][0]) == b"data"


def test_a_finaliser_in_the_middle_knows_that_it_is_inside(store, records):
    seen = []

    class Looking(Moody):
        def __getitem__(self, key):
            seen.append(store.inside)
            return super().__getitem__(key)

    store._mapping = Looking()
    receipt = store.write(b"", [b"data"])
    store.read(receipt)
    assert seen == [True]
    assert not store.inside
