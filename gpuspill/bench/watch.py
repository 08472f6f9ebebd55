# mypy: disallow-untyped-calls=False
"""A worker plugin that runs the probes in a worker and reads the counters of its store."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

from distributed import Client, Worker, WorkerPlugin
from distributed.spill import SpillBuffer

from gpuspill.bench.probes import (
    FileTraffic,
    LoopProbe,
    LoopSummary,
    MemoryProbe,
    MemorySummary,
    process_file_traffic,
    stolen_time,
    thread_file_traffic,
)

__all__ = [
    "HEARTBEAT",
    "StoreCounters",
    "WatchPlugin",
    "WorkerFigures",
    "figures",
    "restart",
    "store_counters",
]

HEARTBEAT = "gpuspill_bench"
"""The key of a watched worker's figures among the metrics of its heartbeat."""


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """What a worker's store says of itself; bytes and counts since the worker started."""

    host_bytes: int = 0
    disk_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    writes: int = 0
    reads: int = 0
    loop_operations: int = 0

    def since(self, earlier: StoreCounters) -> StoreCounters:
        """Return these counters with the ever-growing ones counted from ``earlier`` on."""
        return StoreCounters(
            self.host_bytes,
            self.disk_bytes,
            self.written_bytes - earlier.written_bytes,
            self.read_bytes - earlier.read_bytes,
            self.writes - earlier.writes,
            self.reads - earlier.reads,
            self.loop_operations - earlier.loop_operations,
        )


def store_counters(data: MutableMapping[Any, Any]) -> StoreCounters:
    """Read the counters of a worker's store.

    Knows gpuspill's store and distributed's ``SpillBuffer``; of a plain ``dict`` all are zero.

    Parameters
    ----------
    data
        ``Worker.data``.
    """
    if callable(statistics := getattr(data, "statistics", None)):
        return _from_statistics(statistics())
    if not isinstance(data, SpillBuffer):
        return StoreCounters()
    metrics = data.cumulative_metrics
    writes, reads = (int(metrics.get((label, "count"), 0)) for label in ("disk-write", "disk-read"))
    return StoreCounters(
        host_bytes=int(data.fast.total_weight),
        disk_bytes=int(data.spilled_total.disk),
        written_bytes=int(metrics.get(("disk-write", "bytes"), 0)),
        read_bytes=int(metrics.get(("disk-read", "bytes"), 0)),
        writes=writes,
        reads=reads,
        # distributed reads and writes its store on the event loop only, so that every operation is
        # one of these.
        loop_operations=writes + reads,
    )


def _from_statistics(statistics: Any) -> StoreCounters:
    return StoreCounters(
        host_bytes=statistics.host_nbytes,
        disk_bytes=statistics.disk_nbytes,
        written_bytes=statistics.written_nbytes,
        read_bytes=statistics.read_nbytes,
        writes=statistics.spills,
        reads=statistics.restores,
        loop_operations=statistics.loop_io,
    )


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Everything measured in one worker since :func:`restart`.

    Parameters
    ----------
    pid
        The process; another one than before means that the worker was killed and started again.
    elapsed, cpu
        Wall and processor time, seconds.
    loop, memory, store
        See the classes.
    file_traffic, loop_file_traffic
        What the whole process, and the event loop's thread alone, moved from and to files, by the
        kernel's count.
    pauses, paused
        How often and for how many seconds in all distributed had paused the worker.
    stolen
        Seconds for which the machine's processors were not there, by the kernel's count; see
        :func:`~gpuspill.bench.probes.stolen_time`.
    """

    pid: int
    elapsed: float
    cpu: float
    loop: LoopSummary
    memory: MemorySummary
    store: StoreCounters
    file_traffic: FileTraffic | None
    loop_file_traffic: FileTraffic | None
    pauses: int
    paused: float
    stolen: float | None


class WatchPlugin(WorkerPlugin):
    """Measures the worker it is registered on.

    Parameters
    ----------
    heartbeat
        Whether to publish the store's counters in the worker's heartbeat, for a live view.
    """

    name = "gpuspill-bench-watch"

    def __init__(self, heartbeat: bool = False) -> None:
        self._heartbeat = heartbeat

    def setup(self, worker: Worker) -> None:
        """Start the probes; runs on the worker's event loop."""
        self._worker = worker
        self._pauses, self._paused_since, self._paused = 0, None, 0.0
        self._memory = MemoryProbe()
        self._loop = LoopProbe(asyncio.get_running_loop(), on_tick=self._watch_status)
        if self._heartbeat:
            worker.metrics[HEARTBEAT] = self._publish
        self._memory.start()
        self._loop.start()
        self.restart()

    def teardown(self, worker: Worker) -> None:
        """Stop the probes."""
        self._loop.stop()
        self._memory.stop()

    def restart(self) -> None:
        """Count from now on. Call on the loop's thread."""
        self._started, self._cpu = time.perf_counter(), time.process_time()
        self._store = store_counters(self._worker.data)
        self._traffic = process_file_traffic(), thread_file_traffic()
        self._stolen = stolen_time()
        self._pauses, self._paused = 0, 0.0
        self._loop.reset()
        self._memory.reset()

    def figures(self) -> WorkerFigures:
        """Return what was measured since :meth:`restart`. Call on the loop's thread."""
        running = 0.0 if self._paused_since is None else time.perf_counter() - self._paused_since
        self._memory.sample()
        return WorkerFigures(
            pid=os.getpid(),
            elapsed=time.perf_counter() - self._started,
            cpu=time.process_time() - self._cpu,
            loop=self._loop.summary(),
            memory=self._memory.summary(),
            store=store_counters(self._worker.data).since(self._store),
            file_traffic=_difference(process_file_traffic(), self._traffic[0]),
            loop_file_traffic=_difference(thread_file_traffic(), self._traffic[1]),
            pauses=self._pauses,
            paused=self._paused + running,
            stolen=None if self._stolen is None else (stolen_time() or 0.0) - self._stolen,
        )

    _worker: Worker
    _loop: LoopProbe
    _memory: MemoryProbe
    _started: float
    _cpu: float
    _store: StoreCounters
    _traffic: tuple[FileTraffic | None, FileTraffic | None]
    _stolen: float | None
    _paused_since: float | None

    def _watch_status(self) -> None:
        paused = self._worker.status.name == "paused"
        if paused and self._paused_since is None:
            self._pauses, self._paused_since = self._pauses + 1, time.perf_counter()
        elif not paused and self._paused_since is not None:
            self._paused += time.perf_counter() - self._paused_since
            self._paused_since = None

    def _publish(self, worker: Worker) -> Mapping[str, float]:
        counters = dataclasses.asdict(store_counters(worker.data).since(self._store))
        return counters | {"longest_stall": self._loop.longest(), "pauses": self._pauses}


def _difference(now: FileTraffic | None, then: FileTraffic | None) -> FileTraffic | None:
    return None if now is None or then is None else now - then


def _watch_of(worker: Worker) -> WatchPlugin:
    return cast("WatchPlugin", worker.plugins[WatchPlugin.name])


def _restart_in_worker(dask_worker: Worker) -> int:
    # A full collection takes as long as several blocks take to read. When the next one is due
    # depends on all that was made since the process began, imports included: without this it falls
    # into the job in one arm and behind it in another.
    gc.collect()
    _watch_of(dask_worker).restart()
    return os.getpid()


def _figures_in_worker(dask_worker: Worker) -> WorkerFigures:
    return _watch_of(dask_worker).figures()


def restart(client: Client) -> dict[str, int]:
    """Make every worker count from now on; returns their process numbers by address."""
    return cast("dict[str, int]", client.run(_restart_in_worker))


def figures(client: Client) -> dict[str, WorkerFigures]:
    """Return what every worker measured since :func:`restart`, by address."""
    return cast("dict[str, WorkerFigures]", client.run(_figures_in_worker))
