"""What kind of file system a directory is on, as far as the system tells."""

from __future__ import annotations

import os

__all__ = ["IN_MEMORY", "LOCAL", "file_system_type"]

_MOUNTS = "/proc/self/mountinfo"

#: Types whose files take up memory.
IN_MEMORY = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"})

#: Types that one running kernel at a time can have mounted for writing.
LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "reiserfs", "xfs", "zfs"} | IN_MEMORY
)


def file_system_type(path: str | os.PathLike[str], mounts: str = _MOUNTS) -> str | None:
    """Return the type of a path's file system, such as ``ext4``; None if unknown.

    Parameters
    ----------
    path
        A path that exists. Symbolic links are followed.
    mounts
        The table of mounts to look into, in the format of Linux' ``mountinfo``.
    """
    found, best = None, -1
    try:
        path = os.path.realpath(path)
        with open(mounts, encoding="utf-8", errors="surrogateescape") as table:
            for line in table:
                left, _, right = line.partition(" - ")
                point = _unescaped(left.split()[4])
                # Of several mounts on one point, the last one is what is seen there.
                if len(point) >= best and os.path.commonpath((point, path)) == point:
                    found, best = right.split()[0], len(point)
    except (OSError, IndexError, ValueError):
        return None
    return found


def _unescaped(text: str) -> str:
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(code, character)
    return text
