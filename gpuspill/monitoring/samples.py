"""The statistics of a cluster at one moment, and what changed between two moments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gpuspill.monitoring.catalogue import catalogue

__all__ = ["ClusterSample", "Numbers", "changes", "combined", "fullest", "rates", "remembering", "steps"]

Numbers: TypeAlias = Mapping[str, float | None]
"""The statistics of one worker, or of several together, by name."""


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """What the workers of a cluster said of themselves.

    Attributes
    ----------
    time
        Seconds, of any clock that does not go back.
    workers
        The statistics of each worker that has gpuspill, by its address.
    tasks
        Tasks that run in the cluster now.
    loop_interval
        The longest interval between two turns of a worker's event loop lately, in seconds, as the
        workers average it.
    """

    time: float
    workers: Mapping[str, Numbers] = field(default_factory=dict)
    tasks: int = 0
    loop_interval: float = 0.0


def combined(workers: Mapping[str, Numbers]) -> dict[str, float | None]:
    """Return the statistics of several workers together.

    A limit that one of them does not have is none for all.
    """
    total: dict[str, float | None] = {}
    for name in catalogue():
        numbers = [worker.get(name) for worker in workers.values()]
        known = [number for number in numbers if number is not None]
        total[name] = None if len(known) < len(numbers) else sum(known)
    return total


def fullest(workers: Mapping[str, Numbers], most: int | None) -> list[str]:
    """Return the addresses of the workers that hold most: so many, or all if None."""
    if most is None or len(workers) <= most:
        return sorted(workers)

    def held(address: str) -> float:
        return sum(workers[address].get(name) or 0 for name in ("device_nbytes", "host_nbytes", "spilled_nbytes"))

    return sorted(sorted(workers, key=held, reverse=True)[:most])


def remembering(before: ClusterSample | None, now: ClusterSample) -> ClusterSample:
    """Return a sample with what the workers that it misses said before.

    A worker whose connection is made anew is missed for a while. It goes on from there afterwards.
    """
    return now if before is None else replace(now, workers={**before.workers, **now.workers})


def steps(samples: Iterable[ClusterSample]) -> Iterator[tuple[ClusterSample, ClusterSample]]:
    """Yield each sample but the first, after what was known before it."""
    known: ClusterSample | None = None
    for after in samples:
        if known is not None:
            yield known, after
        known = remembering(known, after)


def changes(before: ClusterSample, after: ClusterSample) -> dict[str, dict[str, float]]:
    """Return how much the totals of each worker grew between two samples.

    A worker that was not there before, or that was started anew meanwhile, counts from zero.
    """
    grown: dict[str, dict[str, float]] = {}
    for address, numbers in after.workers.items():
        known = before.workers.get(address, {})
        grown[address] = {}
        for name, metric in catalogue().items():
            if metric.kind == "counter":
                now, then = numbers.get(name) or 0, known.get(name) or 0
                grown[address][name] = now - then if now >= then else now
    return grown


def rates(before: ClusterSample, after: ClusterSample) -> dict[str, dict[str, float]]:
    """Return how fast the totals of each worker grew between two samples, per second."""
    seconds = after.time - before.time
    if seconds <= 0:
        return {address: dict.fromkeys(grown, 0.0) for address, grown in changes(before, after).items()}
    return {
        address: {name: number / seconds for name, number in grown.items()}
        for address, grown in changes(before, after).items()
    }
