# mypy: disallow-untyped-calls=False
"""``tiny``: thousands of trivial tasks and nothing to spill, which shows what a task costs.

Half of the tasks depend on one of the other half, so that inputs are looked up as well as results
stored. The wall time is mostly the scheduler's; the processor time of the worker is where a store's
own cost shows, and it is the steadier of the two.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed import wait

from gpuspill.bench.arms import Arm, ClusterShape, open_cluster
from gpuspill.bench.job import Job
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample, paired_difference
from gpuspill.bench.watch import Watch, figures, restart
from gpuspill.errors import ConfigError

__all__ = ["MODES", "ROWS", "Tiny"]

MODES = ("processes", "inprocess")
"""Where the worker lives: in a process of its own, or with client and scheduler in this one."""

_LABELS = {"processes": "worker in its own process", "inprocess": "all in one process"}

ROWS = (
    *(
        row
        for mode in MODES
        for row in (
            Row(f"{mode}_task", f"a task, {_LABELS[mode]}", "microseconds", compare=True),
            Row(f"{mode}_task_cpu", "  processor time", "microseconds", compare=True),
            Row(f"{mode}_stall", "  longest loop stall", "milliseconds"),
        )
    ),
    Row("written", "spilled", "bytes"),
    Row("correct", "results correct", "yes"),
)


@dataclass(frozen=True, slots=True)
class Tiny(Job):
    """The tasks and where they run.

    Parameters
    ----------
    tasks
        How many; an even number.
    mode
        One of :data:`MODES`, or ``both``.
    threads
        Threads of the worker.
    timeout
        Seconds after which a run counts as failed.

    Raises
    ------
    ConfigError
        If the number of tasks is odd or not positive, or the mode is unknown.
    """

    name = "tiny"

    tasks: int = 20_000
    mode: str = "both"
    threads: int = 2
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.tasks <= 0 or self.tasks % 2:
            raise ConfigError(f"tasks: must be an even number larger than 0, got {self.tasks}")
        if self.mode not in (*MODES, "both"):
            raise ConfigError(f"mode: must be {', '.join(MODES)} or both, got {self.mode!r}")

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to run in."""
        return MODES if self.mode == "both" else (self.mode,)

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{self.tasks:,} tasks"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def reference(self) -> list[int]:
        """Return what the tasks that depend on others return."""
        return [number + 2 for number in range(self.tasks // 2)]

    def notes(self, arms: Sequence[Arm], samples: Sequence[Sample]) -> list[str]:
        """Say by how much each arm differs from stock, in pairs of one round."""
        return [
            f"{arm.name} - stock, {_LABELS[mode]}: {found.median * 1e6:+.1f} µs {what} a task "
            f"({found.low * 1e6:+.1f} to {found.high * 1e6:+.1f})"
            for arm in arms
            for mode in self.modes
            for metric, what in ((f"{mode}_task", "wall"), (f"{mode}_task_cpu", "processor time"))
            if arm.name != "stock" and (found := paired_difference(samples, arm.name, "stock", metric)) is not None
        ]

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return ", ".join(f"{sample.figure(f'{mode}_task') * 1e6:.0f} µs a task ({mode})" for mode in self.modes)

    def run(self, arm: Arm, expected: Sequence[int]) -> Metrics:
        """Do the job once in every mode, each in a fresh cluster."""
        metrics: dict[str, float | int | bool | None] = {"correct": True, "written": 0}
        for mode in self.modes:
            shape = ClusterShape(threads=self.threads, processes=mode == "processes")
            with open_cluster(arm, shape, watch=Watch(), silence=logging.CRITICAL) as client:
                half = self.tasks // 2
                wait(client.map(_increment, range(100), pure=False), timeout=self.timeout)
                restart(client)
                started = time.perf_counter()
                first = client.map(_increment, range(half), pure=False)
                second = client.map(_increment, first, pure=False)
                wait(second, timeout=self.timeout)
                wall = time.perf_counter() - started
                (figure,) = figures(client).values()
                right = client.gather(second) == expected
            metrics[f"{mode}_task"] = wall / self.tasks
            metrics[f"{mode}_task_cpu"] = figure.cpu / self.tasks
            metrics[f"{mode}_stall"] = figure.loop.longest
            metrics["written"] = int(metrics["written"] or 0) + figure.store.written_bytes
            metrics["correct"] = bool(metrics["correct"]) and right
        return metrics


def _increment(number: int) -> int:
    return number + 1
