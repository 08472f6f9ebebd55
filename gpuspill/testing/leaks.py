"""What a test may not leave behind: threads, file descriptors, child processes, spill files.

Each kind of thing is a :class:`Check`: it lists what exists now, and what is there after a test
but was not before is a leak. :func:`find_leaks` gives things that are on their way out some time to
go. Nothing here knows pytest; the fixture is in :mod:`gpuspill.testing.pytest_plugin`.

What is *not* covered: memory, sockets by address, threads that no Python code started, and threads
and files of child processes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import ClassVar

import psutil

from gpuspill.storage.directory import PREFIX

__all__ = [
    "Check",
    "DescriptorCheck",
    "ProcessCheck",
    "SpillFileCheck",
    "ThreadCheck",
    "find_leaks",
    "format_leaks",
]


class Check(ABC):
    """One kind of thing that can leak."""

    kind: ClassVar[str]
    """Name of the kind, as in reports and in the marker ``leaking``."""

    @abstractmethod
    def snapshot(self) -> frozenset[Hashable]:
        """Return everything of this kind that exists now and may not outlive a test."""

    def describe(self, item: Hashable) -> str:
        """Return one line, or more, that help to find who left `item` behind."""
        return str(item)


class ThreadCheck(Check):
    """Threads: those of gpuspill, daemon or not, and everybody's that are not daemons.

    Other libraries' daemon threads are their own business: they keep no process from exiting, and
    most are one a process (distributed's pools for offloading and for callbacks, its profiler,
    fsspec's event loop).
    """

    kind = "threads"

    def snapshot(self) -> frozenset[Hashable]:
        """Return the threads that count, as :class:`threading.Thread` objects."""
        allowed = _threads_of_dask()
        return frozenset(
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("gpuspill-") or not (thread.daemon or thread in allowed)
        )

    def describe(self, item: Hashable) -> str:
        """Return the thread's name and where it stands."""
        assert isinstance(item, threading.Thread)
        frame = sys._current_frames().get(item.ident or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-3:])
        return f"{item.name} ({'daemon' if item.daemon else 'not a daemon'})\n{stack}".rstrip()


def _threads_of_dask() -> set[threading.Thread]:
    # The pool of dask's threaded scheduler: made when first used, kept for the next use, ended when
    # Python exits. Its threads have no names of their own, so they are told by the pool.
    threaded = sys.modules.get("dask.threaded")
    return getattr(getattr(threaded, "default_pool", None), "_threads", set())


class DescriptorCheck(Check):
    """Open file descriptors (Linux only; elsewhere nothing is found).

    A descriptor is told by its number and by what it refers to, so that one that was closed and
    opened again for something else counts as new.
    """

    kind = "descriptors"

    def snapshot(self) -> frozenset[Hashable]:
        """Return pairs of number and target (a path, ``socket:[123]``, ``pipe:[123]``)."""
        try:
            numbers = set(map(int, os.listdir("/proc/self/fd")))
        except FileNotFoundError:
            return frozenset()
        # multiprocessing's pipe to its resource tracker: opened when first needed, one a process.
        numbers.discard(getattr(resource_tracker._resource_tracker, "_fd", None) or -1)
        found: set[Hashable] = set()
        for number in numbers:
            # Closed meanwhile; that of the listing itself always is.
            with contextlib.suppress(FileNotFoundError):
                found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return frozenset(found)

    def describe(self, item: Hashable) -> str:
        """Return number and target."""
        assert isinstance(item, tuple)
        return f"{item[0]} -> {item[1]}"


class ProcessCheck(Check):
    """Child processes, also those that have ended and were not waited for."""

    kind = "processes"

    # multiprocessing's helpers: started when first needed, one a process, end with it.
    _ALLOWED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

    def snapshot(self) -> frozenset[Hashable]:
        """Return the direct children, as :class:`psutil.Process` objects."""
        multiprocessing.active_children()  # waits for those of its own that have ended
        found: set[Hashable] = set()
        for child in psutil.Process().children():
            try:
                command = " ".join(child.cmdline())
            except psutil.ZombieProcess:
                command = ""
            except psutil.NoSuchProcess:
                continue
            if not any(helper in command for helper in self._ALLOWED):
                found.add(child)
        return frozenset(found)

    def describe(self, item: Hashable) -> str:
        """Return process id, state and command line."""
        assert isinstance(item, psutil.Process)
        try:
            return f"{item.pid} ({item.status()}): {' '.join(item.cmdline())[:300]}"
        except psutil.Error as error:
            return f"{item.pid} ({error})"


class SpillFileCheck(Check):
    """Files and directories of gpuspill's stores, by their names, anywhere below some directories.

    Parameters
    ----------
    roots
        Called for each snapshot; returns the directories to look in. Those that are absent are
        skipped, links are not followed.
    names
        Patterns (as for :func:`fnmatch.fnmatchcase`) for the names that gpuspill gives to what it
        puts on disk. What is in a directory that matches is not listed again.
    """

    kind = "spill files"

    def __init__(
        self,
        roots: Callable[[], Iterable[str | os.PathLike[str]]],
        names: Sequence[str] = (f"{PREFIX}*",),
    ) -> None:
        self._roots = roots
        self._names = tuple(names)

    def _ours(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._names)

    def snapshot(self) -> frozenset[Hashable]:
        """Return the paths found."""
        found: set[Hashable] = set()
        for root in self._roots():
            for directory, subdirectories, files in os.walk(root):
                found.update(Path(directory, name) for name in files if self._ours(name))
                found.update(Path(directory, name) for name in subdirectories if self._ours(name))
                subdirectories[:] = [name for name in subdirectories if not self._ours(name)]
        return frozenset(found)

    def describe(self, item: Hashable) -> str:
        """Return the path and what is in it."""
        assert isinstance(item, Path)
        if not item.is_dir():
            return str(item)
        content = sorted(str(path.relative_to(item)) for path in item.rglob("*"))
        return f"{item} ({len(content)} entries: {', '.join(content[:5])})"


def find_leaks(before: Mapping[Check, frozenset[Hashable]], grace: float) -> dict[Check, list[Hashable]]:
    """Return what is there now and was not before.

    Parameters
    ----------
    before
        For each check, its snapshot from before.
    grace
        Seconds to wait at most for what is there to go: threads that are told to stop, not waited
        for, take a moment. Returns as soon as nothing is left.

    Returns
    -------
    dict
        For each check that found something, what it found; empty if nothing leaked.
    """
    deadline = time.monotonic() + grace
    while True:
        found = {}
        for check, earlier in before.items():
            later = check.snapshot() - earlier
            if later:
                found[check] = sorted(later, key=str)
        if not found or time.monotonic() >= deadline:
            return found
        # Polling, as nothing announces that a descriptor was closed. Collecting first, because what
        # holds it may be garbage in a cycle, which is no leak.
        gc.collect()
        time.sleep(0.01)


def format_leaks(leaks: Mapping[Check, Sequence[Hashable]]) -> str:
    """Return a report, a paragraph for each kind.

    Parameters
    ----------
    leaks
        What :func:`find_leaks` returned.
    """
    lines = []
    for check, items in leaks.items():
        lines.append(f"left behind: {len(items)} {check.kind}")
        for item in items:
            lines += ["    " + line for line in check.describe(item).splitlines()]
    return "\n".join(lines)
