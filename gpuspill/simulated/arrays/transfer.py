"""Between host and device, by explicit copies that the caller waits for."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.simulated.arrays.launch import dense_bytes, launch
from gpuspill.simulated.arrays.view import ArrayView, supported
from gpuspill.simulated.device.device import SimulatedDevice

__all__ = ["to_device", "to_host"]

A = TypeVar("A", bound=ArrayView)


def _has_arrays(value: Any) -> bool:
    return isinstance(value, ArrayView) or (isinstance(value, list | tuple) and any(map(_has_arrays, value)))


def to_device(
    cls: type[A],
    value: Any,
    *,
    device: SimulatedDevice,
    dtype: Any = None,
    order: Any = None,
    copy: bool | None = None,
    ndmin: int = 0,
) -> A:
    """Return `value` as an array on `device`; blocks until it is there.

    Parameters
    ----------
    value
        Anything that NumPy makes an array of, an array of a simulated device, or lists of those.
    device
        Where to.
    dtype, order, copy, ndmin
        As for :func:`numpy.array`; by default `value` itself is returned if it fits.
    """
    dtype = None if dtype is None else supported(dtype)
    if isinstance(value, ArrayView) and value.device is not device:
        value = to_host(value)
    if _has_arrays(value):
        if isinstance(value, cls) and not copy and ndmin <= value.ndim and dtype in (None, value.dtype):
            flags = value.on_host().flags
            if order in (None, "K", "A") or (flags.c_contiguous if order == "C" else flags.f_contiguous):
                return value
        options = {"dtype": dtype, "order": order or "K", "ndmin": ndmin}
        return launch(cls, np.array, (value,), options, what="array")  # type: ignore[no-any-return]
    host = np.asarray(value, dtype=dtype, order=order or "K")
    host = host[(np.newaxis,) * max(ndmin - host.ndim, 0)] if ndmin > host.ndim else host
    supported(host.dtype)
    raw = dense_bytes(host)
    if raw is None:
        host = host.copy(order="C")
        raw = dense_bytes(host)
    assert raw is not None
    allocation = device.allocate(raw.nbytes)
    if raw.nbytes:
        device.copy_to_device(raw, allocation, device.current_stream()).wait()
    return cls.on(allocation, 0, host.shape, host.strides, host.dtype)


def to_host(array: ArrayView) -> HostArray:
    """Return a copy of `array` as NumPy's; blocks until it is there.

    The copy is enqueued on the current stream. An array without gaps keeps its order of axes; any
    other comes back in C order, and is not copied on the device first.
    """
    device = array.device
    array.allocation.require()
    seen = array.on_host()
    dense = dense_bytes(seen) is not None
    raw = np.empty(array.nbytes, np.uint8)
    strides = array.strides if dense else None
    host: HostArray = np.ndarray(array.shape, array.dtype, raw.data if raw.nbytes else None, 0, strides)
    if raw.nbytes:
        layout = array.layout
        if dense:
            device.copy_to_host(array.allocation, raw, device.current_stream(), offset=layout.span[0]).wait()
        else:
            device.enqueue_copy("to_host", array.allocation, layout, host, device.current_stream()).wait()
    return host
