"""Reading what could not be read at once: again, or never more."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from gpuspill.errors import RecordLost, StorageError
from gpuspill.storage.base import Allocate, Lend, Receipt, Store
from gpuspill.storage.wrappers import WrapperStore

__all__ = ["PatientStore"]

#: What says that the system is short of something now, and nothing of the record.
_SHORT = {errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
#: Seconds before another attempt: the first pause, which is doubled each time, the longest, and all
#: of them together.
_FIRST, _LONGEST, _TOTAL = 0.01, 0.5, 10.0
#: So many records in a row may be lost for reads that fail.
_IN_A_ROW = 8


class PatientStore(WrapperStore):
    """Tells, of reads that fail, what passes from what does not.

    Where the system is short of something, such as file descriptors, a read is tried again for ten
    seconds, with pauses. A read that fails twice otherwise is lost: a cluster that can compute the
    value again is better off than with an error that may come again and again. But if that befalls
    eight records and not one is read in between, it is an error: values made anew would be written
    to that disk and lost again, without end.

    Parameters
    ----------
    store
        What does the work.
    sleep
        What waits, in the thread that reads.

    Notes
    -----
    A finaliser in the middle of an operation of the store, and a store that was closed meanwhile,
    are not kept waiting: they get the error. Writes are not repeated here: until one succeeds the
    value is in memory, and it is tried again from there.
    """

    def __init__(self, store: Store, sleep: Callable[[float], object] = time.sleep) -> None:
        super().__init__(store)
        self._sleep = sleep
        self._closed = False
        self._in_a_row = 0

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Return a record.

        Raises
        ------
        RecordLost, RecordCorrupt
            It is gone or altered, or reading it failed twice.
        StorageError
            The system is short of something and stays so, or nothing can be read any more.
        """
        pause, paused, failed = _FIRST, 0.0, False
        while True:
            try:
                found = self.store.read(receipt, allocate, lend=lend)
                self._in_a_row = 0
                return found
            except StorageError as error:
                if self._closed or self.inside:
                    raise
                if error.errno in _SHORT:
                    if paused >= _TOTAL:
                        raise _given_up(error, paused) from error
                elif failed:
                    self._in_a_row += 1  # another thread may do the same, and one of the two count for both
                    if self._in_a_row > _IN_A_ROW:
                        raise
                    raise RecordLost(f"{error.strerror or error}, twice, so the record counts as lost") from error
                else:
                    failed = True
            self._sleep(pause)
            paused += pause
            pause = min(2 * pause, _LONGEST)

    def close(self) -> None:
        """Close the store below; reads that wait to try again give up."""
        self._closed = True
        self.store.close()


def _given_up(error: StorageError, seconds: float) -> StorageError:
    advice = " Raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
    return StorageError(error.errno, f"{error.strerror or error}, for {seconds:.0f} seconds.{advice}")
