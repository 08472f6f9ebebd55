# mypy: disallow-untyped-calls=False
"""A pipeline over a square array that does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from distributed import Client, wait

from gpuspill.demo.jobs import Answers, DemoJob

__all__ = ["ArrayJob"]


class ArrayJob(DemoJob):
    """Symmetrise, standardise the columns, correlate some of them with all.

    Parameters
    ----------
    blocks
        Blocks along each side.
    block
        Rows and columns of a block.
    wanted
        How many columns to correlate with all.
    seed
        Of the random numbers.
    """

    name = "array"
    title = "transpose, standardise and correlate a random array"

    def __init__(self, blocks: int, block: int, wanted: int = 64, seed: int = 7) -> None:
        self._blocks = blocks
        self._block = block
        self._wanted = min(wanted, block)
        self._seed = seed

    @property
    def nbytes(self) -> int:
        """Size of the array, bytes."""
        return (self._blocks * self._block) ** 2 * 8

    def _array(self) -> da.Array:
        side = self._blocks * self._block
        made: da.Array = da.random.default_rng(self._seed).random((side, side), chunks=self._block)
        return made

    def run(self, client: Client, step: Callable[[str], None]) -> Answers:
        """See :meth:`Job.run`."""

        def compute(what: str, *results: Any) -> list[Any]:
            step(what)
            return [future.result() for future in client.compute(results)]

        step("filling the array")
        a = self._array().persist()
        wait(a)
        (symmetric,) = compute("(a + a.T).mean()", (a + a.T).mean(axis=0))
        step("standardising the columns")
        z = ((a - a.mean(axis=0)) / a.std(axis=0)).persist()
        wait(z)
        del a
        (correlation,) = compute("z.T @ z", z[:, : self._wanted].T @ z / z.shape[0])
        return {"symmetric": symmetric, "correlation": correlation}

    def reference(self) -> Answers:
        """See :meth:`Job.reference`; one column of blocks at a time with numpy alone."""
        a = self._array()
        side = self._blocks * self._block
        symmetric, correlation = np.empty(side), np.empty((self._wanted, side))
        first: npt.NDArray[np.float64] | None = None
        for number in range(self._blocks):
            here = slice(number * self._block, (number + 1) * self._block)
            # dask's random numbers, made by dask in this process; everything after that is numpy.
            columns = a[:, here].compute(scheduler="synchronous")
            rows = a[here, :].compute(scheduler="synchronous")
            symmetric[here] = (columns + rows.T).mean(axis=0)
            del rows
            columns = (columns - columns.mean(axis=0)) / columns.std(axis=0)
            if first is None:
                first = columns[:, : self._wanted].copy()
            correlation[:, here] = first.T @ columns / side
        return {"symmetric": symmetric, "correlation": correlation}
