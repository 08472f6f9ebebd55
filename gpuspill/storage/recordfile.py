"""One file of one record: written once, and read whole."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gpuspill.storage.mapped import map_range
from gpuspill.storage.vectored import read_all, write_all

__all__ = ["NewFile", "open_record"]

logger = logging.getLogger(__name__)

#: What cannot be mapped is read back in pieces of so many bytes, each hashed while the processor's
#: cache has it.
_PIECE_NBYTES = 512 * 2**10


class NewFile:
    """A file that is not complete yet. It has a number that no receipt names before it is.

    Ends in exactly one of :meth:`publish` and :meth:`discard`; used by one thread.

    Parameters
    ----------
    directory_fd
        The open directory to make it in.
    name
        Its name. What has that name already stays, and there is an error.
    remove
        ``remove(name)`` removes the file; raises OSError.
    before_each
        Called before each system call that writes; what it raises ends the write.

    Attributes
    ----------
    nbytes : int
        Bytes written so far.
    """

    __slots__ = ("_before_each", "_directory_fd", "_fd", "_name", "_remove", "_there", "nbytes")

    def __init__(
        self,
        directory_fd: int,
        name: str,
        remove: Callable[[str], None],
        before_each: Callable[[], None] | None = None,
    ) -> None:
        self._directory_fd = directory_fd
        self._name = name
        self._remove = remove
        self._before_each = before_each
        self._fd: int | None = None
        self._there = False
        self.nbytes = 0

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Write buffers, all of them. The first call makes the file; raises OSError."""
        self.nbytes += write_all(self._open(), buffers, self._before_each)

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(
                self._name,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
                dir_fd=self._directory_fd,
            )
            self._there = True
        return self._fd

    def look(self, start: int) -> Iterator[memoryview]:
        """Yield what was written from byte `start` on, as the system has it, for one step.

        In one piece where it can be mapped, else read back in small ones.

        Raises
        ------
        OSError
            As the system reports it; also if the file is shorter than what was written.
        """
        fd = self._open()
        mapped = map_range(fd, start, self.nbytes - start)
        if mapped is not None:
            yield mapped
            return
        buffer = memoryview(bytearray(min(_PIECE_NBYTES, self.nbytes - start)))
        while start < self.nbytes:
            piece = buffer[: self.nbytes - start]
            if read_all(fd, [piece], start=start) < piece.nbytes:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            yield piece
            start += piece.nbytes

    def fill(self, nbytes: int, copy: Callable[[int, Callable[[], None]], bool]) -> bool:
        """Let `copy` write the first bytes of the file, by a way of its own.

        Parameters
        ----------
        nbytes
            How many at most. They are allocated first, so that a disk without room says so at once
            and in so many words, and the length of the file does not change while `copy` writes.
        copy
            ``copy(fd, before_each) -> bool``: whether they are written. If not, the file is empty
            again.

        Raises
        ------
        OSError
            As the system reports it.
        """
        assert not self.nbytes
        if self._before_each is not None:
            self._before_each()
        fd = self._open()
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, nbytes)
        if not copy(fd, self._before_each or _nothing):
            os.ftruncate(fd, 0)
            return False
        self.nbytes = os.lseek(fd, nbytes, os.SEEK_SET)
        return True

    def publish(self) -> None:
        """End writing; raises OSError, also if the file was removed meanwhile."""
        assert self._fd is not None
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._name)
        # Some file systems report only here that there was no room.
        fd, self._fd = self._fd, None
        os.close(fd)

    def discard(self) -> None:
        """Remove the file, whatever state it is in. Never raises."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):
                os.close(fd)
        if self._there:
            self._there = False
            try:
                self._remove(self._name)
            except FileNotFoundError:
                pass
            except OSError as exc:
                logger.warning("Could not remove an incomplete file: %s", exc)


def _nothing() -> None:
    """Stand in for `before_each`."""


@contextmanager
def open_record(directory_fd: int, name: str) -> Iterator[int]:
    """Open a complete record for reading; yields its file descriptor. Raises OSError.

    Parameters
    ----------
    directory_fd
        The open directory it is in.
    """
    # Not blocking: a pipe may have been put in its place.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)
