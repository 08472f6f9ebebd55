"""CUDA: the driver of real GPUs, and finding out whether there is one.

The only module that imports libraries for GPUs, and it does so when a device is opened: streams, events and copies by
``cuda.bindings`` (which RMM needs anyway), memory by RMM, what is known of the whole device by NVML. None of these is
asked for anything that makes a CUDA context before there is something to allocate or copy.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from gpuspill.device.cuda.port import FailureCallback
from gpuspill.device.cuda.rmm_chain import RmmChain
from gpuspill.device.port import Device, DeviceError, MemoryInfo, StreamKind
from gpuspill.errors import ConfigError

if TYPE_CHECKING:
    from gpuspill.device.cuda.device import GpuDevice

__all__ = ["CudaDriver", "CudaStream", "NoDevice", "RmmMemory", "device", "missing_libraries"]

#: What has to be installed: module, and what to install to have it.
_LIBRARIES: Final = {
    "rmm": "rmm-cu12 or rmm-cu13",
    "cuda.bindings": "cuda-bindings",
    "pynvml": "nvidia-ml-py",
}


class NoDevice(ConfigError):
    """There is no GPU: nothing to complain about, unless one was asked for."""


class CudaStream:
    """A stream of the driver, as the libraries take it (``__cuda_stream__``)."""

    __slots__ = ("raw", "rmm")

    def __init__(self, raw: Any, rmm_stream: type) -> None:
        self.raw = raw
        self.rmm = rmm_stream(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self.raw)


class RmmMemory:
    """Memory of a resource of RMM, which is kept as long as it is needed to free it."""

    __slots__ = ("_driver", "_nbytes", "_resource", "address")

    def __init__(self, driver: CudaDriver, resource: Any, address: int, nbytes: int) -> None:
        self._driver = driver
        self._resource = resource
        self._nbytes = nbytes
        self.address = address

    def free(self) -> None:
        """Give it back."""
        # In a finaliser, perhaps at the end of the process, when CUDA is gone and all memory with it.
        with suppress(DeviceError), self._driver.current():
            # On the default stream, though it was allocated on ours: it is there, or on streams ordered with it, that
            # arrays on it may still be in use.
            self._resource.deallocate(self.address, self._nbytes)


class CudaDriver:
    """Drives one GPU; see :class:`gpuspill.device.cuda.port.Driver`.

    Parameters
    ----------
    ordinal
        Number of the device among those that the process sees.

    Raises
    ------
    NoDevice
        There is none.
    ConfigError
        It cannot be used; the message says why.
    """

    def __init__(self, ordinal: int = 0) -> None:
        import pynvml
        import rmm.mr
        from cuda.bindings import driver, runtime
        from rmm.pylibrmm.stream import Stream

        self._runtime: Any = runtime
        self._success = runtime.cudaError_t.cudaSuccess
        self._nvml: Any = pynvml
        self._rmm_stream = Stream
        self.ordinal = ordinal
        status, count = runtime.cudaGetDeviceCount()
        if status != self._success or not count:
            raise NoDevice(f"CUDA finds no device ({self._describe(status)})")
        if ordinal >= count:
            raise NoDevice(f"CUDA finds {count} devices, and no number {ordinal}")
        self._handle = self._find_in_nvml(driver)
        self._chain = RmmChain(rmm.mr, ordinal)
        if not self._has_memory():
            raise ConfigError(
                f"CUDA device {ordinal} has no memory of its own (it is integrated and shares the host's), so there is "
                "nothing to spill from it. Set gpuspill.device to none to say so"
            )

    @property
    def identity(self) -> str:
        """Name of the device."""
        return f"cuda:{self.ordinal}"

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes, of the instance if the device is shared by MIG."""
        try:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            raise DeviceError(f"NVML does not tell the memory of device {self.ordinal}: {error}") from error
        return MemoryInfo(int(found.free), int(found.total))

    def _has_memory(self) -> bool:
        runtime, nvml = self._runtime, self._nvml
        attribute = runtime.cudaDeviceAttr.cudaDevAttrIntegrated
        if self._checked(runtime.cudaDeviceGetAttribute(attribute, self.ordinal)):
            return False
        try:
            nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except nvml.NVMLError_NotSupported:
            return False
        return True

    def _find_in_nvml(self, driver: Any) -> Any:
        """Return NVML's handle. By the device's UUID, since CUDA and NVML do not number devices alike."""
        # Which says of an instance of a MIG device what the instance is; newer bindings have only one of the two.
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        status, cuda_device = driver.cuDeviceGet(self.ordinal)
        if status == driver.CUresult.CUDA_SUCCESS:
            status, found = ask(cuda_device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise ConfigError(f"CUDA does not tell the UUID of device {self.ordinal}: {status.name}")
        name = str(uuid.UUID(bytes=bytes(found.bytes)))
        nvml = self._nvml
        problem: Exception | None = None
        try:
            nvml.nvmlInit()
            for kind in ("GPU", "MIG"):
                try:
                    return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{name}".encode())
                except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument) as error:
                    problem = error
        except nvml.NVMLError as error:
            problem = error
        raise ConfigError(f"NVML does not know device {self.ordinal}, {name}: {problem}")

    # -- calls of CUDA -----------------------------------------------------------------------------

    def _describe(self, status: Any) -> str:
        _, text = self._runtime.cudaGetErrorString(status)
        return f"{status.name}: {text.decode() if isinstance(text, bytes) else text}"

    def _checked(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != self._success:
            raise DeviceError(f"CUDA reports on device {self.ordinal} {self._describe(status)}")
        return values[0] if values else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current device of the calling thread for the length of the block."""
        runtime = self._runtime
        before = self._checked(runtime.cudaGetDevice())
        if before == self.ordinal:
            yield
            return
        self._checked(runtime.cudaSetDevice(self.ordinal))
        try:
            yield
        finally:
            self._checked(runtime.cudaSetDevice(before))

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: CudaStream) -> RmmMemory:
        """Return memory of the resource in force, with all that others have stacked on it."""
        with self.current():
            resource = self._chain.resource()
            try:
                address = resource.allocate(nbytes, stream.rmm)
            except RuntimeError as error:
                raise DeviceError(f"RMM reports on device {self.ordinal}: {error}") from error
        return RmmMemory(self, resource, int(address), nbytes)

    def connected(self) -> bool:
        """Whether the callback would be called by allocations through RMM."""
        return self._chain.connected()

    def connect(self, callback: FailureCallback) -> None:
        """Have the callback called by all allocations through RMM."""
        with self.current():
            self._chain.connect(callback)

    def disconnect(self) -> None:
        """Call the callback no more."""
        self._chain.disconnect()

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> CudaStream:
        """Return a new stream."""
        runtime = self._runtime
        with self.current():
            raw = self._checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
        return CudaStream(raw, self._rmm_stream)

    def destroy_stream(self, stream: CudaStream) -> None:
        """Give a stream back."""
        with self.current():
            self._checked(self._runtime.cudaStreamDestroy(stream.raw))

    def record(self, stream: CudaStream | int) -> Any:
        """Return a new event; `stream` may be the address of one that a library made."""
        runtime = self._runtime
        raw = stream.raw if isinstance(stream, CudaStream) else stream
        with self.current():
            # Who waits sleeps: spinning would take a processor from the tasks.
            flags = runtime.cudaEventDisableTiming | runtime.cudaEventBlockingSync
            event = self._checked(runtime.cudaEventCreateWithFlags(flags))
            try:
                self._checked(runtime.cudaEventRecord(event, raw))
            except BaseException:
                runtime.cudaEventDestroy(event)
                raise
        return event

    def destroy_event(self, event: Any) -> None:
        """Give an event back; a failure does no harm."""
        self._runtime.cudaEventDestroy(event)

    def reached(self, event: Any) -> bool:
        """Whether all before the event is done."""
        runtime = self._runtime
        with self.current():
            (status,) = runtime.cudaEventQuery(event)
            if status == runtime.cudaError_t.cudaErrorNotReady:
                runtime.cudaGetLastError()  # it is none, and must not be taken for one by what is called next
                return False
            self._checked((status,))
        return True

    def wait(self, event: Any) -> None:
        """Wait for an event."""
        with self.current():
            self._checked(self._runtime.cudaEventSynchronize(event))

    def order(self, stream: CudaStream | int, event: Any) -> None:
        """Let later work of `stream` begin after the event."""
        raw = stream.raw if isinstance(stream, CudaStream) else stream
        with self.current():
            self._checked(self._runtime.cudaStreamWaitEvent(raw, event, 0))

    def synchronize(self) -> None:
        """Wait for all streams: those of libraries, of every thread, and ours."""
        with self.current():
            self._checked(self._runtime.cudaDeviceSynchronize())

    # -- copies ------------------------------------------------------------------------------------

    def copy(self, kind: StreamKind, device_address: int, host_address: int, nbytes: int, stream: CudaStream) -> None:
        """Enqueue a copy."""
        runtime = self._runtime
        kinds = runtime.cudaMemcpyKind
        if kind == "to_host":
            target, source, way = host_address, device_address, kinds.cudaMemcpyDeviceToHost
        else:
            target, source, way = device_address, host_address, kinds.cudaMemcpyHostToDevice
        with self.current():
            self._checked(runtime.cudaMemcpyAsync(target, source, nbytes, way, stream.raw))

    def pin(self, nbytes: int) -> int:
        """Return the address of new pinned memory, pinned for all devices of the process."""
        runtime = self._runtime
        with self.current():
            status, address = runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocPortable)
            if status == runtime.cudaError_t.cudaErrorMemoryAllocation:
                runtime.cudaGetLastError()
                raise MemoryError(f"the system does not pin {nbytes} bytes of memory")
            self._checked((status,))
        return int(address)

    def unpin(self, address: int) -> None:
        """Give pinned memory back; a failure does no harm."""
        self._runtime.cudaFreeHost(address)


# -- finding it ------------------------------------------------------------------------------------


def _driver_installed() -> bool:
    """Whether the system has NVIDIA's driver. Initialises nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _hidden() -> bool:
    """Whether the process is told to see no device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def missing_libraries() -> dict[str, str]:
    """Return the libraries that are not installed: module → what to install. Imports none of them."""

    def installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package it is in
            return False

    return {name: package for name, package in _LIBRARIES.items() if not installed(name)}


class _Opened:
    """The process's device, opened when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: GpuDevice | None = None

    def get(self) -> GpuDevice:
        with self._lock:
            if self._device is None:
                self._device = _open()
            return self._device


def _open() -> GpuDevice:
    if _hidden():
        raise NoDevice("CUDA_VISIBLE_DEVICES hides all devices from this process")
    if not _driver_installed():
        raise NoDevice("there is no NVIDIA driver on this machine (libcuda.so.1 was not found)")
    missing = missing_libraries()
    if missing:
        install = ", ".join(f"{name} (install {package})" for name, package in missing.items())
        raise ConfigError(
            f"this machine has a driver for NVIDIA GPUs, but no {install}, so nothing is spilled from a GPU. "
            "Set gpuspill.device to none if nothing should be"
        )
    from gpuspill.device.cuda.device import GpuDevice  # needs NumPy, which RMM needs as well

    try:
        return GpuDevice(CudaDriver())
    except ImportError as error:
        raise ConfigError(f"a library for GPUs is installed and cannot be imported: {error}") from error


# One a process, as there is one set of devices a process: workers that share the process share streams and staging.
_opened: Final = _Opened()


def device() -> Device:
    """Return the GPU of this process: the first that it sees, which is how dask-cuda gives each worker its own.

    Raises
    ------
    NoDevice
        There is none, or no driver.
    ConfigError
        There is one that cannot be used: a library is missing (the message says which), or it has no memory of its own.
    """
    return _opened.get()
