"""Complete vectored reads and writes.

One call of ``writev`` or ``preadv`` moves at most 2,147,479,552 bytes and 1,024 buffers (on Linux),
and may move less than asked at any time. A result that is ignored is data silently lost, so these
loop until all is moved.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

__all__ = ["read_all", "write_all"]

_IOV_MAX = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 1024


def _batch(buffers: Sequence[memoryview], index: int, offset: int) -> list[memoryview]:
    batch = list(buffers[index : index + max(1, _IOV_MAX)])
    if offset:
        batch[0] = batch[0][offset:]
    return batch


def _advance(buffers: Sequence[memoryview], index: int, offset: int, moved: int) -> tuple[int, int]:
    """Return the buffer and the place in it that come after `moved` more bytes."""
    offset += moved
    while index < len(buffers) and offset >= buffers[index].nbytes:
        offset -= buffers[index].nbytes
        index += 1
    return index, offset


def write_all(fd: int, buffers: Sequence[memoryview], before_each: Callable[[], None] | None = None) -> int:
    """Write all bytes of all buffers at the file's position.

    Parameters
    ----------
    fd
        An open file.
    buffers
        Flat bytes.
    before_each
        Called before each system call; what it raises ends the write.

    Returns
    -------
    int
        Bytes written: all of them.

    Raises
    ------
    OSError
        As the system reports it; also when it takes nothing without saying why. Some bytes may have
        been written.
    """
    total = 0
    index, offset = _advance(buffers, 0, 0, 0)
    while index < len(buffers):
        if before_each is not None:
            before_each()
        try:
            moved = os.writev(fd, _batch(buffers, index, offset))
        except InterruptedError:
            continue
        if moved <= 0:
            # Trying again for ever would be worse than failing.
            raise OSError(errno.EIO, "the file system took no bytes and reported no error")
        total += moved
        index, offset = _advance(buffers, index, offset, moved)
    return total


def read_all(fd: int, buffers: Sequence[memoryview], enough: int | None = None, start: int = 0) -> int:
    """Fill buffers, in order, from a file.

    Parameters
    ----------
    fd
        An open file. Its position neither matters nor changes.
    buffers
        Writable flat bytes.
    enough
        Do not ask again once so many bytes are there; by default as many as the buffers hold.
        Buffers for one byte more tell whether the file goes on, without a call of its own.
    start
        Where in the file the first byte is, bytes.

    Returns
    -------
    int
        Bytes read: fewer than `enough` only if the file ends before.

    Raises
    ------
    OSError
        As the system reports it.
    """
    total = 0
    index, offset = _advance(buffers, 0, 0, 0)
    while index < len(buffers) and (enough is None or total < enough):
        try:
            moved = os.preadv(fd, _batch(buffers, index, offset), start + total)
        except InterruptedError:
            continue
        if moved <= 0:
            break
        total += moved
        index, offset = _advance(buffers, index, offset, moved)
    return total
