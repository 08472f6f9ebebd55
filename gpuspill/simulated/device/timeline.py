"""What the simulated device was doing when, by its own schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Span", "busy_seconds", "common_seconds"]


class Span(NamedTuple):
    """A piece of work on a simulated device.

    Attributes
    ----------
    lane
        Where it was done: ``"to_host"`` and ``"to_device"`` are the links, whatever the stream; a
        computation has the name of its stream.
    start, end
        Seconds of the device's clock, as scheduled. A thread that waits for a copy sees a later end
        if its bytes take longer to move than the link would need.
    nbytes
        Of a copy; 0 of a computation.
    """

    lane: str
    start: float
    end: float
    nbytes: int = 0


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def busy_seconds(spans: Iterable[Span]) -> float:
    """Return for how long any of the spans lasted; where they overlap counts once."""
    return sum(end - start for start, end in _merged(spans))


def common_seconds(some: Iterable[Span], others: Iterable[Span]) -> float:
    """Return for how long something of both was going on at the same time."""
    first, second = _merged(some), _merged(others)
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
