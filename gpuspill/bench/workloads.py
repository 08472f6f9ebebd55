# mypy: disallow-untyped-calls=False
"""Uses of dask in small: a few lines each, with an answer computed without a cluster.

Each is given the bytes that should be alive at once, and the size of a piece. Data are made from
seeds, in the tasks themselves, so that no arm has to read or send any.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, cast

import dask.array as da
import dask.dataframe as dd
import numpy as np
import numpy.typing as npt
import pandas as pd
from distributed import Client, wait

from gpuspill.demo.flights import FlightsJob
from gpuspill.demo.jobs import Answers, differences

__all__ = ["WORKLOADS", "Workload"]

_SEED = 20
_ROW_NBYTES = 64
"""Of the frames that are shuffled: eight columns of eight bytes."""
_KEYS = 10_000


class Workload(ABC):
    """One job, whose size is given.

    Parameters
    ----------
    nbytes
        What should be alive at once, bytes; about.
    chunk
        Size of a piece, bytes; about.
    """

    name: ClassVar[str]
    """Of the workload, on the command line and in the table."""

    def __init__(self, nbytes: int, chunk: int) -> None:
        self._nbytes = nbytes
        self._chunk = chunk
        self._made = ExitStack()

    @abstractmethod
    def expected(self) -> Answers:
        """Compute the answers in this process, a piece at a time."""

    @abstractmethod
    def run(self, client: Client) -> Answers:
        """Compute them on a cluster; raises what keeps it from that."""

    def differences(self, expected: Answers, found: Answers) -> list[str]:
        """Say what is wrong with answers; empty if nothing is."""
        return differences(expected, found)

    def close(self) -> None:
        """Remove the files that the workload has made."""
        self._made.close()

    # -- what several of them are made from --------------------------------------------------------

    def _square(self, nbytes: float) -> da.Array:
        """Return a lazy random square array in square chunks."""
        edge = math.isqrt(self._chunk // 8)
        blocks = max(2, round(math.sqrt(nbytes / (8 * edge * edge))))
        return _random((blocks * edge, blocks * edge), (edge, edge))

    def _tall(self, nbytes: float, columns: int, parts: int = 1) -> da.Array:
        """Return a lazy random array of so many columns and parts, and enough rows."""
        rows = max(1, self._chunk * parts // (8 * columns))
        blocks = max(2, round(nbytes / (8 * columns * rows)))
        return _random((blocks * rows, columns), (rows, columns // parts))


class PersistSum(Workload):
    """An array is persisted and summed twice, in the order in which it was made."""

    name = "persist-sum"

    def _array(self) -> da.Array:
        return self._tall(self._nbytes, 1)

    def expected(self) -> Answers:
        """See the base class."""
        total = _alone(self._array().sum())
        return {"first": total, "second": total}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        array = _persist(client, self._array())
        return {name: _compute(client, array.sum()) for name in ("first", "second")}


class Transpose(Workload):
    """``a + a.T``; blocks meet those of the other worker."""

    persisted: ClassVar[Literal["array", "sum"]]

    def _array(self) -> da.Array:
        return self._square(self._nbytes if self.persisted == "array" else self._nbytes / 2)

    def expected(self) -> Answers:
        """See the base class: twice the mean of the array."""
        return {"mean": 2 * _alone(self._array().mean())}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        array = self._array()
        if self.persisted == "array":
            array = _persist(client, array)
            return {"mean": _compute(client, (array + array.T).mean())}
        return {"mean": _compute(client, _persist(client, array + array.T).mean())}


class TransposeArray(Transpose):
    """The array is persisted: spilled blocks travel."""

    name = "transpose-array"
    persisted = "array"


class TransposeSum(Transpose):
    """The sum is persisted: blocks travel while others are spilled."""

    name = "transpose-sum"
    persisted = "sum"


class Dot(Workload):
    """The Gram matrix of a tall array that is persisted; each block meets the one beside it."""

    name = "dot"

    def _array(self) -> da.Array:
        return self._tall(self._nbytes, 128, parts=2)

    def expected(self) -> Answers:
        """See the base class: ``x.T @ x`` adds up to the squares of the rows' sums."""
        return {"total": _alone((self._array().sum(axis=1) ** 2).sum())}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        array = _persist(client, self._array())
        return {"total": _compute(client, array.T.dot(array).sum())}


class Shuffle(Workload):
    """Frames are shuffled by a key, and what comes out is persisted."""

    method: ClassVar[Literal["tasks", "p2p"]]
    share: ClassVar[float]
    """Of the bytes, for the frames: how often they are there at once depends on the method."""

    def _parts(self) -> tuple[int, int]:
        rows = max(1, self._chunk // _ROW_NBYTES)
        return max(2, round(self._nbytes * self.share / (rows * _ROW_NBYTES))), rows

    def expected(self) -> Answers:
        """See the base class: each key is in one partition only."""
        parts, rows = self._parts()
        keys: set[int] = set()
        total = 0.0
        for number in range(parts):
            frame = _frame(number, rows)
            keys.update(frame["key"])
            total += float(frame["x0"].sum())
        return {"rows": parts * rows, "total": total, "keys": len(keys)}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        parts, rows = self._parts()
        frames = dd.from_map(_frame, list(range(parts)), rows=rows, meta=_frame(0, 1))
        # Few branches: several stages, as a cluster that is larger has.
        options: Mapping[str, Any] = {"max_branch": 8} if self.method == "tasks" else {}
        shuffled = _persist(client, frames.shuffle("key", shuffle_method=self.method, **options))
        found = _compute(client, shuffled.map_partitions(_summary, meta=_summary(_frame(0, 1))))
        return {"rows": int(found["rows"].sum()), "total": found["total"].sum(), "keys": int(found["keys"].sum())}


class TaskShuffle(Shuffle):
    """By tasks, in three stages or so."""

    name = "shuffle-tasks"
    method = "tasks"
    share = 0.3


class P2PShuffle(Shuffle):
    """By distributed's own peer-to-peer shuffle, which has files of its own."""

    name = "shuffle-p2p"
    method = "p2p"
    share = 0.6


class Flights(Workload):
    """Joins, groupbys, ``set_index`` and resampling over flights, as in the demonstration."""

    name = "flights"

    def __init__(self, nbytes: int, chunk: int) -> None:
        super().__init__(nbytes, chunk)
        directory = Path(self._made.enter_context(TemporaryDirectory(prefix="gpuspill-bench-")))
        copy = FlightsJob(directory, 1)
        # At least a copy, or so many rows of one.
        rows = None if nbytes >= copy.nbytes else max(1000, copy.rows * nbytes // copy.nbytes)
        parts = max(1, round(min(nbytes, copy.nbytes) / chunk))
        self._job = FlightsJob(directory, max(1, round(nbytes / copy.nbytes)), parts, rows)

    def expected(self) -> Answers:
        """See the base class."""
        return self._job.reference()

    def run(self, client: Client) -> Answers:
        """See the base class."""
        return self._job.run(client, lambda step: None)


class Rechunk(Workload):
    """An array in rows is persisted, and then the same in columns."""

    name = "rechunk"

    def _array(self) -> da.Array:
        square = self._square(self._nbytes / 2)
        blocks = square.numblocks[0]
        length = square.shape[0]
        # As many rows as a chunk of the size has.
        rows = max(1, length // (blocks * blocks))
        return _random((blocks * blocks * rows, length), (rows, length))

    def expected(self) -> Answers:
        """See the base class."""
        return {"largest": _alone(self._array().max(axis=0).sum())}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        rows = _persist(client, self._array())
        width = max(1, rows.shape[1] // rows.numblocks[0])
        columns = _persist(client, rows.rechunk((rows.shape[0], width), method="tasks"))
        return {"largest": _compute(client, columns.max(axis=0).sum())}


class Overlap(Workload):
    """Smooth a persisted array, with the edges of all neighbours, and persist it."""

    name = "map-overlap"

    def expected(self) -> Answers:
        """See the base class: smoothing around the edges changes no mean."""
        return {"mean": _alone(self._square(self._nbytes / 2).mean())}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        array = _persist(client, self._square(self._nbytes / 2))
        smooth = _persist(client, array.map_overlap(_smooth, depth=1, boundary="periodic", dtype=array.dtype))
        return {"mean": _compute(client, smooth.mean())}


class Climatology(Workload):
    """Persist months of a field, and how far each is above the mean of its name."""

    name = "climatology"

    def _array(self) -> da.Array:
        edge = math.isqrt(self._chunk // 8)
        years = max(2, round(self._nbytes / 2 / (12 * 8 * edge * edge)))
        return _random((years * 12, edge, edge), (1, edge, edge))

    def expected(self) -> Answers:
        """See the base class: the squares about a mean are the squares less those of the mean."""
        array = self._array()
        years = array.shape[0] // 12
        squares = sum(
            _alone((array[month::12] ** 2).sum()) - years * _alone((array[month::12].mean(axis=0) ** 2).sum())
            for month in range(12)
        )
        return {"squares": squares}

    def run(self, client: Client) -> Answers:
        """See the base class."""
        array = _persist(client, self._array())
        means = da.stack([array[month::12].mean(axis=0) for month in range(12)])
        above = _persist(client, da.concatenate([array[at : at + 12] - means for at in range(0, array.shape[0], 12)]))
        return {"squares": _compute(client, (above**2).sum())}


class PowerMethod(Workload):
    """A matrix is persisted, and read once in each of four steps towards its largest eigenvalue."""

    name = "power-method"

    def _steps(self, matrix: da.Array, compute: Any) -> Answers:
        vector = np.ones(matrix.shape[0]) / math.sqrt(matrix.shape[0])
        length = math.nan
        for _ in range(4):
            vector = compute(matrix.dot(da.from_array(vector, chunks=matrix.chunks[1])))
            length = float(np.linalg.norm(vector))
            vector = vector / length
        return {"eigenvalue": length}

    def expected(self) -> Answers:
        """See the base class."""
        return self._steps(self._square(self._nbytes), _alone)

    def run(self, client: Client) -> Answers:
        """See the base class."""
        return self._steps(_persist(client, self._square(self._nbytes)), lambda lazy: _compute(client, lazy))


WORKLOADS: Mapping[str, type[Workload]] = {
    workload.name: workload
    for workload in (
        PersistSum,
        TransposeArray,
        TransposeSum,
        Dot,
        TaskShuffle,
        P2PShuffle,
        Flights,
        Rechunk,
        Overlap,
        Climatology,
        PowerMethod,
    )
}


def _random(shape: tuple[int, ...], chunks: tuple[int, ...]) -> da.Array:
    return cast("da.Array", da.random.default_rng(_SEED).random(shape, chunks=chunks))


def _alone(lazy: Any) -> Any:
    return lazy.compute(scheduler="synchronous")


def _persist(client: Client, lazy: Any) -> Any:
    kept = client.persist(lazy)
    wait(kept)
    return kept


def _compute(client: Client, lazy: Any) -> Any:
    return client.compute(lazy).result()


def _frame(number: int, rows: int) -> pd.DataFrame:
    random = np.random.default_rng(number)
    columns = {"key": random.integers(0, _KEYS, rows)}
    return pd.DataFrame(columns | {f"x{column}": random.random(rows) for column in range(_ROW_NBYTES // 8 - 1)})


def _summary(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"rows": [len(frame)], "total": [frame["x0"].sum()], "keys": [frame["key"].nunique()]})


def _smooth(block: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return (block + np.roll(block, 1, 0) + np.roll(block, -1, 0) + np.roll(block, 1, 1) + np.roll(block, -1, 1)) / 5
