"""Memory of the simulated device, and the copies from and to it that were not observed.

Every allocation has an array of bytes of its own.

A copy moves its bytes when it *lands*: when a thread waits for it, or for something ordered after
it. Until then its destination holds a poison. The copy refers to its allocation weakly, so it can
tell that the allocation was dropped under it, and to its host buffer strongly.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import numpy as np

from gpuspill.device.host import HostArray, HostRange, byte_range, overlap
from gpuspill.device.port import (
    Allocation,
    Device,
    DeviceError,
    FreedUnderCopy,
    Layout,
    SourceChanged,
    StreamKind,
    UseAfterFree,
)
from gpuspill.ending import Ending
from gpuspill.simulated.device.heap import Heap

__all__ = ["FRESH", "PENDING", "Copy", "Mark", "SimulatedAllocation"]

FRESH = 0xCB
"""Byte that fills new allocations: uninitialised memory shows."""

PENDING = 0xA5
"""Byte that fills the destination of a copy until it is done: a read too early shows."""

Mark: TypeAlias = tuple[int, int, str]
"""A piece of work: number of its stream, its number in the stream, what it is (for messages)."""


class SimulatedAllocation(Allocation):
    """Memory of the simulated device. Made by the device only.

    Attributes
    ----------
    host_address
        Where the bytes are in host memory. For the simulation only.
    writer
        The last work that wrote to it, if any.
    readers
        The last work of each stream that has read it since: stream number → mark.
    copies
        Copies from or to it that were not observed.
    """

    __slots__ = (
        "_address",
        "_device",
        "_ending",
        "_heap",
        "_nbytes",
        "_storage",
        "copies",
        "host_address",
        "readers",
        "writer",
    )

    def __init__(self, device: Device, heap: Heap, address: int, nbytes: int, storage: HostArray) -> None:
        self._device = device
        self._heap = heap
        self._address = address
        self._nbytes = nbytes
        self._storage: HostArray | None = storage
        self.host_address = int(storage.__array_interface__["data"][0])
        self.writer: Mark | None = None
        self.readers: dict[int, Mark] = {}
        self.copies: set[Copy] = set()
        # May run in any thread, at any point, also while that thread holds the device's lock: so no
        # lock there.
        self._ending = Ending(partial(heap.dropped.append, address))

    @property
    def device(self) -> Device:
        """The device it is on."""
        return self._device

    @property
    def address(self) -> int:
        """Base address: made up, no pointer to anything."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes, as asked for."""
        return self._nbytes

    @property
    def freed(self) -> bool:
        """Whether it was freed by :meth:`SimulatedDevice.free`."""
        return self._storage is None

    @property
    def storage(self) -> HostArray:
        """The bytes. For the simulation only: readers have to be ordered after writers."""
        if self._storage is None:
            raise UseAfterFree(f"{self!r} was freed")
        return self._storage

    def require(self) -> None:
        """Raise UseAfterFree if it was freed."""
        if self._storage is None:
            raise UseAfterFree(f"{self!r} was freed")

    def view(self, layout: Layout) -> HostArray:
        """Look at the bytes through a layout. For the simulation only, as :attr:`storage`."""
        if 0 in layout.shape:
            return np.empty(layout.shape, layout.dtype)
        return np.ndarray(layout.shape, layout.dtype, self.storage.data, layout.offset, layout.strides)

    def discard_storage(self) -> None:
        """Make every later use fail. The device's lock is held."""
        self._storage = None
        self._ending.cancel()

    def __repr__(self) -> str:
        return f"<SimulatedAllocation of {self._nbytes} bytes at {self._address:#x}>"


def _fingerprint(host: HostArray) -> int:
    # Cheap, not strong: it has to notice that the buffer was reused, not to withstand an attack.
    raw = host.reshape(-1).view(np.uint8)
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    return hash((int(np.add.reduce(words, dtype=np.uint64)), raw[words.nbytes :].tobytes()))


class Copy:
    """A copy that was enqueued.

    Parameters
    ----------
    kind
        Its direction.
    allocation, layout
        The device's end. A destination is contiguous; a source may have gaps.
    host
        The host's end, C-contiguous.
    checks
        Whether to notice that a source in host memory was changed under the copy.
    moves
        Whether its bytes move; else it only takes its time.

    Attributes
    ----------
    number
        Its number in its stream.
    due
        When it may land, in seconds of the device's clock.
    seen
        What it is ordered after on other streams: stream number → number there.
    landed
        Whether its bytes have moved (or never will: see `problem`).
    problem
        What went wrong, once it has landed.
    """

    def __init__(
        self,
        kind: StreamKind,
        allocation: SimulatedAllocation,
        layout: Layout,
        host: HostArray,
        *,
        checks: bool,
        moves: bool = True,
    ) -> None:
        self.kind = kind
        self.nbytes = layout.nbytes
        self.number = 0
        self.due = 0.0
        self.seen: Mapping[int, int] = {}
        self.landed = False
        self.problem: DeviceError | None = None
        self.host_range = byte_range(host)
        self._allocation = weakref.ref(allocation)
        self._described = repr(allocation)
        self._layout = layout
        self._host: HostArray | None = host
        self._moves = moves
        self._fingerprint = _fingerprint(host) if checks and kind == "to_device" else None

    def touches(self, host_range: HostRange) -> bool:
        """Whether it uses any of these host addresses."""
        return overlap(self.host_range, host_range)

    def poison(self) -> None:
        """Make a read of the destination that comes too early show."""
        if self.kind == "to_host":
            assert self._host is not None
            _fill(self._host)
        else:
            allocation = self._allocation()
            if allocation is not None and not allocation.freed:
                _fill(allocation.view(self._layout))

    def land(self) -> None:
        """Move the bytes, or find out why that cannot be. No lock is held; one thread at a time."""
        allocation = self._allocation()
        host = self._host
        assert host is not None
        if allocation is None or allocation.freed:
            self.problem = FreedUnderCopy(
                f"{self._described} was dropped while a copy of {self.nbytes} bytes ({self.kind}) was in flight: "
                "keep it until the copy's event was observed"
            )
        elif self._fingerprint is not None and _fingerprint(host) != self._fingerprint:
            self.problem = SourceChanged(
                f"the host buffer of {self.nbytes} bytes was changed while it was being copied to {self._described}: "
                "leave it alone until the copy's event was observed"
            )
        elif not self._moves:
            pass
        elif self.kind == "to_host":
            np.copyto(host, allocation.view(self._layout))
        else:
            np.copyto(allocation.view(self._layout), host)
        self._host = None

    def completed(self) -> None:
        """Forget the allocation's side: the copy was observed. The device's lock is held."""
        allocation = self._allocation()
        if allocation is not None:
            allocation.copies.discard(self)


def _fill(array: HostArray) -> None:
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = PENDING
