"""The device port: what gpuspill needs of a device, and what both sides promise.

An adapter implements :class:`Device` and its companions once per kind of device. Everything above
(the manager and its engine) is written against this page, and
``gpuspill.testing.devices.DeviceTests`` is this page as tests.

Words
-----
*Allocation*: one piece of device memory that is freed as a whole. *Array*: an object of some
library that looks at (part of) an allocation; several arrays may share one. *Stream*: a queue of
work on the device, done in order. *Copy*: bytes moved between an allocation and a host buffer; it
is enqueued on a stream and done later. *Event*: a point in a stream. *Producer*: the code that
filled an allocation, on a stream of its own, often an unknown one. *Observed*: a host thread
learnt, from an event, a stream or the device, that work is done. Time passing observes nothing.

Ownership
---------
An :class:`Allocation` owns its memory and is kept alive by references: that of its allocating code
and those of every array built on it. The memory is freed when the last of them goes.
:meth:`Device.free` gives it up earlier and is for the one who allocated it and built no array on
it, or dropped them all (a restore that failed half way). Freeing twice is an error, and so is any
use afterwards. Memory that a library allocated (an array made by a user's task) is borrowed
(:meth:`Device.borrow`) and never freed through the port: drop its arrays, and the library frees it.

Identity
--------
An allocation is told by (device, base address, size), never by the ``id`` of a Python object: ids
are reused, and so are addresses, but not while the allocation lives. An allocation of no bytes has
an identity of its own, too.

Aliasing
--------
Arrays on one allocation share bytes: what is written through one is seen through all. A spill
copies the allocation, once, and not the arrays; a restore makes one allocation and rebuilds every
array on it with the layout it had, so sharing survives. Nothing here copies on the device: a device
that is full has no room for that.

Streams
-------
The port's copies run on streams that belong to it, one per direction (:meth:`Device.stream`), which
do not block with the streams that others compute on. Copies of one stream are done in the order in
which they were enqueued; streams are not ordered with each other unless someone orders them. The
two directions run at the same time.

Ordering
--------
Enqueueing says nothing about when. Three things order work B after work A: both are on one stream;
the stream of B waited for an event of A's stream that was recorded after A (:meth:`Stream.wait`,
which blocks no thread); or a host thread observed that A is done before it enqueued B. **A copy
from an allocation must be ordered after its producer.** Where the producer's stream is known,
record an event there (:meth:`Device.produced`); where it is not, which is the rule for what tasks
return, :meth:`Device.fences` has events that cover all producers that it can know of, or else
:meth:`Device.synchronize` observes everything. A copy *into* an allocation must be ordered after
every use of the bytes it replaces.

Completion
----------
The destination of a copy holds nothing useful until its event was observed: :meth:`Event.done`
returned True or :meth:`Event.wait` did. Until then the destination must not be read, and neither
end be changed, freed or used for another copy that is not ordered after this one. An event that is
observed covers all that its stream did before it, and all that this was ordered after.

Host buffers
------------
Any C-contiguous object with the buffer protocol; writable if it is a destination. Its address and
size must not change while a copy is in flight; the copy refers to it until the event was observed.
Pageable memory is accepted and may be slower or make the call block; :meth:`Device.pinned` gives
memory for which neither holds, which is scarce and slow to get: keep it and use it again.

Two-phase release
-----------------
A spill is: order after the producer, copy, *observe the event*, check, and only then drop the
arrays and the allocation. The destination is not a copy before the event was observed, so the
device memory stays authoritative until then. A restore is: allocate, copy, *observe the event*, and
only then build arrays on it and hand them out; the lower tier's copy stays authoritative until
then. An allocation that is dropped or freed while a copy of it is in flight is an error of the
caller. An adapter raises :class:`FreedUnderCopy` where it can tell (:meth:`Device.free` always can)
and never lets such a copy pass for a good one.

Out of memory
-------------
An allocation that does not fit, by the port or by a library, calls the hooks
(:meth:`Device.on_out_of_memory`) with the bytes asked for and the number of times this allocation
was retried. A hook that returns True says "I freed something, try again"; False passes to the next;
when all have passed, ``MemoryError`` is raised (:class:`OutOfMemory` by the port). An exception in
a hook reaches the allocating code. Hooks form a chain with those that other libraries installed;
their order is not promised. The installer of a hook checks from time to time that it is still
installed: a library that sets up its memory anew drops it.

The hook runs in the thread that allocates, in the middle of whatever that thread does, with no lock
of the port held; several threads may be in it at once. It may copy, synchronise and free. It should
not allocate device memory: an allocation that fails inside a hook does **not** call hooks again, it
raises at once. It must not wait for a move that the allocating thread itself is doing.

Threads and locks
-----------------
Every method may be called from any thread. None is called with a lock of the caller held that a
hook could want. The port holds no lock of its own across a copy, a hook, or an allocation of host
memory. Enqueueing returns without waiting for the device, as far as the host buffer allows. The
port has no threads, and no callbacks on completion. Waiting for an event cannot be cancelled; give
it a timeout and look again.

Errors
------
``ValueError`` and ``TypeError``: an argument makes no sense (a size below zero, a copy out of
bounds, a buffer that is read-only or not contiguous); nothing was enqueued. :class:`OutOfMemory`:
see above; nothing was allocated. :class:`DeviceError` and what derives from it: the contract was
broken, or the device failed; the data of the copy concerned is not valid and the other copy stays
authoritative. Reading them as a failed move is right.

Letting go
----------
What keeps a library's memory is let go of by :meth:`Device.let_go`: the library frees the memory
then, in that thread, which a library may want to be prepared for that, and which may have to wait
for the device. So on the thread of an event loop it is left to another thread, if one was lent
(:meth:`Device.release_by`).

Not promised
------------
That misuse is detected on real devices (it is, on the simulated one); that memory freed by us is
what :meth:`Device.memory_info` reports as free (pools keep memory; others use the device); fairness
between streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from gpuspill.device.values import (
    AllocationId,
    CopyPlan,
    DeviceError,
    DeviceStatistics,
    FreedUnderCopy,
    Layout,
    MemoryInfo,
    OutOfMemory,
    SourceChanged,
    UnorderedAccess,
    UseAfterFree,
)

__all__ = [
    "Allocation",
    "AllocationId",
    "CopyPlan",
    "Device",
    "DeviceError",
    "DeviceStatistics",
    "Event",
    "FreedUnderCopy",
    "HookInstallation",
    "HostBuffer",
    "Layout",
    "MemoryInfo",
    "OutOfMemory",
    "OutOfMemoryHook",
    "PinnedBuffer",
    "SourceChanged",
    "Stream",
    "StreamKind",
    "UnorderedAccess",
    "UseAfterFree",
]

HostBuffer: TypeAlias = Any
"""Any C-contiguous object with the buffer protocol."""

StreamKind: TypeAlias = Literal["to_host", "to_device"]
"""Direction of a copy stream."""

OutOfMemoryHook: TypeAlias = Callable[[int, int], bool]
"""``hook(nbytes, retries) -> bool``: bytes asked for, retries so far; True: try again."""


class Allocation(ABC):
    """Device memory; freed with the last reference. Weakly referencable; compares by identity."""

    __slots__ = ("__weakref__",)

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device it is on."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Base address."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes, as asked for."""

    @property
    def identity(self) -> AllocationId:
        """What tells it from all others that live at the same time."""
        return AllocationId(self.device.identity, self.address, self.nbytes)

    @property
    def owner(self) -> object:
        """The library's object that owns the memory, if any; else the allocation itself."""
        return self

    @property
    def token(self) -> object:
        """What lives exactly as long as the memory: another object, or the allocation itself."""
        return self


class Event(ABC):
    """A point in a stream."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before it is done; then it counts as observed. Never blocks.

        Raises
        ------
        DeviceError
            It is done, but something before it went wrong.
        """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until everything before it is done, which is thereby observed.

        Parameters
        ----------
        timeout
            Seconds to wait at most. None: as long as it takes.

        Returns
        -------
        bool
            False if the time was up first.

        Raises
        ------
        DeviceError
            Something before it went wrong.
        """

    def synchronize(self) -> None:
        """Block the calling thread until everything before it is done; as :meth:`wait`."""
        self.wait()


class Stream(ABC):
    """A queue of work on a device, done in order."""

    __slots__ = ()

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device it is on."""

    @abstractmethod
    def record(self) -> Event:
        """Return an event for everything enqueued so far. Never blocks on the device."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Order all later work of this stream after `event`, of any stream. Never blocks."""

    def synchronize(self) -> None:
        """Block until everything enqueued so far is done; raises as :meth:`Event.wait`."""
        self.record().wait()


class PinnedBuffer(ABC):
    """Host memory that is copied from and to at full speed. A context manager that releases it."""

    __slots__ = ()

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """The memory: one dimension, format ``"B"``, writable. ValueError after :meth:`release`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    @abstractmethod
    def release(self) -> None:
        """Give it back. Idempotent.

        Raises
        ------
        FreedUnderCopy
            A copy from or to it is in flight (where that can be told); it was not released.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class HookInstallation(ABC):
    """A hook's place in the chain."""

    __slots__ = ()

    @property
    @abstractmethod
    def installed(self) -> bool:
        """Whether the hook would be asked now: not uninstalled, nor dropped by a library."""

    @abstractmethod
    def reinstall(self) -> None:
        """Install the hook again unless it is installed. Thread-safe; never twice."""

    @abstractmethod
    def uninstall(self) -> None:
        """Take the hook out, and leave the others. Idempotent. Waits for no call."""


class Device(ABC):
    """One device. All methods are thread-safe. The contract is at the head of this module."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Name of the device, unique in the process: first part of its allocations' identity."""

    @property
    def uuid(self) -> str | None:
        """Name of the device on this machine, for any process; None if it is private."""
        return None

    def device_of(self, address: int) -> str:
        """Return the name of the device of an address: this one, if it is the only one.

        For libraries whose arrays do not say. Another name if the memory is on no device.
        """
        return self.identity

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return free and total memory in bytes. Cheap enough to ask for once per move."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Allocation:
        """Return new memory of undefined content.

        May call the out-of-memory hooks, in this thread, and so block for as long as they do.

        Parameters
        ----------
        nbytes
            Size in bytes; 0 is allowed.

        Raises
        ------
        OutOfMemory
            It does not fit and no hook could make room.
        ValueError
            `nbytes` is negative.
        """

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Give memory from :meth:`allocate` up now. No array may be built on it any more.

        Raises
        ------
        FreedUnderCopy
            A copy from or to it is in flight; it was not freed.
        UseAfterFree
            It was freed before.
        """

    @abstractmethod
    def borrow(self, identity: AllocationId, owner: object, token: object = None) -> Allocation:
        """Return an allocation for memory that a library allocated, so as to copy it.

        It keeps `owner`, which keeps the memory, and must not be given to :meth:`free`.

        Parameters
        ----------
        identity
            The memory.
        owner
            What keeps the memory alive.
        token
            What lives exactly as long as the memory. Default: the owner.

        Raises
        ------
        ValueError
            It is not of this device.
        """

    def let_go(self, things: list[Any]) -> None:
        """Empty a list of what keeps memory, so that it is freed if these were the last references.

        Called by finalisers, in any thread and in the middle of anything. Never raises.
        """
        things.clear()

    def release_by(self, run: Callable[[Callable[[], None]], object]) -> Callable[[], None]:
        """Have `run` free, on its own thread, what an event loop's thread lets go of.

        Parameters
        ----------
        run
            Runs a function soon; may itself be called by finalisers.

        Returns
        -------
        callable
            Ends that.
        """
        return lambda: None

    @abstractmethod
    def stream(self, kind: StreamKind) -> Stream:
        """Return the port's own stream for copies in one direction; the same one at each call."""

    def fence(self, allocation: Allocation) -> Event | None:
        """Return an event for all that was enqueued so far for an allocation, on any stream.

        Never blocks. None, which is the default, where the device does not know: synchronise with
        all of it instead.
        """
        return None

    def produced(self, stream: Any) -> Event | None:
        """Return an event for all that was enqueued so far on any library's stream.

        Never blocks. None, which is the default, where that cannot be had.
        """
        return None

    def fences(self, allocations: Sequence[Allocation]) -> Sequence[Event] | None:
        """Return events for all that was enqueued so far for some allocations.

        None where the device does not know of one of them.
        """
        found = []
        for allocation in allocations:
            event = self.fence(allocation)
            if event is None:
                return None
            found.append(event)
        return found

    @abstractmethod
    def copy_to_host(
        self, allocation: Allocation, host_buffer: HostBuffer, stream: Stream, *, offset: int = 0
    ) -> Event:
        """Enqueue a copy of ``allocation[offset : offset + len(host_buffer)]`` into `host_buffer`.

        The caller keeps both ends alive and unchanged until the event was observed.

        Parameters
        ----------
        allocation
            Source; of this device.
        host_buffer
            Destination; its size says how much is copied.
        stream
            Stream of this device to enqueue on.
        offset
            First byte of the source.

        Returns
        -------
        Event
            Of this copy.

        Raises
        ------
        ValueError, TypeError
            Out of bounds, read-only, not contiguous, of another device.
        UnorderedAccess
            The copy is not ordered after the producer, where that can be told.
        UseAfterFree
            The allocation was freed.
        """

    @abstractmethod
    def copy_to_device(
        self, host_buffer: HostBuffer, allocation: Allocation, stream: Stream, *, offset: int = 0
    ) -> Event:
        """Enqueue a copy of `host_buffer` into ``allocation[offset : offset + len(host_buffer)]``.

        Parameters, result and errors as :meth:`copy_to_host`; the host buffer may be read-only.
        """

    def copy_on_host(self, target: Any, source: Any) -> None:
        """Copy one array of host bytes to another, without the interpreter's lock.

        No device takes part. It is here for those that model what it costs.
        """
        import numpy as np  # which workers without a device can do without

        np.copyto(target, source)

    @abstractmethod
    def synchronize(self) -> None:
        """Block until everything on any stream of the device is done, and thereby observed.

        Raises
        ------
        DeviceError
            An error occurred that no caller has observed yet.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> PinnedBuffer:
        """Return pinned host memory. Slow: keep it and use it again.

        Raises
        ------
        MemoryError
            The system gives no more pinned memory.
        """

    def plan(self) -> CopyPlan:
        """Return how to copy much at once from and to ordinary memory. May try first."""
        return CopyPlan()

    @abstractmethod
    def on_out_of_memory(self, hook: OutOfMemoryHook) -> HookInstallation:
        """Add a hook to the chain that is asked when an allocation does not fit."""

    @abstractmethod
    def statistics(self) -> DeviceStatistics:
        """Return counters since the device was made."""

    @abstractmethod
    def validate(self) -> None:
        """Raise AssertionError unless the port's indices agree. For tests; may be slow."""

    @abstractmethod
    def close(self) -> None:
        """Wait for copies, take out the hooks and give the streams back. Idempotent.

        Called by the code that made the device object; others that share it take out their own
        hooks. Allocations live on for as long as they are referenced.
        """
