"""What a cluster may not leave: processes, threads, shared memory, spill files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from gpuspill.storage.directory import sweep_leftovers

__all__ = ["Before", "files_of", "look", "remains"]


@dataclass(frozen=True, slots=True)
class Before:
    """What was there before the cluster."""

    processes: frozenset[int]
    threads: frozenset[int]
    shared: frozenset[str]


def look() -> Before:
    """Note what there is now."""
    return Before(frozenset(_processes()), frozenset(_threads()), frozenset(_shared()))


def remains(before: Before, directories: list[Path], grace: float) -> Mapping[str, list[str]]:
    """Return what is there and was not before, by kind; an empty mapping if nothing is.

    Parameters
    ----------
    before
        What :func:`look` returned before the cluster was started.
    directories
        Those in which workers put their files. What dead stores left in them is swept first, as the
        next worker would do.
    grace
        Seconds to wait at most for things to go.
    """
    deadline = time.monotonic() + grace
    while True:
        for directory in directories:
            sweep_leftovers(directory)
        found = {
            "processes": [text for pid, text in _processes().items() if pid not in before.processes],
            "threads": [name for ident, name in _threads().items() if ident not in before.threads],
            "shared memory": sorted(_shared() - before.shared),
            "files": [str(path) for directory in directories for path in _files(directory)],
        }
        found = {kind: items for kind, items in found.items() if items}
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)  # nothing announces that a process has gone


def files_of(pid: int, directories: list[Path]) -> list[str]:
    """Return the paths of the spilled files of a process, in a certain order.

    Parameters
    ----------
    pid
        The process.
    directories
        Those in which it puts its files, and which others use too: what is named after another
        process is left out.

    Returns
    -------
    list of str
        Those that have names, and those that are open and have none any more, by the system's name
        for them.
    """
    found = []
    for directory in directories:
        for path in _files(directory):
            ours = [part for part in path.relative_to(directory).parts if part.startswith("gpuspill-")]
            if not ours or ours[0].startswith(f"gpuspill-{pid}-"):
                found.append(str(path))
    try:
        numbers = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))
    except OSError:
        return found
    for number in numbers:
        path_of_fd = f"/proc/{pid}/fd/{number}"
        try:
            target = os.readlink(path_of_fd)
        except OSError:
            continue
        if target.endswith(" (deleted)") and any(target.startswith(f"{directory}/") for directory in directories):
            found.append(path_of_fd)
    return found


def _files(directory: Path) -> list[Path]:
    """Return the files below a directory, but for empty locks."""
    return sorted(
        Path(where, name) for where, _, names in os.walk(directory) for name in names if not name.endswith("lock")
    )


def _processes() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = "(ended, and not waited for)"
        except psutil.NoSuchProcess:
            continue
        if "resource_tracker" not in command and "forkserver" not in command:
            found[child.pid] = f"{child.pid}: {command:.120}"
    return found


def _threads() -> dict[int, str]:
    return {
        thread.ident or 0: thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("gpuspill-") or not thread.daemon
    }


def _shared() -> set[str]:
    try:
        # Python's semaphores come and go with any program that has processes.
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    except OSError:
        return set()
