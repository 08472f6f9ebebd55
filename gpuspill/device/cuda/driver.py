"""CUDA's driver: a real GPU below :class:`gpuspill.device.cuda.device.GpuDevice`.

Streams, events, copies and pinned memory by ``cuda.bindings.driver``, by documented functions only.
Memory by RMM where the process uses it (:mod:`gpuspill.device.cuda.memory`), else by the driver
itself. What is known of the whole device is NVML's answer where it is installed, else the driver's.
Nothing here makes a context before there is something to allocate or copy.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from gpuspill.device.cuda.memory import CudaMemory, OwnMemory, RmmMemory
from gpuspill.device.cuda.port import DriverMemory, FailureCallback
from gpuspill.device.port import DeviceError, MemoryInfo, StreamKind
from gpuspill.errors import ConfigError

__all__ = ["CudaDriver", "CudaStream", "NoDevice", "Nvml"]

#: From here on memory is to be of huge pages.
_HUGE_PAGE: Final = 2 * 2**20
#: What to do about what the driver says when it is initialised.
_ADVICE: Final = {
    "CUDA_ERROR_SYSTEM_NOT_READY": "a service of the driver is not up: on machines with NVSwitch, the fabric manager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda.so.1 and the kernel's module are of different versions; the machine "
    "has to be restarted after an update of the driver",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "CUDA's compatibility package does not work on this GPU; install a "
    "newer driver",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU for itself",
}


class NoDevice(ConfigError):
    """There is no GPU: nothing to complain about, unless one was asked for."""


class CudaStream:
    """A stream of the driver, as the libraries take it (``__cuda_stream__``)."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self.raw)


class CudaDriver:
    """Drives one GPU; see :class:`gpuspill.device.cuda.port.Driver`.

    Parameters
    ----------
    ordinal
        Number of the device among those that the process sees.

    Attributes
    ----------
    count
        How many devices the process sees.

    Raises
    ------
    NoDevice
        There is none.
    ConfigError
        It cannot be used; the message says why.

    Notes
    -----
    Thread-safe. The device's primary context, which libraries use as well, is retained with the
    first call that needs it, and made current in the calling thread for the length of each call.
    """

    def __init__(self, ordinal: int = 0) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self.ordinal = ordinal
        self.count = self._initialise()
        if ordinal >= self.count:
            raise NoDevice(f"CUDA finds {self.count} devices, and no number {ordinal}")
        self._device = self._checked(driver.cuDeviceGet(ordinal))
        self._lock = threading.Lock()
        self._context: Any = None
        if self._attribute("INTEGRATED"):
            raise ConfigError(
                f"CUDA device {ordinal} has no memory of its own (it is integrated and shares the host's), so there is "
                "nothing to spill from it. Set gpuspill.device to none to say so"
            )
        self._total = int(self._checked(driver.cuDeviceTotalMem(self._device)))
        self._nvml = Nvml.find(self.uuid)
        self._rmm: RmmMemory | None = None
        self._registered: dict[int, mmap.mmap] = {}
        self._own = OwnMemory(self, driver, pools=bool(self._attribute("MEMORY_POOLS_SUPPORTED")))

    def _initialise(self) -> int:
        """Return the number of devices."""
        driver = self._cuda
        status, version = driver.cuDriverGetVersion()
        needed = int(driver.CUDA_VERSION)
        if status == self._success and version // 1000 < needed // 1000:
            raise ConfigError(
                f"the NVIDIA driver is for CUDA {version // 1000}.{version % 1000 // 10}, and the installed "
                f"cuda-bindings for CUDA {needed // 1000}: install a newer driver, or libraries for CUDA "
                f"{version // 1000} (pip install 'gpuspill[cuda{version // 1000}]')"
            )
        (status,) = driver.cuInit(0)
        if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            raise NoDevice(f"CUDA finds no device ({status.name})")
        if status != self._success:
            name = self._name(status)
            raise ConfigError(f"the NVIDIA driver does not start: {name}: {_ADVICE.get(name, self._text(status))}")
        count = int(self._checked(driver.cuDeviceGetCount()))
        if not count:
            raise NoDevice("CUDA finds no device")
        return count

    def _attribute(self, name: str) -> int:
        driver = self._cuda
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._checked(driver.cuDeviceGetAttribute(attribute, self._device)))

    @property
    def uuid(self) -> str:
        """UUID of the device, or of the instance of a shared one."""
        driver = self._cuda
        # Which says of an instance of a MIG device what the instance is; newer bindings have only
        # one of the two.
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        return str(uuid.UUID(bytes=bytes(self._checked(ask(self._device)).bytes)))

    @property
    def identity(self) -> str:
        """Name of the device."""
        return f"cuda:{self.ordinal}"

    @property
    def description(self) -> str:
        """The device, whose answers are used, and what is left alone: for the log."""
        parts = [f"{self.identity}, {self._total:,} bytes"]
        if self._nvml is None:
            parts.append(
                "NVML is not used (nvidia-ml-py is not installed, or does not know the device): free memory is what "
                "the driver says"
            )
        if self.count > 1:
            parts.append(
                f"{self.count} devices are in sight, and arrays on the others are left alone: give each worker its own "
                "by CUDA_VISIBLE_DEVICES, as dask-cuda does"
            )
        return "; ".join(parts)

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes, of the instance if the device is shared by MIG.

        Without NVML, and before the process has a context there, all is said to be free.
        """
        if self._nvml is not None:
            return self._nvml.memory_info()
        driver = self._cuda
        if self._context is None and not self._checked(driver.cuDevicePrimaryCtxGetState(self._device))[1]:
            return MemoryInfo(self._total, self._total)
        with self.current():
            free, total = self._checked(driver.cuMemGetInfo())
        return MemoryInfo(int(free), int(total))

    def device_of(self, address: int) -> str:
        """Return the name of the device that memory is on, ``"unknown"`` if it is on none."""
        if self.count == 1:
            return self.identity
        driver = self._cuda
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        status, ordinal = driver.cuPointerGetAttribute(attribute, address)
        return f"cuda:{int(ordinal)}" if status == self._success else "unknown"

    # -- calls of CUDA -----------------------------------------------------------------------------

    def _name(self, status: Any) -> str:
        # A driver newer than the bindings may return what they have no name for.
        return str(getattr(status, "name", status))

    def _text(self, status: Any) -> str:
        _, text = self._cuda.cuGetErrorString(status)
        return text.decode() if isinstance(text, bytes) else str(text)

    def _checked(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != self._success:
            raise DeviceError(f"CUDA reports on device {self.ordinal} {self._name(status)}: {self._text(status)}")
        return (values[0] if len(values) == 1 else values) if values else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in the calling thread during the block."""
        driver = self._cuda
        context = self._context or self._retain()
        if int(self._checked(driver.cuCtxGetCurrent())) == int(context):
            yield
            return
        self._checked(driver.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            self._checked(driver.cuCtxPopCurrent())

    def _retain(self) -> Any:
        with self._lock:
            if self._context is None:
                self._context = self._checked(self._cuda.cuDevicePrimaryCtxRetain(self._device))
        return self._context

    # -- memory ------------------------------------------------------------------------------------

    def _memory(self) -> CudaMemory:
        """Return whose memory is allocated: RMM's once the process has imported it."""
        if self._rmm is None:
            self._rmm = RmmMemory.find(self)
        return self._own if self._rmm is None else self._rmm

    def allocate(self, nbytes: int, stream: CudaStream) -> DriverMemory:
        """Return memory of RMM's resource in force, or of the driver."""
        return self._memory().allocate(nbytes, stream)

    def connected(self) -> bool:
        """Whether the callback would be called: by RMM's allocations, else by those made here."""
        return self._memory().connected()

    def connect(self, callback: FailureCallback) -> None:
        """Have the callback called by allocations that do not fit."""
        self._memory().connect(callback)

    def disconnect(self) -> None:
        """Call the callback no more."""
        self._own.disconnect()
        if self._rmm is not None:
            self._rmm.disconnect()

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> CudaStream:
        """Return a new stream."""
        flag = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self.current():
            return CudaStream(self._checked(self._cuda.cuStreamCreate(int(flag))))

    def destroy_stream(self, stream: CudaStream) -> None:
        """Give a stream back."""
        with self.current():
            self._checked(self._cuda.cuStreamDestroy(stream.raw))

    def record(self, stream: CudaStream | int) -> Any:
        """Return a new event; `stream` may be the address of one that a library made."""
        driver = self._cuda
        raw = stream.raw if isinstance(stream, CudaStream) else stream
        with self.current():
            # Who waits sleeps: spinning would take a processor from the tasks.
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING | driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC
            event = self._checked(driver.cuEventCreate(int(flags)))
            try:
                self._checked(driver.cuEventRecord(event, raw))
            except BaseException:
                driver.cuEventDestroy(event)
                raise
        return event

    def destroy_event(self, event: Any) -> None:
        """Give an event back; a failure does no harm."""
        self._cuda.cuEventDestroy(event)

    def reached(self, event: Any) -> bool:
        """Whether all before the event is done."""
        driver = self._cuda
        (status,) = driver.cuEventQuery(event)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._checked((status,))
        return True

    def wait(self, event: Any) -> None:
        """Wait for an event."""
        self._checked(self._cuda.cuEventSynchronize(event))

    def order(self, stream: CudaStream | int, event: Any) -> None:
        """Let later work of `stream` begin after the event."""
        raw = stream.raw if isinstance(stream, CudaStream) else stream
        with self.current():
            self._checked(self._cuda.cuStreamWaitEvent(raw, event, 0))

    def synchronize(self) -> None:
        """Wait for all streams: those of libraries, of every thread, and ours."""
        with self.current():
            self._checked(self._cuda.cuCtxSynchronize())

    # -- copies ------------------------------------------------------------------------------------

    def copy(self, kind: StreamKind, device_address: int, host_address: int, nbytes: int, stream: CudaStream) -> None:
        """Enqueue a copy."""
        driver = self._cuda
        with self.current():
            if kind == "to_host":
                self._checked(driver.cuMemcpyDtoHAsync(host_address, device_address, nbytes, stream.raw))
            else:
                self._checked(driver.cuMemcpyHtoDAsync(device_address, host_address, nbytes, stream.raw))

    def pin(self, nbytes: int) -> int:
        """Return the address of new pinned memory, pinned for all devices of the process.

        It is memory of the process as any other, of huge pages where the system has some, so it
        counts as such. Where that cannot be pinned the driver allocates it.
        """
        driver = self._cuda
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            # Advice: a kernel without huge pages says no, and nothing is lost.
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with self.current():
            (status,) = driver.cuMemHostRegister(address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
            if status == driver.CUresult.CUDA_SUCCESS:
                self._registered[address] = mapping
                return address
            status, address = driver.cuMemHostAlloc(nbytes, driver.CU_MEMHOSTALLOC_PORTABLE)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f"the system does not pin {nbytes} bytes of memory")
        self._checked((status,))
        return int(address)

    def unpin(self, address: int) -> None:
        """Give pinned memory back; a failure does no harm."""
        mapping = self._registered.pop(address, None)
        if mapping is None:
            self._cuda.cuMemFreeHost(address)
            return
        # There is a context, so no lock is taken for it.
        with suppress(DeviceError), self.current():
            self._cuda.cuMemHostUnregister(address)


class Nvml:
    """What NVML says of a device.

    Parameters
    ----------
    nvml
        The module ``pynvml``.
    handle
        NVML's, of the device.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def find(cls, name: str) -> Nvml | None:
        """Return what tells the memory of the device with a UUID; None where NVML cannot.

        By the UUID, since CUDA and NVML do not number devices alike.
        """
        try:
            import pynvml as nvml
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            for kind in ("GPU", "MIG"):
                try:
                    found = cls(nvml, nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{name}".encode()))
                    found.memory_info()
                    return found
                except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                    continue
        except (nvml.NVMLError, DeviceError):
            pass
        return None

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes."""
        try:
            found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            raise DeviceError(f"NVML does not tell the memory of the device: {error}") from error
        return MemoryInfo(int(found.free), int(found.total))
