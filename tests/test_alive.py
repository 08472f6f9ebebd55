"""What is charged is what is alive: who keeps a part of a value that was read back keeps no more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpuspill.device.shared_memory import shared_memory
from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.distributed.sizes import measure
from gpuspill.storage.buffers import BufferPool
from gpuspill.storage.files import FileStore
from gpuspill.testing.managers import ManagerKit

NUMBERS = 131_072  # of 8 bytes: 1 MiB


def frame(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"a": rng.random(NUMBERS // 2), "b": rng.integers(0, 9, NUMBERS // 2)})


def split(seed: int) -> dict[int, pd.DataFrame]:
    """What a task of dask's shuffle makes: parts of one table, sorted by where they go."""
    whole = pd.concat([frame(seed) for _ in range(10)], ignore_index=True)
    rows = len(whole) // 10
    return {part: whole.iloc[part * rows : (part + 1) * rows] for part in range(10)}


CONTAINERS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "list of arrays": (lambda n: [np.full(NUMBERS, n) for _ in range(10)], lambda value: value[3]),
    "tuple of tuples": (lambda n: tuple((np.full(NUMBERS, n), str(n)) for _ in range(10)), lambda value: value[3]),
    "split frame": (split, lambda value: value[3]),
    "head of a frame": (lambda n: pd.concat([frame(n)] * 10, ignore_index=True), lambda value: value.iloc[:1000]),
    "column": (lambda n: pd.concat([frame(n)] * 10, ignore_index=True), lambda value: value["a"]),
    "heads of frames": (lambda n: [frame(n) for _ in range(10)], lambda value: [x.iloc[:10] for x in value]),
    "times": (
        lambda n: pd.DataFrame({"t": pd.date_range("2020", periods=NUMBERS, freq="s"), "n": n}),
        lambda value: value.iloc[5:9],
    ),
    "frames": (lambda n: {i: frame(n) for i in range(10)}, lambda value: value[3]),
    "some of them": (lambda n: [np.full(NUMBERS, n) for _ in range(10)], lambda value: value[2:5]),
    "small arrays": (lambda n: [np.full(1000, n) for _ in range(40)], lambda value: value[3]),
    "very small arrays": (lambda n: [np.full(600, n) for _ in range(10)], lambda value: value[3]),
    "bytes": (lambda n: [bytearray(NUMBERS) for _ in range(10)], lambda value: value[3]),
}


def roots(value: Any) -> Iterator[Any]:
    """Yield the buffers that a value keeps alive, some of them more than once."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from roots(item)
    elif isinstance(value, pd.DataFrame):
        for name in value.columns:
            yield from roots(value[name])
    elif isinstance(value, pd.Series):
        yield from roots(value.to_numpy())
    elif isinstance(value, np.ndarray):
        base = value
        while (below := getattr(base, "base", None)) is not None or (below := getattr(base, "obj", None)) is not None:
            base = below
        yield base
    elif isinstance(value, bytearray):
        yield value


def nbytes_of(buffer: Any) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("by", ["never spilled", "read back", "sent"])
def test_memory_alive_after_splitting_what_was_read_back(tmp_path, kind, by):
    make, take = CONTAINERS[kind]
    pool = BufferPool(0)
    kit = ManagerKit(
        store=FileStore(tmp_path),
        serializer=DaskSerializer(),
        allocate=pool.allocate,
        sizeof=measure,
        shared=shared_memory,
    )
    for number in range(3):
        kit.manager.store(f"container {number}", make(number))
        if by != "never spilled":
            kit.spill(f"container {number}")
        if by == "sent":
            kit.manager.store_encoded(f"sent {number}", kit.manager.batch.fetch(f"container {number}"))
            kit.manager.discard(f"container {number}")
        key = f"sent {number}" if by == "sent" else f"container {number}"
        kit.manager.store(f"part {number}", take(kit.manager.get(key)))
        kit.manager.discard(key)
    kit.engine.reap_all()
    parts = [kit.manager.get(f"part {number}") for number in range(3)]
    alive = {id(buffer): nbytes_of(buffer) for part in parts for buffer in roots(part)}
    accounted = kit.manager.memory_total()
    print(
        f"{kind}: {sum(alive.values()):,} bytes alive, {pool.statistics().lent_nbytes:,} lent, {accounted:,} accounted"
    )
    assert sum(alive.values()) <= 1.1 * accounted
    assert pool.statistics().lent_nbytes <= 1.1 * accounted
    del parts
    kit.close()
