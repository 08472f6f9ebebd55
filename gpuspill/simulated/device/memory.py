"""Memory of the simulated device: its allocations, and the heap that counts them.

Every allocation has an array of bytes of its own and a made-up address. Addresses are used again, last freed first,
as a pool does, so that code that tells allocations by address alone is found out. A heap has a capacity; only a
:class:`FragmentedHeap` may have as much free and no room for it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.device.port import Allocation, Layout, UseAfterFree
from gpuspill.ending import Ending

if TYPE_CHECKING:
    from gpuspill.simulated.device.copies import Copy
    from gpuspill.simulated.device.device import SimulatedDevice

__all__ = ["FRESH", "PENDING", "FragmentedHeap", "Heap", "Mark", "SimulatedAllocation"]

FRESH = 0xCB
"""Byte that fills new allocations: uninitialised memory shows."""

PENDING = 0xA5
"""Byte that fills the destination of a copy until the copy is done: a read that came too early shows."""

_ALIGNMENT = 256

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

    def __init__(self, device: SimulatedDevice, heap: Heap, address: int, nbytes: int, storage: HostArray) -> None:
        self._device = device
        self._heap = heap
        self._address = address
        self._nbytes = nbytes
        self._storage: HostArray | None = storage
        self.host_address = int(storage.__array_interface__["data"][0])
        self.writer: Mark | None = None
        self.readers: dict[int, Mark] = {}
        self.copies: set[Copy] = set()
        # May run in any thread, at any point, also while that thread holds the device's lock: so no lock there.
        self._ending = Ending(partial(heap.dropped.append, address))

    @property
    def device(self) -> SimulatedDevice:
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
        """The bytes themselves. For the simulation only: a reader has to be ordered after their writer."""
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


class Heap:
    """Counts allocations and hands out addresses. All methods need the device's lock.

    Attributes
    ----------
    capacity
        Bytes there are.
    dropped
        Addresses of allocations that are not referred to any more, not yet given back.
    live
        Sizes of the allocations there are: address → bytes.
    """

    def __init__(self, base: int) -> None:
        self.capacity = 0
        self.dropped: deque[int] = deque()
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        self._base = self._next = base
        self._reusable: dict[int, list[int]] = {}

    @staticmethod
    def _room(nbytes: int) -> int:
        return max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT

    def collect(self) -> None:
        """Give back what is not referred to any more."""
        while self.dropped:
            self.release(self.dropped.popleft())

    def reserve(self, nbytes: int) -> int | None:
        """Return the address of a new allocation, or None if it does not fit."""
        self.collect()
        if self.live_bytes + nbytes > self.capacity:
            return None
        address = self._place(self._room(nbytes))
        if address is None:
            return None
        self.live[address] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.allocations += 1
        return address

    def _place(self, room: int) -> int | None:
        reusable = self._reusable.get(room)
        if reusable:
            return reusable.pop()
        address = self._next
        self._next += room
        return address

    def release(self, address: int) -> None:
        """Give an allocation back."""
        nbytes = self.live.pop(address)
        self.live_bytes -= nbytes
        self._reusable.setdefault(self._room(nbytes), []).append(address)

    def validate(self) -> None:
        """Raise AssertionError unless the totals are right and no address is both live and free."""
        assert self.live_bytes == sum(self.live.values()), (self.live_bytes, self.live)
        assert self.live_bytes <= self.capacity, (self.live_bytes, self.capacity)
        assert self.live_bytes <= self.peak_bytes
        free = [address for addresses in self._reusable.values() for address in addresses]
        assert len(free) == len(set(free)), "an address was freed twice"
        assert not set(free) & self.live.keys(), "an address is both live and free"


class FragmentedHeap(Heap):
    """Has as many addresses as bytes: an allocation needs free ones side by side, and gets the fewest that will do.

    As a pool of one piece does. O(n log n) for each allocation.
    """

    def _place(self, room: int) -> int | None:
        found: tuple[int, int] | None = None
        start = self._base
        for address in [*sorted(self.live), self._base + self.capacity]:
            left = address - start - room
            if left >= 0 and (found is None or left < found[0]):
                found = left, start
            start = address + self._room(self.live.get(address, 0))
        return None if found is None else found[1]

    def release(self, address: int) -> None:
        """See the base class."""
        super().release(address)
        self._reusable.clear()

    def validate(self) -> None:
        """See the base class; and that no two allocations have a byte in common."""
        super().validate()
        for address, after in pairwise(sorted(self.live)):
            assert address + self._room(self.live[address]) <= after, "two allocations overlap"
