"""Runs arms in turns and reduces what they measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuspill.bench.arms import Arm

__all__ = [
    "Metrics",
    "Sample",
    "Spread",
    "interleave",
    "paired_difference",
    "paired_ratio",
    "spread",
]

Metrics = Mapping[str, float | int | bool | None]
"""What one run measured. ``None``: could not be measured here."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one arm.

    Parameters
    ----------
    arm
        Its name.
    repeat
        The round it belongs to, from 0.
    metrics
        What was measured; empty if it failed.
    error
        Why it failed; empty if it did not.
    """

    arm: str
    repeat: int
    metrics: Metrics = field(default_factory=dict)
    error: str = ""

    @property
    def correct(self) -> bool:
        """Whether the run ended and its result was right."""
        return not self.error and bool(self.metrics.get("correct", True))

    def figure(self, metric: str) -> float:
        """Return one metric as a number; ``nan`` if it was not measured."""
        value = self.metrics.get(metric)
        return math.nan if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of ``count`` figures."""

    median: float
    low: float
    high: float
    count: int


def interleave(
    arms: Sequence[Arm],
    repeat: int,
    run: Callable[[Arm, int], Metrics],
    progress: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """Run every arm once, then every arm again, ``repeat`` times in all.

    In turns, so that whatever else the machine does meanwhile falls on all arms alike. A run that
    raises is recorded as failed and the others go on.

    Parameters
    ----------
    arms, repeat
        What to run how often.
    run
        Does one run in a fresh cluster; receives the arm and the number of the round.
    progress
        Called after each run.

    Returns
    -------
    list of Sample
        In the order they ran.
    """
    samples = []
    for number in range(repeat):
        for arm in arms:
            try:
                sample = Sample(arm.name, number, run(arm, number))
            except Exception as error:  # what an arm may raise is what is being found out
                sample = Sample(arm.name, number, error=f"{type(error).__name__}: {error}")
            samples.append(sample)
            if progress is not None:
                progress(sample)
    return samples


def _values(samples: Sequence[Sample], arm: str, metric: str) -> dict[int, float]:
    return {
        sample.repeat: float(value)
        for sample in samples
        if sample.arm == arm and (value := sample.metrics.get(metric)) is not None
    }


def spread(samples: Sequence[Sample], arm: str, metric: str) -> Spread | None:
    """Reduce one metric of one arm; ``None`` if no run measured it."""
    return _reduce(list(_values(samples, arm, metric).values()))


def paired_difference(samples: Sequence[Sample], arm: str, baseline: str, metric: str) -> Spread | None:
    """Subtract the baseline's figures of the same round from an arm's, then reduce.

    Returns
    -------
    Spread or None
        ``None`` if no round has both figures.
    """
    return _paired(samples, arm, baseline, metric, lambda above, below: above - below)


def paired_ratio(samples: Sequence[Sample], arm: str, baseline: str, metric: str) -> Spread | None:
    """Divide an arm's figures by the baseline's of the same round, then reduce.

    Two runs of one round stand next to each other in time, so that slow changes of the machine
    cancel out.

    Returns
    -------
    Spread or None
        ``None`` if no round has both figures with a baseline other than 0.
    """
    return _paired(samples, arm, baseline, metric, lambda above, below: above / below if below else None)


def _paired(
    samples: Sequence[Sample],
    arm: str,
    baseline: str,
    metric: str,
    combine: Callable[[float, float], float | None],
) -> Spread | None:
    below = _values(samples, baseline, metric)
    above = _values(samples, arm, metric)
    combined = [combine(above[number], below[number]) for number in above if number in below]
    return _reduce([value for value in combined if value is not None])


def _reduce(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values), len(values))
