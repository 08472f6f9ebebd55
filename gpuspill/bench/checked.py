"""Benchmarks whose result is known: what those of a job with a reference have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpuspill.bench.arms import Arm
from gpuspill.bench.environment import environment
from gpuspill.bench.report import Result, Row
from gpuspill.bench.runner import Metrics, Sample, interleave

__all__ = ["CheckedJob", "run_checked", "wall_and_stall"]


class CheckedJob(Protocol):
    """A job that can be computed without a cluster as well."""

    def parameters(self) -> Mapping[str, Any]:
        """Return what it was asked to do."""
        ...

    def reference(self) -> Any:
        """Compute the right result without a cluster."""
        ...

    def run(self, arm: Arm, expected: Any) -> Metrics:
        """Run it once on an arm and compare."""
        ...


def run_checked(
    name: str,
    job: CheckedJob,
    arms: Sequence[Arm],
    repeat: int,
    rows: Sequence[Row],
    *,
    about: str,
    outcome: Callable[[Sample], str],
    progress: Callable[[str], None],
) -> Result:
    """Compute the reference, then run a job ``repeat`` times on each arm, in turns.

    Parameters
    ----------
    name
        Of the benchmark.
    job, arms, repeat
        What to run where, and how many rounds.
    rows
        Which metrics the table shows.
    about
        What the job is made of, for the first line of progress.
    outcome
        What to say of a run that ended.
    progress
        Receives a line before the first and after each run.
    """
    facts = environment()
    progress(f"{name}: {about}, computing reference")
    expected = job.reference()

    def tell(sample: Sample) -> None:
        told = f"failed, {sample.error}" if sample.error else outcome(sample)
        progress(f"  run {sample.repeat + 1} {sample.arm}: {told}")

    samples = interleave(arms, repeat, lambda arm, _: job.run(arm, expected), tell)
    return Result(name, dict(job.parameters()) | {"repeat": repeat}, facts, rows, samples)


def wall_and_stall(sample: Sample) -> str:
    """Say how long a run took and how long it held the loop."""
    return f"{sample.figure('wall'):.2f} s, longest stall {sample.figure('stall_longest'):.3f} s"
