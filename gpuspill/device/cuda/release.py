"""Where memory of a GPU is given back: never on an event loop, which a free could stop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Release", "Run"]

Run: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a function on a thread for that. May be called by finalisers, in the middle of anything."""


class Release:
    """Gives memory back in the calling thread, or in another if that runs an event loop.

    Notes
    -----
    Thread-safe. Finalisers call it, in the middle of anything, so it takes no lock.
    """

    def __init__(self) -> None:
        self._runners: tuple[Run, ...] = ()
        self._waiting: deque[Callable[[], None]] = deque()

    def by(self, run: Run) -> Callable[[], None]:
        """Have `run` do it for event loops from now on; returns what ends that."""
        self._runners = (*self._runners, run)

        def end() -> None:
            self._runners = tuple(other for other in self._runners if other is not run)

        return end

    def do(self, free: Callable[[], None]) -> None:
        """Call `free` now, or soon on another thread."""
        runners = self._runners
        if not runners or not _on_event_loop():
            free()
            return
        self._waiting.append(free)
        runners[-1](self.settle)

    def settle(self) -> None:
        """Give back what waits for that."""
        while True:
            try:
                free = self._waiting.popleft()
            except IndexError:
                return
            free()


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
