# mypy: disallow-untyped-calls=False
"""``transpose``: ``a + a.T`` and its mean, of a random array larger than the memory of two workers.

Half of all blocks meet one that another worker has: the smallest job in which spilled values have
to travel. Something has to be persisted, since nothing would have to be spilled otherwise: the
array (spilled blocks travel), or the sum (blocks travel while others are spilled).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import dask
import dask.array as da
from dask.utils import format_bytes
from distributed import wait

from gpuspill.bench.arms import Arm, ClusterShape, open_cluster
from gpuspill.bench.environment import back_memory
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics
from gpuspill.bench.watch import WatchPlugin, WorkerFigures, figures, restart
from gpuspill.errors import ConfigError

__all__ = ["ROWS", "Transpose"]

ROWS = (
    Row("wall", "wall time", "seconds", compare=True),
    Row("persist", "  persist", "seconds", compare=True),
    Row("rest", "  the rest", "seconds", compare=True),
    Row("cpu", "CPU time of all workers", "seconds", compare=True),
    Row("stall_longest", "longest loop stall", "milliseconds"),
    Row("stall_p999", "loop lateness, 99.9 %, worst worker", "milliseconds"),
    Row("stalls", "stalls over 50 ms", "count"),
    Row("stalled", "time in stalls", "seconds"),
    Row("written", "written", "bytes"),
    Row("written_ratio", "  per byte of data", "ratio"),
    Row("read", "read back", "bytes"),
    Row("read_ratio", "  per byte of data", "ratio"),
    Row("loop_operations", "store I/O on the loop", "count"),
    Row("peak_memory", "peak resident memory of a worker", "bytes", compare=True),
    Row("pauses", "workers paused", "count"),
    Row("correct", "result correct", "yes"),
)


@dataclass(frozen=True, slots=True)
class Transpose(Benchmark):
    """The job and the cluster it runs on.

    Parameters
    ----------
    limit
        Memory limit of each worker, bytes.
    ratio
        Size of the array divided by the memory of all workers.
    chunk
        Size of a block, bytes; blocks are square.
    persisted
        What is persisted before the rest is computed: ``"array"`` or ``"sum"``.
    workers, threads
        How many workers, and threads in each.
    timeout
        Seconds after which a phase counts as failed.
    seed
        Of the random numbers.

    Raises
    ------
    ConfigError
        If a size is not positive or a block does not fit into memory.
    """

    name = "transpose"

    limit: int = 2**30
    ratio: float = 2.6
    chunk: int = 16 * 2**20
    persisted: Literal["array", "sum"] = "array"
    workers: int = 2
    threads: int = 1
    timeout: float = 900.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_positive("limit", "ratio", "workers", "threads", "timeout")
        if self.persisted not in ("array", "sum"):
            raise ConfigError(f"persisted: expected 'array' or 'sum', got {self.persisted!r}")
        if not 8 <= self.chunk <= self.limit:
            raise ConfigError(f"chunk: must be between 8 bytes and the limit, got {self.chunk}")

    @property
    def edge(self) -> int:
        """Length of a block's edge, elements."""
        return math.isqrt(self.chunk // 8)

    @property
    def blocks(self) -> int:
        """Blocks along one axis."""
        wanted = self.limit * self.workers * self.ratio / (8 * self.edge**2)
        return max(1, math.ceil(math.sqrt(wanted)))

    @property
    def nbytes(self) -> int:
        """Size of the array, bytes."""
        return 8 * (self.blocks * self.edge) ** 2

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{self.blocks**2} blocks, {format_bytes(self.nbytes)} in all, the {self.persisted} persisted"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def parameters(self) -> Mapping[str, Any]:
        """Return what was asked for, for the record."""
        return asdict(self) | {"blocks": self.blocks**2, "nbytes": self.nbytes}

    def array(self) -> da.Array:
        """Return the (lazy) array; the same values every time."""
        length = self.blocks * self.edge
        return cast("da.Array", da.random.default_rng(self.seed).random((length, length), chunks=self.edge))

    def reference(self) -> float:
        """Compute the result in this process, a block at a time: twice the mean of the array."""
        return 2 * float(self.array().mean().compute(scheduler="synchronous"))

    def run(self, arm: Arm, expected: float) -> Metrics:
        """Do the job once in fresh worker processes and measure it.

        Raises
        ------
        TimeoutError
            If a phase takes longer than ``timeout``.
        RuntimeError
            If a worker was killed and started again meanwhile.
        """
        shape = ClusterShape(workers=self.workers, threads=self.threads, memory_limit=self.limit)
        with (
            dask.config.set({"distributed.scheduler.active-memory-manager.start": False}),
            open_cluster(arm, shape, watch=WatchPlugin(), silence=logging.CRITICAL) as client,
        ):
            for address in client.scheduler_info(n_workers=-1)["workers"]:
                client.submit(_warm_up, workers=[address], pure=False).result(timeout=self.timeout)
            back_memory(2 * self.nbytes)
            before = restart(client)
            start = time.perf_counter()
            array = self.array()
            kept = client.persist(array if self.persisted == "array" else array + array.T)
            wait(kept, timeout=self.timeout)
            middle = time.perf_counter()
            total = kept + kept.T if self.persisted == "array" else kept
            result = float(client.compute(total.mean()).result(timeout=self.timeout))
            stop = time.perf_counter()
            after = list(figures(client).values())
        if set(before.values()) != {figure.pid for figure in after}:
            raise RuntimeError("a worker was killed and started again during the run")
        return {
            "wall": stop - start,
            "persist": middle - start,
            "rest": stop - middle,
            "correct": math.isclose(result, expected, rel_tol=1e-12),
        } | self._metrics(after)

    def _metrics(self, workers: list[WorkerFigures]) -> dict[str, float | int | None]:
        written = sum(figure.store.written_bytes for figure in workers)
        read = sum(figure.store.read_bytes for figure in workers)
        return {
            "cpu": sum(figure.cpu for figure in workers),
            "stall_longest": max(figure.loop.longest for figure in workers),
            "stall_p999": max(figure.loop.p999 for figure in workers),
            "stalls": sum(figure.loop.stalls for figure in workers),
            "stalled": sum(figure.loop.stalled for figure in workers),
            "written": written,
            "written_ratio": written / self.nbytes,
            "read": read,
            "read_ratio": read / self.nbytes,
            "loop_operations": sum(figure.store.loop_operations for figure in workers),
            "peak_memory": max(max(figure.memory.peak, figure.memory.high_water) for figure in workers),
            "pauses": sum(figure.pauses for figure in workers),
        }


def _warm_up() -> float:
    array = da.random.default_rng(0).random((4, 4), chunks=2)
    return float((array + array.T).mean().compute(scheduler="synchronous"))
