"""What every store has to pass.

To test a store of your own, derive from :class:`StoreTests` and give it a fixture::

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self, tmp_path):
            with MyStore(tmp_path) as store:
                yield store

and, for long random sequences, derive from :class:`StoreMachine`. Neither shares code with the
stores here: the model is a dictionary. Call
``pytest.register_assert_rewrite("gpuspill.testing.store_tests")`` before importing this, for
messages that show values.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gpuspill.errors import QuotaExceeded, RecordLost, StorageError, Unspillable
from gpuspill.storage.base import Lend, Receipt, Store
from gpuspill.testing.stores import Pieces

__all__ = ["StoreMachine", "StoreTests", "frame_lists"]


def frame_lists(max_frames: int = 6, max_nbytes: int = 300) -> st.SearchStrategy[list[bytes]]:
    """Return a strategy for a record's frames: any number, of any length."""
    sizes = st.one_of(st.integers(0, max_nbytes), st.sampled_from([0, 1, 63, 64, 65, 128]))
    frame = sizes.flatmap(lambda size: st.binary(min_size=size, max_size=size))
    return st.lists(frame, max_size=max_frames)


def _noise(nbytes: int) -> bytes:
    # Nothing that a store could make smaller.
    return random.Random(nbytes).randbytes(nbytes)


def _contents(result: tuple[bytes, list[memoryview]]) -> tuple[bytes, list[bytes]]:
    header, frames = result
    for frame in frames:
        assert frame.ndim == 1
        assert frame.format == "B"
        assert frame.nbytes == 0 or not frame.readonly
    return header, [bytes(frame) for frame in frames]


class StoreTests:
    """Conformance: what a store has to do. One test a promise; see ``Store``."""

    @pytest.fixture
    def store(self) -> Any:
        """Yield an empty store without a quota; close it afterwards."""
        raise NotImplementedError

    @pytest.fixture
    def quota_store(self) -> Any:
        """Yield an empty store with a quota of 100,000 bytes; skip if it has none."""
        pytest.skip("this store has no quota")

    def test_type(self, store: Store) -> None:
        """It is a store."""
        assert isinstance(store, Store)

    def test_new_store_is_empty(self, store: Store) -> None:
        """A new store holds and promises nothing."""
        stats = store.statistics()
        assert (stats.records, stats.nbytes, stats.payload_nbytes, stats.reserved_nbytes) == (0, 0, 0, 0)

    @pytest.mark.parametrize(
        ("header", "frames"),
        [
            (b"", []),
            (b"header", []),
            (b"", [b""]),
            (b"", [b"", b"", b""]),
            (b"h", [b"x"]),
            (b"h", [b"x" * 63, b"y" * 64, b"z" * 65]),
            (b"h", [b"", b"x" * 1000, b"", b"y", b""]),
            (b"h" * 100_000, [b"x"]),
            (b"\0" * 8, [b"\0" * 1_000_000]),
        ],
        ids=lambda value: str([len(v) for v in value] if isinstance(value, list) else len(value)),
    )
    def test_round_trip(self, store: Store, header: bytes, frames: list[bytes]) -> None:
        """What goes in comes out: any number of frames, of any length."""
        receipt = store.write(header, frames)
        assert _contents(store.read(receipt)) == (header, frames)
        assert receipt.payload_nbytes == sum(map(len, frames))
        assert receipt.nbytes >= 0
        store.validate()

    # Examples share the store, on purpose; and each class that inherits this runs it on a store of
    # its own, so examples that failed for one say nothing about another.
    @settings(
        max_examples=50,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(records=st.lists(st.tuples(st.binary(max_size=100), frame_lists()), min_size=1, max_size=4))
    def test_any_round_trip(self, store: Store, records: list[tuple[bytes, list[bytes]]]) -> None:
        """The same for whatever Hypothesis comes up with, several records at a time."""
        receipts = [store.write(header, frames) for header, frames in records]
        for receipt, record in zip(receipts, records, strict=True):
            assert _contents(store.read(receipt)) == record
        for receipt in receipts:
            store.delete(receipt)
        assert store.statistics().nbytes == 0

    def test_ten_thousand_frames(self, store: Store) -> None:
        """More frames than one system call takes."""
        frames = [i.to_bytes(2, "little") * (i % 40) for i in range(10_000)]
        receipt = store.write(b"many", frames)
        assert _contents(store.read(receipt)) == (b"many", frames)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_kind_of_buffer(self, store: Store, kind: type) -> None:
        """Whatever has the buffer protocol will do."""
        receipt = store.write(b"", [kind(b"some bytes")])
        assert _contents(store.read(receipt)) == (b"", [b"some bytes"])

    def test_shape_and_format_do_not_matter(self, store: Store) -> None:
        """Frames are bytes, however they are seen; they come back flat."""
        flat = bytes(range(96))
        shaped: Any = memoryview(flat).cast("d", (3, 4))
        empty: Any = memoryview(bytes(8)).cast("d")[:0]
        receipt = store.write(b"", [shaped, empty, memoryview(flat)[10:20]])
        assert _contents(store.read(receipt)) == (b"", [flat, b"", flat[10:20]])

    @pytest.mark.parametrize("pieces", [[], [b"one"], [b"x" * 100, b"y" * 1, b"", b"z" * 64], [b"m" * 300_000] * 3])
    def test_frame_streams(self, store: Store, pieces: list[bytes]) -> None:
        """What comes in pieces comes back as any frame does; it may be read more than once."""
        stream = Pieces(*pieces)
        for _ in range(2):
            receipt = store.write(b"h", [b"before", stream, b"", stream, b"after"])
            whole = b"".join(pieces)
            assert _contents(store.read(receipt)) == (b"h", [b"before", whole, b"", whole, b"after"])
            assert receipt.payload_nbytes == 11 + 2 * len(whole)

    @pytest.mark.parametrize("good", [0, 1, 5])
    @pytest.mark.parametrize(
        "error", [StorageError("the device failed"), MemoryError("no memory"), ZeroDivisionError()]
    )
    def test_frame_stream_that_fails(self, store: Store, good: int, error: BaseException) -> None:
        """What it raises is passed on, and nothing is left."""
        with pytest.raises(type(error)) as caught:
            store.write(b"h", [b"before", Pieces(*[b"x" * 1000] * good, error), b"after"])
        assert caught.value is error
        stats = store.statistics()
        assert (stats.records, stats.nbytes, stats.reserved_nbytes) == (0, 0, 0)
        store.validate()
        assert _contents(store.read(store.write(b"h", [Pieces(b"x")]))) == (b"h", [b"x"])

    def test_frame_that_is_not_contiguous(self, store: Store) -> None:
        """What cannot be stored is refused, without a trace."""
        with pytest.raises(Unspillable, match="contiguous"):
            store.write(b"", [b"fine", memoryview(bytes(100))[::2]])
        assert store.statistics().records == 0
        assert store.statistics().reserved_nbytes == 0

    def test_frames_are_copies(self, store: Store) -> None:
        """A record shares no memory with what was written, nor with what was read."""
        data = bytearray(b"before" * 100)
        receipt = store.write(b"", [data])
        data[:] = b"after!" * 100
        first = store.read(receipt)[1][0]
        first[:] = b"change" * 100
        assert bytes(store.read(receipt)[1][0]) == b"before" * 100

    def test_receipts_are_never_used_again(self, store: Store) -> None:
        """A receipt never comes to mean another record."""
        seen: set[Receipt] = set()
        for _ in range(5):
            receipt = store.write(b"h", [b"the same"])
            assert receipt not in seen
            seen.add(receipt)
            store.delete(receipt)
        for receipt in seen:
            with pytest.raises(RecordLost):
                store.read(receipt)

    def test_read_takes_memory_from_allocate(self, store: Store) -> None:
        """Frames lie in the memory that the caller gave."""
        given: list[memoryview] = []

        def allocate(nbytes: int) -> memoryview:
            given.append(memoryview(bytearray(nbytes)))
            return given[-1]

        frames = [b"a" * 100, b"b" * 200]
        _, read = store.read(store.write(b"h", frames), allocate)
        assert [bytes(frame) for frame in read] == frames
        for frame in read:
            assert any(frame.obj is buffer.obj for buffer in given)
        assert sum(buffer.nbytes for buffer in given) >= 300

    def test_allocate_that_fails(self, store: Store) -> None:
        """A reader without memory leaves the record as it is."""

        def allocate(nbytes: int) -> memoryview:
            raise MemoryError(nbytes)

        receipt = store.write(b"", [b"x" * 100])
        with pytest.raises(MemoryError):
            store.read(receipt, allocate)
        assert _contents(store.read(receipt)) == (b"", [b"x" * 100])
        store.validate()

    def test_delete(self, store: Store) -> None:
        """Deleting removes this record, no other, and may be repeated."""
        keep = store.write(b"keep", [b"1"])
        gone = store.write(b"gone", [b"2"])
        for _ in range(3):
            store.delete(gone)
            with pytest.raises(RecordLost):
                store.read(gone)
        assert _contents(store.read(keep)) == (b"keep", [b"1"])
        assert store.statistics().records == 1
        assert store.statistics().deletes == 1
        store.validate()

    def test_receipt_of_nobody(self, store: Store) -> None:
        """A receipt that this store did not give means nothing to it."""
        mine = store.write(b"mine", [b"1"])
        other = Receipt(mine.number, mine.nbytes, mine.payload_nbytes, mine.stored_nbytes, mine.checksum ^ 1)
        with pytest.raises(RecordLost):
            store.read(other)
        store.delete(other)
        assert _contents(store.read(mine)) == (b"mine", [b"1"])

    def test_close(self, store: Store) -> None:
        """A closed store holds nothing, says so, and may be closed again."""
        receipt = store.write(b"h", [b"x"])
        for _ in range(2):
            store.close()
        with pytest.raises(RecordLost):
            store.read(receipt)
        with pytest.raises(StorageError, match="closed"):
            store.write(b"h", [b"x"])
        store.delete(receipt)
        stats = store.statistics()
        assert (stats.records, stats.nbytes, stats.reserved_nbytes) == (0, 0, 0)
        store.validate()

    def test_context_manager_closes(self, store: Store) -> None:
        """Leaving the context closes."""
        with store as entered:
            assert entered is store
            receipt = store.write(b"h", [b"x"])
        with pytest.raises(RecordLost):
            store.read(receipt)

    @pytest.mark.parametrize("frames", [[], [b"x" * 1000], [b"", b"a" * 63, b"b" * 3_000_000, b"c"]], ids=len)
    def test_borrowing(self, store: Store, frames: list[bytes]) -> None:
        """The same bytes as by reading, while they are lent, whatever the record does."""
        receipt = store.write(b"header", frames)
        header, borrowed = store.read(receipt, lend=Lend.MEMORY)
        store.delete(receipt)
        with pytest.raises(RecordLost):
            store.read(receipt, lend=Lend.MEMORY)
        store.close()
        assert header == b"header"
        assert [bytes(frame) for frame in borrowed] == frames
        assert store.statistics().reads == 1

    def test_statistics(self, store: Store) -> None:
        """The numbers add up."""
        first = store.write(b"h", [b"x" * 1000])
        second = store.write(b"h", [b"y" * 10])
        store.read(first)
        store.read(first)
        store.delete(second)
        stats = store.statistics()
        assert stats.records == 1
        assert stats.nbytes == first.nbytes
        assert stats.payload_nbytes == 1000
        assert (stats.writes, stats.reads, stats.deletes) == (2, 2, 1)
        assert stats.bytes_written == first.nbytes + second.nbytes
        assert stats.bytes_read == 2 * first.nbytes
        assert stats.payload_written == 1010
        assert stats.payload_read == 2000

    def test_threads(self, store: Store) -> None:
        """Threads that write, read and delete at once do not get in each other's way."""
        n_threads = 8
        barrier = threading.Barrier(n_threads)

        def work(thread: int) -> None:
            barrier.wait(60)
            kept: list[tuple[Receipt, bytes]] = []
            for turn in range(20):
                frame = bytes([thread, turn]) * (turn * 100)
                kept.append((store.write(b"%d" % thread, [frame]), frame))
                receipt, expected = kept[turn // 2]
                assert _contents(store.read(receipt)) == (b"%d" % thread, [expected])
                if turn % 3 == 0:
                    receipt, expected = kept.pop()
                    store.delete(receipt)
                    kept.append((store.write(b"%d" % thread, [expected]), expected))
            for receipt, _ in kept:
                store.delete(receipt)

        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(work, range(n_threads)))
        stats = store.statistics()
        assert (stats.records, stats.nbytes, stats.reserved_nbytes) == (0, 0, 0)
        store.validate()

    def test_one_record_read_and_deleted_by_many(self, store: Store) -> None:
        """A read that meets a delete gets the whole record or none."""
        n_threads = 8
        barrier = threading.Barrier(n_threads)
        frame = b"shared" * 1000
        receipt = store.write(b"", [frame])

        def work(thread: int) -> str:
            barrier.wait(60)
            if thread % 2:
                store.delete(receipt)
                return "deleted"
            try:
                assert _contents(store.read(receipt)) == (b"", [frame])
            except RecordLost:
                return "lost"
            return "read"

        with ThreadPoolExecutor(n_threads) as pool:
            outcomes = list(pool.map(work, range(n_threads)))
        assert outcomes.count("deleted") == n_threads // 2
        assert store.statistics().deletes == 1
        store.validate()

    def test_quota_of_one_record(self, quota_store: Store) -> None:
        """A record that can never fit is refused, without a trace."""
        with pytest.raises(QuotaExceeded, match="fit"):
            quota_store.write(b"", [_noise(100_001)])
        stats = quota_store.statistics()
        assert (stats.records, stats.nbytes, stats.reserved_nbytes) == (0, 0, 0)
        quota_store.validate()

    def test_quota_of_several_records(self, quota_store: Store) -> None:
        """A record fits once another is deleted."""
        first = quota_store.write(b"", [_noise(60_000)])
        with pytest.raises(QuotaExceeded):
            quota_store.write(b"", [_noise(60_000)])
        assert quota_store.statistics().nbytes == first.nbytes
        quota_store.delete(first)
        second = quota_store.write(b"", [_noise(60_000)])
        assert quota_store.statistics().nbytes == second.nbytes
        quota_store.validate()

    def test_quota_is_shared_by_threads(self, quota_store: Store) -> None:
        """However writers meet, as many succeed as fit."""
        n_threads = 8
        barrier = threading.Barrier(n_threads)

        def work(_: int) -> Receipt | None:
            barrier.wait(60)
            try:
                return quota_store.write(b"", [_noise(30_000)])
            except QuotaExceeded:
                return None

        with ThreadPoolExecutor(n_threads) as pool:
            receipts = [receipt for receipt in pool.map(work, range(n_threads)) if receipt is not None]
        # Exactly as many as fit, however they met.
        assert len(receipts) == 3
        assert quota_store.statistics().nbytes == sum(receipt.nbytes for receipt in receipts) <= 100_000
        quota_store.validate()
        for receipt in receipts:
            quota_store.delete(receipt)
        assert quota_store.statistics().nbytes == 0


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of operations, against a dictionary.

    Derive from it, define `make_store`, and let pytest find ``YourMachine.TestCase``.
    """

    receipts: Bundle[Receipt] = Bundle("receipts")

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make_store()
        self.model: dict[Receipt, tuple[bytes, list[bytes]]] = {}
        self.seen: set[Receipt] = set()

    def make_store(self) -> Store:
        """Return a new, empty store without a quota."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Close the store."""
        self.store.close()
        self.store.validate()

    @rule(target=receipts, header=st.binary(max_size=50), frames=frame_lists())
    def write(self, header: bytes, frames: list[bytes]) -> Receipt:
        """Write a record."""
        receipt = self.store.write(header, frames)
        assert receipt not in self.seen
        self.seen.add(receipt)
        self.model[receipt] = header, frames
        return receipt

    @rule(receipt=receipts)
    def read(self, receipt: Receipt) -> None:
        """Read a record that may have been deleted."""
        if receipt in self.model:
            assert _contents(self.store.read(receipt)) == self.model[receipt]
        else:
            with pytest.raises(RecordLost):
                self.store.read(receipt)

    @rule(receipt=receipts)
    def delete(self, receipt: Receipt) -> None:
        """Delete a record that may have been deleted before."""
        self.store.delete(receipt)
        self.model.pop(receipt, None)

    @rule(receipt=consumes(receipts))
    def delete_and_forget(self, receipt: Receipt) -> None:
        """Delete a record that is not asked for again."""
        self.store.delete(receipt)
        self.model.pop(receipt, None)

    @invariant()
    def totals_agree(self) -> None:
        """Compare the statistics with the model."""
        stats = self.store.statistics()
        assert stats.records == len(self.model)
        assert stats.payload_nbytes == sum(len(frame) for _, frames in self.model.values() for frame in frames)
        assert stats.nbytes == sum(receipt.nbytes for receipt in self.model)
        self.store.validate()
