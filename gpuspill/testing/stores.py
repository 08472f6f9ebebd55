"""Stores that make tests of what uses a store simple.

What every store has to pass is in :mod:`gpuspill.testing.store_tests`.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Sequence

from gpuspill.errors import QuotaExceeded, RecordLost, StorageError, Unspillable
from gpuspill.storage.base import Allocate, Frame, FrameStream, Lend, Receipt, Store, StoreStatistics, in_memory
from gpuspill.storage.wrappers import DelayedStore, FaultyStore, WrapperStore, nth

__all__ = [
    "DelayedStore",
    "FaultyStore",
    "Gate",
    "GatedStore",
    "MemoryStore",
    "Pieces",
    "nth",
]


class MemoryStore(Store):
    """Records in a dictionary: the smallest store there is, for tests of what uses a store.

    Parameters
    ----------
    quota
        Most bytes to hold (frames and headers); None for no limit.
    """

    def __init__(self, quota: int | None = None) -> None:
        self._quota = quota
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._records: dict[Receipt, tuple[bytes, list[bytes]]] = {}
        self._closed = False
        self._counts = dict.fromkeys(
            ("writes", "reads", "deletes", "bytes_written", "bytes_read", "payload_written", "payload_read"), 0
        )

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """See :meth:`Store.write`."""
        views = [memoryview(in_memory(frame)) for frame in frames]
        for view in views:
            if not (view.c_contiguous or view.f_contiguous):
                raise Unspillable("a frame is not contiguous")
        copies = [view.tobytes(order="A") for view in views]
        payload_nbytes = sum(map(len, copies))
        nbytes = len(header) + payload_nbytes
        with self._lock:
            if self._closed:
                raise StorageError(errno.EBADF, "the store was closed")
            used = sum(receipt.nbytes for receipt in self._records)
            if self._quota is not None and used + nbytes > self._quota:
                raise QuotaExceeded(f"{nbytes} more bytes do not fit beside {used} in {self._quota}")
            receipt = Receipt(next(self._numbers), nbytes, payload_nbytes, payload_nbytes, id(self))
            self._records[receipt] = header, copies
            self._count("writes", "bytes_written", nbytes, "payload_written", payload_nbytes)
        return receipt

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """See :meth:`Store.read`."""
        with self._lock:
            if receipt not in self._records:
                raise RecordLost(f"record {receipt.number} is gone")
            header, copies = self._records[receipt]
            self._count("reads", "bytes_read", receipt.nbytes, "payload_read", receipt.payload_nbytes)
        frames = []
        for copy in copies:
            frame = memoryview(bytearray(len(copy))) if allocate is None else allocate(len(copy))
            frame[:] = copy
            frames.append(frame)
        return header, frames

    def delete(self, receipt: Receipt) -> None:
        """See :meth:`Store.delete`."""
        with self._lock:
            if self._records.pop(receipt, None) is not None:
                self._counts["deletes"] += 1

    def close(self) -> None:
        """See :meth:`Store.close`."""
        with self._lock:
            self._closed = True
            self._records.clear()

    def statistics(self) -> StoreStatistics:
        """See :meth:`Store.statistics`."""
        with self._lock:
            return StoreStatistics(
                records=len(self._records),
                nbytes=sum(receipt.nbytes for receipt in self._records),
                payload_nbytes=sum(receipt.payload_nbytes for receipt in self._records),
                quota=self._quota,
                **self._counts,
            )

    def _count(self, operation: str, on_disk: str, nbytes: int, payload: str, payload_nbytes: int) -> None:
        self._counts[operation] += 1
        self._counts[on_disk] += nbytes
        self._counts[payload] += payload_nbytes


class Pieces(FrameStream):
    """A stream of given pieces, all in the same memory: one that is kept changes.

    Parameters
    ----------
    *pieces
        What is handed out, in order. An exception is raised instead.
    nbytes
        What the stream says it has; by default the truth.

    Attributes
    ----------
    between
        Called before each piece, with its number from 0 on, in the thread that copies.
    """

    def __init__(self, *pieces: bytes | BaseException, nbytes: int | None = None) -> None:
        self._pieces = pieces
        sizes = [len(piece) for piece in pieces if isinstance(piece, bytes)]
        self.nbytes = sum(sizes) if nbytes is None else nbytes
        self._memory = bytearray(max(sizes, default=0))
        self.between: Callable[[int], object] = lambda number: None

    def copy_to(self, sink: Callable[[memoryview], object]) -> None:
        """See :meth:`FrameStream.copy_to`."""
        for number, piece in enumerate(self._pieces):
            self.between(number)
            if isinstance(piece, BaseException):
                raise piece
            view = memoryview(self._memory)[: len(piece)]
            view[:] = piece
            sink(view)
            view[:] = bytes(len(piece))


class Gate:
    """Where operations wait until a test lets them go on.

    Attributes
    ----------
    arrived : threading.Semaphore
        Released once by each operation that arrives, before it waits.
    """

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self._open = threading.Event()

    def open(self) -> None:
        """Let all go on, those to come included."""
        self._open.set()

    def pass_through(self, timeout: float = 60.0) -> None:
        """Arrive and wait. RuntimeError if the gate stays shut for `timeout` seconds."""
        self.arrived.release()
        if not self._open.wait(timeout):
            raise RuntimeError("the gate was not opened")


class GatedStore(WrapperStore):
    """Stops operations at gates, so that a test decides what overlaps with what.

    Parameters
    ----------
    store
        What does the work.

    Attributes
    ----------
    before, after : dict of str to Gate
        Gates by operation (``"write"``, ``"read"``, ``"delete"``), passed before the store under
        this one is asked and after it answered. Put one in to stop operations, take it out to leave
        later ones alone.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.before: dict[str, Gate] = {}
        self.after: dict[str, Gate] = {}

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """See :meth:`Store.write`."""
        _pass(self.before, "write")
        receipt = self.store.write(header, frames)
        _pass(self.after, "write")
        return receipt

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """See :meth:`Store.read`."""
        _pass(self.before, "read")
        result = self.store.read(receipt, allocate, lend=lend)
        _pass(self.after, "read")
        return result

    def delete(self, receipt: Receipt) -> None:
        """See :meth:`Store.delete`."""
        _pass(self.before, "delete")
        self.store.delete(receipt)
        _pass(self.after, "delete")


def _pass(gates: dict[str, Gate], operation: str) -> None:
    gate = gates.get(operation)
    if gate is not None:
        gate.pass_through()
