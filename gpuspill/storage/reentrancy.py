"""What lets a finaliser use a store in the middle of what its thread does there.

A lock that it may come back to, a sum that it may add to in the middle of an addition, and who is
inside.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from gpuspill import forks
from gpuspill.storage.counters import StorageCounters

__all__ = ["Section", "Tally", "Visitors", "visit"]

P = ParamSpec("P")
R = TypeVar("R")


class Section:
    """A re-entrant lock whose ``with`` block is told whether its thread was inside already.

    That can only be so if the garbage collector ran a finaliser in there. What it changes has to be
    changed back, or to be one operation that Python makes atomic: the block outside may just have
    read what it is going to write.
    """

    __slots__ = ("_depth", "_lock")

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._depth = 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return self._depth > 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


class Tally:
    """A sum of counters. All of it under one lock, a re-entrant one."""

    __slots__ = ("_adding", "_sum", "_waiting")

    def __init__(self) -> None:
        self._sum = StorageCounters()
        self._waiting: deque[StorageCounters] = deque()
        self._adding = False

    def add(self, counts: StorageCounters) -> None:
        """Add `counts`; in the middle of another addition of this thread, leave that to it."""
        self._waiting.append(counts)
        if self._adding:
            return
        self._adding = True
        try:
            while self._waiting:
                self._sum.add(self._waiting.popleft())
        finally:
            self._adding = False

    def sum(self) -> StorageCounters:
        """Return the sum; not a copy."""
        if self._waiting:
            self.add(StorageCounters())  # what came after the last look of an addition, and before its end
        return self._sum


class Visitors:
    """The threads that are in the middle of an operation."""

    __slots__ = ("threads",)

    def __init__(self) -> None:
        self.threads: set[int] = set()

    @property
    def here(self) -> bool:
        """Whether the calling thread is one of them."""
        return threading.get_ident() in self.threads


class _Visited(Protocol):
    _visitors: Visitors


V = TypeVar("V", bound=_Visited)


def visit(method: Callable[Concatenate[V, P], R]) -> Callable[Concatenate[V, P], R]:
    """Decorate an operation: its thread is among the visitors meanwhile."""

    @functools.wraps(method)
    def visiting(self: V, /, *args: P.args, **options: P.kwargs) -> R:
        threads, thread = self._visitors.threads, threading.get_ident()
        if thread in threads:  # a finaliser in the middle of another one, which is not over when this one is
            return method(self, *args, **options)
        threads.add(thread)
        try:
            return method(self, *args, **options)
        finally:
            threads.discard(thread)

    return visiting
