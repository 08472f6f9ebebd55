"""A GPU, by way of a driver: the device port for real hardware, without a word of CUDA.

What is here is bookkeeping: which copies are in flight, what they keep alive, who is asked when
memory runs out. All that touches the hardware is a call of the
:class:`~gpuspill.device.cuda.port.Driver`. The contract is at the head of
:mod:`gpuspill.device.port`; the decisions behind this module are in ``docs/design/cuda.md``.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gpuspill.device.cuda.hooks import GpuHooks
from gpuspill.device.cuda.port import DEFAULT_STREAM, Driver, DriverMemory, Handle
from gpuspill.device.cuda.release import Release, Run
from gpuspill.device.cuda.streams import GpuEvent, GpuPinned, GpuStream, PinnedBytes, PinnedMemory
from gpuspill.device.hooks import Installation
from gpuspill.device.host import HostArray, as_bytes
from gpuspill.device.port import (
    Allocation,
    AllocationId,
    CopyPlan,
    Device,
    DeviceError,
    DeviceStatistics,
    FreedUnderCopy,
    HostBuffer,
    MemoryInfo,
    OutOfMemory,
    OutOfMemoryHook,
    Stream,
    StreamKind,
    UseAfterFree,
)
from gpuspill.device.staging import probe
from gpuspill.ending import Ending

__all__ = ["GpuAllocation", "GpuDevice"]

#: What is assumed where nothing can be measured.
_UNPROBED: Final = CopyPlan(chunk_nbytes=8 * 2**20, staged=True)


class GpuAllocation(Allocation):
    """Memory of a GPU: the port's (`memory`) or borrowed (`owner`). The device makes it."""

    __slots__ = ("_address", "_device", "_ending", "_freed", "_held", "_nbytes", "memory", "serial")

    def __init__(
        self,
        device: GpuDevice,
        address: int,
        nbytes: int,
        serial: int,
        memory: DriverMemory | None,
        owner: object,
        token: object = None,
    ) -> None:
        self._device = device
        self._address = address
        self._nbytes = nbytes
        self.serial = serial
        self._held = [] if owner is None else [owner, owner if token is None else token]
        self._freed = False
        self.memory = memory
        # A copy in flight refers to the allocation, so there is none then.
        self._ending = Ending(
            partial(device.let_go, self._held) if memory is None else partial(device.give_back, memory, serial)
        )

    @property
    def device(self) -> GpuDevice:
        """The device it is on."""
        return self._device

    @property
    def address(self) -> int:
        """Base address."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes, as asked for."""
        return self._nbytes

    @property
    def owner(self) -> object:
        """The library's object that owns borrowed memory; else the allocation itself."""
        return self._held[0] if self._held else self

    @property
    def token(self) -> object:
        """What lives as long as the memory: the library's object, or the allocation."""
        return self._held[1] if self._held else self

    def require(self) -> None:
        """Raise UseAfterFree if it was freed."""
        if self._freed:
            raise UseAfterFree(f"{self!r} was freed")

    def take(self) -> DriverMemory:
        """Return the memory, for the caller to give back. The device's lock is held."""
        self.require()
        if self.memory is None:
            raise ValueError(f"{self!r} is borrowed: drop its arrays, and the library that owns it frees it")
        memory, self.memory, self._freed = self.memory, None, True
        self._ending.cancel()
        return memory

    def __repr__(self) -> str:
        return f"<GpuAllocation of {self._nbytes} bytes at {self._address:#x} on {self._device.identity}>"


class GpuDevice(Device):
    """A GPU.

    Parameters
    ----------
    driver
        How to get at it.
    plan
        How to copy between it and ordinary host memory. None: found out by trying, at the first
        copy.

    Attributes
    ----------
    hooks
        Whom to ask when an allocation does not fit.
    fence_by_stream
        Whether a copy waits for computations by an event of the default stream, and not for the
        whole device. The event covers all work except on streams that do not wait for the default
        stream and that are not named to :meth:`produced`.

    Notes
    -----
    Nothing is done on the device before the first allocation or copy: a process that does neither
    has no context there, and takes none of its memory.
    """

    def __init__(self, driver: Driver, *, plan: CopyPlan | None = None) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._plan = plan
        self._probing = threading.Lock()
        self._streams: dict[StreamKind, GpuStream] = {}
        self._release = Release()
        self.hooks = GpuHooks(driver, self._release.settle)
        self._gone: deque[int] = deque()  # freed, not yet counted
        self._serials = itertools.count(1)
        self._live: dict[int, int] = {}
        self._live_bytes = self._peak_bytes = self._allocations = 0
        self._out_of_memory = self._failed = 0
        self._copies = {"to_host": 0, "to_device": 0}
        self._copied_bytes = {"to_host": 0, "to_device": 0}
        self._pinned = PinnedBytes()
        self.fence_by_stream = True
        self._default = GpuStream(self, driver, DEFAULT_STREAM, "default")

    @property
    def identity(self) -> str:
        """Name of the device."""
        return self._driver.identity

    def __repr__(self) -> str:
        return f"<GpuDevice {self.identity}>"

    # -- memory ------------------------------------------------------------------------------------

    def memory_info(self) -> MemoryInfo:
        """Return free and total memory in bytes, of the device: what a pool keeps is not free."""
        return self._driver.memory_info()

    @property
    def uuid(self) -> str | None:
        """Name of the device on this machine."""
        return self._driver.uuid

    def device_of(self, address: int) -> str:
        """Return the name of the device that memory is on."""
        return self._driver.device_of(address)

    def allocate(self, nbytes: int) -> GpuAllocation:
        """Return new memory; see :meth:`Device.allocate`."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        # On the stream that is going to fill it: as far as that stream is concerned, the memory's
        # last user is done with it. A byte at least, so that it has an address of its own.
        stream = self.stream("to_device").handle
        with self.hooks.watching() as attempt:
            try:
                memory = self._driver.allocate(max(nbytes, 1), stream)
            except Exception as error:
                if attempt.asked or isinstance(error, MemoryError):
                    self._count_failure(fatal=isinstance(error, MemoryError))
                if attempt.raised is not None:
                    # On its way through C++ an exception loses its type.
                    raise attempt.raised from None
                if not isinstance(error, MemoryError):
                    raise
            else:
                if attempt.asked:
                    self._count_failure(fatal=False)
                return self._enter(memory, nbytes)
        free, total = self.memory_info()
        raise OutOfMemory(
            f"{self!r} is out of memory: {nbytes} bytes asked for, {free} of {total} bytes free on the device "
            f"(a pool may have less), {self.statistics().live_bytes} allocated here"
        )

    def _enter(self, memory: DriverMemory, nbytes: int) -> GpuAllocation:
        serial = next(self._serials)
        with self._lock:
            self._settle()
            self._live[serial] = nbytes
            self._allocations += 1
            self._live_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        return GpuAllocation(self, memory.address, nbytes, serial, memory, None)

    def _count_failure(self, *, fatal: bool) -> None:
        with self._lock:
            self._out_of_memory += 1
            self._failed += fatal

    def _settle(self) -> None:
        while self._gone:
            self._live_bytes -= self._live.pop(self._gone.popleft())

    def free(self, allocation: Allocation) -> None:
        """Give memory up now; see :meth:`Device.free`."""
        ours = self._own(allocation)
        copies = sum(event.allocation is ours for event in self._in_flight())
        if copies:
            raise FreedUnderCopy(
                f"{ours!r} cannot be freed: {copies} copies from or to it are in flight; observe their events first"
            )
        with self._lock:
            memory = ours.take()
        self.give_back(memory, ours.serial)

    def give_back(self, memory: DriverMemory, serial: int) -> None:
        """Free memory of the port's own. Takes no lock."""

        def free() -> None:
            memory.free()
            self._gone.append(serial)

        self._release.do(free)

    def let_go(self, things: list[Any]) -> None:
        """Let go of what keeps memory, where its library can free it; see :meth:`Device.let_go`."""
        self._release.do(partial(self._let_go, things))

    def _let_go(self, things: list[Any]) -> None:
        # At the end of the process CUDA may be gone, and all memory with it.
        with suppress(DeviceError), self._driver.current():
            things.clear()
        things.clear()

    def release_by(self, run: Run) -> Callable[[], None]:
        """See :meth:`Device.release_by`."""
        return self._release.by(run)

    def borrow(self, identity: AllocationId, owner: object, token: object = None) -> Allocation:
        """Return an allocation for a library's memory, or the one it was built on if ours."""
        if isinstance(owner, GpuAllocation) and owner.device is self and owner.identity == identity:
            return owner
        if identity.device != self.identity:
            raise ValueError(f"{identity} is not on {self!r}")
        return GpuAllocation(self, identity.address, identity.nbytes, 0, None, owner, token)

    def _own(self, allocation: Allocation) -> GpuAllocation:
        if not isinstance(allocation, GpuAllocation) or allocation.device is not self:
            raise ValueError(f"{allocation!r} is not of {self!r}")
        return allocation

    def on_out_of_memory(self, hook: OutOfMemoryHook) -> Installation:
        """Add a hook to the chain; the oldest is asked first."""
        installation = Installation(self.hooks, hook)
        installation.reinstall()
        return installation

    def pinned(self, nbytes: int) -> GpuPinned:
        """Return pinned host memory."""
        if nbytes < 0:
            raise ValueError(f"cannot pin {nbytes} bytes")
        return GpuPinned(PinnedMemory(self._driver, nbytes, self._pinned), self._in_flight)

    # -- streams and copies ------------------------------------------------------------------------

    def stream(self, kind: StreamKind) -> GpuStream:
        """Return the port's own stream for copies in one direction."""
        with self._lock:
            found = self._streams.get(kind)
            if found is None:
                # Under the lock, once: nothing can be done on the device before there is a stream.
                found = self._streams[kind] = GpuStream(self, self._driver, self._driver.create_stream(), kind)
            return found

    def producer(self, handle: Handle) -> GpuStream:
        """Return another library's stream, by the driver's handle, to wait for its work.

        ``copies.wait(device.producer(handle).record())`` takes the place of :meth:`synchronize`
        where the stream is known on which a library computed. The stream has to outlive what is
        returned.
        """
        return GpuStream(self, self._driver, handle, "producer")

    def produced(self, stream: Handle) -> GpuEvent | None:
        """Return an event of a library's stream; None if the driver cannot be asked.

        So it is while the stream is captured for a graph.
        """
        if not self.fence_by_stream:
            return None
        try:
            return self.producer(stream).record()
        except DeviceError:
            return None

    def fences(self, allocations: Sequence[Allocation]) -> Sequence[GpuEvent] | None:
        """Return one event for all of them, if that is enough; see `fence_by_stream`."""
        return [self._default.record()] if self.fence_by_stream else None

    def copy_to_host(
        self, allocation: Allocation, host_buffer: HostBuffer, stream: Stream, *, offset: int = 0
    ) -> GpuEvent:
        """Enqueue a copy to the host; see :meth:`Device.copy_to_host`."""
        return self._copy("to_host", allocation, as_bytes(host_buffer, writable=True), stream, offset)

    def copy_to_device(
        self, host_buffer: HostBuffer, allocation: Allocation, stream: Stream, *, offset: int = 0
    ) -> GpuEvent:
        """Enqueue a copy to the device; see :meth:`Device.copy_to_device`."""
        return self._copy("to_device", allocation, as_bytes(host_buffer, writable=False), stream, offset)

    def _copy(self, kind: StreamKind, allocation: Allocation, host: HostArray, stream: Stream, offset: int) -> GpuEvent:
        ours = self._own(allocation)
        if not isinstance(stream, GpuStream) or stream not in tuple(self._streams.values()):
            raise ValueError(f"{stream!r} is not one of the streams that {self!r} copies on")
        if offset < 0 or offset + host.nbytes > ours.nbytes:
            raise ValueError(f"bytes {offset} to {offset + host.nbytes} are not within {ours!r}")
        ours.require()
        event = stream.copy(kind, ours, offset, host)
        with self._lock:
            self._copies[kind] += 1
            self._copied_bytes[kind] += host.nbytes
        return event

    def _in_flight(self) -> list[GpuEvent]:
        """Look at the events of copies, and return those that are not known to be done."""
        with self._lock:
            streams = tuple(self._streams.values())
        return [event for stream in streams for event in stream.in_flight()]

    def synchronize(self) -> None:
        """Wait for everything on all streams, those of others included."""
        self._driver.synchronize()
        self._in_flight()

    def plan(self) -> CopyPlan:
        """Return how to copy: found out once, by trying, when the device has room for that."""
        if self._plan is not None:
            return self._plan
        # Not in the middle of a hook, where nothing can be allocated; nor in two threads at once.
        if self.hooks.asking or not self._probing.acquire(blocking=False):
            return _UNPROBED
        try:
            plan = probe(self)
        except (MemoryError, DeviceError):
            plan = _UNPROBED
        finally:
            self._probing.release()
        self._plan = plan
        return plan

    # -- looking at it -----------------------------------------------------------------------------

    def statistics(self) -> DeviceStatistics:
        """Return counters since the device was made, of what went through the port."""
        copies_in_flight = len(self._in_flight())
        with self._lock:
            self._settle()
            return DeviceStatistics(
                live_bytes=self._live_bytes,
                peak_bytes=self._peak_bytes,
                live_allocations=len(self._live),
                allocations=self._allocations,
                copies_in_flight=copies_in_flight,
                copies_to_host=self._copies["to_host"],
                copies_to_device=self._copies["to_device"],
                bytes_to_host=self._copied_bytes["to_host"],
                bytes_to_device=self._copied_bytes["to_device"],
                pinned_bytes=self._pinned.total,
                kernels=0,
                out_of_memory=self._out_of_memory,
                failed_allocations=self._failed,
                violations=0,
            )

    def validate(self) -> None:
        """Raise AssertionError unless the totals are right."""
        with self._lock:
            self._settle()
            assert self._live_bytes == sum(self._live.values()), (self._live_bytes, self._live)
            assert self._live_bytes <= self._peak_bytes
            assert self._pinned.total >= 0
            streams = tuple(self._streams.values())
        for stream in streams:
            stream.validate()

    def close(self) -> None:
        """Wait for copies, drop the hooks, give the streams back; new ones come if needed."""
        self.hooks.clear()
        with self._lock:
            streams, self._streams = tuple(self._streams.values()), {}
        for stream in streams:
            with suppress(DeviceError):
                stream.synchronize()
            stream.in_flight()
            stream.destroy()
