# mypy: disallow-untyped-calls=False
"""``tiny``: thousands of trivial tasks and nothing to spill, which shows what a task costs.

Half of the tasks depend on one of the other half, so that inputs are looked up as well as results
stored. What a store costs is a few hundredths of what distributed does for a task, and less than by
what one worker differs from the next, or from itself a minute later. So the arms' workers stand in
one cluster and take turns, a few hundred tasks at a time; a round has new processes; and there is a
*control*, a second worker that is configured as stock is. What that differs by is chance.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import sub
from typing import Any, ClassVar, TypeVar

from distributed import Client, Future, Nanny, Scheduler, SpecCluster, Worker, wait

from gpuspill.bench.arms import ARMS, BASELINE, Arm, ClusterShape, open_cluster
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample, paired_difference
from gpuspill.bench.watch import WatchPlugin, figures, restart, store_counters
from gpuspill.errors import ConfigError

__all__ = ["CONTROL", "MODES", "ROWS", "Tiny"]

T = TypeVar("T")

MODES = ("processes", "inprocess")
"""Where the worker lives: in a process of its own, or with client and scheduler in this one."""

CONTROL = Arm("control", "another worker like stock's: what it differs by is chance")
"""Shows what can be told from a difference between two arms."""

#: Tasks of one turn: few enough that one turn and the next meet the same machine.
BATCH = 200

ROWS = (
    Row("task", "a task", "microseconds", compare=True),
    Row("task_cpu", "processor time of the worker", "microseconds", compare=True),
    Row("more", "a task, more than stock in its turn", "microseconds"),
    Row("more_cpu", "processor time, more than stock in its turn", "microseconds"),
    Row("stall", "longest loop stall", "milliseconds"),
    Row("written", "spilled", "bytes"),
    Row("correct", "results correct", "yes"),
)


@dataclass(frozen=True, slots=True)
class Tiny(Benchmark):
    """The tasks and where they run.

    Parameters
    ----------
    tasks
        How many an arm does; an even number.
    mode
        One of :data:`MODES`.
    threads
        Threads of the worker.
    timeout
        Seconds after which a turn, or a run in this process, counts as failed.

    Raises
    ------
    ConfigError
        If the number of tasks is odd or not positive, or the mode is unknown.
    """

    name = "tiny"
    known_arms: ClassVar[Mapping[str, Arm]] = {**ARMS, CONTROL.name: CONTROL}

    tasks: int = 20_000
    mode: str = "processes"
    threads: int = 2
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.tasks <= 0 or self.tasks % 2:
            raise ConfigError(f"tasks: must be an even number larger than 0, got {self.tasks}")
        if self.mode not in MODES:
            raise ConfigError(f"mode: must be {' or '.join(MODES)}, got {self.mode!r}")

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
            f"{arm.name} - stock, {what}: {found.median * 1e6:+.1f} µs a task "
            f"({found.low * 1e6:+.1f} to {found.high * 1e6:+.1f})"
            for arm in arms
            for metric, what in (("task", "mean of all turns, wall"), ("task_cpu", "mean of all turns, processor time"))
            if arm.name != BASELINE and (found := paired_difference(samples, arm.name, BASELINE, metric)) is not None
        ]

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return f"{sample.figure('task') * 1e6:.0f} µs a task, of the processor {sample.figure('task_cpu') * 1e6:.0f}"

    def measure(
        self, arms: Sequence[Arm], repeat: int, expected: Sequence[int], progress: Callable[[Sample], None]
    ) -> list[Sample]:
        """Let the workers of all arms take turns; one arm after the other in this process."""
        if self.mode == "inprocess":
            return Benchmark.measure(self, arms, repeat, expected, progress)  # super() does not go with slots
        samples = []
        for number in range(repeat):
            try:
                # Another one is the first to be started in each round.
                measured = self.take_turns(_rotated(arms, number), expected)
                found = [Sample(arm.name, number, measured[arm.name]) for arm in arms]
            except Exception as error:  # as for any run; which of them it was cannot always be told
                found = [Sample(arm.name, number, error=f"{type(error).__name__}: {error}") for arm in arms]
            for sample in found:
                progress(sample)
            samples += found
        return samples

    # -- in turns ----------------------------------------------------------------------------------

    def take_turns(self, arms: Sequence[Arm], expected: Sequence[int]) -> Mapping[str, Metrics]:
        """Do the job once on each arm, in one new cluster, and return what was measured.

        Raises
        ------
        Exception
            Whatever kept one of them from ending.
        """
        half, batch = self.tasks // 2, BATCH // 2
        with _open(arms, self.threads) as client:
            contestants = [_Contestant(arm.name, address) for arm, address in _addresses(client, arms)]
            for contestant in contestants:
                contestant.turn(client, range(batch), self.timeout)
                contestant.forget()
            for number, first in enumerate(range(0, half, batch)):
                for contestant in _order(contestants, number):
                    contestant.turn(client, range(first, min(first + batch, half)), self.timeout)
            written = client.run(_written)
            stock = next((contestant for contestant in contestants if contestant.name == BASELINE), None)
            return {
                contestant.name: contestant.metrics(stock)
                | {
                    "written": written[contestant.address],
                    "correct": client.gather(contestant.results) == expected,
                }
                for contestant in contestants
            }

    # -- in this process ---------------------------------------------------------------------------

    def run(self, arm: Arm, expected: Sequence[int]) -> Metrics:
        """Do the job once, in a fresh cluster that lives in this process."""
        shape = ClusterShape(threads=self.threads, processes=False)
        with open_cluster(arm, shape, watch=WatchPlugin(), silence=logging.CRITICAL) as client:
            wait(client.map(_increment, range(100), pure=False), timeout=self.timeout)
            restart(client)
            started = time.perf_counter()
            first = client.map(_increment, range(self.tasks // 2), pure=False)
            second = client.map(_increment, first, pure=False)
            wait(second, timeout=self.timeout)
            wall = time.perf_counter() - started
            (figure,) = figures(client).values()
            right = client.gather(second) == expected
        return {
            "task": wall / self.tasks,
            "task_cpu": figure.cpu / self.tasks,
            "stall": figure.loop.longest,
            "written": figure.store.written_bytes,
            "correct": right,
        }


@dataclass(slots=True)
class _Contestant:
    """A worker and its turns; times in seconds a task."""

    name: str
    address: str
    counts: list[int] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    kept: list[Future[int]] = field(default_factory=list)
    results: list[Future[int]] = field(default_factory=list)

    def turn(self, client: Client, numbers: range, timeout: float) -> None:
        """Let it do a task for each number, and one that takes what that returned."""
        here: dict[str, Any] = {"workers": [self.address], "pure": False}
        before = client.run(time.process_time, workers=[self.address])[self.address]
        started = time.perf_counter()
        first = client.map(_increment, numbers, **here)
        second = client.map(_increment, first, **here)
        wait(second, timeout=timeout)
        wall = time.perf_counter() - started
        after = client.run(time.process_time, workers=[self.address])[self.address]
        self.counts.append(len(numbers))
        self.walls.append(wall / len(numbers) / 2)
        self.cpus.append((after - before) / len(numbers) / 2)
        self.kept += first
        self.results += second

    def forget(self) -> None:
        """That was to warm up."""
        for turns in (self.counts, self.walls, self.cpus, self.kept, self.results):
            turns.clear()

    def metrics(self, stock: _Contestant | None) -> dict[str, float | None]:
        """Return means of all tasks, and medians of what turns took more than stock's.

        The medians leave out what only some turns have, such as full garbage collections; the means
        do not.
        """
        compared = stock is not None and stock is not self
        return {
            "task": statistics.fmean(self.walls, self.counts),
            "task_cpu": statistics.fmean(self.cpus, self.counts),
            "more": statistics.median(map(sub, self.walls, stock.walls)) if compared and stock else None,
            "more_cpu": statistics.median(map(sub, self.cpus, stock.cpus)) if compared and stock else None,
        }


def _order(contestants: Sequence[_Contestant], number: int) -> list[_Contestant]:
    """Return who comes when: each first as often as last, and before each other as often."""
    order = _rotated(contestants, number // 2)
    return order[::-1] if number % 2 else order


def _rotated(items: Sequence[T], number: int) -> list[T]:
    start = number % len(items)
    return [*items[start:], *items[:start]]


@contextmanager
def _open(arms: Sequence[Arm], threads: int) -> Iterator[Client]:
    """Start a cluster with a worker for each arm, and connect to it."""
    shape = ClusterShape(threads=threads)
    workers = {}
    for arm in arms:
        options = arm.cluster_arguments(shape)
        workers[arm.name] = {
            "cls": Nanny,
            "options": {
                "nthreads": shape.threads,
                "memory_limit": options["memory_limit"],
                "data": options["data"],
                "config": dict(arm.config),
                "silence_logs": logging.CRITICAL,
                "dashboard_address": None,
            },
        }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "port": 0}}
    with (
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.CRITICAL) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(len(arms), timeout=60)
        yield client


def _addresses(client: Client, arms: Sequence[Arm]) -> Iterator[tuple[Arm, str]]:
    found = {worker["name"]: address for address, worker in client.scheduler_info(n_workers=-1)["workers"].items()}
    for arm in arms:
        yield arm, found[arm.name]


def _written(dask_worker: Worker) -> int:
    return store_counters(dask_worker.data).written_bytes


def _increment(number: int) -> int:
    return number + 1
