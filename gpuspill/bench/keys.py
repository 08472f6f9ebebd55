# mypy: disallow-untyped-calls=False
"""``keys``: what one operation of the store costs when it holds ever more keys.

No cluster: the store alone, driven from one thread. What matters is not the figure but that the
curve stays flat: with a scan in any of the operations it would rise with the number of keys.
"""

from __future__ import annotations

import gc
import math
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, ParamSpec

import numpy as np
import numpy.typing as npt
from distributed.spill import SpillBuffer

from gpuspill.bench.arms import ARMS, Arm
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row, sparkline
from gpuspill.bench.runner import Metrics, Sample, spread
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.errors import ConfigError

__all__ = ["OPERATIONS", "SIZES", "Keys", "StoreUnderTest", "slope"]

OPERATIONS = ("set", "get", "evict", "restore", "delete")
"""What is measured: a new key, reading one in memory, spilling one, reading it back, deleting."""

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""How many keys the store holds, by default."""


P = ParamSpec("P")


class StoreUnderTest(ABC):
    """A worker's store with a limit that it never reaches, so that it spills only when told to."""

    @property
    @abstractmethod
    def mapping(self) -> MutableMapping[Any, Any]:
        """What a worker would use."""

    @abstractmethod
    def evict(self, count: int) -> None:
        """Spill the ``count`` keys that are due next; returns when they are on disk."""

    @abstractmethod
    def spilled(self) -> list[str]:
        """Return the keys that are on disk only."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything."""


class StockStore(StoreUnderTest):
    """distributed's own.

    Parameters
    ----------
    directory
        Where to spill to.
    """

    def __init__(self, directory: Path) -> None:
        self._buffer = SpillBuffer(str(directory / "storage"), target=2**50)

    @property
    def mapping(self) -> MutableMapping[Any, Any]:
        """The buffer."""
        return self._buffer

    def evict(self, count: int) -> None:
        """Spill, one after the other, in this thread."""
        for _ in range(count):
            self._buffer.evict()

    def spilled(self) -> list[str]:
        """See the base class."""
        return [str(key) for key in self._buffer.disk]

    def close(self) -> None:
        """Delete all keys, and with them the files."""
        self._buffer.clear()


class GpuspillStore(StoreUnderTest):
    """gpuspill's.

    Parameters
    ----------
    directory
        Where to spill to.
    """

    def __init__(self, directory: Path) -> None:
        self._store = build_store(Settings.load(), str(directory))

    @property
    def mapping(self) -> MutableMapping[Any, Any]:
        """The store."""
        return self._store

    def evict(self, count: int) -> None:
        """Lower the limit by so many keys and wait for the background threads.

        Raises
        ------
        TimeoutError
            If they have not done it within a minute.
        """
        manager = self._store.manager
        before = manager.spilled_count
        limit = manager.memory_total() * (len(manager) - before - count) // max(1, len(manager) - before)
        manager.limits.set_limit(limit, None)
        deadline = time.monotonic() + 60.0
        while manager.memory_total() > limit:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{manager.spilled_count - before} of {count} keys spilled within a minute")
            time.sleep(0.0005)
        manager.limits.set_limit(None, None)

    def spilled(self) -> list[str]:
        """See the base class."""
        return [str(key) for key in self._store.disk]

    def close(self) -> None:
        """Close the store, which removes its files."""
        self._store.close()


_STORES: Mapping[str, Callable[[Path], StoreUnderTest]] = {"stock": StockStore, "gpuspill": GpuspillStore}


@dataclass(frozen=True, slots=True)
class Keys(Benchmark):
    """How many keys, their size, and how many operations to time.

    Parameters
    ----------
    sizes
        Numbers of keys, ascending.
    value
        Size of a value, bytes.
    operations
        How many keys are spilled, restored and so on at each size; fewer where there are fewer
        keys.
    seed
        Of the order in which keys are read.

    Raises
    ------
    ConfigError
        If no size is given or a number is not positive.
    """

    name = "keys"
    known_arms: ClassVar[Mapping[str, Arm]] = {name: ARMS[name] for name in _STORES}

    sizes: Sequence[int] = SIZES
    value: int = 1_000
    operations: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) <= 0:
            raise ConfigError(f"sizes: must be numbers larger than 0, got {list(self.sizes)}")
        if self.value <= 0 or self.operations <= 0:
            raise ConfigError("value and operations: must be larger than 0")

    @property
    def about(self) -> str:
        """See the base class."""
        return f"{', '.join(f'{size:,}' for size in self.sizes)} keys"

    @property
    def rows(self) -> Sequence[Row]:
        """Every operation at every size, then the slopes."""
        times = [
            Row(metric(operation, size), f"{operation}, {size:,} keys", "microseconds", compare=True)
            for operation in OPERATIONS
            for size in self.sizes
        ]
        slopes = [Row(f"{operation}_slope", f"{operation}, slope", "ratio") for operation in OPERATIONS]
        return [*times, *slopes, Row("correct", "values correct", "yes")]

    def notes(self, arms: Sequence[Arm], samples: Sequence[Sample]) -> list[str]:
        """Draw the curve of each arm and operation."""
        drawn = ["Time an operation from the fewest keys to the most, and the slope on log-log axes:"]
        for arm in arms:
            for operation in OPERATIONS:
                curve = [spread(samples, arm.name, metric(operation, size)) for size in self.sizes]
                medians = [point.median for point in curve if point is not None]
                if medians:
                    line = sparkline(medians)
                    drawn.append(f"  {arm.name:9} {operation:8} {line} {slope(self.sizes, medians):+.2f}")
        return drawn

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return "done"

    def run(self, arm: Arm, expected: None) -> Metrics:
        """Measure every operation at every size, each size in a new store; seconds an operation."""
        metrics: dict[str, float | int | bool | None] = {"correct": True}
        for size in self.sizes:
            with tempfile.TemporaryDirectory(prefix="gpuspill-bench-") as directory:
                store = _STORES[arm.name](Path(directory))
                try:
                    times, right = self._run_size(store, size)
                finally:
                    store.close()
            metrics |= {metric(operation, size): times[operation] for operation in OPERATIONS}
            metrics["correct"] = bool(metrics["correct"]) and right
        for operation in OPERATIONS:
            curve = [float(metrics[metric(operation, size)] or 0) for size in self.sizes]
            metrics[f"{operation}_slope"] = slope(self.sizes, curve)
        return metrics

    def _run_size(self, store: StoreUnderTest, size: int) -> tuple[dict[str, float], bool]:
        data = store.mapping
        count = min(self.operations, size)
        chooser = random.Random(self.seed)
        names = [f"key-{number}" for number in range(size)]
        times = {}

        # All but the last keys are there before the clock starts: what is timed is a set into a
        # store that holds (nearly) this many. No one else may hold on to a value: one that is
        # still alive elsewhere need not be read back.
        _set(data, names[:-count], (self._value(number) for number in range(size - count)))
        newest = [self._value(number) for number in range(size - count, size)]
        times["set"] = _timed(_set, count, data, names[-count:], newest)
        newest.clear()
        chosen = chooser.sample(names, count)
        times["get"] = _timed(_get, count, data, chosen, [])
        times["evict"] = _timed(store.evict, count, count)
        evicted = store.spilled()
        found: list[Any] = []
        times["restore"] = _timed(_get, max(1, len(evicted)), data, evicted, found)
        right = all(
            np.array_equal(value, self._value(int(name.split("-")[1])))
            for name, value in zip(evicted, found, strict=True)
        ) and (len(evicted) >= count)
        found.clear()
        times["delete"] = _timed(_delete, count, data, chooser.sample(names, count))
        return times, right and len(data) == size - count

    def _value(self, number: int) -> npt.NDArray[np.uint8]:
        return np.full(self.value, number % 251, dtype="u1")


def metric(operation: str, size: int) -> str:
    """Return the name under which a sample keeps the time of an operation at a size."""
    return f"{operation}_{size}"


def _timed(work: Callable[P, object], count: int, *args: P.args, **kwargs: P.kwargs) -> float:
    # As timeit does: a full collection visits every object there is, so that it would show up as a
    # cost that grows with the number of keys in whichever operation it happens to interrupt.
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        work(*args, **kwargs)
        return (time.perf_counter() - started) / count
    finally:
        gc.enable()


def _set(data: MutableMapping[Any, Any], names: Iterable[str], values: Iterable[object]) -> None:
    for name, value in zip(names, values, strict=True):
        data[name] = value


def _get(data: MutableMapping[Any, Any], names: Iterable[str], into: list[Any]) -> None:
    into.extend(data[name] for name in names)


def _delete(data: MutableMapping[Any, Any], names: Iterable[str]) -> None:
    for name in names:
        del data[name]


def slope(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Fit ``time = c * size ** slope`` and return the slope.

    0 is constant time, 1 a scan of all keys; ``log(size)`` comes out at 0.1 to 0.2 in this range.

    Returns
    -------
    float
        ``nan`` with fewer than two sizes.
    """
    if len(sizes) < 2:
        return math.nan
    x = [math.log(size) for size in sizes]
    y = [math.log(max(value, 1e-12)) for value in times]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - middle_x) ** 2 for a in x)
