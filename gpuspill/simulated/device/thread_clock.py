"""Modelled time: each thread's own, of what it computed and what a model adds."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gpuspill.simulated.device.clock import Clock

__all__ = ["ThreadClock"]


@dataclass(slots=True)
class _Thread:
    """What is known of a thread: its processor time, what is left out, modelled time.

    It is the context of its calls, too, so that to count one costs next to nothing of the time that
    counts.
    """

    began: float
    seconds: float
    left_out: float = 0.0
    modelled: float = 0.0
    inside: int = 0
    entered: float = 0.0
    last: float = 0.0

    def now(self) -> float:
        """Return its time. In this thread."""
        processor = self.entered if self.inside else time.thread_time()
        self.last = self.modelled + processor - self.began - self.left_out
        return self.last

    def __enter__(self) -> None:
        if not self.inside:
            self.entered = time.thread_time()
            self.modelled += self.seconds
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1
        if not self.inside:
            self.left_out += time.thread_time() - self.entered
            self.now()


class ThreadClock(Clock):
    """Accounts for time, and never sleeps.

    A thread's time is the processor time that it really took, without what it spent in the
    simulation (:meth:`call`), and what the model charges for that instead (:meth:`spend`, and
    waiting for work of the device). Threads begin together, at :meth:`begin`. So what is measured
    depends neither on other processes nor on how slowly the simulation moves bytes. Waiting of one
    thread for another is not seen: it is for threads that begin together and end alone.

    Parameters
    ----------
    seconds
        What a call costs.

    Notes
    -----
    Thread-safe.
    """

    runs_by_itself = False

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._threads: dict[int, _Thread] = {}
        self._start = self._began = 0.0
        self.begin()

    def begin(self) -> None:
        """Let all threads begin together, at the time of the one that is furthest."""
        self._here().now()
        with self._lock:
            self._start = max((thread.last for thread in self._threads.values()), default=self._start)
            self._threads = {}
            self._began = time.process_time()
        self._here()

    def _here(self) -> _Thread:
        ident = threading.get_ident()
        found = self._threads.get(ident)
        if found is None:
            with self._lock:
                found = _Thread(time.thread_time(), self._seconds, modelled=self._start, last=self._start)
                self._threads[ident] = found
        return found

    def now(self) -> float:
        """Return the calling thread's time, in seconds."""
        return self._here().now()

    def wait_until(self, moment: float) -> None:
        """Let the calling thread have waited until `moment`."""
        here = self._here()
        here.modelled += max(0.0, moment - here.now())

    def spend(self, seconds: float) -> None:
        """Charge the calling thread."""
        self._here().modelled += seconds

    def call(self) -> AbstractContextManager[None]:
        """Count what a block takes as one call of the driver; may be nested."""
        return self._here()

    @property
    def counting(self) -> bool:
        """Whether the processor time of the calling thread counts now: it is in no :meth:`call`."""
        return not self._here().inside

    def python(self) -> float:
        """Return the process's processor time that counts, in seconds, of all threads."""
        with self._lock:
            left_out = sum(thread.left_out for thread in self._threads.values())
            return time.process_time() - self._began - left_out

    def elapsed(self) -> float:
        """Return the seconds since the start, by the slowest thread; one computes at a time.

        Of other threads, as of when they last asked for the time or called the driver.
        """
        self.now()
        with self._lock:
            slowest = max(thread.last for thread in self._threads.values()) - self._start
        return max(slowest, self.python())
