"""What a benchmark has to say of itself, and the one way all of them are run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, cast

from gpuspill.bench.arms import ARMS, Arm, parse_arms
from gpuspill.bench.environment import environment
from gpuspill.bench.report import Result, Row
from gpuspill.bench.runner import Metrics, Sample, interleave
from gpuspill.errors import ConfigError

__all__ = ["Benchmark", "benchmark"]


class Benchmark(ABC):
    """A job for several arms with a known result; its subclasses are dataclasses."""

    __slots__ = ()

    name: ClassVar[str]
    """Of the benchmark."""
    known_arms: ClassVar[Mapping[str, Arm]] = ARMS
    """What it can be done on."""

    @property
    @abstractmethod
    def about(self) -> str:
        """What it is made of, for the first line of progress."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Which metrics the table shows."""

    def require_positive(self, *names: str) -> None:
        """Raise ConfigError, which names the first of some parameters that is not larger than 0."""
        for name in names:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be larger than 0, got {getattr(self, name)}")

    def reference(self) -> Any:
        """Compute the right result without a cluster; None if a run can tell without one."""
        return None

    @abstractmethod
    def run(self, arm: Arm, expected: Any) -> Metrics:
        """Do it once on an arm and compare.

        Parameters
        ----------
        arm
            Where; everything it needs is started anew.
        expected
            What :meth:`reference` returned.

        Raises
        ------
        Exception
            Whatever kept it from ending, which makes it a failed run.
        """

    def measure(
        self, arms: Sequence[Arm], repeat: int, expected: Any, progress: Callable[[Sample], None]
    ) -> list[Sample]:
        """Do it `repeat` times on each arm, in turns; see ``interleave`` of the runner."""
        return interleave(arms, repeat, lambda arm, _: self.run(arm, expected), progress)

    def parameters(self) -> Mapping[str, Any]:
        """Return what was asked for, for the record."""
        return asdict(cast("Any", self))

    def outcome(self, sample: Sample) -> str:
        """Say of a run that ended how it went: how long it took and how long it held the loop."""
        return f"{sample.figure('wall'):.2f} s, longest stall {sample.figure('stall_longest'):.3f} s"

    def notes(self, arms: Sequence[Arm], samples: Sequence[Sample]) -> list[str]:
        """Return the lines below the table; none by default."""
        return []


def benchmark(job: Benchmark, arms: str, repeat: int, progress: Callable[[str], None] = lambda line: None) -> Result:
    """Compute the right result, then do a job ``repeat`` times on each arm, in turns.

    Parameters
    ----------
    job
        What to do.
    arms
        Names of the arms, separated by commas.
    repeat
        How many rounds.
    progress
        Receives a line before the first and after each run.

    Raises
    ------
    ConfigError
        If an arm is unknown to the job. A run that fails does not raise: it is part of the result.
    """
    chosen = parse_arms(arms, job.known_arms)
    facts = environment()
    progress(f"{job.name}: {job.about}, computing the right result")
    expected = job.reference()

    def tell(sample: Sample) -> None:
        told = f"failed, {sample.error}" if sample.error else job.outcome(sample)
        progress(f"  run {sample.repeat + 1} {sample.arm}: {told}")

    samples = job.measure(chosen, repeat, expected, tell)
    parameters = dict(job.parameters()) | {"repeat": repeat}
    return Result(job.name, parameters, facts, job.rows, samples, job.notes(chosen, samples))
