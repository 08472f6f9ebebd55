"""A store in a mapping: records as the values of any ``MutableMapping[str, bytes]``.

So a ``zict.File``, a ``zict.Zip``, an ``fsspec.get_mapper("s3://...")`` or a class of one's own can
keep records. Each record is one value, complete in itself, in the format of
:mod:`gpuspill.storage.record`. It is verified when it is read, wherever it was meanwhile.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError, StorageFull, Unspillable
from gpuspill.storage.base import (
    Allocate,
    Frame,
    Lend,
    Metrics,
    Receipt,
    Store,
    StoreStatistics,
    fresh_buffer,
    in_memory,
)
from gpuspill.storage.counters import StorageCounters
from gpuspill.storage.record import RecordEncoder, decode_record, flat
from gpuspill.storage.reentrancy import Section, Tally, Visitors, visit

__all__ = ["MappingStore"]

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class MappingStore(Store):
    """A store whose records are the values of a mapping.

    Parameters
    ----------
    records
        Where they go. Its methods are called from several threads at once, and block as long as
        they like; no lock is held around them. What they raise is taken for a failure of the disk.
    metrics
        See :class:`~gpuspill.storage.files.FileStore`.
    clock
        Seconds, monotonic.

    Notes
    -----
    The names of records begin with a random part, so several stores can share a mapping. Closing
    deletes the records of this store only, and nothing else in the mapping. What a process that was
    killed leaves in a mapping stays there: its owner knows where it is, and how long to keep it.
    What the mapping fails to delete is tried again after the next deletion that works, and on
    closing. A record is held in memory once more while it is written or read. After a fork the
    store belongs to the parent: the child reads, writes nothing and deletes nothing.
    """

    def __init__(
        self,
        records: MutableMapping[str, bytes],
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mapping = records
        self._metrics = metrics
        self._clock = clock
        self._prefix = f"gpuspill-{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)
        self._section = Section()
        self._visitors = Visitors()
        self._records: dict[int, Receipt] = {}
        # No lock: a finaliser may delete a record in the middle of any line. Each step is one that
        # Python makes atomic.
        self._undeleted: deque[str] = deque()
        self._counts = Tally()
        self._closed = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<MappingStore {self._described}: {len(self._records)} records>"

    @property
    def _described(self) -> str:
        return f"{self._prefix}-* in {type(self._mapping).__module__}.{type(self._mapping).__qualname__}"

    def _name(self, receipt: Receipt) -> str:
        return f"{self._prefix}-{receipt.number}"

    # -- writing -----------------------------------------------------------------------------------

    @visit
    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Store a record, completely or not at all. See :meth:`Store.write`."""
        counts = StorageCounters(write_failures=1)
        try:
            self._check_open()
            data, receipt, counts.checksum_seconds = self._encode(header, frames)
            start = self._clock()
            self._put(self._name(receipt), data)
            counts.write_seconds = self._clock() - start
            with self._section:
                closed = self._closed
                if not closed:
                    self._records[receipt.number] = receipt
            if closed:
                self._drop(receipt)
                raise self._closed_error()
            counts.write_failures, counts.writes = 0, 1
            counts.bytes_written, counts.payload_written = receipt.nbytes, receipt.payload_nbytes
        finally:
            self._add(counts)
        self._report("disk-write", counts.write_seconds, receipt.nbytes, counts.checksum_seconds)
        return receipt

    def _encode(self, header: bytes, frames: Sequence[Frame]) -> tuple[bytes, Receipt, float]:
        """Return a record as bytes, its receipt, and the seconds that hashing took."""
        encoder = RecordEncoder()
        pieces: list[memoryview] = []
        for index, frame in enumerate(frames):
            view = flat(in_memory(frame), index)
            pieces += encoder.start(view.nbytes)
            pieces.append(view)
        # Joined before it is hashed: what is hashed is what is stored, whatever becomes of the
        # frames meanwhile.
        payload = b"".join(pieces)
        start = self._clock()
        encoder.feed(memoryview(payload))
        footer = encoder.finish(header)
        seconds = self._clock() - start
        data = payload + footer
        receipt = Receipt(
            next(self._numbers), len(data), encoder.payload_nbytes, encoder.stored_nbytes, encoder.checksum
        )
        return data, receipt, seconds

    def _put(self, name: str, data: bytes) -> None:
        try:
            self._mapping[name] = data
        except BaseException as error:
            # It may have been stored even so, or in part.
            self._remove(name)
            if not isinstance(error, Exception):
                raise
            number = getattr(error, "errno", None) or errno.EIO
            kind = StorageFull if number in _NO_ROOM else StorageError
            raise kind(
                number, f"writing to {self._described} failed: {_said(error)}. The value stays in memory"
            ) from error

    # -- reading -----------------------------------------------------------------------------------

    @visit
    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Return the header and the frames of a record, verified. See :meth:`Store.read`."""
        counts = StorageCounters(read_failures=1)
        try:
            start = self._clock()
            data = self._get(receipt)
            counts.read_seconds = self._clock() - start
            result = self._decode(receipt, data, fresh_buffer if allocate is None else allocate, counts)
            counts.read_failures, counts.reads = 0, 1
            counts.bytes_read, counts.payload_read = receipt.nbytes, receipt.payload_nbytes
        except RecordLost:
            counts.lost = 1
            raise
        except RecordCorrupt:
            counts.corrupt = 1
            raise
        finally:
            self._add(counts)
        self._report("disk-read", counts.read_seconds, receipt.nbytes, counts.checksum_seconds)
        return result

    def _get(self, receipt: Receipt) -> memoryview:
        # Equal, not just of the same number: a receipt of another store is no record of this one.
        if self._records.get(receipt.number) != receipt:
            raise RecordLost(f"record {receipt.number} is no record of {self!r}: it was deleted, or is another store's")
        try:
            found = self._mapping[self._name(receipt)]
        except KeyError as error:
            raise RecordLost(f"{self._name(receipt)} is gone from {self._described}") from error
        except Exception as error:
            number = getattr(error, "errno", None) or errno.EIO
            raise StorageError(number, f"reading from {self._described} failed: {_said(error)}") from error
        try:
            return flat(found)
        except (TypeError, Unspillable) as error:
            raise RecordCorrupt(f"{self._name(receipt)} has no bytes: {_said(error)}") from error

    def _decode(
        self, receipt: Receipt, data: memoryview, allocate: Allocate, counts: StorageCounters
    ) -> tuple[bytes, list[memoryview]]:
        where = self._name(receipt)
        if data.nbytes < receipt.nbytes:
            raise RecordLost(f"{where} has {data.nbytes:,} bytes of {receipt.nbytes:,}")
        start = self._clock()
        payload, footer = data[: receipt.stored_nbytes], data[receipt.stored_nbytes :]
        header, stored = decode_record(payload, footer, receipt.checksum, where)
        counts.checksum_seconds = self._clock() - start
        frames = []
        for frame in stored:
            # Memory of its own for each: a piece that is kept alive keeps no other.
            memory = allocate(frame.data.nbytes)
            memory[:] = frame.data
            frames.append(memory)
        return header, frames

    # -- removing ----------------------------------------------------------------------------------

    @visit
    def delete(self, receipt: Receipt) -> None:
        """Forget a record and remove it from the mapping. See :meth:`Store.delete`."""
        if os.getpid() != self._pid:
            return
        with self._section:
            known = self._records.get(receipt.number) == receipt
            if known:
                del self._records[receipt.number]
        if known:
            self._drop(receipt)

    @visit
    def close(self) -> None:
        """Remove this store's records from the mapping, and nothing else."""
        if os.getpid() != self._pid:
            return
        with self._section:
            self._closed = True
            records = list(self._records.values())
            self._records.clear()
        for receipt in records:
            self._drop(receipt)
        for _ in range(len(self._undeleted)):
            self._remove_undeleted()

    def _drop(self, receipt: Receipt) -> None:
        removed = self._remove(self._name(receipt))
        self._add(StorageCounters(deletes=int(removed), delete_failures=int(not removed)))
        if removed:
            self._remove_undeleted()

    def _remove_undeleted(self) -> None:
        """Try again to remove the record that has been left for longest."""
        with suppress(IndexError):
            self._remove(self._undeleted.popleft())

    def _remove(self, name: str) -> bool:
        """Remove a record if it is there; return whether it is gone. Raises no Exception."""
        try:
            del self._mapping[name]
        except KeyError:
            return True
        except Exception:
            self._undeleted.append(name)
            return False
        return True

    # -- the rest ----------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """See :attr:`Store.inside`. The mapping may hold a lock of its own meanwhile."""
        return self._visitors.here

    def statistics(self) -> StoreStatistics:
        """Return a consistent snapshot. No I/O."""
        with self._section:
            receipts = list(self._records.values())
            return StoreStatistics(
                records=len(receipts),
                nbytes=sum(receipt.nbytes for receipt in receipts),
                payload_nbytes=sum(receipt.payload_nbytes for receipt in receipts),
                **self._counts.sum().as_dict(),
            )

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise StorageError(
                errno.EPERM,
                f"{self._described} belongs to process {self._pid}, from which this one was forked; the value stays in "
                "memory",
            )
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StorageError:
        return StorageError(errno.EBADF, f"{self._described} was closed; the value stays in memory")

    def _add(self, counts: StorageCounters) -> None:
        with self._section:
            self._counts.add(counts)

    def _report(self, label: str, seconds: float, nbytes: int, hashing: float) -> None:
        if self._metrics is not None:
            self._metrics(label, seconds, "seconds")
            self._metrics(label, nbytes, "bytes")
            self._metrics(label, 1, "count")
            self._metrics("checksum", hashing, "seconds")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
