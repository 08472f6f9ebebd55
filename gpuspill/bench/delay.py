"""Slow files: the same added latency for every file operation of a worker's store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, cast

from distributed.spill import SpillBuffer

__all__ = ["DelayedFiles", "delay_files"]


class DelayedFiles(MutableMapping[str, Any]):
    """A mapping of keys to files whose reads, writes and deletions take longer than they have to.

    Parameters
    ----------
    files
        The mapping to slow down, normally a ``zict.File``.
    seconds
        How long to wait before each operation.
    sleep
        How to wait; replaced in tests.
    """

    def __init__(
        self,
        files: MutableMapping[str, Any],
        seconds: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._files = files
        self._seconds = seconds
        self._sleep = sleep

    def __getitem__(self, key: str) -> Any:
        self._wait_for(key)
        return self._files[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._sleep(self._seconds)
        self._files[key] = value

    def __delitem__(self, key: str) -> None:
        self._wait_for(key)
        del self._files[key]

    def _wait_for(self, key: str) -> None:
        # A SpillBuffer tries to delete every new key first; where there is no file there is nothing
        # slow.
        if key in self._files:
            self._sleep(self._seconds)

    # Questions that the real mapping answers without touching a file are not slowed.
    def __contains__(self, key: object) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def delay_files(data: MutableMapping[Any, Any], seconds: float) -> None:
    """Slow down every file operation of a ``SpillBuffer``, in place.

    Other stores are left alone: a ``dict`` has no files, and gpuspill's has a setting
    (``storage-delay``).

    Parameters
    ----------
    data
        ``Worker.data``, still empty.
    seconds
        The wait added to each read, write and deletion.
    """
    if isinstance(data, SpillBuffer):
        # Its cache of values that are still alive -> the serialising layer -> zict.File
        slow = cast("Any", data).slow.data
        slow.d = DelayedFiles(slow.d, seconds)
