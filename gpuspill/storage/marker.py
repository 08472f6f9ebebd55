"""What a store writes into the lock file of its directory, so that others can tell whose it is.

A sweeper removes files, so it has to know that a store made the directory, that this store is dead,
and that its lock says so. The marker tells who made it, and for which directory: a copy of the
directory, or of the lock file, has another inode and no owner. It also tells on which kernel, and
on which mount, the lock was taken, since locks of another kernel may be unknown to this one
(network file systems often have locks that other hosts do not see).
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

__all__ = ["Marker", "boot_id"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FORMAT = 1
#: Longer than any marker, and read at once.
_MOST_NBYTES = 4096


def boot_id() -> str:
    """Return what tells this boot of this machine from all others; empty if nothing does."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Says which store made a directory.

    Parameters
    ----------
    format
        Version of what else is in a directory.
    inode, device
        Numbers of the directory, and of the file system that it is on, as the maker saw them.
    boot
        :func:`boot_id` of the maker.
    locked
        Whether the maker holds a lock that others on this kernel and mount can see.
    host, pid
        Name of the machine and number of the process, for people; nothing relies on them.
    """

    format: int = _FORMAT
    inode: int
    device: int
    boot: str
    locked: bool
    host: str
    pid: int

    @classmethod
    def here(cls, directory: os.stat_result, *, locked: bool) -> Marker:
        """Return the marker of a directory that this process has made."""
        return cls(
            inode=directory.st_ino,
            device=directory.st_dev,
            boot=boot_id(),
            locked=locked,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def write(self, fd: int) -> None:
        """Put it into an empty file; raises OSError."""
        os.pwrite(fd, json.dumps(asdict(self)).encode(), 0)

    @classmethod
    def read(cls, fd: int) -> Marker | None:
        """Return what is in a file; None unless it is a marker with fields of the right types.

        Raises OSError.
        """
        text = os.pread(fd, _MOST_NBYTES, 0)
        try:
            found = json.loads(text)
            marker = cls(**found)
        except (ValueError, TypeError, RecursionError):
            return None
        like = cls(inode=0, device=0, boot="", locked=True, host="", pid=0)
        right = all(type(found[name]) is type(value) for name, value in asdict(like).items() if name in found)
        return marker if right and len(found) == len(asdict(like)) and marker.format == _FORMAT else None

    def is_of(self, directory: os.stat_result, *, local: bool) -> bool:
        """Whether it is for this directory, by a store whose lock would be seen from here.

        Parameters
        ----------
        directory
            Of the directory that it was found in.
        local
            Whether only one running kernel at a time can use the file system. If so, a maker on
            another kernel is gone; if not, it may be on another host, and alive.
        """
        seen = local or (bool(self.boot) and self.boot == boot_id() and self.device == directory.st_dev)
        return self.inode == directory.st_ino and self.locked and seen
