# mypy: disallow-untyped-calls=False
"""``transfer``: a worker with far more data than memory hands every key to a peer.

What retiring a worker, rebalancing and the active memory manager do all the time. The arm
``memory`` is the same with everything in memory on both sides: no way of sending from disk can be
expected to be faster.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, cast

import dask
import numpy as np
import numpy.typing as npt
from dask.utils import format_bytes
from distributed import Client, LocalCluster, Scheduler, Worker, wait
from distributed.spill import SpillBuffer

from gpuspill.bench.arms import ARMS as ALL_ARMS
from gpuspill.bench.arms import Arm, ClusterShape, open_cluster
from gpuspill.bench.environment import back_memory
from gpuspill.bench.job import Benchmark
from gpuspill.bench.probes import resident_bytes
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample
from gpuspill.bench.watch import WatchPlugin, WorkerFigures, figures, restart
from gpuspill.errors import ConfigError

__all__ = ["ARMS", "ROWS", "TransferBenchmark"]

ARMS: Mapping[str, Arm] = {
    "stock": ALL_ARMS["stock"],
    "gpuspill": ALL_ARMS["gpuspill"],
    "memory": dataclasses.replace(
        ALL_ARMS["nospill"], name="memory", summary="no memory limit: the same keys, sent from memory by stock"
    ),
}

ROWS = (
    Row("rate", "bytes a second", "bytes", compare=True),
    Row("wall", "handing over", "seconds", compare=True),
    Row("use", "first use by the peer", "seconds", compare=True),
    Row("decodes", "sender: values brought into memory", "count"),
    Row("same", "sender: same keys in memory as before", "yes"),
    Row("resident_before", "  before", "bytes"),
    Row("resident_after", "  after", "bytes"),
    Row("extra_peak", "sender: resident memory, peak over before", "bytes"),
    Row("written", "sender: written", "bytes"),
    Row("read", "sender: read", "bytes"),
    Row("stall_longest", "sender: longest loop stall", "milliseconds"),
    Row("stall_p999", "sender: loop lateness, 99.9 %", "milliseconds"),
    Row("stalls", "sender: stalls over 50 ms", "count"),
    Row("stalled", "sender: time in stalls", "seconds"),
    Row("loop_operations", "sender: store I/O on the loop", "count"),
    Row("peer_stall_longest", "peer: longest loop stall", "milliseconds"),
    Row("peer_stalls", "peer: stalls over 50 ms", "count"),
    Row("peer_peak_memory", "peer: peak resident memory", "bytes"),
    Row("correct", "result correct", "yes"),
)


class _Resident(NamedTuple):
    """What a worker has in memory."""

    keys: frozenset[str]
    nbytes: int
    process: int


@dataclass(frozen=True, slots=True)
class TransferBenchmark(Benchmark):
    """The data and the two workers.

    Parameters
    ----------
    limit
        The sender's memory limit, bytes.
    ratio
        Size of the data divided by the limit.
    chunk
        Size of a value, bytes.
    threads
        Threads of each worker.
    peer
        Whether the peer has ``"enough"`` memory, or is ``"limited"`` as the sender is.
    timeout
        Seconds after which a phase counts as failed.

    Raises
    ------
    ConfigError
        If a size is not positive, a value does not fit into memory or `peer` is something else.
    """

    name = "transfer"
    known_arms = ARMS

    limit: int = 2**30
    ratio: float = 3.0
    chunk: int = 16 * 2**20
    threads: int = 1
    peer: Literal["enough", "limited"] = "enough"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.require_positive("limit", "ratio", "threads", "timeout")
        if not 8 <= self.chunk <= self.limit:
            raise ConfigError(f"chunk: must be between 8 bytes and the limit, got {self.chunk}")
        if self.peer not in ("enough", "limited"):
            raise ConfigError(f"peer: must be 'enough' or 'limited', got {self.peer!r}")

    @property
    def keys(self) -> list[str]:
        """The keys that are handed over."""
        return [f"value-{number}" for number in range(max(1, math.ceil(self.limit * self.ratio / self.chunk)))]

    @property
    def nbytes(self) -> int:
        """Size of all values, bytes."""
        return len(self.keys) * (self.chunk // 8 * 8)

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{len(self.keys)} values of {format_bytes(self.chunk)}"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return f"{format_bytes(int(sample.figure('rate')))}/s"

    def parameters(self) -> Mapping[str, Any]:
        """Return what was asked for, for the record."""
        return asdict(self) | {"keys": len(self.keys), "nbytes": self.nbytes}

    def reference(self) -> list[float]:
        """Compute the sum of each value in this process."""
        return [_total(_make(number, self.chunk)) for number in range(len(self.keys))]

    def run(self, arm: Arm, expected: Sequence[float]) -> Metrics:
        """Hand everything over once, in two fresh worker processes, and measure it.

        Raises
        ------
        TimeoutError
            If a phase takes longer than ``timeout``.
        RuntimeError
            If a worker was killed and started again meanwhile.
        """
        shape = ClusterShape(workers=1, threads=self.threads, memory_limit=self.limit)
        with (
            dask.config.set({"distributed.scheduler.active-memory-manager.start": False}),
            open_cluster(arm, shape, watch=WatchPlugin(), silence=logging.CRITICAL) as client,
        ):
            (sender,) = client.scheduler_info(n_workers=-1)["workers"]
            peer = self._add_peer(client, sender)
            for address in (sender, peer):
                client.submit(_warm_up, workers=[address], pure=False).result(timeout=self.timeout)
            values = [
                client.submit(_make, number, self.chunk, key=key, workers=[sender])
                for number, key in enumerate(self.keys)
            ]
            wait(values, timeout=self.timeout)
            before = _resident_of(client, sender)
            back_memory(self.nbytes + 2 * self.limit)
            pids = restart(client)
            start = time.perf_counter()
            client.run_on_scheduler(_hand_over, peer, self.keys, self.timeout)
            stop = time.perf_counter()
            measured = figures(client)
            after = _resident_of(client, sender)
            totals = [client.submit(_total, value, workers=[peer], pure=False) for value in values]
            got = client.gather(totals)
            used = time.perf_counter()
        if any(pids[address] != measured[address].pid for address in (sender, peer)):
            raise RuntimeError("a worker was killed and started again during the run")
        correct = all(map(math.isclose, got, expected))
        return {
            "rate": self.nbytes / (stop - start),
            "wall": stop - start,
            "use": used - stop,
            "same": before.keys == after.keys,
            "resident_before": before.nbytes,
            "resident_after": after.nbytes,
            "extra_peak": max(0, measured[sender].memory.peak - before.process),
            "correct": correct,
        } | _metrics(measured[sender], measured[peer])

    def _add_peer(self, client: Client, sender: str) -> str:
        cluster = cast("LocalCluster", client.cluster)
        if self.peer == "enough":
            options = {**cluster.new_spec["options"], "memory_limit": 0}
            cluster.new_spec = {**cluster.new_spec, "options": options}
        cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        (peer,) = set(client.scheduler_info(n_workers=-1)["workers"]) - {sender}
        return str(peer)


def _metrics(sender: WorkerFigures, peer: WorkerFigures) -> dict[str, float | int | None]:
    return {
        "decodes": sender.store.reads,
        "written": sender.store.written_bytes,
        "read": sender.store.read_bytes,
        "loop_operations": sender.store.loop_operations,
        "stall_longest": sender.loop.longest,
        "stall_p999": sender.loop.p999,
        "stalls": sender.loop.stalls,
        "stalled": sender.loop.stalled,
        "cpu": sender.cpu,
        "peer_stall_longest": peer.loop.longest,
        "peer_stalls": peer.loop.stalls,
        "peer_cpu": peer.cpu,
        "peer_peak_memory": peer.memory.peak,
    }


def _make(number: int, nbytes: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(number).random(nbytes // 8)


def _total(value: npt.NDArray[np.float64]) -> float:
    return float(value.sum())


def _warm_up() -> float:
    return _total(_make(0, 64))


async def _hand_over(peer: str, keys: Sequence[str], timeout: float, dask_scheduler: Scheduler) -> None:
    """Make the peer fetch all keys, as active memory management does, and wait."""
    dask_scheduler.request_acquire_replicas(peer, list(keys), stimulus_id="gpuspill-bench")
    there = dask_scheduler.workers[peer].has_what
    async with asyncio.timeout(timeout):
        while not all(dask_scheduler.tasks[key] in there for key in keys):
            await asyncio.sleep(0.005)


def _resident_of(client: Client, address: str) -> _Resident:
    """Wait until a worker moves nothing any more, and return what it has in memory."""
    last: _Resident | None = None
    while True:
        found = cast("_Resident", client.run(_resident, workers=[address])[address])
        if last is not None and found.keys == last.keys:
            return found
        last = found
        time.sleep(0.3)


def _resident(dask_worker: Worker) -> _Resident:
    data: Any = dask_worker.data
    memory = data.fast if isinstance(data, SpillBuffer) else getattr(data, "memory", data)
    tasks = dask_worker.state.tasks
    keys = frozenset(key for key in memory if isinstance(key, str) and key.startswith("value-"))
    return _Resident(keys, sum(tasks[key].get_nbytes() for key in keys if key in tasks), resident_bytes())
