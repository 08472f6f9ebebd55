"""Records in files of the local file system, one file each.

Who may do what: any number of threads may call anything at any time. One lock guards the registry
of records and the counters, and nothing else: it is never held during a system call, a codec, a
checksum, an allocation of a buffer or a callback.

The garbage collector may run a finaliser while its thread holds that lock, and this may want a
record. So the lock is re-entrant (:class:`~gpuspill.storage.reentrancy.Section`): in the middle of
another operation records can be read; what is to be deleted goes when that operation ends, and
nothing is written.

Files are not synced to the device. A record is of no use once the process that holds its receipt
has ended, so it has to survive nothing; the page cache may write it back when it likes, or never,
if it is deleted first.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuspill.errors import GpuspillError, RecordCorrupt, RecordLost, StorageError, StorageFull
from gpuspill.storage.base import (
    Allocate,
    Frame,
    FrameStream,
    Lend,
    Metrics,
    Receipt,
    Store,
    StoreStatistics,
    fresh_buffer,
)
from gpuspill.storage.codecs import CodecChooser
from gpuspill.storage.counters import StorageCounters
from gpuspill.storage.directory import PrivateDirectory, sweep_leftovers
from gpuspill.storage.record import flat
from gpuspill.storage.record_io import RecordReader, RecordWriter
from gpuspill.storage.recordfile import NewFile
from gpuspill.storage.reentrancy import Section, Tally, Visitors, visit

__all__ = ["FileStore"]

logger = logging.getLogger(__name__)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: What says that the directory may be gone.
_NO_DIRECTORY = {errno.ENOENT, errno.ESTALE}


class FileStore(Store):
    """A store in a private directory.

    Parameters
    ----------
    directory
        Where to make the private directory; made too if it is missing.
    named
        Where `directory` comes from, for messages.
    codecs
        When to compress, and with what; by default never. It learns this store's speed, so it
        serves this store only.
    metrics
        Called after each operation, in the thread that did it, as ``metrics(label, value, unit)``
        with the labels ``disk-write``, ``disk-read`` (seconds, bytes, count), ``checksum``,
        ``compress`` and ``decompress`` (seconds). What it raises is logged once and ignored.
    sweep
        Whether to remove first what stores of dead processes left in `directory`.
    clock
        Wall time in seconds.

    Attributes
    ----------
    path : str
        The private directory.

    Raises
    ------
    StorageError
        The directory cannot be made.

    Notes
    -----
    A store that is dropped, or still there when Python exits, closes itself. After a fork it
    belongs to the parent: the child's copy reads, each time through a descriptor of its own, writes
    nothing and removes nothing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        named: str = "directory",
        codecs: CodecChooser | None = None,
        metrics: Metrics | None = None,
        sweep: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if sweep:
            sweep_leftovers(directory)
        self._named = named
        self._codecs = CodecChooser() if codecs is None else codecs
        self._metrics = metrics
        self._clock = clock
        self._section = Section()
        self._visitors = Visitors()
        self._records: dict[int, Receipt] = {}
        self._nbytes = self._payload_nbytes = 0
        self._numbers = itertools.count(1)
        self._active = 0
        self._closed = False
        self._pid = os.getpid()
        self._counts = Tally()
        self._postponed: deque[Receipt] = deque()
        self._logged: set[str] = set()
        self._parent = os.path.abspath(directory)
        self._directory = PrivateDirectory(self._parent, named)
        self._directories = [self._directory]
        self.path = self._directory.path
        self._block_nbytes = max(1, os.statvfs(self.path).f_frsize)
        self._finalizer = weakref.finalize(self, _remove_all, self._directories)

    def __repr__(self) -> str:
        return f"<FileStore {self.path}: {len(self._records)} records>"

    def path_of(self, receipt: Receipt) -> str:
        """Return the file of a record; for messages and tests."""
        return os.path.join(self.path, str(receipt.number))

    # -- writing ---------------------------------------------------------------------------------

    @visit
    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Store a record, completely or not at all. See :meth:`Store.write`.

        Notes
        -----
        Frames go to the kernel in calls of 32 MiB where their number and size allow: the fewer
        calls, the fewer times this thread has to wait for the interpreter lock. What is hashed is
        what the kernel has of the file then. At most about 32 MiB, and one frame, of compressed
        data is held. Frame streams are not compressed, nor hashed if they go past host memory.
        """
        views = [frame if isinstance(frame, FrameStream) else flat(frame, index) for index, frame in enumerate(frames)]
        number = self._begin_write()
        counts = StorageCounters()
        try:
            receipt = self._write(number, header, views, counts)
        except BaseException:
            counts.write_failures = 1
            raise
        finally:
            self._end(counts)
        self._report(
            ("disk-write", counts.write_seconds, counts.bytes_written),
            ("checksum", counts.checksum_seconds, None),
            ("compress", counts.compress_seconds, None),
        )
        return receipt

    def _write(
        self, number: int, header: bytes, views: list[memoryview | FrameStream], counts: StorageCounters
    ) -> Receipt:
        start = self._codecs.clock()
        writer = RecordWriter(header, views, self._codecs, self._clock, counts)
        directory = self._directory
        file = NewFile(directory.fd, str(number), directory.unlink, self._check_open)
        try:
            receipt = writer.write(number, file)
            self._register(receipt)
        except BaseException as exc:
            file.discard()
            if isinstance(exc, OSError) and not isinstance(exc, StorageError):
                if exc.errno in _NO_DIRECTORY and directory.gone:
                    raise self._start_anew(directory) from exc
                raise self._write_error(exc) from exc
            raise
        counts.writes = 1
        counts.bytes_written = receipt.nbytes
        counts.payload_written = receipt.payload_nbytes
        if receipt.hashed:  # else another library wrote it, and waited for others than the disk
            spent = self._codecs.clock() - start
            self._codecs.observe_write(receipt.nbytes, counts.write_seconds, writer.cpu, spent)
        return receipt

    def _begin_write(self) -> int:
        if self._inherited:
            raise StorageError(
                errno.EPERM,
                f"{self.path} is the directory of process {self._pid}, from which this one was forked; the value "
                "stays in memory",
            )
        with self._section as nested:
            if not self._closed and not nested:
                self._active += 1
                return next(self._numbers)
            self._counts.add(StorageCounters(write_failures=1))
        if nested:
            raise StorageError(
                errno.EDEADLK, "a finaliser cannot write in the middle of what its thread does with the store"
            )
        raise self._closed_error()

    def _register(self, receipt: Receipt) -> None:
        with self._section:
            closed = self._closed
            if not closed:
                self._records[receipt.number] = receipt
                self._nbytes += receipt.nbytes
                self._payload_nbytes += receipt.payload_nbytes
        if closed:
            raise self._closed_error()

    @property
    def _inherited(self) -> bool:
        """Whether this is a child forked from the process whose store this is."""
        return os.getpid() != self._pid

    def _check_open(self) -> None:
        # Without the lock: reading one attribute is atomic, and `_register` looks again.
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StorageError:
        return StorageError(errno.EBADF, f"{self.path} was closed; the value stays in memory")

    def _start_anew(self, gone: PrivateDirectory) -> StorageError:
        """Make another directory in the place of one that was removed with all its records.

        Returns what to raise: the write that found out is for its caller to try again. StorageError
        if none can be made.
        """
        fresh = PrivateDirectory(self._parent, self._named)
        with self._section:
            first = self._directory is gone and not self._closed
            if first:
                # Reads in flight still look into the old one. It is closed with the store.
                self._directories.append(fresh)
                self._directory = fresh
                self.path = fresh.path
        if not first:
            fresh.remove()
        return StorageError(
            errno.ENOENT,
            f"{gone.path} was removed while it was in use, and what was in it is lost. From now on values go to "
            f"{self.path}. Exclude the directories of running processes from any clean-up there. The value stays in "
            "memory",
        )

    def _write_error(self, exc: OSError) -> StorageError:
        if exc.errno not in _NO_SPACE:
            return StorageError(exc.errno, f"writing to {self.path} failed: {exc.strerror or exc}")
        try:
            usage = os.statvfs(self._directory.fd)
            free = f"{usage.f_bavail * usage.f_frsize:,} bytes"
        except OSError:
            free = "an unknown number of bytes"
        return StorageFull(
            exc.errno,
            f"no room for a record in {self.path} ({exc.strerror}): {self._nbytes:,} bytes in use by this "
            f"store, {free} free on its file system. Free space there, or choose a directory on a "
            f"larger disk ({self._named}). The value stays in memory",
        )

    # -- reading ---------------------------------------------------------------------------------

    @visit
    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Return the header and the frames of a record, verified. See :meth:`Store.read`."""
        counts = StorageCounters()
        self._begin_read(receipt)
        try:
            reader = RecordReader(
                receipt,
                self.path_of(receipt),
                fresh_buffer if allocate is None else allocate,
                self._codecs,
                self._clock,
                counts,
            )
            where = self._directory.fd, str(receipt.number)
            borrowed = None
            if lend is Lend.MEMORY:
                borrowed = reader.borrow(*where)
            elif lend is Lend.FILE and not receipt.hashed:
                borrowed = reader.lend(*where)
            header, frames = reader.read(*where) if borrowed is None else borrowed
            counts.reads = 1
            counts.bytes_read = receipt.nbytes
            counts.payload_read = receipt.payload_nbytes
        except BaseException as exc:
            counts.read_failures = 1
            counts.lost = isinstance(exc, RecordLost)
            counts.corrupt = isinstance(exc, RecordCorrupt)
            if isinstance(exc, GpuspillError):
                # A caller that keeps the error must not keep the buffers with it.
                traceback.clear_frames(exc.__traceback__)
            raise
        finally:
            self._end(counts)
        if borrowed is None:  # mapping, or opening, says nothing of what reading takes
            self._codecs.observe_read(receipt.nbytes, counts.read_seconds, reader.cpu)
        self._report(
            ("disk-read", counts.read_seconds, counts.bytes_read),
            ("checksum", counts.checksum_seconds, None),
            ("decompress", counts.decompress_seconds, None),
        )
        return header, frames

    def _begin_read(self, receipt: Receipt) -> None:
        with self._section:
            # Equal, not just of the same number: a receipt of another store is no record of ours.
            known = not self._closed and self._records.get(receipt.number) == receipt
            if known:
                self._active += 1
            else:
                self._counts.add(StorageCounters(read_failures=1, lost=1))
        if not known:
            raise RecordLost(
                f"{self.path_of(receipt)} is no record of this store: it was deleted, the store "
                "was closed, or another store wrote it"
            )

    # -- removing --------------------------------------------------------------------------------

    @visit
    def delete(self, receipt: Receipt) -> None:
        """Forget a record and remove its file. See :meth:`Store.delete`.

        Notes
        -----
        Two system calls; but it takes about 1 ms for a file of 32 MiB in the page cache, so keep it
        off the event loop. If the file cannot be removed, its bytes stay counted, and it goes with
        the store.
        """
        if self._inherited:
            return
        with self._section as nested:
            if self._closed or self._records.get(receipt.number) != receipt:
                return
            if nested:
                self._postponed.append(receipt)
                return
            del self._records[receipt.number]
            self._payload_nbytes -= receipt.payload_nbytes
            self._active += 1
        counts = StorageCounters(deletes=1)
        try:
            self._directory.unlink(str(receipt.number))
        except FileNotFoundError:
            pass
        except OSError as exc:
            counts = StorageCounters(delete_failures=1)
            self._log_once(f"Could not remove {self.path_of(receipt)}: {exc}")
        self._end(counts, receipt.nbytes if counts.deletes else 0)

    @visit
    def close(self) -> None:
        """Remove everything. See :meth:`Store.close`.

        Notes
        -----
        What operations in progress still need (the directory itself, the lock file) is removed by
        the last of them; without any, all is gone when this returns.
        """
        with self._section:
            if self._closed:
                return
            self._closed = True
            used = sum(receipt.nbytes for receipt in self._records.values())
            self._records.clear()
            self._payload_nbytes = 0
            idle = not self._active
            # This is an operation, too: else the last of the others could close the directory while
            # it is emptied, and its descriptor may be another directory's a moment later.
            self._active += 1
        try:
            if not idle:
                self._directory.empty()
        finally:
            self._end(StorageCounters(), used)

    def _end(self, counts: StorageCounters, gone_nbytes: int = 0) -> None:
        """Leave an operation; the last one to leave a closed store turns off the light."""
        with self._section as nested:
            self._counts.add(counts)
            self._nbytes -= gone_nbytes
            self._active -= 1
            last = self._closed and not self._active and not nested
        if last:
            self._finalizer()
        while self._postponed and not nested:
            with suppress(IndexError):
                self.delete(self._postponed.popleft())

    # -- looking ---------------------------------------------------------------------------------

    @property
    def block_nbytes(self) -> int:
        """See :attr:`Store.block_nbytes`: the file system's."""
        return self._block_nbytes

    @property
    def inside(self) -> bool:
        """See :attr:`Store.inside`."""
        return self._visitors.here

    def statistics(self) -> StoreStatistics:
        """Return a consistent snapshot. No I/O."""
        with self._section:
            return StoreStatistics(
                records=len(self._records),
                nbytes=self._nbytes,
                payload_nbytes=self._payload_nbytes,
                **self._counts.sum().as_dict(),
            )

    def validate(self) -> None:
        """Check registry, counters and directory against each other. For tests, and while idle."""
        super().validate()
        with self._section:
            assert self._active == 0, self._active
            records = dict(self._records)
            used, payload_nbytes = self._nbytes, self._payload_nbytes
            failed = self._counts.sum().delete_failures
            closed = self._closed
        assert payload_nbytes == sum(r.payload_nbytes for r in records.values())
        held = sum(receipt.nbytes for receipt in records.values())
        assert used == held or (failed and used > held), (used, held)
        if not failed:
            found = set() if closed else set(os.listdir(self._directory.fd)) - {"lock"}
            assert found <= {str(number) for number in records}, found
            assert not (closed and os.path.exists(self.path)), self.path

    def _report(self, *entries: tuple[str, float, int | None]) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        try:
            for label, seconds, nbytes in entries:
                if nbytes is not None:
                    metrics(label, nbytes, "bytes")
                    metrics(label, 1, "count")
                if nbytes is not None or seconds:
                    metrics(label, seconds, "seconds")
        except Exception:
            # The data is safe; a display that fails must not make it look lost.
            self._log_once("The callback for metrics failed", exc_info=True)

    def _log_once(self, message: str, exc_info: bool = False) -> None:
        kind = message.split(" ", 2)[0]
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s (said once)", message, exc_info=exc_info)


def _remove_all(directories: list[PrivateDirectory]) -> None:
    for directory in directories:
        directory.remove()
