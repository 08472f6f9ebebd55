"""Records of the device's manager, which are values of the host's.

So what leaves the device counts against the host's limit, and leaves the host for the disk as the bytes it is, when
the host's manager says so.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress

from gpuspill.core.budget import Kind
from gpuspill.errors import RecordLost, StorageError
from gpuspill.manager import ProxifyManager
from gpuspill.serialization import Encoded
from gpuspill.storage.base import Allocate, Buffer, Receipt, Store, StoreStatistics
from gpuspill.tier.units import Internal

__all__ = ["HostRecords"]


class _Record(Internal):
    """Key of a record in the host's manager."""

    __slots__ = ()


class HostRecords(Store):
    """A store in another manager. Closing it does not close that.

    Parameters
    ----------
    host
        The manager.
    """

    def __init__(self, host: ProxifyManager) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._keys: dict[int, tuple[_Record, Receipt]] = {}
        self._counts = dict.fromkeys(("writes", "reads", "deletes", "bytes_written", "bytes_read"), 0)
        self._closed = False

    def write(self, header: bytes, frames: Sequence[Buffer]) -> Receipt:
        """Put a record into the host's memory, once there is room or nothing can make any. Blocks for that.

        The frames are kept, not copied.
        """
        nbytes = len(header) + sum(memoryview(frame).nbytes for frame in frames)
        key = _Record(next(self._numbers))
        receipt = Receipt(key.number, nbytes, nbytes - len(header), nbytes - len(header), 0)
        # As a task: a task is what waits for the room on the device.
        with self._host.reserve(nbytes, Kind.TASK, outputs={key: nbytes}) as admission:
            admission.wait()
            with self._lock:
                if self._closed:
                    raise StorageError(errno.EBADF, "the store was closed")
                self._keys[key.number] = key, receipt
                self._counts["writes"] += 1
                self._counts["bytes_written"] += nbytes
            self._host.store_encoded(key, Encoded(header, frames, nbytes))
        with self._lock:
            closed = key.number not in self._keys
        if closed:  # in this very moment
            with suppress(KeyError):
                self._host.discard(key)
        return receipt

    def read(self, receipt: Receipt, allocate: Allocate | None = None) -> tuple[bytes, list[memoryview]]:
        """Return a record, from the host's memory or from disk. It stays where it is; nothing has to leave for it."""
        with self._lock:
            key, _ = self._keys.get(receipt.number, (None, None))
        if key is None:
            raise RecordLost(f"record {receipt.number} is gone")
        try:
            encoded = self._host.fetch(key)
        except KeyError:
            raise RecordLost(f"record {receipt.number} is gone") from None
        with self._lock:
            self._counts["reads"] += 1
            self._counts["bytes_read"] += receipt.nbytes
        return encoded.header, [memoryview(frame) for frame in encoded.frames]

    def delete(self, receipt: Receipt) -> None:
        """See :meth:`Store.delete`."""
        with self._lock:
            key, _ = self._keys.pop(receipt.number, (None, None))
            if key is None:
                return
            self._counts["deletes"] += 1
        with suppress(KeyError):
            self._host.discard(key)

    def close(self) -> None:
        """See :meth:`Store.close`."""
        with self._lock:
            self._closed = True
            receipts = [receipt for _, receipt in self._keys.values()]
        for receipt in receipts:
            self.delete(receipt)

    def statistics(self) -> StoreStatistics:
        """See :meth:`Store.statistics`."""
        with self._lock:
            receipts = [receipt for _, receipt in self._keys.values()]
            return StoreStatistics(
                records=len(receipts),
                nbytes=sum(receipt.nbytes for receipt in receipts),
                payload_nbytes=sum(receipt.payload_nbytes for receipt in receipts),
                **self._counts,
            )
