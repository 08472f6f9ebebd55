# mypy: disallow-untyped-calls=False
"""``device``: kernels on blocks of a large array, while others are copied both ways.

A *scale model*: of every `thin` bytes one is there, on a device with as much less memory and a link
as much slower. A copy takes as long as all bytes would take, and the real time of everything else
stays what it is; only moving the bytes costs less of the processor, which on a real device it costs
nothing of. A kernel takes the device's time and none of the processor's; of what it computes one
element a page is really computed, and checked.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import dask
import numpy as np
import numpy.typing as npt
from dask.utils import format_bytes
from distributed import Client, Worker, WorkerPlugin, get_worker, wait

from gpuspill import simulated
from gpuspill.bench.arms import ARMS as ALL_ARMS
from gpuspill.bench.arms import Arm, ClusterShape, open_cluster
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample
from gpuspill.bench.watch import WatchPlugin, figures, restart
from gpuspill.device.port import DeviceStatistics
from gpuspill.errors import ConfigError
from gpuspill.simulated.device.device import SimulatedStream
from gpuspill.simulated.device.timeline import Span, busy_seconds, common_seconds

__all__ = ["ARMS", "ROWS", "DeviceJob"]

ARMS: Mapping[str, Arm] = {
    "gpuspill": Arm("gpuspill", "a device of limited memory", data=ALL_ARMS["gpuspill"].data),
    "fits": Arm("fits", "the same device with memory for everything", spills=False, data=ALL_ARMS["gpuspill"].data),
}

ROWS = (
    Row("wall", "wall time", "seconds"),
    Row("ideal", "largest of the three below", "seconds"),
    Row("compute", "  kernels, busiest thread", "seconds"),
    Row("to_host", "  copies to the host", "seconds"),
    Row("to_device", "  copies to the device", "seconds"),
    Row("ratio", "wall / largest", "ratio"),
    Row("serial", "wall / sum of the three", "ratio"),
    Row("both", "both directions at a time", "seconds"),
    Row("both_part", "  part of the shorter one", "ratio"),
    Row("under", "copies while kernels run", "seconds"),
    Row("under_part", "  part of the time with copies", "ratio"),
    Row("bytes_to_host", "to the host", "bytes"),
    Row("bytes_to_device", "to the device", "bytes"),
    Row("peak", "most on the device", "bytes"),
    Row("out_of_memory", "allocations that did not fit at first", "count"),
    Row("cpu", "worker CPU time", "seconds"),
    Row("stall_longest", "longest loop stall", "milliseconds"),
    Row("loop_operations", "copies on the loop", "count"),
    Row("violations", "broken rules of the device", "count"),
    Row("correct", "result correct", "yes"),
)

#: Bytes for which one element is computed.
_PAGE = 4096
#: Of the congruential generator that blocks are made by.
_FACTOR, _SUMMAND = np.uint64(6364136223846793005), np.uint64(1442695040888963407)
_PLUGIN = "gpuspill-bench-device"


class _Usage(NamedTuple):
    """What a worker's device did."""

    spans: list[Span]
    before: DeviceStatistics
    after: DeviceStatistics


@dataclass(frozen=True, slots=True)
class DeviceJob(Benchmark):
    """The job and the device it runs on. Sizes and bandwidths as if all bytes were there.

    Parameters
    ----------
    limit
        Bytes of values to keep on the device; its memory is a quarter more.
    ratio
        Size of the array divided by the limit.
    chunk
        Size of a block, bytes.
    passes
        How often a kernel runs on each block.
    balance
        Seconds of all kernels by the seconds that copying the array in one direction takes.
    bandwidth
        Of the link, bytes a second in each direction.
    latency
        Seconds each copy takes besides.
    thin
        Of so many bytes one is there.
    threads
        Threads of the worker; each has a stream of its own.
    timeout
        Seconds after which a phase counts as failed.

    Raises
    ------
    ConfigError
        If a size is not positive or a few blocks do not fit on the device.
    """

    name = "device"
    known_arms = ARMS

    limit: int = 4 * 2**30
    ratio: float = 3.0
    chunk: int = 256 * 2**20
    passes: int = 4
    balance: float = 1.0
    bandwidth: float = 10e9
    latency: float = 10e-6
    thin: int = 16
    threads: int = 2
    timeout: float = 300.0

    def __post_init__(self) -> None:
        self.require_positive("limit", "ratio", "chunk", "passes", "bandwidth", "thin", "threads", "timeout")
        for name in ("balance", "latency"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.stored < _PAGE:
            raise ConfigError(f"chunk: must be at least {_PAGE} bytes times thin, got {self.chunk}")
        if self.chunk * 4 * self.threads > self.limit:
            raise ConfigError(f"limit: must have room for 4 blocks for each thread, got {self.limit}")

    @property
    def chunks(self) -> int:
        """How many blocks the array has."""
        return max(1, math.ceil(self.limit * self.ratio / self.chunk))

    @property
    def stored(self) -> int:
        """Bytes of a block that are there."""
        return self.chunk // self.thin // _PAGE * _PAGE

    @property
    def kernel(self) -> float:
        """Seconds that a kernel takes."""
        return self.balance * self.threads * self.stored * self.thin / self.bandwidth

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{self.chunks} blocks of {format_bytes(self.chunk)}, 1/{self.thin} of it real"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return f"{sample.figure('wall'):.2f} s, {sample.figure('ratio'):.2f} times the largest part"

    def parameters(self) -> Mapping[str, Any]:
        """Return what was asked for, for the record."""
        nbytes = self.chunks * self.stored * self.thin
        return asdict(self) | {"chunks": self.chunks, "kernel": self.kernel, "nbytes": nbytes}

    def reference(self) -> list[int]:
        """Compute the result of each block in this process."""
        found = []
        for number in range(self.chunks):
            values = _fill(np.empty(self.stored, np.uint8), number)
            for _ in range(self.passes):
                values = _advance(values, np.empty_like(values))
            found.append(_digest(values))
        return found

    def run(self, arm: Arm, expected: Sequence[int]) -> Metrics:
        """Do the job once in a fresh worker process and measure it.

        Raises
        ------
        TimeoutError
            If a phase takes longer than ``timeout``.
        RuntimeError
            If the worker was killed and started again meanwhile.
        """
        shape = ClusterShape(workers=1, threads=self.threads, memory_limit=0)
        with (
            dask.config.set(self._config(arm)),
            open_cluster(arm, shape, watch=WatchPlugin(), silence=logging.CRITICAL) as client,
        ):
            client.register_plugin(_Streams())
            client.submit(_warm_up, pure=False).result(timeout=self.timeout)
            blocks = client.map(_make, range(self.chunks), nbytes=self.stored, pure=False)
            wait(blocks, timeout=self.timeout)
            pids = restart(client)
            client.run(_begin)
            start = time.perf_counter()
            blocks = self._passes(client, blocks)
            wait(blocks, timeout=self.timeout)
            wall = time.perf_counter() - start
            (usage,) = client.run(_end).values()
            (figure,) = figures(client).values()
            digests = client.gather(client.map(_digest_of, blocks, pure=False))
        if set(pids.values()) != {figure.pid}:
            raise RuntimeError("the worker was killed and started again during the run")
        return self._metrics(wall, usage) | {
            "cpu": figure.cpu,
            "stall_longest": figure.loop.longest,
            "loop_operations": figure.store.loop_operations,
            "correct": digests == list(expected),
        }

    def _config(self, arm: Arm) -> dict[str, Any]:
        limit = self.limit // self.thin
        # Everything, twice: the blocks of one pass, and those of the next.
        everything = 2 * self.stored * (self.chunks + self.threads)
        return {
            "gpuspill.device": "simulated",
            "gpuspill.device-memory-limit": limit if arm.spills else None,
            "gpuspill.simulated.memory": limit * 5 // 4 if arm.spills else everything,
            "gpuspill.simulated.bandwidth": int(self.bandwidth / self.thin),
            "gpuspill.simulated.latency": self.latency,
            # They would cost the processor as much as the copies.
            "gpuspill.simulated.checks": False,
            "distributed.scheduler.active-memory-manager.start": False,
            # A device does not have to get its memory from a kernel, page by page: nor should this
            # one.
            "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**40,
            "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**30,
            "distributed.nanny.pre-spawn-environ.MALLOC_ARENA_MAX": 1,
        }

    def _passes(self, client: Client, blocks: list[Any]) -> list[Any]:
        """Submit all passes, each over all blocks, without waiting for its end."""
        for number in range(self.passes):
            # The futures of the pass before are dropped here: what was read for the last time goes
            # at once.
            blocks = client.map(_step, blocks, seconds=self.kernel, priority=-number, pure=False)
        return blocks

    def _metrics(self, wall: float, usage: _Usage) -> dict[str, float | int]:
        before, after = usage.before, usage.after
        moved = {
            "to_host": (after.bytes_to_host - before.bytes_to_host, after.copies_to_host - before.copies_to_host),
            "to_device": (
                after.bytes_to_device - before.bytes_to_device,
                after.copies_to_device - before.copies_to_device,
            ),
        }
        seconds = {
            lane: nbytes * self.thin / self.bandwidth + copies * self.latency
            for lane, (nbytes, copies) in moved.items()
        }
        lanes: dict[str, list[Span]] = {"to_host": [], "to_device": []}
        for span in usage.spans:
            lanes.setdefault(span.lane, []).append(span)
        down, up = lanes.pop("to_host"), lanes.pop("to_device")
        kernels = [span for spans in lanes.values() for span in spans]
        compute = max((busy_seconds(spans) for spans in lanes.values()), default=0.0)
        ideal = max(compute, *seconds.values())
        copying = busy_seconds([*down, *up])
        both, under = common_seconds(down, up), common_seconds([*down, *up], kernels)
        return {
            "wall": wall,
            "ideal": ideal,
            "compute": compute,
            **seconds,
            "ratio": wall / ideal,
            "serial": wall / (compute + sum(seconds.values())),
            "both": both,
            "both_part": _part(both, min(busy_seconds(down), busy_seconds(up))),
            "under": under,
            "under_part": _part(under, copying),
            "bytes_to_host": moved["to_host"][0] * self.thin,
            "bytes_to_device": moved["to_device"][0] * self.thin,
            "peak": after.peak_bytes * self.thin,
            "kernels": after.kernels - before.kernels,
            "out_of_memory": after.out_of_memory - before.out_of_memory,
            "violations": after.violations,
        }


def _part(some: float, whole: float) -> float:
    return some / whole if whole else 0.0


# -- what runs in the worker -----------------------------------------------------------------------


class _Streams(WorkerPlugin):
    """Gives each thread of a worker a stream to compute on."""

    name = _PLUGIN

    def setup(self, worker: Worker) -> None:
        """Do nothing: a stream is made when a thread asks for the first time."""
        self._streams: dict[int, SimulatedStream] = {}

    def stream(self, thread: int) -> SimulatedStream:
        """Return the stream of a thread."""
        if thread not in self._streams:
            self._streams[thread] = simulated.device().new_stream(f"compute {thread}")
        return self._streams[thread]

    before: DeviceStatistics


def _begin(dask_worker: Worker) -> None:
    device = simulated.device()
    device.reset_peak()
    device.start_timeline()
    cast("_Streams", dask_worker.plugins[_PLUGIN]).before = device.statistics()


def _end(dask_worker: Worker) -> _Usage:
    device = simulated.device()
    after = device.statistics()
    return _Usage(device.stop_timeline(), cast("_Streams", dask_worker.plugins[_PLUGIN]).before, after)


def _samples(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of each page."""
    return block.view(np.uint64)[:: _PAGE // 8]


def _fill(block: npt.NDArray[np.uint8], number: int) -> npt.NDArray[np.uint8]:
    values = _samples(block)
    values[:] = np.arange(number << 32, (number << 32) + values.size, dtype=np.uint64)
    return block


def _advance(block: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    _samples(out)[:] = _samples(block) * _FACTOR + _SUMMAND
    return out


def _digest(block: npt.NDArray[np.uint8]) -> int:
    values = _samples(block)
    # By place as well: values in the wrong order are wrong.
    return int((values * np.arange(1, values.size + 1, dtype=np.uint64)).sum(dtype=np.uint64))


def _make(number: int, nbytes: int) -> simulated.Array:
    block = simulated.empty(nbytes, np.uint8)
    simulated.run_kernel(_fill, block, number, writes=(block,))
    simulated.device().current_stream().synchronize()
    return block


def _step(block: simulated.Array, seconds: float) -> simulated.Array:
    streams = cast("_Streams", get_worker().plugins[_PLUGIN])
    device = simulated.device()
    with device.use_stream(streams.stream(threading.get_ident())) as stream:
        out = simulated.empty(block.shape, np.uint8)
        simulated.run_kernel(_advance, block, out, writes=(out,), seconds=seconds)
        stream.synchronize()
    return out


def _digest_of(block: simulated.Array) -> int:
    return _digest(simulated.asnumpy(block))


def _warm_up() -> int:
    return _digest_of(_make(0, _PAGE))
