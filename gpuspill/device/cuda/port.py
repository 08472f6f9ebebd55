"""The boundary between a GPU's device object and the libraries that drive it.

Everything that :class:`gpuspill.device.cuda.device.GpuDevice` needs of CUDA, RMM and NVML, and
nothing else: so that all of its logic runs, and is tested, without any of them.
:class:`gpuspill.device.cuda.driver.CudaDriver` is the real one.

All methods may be called from any thread, whatever device is current there, and leave that as it
was. None of them holds the interpreter's lock while it waits or copies. Handles (of streams and
events) mean something to the driver only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias

from gpuspill.device.port import MemoryInfo, StreamKind

__all__ = ["DEFAULT_STREAM", "Driver", "DriverMemory", "FailureCallback", "Fits", "Handle"]

Handle: TypeAlias = Any
"""A stream or an event of the driver."""

DEFAULT_STREAM: Final = 1
"""The default stream (``CU_STREAM_LEGACY``): it and all blocking streams wait for each other."""

Fits: TypeAlias = Callable[[int], bool]
"""``fits(nbytes) -> bool``: whether an allocation fits now. Tries it, without the callback."""

FailureCallback: TypeAlias = Callable[[int, Fits], bool]
"""``callback(nbytes, fits) -> bool``: so many bytes do not fit; True: try again."""


class DriverMemory(Protocol):
    """A piece of device memory."""

    @property
    def address(self) -> int:
        """Base address."""

    def free(self) -> None:
        """Give it back, once. Takes no lock of Python's: finalisers call it.

        The memory may be used again as soon as all work is done that is enqueued on the default
        stream now, or on a stream that is ordered with it.
        """


class Driver(Protocol):
    """One device. Errors are :class:`~gpuspill.device.port.DeviceError` unless said otherwise."""

    @property
    def identity(self) -> str:
        """Name of the device: ``"cuda:0"``."""

    @property
    def uuid(self) -> str | None:
        """Name of the device on this machine, for any process; None if it is private."""

    @property
    def description(self) -> str:
        """The device, whose answers are used, and what is left alone: for the log."""

    def device_of(self, address: int) -> str:
        """Return the name of the device that memory is on; another name if it is on none."""

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes of the device."""

    def current(self) -> AbstractContextManager[None]:
        """Prepare the calling thread for libraries that free memory, during the block."""

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: Handle) -> DriverMemory:
        """Return memory to use on `stream` at once. MemoryError if the callback frees none."""

    def connected(self) -> bool:
        """Whether a callback given to :meth:`connect` would be called now. Cheap."""

    def connect(self, callback: FailureCallback) -> None:
        """Have `callback` called, in the allocating thread, by all allocations that do not fit."""

    def disconnect(self) -> None:
        """Call the callback no more."""

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> Handle:
        """Return a new stream that does not wait for the default one, nor the other way round."""

    def destroy_stream(self, stream: Handle) -> None:
        """Give a stream back once its work is done. Does not wait for that."""

    def record(self, stream: Handle) -> Handle:
        """Return a new event for all that was enqueued on `stream`."""

    def destroy_event(self, event: Handle) -> None:
        """Give an event back. Takes no lock of Python's."""

    def reached(self, event: Handle) -> bool:
        """Whether all before the event is done."""

    def wait(self, event: Handle) -> None:
        """Wait until all before the event is done. The thread sleeps."""

    def order(self, stream: Handle, event: Handle) -> None:
        """Let later work of `stream` begin after the event."""

    def synchronize(self) -> None:
        """Wait until all streams of the device are done, those of other libraries included."""

    # -- copies ------------------------------------------------------------------------------------

    def copy(self, kind: StreamKind, device_address: int, host_address: int, nbytes: int, stream: Handle) -> None:
        """Enqueue a copy. With pageable host memory it may block for as long as the copy takes."""

    def pin(self, nbytes: int) -> int:
        """Return the address of new pinned host memory. MemoryError if the system gives none."""

    def unpin(self, address: int) -> None:
        """Give pinned memory back. Takes no lock of Python's."""
