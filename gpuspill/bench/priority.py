# mypy: disallow-untyped-calls=False
"""``priority``: an urgent task behind others, with memory full and a slow disk.

A worker makes values of the lowest priority faster than its disk takes them. One task of the
highest priority comes, whose input is on another worker. How long does it take? Then, what is
promised when nothing can be freed, and what is left of memory while tasks wait for others that they
have asked for.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import dask
import numpy as np
import numpy.typing as npt
from dask.utils import format_bytes
from distributed import Client, Event, Worker, metrics, wait, worker_client

from gpuspill.bench.arms import ARMS as ALL_ARMS
from gpuspill.bench.arms import Arm, ClusterShape, open_cluster
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample
from gpuspill.errors import ConfigError

__all__ = ["ARMS", "ROWS", "Priority"]

ARMS: Mapping[str, Arm] = {
    "gpuspill": ALL_ARMS["gpuspill"],
    "unadmitted": dataclasses.replace(
        ALL_ARMS["gpuspill"],
        name="unadmitted",
        summary="nothing waits for room: gpuspill.admission is off",
        config={"gpuspill.admission": False},
    ),
    "stock": ALL_ARMS["stock"],
}

ROWS = (
    Row("urgent", "the urgent task", "seconds", compare=True),
    Row("arrived", "  its input has arrived", "seconds", compare=True),
    Row("passed", "  tasks that passed it", "count"),
    Row("asked", "when nothing can be freed: bytes asked for", "bytes"),
    Row("promised", "  let in beyond the limit", "bytes"),
    Row("largest", "  the largest request", "bytes"),
    Row("before", "in memory", "bytes"),
    Row("seceded", "  while tasks wait for others", "bytes"),
    Row("correct", "results correct", "yes"),
)

#: Of the workers, which have far more than their values may take.
_MEMORY_LIMIT = 4 * 10**9

_EVENT = "gpuspill-bench-go"


@dataclass(frozen=True, slots=True)
class Priority(Benchmark):
    """The stream, the disk and the urgent task.

    Parameters
    ----------
    limit
        Bytes that values may take in a worker's memory.
    chunk
        Size of a value, bytes.
    delay
        Seconds added to each file operation of the store.
    tasks
        Length of the stream.
    waiting
        How many tasks wait for others.
    threads
        Threads of a worker.
    timeout
        Seconds after which the urgent task counts as failed.

    Raises
    ------
    ConfigError
        If a number is not positive, or fewer than eight values fit.
    """

    name = "priority"
    known_arms: ClassVar[Mapping[str, Arm]] = ARMS

    limit: int = 80 * 10**6
    chunk: int = 8 * 10**6
    delay: float = 0.2
    tasks: int = 3000
    waiting: int = 20
    threads: int = 2
    timeout: float = 60.0

    def __post_init__(self) -> None:
        self.require_positive("limit", "chunk", "tasks", "waiting", "threads", "timeout")
        if self.delay < 0:
            raise ConfigError(f"delay: must not be negative, got {self.delay}")
        if 8 * self.chunk > self.limit:
            raise ConfigError(f"chunk: eight must fit the limit of {self.limit} bytes, got {self.chunk}")

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{self.tasks} tasks of {format_bytes(self.chunk)}, files slower by {self.delay} s"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return f"{sample.figure('urgent'):.2f} s, {sample.figure('passed'):.0f} tasks passed"

    def run(self, arm: Arm, expected: Any) -> Metrics:
        """Do all three once, each on fresh workers.

        Raises
        ------
        TimeoutError
            If the urgent task, or one of the others, takes longer than ``timeout``.
        """
        config = {
            "distributed.scheduler.active-memory-manager.start": False,
            "distributed.scheduler.work-stealing": False,
            "distributed.worker.memory.target": self.limit / _MEMORY_LIMIT,
            "distributed.worker.memory.spill": False,
            "distributed.worker.memory.pause": False,
        }
        found: dict[str, float | int | bool | None] = {}
        with dask.config.set(config):
            found |= self._urgent(arm)
            if arm.name == ALL_ARMS["gpuspill"].name:
                found |= self._promised(arm)
                found |= self._seceded(arm)
        return found

    def _cluster(self, stack: ExitStack, arm: Arm, workers: int, delay: float) -> tuple[Client, list[str]]:
        shape = ClusterShape(workers=workers, threads=self.threads, memory_limit=_MEMORY_LIMIT)
        client = stack.enter_context(open_cluster(arm, shape, delay=delay, silence=logging.CRITICAL))
        return client, sorted(client.scheduler_info(n_workers=-1)["workers"])

    def _urgent(self, arm: Arm) -> dict[str, float | int | bool]:
        with ExitStack() as stack:
            client, (busy, other) = self._cluster(stack, arm, 2, self.delay)
            needed = client.submit(_block, self.chunk, -1, workers=[other], key="needed")
            # The size of its kind is known from then on.
            wait([needed, client.submit(_block, self.chunk, 0, workers=[busy], key="block-0")], timeout=self.timeout)
            stream = client.map(
                _block,
                [self.chunk] * self.tasks,
                range(1, self.tasks + 1),
                workers=[busy],
                key=[f"block-{number}" for number in range(1, self.tasks + 1)],
                priority=-100,
            )
            room = self.limit // self.chunk
            wait(stream[: 2 * room], timeout=self.timeout)  # there is more of it than fits
            before = sum(future.done() for future in stream)
            began, start = metrics.time(), time.perf_counter()
            urgent = client.submit(len, needed, workers=[busy], key="urgent", priority=100)
            nbytes = urgent.result(timeout=self.timeout)
            taken = time.perf_counter() - start
            passed = sum(future.done() for future in stream) - before
            (arrived,) = client.run(_arrived, "needed", workers=[busy]).values()
        return {"urgent": taken, "arrived": arrived - began, "passed": passed, "correct": nbytes == self.chunk}

    def _promised(self, arm: Arm) -> dict[str, int]:
        with ExitStack() as stack:
            client, (address,) = self._cluster(stack, arm, 1, 0.0)
            (found,) = client.run(_ask, self.limit, self.waiting, workers=[address]).values()
        return dict(zip(("asked", "promised", "largest"), found, strict=True))

    def _seceded(self, arm: Arm) -> dict[str, float | int | bool]:
        with ExitStack() as stack:
            client, _ = self._cluster(stack, arm, 1, 0.0)
            event = Event(_EVENT, client=client)
            event.set()
            wait(client.submit(_wait_for_others, self.chunk, 0, key="waits-0"), timeout=self.timeout)
            event.clear()
            blocks = client.map(_block, [self.chunk] * 8, range(8), key=[f"block-{number}" for number in range(8)])
            wait(blocks, timeout=self.timeout)
            (before,) = client.run(_in_memory).values()
            waiting = client.map(
                _wait_for_others,
                [self.chunk] * self.waiting,
                range(1, self.waiting + 1),
                key=[f"waits-{number}" for number in range(1, self.waiting + 1)],
            )
            deadline = time.monotonic() + self.timeout
            while next(iter(client.run(_seceded_here).values())) < self.waiting and time.monotonic() < deadline:
                time.sleep(0.1)
            (during,) = client.run(_in_memory).values()
            event.set()
            sizes = client.gather(client.map(len, waiting))
        if sizes != [self.chunk] * self.waiting:
            return {"before": before, "seceded": during, "correct": False}
        return {"before": before, "seceded": during}


def _block(nbytes: int, number: int) -> npt.NDArray[np.uint8]:
    return np.full(nbytes, number % 251, dtype="u1")


def _wait_for_others(nbytes: int, number: int) -> npt.NDArray[np.uint8]:
    with worker_client():
        Event(_EVENT).wait()
    return _block(nbytes, number)


def _arrived(key: str, dask_worker: Worker) -> float:
    return max(float(transfer["stop"]) for transfer in dask_worker.transfer_incoming_log if key in transfer["keys"])


def _in_memory(dask_worker: Worker) -> int:
    nbytes: int = cast("Any", dask_worker.data).memory_total()
    return nbytes


def _seceded_here(dask_worker: Worker) -> int:
    return len(dask_worker.state.long_running)


class _Pinned:
    """Stands for a value that fills memory."""


def _ask(limit: int, transfers: int, dask_worker: Worker) -> tuple[int, int, int]:
    """Ask for room while a task uses all there is; return bytes asked and promised."""
    manager = cast("Any", dask_worker.data).manager
    sizes = [limit // 5] * transfers + [limit // 2] * 8
    with ExitStack() as stack:
        manager.store("pinned", _Pinned(), limit)
        stack.callback(manager.discard, "pinned")
        stack.enter_context(manager.admission.admit(None, ["pinned"]))
        for nbytes in sizes[:transfers]:
            stack.enter_context(manager.admission.reserve(nbytes))
        for nbytes in sizes[transfers:]:
            stack.enter_context(manager.admission.admit(None, (), nbytes))
        return sum(sizes), manager.accounted_total() - limit, max(sizes)
