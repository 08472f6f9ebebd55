"""What every store of records promises.

A store keeps *records*: one header and any number of frames (flat byte buffers), written once, read
any number of times, deleted once. It knows nothing of keys, values or tiers. The writer of a record
gets a :class:`Receipt` and needs nothing else to read it back; the receipt also carries what the
store needs to notice that the bytes it finds are not the ones it wrote.

All methods block on I/O and may be called from any number of threads at once. A finaliser may run
while its own thread is inside the store, whose locks it must be able to come back to: it reads and
deletes; what it writes may be refused. A child that was forked from the process that made a store
may read what there was then, until the parent deletes it; it is refused to write, and deletes
nothing. No lock of a store may be held in the child by a thread that it does not have
(:mod:`gpuspill.forks`).
"""

from __future__ import annotations

import enum
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias

__all__ = [
    "Allocate",
    "Buffer",
    "Frame",
    "FrameStream",
    "Lend",
    "Metrics",
    "Receipt",
    "Store",
    "StoreStatistics",
    "frame_nbytes",
    "fresh_buffer",
    "in_memory",
    "in_memory_together",
]

#: Anything with the buffer protocol whose memory is contiguous (in C or Fortran order).
Buffer: TypeAlias = bytes | bytearray | memoryview

#: ``allocate(nbytes)``: writable, one-dimensional bytes (format ``B``), exactly ``nbytes`` long.
Allocate: TypeAlias = Callable[[int], memoryview]

#: ``metrics(label, value, unit)`` with unit ``"seconds"``, ``"bytes"`` or ``"count"``.
Metrics: TypeAlias = Callable[[str, float, str], object]

#: From here on a fresh buffer is mapped: page aligned and not filled with zeros twice.
_MAP_FROM_NBYTES = 65_536


class FrameStream(ABC):
    """A frame whose bytes come in pieces, so that they need not be in host memory together.

    Attributes
    ----------
    nbytes
        How many bytes come, all in all.
    """

    nbytes: int

    @property
    def past_host(self) -> bool:
        """Whether :meth:`copy_into` is worth trying."""
        return False

    def copy_into(self, fd: int, before_each: Callable[[], object]) -> bool:
        """Bring all bytes into a file, from its start on, past host memory.

        Blocks. When it returns or raises, nothing is under way any more.

        Parameters
        ----------
        fd
            The open file, which has room for them. Its position does not matter.
        before_each
            Called now and then; what it raises ends the copy and is passed on.

        Returns
        -------
        bool
            Whether they are there. If not, the file holds anything, and :meth:`copy_to` is to be
            used.

        Raises
        ------
        StorageError
            The bytes cannot be had.
        """
        return False

    @abstractmethod
    def copy_to(self, sink: Callable[[memoryview], object]) -> None:
        """Hand all bytes to `sink`, in order. May be called again, from the first byte on.

        Blocks. When it returns or raises, nothing is under way any more.

        Parameters
        ----------
        sink
            Gets one piece at each call, flat bytes that are valid for the length of the call. What
            it raises ends the copy and is passed on.

        Raises
        ------
        StorageError
            The bytes cannot be had.
        """

    @classmethod
    def read_together(cls, streams: Sequence[Self]) -> list[list[memoryview]]:
        """Return all bytes of several streams of this class, in parts; all or none."""
        return [[stream.read()] for stream in streams]

    def read(self) -> memoryview:
        """Return all bytes, in memory of their own. Blocks; raises as :meth:`copy_to`."""
        whole = memoryview(bytearray(self.nbytes))
        offset = 0

        def sink(piece: memoryview) -> None:
            nonlocal offset
            whole[offset : offset + piece.nbytes] = piece
            offset += piece.nbytes

        self.copy_to(sink)
        assert offset == self.nbytes, (offset, self.nbytes)
        return whole


#: What a record is written from.
Frame: TypeAlias = Buffer | FrameStream


def frame_nbytes(frame: Frame) -> int:
    """Return the size of a frame in bytes."""
    if type(frame) is memoryview or isinstance(frame, FrameStream):
        return frame.nbytes
    return memoryview(frame).nbytes


def in_memory(frame: Frame) -> Buffer:
    """Return a frame itself, or the bytes of a stream."""
    return frame.read() if isinstance(frame, FrameStream) else frame


def in_memory_together(records: Sequence[Sequence[Frame]]) -> list[list[Buffer]]:
    """Return the frames of several records, with the bytes of streams of one class in place."""
    streams = [frame for frames in records for frame in frames if isinstance(frame, FrameStream)]
    read = iter(type(streams[0]).read_together(streams) if streams else ())
    return [
        [part for frame in frames for part in (next(read) if isinstance(frame, FrameStream) else (frame,))]
        for frames in records
    ]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The handle of one record.

    Parameters
    ----------
    number
        Counts the records of its store; never used twice.
    nbytes
        Bytes on disk, header, table and padding included.
    payload_nbytes
        Sum of the frames' bytes as they were handed in, before any compression.
    stored_nbytes
        Bytes on disk taken by the frames: compressed where that paid, padding between them
        included.
    checksum
        xxh3 of everything in the record. Kept here too, so that a file which is intact but not the
        one that was written is noticed.
    hashed
        False if the frames' bytes did not pass through host memory, so that `checksum` is of
        everything but them.
    """

    number: int
    nbytes: int
    payload_nbytes: int
    stored_nbytes: int
    checksum: int
    hashed: bool = field(default=True, kw_only=True)


class Lend(enum.Enum):
    """What a store may lend instead of memory from ``allocate``, if the caller allows it."""

    MEMORY = "memory of the store's own"
    """For a caller that only looks at the bytes, soon. It may be read-only, lies anywhere, and
    lasts as long as the frames do, whatever becomes of the record."""
    FILE = "views of the file"
    """For a caller that fetches frames from a file: of records that are not hashed, views of
    :class:`~gpuspill.storage.inplace.FileMemory`."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store: what it holds now, and what it did since it was made.

    Parameters
    ----------
    records, nbytes, payload_nbytes
        Held now: the number of records, bytes on disk (with those of records that are just being
        removed, or could not be), and the bytes of the records' frames before compression.
    reserved_nbytes
        Bytes promised to writes in progress.
    quota
        Most bytes that may be on disk, reservations included; None without a limit.
    writes, reads, deletes
        Operations that succeeded.
    bytes_written, bytes_read
        Bytes that went to and came from disk in them.
    payload_written, payload_read
        The same before compression and after decompression.
    write_seconds, read_seconds
        Time in file operations, summed over threads.
    checksum_seconds, compress_seconds, decompress_seconds
        Time in computing and verifying checksums and in codecs (the sampling that decides
        included).
    compressed_frames
        Frames that were stored compressed.
    write_failures, read_failures, delete_failures
        Operations that failed, for whatever reason.
    lost, corrupt
        Reads that failed because the record was gone or shorter than written, or not what was
        written.
    """

    records: int = 0
    nbytes: int = 0
    payload_nbytes: int = 0
    reserved_nbytes: int = 0
    quota: int | None = None
    writes: int = 0
    reads: int = 0
    deletes: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    payload_written: int = 0
    payload_read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    checksum_seconds: float = 0.0
    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0
    compressed_frames: int = 0
    write_failures: int = 0
    read_failures: int = 0
    delete_failures: int = 0
    lost: int = 0
    corrupt: int = 0


class Store(ABC):
    """Records at rest. See the module for what holds for every method.

    A store is a context manager that closes itself.
    """

    @abstractmethod
    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Store a record, completely or not at all.

        Parameters
        ----------
        header
            Opaque bytes, returned as they are.
        frames
            Opaque buffers, not copied. They keep their order and number; empty ones are kept too.
            They come back flat. If one is changed before this returns, each of its bytes is read
            back as it was at some moment. A store on disk holds no more of a :class:`FrameStream`
            than the piece that it is handed.

        Returns
        -------
        Receipt
            Once the record is complete and can be read.

        Raises
        ------
        StorageFull
            The device has no room.
        QuotaExceeded
            The record does not fit in the quota. Nothing was written.
        StorageError
            Anything else went wrong on the way to the disk, or the store is closed.
        Unspillable
            A frame is not contiguous.

        Notes
        -----
        Whatever is raised, what a frame stream raises included, nothing of the record is left and
        no space stays reserved.
        """

    @property
    def together_nbytes(self) -> int:
        """Bytes of records worth writing together, see :meth:`write_together`; 0: one each."""
        return 0

    def write_together(self, records: Sequence[tuple[bytes, Sequence[Frame]]]) -> list[Receipt] | None:
        """Store several records, all or none, where that costs less than one after the other.

        Parameters
        ----------
        records
            Header and frames of each, as for :meth:`write`.

        Returns
        -------
        list of Receipt or None
            None if they are to be written one by one, which is the default. So they are if
            something is raised, which is what :meth:`write` raises.
        """
        return None

    def read_together(self, receipts: Sequence[Receipt]) -> list[tuple[bytes, list[memoryview]] | None]:
        """Return the records that are in memory already and cost nothing to hand out.

        None for those that are to be read by :meth:`read`, for whatever reason. By default these
        are all.
        """
        return [None] * len(receipts)

    def delete_together(self, receipts: Sequence[Receipt]) -> None:
        """Forget several records; as :meth:`delete`."""
        for receipt in receipts:
            self.delete(receipt)

    @abstractmethod
    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Return the header and the frames of a record, verified.

        Parameters
        ----------
        receipt
            What :meth:`write` returned.
        allocate
            Where to take memory from. By default fresh memory that is freed with the last frame. It
            is called without any lock held.
        lend
            What the caller takes as well, in its place. A store that can lend none reads into
            memory.

        Returns
        -------
        header, frames
            Each frame is one-dimensional, writable, and a buffer from `allocate`: one kept alive
            keeps no other.

        Raises
        ------
        RecordLost
            The record is gone (deleted, the store closed, its file removed) or shorter than
            written.
        RecordCorrupt
            The bytes are not the ones written.
        StorageError
            Reading failed for a reason that may pass.

        Notes
        -----
        A read that overlaps :meth:`delete` or :meth:`close` returns the whole record or raises
        :exc:`~gpuspill.errors.RecordLost`.
        """

    @abstractmethod
    def delete(self, receipt: Receipt) -> None:
        """Forget a record and give its space back. Idempotent; never raises or reads."""

    @abstractmethod
    def close(self) -> None:
        """Remove every record and everything else the store put on disk. Idempotent; never raises.

        It does not wait for operations in progress elsewhere. Writes among them fail and leave
        nothing, reads return the whole record or raise :exc:`~gpuspill.errors.RecordLost`.
        """

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block; a record takes whole ones. 1 without blocks, or if unknown."""
        return 1

    @property
    def inside(self) -> bool:
        """Whether the calling thread is in the middle of an operation, in which it may hold a lock.

        Only a finaliser that the garbage collector runs there can ask. It must not wait for another
        thread then, which may be waiting for that lock.
        """
        return False

    @abstractmethod
    def statistics(self) -> StoreStatistics:
        """Return a consistent snapshot. No I/O."""

    def validate(self) -> None:
        """Check the store's tables against each other. For tests; raises AssertionError."""
        stats = self.statistics()
        assert stats.records >= 0, stats
        assert stats.nbytes >= 0, stats
        assert stats.reserved_nbytes >= 0, stats
        assert stats.records or not stats.payload_nbytes, stats

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def fresh_buffer(nbytes: int) -> memoryview:
    """Return memory of its own for `nbytes` bytes, aligned to at least 64 where that matters.

    Parameters
    ----------
    nbytes
        Size in bytes; may be 0.

    Returns
    -------
    memoryview
        Writable, format ``B``. Large ones are mapped (page aligned, freed at once with the last
        view); small ones are a bytearray, aligned to what the allocator gives.
    """
    if nbytes < _MAP_FROM_NBYTES:
        return memoryview(bytearray(nbytes))
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Advice: a kernel without huge pages says no, and nothing is lost.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
