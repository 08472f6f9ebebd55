"""What the worker's memory settings mean for a store, and following real memory.

``distributed.worker.memory`` has two thresholds for spilling, both fractions of the worker's memory
limit. ``target`` is about *managed* memory, what ``sizeof`` says of the values; ``spill`` is about
the memory of the *process*, which holds more: results of running tasks, leaks, fragments, whatever
libraries keep. A store compares one number with one limit, so the second threshold becomes an
*offset* to the first number:

    values + promises + offset <= limit        offset = process - (values + promises) - (spill - target) x
    memory limit

which says ``process <= spill x memory limit`` in other words whenever the offset counts.

This module does *not* cover ``pause`` and ``terminate``; distributed's own memory monitors go on
with those.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from gpuspill.storage.buffers import BufferPool

__all__ = ["MemoryFollower", "Thresholds", "return_free_memory"]

logger = logging.getLogger("gpuspill.memory")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The part of ``distributed.worker.memory`` that concerns spilling.

    Parameters
    ----------
    memory_limit
        Of the worker, bytes; None or 0 for no limit.
    target, spill
        Fractions of `memory_limit`; False (or None or 0) switches the threshold off.
    host_limit
        Bytes of values to keep in memory, in the place of what `target` says; None for no such
        limit.
    """

    memory_limit: int | None
    target: float | Literal[False] | None = False
    spill: float | Literal[False] | None = False
    host_limit: int | Literal["auto"] | None = "auto"

    @property
    def limit(self) -> int | None:
        """Bytes of values (and offset) to keep in memory, or None for no limit."""
        if isinstance(self.host_limit, int):
            return self.host_limit
        fraction = (self.target if self.host_limit == "auto" else None) or self.spill
        return int(self.memory_limit * fraction) if self.memory_limit and fraction else None

    @property
    def follows_process(self) -> bool:
        """Whether the memory of the process counts at all."""
        return bool(self.memory_limit and self.spill)

    def offset(self, process: int, accounted: int) -> int:
        """Bytes to add to what is accounted for before it is compared with :attr:`limit`.

        Parameters
        ----------
        process
            Memory of the process, bytes.
        accounted
            Values in memory plus promises, bytes. Promises are included because what a running task
            was promised is, more and more as it runs, also memory of the process; counting it twice
            would spill for nothing.

        Returns
        -------
        int
            Never negative while there is a limit for values alone. Without one it is what makes the
            sum the memory of the process, which may be less than what ``sizeof`` claims.
        """
        limit = self.limit
        if not self.memory_limit or not self.spill or limit is None:
            return 0
        offset = process - accounted - (int(self.spill * self.memory_limit) - limit)
        for_values_alone = self.target if self.host_limit == "auto" else self.host_limit
        return max(0, offset) if for_values_alone else offset


class MemoryFollower:
    """Tells a store, again and again, how much memory belongs to no value.

    Parameters
    ----------
    thresholds
        Limits.
    process_memory
        Returns the memory of the process, bytes.
    accounted
        Returns the bytes that the store accounts for.
    set_offset
        Tells the store.
    evicted
        Returns the bytes that left memory so far; only its growth matters.
    in_background
        Runs a function on another thread, soon.
    pool
        Buffers that are kept for reuse; emptied when the process is too large.
    trim
        Gives back other memory that is kept for reuse.
    clock
        Seconds; for tests.

    Attributes
    ----------
    thresholds
        As given; may be replaced.
    offset
        What the store was told last, bytes.

    Notes
    -----
    :meth:`update` is to be called regularly on one thread; it takes microseconds. Between two
    calls, buffers of the pool go back and forth between values and idleness, and a new value may
    arrive before an old one's buffer is back: what was idle at most in the last :attr:`REMEMBERED`
    calls is room that the process will need again.

    When much was evicted or deleted and the process is still too large, memory that was freed may
    not have gone back to the system: allocators keep fragments. Then the allocators are asked to
    return it, and if that was not enough, the garbage collector runs, both on another thread and
    both rarely.
    """

    #: Calls of :meth:`update` for which it counts how much was idle in the pool.
    REMEMBERED = 20
    #: Most room to leave for that, as a share of the worker's memory.
    POOL_SHARE = 1 / 16
    #: Bytes that left and by which the process did not shrink, before allocators are asked; asking
    #: is not free.
    TRIM_AFTER_NBYTES = 32 * 2**20
    #: Seconds between two requests to the allocators.
    TRIM_INTERVAL = 2.0
    #: The collector holds the interpreter while it runs, the event loop included; it gets this
    #: share of the time at most.
    COLLECT_SHARE = 0.01
    #: Seconds between two collections, whatever they cost.
    COLLECT_INTERVAL = 10.0

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        process_memory: Callable[[], int],
        accounted: Callable[[], int],
        set_offset: Callable[[int], None],
        evicted: Callable[[], int],
        in_background: Callable[[Callable[[], object]], object],
        pool: BufferPool | None = None,
        trim: Callable[[], object] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.thresholds = thresholds
        self._process_memory = process_memory
        self._accounted = accounted
        self._set_offset = set_offset
        self._evicted = evicted
        self._in_background = in_background
        self._pool = pool
        self._trim_also = trim
        self._clock = clock
        self.offset = 0
        self._idle_peaks: deque[int] = deque(maxlen=self.REMEMBERED)
        self._trimmed_at = -float("inf")
        self._evicted_at_trim = 0
        self._accounted_before = 0
        self._deleted = 0  # bytes by which what is accounted for became less since then
        self._collect_after = -float("inf")
        self._busy = False

    def update(self) -> None:
        """Measure, tell the store, and see to it that freed memory is really free."""
        if not self.thresholds.follows_process:
            if self.offset:
                self.offset = 0
                self._set_offset(0)
            return
        process = self._process_memory()
        accounted = self._accounted()
        self._deleted += max(0, self._accounted_before - accounted)
        self._accounted_before = accounted
        offset = self.thresholds.offset(process + self._swing(), accounted)
        if offset != self.offset:
            self.offset = offset
            self._set_offset(offset)
        if offset > 0 and not self._busy:
            self._relieve(process)

    def _swing(self) -> int:
        """Bytes that the process may grow by until the next call, beside the store's."""
        if self._pool is None:
            return 0
        self._idle_peaks.append(self._pool.peak_idle_nbytes())
        swing = max(self._idle_peaks) - self._pool.idle_nbytes
        return min(max(0, swing), int((self.thresholds.memory_limit or 0) * self.POOL_SHARE))

    def _relieve(self, process: int) -> None:
        memory_limit, spill = self.thresholds.memory_limit, self.thresholds.spill
        assert memory_limit
        assert spill
        if process <= memory_limit * spill:
            return
        now = self._clock()
        evicted = self._evicted()
        if now - self._trimmed_at < self.TRIM_INTERVAL:
            return
        # What was evicted counts twice if nothing came in its place; what was deleted, or parked
        # and given up, once.
        if max(evicted - self._evicted_at_trim, self._deleted) >= self.TRIM_AFTER_NBYTES:
            self._trimmed_at, self._evicted_at_trim, self._deleted = now, evicted, 0
            self._start(self._trim)
        elif self._trimmed_at > -float("inf") and now >= self._collect_after:
            self._trimmed_at = now
            self._start(self._collect)

    def _start(self, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            finally:
                self._busy = False

        self._busy = True
        try:
            self._in_background(guarded)
        except RuntimeError:  # shutting down
            self._busy = False

    def _trim(self) -> None:
        if self._pool is not None:
            self._pool.trim()
        if self._trim_also is not None:
            self._trim_also()
        return_free_memory()

    def _collect(self) -> None:
        start = self._clock()
        gc.collect()
        self._trim()
        took = self._clock() - start
        self._collect_after = start + max(self.COLLECT_INTERVAL, took / self.COLLECT_SHARE)
        if took > 1:
            logger.warning(
                "Memory of the process is high although values were spilled; a full garbage collection took %.1f s. "
                "This is usually a sign of too many small Python objects.",
                took,
            )


def return_free_memory() -> None:
    """Ask the allocators of the C library and of Arrow to give unused memory back to the system.

    Does nothing where they cannot.
    """
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None:
        pyarrow.default_memory_pool().release_unused()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    trim(0)
