"""``fair``: how long the event loop stalls and a task waits beside others' work.

One store in this process, an event loop, and the store's own threads. A list of many small lists is
written, read and let go. A task has thousands of inputs. Another one needs four values while a peer
is sent sixty, and a third one needs room while the oldest values are thousands of floats.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpuspill.bench.arms import ARMS, Arm
from gpuspill.bench.job import Benchmark
from gpuspill.bench.probes import LoopProbe
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.distributed.task_inputs import in_turns, in_turns_later
from gpuspill.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuspill.distributed.mapping import SpillStore

__all__ = ["ROWS", "Fair"]

ROWS = (
    Row("control", "longest stop of the loop beside a busy thread", "milliseconds"),
    Row("written", "  while small lists are written", "milliseconds"),
    Row("read", "  while they are read", "milliseconds"),
    Row("dropped", "  while they are let go", "milliseconds"),
    Row("inputs", "  while inputs are pinned and let go", "milliseconds"),
    Row("four", "four inputs beside 60 sends", "milliseconds"),
    Row("room", "room for 40 MB behind small floats", "milliseconds"),
    Row("key_nbytes", "memory a key", "bytes"),
    Row("correct", "values correct", "yes"),
)

#: Nothing below takes as long as that.
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Fair(Benchmark):
    """How many of each.

    Parameters
    ----------
    lists
        Small lists in the value that is written, read and let go.
    inputs
        Inputs of the task that has many.
    floats
        Floats that are older than what has to leave.
    keys
        Its memory is measured.
    delay
        Seconds added to each file operation while a peer is sent values.

    Raises
    ------
    ConfigError
        If a number is not positive.
    """

    name = "fair"
    known_arms: ClassVar[Mapping[str, Arm]] = {"gpuspill": ARMS["gpuspill"]}

    lists: int = 600_000
    inputs: int = 20_000
    floats: int = 20_000
    keys: int = 20_000
    delay: float = 0.025

    def __post_init__(self) -> None:
        self.require_positive("lists", "inputs", "floats", "keys")
        if self.delay < 0:
            raise ConfigError(f"delay: must not be negative, got {self.delay}")

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{self.lists:,} small lists, {self.inputs:,} inputs, {self.floats:,} floats"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        worst = max(sample.figure(name) for name in ("written", "read", "dropped"))
        return f"lists {1e3 * worst:.0f} ms, a busy thread {1e3 * sample.figure('control'):.0f} ms"

    def run(self, arm: Arm, expected: Any) -> Metrics:
        """Do all of it once, each on a fresh store.

        Raises
        ------
        TimeoutError
            If one step takes two minutes.
        """
        found: dict[str, float | int | bool | None] = {}
        for part in (self._lists, self._inputs, self._sends, self._room):
            found |= asyncio.run(part())
        return {**found, "key_nbytes": self._key_nbytes()}

    async def _lists(self) -> dict[str, float | int | bool | None]:
        with _store() as store:
            manager = store.manager
            store["lists"] = [[number] for number in range(self.lists)]
            began = time.monotonic()

            async def written() -> None:
                manager.limits.set_limit(1, None)
                await _until(lambda: manager.spilled_count == 1)

            found = {"written": await _longest_stop(written)}
            busy = time.monotonic() - began
            manager.limits.set_limit(None, None)
            values: dict[Any, Any] = {}

            async def read() -> None:
                values.update(await store.async_get(["lists"]))

            found["read"] = await _longest_stop(read)
            correct = len(values["lists"]) == self.lists and values["lists"][-1] == [self.lists - 1]
            values.clear()

            async def dropped() -> None:
                del store["lists"]
                await asyncio.sleep(busy / 2)

            found["dropped"] = await _longest_stop(dropped)
            found["control"] = await _longest_stop(lambda: asyncio.to_thread(_compute, busy))
        return {**found, "correct": correct}

    async def _inputs(self) -> dict[str, float]:
        with _store() as store:
            for number in range(self.inputs):
                store[number] = 10**6 + number
            admitter = store.manager.admission

            async def task() -> None:
                admission = await in_turns(admitter.admit_in_pieces("task", range(self.inputs), 100))
                in_turns_later(admission.release_in_pieces())
                await _until(lambda: not store.statistics().pinned_nbytes)

            return {"inputs": await _longest_stop(task)}

    async def _sends(self) -> dict[str, float]:
        with _store(storage_delay=self.delay) as store:
            manager = store.manager
            sent = [f"sent-{number}" for number in range(60)]
            needed = [f"needed-{number}" for number in range(4)]
            for key in (*sent, *needed):
                store[key] = bytes(100_000)
            manager.limits.set_limit(1, None)
            await _until(lambda: manager.spilled_count == len(sent) + len(needed))
            manager.limits.set_limit(None, None)
            pins = manager.admission.pin(sent)
            sending = asyncio.wrap_future(manager.batch.export(pins))
            admission = manager.admission.admit("task", needed, 0)
            start = time.perf_counter()
            await asyncio.to_thread(manager.batch.materialize, admission)
            taken = time.perf_counter() - start
            await sending
            admission.release()
            pins.release()
        return {"four": taken}

    async def _room(self) -> dict[str, float]:
        with _store() as store:
            for number in range(self.floats):
                store[f"float-{number}"] = number + 0.5
            for number in range(10):
                store[f"block-{number}"] = bytes(8 * 10**6)
            store.manager.limits.set_limit(store.manager.memory_total(), None)
            start = time.perf_counter()
            admission = store.manager.admission.admit("task", (), 40 * 10**6)
            await asyncio.to_thread(admission.wait, _PATIENCE)
            taken = time.perf_counter() - start
            admission.release()
        return {"room": taken}

    def _key_nbytes(self) -> float:
        pairs = [(f"key-{number}", 10**6 + number) for number in range(self.keys)]
        with _store() as store:
            store["first"] = None
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for key, value in pairs:
                    store[key] = value
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        return (after - before) / self.keys


@contextmanager
def _store(**options: Any) -> Iterator[SpillStore]:
    with tempfile.TemporaryDirectory(prefix="gpuspill-bench-") as directory:
        store = build_store(Settings.load(**options), directory)
        try:
            yield store
        finally:
            store.close()


async def _longest_stop(work: Callable[[], Awaitable[object]]) -> float:
    probe = LoopProbe(asyncio.get_running_loop())
    probe.start()
    try:
        await work()
        await asyncio.sleep(0.01)  # a stop at the very end is seen by the tick after it
    finally:
        probe.stop()
    return probe.summary().longest


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done within {_PATIENCE:.0f} seconds")
        await asyncio.sleep(0.002)


def _compute(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(100))
