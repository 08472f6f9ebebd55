"""What is measured inside a worker process, each probe on its own and without dask.

The probes are started and stopped on the thread they observe. Reading one (``summary()``) is
allowed from any thread: it copies what has been recorded so far.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuspill.storage.processors import read_counts

__all__ = [
    "FileTraffic",
    "LoopProbe",
    "LoopSummary",
    "MemoryProbe",
    "MemorySummary",
    "lateness_quantile",
    "process_file_traffic",
    "processor_wait",
    "stolen_time",
    "thread_file_traffic",
]

STALL_SECONDS = 0.05
"""A callback later than this counts as a stall."""

LATE_SECONDS = 0.005
"""Lateness below this is what an idle loop beside busy threads shows, too: the interpreter's lock
is handed on every 5 ms."""


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """How late an event loop ran its callbacks.

    Parameters
    ----------
    longest
        The latest callback, seconds.
    longest_own
        The same without what the loop's thread waited for a processor: that is for other threads
        and other programs, and no lock of the interpreter.
    p999
        What a callback that became due at a random instant would have had to wait, 99.9th
        percentile, seconds. Weighted by time, so that a long stall counts for all the callbacks it
        would have held up.
    stalls
        How many callbacks were later than 50 ms.
    stalled
        Time covered by these stalls, seconds.
    late
        Time covered by all lateness of more than 5 ms, seconds: how long the loop was not there for
        anybody.
    ticks, elapsed
        How many callbacks ran, in how many seconds.
    """

    longest: float
    longest_own: float
    p999: float
    stalls: int
    stalled: float
    late: float
    ticks: int
    elapsed: float


def lateness_quantile(lateness: Sequence[float], elapsed: float, quantile: float) -> float:
    """Return what a callback due at a random instant would have waited.

    Counting ticks would hide stalls: a loop that stands still for a second records one late tick
    among thousands of good ones. Here a tick that was late by ``L`` stands for all instants of
    these ``L`` seconds, at which the wait would have been anything from ``L`` down to 0.

    Parameters
    ----------
    lateness
        How late each tick ran, seconds.
    elapsed
        The time they cover, seconds.
    quantile
        Between 0 and 1.

    Returns
    -------
    float
        The smallest wait, in seconds, that no more than ``1 - quantile`` of all instants exceed.
    """
    budget = (1.0 - quantile) * elapsed
    if elapsed <= 0:
        return 0.0
    # The time in which the wait exceeds x is f(x) = sum(max(0, L - x)): piecewise linear, so walk
    # its corners down from the largest L, where f = 0, until it would pass the budget, then
    # interpolate.
    worst_first = sorted((late for late in lateness if late > 0), reverse=True)
    spent = 0.0
    for count, late in enumerate(worst_first, start=1):
        following = worst_first[count] if count < len(worst_first) else 0.0
        step = count * (late - following)
        if spent + step > budget:
            return late - (budget - spent) / count
        spent += step
    return 0.0


class LoopProbe:
    """Records how late an asyncio event loop runs a callback that is due every few milliseconds.

    Parameters
    ----------
    loop
        The loop to observe.
    interval
        Seconds between two callbacks.
    on_tick
        Called at each tick on the loop's thread, e.g. to sample a state that only changes there.
        Must return at once and not raise.
    waited
        Returns the seconds for which the calling thread was ready and had no processor, ever since
        it began.

    Notes
    -----
    ``start``, ``stop`` and ``reset`` must be called on the loop's thread. A tick costs about ten
    microseconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval: float = 0.002,
        on_tick: Callable[[], None] | None = None,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._on_tick = on_tick
        self._read_wait = waited or processor_wait
        self._waited = 0.0
        self._lateness = array("d")
        self._own = array("d")
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._since = 0.0

    def start(self) -> None:
        """Begin; does nothing if already running."""
        if self._handle is None:
            self._since = self._loop.time()
            self._schedule(self._since)

    def stop(self) -> None:
        """Stop; what was recorded stays readable. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def reset(self) -> None:
        """Forget what was recorded, and that the caller has held up the due callback."""
        self._lateness = array("d")
        self._own = array("d")
        self._since = self._loop.time()
        if self._handle is not None:
            self._handle.cancel()
            self._schedule(self._since)

    def summary(self) -> LoopSummary:
        """Return the figures since the start or the last reset."""
        lateness = self._lateness[:]
        elapsed = max(0.0, self._loop.time() - self._since)
        stalls = [late for late in lateness if late > STALL_SECONDS]
        return LoopSummary(
            longest=max(lateness, default=0.0),
            longest_own=max(self._own[:], default=0.0),
            p999=lateness_quantile(lateness, elapsed, 0.999),
            stalls=len(stalls),
            stalled=sum(stalls),
            late=sum(late for late in lateness if late > LATE_SECONDS),
            ticks=len(lateness),
            elapsed=elapsed,
        )

    def longest(self) -> float:
        """Return the longest lateness so far, seconds."""
        return max(self._lateness[:], default=0.0)

    def _schedule(self, now: float) -> None:
        self._due = now + self._interval
        self._waited = self._read_wait()
        self._handle = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        late = max(0.0, now - self._due)
        self._lateness.append(late)
        self._own.append(max(0.0, late - (self._read_wait() - self._waited)))
        if self._on_tick is not None:
            self._on_tick()
        # From now, not from what was due: after a stall the missed ticks must not run as a burst.
        self._schedule(self._loop.time())


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Resident memory of the process, bytes.

    ``peak`` and ``mean`` are of the samples taken; ``high_water`` is the kernel's own peak since
    the process started (0 if unknown).
    """

    peak: int
    mean: int
    samples: int
    high_water: int


class MemoryProbe:
    """Samples the resident set size of this process in a thread of its own.

    Parameters
    ----------
    interval
        Seconds between two samples.
    read
        Returns the current resident size in bytes; replaced in tests.

    Notes
    -----
    The kernel's high-water mark (``VmHWM``) misses nothing but cannot be started anew at the
    beginning of a benchmark, the samples can. ``ru_maxrss`` is of no use here: it starts with the
    size that the *parent* had when it forked the worker.
    """

    def __init__(self, interval: float = 0.02, read: Callable[[], int] | None = None) -> None:
        self._interval = interval
        self._read = read or resident_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._peak = self._total = self._samples = 0

    def start(self) -> None:
        """Begin sampling; does nothing if already running."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="gpuspill-bench-memory", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End sampling and wait for the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reset(self) -> None:
        """Forget what was sampled so far; a sample being taken meanwhile may still be counted."""
        self._peak = self._total = self._samples = 0

    def summary(self) -> MemorySummary:
        """Return the figures since the start or the last reset."""
        samples = self._samples
        return MemorySummary(
            peak=self._peak,
            mean=self._total // samples if samples else 0,
            samples=samples,
            high_water=high_water_bytes(),
        )

    def sample(self) -> None:
        """Take one sample now, in the calling thread."""
        size = self._read()
        self._peak = max(self._peak, size)
        self._total += size
        self._samples += 1

    def _run(self) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(self._interval)


def resident_bytes() -> int:
    """Return the resident set size of this process, bytes; 0 where it cannot be known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def high_water_bytes() -> int:
    """Return the kernel's peak resident size of this process, bytes; 0 where it keeps none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def processor_wait() -> float:
    """Return how long this thread was ready and had no processor, seconds; 0 if unknown."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def stolen_time() -> float | None:
    """Return how long the host kept this machine's processors, seconds.

    Returns
    -------
    float or None
        The sum over all processors, since the start; ``None`` where the kernel keeps no such count.
    """
    counts = read_counts()
    return None if counts is None else counts.steal / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class FileTraffic:
    """Bytes that went through ``read`` and ``write`` calls, page cache or not.

    Socket traffic is not part of it.
    """

    read: int
    written: int

    def __sub__(self, other: FileTraffic) -> FileTraffic:
        return FileTraffic(self.read - other.read, self.written - other.written)


def process_file_traffic() -> FileTraffic | None:
    """Return what this process has read from and written to files.

    Returns
    -------
    FileTraffic or None
        ``None`` where the kernel keeps no such count.
    """
    return _traffic("/proc/self/io")


def thread_file_traffic(native_id: int | None = None) -> FileTraffic | None:
    """Return what one thread of this process has read from and written to files.

    Parameters
    ----------
    native_id
        The kernel's number of the thread; the calling thread by default.

    Returns
    -------
    FileTraffic or None
        ``None`` where the kernel keeps no such count.
    """
    number = threading.get_native_id() if native_id is None else native_id
    return _traffic(f"/proc/{os.getpid()}/task/{number}/io")


def _traffic(path: str) -> FileTraffic | None:
    try:
        fields = dict(line.split(": ") for line in Path(path).read_text().splitlines())
        return FileTraffic(int(fields["rchar"]), int(fields["wchar"]))
    except (OSError, KeyError, ValueError):
        return None
