"""Between device memory and files, past the host's: by GPUDirect Storage.

Whether to try is decided by :class:`Trust`, which does nothing. :class:`PastHost` does it, in
pieces, on any :class:`FileDriver`, which is the boundary to the library. Whatever goes wrong there
is no loss: the bytes take the ordinary way, and after some failures in a row nothing is tried any
more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from gpuspill.device.port import Allocation

__all__ = ["DirectFile", "FileDriver", "FileDriverError", "PastHost", "Transfer", "Trust"]

logger = logging.getLogger("gpuspill")

#: Less than this goes through host memory: opening a file for it costs more than the copy.
_MINIMUM: Final = 2**20
#: Bytes of one transfer, and how many are under way at once. Whole pages, as direct I/O wants them.
_PIECE: Final = 16 * 2**20
_AHEAD: Final = 4
#: Failures in a row after which nothing is tried any more.
_PATIENCE: Final = 3


class FileDriverError(Exception):
    """The library, its driver or the file system does not do what was asked."""


class Transfer(Protocol):
    """A transfer that was begun."""

    def get(self) -> int:
        """Wait until it is done; return how many bytes were moved. Called once.

        Raises FileDriverError if it failed.
        """


class DirectFile(Protocol):
    """A file that device memory is written to or read from. Used by one thread.

    Who begins a transfer keeps the file and the memory, and changes neither, until it has ended.
    Several may be under way, and are done in any order.
    """

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> Transfer:
        """Begin to write bytes from `offset` of an allocation to that place in the file."""

    def read(self, allocation: Allocation, offset: int, nbytes: int) -> Transfer:
        """Begin to read bytes from `offset` of the file to that place in an allocation."""

    def close(self) -> None:
        """Close it, when no transfer is under way. Never raises."""


class FileDriver(Protocol):
    """What opens files for device memory. Thread-safe."""

    def open(self, path: str, *, write: bool) -> DirectFile:
        """Open a file that is there. Raises FileDriverError."""


class Trust:
    """Decides whether to try a way that may fail, and when to speak of it. No I/O, no lock.

    Parameters
    ----------
    minimum
        Fewest bytes for which to try.
    patience
        Failures in a row after which it is not tried any more.
    """

    __slots__ = ("_failures", "_minimum", "_patience", "_spoken")

    def __init__(self, minimum: int = _MINIMUM, patience: int = _PATIENCE) -> None:
        self._minimum = max(1, minimum)
        self._patience = patience
        self._failures = 0
        self._spoken = False

    @property
    def lost(self) -> bool:
        """Whether it is given up for good."""
        return self._failures >= self._patience

    def worth(self, nbytes: int) -> bool:
        """Whether to try with so many bytes."""
        return nbytes >= self._minimum and not self.lost

    def succeeded(self) -> None:
        """Note that it worked: earlier failures count no more, unless it is given up."""
        if not self.lost:
            self._failures = 0

    def failed(self) -> bool:
        """Note that it did not. Returns whether to say so, which is once."""
        self._failures += 1
        speak, self._spoken = not self._spoken, True
        return speak


class PastHost:
    """Copies whole allocations to and from the start of files.

    Parameters
    ----------
    trust
        Decides whether to try.
    piece
        Bytes of one transfer; a multiple of 4096.

    Attributes
    ----------
    writes, reads
        Allocations that went past the host, in each direction.

    Notes
    -----
    Thread-safe; no lock is held during a transfer. The methods block until nothing is under way any
    more, also if they raise or fail: neither end is in use. What had the memory before, or made
    what is in it, has to be observed first; no stream is waited for here.
    """

    def __init__(self, driver: FileDriver, *, trust: Trust | None = None, piece: int = _PIECE) -> None:
        self._driver = driver
        self._trust = Trust() if trust is None else trust
        self._piece = piece
        self._lock = threading.Lock()
        self.writes = 0
        self.reads = 0

    def worth(self, nbytes: int) -> bool:
        """Whether to try with so many bytes."""
        return self._trust.worth(nbytes)

    def write(self, allocation: Allocation, fd: int, before_each: Callable[[], object]) -> bool:
        """Write an allocation to the start of an open file, which has room for it.

        Parameters
        ----------
        allocation
            Whose producer was observed.
        before_each
            Called before each piece; what it raises ends the copy and is passed on.

        Returns
        -------
        bool
            Whether all bytes are there. If not, the file holds anything.
        """
        done = self._move(allocation, fd, before_each, write=True)
        with self._lock:
            self.writes += done
        return done

    def read(self, fd: int, allocation: Allocation) -> bool:
        """Fill an unused allocation with the start of an open file.

        Returns
        -------
        bool
            Whether all bytes are there. If not, the allocation holds anything.
        """
        if not self.worth(allocation.nbytes):
            return False
        done = self._move(allocation, fd, _nothing, write=False)
        with self._lock:
            self.reads += done
        return done

    def _move(self, allocation: Allocation, fd: int, before_each: Callable[[], object], *, write: bool) -> bool:
        # By the descriptor, whatever the file is called by now, if it has a name at all.
        try:
            file = self._driver.open(f"/proc/self/fd/{fd}", write=write)
            try:
                _in_pieces(allocation, self._piece, file.write if write else file.read, before_each)
            finally:
                file.close()
        except FileDriverError as error:
            problem = str(error)
        else:
            with self._lock:
                self._trust.succeeded()
            return True
        with self._lock:
            speak = self._trust.failed()
        if speak:
            logger.warning(
                "GPUDirect Storage failed to %s %s bytes %s a file: %s. They go through host memory instead, and all "
                "others if that happens %s times in a row (said once)",
                *(("write", f"{allocation.nbytes:,}", "to") if write else ("read", f"{allocation.nbytes:,}", "from")),
                problem,
                _PATIENCE,
            )
        return False


def _in_pieces(
    allocation: Allocation,
    piece: int,
    begin: Callable[[Allocation, int, int], Transfer],
    before_each: Callable[[], object],
) -> None:
    """Move an allocation in pieces, several at once, and wait for all of them."""
    pending: deque[tuple[Transfer, int]] = deque()

    def finish() -> None:
        transfer, nbytes = pending.popleft()
        moved = transfer.get()
        if moved != nbytes:
            raise FileDriverError(f"{moved:,} bytes were moved of {nbytes:,}")

    try:
        for offset in range(0, allocation.nbytes, piece):
            before_each()
            if len(pending) == _AHEAD:
                finish()
            nbytes = min(piece, allocation.nbytes - offset)
            pending.append((begin(allocation, offset, nbytes), nbytes))
        while pending:
            finish()
    finally:
        # Neither the memory nor the file may go while one is under way.
        while pending:
            with suppress(FileDriverError):
                pending.popleft()[0].get()


def _nothing() -> None:
    """Stand in for `before_each`."""
