"""What an array on the simulated device is, apart from what can be done with it."""

from __future__ import annotations

import math
from typing import Any, Self, cast

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.device.port import Layout
from gpuspill.simulated.device.device import SimulatedAllocation, SimulatedDevice

__all__ = ["ArrayView", "contiguous_strides", "supported"]


def supported(dtype: Any) -> np.dtype[Any]:
    """Return `dtype` as NumPy's, if such elements can be on the device.

    Raises
    ------
    TypeError
        They cannot: only booleans and numbers in native byte order can, up to 8 bytes (16 if
        complex).
    """
    found: np.dtype[Any] = np.dtype(dtype)
    if found.kind not in "biufc" or not found.isnative or found.itemsize > (16 if found.kind == "c" else 8):
        raise TypeError(f"arrays of {found!r} cannot be on the simulated device: it knows booleans and numbers only")
    return found


def contiguous_strides(shape: tuple[int, ...], itemsize: int, order: str = "C") -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides = []
    step = itemsize
    for length in reversed(shape) if order == "C" else shape:
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides)) if order == "C" else tuple(strides)


class ArrayView:
    """An allocation and a layout on it. Immutable, but for the bytes."""

    __slots__ = ("__weakref__", "_allocation", "_dtype", "_offset", "_shape", "_strides")

    def __init__(
        self,
        allocation: SimulatedAllocation,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._allocation = allocation
        self._offset = offset
        self._shape = shape
        self._strides = strides
        self._dtype = dtype

    @classmethod
    def on(
        cls,
        allocation: SimulatedAllocation,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> Self:
        """Return an array of this type on an allocation. Checks nothing."""
        array = cls.__new__(cls)
        ArrayView.__init__(array, allocation, offset, shape, strides, dtype)
        return array

    @property
    def allocation(self) -> SimulatedAllocation:
        """The memory it looks at."""
        return self._allocation

    @property
    def offset(self) -> int:
        """Bytes from the beginning of the allocation to the first element."""
        return self._offset

    @property
    def device(self) -> SimulatedDevice:
        """The device it is on."""
        return cast("SimulatedDevice", self._allocation.device)  # no other makes such allocations

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each axis."""
        return self._strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._dtype.itemsize

    @property
    def layout(self) -> Layout:
        """How it looks at the allocation."""
        return Layout(self._offset, self._shape, self._strides, self._dtype.str, self._dtype.itemsize)

    def on_host(self) -> HostArray:
        """Return the bytes as NumPy sees them, unordered. For the simulation only."""
        if self.size == 0:
            self._allocation.require()
            return np.empty(self._shape, self._dtype)
        return np.ndarray(self._shape, self._dtype, self._allocation.storage.data, self._offset, self._strides)
