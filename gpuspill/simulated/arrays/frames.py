"""Taking simulated arrays apart into memory and layout, and building them again.

Two ways, as for real devices:

* :func:`describe` and :func:`rebuild`: by allocation. What moves is the allocation, once, whatever
  the number of arrays on it.
* :func:`to_frames` and :func:`from_frames`: a header and frames that alias the device's memory, in
  the manner of dask's ``cuda`` serialisation family. Nothing is copied on the device, also if the
  array has gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuspill.simulated.arrays.array import Array
from gpuspill.simulated.device.device import SimulatedAllocation

__all__ = ["Description", "describe", "from_frames", "rebuild", "to_frames"]


class Description(NamedTuple):
    """An array, taken apart.

    Attributes
    ----------
    offset
        Bytes to the first element.
    shape
        Elements along each axis.
    strides
        Bytes between neighbours along each axis.
    dtype
        Type of the elements, as ``"<f8"``.
    """

    allocation: SimulatedAllocation
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def describe(array: Array) -> Description:
    """Return the allocation of an array and its layout on it. Does not touch the bytes."""
    return Description(array.allocation, array.offset, array.shape, array.strides, array.dtype.str)


def rebuild(
    allocation: SimulatedAllocation, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: Any
) -> Array:
    """Return an array on `allocation`, of a :class:`Description`. Touches no byte.

    Raises
    ------
    ValueError
        It would reach beyond the allocation.
    """
    return Array(tuple(shape), np.dtype(dtype), allocation, offset, tuple(strides))


def to_frames(array: Array) -> tuple[dict[str, Any], list[Array]]:
    """Return a header and one frame: all bytes of the array, on its own memory."""
    low, high = array.layout.span
    header = {
        "offset": array.offset - low,
        "shape": array.shape,
        "strides": array.strides,
        "typestr": array.dtype.str,
    }
    return header, [Array((high - low,), np.uint8, array.allocation, low)]


def from_frames(header: Mapping[str, Any], frames: Sequence[Array]) -> Array:
    """Return an array on the memory of its frame, which need not be that of :func:`to_frames`.

    Raises
    ------
    ValueError
        The frame has another size.
    """
    (frame,) = frames
    return Array(
        tuple(header["shape"]),
        np.dtype(header["typestr"]),
        frame.allocation,
        frame.offset + header["offset"],
        tuple(header["strides"]),
    )
