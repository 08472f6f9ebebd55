"""What the device port speaks of: errors, identities, layouts, counters."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpuspill.errors import GpuspillError

__all__ = [
    "AllocationId",
    "CopyPlan",
    "DeviceError",
    "DeviceStatistics",
    "FreedUnderCopy",
    "Layout",
    "MemoryInfo",
    "OutOfMemory",
    "Part",
    "SourceChanged",
    "UnorderedAccess",
    "UseAfterFree",
]


class DeviceError(GpuspillError, RuntimeError):
    """A device failed, or its contract was broken. What a copy was to deliver is not valid."""


class UnorderedAccess(DeviceError):
    """Memory was used on one stream while unordered work on another may still use it."""


class FreedUnderCopy(DeviceError):
    """Memory was freed while a copy from or to it was in flight."""


class SourceChanged(DeviceError):
    """The host buffer that is being copied to the device was changed before the copy was done."""


class UseAfterFree(DeviceError):
    """An allocation was used after :meth:`Device.free`, or freed twice."""


class OutOfMemory(MemoryError, GpuspillError):
    """The device has no room for an allocation, and no hook could make any."""


class AllocationId(NamedTuple):
    """What tells an allocation from all others that live at the same time.

    Attributes
    ----------
    device
        :attr:`Device.identity` of the device; ``"host"`` for host memory.
    address
        Base address.
    nbytes
        Size in bytes.
    """

    device: str
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array looks at its allocation.

    Attributes
    ----------
    offset
        Bytes from the base address to the first element. With negative strides the array reaches
        below it.
    shape
        Elements along each axis.
    strides
        Bytes between neighbours along each axis; any sign, 0 for a broadcast axis.
    dtype
        Element type in the array's library: its name (``"<f8"`` for NumPy and those that follow
        it), or the type itself where no name tells it all (records, ``bfloat16``).
    itemsize
        Bytes of an element.
    writeable
        Whether the array may be written through.
    stream
        The stream that the library bound the array to, if any.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    itemsize: int
    writeable: bool = True
    stream: Hashable = None

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted: more than the span for a broadcast array."""
        nbytes = self.itemsize
        for length in self.shape:
            nbytes *= length
        return nbytes

    @property
    def span(self) -> tuple[int, int]:
        """First byte used and the one after the last; equal if there is no element."""
        if 0 in self.shape:
            return self.offset, self.offset
        low = high = self.offset
        for length, stride in zip(self.shape, self.strides, strict=True):
            reach = (length - 1) * stride
            low += min(reach, 0)
            high += max(reach, 0)
        return low, high + self.itemsize


class Part(NamedTuple):
    """Bytes of an allocation, from `offset` on, and their end in host memory.

    Attributes
    ----------
    allocation
        The :class:`~gpuspill.device.port.Allocation`.
    offset
        The first byte there.
    host
        The buffer; its size says how many bytes there are.
    """

    allocation: Any
    offset: int
    host: memoryview


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """How to copy much at once between a device and ordinary host memory.

    Attributes
    ----------
    chunk_nbytes
        Bytes of one copy: large enough to be fast, small enough that copies of others come in
        between.
    staged
        Whether to go by way of pinned memory, because copies from and to ordinary memory are
        slower.
    """

    chunk_nbytes: int = 32 * 2**20
    staged: bool = False


class MemoryInfo(NamedTuple):
    """Memory of a device in bytes, all users together."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """What a device did so far.

    On a device that is shared with others, all but the copies and the pinned memory covers what
    went through the port.

    Attributes
    ----------
    live_bytes, peak_bytes
        Bytes allocated now, and the most there ever were.
    live_allocations, allocations
        Allocations now, and ever.
    copies_in_flight
        Copies enqueued whose completion was not observed yet.
    copies_to_host, copies_to_device, bytes_to_host, bytes_to_device
        Copies enqueued so far, and their bytes.
    pinned_bytes
        Pinned host memory now.
    kernels
        Computations on the device, where they can be counted; else 0.
    out_of_memory
        Times an allocation did not fit at first.
    failed_allocations
        Times it did not fit in the end.
    violations
        Times the contract was broken, where that is detected; else 0.
    """

    live_bytes: int
    peak_bytes: int
    live_allocations: int
    allocations: int
    copies_in_flight: int
    copies_to_host: int
    copies_to_device: int
    bytes_to_host: int
    bytes_to_device: int
    pinned_bytes: int
    kernels: int
    out_of_memory: int
    failed_allocations: int
    violations: int
