"""Records of the device's manager, which are values of the host's.

So what leaves the device counts against the host's limit, and leaves the host for the disk as the
bytes it is, when the host's manager says so. Where the host has no room it goes to disk at once, in
pieces, and becomes a value of the host's that was written already.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuspill.core.budget import Kind
from gpuspill.errors import RecordLost, StorageError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import Encoded
from gpuspill.storage.base import (
    Allocate,
    Frame,
    Lend,
    Receipt,
    Store,
    StoreStatistics,
    frame_nbytes,
    in_memory_together,
)
from gpuspill.tier.units import Internal

__all__ = ["HostRecords"]

logger = logging.getLogger("gpuspill")

#: Bytes of records after which no more are put together: what they leave is waited for.
_TOGETHER = 64 * 2**20


class _Record(Internal):
    """Key of a record in the host's manager."""

    __slots__ = ("receipt",)
    receipt: Receipt
    called = "bytes that left the device: record"


class HostRecords(Store):
    """A store in another manager. Closing it does not close that.

    Parameters
    ----------
    in_place
        Whether who reads can fetch from a file by itself what came there past host memory.
    make_room
        Called when the host has no room for a record, to give back unused memory.

    Attributes
    ----------
    direct
        How many records were written to disk without being in host memory.
    """

    def __init__(
        self, host: ProxifyManager, *, in_place: bool = False, make_room: Callable[[], object] = lambda: None
    ) -> None:
        self._make_room = make_room
        self._host = host
        self._in_place = in_place
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._keys: dict[int, _Record] = {}
        self._counts = dict.fromkeys(("writes", "reads", "deletes", "bytes_written", "bytes_read"), 0)
        self._closed = False
        self.direct = 0

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Put a record into the host's memory if there is room, else on disk. Blocks.

        If the disk does not take it, it waits until there is room in memory, or until nothing can
        make any. Frames are kept, streams are read.
        """
        nbytes = len(header) + sum(map(frame_nbytes, frames))
        key = _Record(next(self._numbers))
        receipt = Receipt(key.number, nbytes, nbytes - len(header), nbytes - len(header), 0)
        # As a task: a task is what waits for the room on the device.
        admission = self._host.admission.reserve_now(nbytes, Kind.TASK, outputs={key: nbytes})
        if admission is None:
            self._make_room()
        direct = admission is None and self._write_on(key, header, frames, nbytes)
        if not direct:
            with admission or self._host.admission.reserve(nbytes, Kind.TASK, outputs={key: nbytes}) as admission:
                admission.wait()
                self._check_open()
                (whole,) = in_memory_together([frames])
                self._host.store_encoded(key, Encoded(header, whole, nbytes))
        with self._lock:
            closed = self._closed
            if not closed:
                key.receipt = receipt
                self._keys[key.number] = key
                self._counts["writes"] += 1
                self._counts["bytes_written"] += nbytes
                self.direct += direct
        if closed:
            with suppress(KeyError):
                self._host.discard(key)
        self._check_open()
        return receipt

    @property
    def together_nbytes(self) -> int:
        """See :attr:`Store.together_nbytes`."""
        return _TOGETHER

    def write_together(self, records: Sequence[tuple[bytes, Sequence[Frame]]]) -> list[Receipt] | None:
        """Put records into the host's memory if all fit, in one transaction and one copy."""
        sizes = [len(header) + sum(map(frame_nbytes, frames)) for header, frames in records]
        keys = [_Record(next(self._numbers)) for _ in records]
        admission = self._host.admission.reserve_now(sum(sizes), Kind.TASK, outputs=dict(zip(keys, sizes, strict=True)))
        if admission is None:
            return None
        with admission:
            self._check_open()
            frames = in_memory_together([frames for _, frames in records])
            self._host.store_encoded_together(
                {
                    key: Encoded(header, whole, nbytes)
                    for key, (header, _), whole, nbytes in zip(keys, records, frames, sizes, strict=True)
                }
            )
        receipts = [
            Receipt(key.number, nbytes, nbytes - len(header), nbytes - len(header), 0)
            for key, (header, _), nbytes in zip(keys, records, sizes, strict=True)
        ]
        with self._lock:
            closed = self._closed
            if not closed:
                for key, receipt in zip(keys, receipts, strict=True):
                    key.receipt = receipt
                    self._keys[key.number] = key
                self._counts["writes"] += len(receipts)
                self._counts["bytes_written"] += sum(sizes)
        if closed:
            self._host.discard_together(keys)
        self._check_open()
        return receipts

    def read_together(self, receipts: Sequence[Receipt]) -> list[tuple[bytes, list[memoryview]] | None]:
        """Return the records that are in the host's memory, as they are there."""
        with self._lock:
            keys = [self._keys.get(receipt.number) for receipt in receipts]
        found: list[tuple[bytes, list[memoryview]] | None] = [
            (each.header, [memoryview(frame) for frame in each.frames]) if type(each) is Encoded else None
            for each in self._host.look_together(keys)
        ]
        nbytes = [receipt.nbytes for receipt, each in zip(receipts, found, strict=True) if each is not None]
        with self._lock:
            self._counts["reads"] += len(nbytes)
            self._counts["bytes_read"] += sum(nbytes)
        return found

    def delete_together(self, receipts: Sequence[Receipt]) -> None:
        """See :meth:`Store.delete_together`."""
        with self._lock:
            gone = [self._keys.pop(receipt.number, None) for receipt in receipts]
            keys = [key for key in gone if key is not None]
            self._counts["deletes"] += len(keys)
        self._host.discard_together(keys)

    def _write_on(self, key: _Record, header: bytes, frames: Sequence[Frame], nbytes: int) -> bool:
        """Write a record to disk. Returns False if that cannot be done now."""
        self._check_open()
        try:
            self._host.store_on_disk(key, header, frames, nbytes)
        except (OSError, MemoryError) as error:
            logger.debug("%r cannot go to disk at once, so it waits for room in host memory: %s", key, error)
            return False
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(errno.EBADF, "the store was closed; what was to leave stays on the device")

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Return a record from the host's memory or from disk. It stays where it is."""
        with self._lock:
            key = self._keys.get(receipt.number)
        if key is None:
            raise RecordLost(f"record {receipt.number} is gone")
        try:
            encoded = self._host.batch.fetch(key, lend=Lend.FILE if self._in_place else None)
        except KeyError:
            raise RecordLost(f"record {receipt.number} is gone") from None
        with self._lock:
            self._counts["reads"] += 1
            self._counts["bytes_read"] += receipt.nbytes
        return encoded.header, [memoryview(frame) for frame in encoded.frames]

    def delete(self, receipt: Receipt) -> None:
        """See :meth:`Store.delete`."""
        self.delete_together([receipt])

    def close(self) -> None:
        """See :meth:`Store.close`."""
        with self._lock:
            self._closed = True
            receipts = [key.receipt for key in self._keys.values()]
        self.delete_together(receipts)

    def statistics(self) -> StoreStatistics:
        """See :meth:`Store.statistics`."""
        with self._lock:
            receipts = [key.receipt for key in self._keys.values()]
            return StoreStatistics(
                records=len(receipts),
                nbytes=sum(receipt.nbytes for receipt in receipts),
                payload_nbytes=sum(receipt.payload_nbytes for receipt in receipts),
                **self._counts,
            )
