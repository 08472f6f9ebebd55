"""Adapters for the array types of NumPy, CuPy, Numba, RMM, PyTorch and the simulated device.

Each uses its library's public API only and imports nothing: the library is found among the imported
modules. Identity is what the library says of the memory. Two libraries that look at one piece of
memory agree where one was given the other's object and keeps it (Numba), or uses RMM; else the
ranges overlap without being equal, and it is for the ledger to see that.
"""

from __future__ import annotations

import importlib.metadata
import logging
import operator
import pickle
import sys
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from gpuspill.classes import attribute_of
from gpuspill.device.arrays import ArrayAdapter, ArrayDescription, ArrayRegistry, interface_layout
from gpuspill.device.port import Allocation, AllocationId, Layout

__all__ = [
    "CupyAdapter",
    "InterfaceAdapter",
    "NumbaAdapter",
    "NumpyAdapter",
    "RmmAdapter",
    "SimulatedAdapter",
    "TorchAdapter",
    "all_adapters",
]


logger = logging.getLogger("gpuspill")


def all_adapters() -> tuple[ArrayAdapter, ...]:
    """Return one of each: those of installed packages (entry points), then those here.

    One that cannot be had is left out with a warning: its package may be installed for something
    else.
    """
    return (
        *_installed(),
        SimulatedAdapter(),
        CupyAdapter(),
        NumbaAdapter(),
        RmmAdapter(),
        TorchAdapter(),
        InterfaceAdapter(),
        NumpyAdapter(),
    )


def _installed() -> list[ArrayAdapter]:
    adapters = []
    for point in importlib.metadata.entry_points(group="gpuspill.array_adapters"):
        try:
            adapter = point.load()()
            if not isinstance(adapter, ArrayAdapter):
                raise TypeError(f"it made a {type(adapter).__qualname__}, which is no gpuspill ArrayAdapter")
        except Exception as error:
            logger.warning(
                "the array adapter %s cannot be used: %s: %s. Arrays of its library stay on the device. It is an entry "
                "point in gpuspill.array_adapters of the package %s; update or remove that",
                point.value,
                type(error).__name__,
                error,
                "?" if point.dist is None else point.dist.name,
            )
        else:
            adapters.append(adapter)
    return adapters


def _check(memory: Allocation, layout: Layout) -> None:
    low, high = layout.span
    if low < 0 or high > memory.nbytes:
        raise ValueError(f"an array on bytes {low} to {high} is not within {memory!r}")


def _element_type(dtype: Any) -> Any:
    """Return the name of an element type, or the type if its name does not tell all."""
    name = dtype.str
    try:
        told = np.dtype(name)
    except TypeError:
        return dtype
    return name if told == dtype and told.type is dtype.type and dtype.metadata is None else dtype


def _ordinal(memory: Allocation) -> int:
    kind, _, ordinal = memory.device.identity.partition(":")
    if kind != "cuda":
        raise TypeError(f"arrays of CUDA libraries cannot be on {memory!r}: it is not on a CUDA device")
    return int(ordinal)


class _Interface:
    """An allocation, or part of it, with ``__cuda_array_interface__``. Keeps it alive."""

    def __init__(self, memory: Allocation, layout: Layout) -> None:
        self.memory = memory
        self._interface = {
            "version": 3,
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": layout.dtype,  # or the type itself, which Numba takes as well
            "data": (memory.address + layout.offset, False),
            "stream": None,  # the caller that rebuilds has observed the copy: there is nothing to wait for
        }
        self.nbytes = layout.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface


class _Call:
    """Pickled, becomes what a call returns."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> Any:
        return self._made


class SimulatedAdapter(ArrayAdapter):
    """Arrays of :mod:`gpuspill.simulated`."""

    name = "simulated"
    library = "gpuspill.simulated"

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the array type."""
        return (library.Array,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription:
        """Take an array apart."""
        return self.describes(value.allocation.identity, value.allocation, value.layout)

    def rebuild(self, memory: Allocation, layout: Layout) -> Any:
        """Build an array."""
        simulated = sys.modules[self.library]
        return simulated.rebuild(memory, layout.offset, layout.shape, layout.strides, layout.dtype)

    def reduce_view(self, whole: Any, layout: Layout) -> Any:
        """As from the network."""
        header = {"offset": layout.offset, "shape": layout.shape, "strides": layout.strides, "typestr": layout.dtype}
        return sys.modules[self.library].from_frames, (header, [whole])


class CupyAdapter(ArrayAdapter):
    """Arrays of CuPy, whatever its allocator."""

    name = "cupy"
    library = "cupy"

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the array type."""
        return (library.ndarray,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription:
        """Take an array apart."""
        memory = value.data.mem
        layout = Layout(
            value.data.ptr - memory.ptr,
            tuple(value.shape),
            tuple(value.strides),
            _element_type(value.dtype),
            value.itemsize,
        )
        return self.describes(AllocationId(f"cuda:{memory.device_id}", memory.ptr, memory.size), memory, layout)

    def rebuild(self, memory: Allocation, layout: Layout) -> Any:
        """Build an array."""
        _check(memory, layout)
        cupy: Any = sys.modules[self.library]
        block = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory, _ordinal(memory))
        pointer = cupy.cuda.MemoryPointer(block, layout.offset)
        return cupy.ndarray(layout.shape, np.dtype(layout.dtype), pointer, layout.strides)

    def reduce_view(self, whole: Any, layout: Layout) -> Any:
        """As an array at a pointer into the memory of `whole`."""
        pointer = _Call(operator.add, _Call(getattr, whole, "data"), layout.offset)
        return type(whole), (layout.shape, np.dtype(layout.dtype), pointer, layout.strides)

    def stream(self, value: Any) -> tuple[int, object]:
        """Return the current stream of the calling thread: arrays have none."""
        stream: Any = sys.modules[self.library].cuda.get_current_stream()
        return int(stream.ptr), stream


class NumbaAdapter(ArrayAdapter):
    """Device arrays of Numba; not those of its simulator, which are in host memory."""

    name = "numba"
    library = "numba.cuda"

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the array type; there is none in Numba's simulator."""
        found = getattr(library.devicearray, "DeviceNDArray", None)
        return () if found is None else (found,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription | None:
        """Take an array apart."""
        found = self._memory(value.gpu_data, registry)
        if found is None:
            return None
        identity, owner, token = found
        layout = Layout(
            (value.device_ctypes_pointer.value or 0) - identity.address,
            tuple(value.shape),
            tuple(value.strides),
            _element_type(value.dtype),
            value.dtype.itemsize,
            stream=value.stream or None,
        )
        return self.describes(identity, owner, layout, token)

    def _memory(self, data: Any, registry: ArrayRegistry) -> tuple[AllocationId, object, object] | None:
        """Return what memory the data of an array is, what keeps it, and what dies with it."""
        owner = data.owner
        if type(owner) is _Interface:
            return owner.memory.identity, owner.memory, owner.memory.token
        if hasattr(owner, "device_pointer_value"):
            # Numba counts those that own memory, and frees it with the last of them, even if others
            # refer to the memory itself. The data of an array is one of them.
            identity = AllocationId(f"cuda:{owner.context.device.id}", owner.device_pointer_value or 0, owner.size)
            return identity, data, owner
        # It was made from another library's array, which knows its own memory.
        described = registry.describe(owner)
        return None if described is None else (described.identity, described.owner, described.token)

    def rebuild(self, memory: Allocation, layout: Layout) -> Any:
        """Build an array."""
        _check(memory, layout)
        _ordinal(memory)
        numba_cuda: Any = sys.modules[self.library]
        array = numba_cuda.as_cuda_array(_Interface(memory, layout), sync=False)
        return array if layout.stream is None else array.bind(layout.stream)

    def reduce_view(self, whole: Any, layout: Layout) -> Any:
        """As an array on part of the data of `whole`. On no stream."""
        data = _Call(operator.methodcaller("view", layout.offset), _Call(getattr, whole, "gpu_data"))
        return type(whole), (layout.shape, layout.strides, np.dtype(layout.dtype), 0, data)

    def stream(self, value: Any) -> tuple[int, object]:
        """Return the stream that an array is bound to."""
        return int(value.stream or 0), value.stream


class RmmAdapter(ArrayAdapter):
    """``rmm.DeviceBuffer``: memory itself. Keeps what it built buffers on until they are gone."""

    name = "rmm"
    library = "rmm"

    def __init__(self) -> None:
        self._lending = _Lending()

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the buffer type."""
        return (library.DeviceBuffer,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription:
        """Take a buffer apart."""
        identity = AllocationId(registry.pointer_device(value.ptr), value.ptr, value.size)
        return self.describes(identity, value, Layout(0, (value.size,), (1,), "|u1", 1))

    def rebuild(self, memory: Allocation, layout: Layout) -> Any:
        """Build a buffer, or return the one that the allocation is made of."""
        _check(memory, layout)
        rmm: Any = sys.modules[self.library]
        if layout.span != (0, memory.nbytes):
            raise TypeError(f"an rmm.DeviceBuffer cannot look at a part of {memory!r}")
        if any(type(memory.owner) is known for known in self.types(rmm)):
            return memory.owner
        _ordinal(memory)
        return rmm.DeviceBuffer(size=memory.nbytes, mr=self._lending.resource(rmm.mr, memory))


class _Lending:
    """Resources that give allocations to buffers built on them, and keep them as long.

    A buffer that grows gets its new memory from the resource in force then.

    A buffer calls its resource when it goes, and the resource calls functions of Python's. In a
    circle that is garbage all of these go in any order, so until the buffer has gone others have to
    keep them: this does. The last few are kept a little longer, since they are in the middle of
    that call.
    """

    def __init__(self) -> None:
        self._lent: dict[object, Any] = {}
        self._returned: deque[Any] = deque(maxlen=64)

    def resource(self, mr: Any, memory: Allocation) -> Any:
        """Return one that gives `memory`, once."""
        address, kept, grown = memory.address, [memory], dict[int, Any]()
        given: list[bool] = []
        lent, returned, key = self._lent, self._returned, object()

        def allocate(nbytes: int, stream: Any) -> int:
            if not given:
                given.append(True)
                return address
            resource = mr.get_current_device_resource()
            more = int(resource.allocate(nbytes, stream))
            grown[more] = resource
            return more

        def deallocate(address: int, nbytes: int, stream: Any) -> None:
            resource = grown.pop(address, None)
            if resource is not None:
                resource.deallocate(address, nbytes, stream)
            else:
                kept.clear()
            if not (kept or grown):
                returned.append(lent.pop(key, None))

        lent[key] = mr.CallbackMemoryResource(allocate, deallocate)
        return lent[key]


class TorchAdapter(ArrayAdapter):
    """Tensors of PyTorch on a CUDA device. Only plain ones: strided, and without gradients."""

    name = "torch"
    library = "torch"

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the tensor type."""
        return (library.Tensor,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription | None:
        """Take a tensor apart."""
        torch: Any = sys.modules[self.library]
        if not value.is_cuda or value.layout is not torch.strided or value.requires_grad:
            return None
        if value.is_conj() or value.is_neg():  # the bytes are not the values
            return None
        storage = value.untyped_storage()
        size = value.element_size()
        layout = Layout(
            value.storage_offset() * size,
            tuple(value.shape),
            tuple(step * size for step in value.stride()),
            str(value.dtype).removeprefix("torch."),
            size,
        )
        identity = AllocationId(f"cuda:{value.device.index}", storage.data_ptr(), storage.nbytes())
        return self.describes(identity, storage, layout)

    def rebuild(self, memory: Allocation, layout: Layout) -> Any:
        """Build a tensor."""
        _check(memory, layout)
        torch: Any = sys.modules[self.library]
        whole = _Interface(memory, Layout(0, (memory.nbytes,), (1,), "|u1", 1))
        raw = torch.as_tensor(whole, device=f"cuda:{_ordinal(memory)}")
        size = layout.itemsize
        typed = raw[: memory.nbytes // size * size].view(getattr(torch, layout.dtype))
        return torch.as_strided(typed, layout.shape, [step // size for step in layout.strides], layout.offset // size)

    def stream(self, value: Any) -> tuple[int, object]:
        """Return the current stream of the calling thread: tensors have none."""
        stream: Any = sys.modules[self.library].cuda.current_stream(value.device)
        return int(stream.cuda_stream), stream


class InterfaceAdapter(ArrayAdapter):
    """Memory with the array interface and of no library: what composites are built on."""

    name = "interface"
    library = __name__

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the type that :meth:`rebuild` makes."""
        return (_Interface,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription | None:
        """Take it apart."""
        found = interface_layout(value)
        if found is None:
            return None
        layout, address = found
        memory = value.memory
        moved = Layout(address - memory.address, layout.shape, layout.strides, layout.dtype, layout.itemsize)
        return self.describes(memory.identity, memory, moved, memory.token)

    def rebuild(self, memory: Allocation, layout: Layout) -> Any:
        """Return what describes (part of) the memory, and keeps it alive."""
        _check(memory, layout)
        return _Interface(memory, layout)


class NumpyAdapter(ArrayAdapter):
    """Arrays in host memory: a view is described by the memory it keeps alive.

    Not described: subclasses (they may carry more), arrays of Python objects or records, and arrays
    on mapped files.
    """

    name = "numpy"
    library = "numpy"
    on_device = False

    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the array type."""
        return (library.ndarray,)

    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription | None:
        """Take an array apart."""
        if value.dtype.hasobject or value.dtype.names is not None:
            return None
        owner = _keeper(value)
        if type(owner) is bytes or type(owner) is bytearray:
            whole = np.frombuffer(owner, np.uint8) if owner else np.empty(0, np.uint8)
        elif type(owner) is np.ndarray and owner.flags.owndata:
            whole = owner
        else:
            # Something else's memory (a mapped file, a device's, an array of another library): not
            # ours to say.
            return None
        address, nbytes = _pointer(whole), whole.nbytes
        layout = Layout(
            _pointer(value) - address if value.size else 0,
            value.shape,
            value.strides,
            _element_type(value.dtype),
            value.dtype.itemsize,
            bool(value.flags.writeable),
        )
        return self.describes(AllocationId("host", address, nbytes), owner, layout)

    def rebuild(self, memory: Any, layout: Layout) -> Any:
        """Build an array on a buffer."""
        dtype = np.dtype(layout.dtype)
        if 0 in layout.shape:
            array: Any = np.empty(layout.shape, dtype)
        else:
            array = np.ndarray(layout.shape, dtype, memory, layout.offset, layout.strides)
        if not layout.writeable:
            array.flags.writeable = False
        return array


def _keeper(array: Any) -> Any:
    """Return the object at the end of the chain of those that keep an array's memory alive."""
    owner = array
    while True:
        if type(owner) is memoryview or type(owner) is pickle.PickleBuffer:
            below = memoryview(owner).obj
        elif type(owner) is np.ndarray or str(attribute_of(type(owner), "__module__")).startswith("numpy.lib"):
            # The second: what NumPy's stride tricks put between an array and its base.
            below = owner.base
        else:
            return owner
        if below is None or below is owner:
            return owner
        owner = below


def _pointer(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
