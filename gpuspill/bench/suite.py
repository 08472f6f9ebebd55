# mypy: disallow-untyped-calls=False
"""``suite``: ten uses of dask, each with more data than memory, and what they cost."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import dask
from dask.utils import format_bytes
from distributed import Client

from gpuspill.bench.arms import BASELINE, SMALL_WORKERS, Arm, ClusterShape, open_cluster
from gpuspill.bench.environment import back_memory
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample, paired_ratio, spread
from gpuspill.bench.watch import WatchPlugin, figures, restart
from gpuspill.bench.workloads import WORKLOADS, Workload
from gpuspill.demo.jobs import Answers
from gpuspill.errors import ConfigError

__all__ = ["Suite"]

_GIB = 2**30
_CONTROL = "nospill"
#: What the table says of each workload.
_ROWS = (
    ("wall", "wall time", "seconds", True),
    ("cpu", "  CPU time of all workers", "seconds", True),
    ("written", "  written", "bytes", False),
    ("read", "  read back", "bytes", False),
    ("stall", "  longest stall", "milliseconds", False),
)


@dataclass(frozen=True, slots=True)
class Suite(Benchmark):
    """Workloads, and the clusters they run on.

    Parameters
    ----------
    limit
        Memory limit of each worker, bytes.
    ratio
        Bytes that should be alive at once, by the memory of all workers.
    chunk
        Size of a piece, bytes.
    only
        Names of workloads, separated by commas; all by default.
    workers, threads
        How many workers, and threads in each.
    timeout
        Seconds after which a workload counts as failed.

    Raises
    ------
    ConfigError
        If a size is not positive, a piece does not fit into memory, or a workload is unknown.
    """

    name = "suite"

    limit: int = 2**30
    ratio: float = 2.5
    chunk: int = 16 * 2**20
    only: str = ""
    workers: int = 2
    threads: int = 1
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.require_positive("limit", "ratio", "workers", "threads", "timeout")
        if not 8_192 <= self.chunk <= self.limit:
            raise ConfigError(f"chunk: must be between 8 KiB and the limit, got {self.chunk}")
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ConfigError(f"only: {name!r} is unknown; choose among {', '.join(WORKLOADS)}")

    @property
    def workloads(self) -> list[str]:
        """The names of the workloads that are run."""
        chosen = [name.strip() for name in self.only.split(",") if name.strip()]
        return list(dict.fromkeys(chosen)) or list(WORKLOADS)

    @property
    def nbytes(self) -> int:
        """Bytes that should be alive at once in each workload."""
        return round(self.limit * self.workers * self.ratio)

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{len(self.workloads)} workloads of {format_bytes(self.nbytes)} each"

    @property
    def rows(self) -> Sequence[Row]:
        """A few lines for each workload."""
        return [
            Row(f"{name}.{metric}", f"{name}, {label}" if metric == "wall" else label, unit, compare)
            for name in self.workloads
            for metric, label, unit, compare in _ROWS
        ]

    def parameters(self) -> Mapping[str, Any]:
        """Return what was asked for, for the record."""
        return asdict(self) | {"workloads": self.workloads, "nbytes": self.nbytes}

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        walls = {metric.removesuffix(".wall"): metric for metric in sample.metrics if metric.endswith(".wall")}
        return ", ".join(f"{name} {sample.figure(metric):.2f} s" for name, metric in walls.items())

    def measure(
        self, arms: Sequence[Arm], repeat: int, expected: Any, progress: Callable[[Sample], None]
    ) -> list[Sample]:
        """Run each workload on all arms in turns; all of that `repeat` times.

        A workload that fails on an arm is a sample that failed, and the others go on.
        """
        samples = []
        with self._open() as (workloads, answers):
            for number, (workload, answer), arm in product(
                range(repeat), list(zip(workloads, answers, strict=True)), arms
            ):
                try:
                    sample = Sample(arm.name, number, self.run(arm, (workload, answer)))
                except Exception as error:  # what an arm may raise is what is being found out
                    what = f"{workload.name}: {type(error).__name__}: {error}"
                    sample = Sample(arm.name, number, error=what)
                samples.append(sample)
                progress(sample)
        return samples

    @contextmanager
    def _open(self) -> Iterator[tuple[list[Workload], list[Answers]]]:
        """Make the workloads and compute their answers; remove their files at the end."""
        with ExitStack() as stack:
            workloads = []
            for name in self.workloads:
                workloads.append(WORKLOADS[name](self.nbytes, self.chunk))
                stack.callback(workloads[-1].close)
            yield workloads, [workload.expected() for workload in workloads]

    def run(self, arm: Arm, expected: tuple[Workload, Answers]) -> Metrics:
        """Run a workload in fresh processes; RuntimeError for a wrong answer or a killed worker."""
        workload, answers = expected
        shape = ClusterShape(workers=self.workers, threads=self.threads, memory_limit=self.limit)
        settings = {**SMALL_WORKERS, "distributed.scheduler.active-memory-manager.start": False}
        with (
            dask.config.set(settings),
            open_cluster(arm, shape, watch=WatchPlugin(), silence=logging.CRITICAL) as client,
        ):
            client.run(_import)
            back_memory(2 * self.nbytes)
            before = restart(client)
            start = time.perf_counter()
            found = _within(self.timeout, workload, client)
            wall = time.perf_counter() - start
            after = list(figures(client).values())
        if set(before.values()) != {figure.pid for figure in after}:
            raise RuntimeError("a worker was killed and started again during the run")
        wrong = workload.differences(answers, found)
        if wrong:
            raise RuntimeError("; ".join(wrong))
        measured = {
            "wall": wall,
            "cpu": sum(figure.cpu for figure in after),
            "written": sum(figure.store.written_bytes for figure in after),
            "read": sum(figure.store.read_bytes for figure in after),
            "stall": max(figure.loop.longest for figure in after),
        }
        return {f"{workload.name}.{metric}": value for metric, value in measured.items()}

    def notes(self, arms: Sequence[Arm], samples: Sequence[Sample]) -> list[str]:
        """Return the geometric means, and what a byte that was moved has cost."""
        names = [arm.name for arm in arms]
        lines = []
        for baseline in (BASELINE, _CONTROL):
            for arm in names if baseline in names else ():
                if arm != baseline:
                    lines += self._means(samples, arm, baseline)
        for arm in names if _CONTROL in names else ():
            if arm != _CONTROL:
                costs = [(name, self._cost(samples, arm, name)) for name in self.workloads]
                listed = [f"{name} {cost:.2f}" for name, cost in costs if cost is not None]
                if listed:
                    lines.append(f"{arm}: CPU s beyond {_CONTROL} per GiB moved: {', '.join(listed)}")
        return lines

    def _means(self, samples: Sequence[Sample], arm: str, baseline: str) -> list[str]:
        lines = []
        for metric in ("wall", "cpu"):
            found = [paired_ratio(samples, arm, baseline, f"{name}.{metric}") for name in self.workloads]
            ratios = [ratio.median for ratio in found if ratio is not None]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                lines.append(
                    f"{arm} / {baseline}, {metric}: geometric mean {mean:.2f} of {len(ratios)} workloads, "
                    f"{min(ratios):.2f} to {max(ratios):.2f}"
                )
        return lines

    def _cost(self, samples: Sequence[Sample], arm: str, name: str) -> float | None:
        """Return an arm's CPU seconds above the control, per GiB moved; None if unknown."""
        spreads = [spread(samples, arm, f"{name}.{metric}") for metric in ("cpu", "written", "read")]
        control = spread(samples, _CONTROL, f"{name}.cpu")
        cpu, written, read = (math.nan if found is None else found.median for found in spreads)
        if control is None or not written + read >= 2**20:
            return None
        return (cpu - control.median) / ((written + read) / _GIB)


def _within(seconds: float, workload: Workload, client: Client) -> Answers:
    """Run a workload; raises TimeoutError if it takes longer than so many seconds."""
    # In a thread of its own: dask's own waiting, as inside of ``set_index``, knows no deadline.
    with ThreadPoolExecutor(1, "gpuspill-bench-workload") as pool:
        running = pool.submit(workload.run, client)
        try:
            return running.result(seconds)
        except FutureTimeoutError:
            if running.done():
                raise
            client.close()  # which ends whatever it waits for
            raise TimeoutError(f"no answer after {seconds:g} s") from None
        except CancelledError as error:
            raise RuntimeError("cancelled: the scheduler has lost what it was waiting for") from error


def _import() -> None:
    # The first use of a library holds the interpreter's lock for a while; that is no stall of any
    # store's making.
    from importlib import import_module

    for name in ("numpy", "pandas", "pyarrow", "dask.array", "dask.dataframe", "distributed.shuffle"):
        import_module(name)
