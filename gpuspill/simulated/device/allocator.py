"""Allocation on the simulated device: capacity, out-of-memory hooks, freeing."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from gpuspill.device.hooks import HookChain
from gpuspill.device.host import HostArray
from gpuspill.device.port import Device, FreedUnderCopy, MemoryInfo, OutOfMemory, UseAfterFree
from gpuspill.simulated.device.heap import FragmentedHeap, Heap
from gpuspill.simulated.device.memory import FRESH, SimulatedAllocation

__all__ = ["Allocator"]

# A hook that says it made room when it did not would otherwise go round for ever.
_MAX_RETRIES: Final = 1000


class Allocator:
    """Memory of one simulated device. Thread-safe; no lock is held while a hook runs.

    Attributes
    ----------
    hooks
        Whom to ask when something does not fit.
    out_of_memory, failed
        How often an allocation did not fit at first, and in the end.
    """

    def __init__(self, device: Device, lock: threading.Condition, base: int, *, fragments: bool) -> None:
        self._device = device
        self._lock = lock
        self._heap = FragmentedHeap(base) if fragments else Heap(base)
        self.hooks = HookChain()
        self.out_of_memory = 0
        self.failed = 0

    def resize(self, capacity: int) -> None:
        """Change the capacity. ValueError if more is allocated now."""
        with self._lock:
            live = self.collected().live_bytes
            if capacity < live:
                raise ValueError(
                    f"memory: {live} bytes are allocated on {self._device!r}, cannot shrink it to {capacity}"
                )
            self._heap.capacity = int(capacity)

    def collected(self) -> Heap:
        """Return the heap, up to date. The lock is held."""
        self._heap.collect()
        return self._heap

    def info(self) -> MemoryInfo:
        """Return free and total bytes."""
        with self._lock:
            heap = self.collected()
            return MemoryInfo(heap.capacity - heap.live_bytes, heap.capacity)

    def allocate(self, nbytes: int, *, fill: bool) -> SimulatedAllocation:
        """Return new memory, of :data:`FRESH` if asked. Errors as :meth:`Device.allocate`."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        address = self._reserve(nbytes)
        try:
            storage = np.full(nbytes, FRESH, np.uint8) if fill else np.empty(nbytes, np.uint8)
        except MemoryError:
            # The host's memory is what the device is made of.
            with self._lock:
                self._heap.release(address)
            raise
        return SimulatedAllocation(self._device, self._heap, address, nbytes, storage)

    def adopt(self, storage: HostArray) -> SimulatedAllocation:
        """Return new memory whose bytes are `storage` itself."""
        return SimulatedAllocation(self._device, self._heap, self._reserve(storage.nbytes), storage.nbytes, storage)

    def _reserve(self, nbytes: int) -> int:
        retries = 0
        while True:
            with self._lock:
                address = self._heap.reserve(nbytes)
                if address is not None:
                    return address
                self.out_of_memory += retries == 0
            if retries == _MAX_RETRIES or not self.hooks.ask(nbytes, retries):
                break
            retries += 1
        with self._lock:
            self.failed += 1
            live, capacity = self._heap.live_bytes, self._heap.capacity
        raise OutOfMemory(
            f"{self._device!r} is out of memory: {nbytes} bytes asked for, {live} of {capacity} bytes allocated"
            + (f", retried {retries} times" if retries else "")
        )

    def free(self, allocation: SimulatedAllocation) -> None:
        """Give memory up now. Errors as :meth:`Device.free`."""
        with self._lock:
            if allocation.freed:
                raise UseAfterFree(f"{allocation!r} was freed before")
            if allocation.copies:
                raise FreedUnderCopy(
                    f"{allocation!r} cannot be freed: {len(allocation.copies)} copies from or to it are in flight; "
                    "observe their events first"
                )
            allocation.discard_storage()
            self._heap.release(allocation.address)
