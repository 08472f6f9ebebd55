"""What a job of the demonstration is, and how its answers are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from distributed import Client

__all__ = ["Answers", "DemoJob", "differences"]

Answers = Mapping[str, Any]
"""Results by name: data frames, arrays, numbers."""


class DemoJob(ABC):
    """Something people do with dask, and the same without a cluster."""

    name: str
    """One word."""

    title: str
    """One line."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size of the input in memory, bytes."""

    @abstractmethod
    def reference(self) -> Answers:
        """Compute the answers in this process, piece by piece, so that it needs little memory."""

    @abstractmethod
    def run(self, client: Client, step: Callable[[str], None]) -> Answers:
        """Compute the answers on a cluster.

        Parameters
        ----------
        client
            Of the cluster. If it is closed meanwhile, this method ends with an exception.
        step
            Told in a few words what is being done.
        """


def differences(expected: Answers, found: Answers) -> list[str]:
    """Compare answers: whole numbers and text exactly, floating point numbers to nine digits.

    Returns
    -------
    list of str
        What differs; empty if nothing does.
    """
    wrong = [f"{name}: missing" for name in expected if name not in found]
    wrong += [f"{name}: not asked for" for name in found if name not in expected]
    for name in expected:
        if name in found:
            try:
                _assert_same(expected[name], found[name])
            except AssertionError as error:
                wrong.append(f"{name}: {' '.join(str(error).split())}")
    return wrong


def _assert_same(expected: Any, found: Any) -> None:
    if isinstance(expected, pd.DataFrame):
        if list(expected.columns) != list(found.columns):
            raise AssertionError(f"columns {list(found.columns)} instead of {list(expected.columns)}")
        if not expected.index.equals(found.index):
            raise AssertionError("the index differs")
        for column in expected.columns:
            try:
                _assert_same(expected[column].to_numpy(), found[column].to_numpy())
            except AssertionError as error:
                raise AssertionError(f"column {column}: {error}") from None
    elif np.issubdtype(np.asarray(expected).dtype, np.floating):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    else:
        np.testing.assert_array_equal(found, expected)
