"""The heap of the simulated device: counts allocations and hands out addresses.

Addresses are made up, and used again, last freed first, as a pool does, so that code that tells
allocations by address alone is found out. A heap has a capacity; only a :class:`FragmentedHeap` may
have as much free and no room for it.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

__all__ = ["FragmentedHeap", "Heap"]

_ALIGNMENT = 256


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
    """Has as many addresses as bytes: allocations need adjacent ones; best fit.

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
