"""Looking at a file in the page cache instead of copying it: to pass it on, or to hash it.

Touching a mapped page that cannot be read kills the process. So all pages are brought in first, by
a call that reports what is wrong instead (``MADV_POPULATE_READ``, Linux 5.14); a caller that gets
no mapping reads the file. While this process looks at the bytes, which takes milliseconds, two
risks are left. The system may take a page back for lack of memory, and fail to read it again. A
program may truncate the file, in a directory that is this user's alone. When the bytes are sent
only the system looks at them, and says ``EFAULT``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress

__all__ = ["MAP_FROM_NBYTES", "map_file", "map_range"]

#: Smaller files are read: mapping takes some ten microseconds and a file descriptor.
MAP_FROM_NBYTES = 2**20

#: ``MADV_POPULATE_READ`` in Linux's ``asm-generic/mman-common.h``; Python's module has no name for
#: it.
_POPULATE_READ = 22


def map_file(directory_fd: int, name: str, nbytes: int) -> memoryview | None:
    """Return the bytes of a file as read-only memory, if that is safe here.

    Blocks for as long as the file has to be read from the disk, without the interpreter's lock.

    Parameters
    ----------
    directory_fd
        The open directory it is in.
    nbytes
        Its size.

    Returns
    -------
    memoryview or None
        The mapping is undone with the last view, and does not need the file's name any more. None
        if it is not of that size, cannot be read, or cannot be mapped: reading it says why.
    """
    if nbytes < MAP_FROM_NBYTES:
        return None
    with suppress(OSError):
        # Writable only because its address cannot be asked for otherwise.
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            return map_range(fd, 0, nbytes) if os.fstat(fd).st_size == nbytes else None
        finally:
            os.close(fd)
    return None


def map_range(fd: int, start: int, nbytes: int) -> memoryview | None:
    """Return a part of an open file as read-only memory, if that is safe here.

    Blocks as :func:`map_file` does.

    Parameters
    ----------
    fd
        The file, open for reading and writing. May be closed afterwards.
    start, nbytes
        Where the part begins, and its size, in bytes.

    Returns
    -------
    memoryview or None
        As of :func:`map_file`.
    """
    if not sys.platform.startswith("linux") or nbytes < MAP_FROM_NBYTES:
        return None
    skipped = start % mmap.ALLOCATIONGRANULARITY
    with suppress(OSError, ValueError):  # ValueError: it is shorter
        mapping = mmap.mmap(fd, skipped + nbytes, offset=start - skipped)
        if _populate(mapping, len(mapping)):
            return memoryview(mapping).toreadonly()[skipped:]
    return None


def _populate(mapping: mmap.mmap, nbytes: int) -> bool:
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = ctypes.c_char.from_buffer(mapping)
    # By way of ctypes because ``mmap.madvise`` keeps the interpreter's lock, and this may wait for
    # a disk.
    return bool(madvise(ctypes.addressof(first), nbytes, _POPULATE_READ) == 0)
