"""A device in host memory that keeps the device contract and catches who breaks it.

It needs no GPU, no thread and no real time, and it is stricter than a GPU where that finds bugs:

* It has a fixed capacity; what does not fit calls the out-of-memory hooks, then raises.
* Copies are late. Their bytes move when they are *observed* (a thread waits for the event, or for
  what is ordered after it), never because time has passed; before that the destination holds a
  poison. A program that forgot to wait reads the poison on every run, and not on one in a thousand.
* Work that is not ordered after what it depends on raises
  :class:`~gpuspill.device.port.UnorderedAccess`. This follows from the order that the program
  established, by vector clocks, whatever the latencies. Ordering is checked for each allocation as
  a whole.
* Freeing memory under a copy raises: at once if it was freed through the port, from the copy's
  event if the last reference was dropped. Changing the host's end of a copy to the device raises
  from the event, too.

Computations are done at once, but count as enqueued on a stream, so a copy of their result has to
be ordered after them as on a GPU. The parts are in :mod:`gpuspill.simulated.device`, the array type
that lives here is in :mod:`gpuspill.simulated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gpuspill.device.hooks import Installation
from gpuspill.device.host import HostArray, as_bytes
from gpuspill.device.port import (
    Allocation,
    AllocationId,
    Device,
    DeviceError,
    DeviceStatistics,
    HostBuffer,
    Layout,
    MemoryInfo,
    OutOfMemoryHook,
    Stream,
    StreamKind,
)
from gpuspill.simulated.device.allocator import Allocator
from gpuspill.simulated.device.clock import Clock, ManualClock, RealClock
from gpuspill.simulated.device.configuration import Configuration
from gpuspill.simulated.device.kernels import Kernels
from gpuspill.simulated.device.memory import FRESH, PENDING, Copy, SimulatedAllocation
from gpuspill.simulated.device.pinned import SimulatedPinned
from gpuspill.simulated.device.streams import Schedule, SimulatedEvent, SimulatedStream
from gpuspill.simulated.device.timeline import Span

__all__ = [
    "FRESH",
    "PENDING",
    "Clock",
    "ManualClock",
    "RealClock",
    "SimulatedAllocation",
    "SimulatedDevice",
    "SimulatedEvent",
    "SimulatedStream",
]

# Gives devices different names and addresses, as a driver would. A counter is all that devices
# share.
_serials = itertools.count()


class SimulatedDevice(Device):
    """A device in host memory.

    Parameters
    ----------
    memory
        Capacity in bytes.
    bandwidth
        Bytes a second that a copy moves, in each direction on its own. None: no limit.
    latency
        Seconds that each copy takes besides.
    kernel_latency
        Seconds that each computation takes.
    checks
        Whether to poison new memory and pending destinations, and to notice that a source in host
        memory changes under a copy. Costs about as much as each copy again. Ordering and freeing
        are always checked.
    moves
        Whether copies move bytes. False: they only take their time, and memory that no one touches
        takes none.
    fragments
        Whether free memory may be in pieces that are too small for an allocation, as in a pool.
    clock
        Where time comes from. Default: real time.

    Attributes
    ----------
    configuration
        The above, as it is now.
    default_stream
        Where computations are enqueued unless a context chose another stream.

    Notes
    -----
    Any number of devices may exist side by side. All methods are thread-safe.
    """

    def __init__(
        self,
        memory: int = 2**30,
        *,
        bandwidth: float | None = None,
        latency: float = 0.0,
        kernel_latency: float = 0.0,
        checks: bool = True,
        moves: bool = True,
        fragments: bool = False,
        clock: Clock | None = None,
    ) -> None:
        serial = next(_serials)
        self._identity = f"simulated:{serial}"
        self.configuration = Configuration(memory, bandwidth, latency, kernel_latency, checks, moves)
        self.clock: Clock = RealClock() if clock is None else clock
        self._schedule = Schedule(self.clock)
        self._lock = self._schedule.condition
        self._allocator = Allocator(self, self._lock, base=(serial + 1) << 44, fragments=fragments)
        self._allocator.resize(memory)
        self._copies = {"to_host": 0, "to_device": 0}
        self._copied_bytes = {"to_host": 0, "to_device": 0}
        self.default_stream = self.new_stream("default")
        self.kernels = Kernels(self._schedule, self.default_stream)
        self._copy_streams: dict[StreamKind, SimulatedStream] = {
            "to_host": self.new_stream("to_host"),
            "to_device": self.new_stream("to_device"),
        }

    def configure(self, **changes: Any) -> None:
        """Change some of the properties above, but for the last two, for later work.

        Raises
        ------
        ValueError
            A value makes no sense, or `memory` is less than what is allocated now; nothing was
            changed.
        TypeError
            There is no such property.
        """
        changed = replace(self.configuration, **changes)
        self._allocator.resize(changed.memory)
        self.configuration = changed

    @property
    def identity(self) -> str:
        """Name of the device."""
        return self._identity

    def __repr__(self) -> str:
        return f"<SimulatedDevice {self._identity}>"

    # -- memory ------------------------------------------------------------------------------------

    def memory_info(self) -> MemoryInfo:
        """Return free and total memory in bytes."""
        return self._allocator.info()

    def allocate(self, nbytes: int) -> SimulatedAllocation:
        """Return new memory, filled with :data:`FRESH` if checks are on."""
        return self._allocator.allocate(nbytes, fill=self.configuration.checks)

    def adopt(self, storage: HostArray) -> SimulatedAllocation:
        """Return new memory whose bytes are `storage`: so results come to the device.

        Parameters
        ----------
        storage
            One-dimensional bytes that no one else refers to.

        Raises
        ------
        OutOfMemory
            As :meth:`allocate`.
        """
        return self._allocator.adopt(storage)

    def borrow(self, identity: AllocationId, owner: object, token: object = None) -> SimulatedAllocation:
        """Return the allocation of an array: the port's memory and its own are the same."""
        if not isinstance(owner, SimulatedAllocation) or owner.identity != identity:
            raise ValueError(f"{owner!r} does not own {identity}")
        return self._own(owner)

    def free(self, allocation: Allocation) -> None:
        """Give memory up now; every array built on it fails from now on."""
        try:
            self._allocator.free(self._own(allocation))
        except DeviceError:
            self._count_violation()
            raise

    def _count_violation(self) -> None:
        with self._lock:
            self._schedule.violations += 1

    def _own(self, allocation: Allocation) -> SimulatedAllocation:
        if not isinstance(allocation, SimulatedAllocation) or allocation.device is not self:
            raise ValueError(f"{allocation!r} is not of {self!r}")
        return allocation

    def on_out_of_memory(self, hook: OutOfMemoryHook) -> Installation:
        """Add a hook to the chain; the oldest is asked first."""
        installation = Installation(self._allocator.hooks, hook)
        installation.reinstall()
        return installation

    def drop_hooks(self) -> None:
        """Forget all hooks, as a library does that sets up its memory anew. For tests."""
        self._allocator.hooks.clear()

    def pinned(self, nbytes: int) -> SimulatedPinned:
        """Return host memory that counts as pinned."""
        return SimulatedPinned(self._schedule, nbytes, fill=self.configuration.moves)

    # -- streams and copies ------------------------------------------------------------------------

    def new_stream(self, name: str) -> SimulatedStream:
        """Return a stream of its own. It lives as long as the device."""
        return self._schedule.new_stream(self, name)

    def stream(self, kind: StreamKind) -> SimulatedStream:
        """Return the device's own stream for copies in one direction."""
        return self._copy_streams[kind]

    def current_stream(self) -> SimulatedStream:
        """Return the stream on which this context computes; see :meth:`use_stream`."""
        return self.kernels.stream

    @contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[SimulatedStream]:
        """Compute on `stream` in this context (thread or coroutine) until the end of the block."""
        with self.kernels.on(self._ours(stream)):
            yield stream

    def _ours(self, stream: Stream) -> SimulatedStream:
        if not isinstance(stream, SimulatedStream) or stream.device is not self:
            raise ValueError(f"{stream!r} is not of {self!r}")
        return stream

    def fence(self, allocation: Allocation) -> SimulatedEvent:
        """Return an event for all that was enqueued for an allocation; see the port."""
        with self._lock:
            return self._schedule.after(self._own(allocation))

    def copy_to_host(
        self, allocation: Allocation, host_buffer: HostBuffer, stream: Stream, *, offset: int = 0
    ) -> SimulatedEvent:
        """Enqueue a copy to the host; see :meth:`Device.copy_to_host`."""
        host = as_bytes(host_buffer, writable=True)
        return self.enqueue_copy("to_host", self._own(allocation), _chunk(allocation, host, offset), host, stream)

    def copy_to_device(
        self, host_buffer: HostBuffer, allocation: Allocation, stream: Stream, *, offset: int = 0
    ) -> SimulatedEvent:
        """Enqueue a copy to the device; see :meth:`Device.copy_to_device`."""
        host = as_bytes(host_buffer, writable=False)
        return self.enqueue_copy("to_device", self._own(allocation), _chunk(allocation, host, offset), host, stream)

    def enqueue_copy(
        self, kind: StreamKind, allocation: SimulatedAllocation, layout: Layout, host: HostArray, stream: Stream
    ) -> SimulatedEvent:
        """Enqueue a copy between part of an allocation and a host array."""
        ours = self._ours(stream)
        configuration = self.configuration
        copy = Copy(kind, allocation, layout, host, checks=configuration.checks, moves=configuration.moves)
        with self._lock:
            replaces_pending = self._check_copy(copy, allocation, ours)
        # Between checking and enqueueing, as the lock must be free. An earlier copy may still need
        # what is there.
        if configuration.checks and not replaces_pending:
            copy.poison()
        with self._lock:
            self._check_copy(copy, allocation, ours)
            event = self._schedule.issue(ours, configuration.seconds(copy.nbytes), copy)
            self._schedule.mark(ours, allocation, f"a copy ({kind})", writes=kind == "to_device")
            allocation.copies.add(copy)
            self._copies[kind] += 1
            self._copied_bytes[kind] += copy.nbytes
        return event

    def _check_copy(self, copy: Copy, allocation: SimulatedAllocation, stream: SimulatedStream) -> bool:
        what = f"a copy ({copy.kind})"
        writes = copy.kind == "to_device"
        allocation.require()
        self._schedule.check(stream, allocation, what, writes=writes)
        shares_host = self._schedule.check_host(stream, copy, what)
        return bool(allocation.copies) if writes else shares_host

    def synchronize(self) -> None:
        """Wait for everything on all streams, and count it as observed."""
        with self._lock:
            streams = tuple(self._schedule.streams)
        problems = []
        for stream in streams:
            try:
                stream.synchronize()
            except DeviceError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    # -- looking at it -----------------------------------------------------------------------------

    def statistics(self) -> DeviceStatistics:
        """Return counters since the device was made."""
        with self._lock:
            heap = self._allocator.collected()
            return DeviceStatistics(
                live_bytes=heap.live_bytes,
                peak_bytes=heap.peak_bytes,
                live_allocations=len(heap.live),
                allocations=heap.allocations,
                copies_in_flight=len(self._schedule.in_flight()),
                copies_to_host=self._copies["to_host"],
                copies_to_device=self._copies["to_device"],
                bytes_to_host=self._copied_bytes["to_host"],
                bytes_to_device=self._copied_bytes["to_device"],
                pinned_bytes=self._schedule.pinned_bytes,
                kernels=self.kernels.count,
                out_of_memory=self._allocator.out_of_memory,
                failed_allocations=self._allocator.failed,
                violations=self._schedule.violations,
            )

    def reset_peak(self) -> None:
        """Let ``peak_bytes`` start again from what is allocated now."""
        with self._lock:
            heap = self._allocator.collected()
            heap.peak_bytes = heap.live_bytes

    def start_timeline(self) -> None:
        """Note from now on what is done when, forgetting what was noted."""
        with self._lock:
            self._schedule.timeline = []

    def stop_timeline(self) -> list[Span]:
        """Note nothing any more; return what was, in the order in which it was enqueued."""
        with self._lock:
            spans, self._schedule.timeline = self._schedule.timeline, None
            return spans or []

    def validate(self) -> None:
        """Raise AssertionError unless all indices agree with each other."""
        with self._lock:
            self._allocator.collected().validate()
            self._schedule.validate()

    def close(self) -> None:
        """Wait for copies in flight and drop the hooks. Allocations and arrays stay usable."""
        self.drop_hooks()
        self.synchronize()


def _chunk(allocation: Allocation, host: HostArray, offset: int) -> Layout:
    if offset < 0 or offset + host.nbytes > allocation.nbytes:
        raise ValueError(f"bytes {offset} to {offset + host.nbytes} are not within {allocation!r}")
    return Layout(offset, (host.nbytes,), (1,), "|u1", 1)
