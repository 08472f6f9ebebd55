"""The host's end of a copy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from gpuspill.device.port import HostBuffer

__all__ = ["HostArray", "HostRange", "as_bytes", "byte_range", "overlap"]

HostArray: TypeAlias = np.ndarray[Any, Any]

HostRange = tuple[int, int]
"""First address and the one after the last."""


def as_bytes(host_buffer: HostBuffer, *, writable: bool) -> HostArray:
    """Return a host buffer as an array of bytes that shares its memory.

    Raises
    ------
    TypeError
        It has no buffer protocol (a device's array, for one).
    ValueError
        It is not C-contiguous, or read-only although it is written to.
    """
    try:
        view = memoryview(host_buffer)
    except TypeError:
        raise TypeError(f"expected a host buffer, got {type(host_buffer).__name__}") from None
    if not view.c_contiguous:
        raise ValueError("the host buffer is not C-contiguous: copy in pieces that are, or through one that is")
    if writable and view.readonly:
        raise ValueError("the host buffer is read-only and cannot be copied to")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def byte_range(host: HostArray) -> HostRange:
    """Return the addresses of a C-contiguous host array."""
    address = int(host.__array_interface__["data"][0])
    return address, address + host.nbytes


def overlap(one: HostRange, other: HostRange) -> bool:
    """Whether two ranges have an address in common."""
    return one[0] < other[1] and other[0] < one[1]
