# mypy: disallow-untyped-calls=False
"""``persist-sum``: a random array larger than memory is persisted, then summed twice.

The smallest job that shows everything spilling does: the array is written as it is made, and each
sum reads all of it in the order in which it was made, which is the worst order for evicting what
was used least recently.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.utils import format_bytes
from distributed import Client, wait

from gpuspill.bench.arms import Arm, ClusterShape, open_cluster
from gpuspill.bench.environment import back_memory
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics
from gpuspill.bench.watch import WatchPlugin, WorkerFigures, figures, restart
from gpuspill.errors import ConfigError

__all__ = ["ROWS", "PersistSum"]

ROWS = (
    Row("wall", "wall time", "seconds", compare=True),
    Row("persist", "  persist", "seconds", compare=True),
    Row("sum_1", "  first sum", "seconds", compare=True),
    Row("sum_2", "  second sum", "seconds", compare=True),
    Row("cpu", "worker CPU time", "seconds", compare=True),
    Row("stall_longest", "longest loop stall", "milliseconds"),
    Row("stall_own", "  without waits for a processor", "milliseconds"),
    Row("stall_p999", "loop lateness, 99.9 %", "milliseconds"),
    Row("stalls", "stalls over 50 ms", "count"),
    Row("stalled", "time in stalls", "seconds"),
    Row("late", "time the loop was late", "seconds"),
    Row("written", "written", "bytes"),
    Row("written_ratio", "  per byte of data", "ratio"),
    Row("read", "read back", "bytes"),
    Row("read_ratio", "  per byte of data", "ratio"),
    Row("loop_operations", "store I/O on the loop", "count"),
    Row("loop_file_bytes", "file bytes of the loop's thread", "bytes"),
    Row("peak_memory", "peak resident memory", "bytes", compare=True),
    Row("pauses", "worker paused", "count"),
    Row("paused", "  for", "seconds"),
    Row("stolen", "processor time the host took", "seconds"),
    Row("correct", "result correct", "yes"),
)


@dataclass(frozen=True, slots=True)
class PersistSum(Benchmark):
    """The job and the cluster it runs on.

    Parameters
    ----------
    limit
        The worker's memory limit, bytes.
    ratio
        Size of the array divided by the limit.
    chunk
        Size of a chunk, bytes.
    threads
        Threads of the worker.
    compressible
        Whether every second value is zero.
    delay
        Seconds added to each file operation of the store.
    timeout
        Seconds after which a phase counts as failed.
    seed
        Of the random numbers.

    Raises
    ------
    ConfigError
        If a size is not positive or a chunk does not fit into memory.
    """

    name = "persist-sum"

    limit: int = 2**30
    ratio: float = 2.5
    chunk: int = 32 * 2**20
    threads: int = 2
    compressible: bool = False
    delay: float = 0.0
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_positive("limit", "ratio", "threads", "timeout")
        if not 8 <= self.chunk <= self.limit:
            raise ConfigError(f"chunk: must be between 8 bytes and the limit, got {self.chunk}")
        if self.delay < 0:
            raise ConfigError(f"delay: must not be negative, got {self.delay}")

    @property
    def chunks(self) -> int:
        """How many chunks the array has."""
        return max(1, math.ceil(self.limit * self.ratio / self.chunk))

    @property
    def nbytes(self) -> int:
        """Size of the array, bytes."""
        return self.chunks * self.chunk // 8 * 8

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{self.chunks} chunks of {format_bytes(self.chunk)}"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def parameters(self) -> Mapping[str, Any]:
        """Return what was asked for, for the record."""
        return asdict(self) | {"chunks": self.chunks, "nbytes": self.nbytes}

    def array(self) -> da.Array:
        """Return the (lazy) array; the same values every time."""
        length = self.chunk // 8
        array = da.random.default_rng(self.seed).random(self.chunks * length, chunks=length)
        if self.compressible:
            array = array.map_blocks(_zero_every_second, dtype=array.dtype)
        return cast("da.Array", array)

    def reference(self) -> float:
        """Compute the sum in this process, a chunk at a time."""
        return float(self.array().sum().compute(scheduler="synchronous"))

    def run(self, arm: Arm, expected: float) -> Metrics:
        """Do the job once in a fresh worker process and measure it.

        Raises
        ------
        TimeoutError
            If a phase takes longer than ``timeout``.
        RuntimeError
            If the worker was killed and started again meanwhile.
        """
        shape = ClusterShape(workers=1, threads=self.threads, memory_limit=self.limit)
        # The scheduler would report to no one; and tasks must not be fused differently by a user's
        # configuration.
        with (
            dask.config.set({"distributed.scheduler.active-memory-manager.start": False}),
            open_cluster(arm, shape, watch=WatchPlugin(), delay=self.delay, silence=logging.CRITICAL) as client,
        ):
            client.submit(_warm_up, pure=False).result(timeout=self.timeout)
            back_memory(self.chunks * self.chunk + 2 * self.limit)
            before = restart(client)
            phases, results = self._phases(client)
            after = figures(client)
        if set(before.values()) != {figure.pid for figure in after.values()}:
            raise RuntimeError("the worker was killed and started again during the run")
        (figure,) = after.values()
        correct = all(math.isclose(result, expected, rel_tol=1e-12) for result in results)
        return phases | self._metrics(figure) | {"correct": correct}

    def _phases(self, client: Client) -> tuple[dict[str, float], list[float]]:
        marks = [time.perf_counter()]
        array = client.persist(self.array())
        wait(array, timeout=self.timeout)
        marks.append(time.perf_counter())
        results = []
        for _ in range(2):
            results.append(float(client.compute(array.sum()).result(timeout=self.timeout)))
            marks.append(time.perf_counter())
        names = ("persist", "sum_1", "sum_2")
        phases = {name: marks[number + 1] - marks[number] for number, name in enumerate(names)}
        return {"wall": marks[-1] - marks[0]} | phases, results

    def _metrics(self, figure: WorkerFigures) -> dict[str, float | int | None]:
        traffic, loop_traffic = figure.file_traffic, figure.loop_file_traffic
        return {
            "cpu": figure.cpu,
            "stall_longest": figure.loop.longest,
            "stall_own": figure.loop.longest_own,
            "stall_p999": figure.loop.p999,
            "stalls": figure.loop.stalls,
            "stalled": figure.loop.stalled,
            "late": figure.loop.late,
            "written": figure.store.written_bytes,
            "written_ratio": figure.store.written_bytes / self.nbytes,
            "read": figure.store.read_bytes,
            "read_ratio": figure.store.read_bytes / self.nbytes,
            "loop_operations": figure.store.loop_operations,
            "process_file_bytes": None if traffic is None else traffic.read + traffic.written,
            "loop_file_bytes": None if loop_traffic is None else loop_traffic.read + loop_traffic.written,
            "peak_memory": max(figure.memory.peak, figure.memory.high_water),
            "mean_memory": figure.memory.mean,
            "pauses": figure.pauses,
            "paused": figure.paused,
            "stolen": figure.stolen,
        }


def _zero_every_second(block: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    block = block.copy()
    block[1::2] = 0.0
    return block


def _warm_up() -> float:
    # Imports and first calls hold the interpreter's lock for a while; that is no stall of any
    # store's making.
    return float(da.random.default_rng(0).random(8, chunks=4).sum().compute(scheduler="synchronous"))
