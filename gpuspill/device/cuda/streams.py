"""Streams, events and pinned memory of a GPU, and what copies in flight keep alive."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from gpuspill.device.cuda.port import Driver, Handle
from gpuspill.device.host import HostArray, as_bytes, byte_range, overlap
from gpuspill.device.port import (
    Allocation,
    Device,
    DeviceError,
    Event,
    FreedUnderCopy,
    PinnedBuffer,
    Stream,
    StreamKind,
)

__all__ = ["GpuEvent", "GpuPinned", "GpuStream", "PinnedBytes", "PinnedMemory"]

#: Seconds between two looks at an event by who waits for it with a timeout; the driver has no such
#: wait.
_FIRST_PAUSE, _LAST_PAUSE = 20e-6, 1e-3


class GpuEvent(Event):
    """A point in a stream of a GPU; that of a copy keeps both ends until it was observed.

    Attributes
    ----------
    allocation, host
        The ends of the copy; None for an event that is of none, and once it was observed.
    began
        Tickets of copies below this one are those of copies that the stream does before.
    problem
        The driver's error, if it reported one: every caller that asks is told, not only the first.
    ticket
        Its own, if it is that of a copy.
    """

    __slots__ = ("_driver", "_handle", "_stream", "allocation", "began", "host", "problem", "ticket")

    def __init__(self, driver: Driver, stream: GpuStream, handle: Handle, began: int) -> None:
        self._driver = driver
        self._stream = stream
        self._handle = handle
        self.began = began
        self.ticket = 0
        self.allocation: Allocation | None = None
        self.host: HostArray | None = None
        self.problem: DeviceError | None = None

    @property
    def device(self) -> Device:
        """The device it is of."""
        return self._stream.device

    @property
    def handle(self) -> Handle:
        """The driver's."""
        return self._handle

    def reached(self) -> bool:
        """Whether everything before it is done or has failed. Observes nothing."""
        try:
            return self.problem is not None or self._driver.reached(self._handle)
        except DeviceError as error:
            self.problem = error
            return True

    def done(self) -> bool:
        """Whether everything before it is done; if so, that counts as observed."""
        if not self.reached():
            return False
        self._end()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until everything before it is done."""
        if timeout is not None:
            return self._poll(timeout)
        if self.problem is None:
            try:
                self._driver.wait(self._handle)
            except DeviceError as error:
                self.problem = error
        self._end()
        return True

    def _end(self) -> None:
        # Also if it failed: what is in flight no more need not be kept.
        self._stream.observed(self)
        if self.problem is not None:
            raise self.problem

    def _poll(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE)
        return True

    def __del__(self) -> None:
        self._driver.destroy_event(self._handle)


class GpuStream(Stream):
    """A stream of a GPU.

    Parameters
    ----------
    device, driver, handle
        Where, and how to get at it.
    name
        For messages.

    Notes
    -----
    Thread-safe. Its lock guards the list of copies in flight, and is not held while anything is
    enqueued. So two threads may enter their copies in another order than they enqueued them in;
    tickets tell what is known for sure.
    """

    __slots__ = ("_copies", "_device", "_driver", "_lock", "_tickets", "handle", "name")

    def __init__(self, device: Device, driver: Driver, handle: Handle, name: str) -> None:
        self._device = device
        self._driver = driver
        self.handle = handle
        self.name = name
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._copies: deque[GpuEvent] = deque()

    @property
    def device(self) -> Device:
        """The device it is on."""
        return self._device

    def record(self) -> GpuEvent:
        """Return an event for everything enqueued so far."""
        began = next(self._tickets)
        return GpuEvent(self._driver, self, self._driver.record(self.handle), began)

    def wait(self, event: Event) -> None:
        """Order all later work of this stream after `event`."""
        if not isinstance(event, GpuEvent) or event.device is not self._device:
            raise ValueError(f"{event!r} is no event of {self._device!r}")
        self._driver.order(self.handle, event.handle)

    def copy(self, kind: StreamKind, allocation: Allocation, offset: int, host: HostArray) -> GpuEvent:
        """Enqueue a copy whose arguments were checked; return its event."""
        address, _ = byte_range(host)
        if host.nbytes:
            self._driver.copy(kind, allocation.address + offset, address, host.nbytes, self.handle)
        try:
            event = self.record()
        except BaseException:
            # There is nothing to wait for it by, and its ends are about to go.
            self._driver.synchronize()
            raise
        event.allocation, event.host = allocation, host
        with self._lock:
            event.ticket = next(self._tickets)
            self._copies.append(event)
        return event

    def observed(self, event: GpuEvent) -> None:
        """Let go of what is in flight no more, now that `event` was observed."""
        with self._lock:
            self._let_go([event] if event.ticket else [])
            while self._copies and self._copies[0].ticket < event.began:
                self._let_go([self._copies[0]])

    def in_flight(self) -> list[GpuEvent]:
        """Return the events of copies that are not done, after looking whether they are."""
        with self._lock:
            copies = list(self._copies)
        done = [event for event in copies if event.reached()]
        with self._lock:
            self._let_go(done)
            return list(self._copies)

    def _let_go(self, events: list[GpuEvent]) -> None:
        for event in events:
            event.allocation = event.host = None
            if event in self._copies:
                self._copies.remove(event)

    def validate(self) -> None:
        """Raise AssertionError unless what is in flight has both ends and is in order."""
        with self._lock:
            tickets = [event.ticket for event in self._copies]
            assert tickets == sorted(set(tickets)), tickets
            assert all(event.allocation is not None and event.host is not None for event in self._copies)

    def destroy(self) -> None:
        """Give it back."""
        self._driver.destroy_stream(self.handle)

    def __repr__(self) -> str:
        return f"<GpuStream {self.name!r} of {self._device!r}>"


class PinnedBytes:
    """How much is pinned. Counting takes no lock, for finalisers; one thread may ask."""

    def __init__(self) -> None:
        self._changes: deque[int] = deque()
        self._total = 0

    def add(self, nbytes: int) -> None:
        """Count more, or less."""
        self._changes.append(nbytes)

    @property
    def total(self) -> int:
        """Bytes now."""
        while self._changes:
            self._total += self._changes.popleft()
        return self._total


class PinnedMemory:
    """Pinned memory itself; freed with the last view of it, whatever anybody releases."""

    def __init__(self, driver: Driver, nbytes: int, count: PinnedBytes) -> None:
        self._driver = driver
        self._count = count
        self.nbytes = nbytes
        self._address: int | None = None
        self._address = driver.pin(max(nbytes, 1))
        count.add(nbytes)

    def view(self) -> memoryview:
        """Return a view that keeps it."""
        leaf = (ctypes.c_ubyte * max(self.nbytes, 1)).from_address(self._address or 0)
        leaf._memory = self  # type: ignore[attr-defined]
        return memoryview(leaf).cast("B")[: self.nbytes]

    def __del__(self) -> None:
        if self._address is not None:
            self._driver.unpin(self._address)
            self._count.add(-self.nbytes)


class GpuPinned(PinnedBuffer):
    """Pinned host memory of a GPU.

    Parameters
    ----------
    in_flight
        Tells which copies are.
    """

    __slots__ = ("_in_flight", "_nbytes", "_view")

    def __init__(self, memory: PinnedMemory, in_flight: Callable[[], list[GpuEvent]]) -> None:
        self._in_flight = in_flight
        self._nbytes = memory.nbytes
        self._view: memoryview | None = memory.view()

    @property
    def view(self) -> memoryview:
        """The memory."""
        if self._view is None:
            raise ValueError(f"the pinned buffer of {self._nbytes} bytes was released")
        return self._view

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def release(self) -> None:
        """Give it back, unless a copy uses it; the memory goes with the last view on it."""
        if self._view is None:
            return
        ours = byte_range(as_bytes(self._view, writable=True))
        for event in self._in_flight():
            host = event.host
            if host is not None and overlap(ours, byte_range(host)):
                raise FreedUnderCopy(
                    f"a pinned buffer of {self._nbytes} bytes cannot be released: a copy from or to it is in flight"
                )
        self._view = None
