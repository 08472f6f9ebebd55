"""Making arrays on the simulated device, and copying them back."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.simulated.arrays import current
from gpuspill.simulated.arrays.array import Array
from gpuspill.simulated.arrays.launch import launch
from gpuspill.simulated.arrays.transfer import to_device, to_host
from gpuspill.simulated.device.device import SimulatedDevice

__all__ = ["arange", "asarray", "asnumpy", "empty", "full", "ones", "zeros"]


def asarray(value: Any, dtype: Any = None, order: str | None = None, *, device: SimulatedDevice | None = None) -> Array:
    """Return `value` as an array on the device; blocks until it is there.

    Parameters
    ----------
    value
        Anything that NumPy makes an array of; an :class:`Array`, which is returned as it is if it
        fits; lists of those.
    dtype, order
        As for :func:`numpy.asarray`.
    device
        Where to. Default: where `value` is, if it is on a device; else the current device.

    Raises
    ------
    OutOfMemory
        The device has no room.
    TypeError
        The elements are no booleans and numbers.
    """
    if device is None:
        device = value.device if isinstance(value, Array) else current.device()
    return to_device(Array, value, device=device, dtype=dtype, order=order)


def asnumpy(value: Any) -> HostArray:
    """Return a copy of an array as NumPy's; blocks until it is there.

    Parameters
    ----------
    value
        An :class:`Array`; anything else is given to :func:`numpy.asarray`.

    Raises
    ------
    UnorderedAccess
        The current stream is not ordered after the work that makes `value`.
    """
    return to_host(value) if isinstance(value, Array) else np.asarray(value)


def empty(
    shape: int | tuple[int, ...], dtype: Any = float, order: str = "C", *, device: SimulatedDevice | None = None
) -> Array:
    """Return a new array of undefined content. OutOfMemory if the device has no room."""
    return Array(shape, dtype, order=order, device=device)


def _create(what: str, *args: Any, **kwargs: Any) -> Array:
    created: Array = launch(Array, getattr(np, what), args, kwargs, what=what, device=current.device())
    return created


def zeros(shape: int | tuple[int, ...], dtype: Any = float, order: str = "C") -> Array:
    """Return a new array of zeros, made on the device."""
    return _create("zeros", shape, dtype, order)


def ones(shape: int | tuple[int, ...], dtype: Any = float, order: str = "C") -> Array:
    """Return a new array of ones, made on the device."""
    return _create("ones", shape, dtype, order)


def full(shape: int | tuple[int, ...], fill_value: Any, dtype: Any = None, order: str = "C") -> Array:
    """Return a new array filled with one value, made on the device."""
    return _create("full", shape, fill_value, dtype, order)


def arange(*args: Any, dtype: Any = None) -> Array:
    """Return evenly spaced values, made on the device; arguments as :func:`numpy.arange`."""
    return _create("arange", *args, dtype=dtype)
