"""Frames that are left in their file, for callers that fetch them by a way of their own.

A frame that came to disk past host memory has no hash, so there is nothing to verify and no reason
to read it: it may go back as it came. The frame is then a view of memory that is mapped and never
touched; a caller that knows how asks the view for its file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from typing import Self

from gpuspill.errors import RecordLost, StorageError
from gpuspill.storage.vectored import read_all

__all__ = ["FileMemory", "open_in_place"]


class FileMemory(mmap.mmap):
    """The start of a record's file as memory, which is ``obj`` of every view of it.

    Looking at it reads the file, and kills the process if that fails: use :meth:`fileno` or
    :meth:`load` instead. It stays valid, whatever becomes of the record, for as long as there are
    views.

    Parameters
    ----------
    fd
        The open file, which is this object's from now on.
    nbytes
        How much of it.
    """

    _fd: int

    def __new__(cls, fd: int, nbytes: int) -> Self:
        """Map a file; raises OSError."""
        self = super().__new__(cls, fd, nbytes, prot=mmap.PROT_READ)
        self._fd = fd
        return self

    def fileno(self) -> int:
        """Return the open file. The views of a record with one frame begin where it begins."""
        return self._fd

    def load(self, frame: memoryview, allocate: Callable[[int], memoryview]) -> memoryview:
        """Return the frame at the start of the file, read into memory from `allocate`. Blocks.

        Raises
        ------
        RecordLost
            The file is shorter than it was.
        StorageError
            Reading failed.
        """
        buffer = allocate(frame.nbytes)
        try:
            found = read_all(self._fd, [buffer], frame.nbytes)
        except OSError as exc:
            raise StorageError(exc.errno or errno.EIO, f"reading a record failed: {exc.strerror}") from exc
        if found < frame.nbytes:
            raise RecordLost(f"a record has {found:,} bytes of the {frame.nbytes:,} in its first frame")
        return buffer

    def __del__(self) -> None:
        os.close(self._fd)


def open_in_place(directory_fd: int, name: str, stored: int, nbytes: int) -> tuple[memoryview, memoryview] | None:
    """Return a record's payload, unread, and its footer.

    Parameters
    ----------
    directory_fd
        The open directory it is in.
    stored, nbytes
        Bytes of the payload and of the whole.

    Returns
    -------
    payload, footer
        None if the file is not of that size, or cannot be read or mapped: reading it says why.
    """
    footer = bytearray(nbytes - stored)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
    except OSError:
        return None
    try:
        whole = os.fstat(fd).st_size == nbytes and os.preadv(fd, [footer], stored) == len(footer)
        memory = FileMemory(fd, stored) if whole else None
    except (OSError, ValueError):  # ValueError: it became shorter
        memory = None
    if memory is None:
        os.close(fd)
        return None
    return memoryview(memory), memoryview(footer)
