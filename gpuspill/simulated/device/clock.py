"""Time on the simulated device: real, or moved by a test."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

__all__ = ["Clock", "ManualClock", "RealClock"]


class Clock(ABC):
    """Where the simulated device gets its time from. Thread-safe."""

    runs_by_itself: bool
    """Whether time passes without anybody moving it."""

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds, from an arbitrary start."""

    @abstractmethod
    def wait_until(self, moment: float) -> None:
        """Block the calling thread until :meth:`now` is at least `moment`."""

    def call(self) -> AbstractContextManager[None]:
        """Mark what the simulation does itself; a clock may count that otherwise."""
        return nullcontext()


class RealClock(Clock):
    """The system's monotonic clock."""

    runs_by_itself = True

    def now(self) -> float:
        """Return :func:`time.monotonic`."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep until `moment`."""
        while (pause := moment - time.monotonic()) > 0:
            time.sleep(pause)


class ManualClock(Clock):
    """A clock for tests: it stands still until it is moved.

    Parameters
    ----------
    jump
        True: a thread that waits for a later moment moves the clock there and goes on. So a single
        thread can run a whole job and read off how long it would have taken. False: it blocks until
        another thread calls :meth:`advance`.
    guard
        Real seconds after which a blocked wait gives up with RuntimeError instead of hanging the
        test.
    """

    runs_by_itself = False

    def __init__(self, *, jump: bool = True, guard: float = 60.0) -> None:
        self._jump = jump
        self._guard = guard
        self._condition = threading.Condition(threading.Lock())
        self._now = 0.0
        self._waiting = 0

    def now(self) -> float:
        """Return the seconds that the clock was moved so far."""
        with self._condition:
            return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises
        ------
        ValueError
            `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not run backwards: cannot advance by {seconds} s")
        with self._condition:
            self._now += seconds
            self._condition.notify_all()

    def wait_until(self, moment: float) -> None:
        """Move the clock to `moment`, or block until another thread has."""
        with self._condition:
            if self._jump:
                self._now = max(self._now, moment)
                self._condition.notify_all()
                return
            self._waiting += 1
            self._condition.notify_all()
            try:
                if not self._condition.wait_for(lambda: self._now >= moment, self._guard):
                    raise RuntimeError(
                        f"waited {self._guard} s for the manual clock to reach {moment} s, it stands at {self._now} s: "
                        "no thread advances it"
                    )
            finally:
                self._waiting -= 1

    def wait_for_waiters(self, count: int) -> None:
        """Block until `count` threads are in :meth:`wait_until`: to sequence tests."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._waiting >= count, self._guard):
                raise RuntimeError(f"waited {self._guard} s for {count} waiting threads, there are {self._waiting}")
