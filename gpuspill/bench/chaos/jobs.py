# mypy: disallow-untyped-calls=False
"""Graphs with known answers: every value is made from a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.delayed import delayed
from distributed import Client, wait, worker_client

import gpuspill
from gpuspill.errors import DataLostError

__all__ = ["RUNS", "Data", "Refused", "WrongAnswer", "is_told_loss"]

Block = npt.NDArray[np.uint64]

_BLOCKS = 24
_PASSES = 3
_COLUMNS = 4


class WrongAnswer(Exception):
    """An answer that is not the one of the plain computation; says which."""


class Refused(Exception):
    """The cluster did not take the data, as a worker went. Others may keep theirs."""


@dataclass(frozen=True, slots=True)
class Data:
    """What a job's values are made from.

    Parameters
    ----------
    seed
        Jobs with different seeds have no value in common.
    nbytes
        Size of a block, bytes.
    """

    seed: int
    nbytes: int


def block(data: Data, number: int) -> Block:
    """Return a block with its own elements. Sums wrap around, so they are exact."""
    first = np.uint64((data.seed * 1_000_003 + number * 7919 + 1) % 2**63)
    return np.arange(data.nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + first


def total(*blocks: Any) -> int:
    """Return the sum of all elements, modulo 2**64."""
    return int(sum(int(np.sum(one, dtype=np.uint64)) for one in blocks)) % 2**64


def expect(found: object, wanted: object, what: str) -> None:
    """Raise WrongAnswer if an answer is wrong."""
    if found != wanted:
        raise WrongAnswer(f"{what}: {found!r:.200}, not {wanted!r:.200}")


def expect_block(found: Any, wanted: Block, what: str) -> None:
    """Raise WrongAnswer if an array is not what it should be, to the last byte."""
    if type(found) is not np.ndarray or found.dtype != wanted.dtype or found.shape != wanted.shape:
        raise WrongAnswer(f"{what}: a {type(found).__name__}, {found!r:.200}, not an array like {wanted!r:.200}")
    if not np.array_equal(found, wanted):
        different = int(np.flatnonzero(np.ravel(found != wanted))[0])
        raise WrongAnswer(f"{what}: element {different} is another one")


# -- arrays ----------------------------------------------------------------------------------------


def _square(data: Data, number: int) -> Block:
    edge = int((data.nbytes // 8) ** 0.5)
    return block(data, number)[: edge * edge].reshape(edge, edge)


def _whole(data: Data, edge: int) -> tuple[da.Array, Block]:
    """Return an array of ``edge`` times ``edge`` blocks, lazy and plain."""
    numbers = np.arange(edge * edge).reshape(edge, edge).tolist()
    plain = np.block([[_square(data, number) for number in row] for row in numbers])
    shape = _square(data, 0).shape
    make = delayed(_square, pure=True)
    lazy = da.block([[da.from_delayed(make(data, n), shape, dtype=plain.dtype) for n in row] for row in numbers])
    return cast("da.Array", lazy), plain


def run_array(client: Client, data: Data) -> None:
    """Add an array to its transpose, which sends half of the blocks, and sum columns."""
    lazy, plain = _whole(data, 5)
    found = client.compute((lazy + lazy.T).sum(axis=0)).result()
    expect_block(found, (plain + plain.T).sum(axis=0), "sum of a + a.T")


def run_persisted(client: Client, data: Data) -> None:
    """Persist an array and read it again and again."""
    lazy, plain = _whole(data, 5)
    kept = client.persist(lazy)
    wait(kept)
    for number in range(_PASSES):
        factor = np.uint64(2 * number + 1)
        found = client.compute((kept * factor).sum(axis=number % 2)).result()
        expect_block(found, (plain * factor).sum(axis=number % 2), f"pass {number}")


def run_gathered(client: Client, data: Data) -> None:
    """Bring blocks to the client, and compare all their bytes."""
    futures = client.map(partial(block, data), range(_BLOCKS), pure=False)
    wait(futures)
    for start in range(0, _BLOCKS, _BLOCKS // 3):
        numbers = range(start, start + _BLOCKS // 3)
        for number, found in zip(numbers, client.gather(futures[start : numbers.stop]), strict=True):
            expect_block(found, block(data, number), f"block {number}")


# -- frames ----------------------------------------------------------------------------------------


def _frame(number: int, data: Data, prefix: str) -> Any:
    import pandas as pd

    rows = data.nbytes // (8 * _COLUMNS)
    values = block(data, number)[: 2 * rows].astype(np.int64)
    return pd.DataFrame(
        {
            "key": np.abs(values[:rows] >> 3) % (rows // 2),
            f"{prefix}_int": values[rows:] >> 8,
            f"{prefix}_float": (values[:rows] >> 40).astype(float),
            f"{prefix}_text": pd.Series((values[:rows] % 97).astype(str)),
        }
    )


def run_frame(client: Client, data: Data) -> None:
    """Merge two frames by a shuffle, group and sum."""
    import dask.dataframe as dd
    import pandas as pd

    left_data, right_data = data, Data(data.seed + 1, data.nbytes // 8)
    parts = 6

    def answer(left: Any, right: Any) -> Any:
        return left.merge(right, on="key").groupby("a_text")[["a_int", "b_int", "b_float"]].sum()

    lefts = dd.from_map(_frame, range(parts), data=left_data, prefix="a")
    rights = dd.from_map(_frame, range(parts), data=right_data, prefix="b")
    found = client.compute(answer(lefts.shuffle("key"), rights)).result().sort_index()
    left, right = (
        pd.concat([_frame(number, one, prefix) for number in range(parts)])
        for one, prefix in ((left_data, "a"), (right_data, "b"))
    )
    wanted = answer(left, right).sort_index()
    found.index = found.index.astype(object)
    wanted.index = wanted.index.astype(object)
    if not np.array_equal(found.index, wanted.index) or not np.allclose(found, wanted, rtol=1e-9):
        raise WrongAnswer(f"merged and grouped: {found!r:.300}, not {wanted!r:.300}")


# -- what cannot be computed again -----------------------------------------------------------------


def run_scattered(client: Client, data: Data) -> None:
    """Hand blocks to the workers and use them in several passes."""
    blocks = [block(data, number) for number in range(_BLOCKS // 2)]
    try:
        scattered = client.scatter(blocks, hash=False, broadcast=data.seed % 3 == 0)
    except (OSError, TimeoutError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    except KeyError as error:
        # The scheduler looks up the worker that took the data (`Scheduler.update_data`), after that
        # has left.
        if "://" not in str(error):
            raise
        raise Refused(f"{error} left while data was sent to it") from error
    for number in range(_PASSES):
        sums = [
            client.submit(total, one, other, pure=False)
            for one, other in zip(scattered, scattered[number + 1 :] + scattered[: number + 1], strict=True)
        ]
        others = blocks[number + 1 :] + blocks[: number + 1]
        expect(
            client.gather(sums),
            [total(one, other) for one, other in zip(blocks, others, strict=True)],
            f"sums of scattered blocks, pass {number}",
        )
    for number, found in enumerate(client.gather(scattered)):
        expect_block(found, blocks[number], f"scattered block {number}")


class Keeper:
    """An actor that keeps blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def keep(self, data: Data, number: int) -> int:
        """Make a block, keep it, and return its sum."""
        self._blocks[number] = block(data, number)
        return total(self._blocks[number])

    def total(self) -> tuple[int, int]:
        """Return how many blocks there are, and their sum."""
        return len(self._blocks), total(*self._blocks.values())


def run_actor(client: Client, data: Data) -> None:
    """Let an actor keep blocks while tasks run beside it."""
    keeper: Any = client.submit(Keeper, actor=True, pure=False).result()
    beside = client.map(partial(_sum_of_block, data), range(100, 100 + _BLOCKS), pure=False)
    kept = [total(block(data, number)) for number in range(4)]
    for number, wanted in enumerate(kept):
        expect(keeper.keep(data, number).result(), wanted, f"block {number} of the actor")
    expect(client.gather(beside), [total(block(data, n)) for n in range(100, 100 + _BLOCKS)], "sums beside the actor")
    expect(keeper.total().result(), (4, sum(kept) % 2**64), "blocks of the actor")


# -- inside of tasks -------------------------------------------------------------------------------


def _sum_of_block(data: Data, number: int) -> int:
    return total(block(data, number))


def _nest(data: Data, count: int) -> int:
    with worker_client() as client:
        futures = client.map(partial(block, data), range(count), pure=False)
        sums = client.gather(client.map(total, futures, pure=False))
        # What a task reads by its own client comes into the same memory.
        whole = client.gather(futures[: count // 2])
    return int(sum(sums) + total(*whole)) % 2**64


def run_nested(client: Client, data: Data) -> None:
    """Start tasks from tasks, which have their results sent to them."""
    outer = [Data(data.seed + number, data.nbytes) for number in range(3)]
    found = client.gather([client.submit(_nest, one, _BLOCKS // 3, pure=False) for one in outer])
    wanted = []
    for one in outer:
        sums = [total(block(one, number)) for number in range(_BLOCKS // 3)]
        wanted.append((sum(sums) + sum(sums[: _BLOCKS // 6])) % 2**64)
    expect(found, wanted, "sums of tasks of tasks")


def _park(data: Data, count: int) -> list[int]:
    parked = [gpuspill.proxify(block(data, number)) for number in range(count)]
    sums = []
    for handle in reversed(parked):
        with handle as value:
            sums.append(total(value))
    sums.extend(total(gpuspill.unproxify(handle)) for handle in parked[::2])
    return sums


def run_parked(client: Client, data: Data) -> None:
    """Let tasks park more values than fit, and take them up again."""
    outer = [Data(data.seed + number, data.nbytes) for number in range(4)]
    found = client.gather([client.submit(_park, one, _BLOCKS // 2, pure=False) for one in outer])
    for sums, one in zip(found, outer, strict=True):
        plain = [total(block(one, number)) for number in range(_BLOCKS // 2)]
        expect(sums, plain[::-1] + plain[::2], "sums of parked values")


def _thing(data: Data, number: int) -> dict[str, Any]:
    """Return a value of many objects; two of them look at one memory."""
    values = block(data, number)[: data.nbytes // 32]
    return {
        "whole": values,
        "part": values[::2],
        "texts": [f"{number}-{index}" for index in range(2000)],
        "nested": {"bytes": values[:1000].tobytes(), "none": None, "tuple": (number, float(number))},
    }


def _same(thing: dict[str, Any], data: Data, number: int) -> bool:
    wanted = _thing(data, number)
    return (
        np.array_equal(thing["whole"], wanted["whole"])
        and np.array_equal(thing["part"], wanted["part"])
        and all(thing[name] == wanted[name] for name in ("texts", "nested"))
    )


def run_objects(client: Client, data: Data) -> None:
    """Keep values of many Python objects and compare all of each."""
    things = client.map(partial(_thing, data), range(2 * _BLOCKS), pure=False)
    for _ in range(_PASSES):
        found = client.gather(
            [client.submit(_same, thing, data, number, pure=False) for number, thing in enumerate(things)]
        )
        expect(found, [True] * len(things), "things that are as they were made")


RUNS: Mapping[str, Callable[[Client, Data], None]] = {
    "array": run_array,
    "persisted": run_persisted,
    "frame": run_frame,
    "scattered": run_scattered,
    "actor": run_actor,
    "nested": run_nested,
    "parked": run_parked,
    "gathered": run_gathered,
    "objects": run_objects,
}
"""The jobs by kind. Each blocks until it is done; raises WrongAnswer, or its tasks' errors."""


def is_told_loss(kind: str, error: BaseException) -> bool:
    """Whether an error tells of a loss that nothing can compute again."""
    if kind == "scattered":
        return isinstance(error, DataLostError | asyncio.CancelledError) or "Cancelled" in type(error).__name__
    if kind == "actor":
        # distributed says so in several ways, depending on who finds out.
        return isinstance(error, DataLostError) or "ctor" in str(error) or "Cancelled" in type(error).__name__
    # The task that parked it would have to run again, and it is the task that is told.
    return kind == "parked" and isinstance(error, DataLostError)
