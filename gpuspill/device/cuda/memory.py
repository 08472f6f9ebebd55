"""Where the port's own memory on a GPU comes from: RMM, if in use, or the driver.

By RMM everybody's allocations that do not fit ask the hooks. Without it only those that are made
here do: libraries that allocate by themselves do not say when they run out.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from gpuspill.device.cuda.idle_pools import empty_pools
from gpuspill.device.cuda.port import DriverMemory, FailureCallback, Handle
from gpuspill.device.cuda.rmm_chain import RmmChain
from gpuspill.device.port import DeviceError

__all__ = ["CudaMemory", "OwnMemory", "RmmMemory"]


class Gpu(Protocol):
    """The GPU whose memory it is."""

    @property
    def ordinal(self) -> int:
        """Its number among those that the process sees."""

    def current(self) -> AbstractContextManager[None]:
        """Make its context the current one of the calling thread for the length of the block."""


class CudaMemory(Protocol):
    """Gives memory of one GPU; see :class:`gpuspill.device.cuda.port.Driver`."""

    def allocate(self, nbytes: int, stream: Handle) -> DriverMemory:
        """Return memory that may be used on `stream` at once."""

    def connected(self) -> bool:
        """Whether a callback would be called."""

    def connect(self, callback: FailureCallback) -> None:
        """Have a callback called when an allocation does not fit."""

    def disconnect(self) -> None:
        """Call it no more."""


class _RmmPiece:
    """Memory of a resource of RMM, which is kept as long as it is needed to free it."""

    __slots__ = ("_gpu", "_nbytes", "_resource", "address")

    def __init__(self, gpu: Gpu, resource: Any, address: int, nbytes: int) -> None:
        self._gpu = gpu
        self._resource = resource
        self._nbytes = nbytes
        self.address = address

    def free(self) -> None:
        """Give it back."""
        # In a finaliser, perhaps at the end of the process, when CUDA is gone and all memory with
        # it.
        with suppress(DeviceError), self._gpu.current():
            # On the default stream, though it was allocated on ours: it is there, or on streams
            # ordered with it, that arrays on it may still be in use.
            self._resource.deallocate(self.address, self._nbytes)


class RmmMemory:
    """Memory of RMM's resource in force.

    Parameters
    ----------
    gpu
        Whose memory it is.
    """

    def __init__(self, gpu: Gpu, rmm: Any) -> None:
        self._gpu = gpu
        self._chain = RmmChain(rmm.mr, gpu.ordinal)
        self._stream: Any = rmm.pylibrmm.stream.Stream

    @classmethod
    def find(cls, gpu: Gpu) -> RmmMemory | None:
        """Return it if the process has imported RMM; imports nothing."""
        rmm: Any = sys.modules.get("rmm")
        if "rmm.mr" not in sys.modules or "rmm.pylibrmm.stream" not in sys.modules or not hasattr(rmm, "mr"):
            return None
        return cls(gpu, rmm)

    def allocate(self, nbytes: int, stream: Handle) -> DriverMemory:
        """Return memory of the resource in force, with all that others have stacked on it."""
        with self._gpu.current():
            resource = self._chain.resource()
            try:
                address = resource.allocate(nbytes, self._stream(stream))
            except RuntimeError as error:
                raise DeviceError(f"RMM reports on device {self._gpu.ordinal}: {error}") from error
        return _RmmPiece(self._gpu, resource, int(address), nbytes)

    def connected(self) -> bool:
        """Whether the callback would be called by allocations through RMM."""
        return self._chain.connected()

    def connect(self, callback: FailureCallback) -> None:
        """Have the callback called by all allocations through RMM."""
        with self._gpu.current():
            self._chain.connect(callback)

    def disconnect(self) -> None:
        """Call the callback no more."""
        self._chain.disconnect()


class _OwnPiece:
    """Memory of the driver."""

    __slots__ = ("_memory", "address")

    def __init__(self, memory: OwnMemory, address: int) -> None:
        self._memory = memory
        self.address = address

    def free(self) -> None:
        """Give it back."""
        self._memory.give_back(self.address)


class OwnMemory:
    """Memory of the driver itself.

    Parameters
    ----------
    gpu
        Whose memory it is.
    cuda
        The module ``cuda.bindings.driver``.
    pools
        Whether the device has stream-ordered memory (``cuMemAllocAsync``), which is freed without
        waiting for it.
    """

    def __init__(self, gpu: Gpu, cuda: Any, *, pools: bool) -> None:
        self._gpu = gpu
        self._cuda = cuda
        self._pools = pools
        self._callback: FailureCallback | None = None

    def allocate(self, nbytes: int, stream: Handle) -> DriverMemory:
        """Return memory; asks the callback if there is none."""
        while True:
            address = self._try(nbytes, stream)
            if address is not None:
                return _OwnPiece(self, address)
            callback = self._callback
            if callback is None or not callback(nbytes, self._fits):
                raise MemoryError(f"CUDA has no {nbytes} bytes on device {self._gpu.ordinal}")

    def _try(self, nbytes: int, stream: Handle) -> int | None:
        cuda = self._cuda
        with self._gpu.current():
            if self._pools:
                status, address = cuda.cuMemAllocAsync(nbytes, 0 if stream is None else stream.raw)
            else:
                status, address = cuda.cuMemAlloc(nbytes)
        if status == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return None
        if status != cuda.CUresult.CUDA_SUCCESS:
            name = getattr(status, "name", status)
            raise DeviceError(f"CUDA reports on device {self._gpu.ordinal} {name}, asked for {nbytes} bytes")
        return int(address)

    def _fits(self, nbytes: int) -> bool:
        for attempt in range(2):
            address = self._try(nbytes, None)
            if address is not None:
                self.give_back(address)
                return True
            if attempt == 0 and not empty_pools():
                break
        return False

    def give_back(self, address: int) -> None:
        """Free memory once all enqueued on the default stream is done. No lock; never raises."""
        with suppress(DeviceError), self._gpu.current():
            if self._pools:
                self._cuda.cuMemFreeAsync(address, 0)
            else:
                self._cuda.cuMemFree(address)

    def connected(self) -> bool:
        """Whether there is a callback."""
        return self._callback is not None

    def connect(self, callback: FailureCallback) -> None:
        """Have a callback called by allocations that are made here and do not fit."""
        self._callback = callback

    def disconnect(self) -> None:
        """Call it no more."""
        self._callback = None
