"""A driver without a GPU, on the simulated device, below ``GpuDevice``.

So everything above that boundary runs as it would on a GPU, with copies that are late, memory that
holds poison until they are done, and use that nothing orders raised as an error.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np

from gpuspill.device.cuda.port import DEFAULT_STREAM, FailureCallback
from gpuspill.device.port import DeviceError, HookInstallation, Layout, MemoryInfo, StreamKind
from gpuspill.simulated.device.device import SimulatedAllocation, SimulatedDevice, SimulatedEvent, SimulatedStream

__all__ = ["FakeDriver", "FakeMemory"]


class FakeMemory:
    """Memory of a fake driver; freed with the last reference to its allocation."""

    def __init__(self, allocation: SimulatedAllocation) -> None:
        self.address = allocation.address
        self._allocation: SimulatedAllocation | None = allocation

    def free(self) -> None:
        """Give it back."""
        assert self._allocation is not None, "freed twice"
        self._allocation = None


class FakeDriver:
    """Drives a simulated device.

    Parameters
    ----------
    device
        The simulated device.
    identity
        Name of the device; default: the simulated one's, so that its arrays are on it.

    Attributes
    ----------
    pinned
        Pinned memory: address → array.
    events, streams
        How many there are.
    """

    def __init__(self, device: SimulatedDevice, identity: str | None = None) -> None:
        self.device = device
        self._identity = identity or device.identity
        self._known: weakref.WeakValueDictionary[int, SimulatedAllocation] = weakref.WeakValueDictionary()
        self._created: set[SimulatedStream] = set()
        self._lock = threading.Lock()
        self._installation: HookInstallation | None = None
        self._last: dict[SimulatedStream, SimulatedEvent] = {}
        self.pinned: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self.events = 0
        self.streams = 0

    @property
    def identity(self) -> str:
        """Name of the device."""
        return self._identity

    @property
    def uuid(self) -> str | None:
        """None: the device is the process's own."""
        return None

    @property
    def description(self) -> str:
        """For the log."""
        return f"{self._identity}, a simulated device"

    def device_of(self, address: int) -> str:
        """Return the name of the device, on which all memory is."""
        return self._identity

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes."""
        return self.device.memory_info()

    def current(self) -> AbstractContextManager[None]:
        """Prepare nothing."""
        return nullcontext()

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: object) -> FakeMemory:
        """Return memory."""
        assert isinstance(stream, SimulatedStream)
        return FakeMemory(self.know(self.device.allocate(nbytes)))

    def know(self, allocation: SimulatedAllocation) -> SimulatedAllocation:
        """Note memory that others allocated, so that its address can be copied from."""
        with self._lock:
            self._known[allocation.address] = allocation
        return allocation

    def find(self, address: int) -> SimulatedAllocation:
        """Return the allocation that an address belongs to."""
        with self._lock:
            known = list(self._known.values())
        for allocation in known:
            if allocation.address <= address < allocation.address + max(allocation.nbytes, 1):
                return allocation
        raise DeviceError(f"{address:#x} is no address of memory that is allocated")

    def connected(self) -> bool:
        """Whether the callback would be called."""
        return self._installation is not None and self._installation.installed

    def connect(self, callback: FailureCallback) -> None:
        """Have a callback called, after those that others installed."""
        # As RMM, which does not say how often it asked.
        self._installation = self.device.on_out_of_memory(lambda nbytes, retries: callback(nbytes, self._fits))

    def _fits(self, nbytes: int) -> bool:
        try:
            self.device.allocate(nbytes)
        except MemoryError:
            return False
        return True

    def disconnect(self) -> None:
        """Call the callback no more."""
        if self._installation is not None:
            self._installation.uninstall()

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> SimulatedStream:
        """Return a new stream."""
        self.streams += 1
        stream = self.device.new_stream(f"stream {self.streams}")
        self._created.add(stream)
        return stream

    def destroy_stream(self, stream: SimulatedStream) -> None:
        """Give a stream back."""
        self.streams -= 1

    def record(self, stream: SimulatedStream | int) -> SimulatedEvent:
        """Return a new event. Streams of others and the default one wait for each other."""
        self.events += 1
        if stream == DEFAULT_STREAM:
            stream = self.device.default_stream
            for other in tuple(stream._schedule.streams):
                if other not in self._created:
                    stream.wait(other.record())
        assert isinstance(stream, SimulatedStream)
        with self._lock:
            last = self._last.get(stream)
        # The event of a copy knows when it is that copy that went wrong.
        return last if last is not None and last.number == stream.issued else stream.record()

    def destroy_event(self, event: SimulatedEvent) -> None:
        """Give an event back."""
        self.events -= 1

    def reached(self, event: SimulatedEvent) -> bool:
        """Whether all before the event is done."""
        return event.done()

    def wait(self, event: SimulatedEvent) -> None:
        """Wait until all before the event is done."""
        event.wait()

    def order(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Let later work of `stream` begin after the event."""
        stream.wait(event)
        with self._lock, suppress(KeyError):
            del self._last[stream]

    def synchronize(self) -> None:
        """Wait until all streams are done."""
        self.device.synchronize()

    # -- copies ------------------------------------------------------------------------------------

    def copy(
        self, kind: StreamKind, device_address: int, host_address: int, nbytes: int, stream: SimulatedStream
    ) -> None:
        """Enqueue a copy."""
        allocation = self.find(device_address)
        host = np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(host_address)).cast("B"), np.uint8)
        layout = Layout(device_address - allocation.address, (nbytes,), (1,), "|u1", 1)
        event = self.device.enqueue_copy(kind, allocation, layout, host, stream)
        with self._lock:
            self._last[stream] = event

    def pin(self, nbytes: int) -> int:
        """Return the address of new pinned host memory."""
        array = np.empty(nbytes, np.uint8)
        address = int(array.__array_interface__["data"][0])
        self.pinned[address] = array
        return address

    def unpin(self, address: int) -> None:
        """Give pinned memory back."""
        del self.pinned[address]
