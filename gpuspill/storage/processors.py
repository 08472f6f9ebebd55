"""How busy the machine's processors are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Counts", "Processors", "Ticks", "read_counts", "read_ticks"]

#: Not looked at more often, seconds: the system counts in hundredths, and takes its time where
#: there are many.
_PAUSE_SECONDS = 0.5
#: What was seen so many seconds ago counts for a third of what is seen now.
_MEMORY_SECONDS = 2.0


class Ticks(NamedTuple):
    """What all processors have done since the machine started, in ticks of its clock."""

    busy: int
    total: int


class Counts(NamedTuple):
    """The same by what it was spent on; guests are counted in the first two."""

    user: int
    nice: int
    system: int
    idle: int
    iowait: int
    irq: int
    softirq: int
    steal: int


def read_counts() -> Counts | None:
    """Return what the system counted; None if it does not tell (no Linux, no descriptor)."""
    try:
        with open("/proc/stat", "rb") as file:
            return Counts(*map(int, file.readline().split()[1:9]))
    except (OSError, ValueError, TypeError):  # of the last: there are too few
        return None


def read_ticks() -> Ticks | None:
    """Return how busy the processors were; None if the system does not tell.

    Waiting for a disk is idle, and what a host took from a virtual machine is busy: neither this
    worker nor its tasks could have had it.
    """
    counts = read_counts()
    return None if counts is None else Ticks(sum(counts) - counts.idle - counts.iowait, sum(counts))


class _Seen(NamedTuple):
    at: float
    ticks: Ticks | None
    share: float


class Processors:
    """The share of the processors' time that was used lately, on the whole machine.

    Parameters
    ----------
    ticks
        As :func:`read_ticks`.
    clock
        Wall time in seconds.

    Notes
    -----
    Thread-safe, without a lock: if two threads look at once, one of the looks is forgotten.
    """

    def __init__(
        self, ticks: Callable[[], Ticks | None] = read_ticks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ticks = ticks
        self._clock = clock
        self._seen = _Seen(clock(), ticks(), 0.0)

    def busy(self) -> float:
        """Return the share, 0 to 1; 0 if the system does not tell. Reads a file twice a second."""
        at, before, share = self._seen
        now = self._clock()
        if now - at < _PAUSE_SECONDS:
            return share
        ticks = self._ticks()
        if ticks is not None and before is not None and ticks.total > before.total:
            recent = min(1.0, max(0.0, (ticks.busy - before.busy) / (ticks.total - before.total)))
            share += (recent - share) * (1.0 - math.exp((at - now) / _MEMORY_SECONDS))
        self._seen = _Seen(now, before if ticks is None else ticks, share)
        return share
