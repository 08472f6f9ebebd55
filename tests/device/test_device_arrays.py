"""Which objects live on a device: the adapters and the registry.

The libraries for GPUs are stood in for by small modules with the part of their public API that the adapters use; where
CuPy can be imported, the real one is used as well, on addresses that nothing touches.
"""

import copy
import gc
import io
import mmap
import pickle
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry, Recipe, estimated_nbytes
from gpuspill.device.port import Allocation, AllocationId, Layout
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.devices import ArrayTests


class TestSimulatedArrays(ArrayTests):
    @pytest.fixture
    def device(self):
        with simulated.use(SimulatedDevice(1 << 20, bandwidth=1e6, latency=0.5, clock=ManualClock())) as device:
            yield device
        device.close()

    def asarray(self, host):
        return asarray(host)

    def asnumpy(self, array):
        return asnumpy(array)


@pytest.fixture
def registry():
    return ArrayRegistry(all_adapters())


class Memory(Allocation):
    """An allocation on a CUDA device that does not exist."""

    def __init__(self, address=0x20000, nbytes=4096, device="cuda:0", owner=None):
        self._address, self._nbytes, self._owner = address, nbytes, owner
        self._device = types.SimpleNamespace(identity=device)

    device = property(lambda self: self._device)
    address = property(lambda self: self._address)
    nbytes = property(lambda self: self._nbytes)
    owner = property(lambda self: self if self._owner is None else self._owner)


# -- stand-ins for the libraries ----------------------------------------------------------------------


class Interface:
    """An array of a library that nobody knows."""

    def __init__(self, address, shape, typestr="<f8", strides=None, **more):
        self.__dict__["interface"] = {
            "version": 3, "data": (address, False), "shape": shape, "typestr": typestr, "strides": strides, **more
        }  # fmt: skip

    @property
    def __cuda_array_interface__(self):
        return self.interface


@pytest.fixture
def cupy(monkeypatch):
    """CuPy: arrays on memory pointers on memory."""
    module = types.ModuleType("cupy")

    class UnownedMemory:
        def __init__(self, ptr, size, owner, device_id=-1):
            self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id

    class MemoryPointer:
        def __init__(self, mem, offset):
            self.mem, self.ptr = mem, mem.ptr + offset

    class ndarray:
        def __init__(self, shape, dtype, memptr, strides):
            self.shape, self.dtype, self.data, self.strides = shape, np.dtype(dtype), memptr, strides
            self.itemsize = self.dtype.itemsize

        @property
        def __cuda_array_interface__(self):
            return Interface(self.data.ptr, self.shape, self.dtype.str, self.strides).interface

    module.ndarray = ndarray
    module.cuda = types.SimpleNamespace(UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def numba(monkeypatch):
    """Numba: arrays on memory pointers that know their owner."""
    module = types.ModuleType("numba.cuda")

    class MemoryPointer:
        def __init__(self, pointer, size, owner=None):
            self.device_pointer_value, self.size = pointer, size
            self.owner = self if owner is None else owner
            self.context = types.SimpleNamespace(device=types.SimpleNamespace(id=0))

    class DeviceNDArray:
        def __init__(self, address, shape, strides, dtype, gpu_data):
            self.address, self.shape, self.strides, self.dtype = address, shape, strides, np.dtype(dtype)
            self.gpu_data = gpu_data
            self.device_ctypes_pointer = types.SimpleNamespace(value=address)
            self.stream = 0

        def bind(self, stream):
            bound = copy.copy(self)
            bound.stream = stream
            return bound

        @property
        def __cuda_array_interface__(self):
            return Interface(self.address, self.shape, self.dtype.str, self.strides).interface

    def as_cuda_array(obj, sync=True):
        assert not sync
        interface = obj.__cuda_array_interface__
        address = interface["data"][0]
        dtype = np.dtype(interface["typestr"])
        layout = Layout(0, interface["shape"], interface["strides"], dtype, dtype.itemsize)
        pointer = MemoryPointer(address, layout.span[1], owner=obj)
        return DeviceNDArray(address, layout.shape, layout.strides, layout.dtype, pointer)

    module.devicearray = types.SimpleNamespace(DeviceNDArray=DeviceNDArray)
    module.as_cuda_array = as_cuda_array
    module.MemoryPointer = MemoryPointer
    monkeypatch.setitem(sys.modules, "numba.cuda", module)
    return module


@pytest.fixture
def torch(monkeypatch):
    """PyTorch: strided tensors on storages."""
    module = types.ModuleType("torch")
    sizes = {"float32": 4, "float64": 8, "bfloat16": 2, "uint8": 1}

    class dtype:
        def __init__(self, name):
            self.name, self.size = name, sizes[name]

        def __repr__(self):
            return f"torch.{self.name}"

    for name in sizes:
        setattr(module, name, dtype(name))

    class Storage:
        def __init__(self, pointer, size, keep=None):
            self.pointer, self.size, self.keep = pointer, size, keep

        data_ptr = lambda self: self.pointer  # noqa: E731
        nbytes = lambda self: self.size  # noqa: E731

    class Tensor:
        is_cuda, requires_grad, layout, conj, neg = True, False, "strided", False, False

        def __init__(self, storage, offset, shape, steps, of, device=0):
            self.storage, self.start, self.shape, self.steps, self.dtype = storage, offset, shape, steps, of
            self.device = types.SimpleNamespace(index=device)

        untyped_storage = lambda self: self.storage  # noqa: E731
        storage_offset = lambda self: self.start  # noqa: E731
        stride = lambda self: self.steps  # noqa: E731
        element_size = lambda self: self.dtype.size  # noqa: E731
        is_conj = lambda self: self.conj  # noqa: E731
        is_neg = lambda self: self.neg  # noqa: E731

        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("as PyTorch does for tensors that are on the host or need gradients")

        def __getitem__(self, key):
            assert key.start is None
            return Tensor(self.storage, self.start, (key.stop,), self.steps, self.dtype, self.device.index)

        def view(self, of):
            (length,) = self.shape
            assert length * self.dtype.size % of.size == 0
            return Tensor(self.storage, 0, (length * self.dtype.size // of.size,), (1,), of, self.device.index)

    def as_tensor(obj, device):
        interface = obj.__cuda_array_interface__
        assert interface["typestr"] == "|u1"
        storage = Storage(interface["data"][0], interface["shape"][0], keep=obj)
        return Tensor(storage, 0, interface["shape"], (1,), module.uint8, int(device.partition(":")[2]))

    def as_strided(tensor, shape, steps, offset):
        return Tensor(tensor.storage, offset, tuple(shape), tuple(steps), tensor.dtype, tensor.device.index)

    module.Tensor, module.Storage, module.strided = Tensor, Storage, "strided"
    module.as_tensor, module.as_strided = as_tensor, as_strided
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def rmm(monkeypatch):
    """RMM: buffers."""
    module = types.ModuleType("rmm")

    class DeviceBuffer:
        def __init__(self, *, ptr=0, size=0, mr=None):
            self.ptr = ptr if mr is None else mr.allocate(size, "stream")
            self.size = size
            self.mr = mr

        def __del__(self):
            if self.mr is not None:
                self.mr.deallocate(self.ptr, self.size, "stream")

        @property
        def __cuda_array_interface__(self):
            return Interface(self.ptr, (self.size,), "|u1").interface

    module.DeviceBuffer = DeviceBuffer
    module.mr = types.SimpleNamespace(
        CallbackMemoryResource=lambda allocate, free: types.SimpleNamespace(allocate=allocate, deallocate=free),
        get_current_device_resource=lambda: pytest.fail("asked for more memory"),
    )
    monkeypatch.setitem(sys.modules, "rmm", module)
    return module


# -- CuPy ---------------------------------------------------------------------------------------------


def check_cupy(cupy, registry):
    memory = cupy.cuda.UnownedMemory(0x10000, 4096, object(), 1)
    layouts = [
        Layout(64, (4, 5), (40, 8), "<f8", 8),
        Layout(104, (3, 3), (40, 16), "<f8", 8),
        Layout(184, (4, 5), (-40, 8), "<f8", 8),
        Layout(8, (), (), "<c8", 8),
        Layout(0, (0, 3), (24, 8), "<i8", 8),
    ]
    target = Memory(device="cuda:1")
    for layout in layouts:
        pointer = cupy.cuda.MemoryPointer(memory, layout.offset)
        array = cupy.ndarray(layout.shape, np.dtype(layout.dtype), pointer, layout.strides)
        found = registry.describe(array)
        assert found.identity == ("cuda:1", 0x10000, 4096)
        assert found.owner is memory
        assert found.layout == layout
        assert not found.estimated
        rebuilt = registry.rebuild(found.recipe, target)
        again = registry.describe(rebuilt)
        assert type(rebuilt) is cupy.ndarray
        assert again.identity == target.identity
        assert again.layout == layout


def test_cupy(cupy, registry):
    check_cupy(cupy, registry)
    rebuilt = registry.rebuild(registry.describe(asarray_of(cupy)).recipe, memory := Memory())
    assert rebuilt.data.mem.owner is memory


def test_the_real_cupy(registry):
    check_cupy(pytest.importorskip("cupy"), registry)


def test_the_real_cupy_pickles_views_of_one_array(registry):
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(0x10000, 4096, object(), 0)
    array = cupy.ndarray((4, 5), "<f8", cupy.cuda.MemoryPointer(memory, 184), (-40, 8))
    whole = cupy.ndarray((160,), "u1", cupy.cuda.MemoryPointer(memory, 64), (1,))
    sent = pickled_on(whole, registry.reduce_view(whole, registry.describe(array), 64))
    elsewhere = cupy.cuda.UnownedMemory(0x20000, 160, object(), 0)
    found = registry.describe(sent(cupy.ndarray((160,), "u1", cupy.cuda.MemoryPointer(elsewhere, 0), (1,))))
    assert (found.identity, found.owner) == (("cuda:0", 0x20000, 160), elsewhere)
    assert found.layout == Layout(120, (4, 5), (-40, 8), "<f8", 8)


def pickled_on(whole, way):
    """Pickle what is made on an array; return what reads it, with another array in the place of that one."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda item: "whole" if item is whole else None
    pickler.dump(way)

    def read(other):
        unpickler = pickle.Unpickler(io.BytesIO(file.getvalue()))
        unpickler.persistent_load = lambda name: other
        function, arguments = unpickler.load()
        return function(*arguments)

    return read


def asarray_of(cupy):
    memory = cupy.cuda.UnownedMemory(0x10000, 64, object(), 0)
    return cupy.ndarray((8,), "f8", cupy.cuda.MemoryPointer(memory, 0), (8,))


# -- Numba --------------------------------------------------------------------------------------------


def test_numba(numba, registry):
    base = numba.MemoryPointer(0x10000, 800)
    part = numba.MemoryPointer(0x10050, 80, owner=base)
    whole = numba.devicearray.DeviceNDArray(0x10000, (10, 10), (80, 8), "f8", base)
    view = numba.devicearray.DeviceNDArray(0x10050, (10,), (8,), "f8", part)
    found = registry.describe(view)
    assert found.identity == registry.describe(whole).identity == ("cuda:0", 0x10000, 800)
    # What keeps it is the view's own data: Numba counts those. What dies with the memory is the memory.
    assert (found.owner, found.token) == (part, base)
    assert found.layout == Layout(0x50, (10,), (8,), "<f8", 8)
    rebuilt = registry.rebuild(found.recipe, memory := Memory(nbytes=800))
    again = registry.describe(rebuilt)
    assert (again.identity, again.layout) == (memory.identity, found.layout)


def test_numba_arrays_made_from_another_librarys(numba, cupy, registry):
    """They are on the other library's memory: one allocation, also in the books."""
    array = asarray_of(cupy)
    pointer = numba.MemoryPointer(0x10010, 16, owner=array)
    view = numba.devicearray.DeviceNDArray(0x10010, (2,), (8,), "f8", pointer)
    assert registry.describe(view).identity == registry.describe(array).identity
    assert registry.describe(view).layout.offset == 16


def test_a_numba_array_stays_on_the_stream_it_is_bound_to(numba, registry):
    array = numba.devicearray.DeviceNDArray(0x10000, (10,), (8,), "f8", numba.MemoryPointer(0x10000, 80))
    stream = object()
    recipe = registry.describe(array.bind(stream)).recipe
    assert registry.rebuild(recipe, Memory(nbytes=80)).stream is stream
    assert registry.rebuild(registry.describe(array).recipe, Memory(nbytes=80)).stream == 0


#: Types of which ``dtype.str`` tells the size at most.
UNTOLD = [
    np.dtype([("a", "<i4"), ("b", "<f8", (2,))]),
    np.dtype({"names": ["a", "b"], "formats": ["<i2", "<f4"], "offsets": [0, 4], "itemsize": 12}),
    np.dtype((np.record, [("x", "<f4")])),
    np.dtype("f8", metadata={"unit": "m"}),
]


def types_that_are_told_by_no_name():
    yield from UNTOLD
    try:
        import ml_dtypes
    except ImportError:
        return
    yield from map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("library", ["cupy", "numba"])
def test_element_types_that_no_name_tells_come_back(library, cupy, numba, registry):
    for dtype in types_that_are_told_by_no_name():
        nbytes = 4 * dtype.itemsize
        if library == "cupy":
            memory = cupy.cuda.UnownedMemory(0x10000, nbytes, object(), 0)
            array = cupy.ndarray((4,), dtype, cupy.cuda.MemoryPointer(memory, 0), (dtype.itemsize,))
        else:
            pointer = numba.MemoryPointer(0x10000, nbytes)
            array = numba.devicearray.DeviceNDArray(0x10000, (4,), (dtype.itemsize,), dtype, pointer)
        recipe = pickle.loads(pickle.dumps(registry.describe(array).recipe))
        rebuilt = registry.rebuild(recipe, Memory(nbytes=nbytes))
        assert rebuilt.dtype == dtype
        assert (rebuilt.dtype.type, rebuilt.dtype.metadata) == (dtype.type, dtype.metadata)
        assert hash(recipe) == hash(registry.describe(array).recipe)


@pytest.mark.parametrize("typestr", ["<M8[ns]", "<m8[25s]"])
def test_times_have_their_size(typestr, registry):
    assert registry.describe(Interface(0x1000, (3,), typestr)).layout.nbytes == 24


def test_numbas_simulator_has_no_arrays_on_a_device(monkeypatch, registry):
    module = types.ModuleType("numba.cuda")
    module.devicearray = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "numba.cuda", module)

    class FakeCUDAArray:
        nbytes = 80

    assert registry.describe(FakeCUDAArray()) is None
    assert estimated_nbytes(FakeCUDAArray()) == 80


# -- PyTorch ------------------------------------------------------------------------------------------


def test_torch(torch, registry):
    storage = torch.Storage(0x10000, 4000)
    tensor = torch.Tensor(storage, 10, (3, 4), (1, 3), torch.bfloat16, device=2)
    found = registry.describe(tensor)
    assert found.identity == ("cuda:2", 0x10000, 4000)
    assert found.owner is storage
    assert found.layout == Layout(20, (3, 4), (2, 6), "bfloat16", 2)
    memory = Memory(nbytes=4001, device="cuda:2")  # an odd byte at the end is no element
    rebuilt = registry.rebuild(found.recipe, memory)
    assert rebuilt.dtype is torch.bfloat16
    assert (rebuilt.shape, rebuilt.steps, rebuilt.start, rebuilt.device.index) == ((3, 4), (1, 3), 10, 2)
    assert rebuilt.storage.pointer == memory.address
    assert rebuilt.storage.keep.memory is memory


@pytest.mark.parametrize(
    "change", [{"is_cuda": False}, {"requires_grad": True}, {"layout": "sparse"}, {"conj": True}, {"neg": True}]
)
def test_torch_tensors_that_are_more_than_memory_are_left_alone(change, torch, registry):
    tensor = torch.Tensor(torch.Storage(0x10000, 64), 0, (8,), (1,), torch.float64)
    assert registry.is_on_device(tensor)
    for name, value in change.items():
        setattr(tensor, name, value)
    assert registry.describe(tensor) is None
    assert not registry.is_on_device(tensor)


# -- RMM ----------------------------------------------------------------------------------------------


def test_rmm(rmm):
    registry = ArrayRegistry(all_adapters(), pointer_device=lambda address: f"cuda:{address >> 28}")
    buffer = rmm.DeviceBuffer(ptr=0x30000000, size=4096)
    found = registry.describe(buffer)
    assert found.identity == ("cuda:3", 0x30000000, 4096)
    assert found.owner is buffer
    other = rmm.DeviceBuffer(ptr=0x20000, size=4096)
    assert registry.rebuild(found.recipe, Memory(owner=other)) is other
    with pytest.raises(TypeError, match="a part of"):
        registry.rebuild(found.recipe, Memory(nbytes=8192))


@pytest.fixture(params=["look-alike", "RMM"])
def buffers(request):
    if request.param == "look-alike":
        return request.getfixturevalue("rmm")
    return pytest.importorskip("rmm", reason="RMM is not installed")


def test_a_buffer_is_built_on_memory_that_it_keeps(buffers):
    registry = ArrayRegistry(all_adapters())
    recipe = Recipe("rmm", Layout(0, (4096,), (1,), "|u1", 1))
    memory = Memory()
    gone = weakref.ref(memory)
    buffer = registry.rebuild(recipe, memory)
    assert type(buffer) is buffers.DeviceBuffer
    assert (buffer.ptr, buffer.size) == (0x20000, 4096)
    assert registry.describe(buffer).identity == memory.identity
    del memory
    gc.collect()
    assert gone() is not None
    del buffer
    gc.collect()
    assert gone() is None


def test_a_buffer_in_a_circle_goes_before_its_resource(buffers):
    """The collector may let go of the resource first, whose functions are Python's, and then the buffer calls it."""
    registry = ArrayRegistry(all_adapters())
    for _ in range(100):
        memory = Memory()
        gone = weakref.ref(memory)
        user = types.SimpleNamespace(buffer=registry.rebuild(Recipe("rmm", Layout(0, (4096,), (1,), "|u1", 1)), memory))
        user.itself = user
        del memory, user
        gc.collect()
        assert gone() is None


def test_a_buffer_that_grows_takes_other_memory_and_gives_it_back(rmm):
    calls = []

    def note(*args):
        calls.append(args)
        return 0x50000

    buffer = ArrayRegistry(all_adapters()).rebuild(Recipe("rmm", Layout(0, (4096,), (1,), "|u1", 1)), Memory())
    rmm.mr.get_current_device_resource = lambda: types.SimpleNamespace(allocate=note, deallocate=note)
    assert buffer.mr.allocate(8192, "stream") == 0x50000
    buffer.mr.deallocate(0x20000, 4096, "stream")
    buffer.mr.deallocate(0x50000, 8192, "stream")
    assert calls == [(8192, "stream"), (0x50000, 8192, "stream")]


# -- all of them --------------------------------------------------------------------------------------


def test_layouts_beyond_the_memory_are_refused(cupy, numba, torch, rmm, registry):
    recipe = registry.describe(asarray_of(cupy)).recipe
    for adapter in ("cupy", "numba", "torch", "rmm"):
        for layout in (Layout(8, (8,), (8,), "<f8", 8), Layout(0, (2,), (-8,), "<f8", 8)):
            with pytest.raises(ValueError, match="not within"):
                registry.rebuild(type(recipe)(adapter, layout), Memory(nbytes=64))


def test_cuda_arrays_need_cuda_memory(cupy, numba, torch, registry):
    recipe = registry.describe(asarray_of(cupy)).recipe
    for adapter in ("cupy", "numba", "torch"):
        with pytest.raises(TypeError, match="not on a CUDA device"):
            registry.rebuild(type(recipe)(adapter, recipe.layout), Memory(device="simulated:0"))


def test_subclasses_are_left_alone(cupy, registry):
    """They may carry more than memory and layout, and what moves the class they derive from may lose it."""

    class Special(cupy.ndarray):
        pass

    array = asarray_of(cupy)
    special = Special(array.shape, array.dtype, array.data, array.strides)
    assert registry.describe(special) is None
    assert registry.is_on_device(special)


def test_libraries_that_nobody_imported_are_not_imported():
    code = (
        "import sys; from gpuspill.device.arrays import ArrayRegistry; import numpy;"
        "from gpuspill.device.adapters import all_adapters;"
        "r = ArrayRegistry(all_adapters()); [r.describe(v) for v in (1, 'a', object(), numpy.ones(3))];"
        "bad = {'cupy', 'numba', 'rmm', 'torch', 'gpuspill.simulated', 'dask'} & set(sys.modules);"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- types that nobody registered ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "address", "nbytes"),
    [
        (Interface(0x1000, (3, 4)), 0x1000, 96),
        (Interface(0x1000, (3, 4), strides=(64, 8)), 0x1000, 160),
        (Interface(0x1000, (3, 4), strides=(-32, 8)), 0x1000 - 64, 96),
        (Interface(0x1000, (1000, 4), "<f4", strides=(0, 4)), 0x1000, 16),
        (Interface(0x1000, (), "|u1"), 0x1000, 1),
        (Interface(0, (0, 7)), 0, 0),
        (Interface(None, (0,)), 0, 0),
    ],
)
def test_they_are_sized_by_their_interface_and_flagged(array, address, nbytes, registry):
    found = registry.describe(array)
    assert found.estimated
    assert found.recipe is None
    assert found.owner is array
    assert found.identity == AllocationId("cuda:0", address, nbytes)
    assert estimated_nbytes(array) == nbytes
    assert registry.is_on_device(array)


class Raises:
    def __init__(self, error=RuntimeError):
        self.error = error

    @property
    def __cuda_array_interface__(self):
        raise self.error("not now")

    @property
    def nbytes(self):
        raise self.error("not now")


class Anything:
    def __getattr__(self, name):
        return self


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        b"bytes",
        [1],
        object(),
        np.float64(1),
        Raises(),
        Raises(SystemExit),
        Anything(),
        Interface(1, "wrong"),
    ],
)
def test_what_is_no_array_is_none_and_nothing_raises(value, registry):
    assert registry.describe(value) is None
    assert not registry.is_on_device(value)
    assert registry.stream(value) is None


def test_sizes_are_never_guessed():
    assert estimated_nbytes(np.float64(1)) == 8
    for value in ([0] * 1000, "text", Raises(), Raises(SystemExit), Anything(), object()):
        assert estimated_nbytes(value) is None


# -- arrays on the host -------------------------------------------------------------------------------


def test_numpy_views_are_described_by_what_they_keep_alive(registry):
    base = np.arange(48.0).reshape(6, 8).copy()
    views = [base, base[1:], base[:, 2:5], base.T, base[::-1, ::2], base.reshape(48)[7:], base[2, 3:4], base.view("i4")]
    views += [np.broadcast_to(base[0], (2, 8)), np.lib.stride_tricks.sliding_window_view(base, 3, axis=1)[1:]]
    for view in views:
        found = registry.describe(view)
        assert found.identity == ("host", base.ctypes.data, 384)
        assert found.owner is base
        assert not registry.is_on_device(view)
        rebuilt = registry.rebuild(found.recipe, bytearray(base.tobytes()))
        np.testing.assert_array_equal(rebuilt, view)
        assert rebuilt.strides == view.strides
        assert rebuilt.dtype == view.dtype


@pytest.mark.parametrize("make", [bytes, bytearray, lambda b: memoryview(bytearray(b)), lambda b: memoryview(b)[8:]])
def test_numpy_arrays_on_buffers_are_described_by_the_buffer(make, registry):
    buffer = make(bytes(range(80)))
    array = np.frombuffer(buffer, "f8", offset=8)[1:]
    found = registry.describe(array)
    owner = buffer.obj if isinstance(buffer, memoryview) else buffer
    assert found.owner is owner
    assert found.identity.nbytes == 80
    assert found.layout.writeable == (type(owner) is bytearray)
    rebuilt = registry.rebuild(found.recipe, bytearray(bytes(range(80))))
    np.testing.assert_array_equal(rebuilt.view("u1"), array.view("u1"))
    assert rebuilt.flags.writeable == array.flags.writeable


def test_numpy_arrays_that_were_pickled_out_of_band_are_described_by_their_buffer(registry):
    array, buffers = np.arange(10.0), []
    message = pickle.dumps(array, 5, buffer_callback=buffers.append)
    assert registry.describe(pickle.loads(message, buffers=buffers)).owner is array
    received = bytearray(buffers[0].raw())
    assert registry.describe(pickle.loads(message, buffers=[memoryview(received)])).owner is received


def test_copies_from_the_device_are_arrays_on_the_host(registry):
    array = asnumpy(asarray(np.arange(10.0)))
    found = registry.describe(array[2:])
    assert found.identity.nbytes == 80
    assert found.layout.offset == 16


def test_numpy_arrays_that_are_more_than_memory_are_not_described(registry, tmp_path):
    (tmp_path / "file").write_bytes(bytes(80))
    with open(tmp_path / "file", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        on_file = np.frombuffer(mapped)
        for value in (
            np.array([object()]),
            np.zeros(2, [("a", int)]),
            np.ma.masked_array([1, 2], [True, False]),
            np.memmap(tmp_path / "file", mode="r"),
            np.asarray(np.memmap(tmp_path / "file", mode="r")),
            on_file,
        ):
            assert registry.describe(value) is None
        del on_file, value


def test_empty_numpy_arrays(registry):
    for array in (np.empty(0), np.empty((3, 0)), np.arange(10)[5:5], np.frombuffer(b"", "u1")):
        found = registry.describe(array)
        rebuilt = registry.rebuild(found.recipe, bytearray(found.identity.nbytes))
        assert (rebuilt.shape, rebuilt.dtype) == (array.shape, array.dtype)


class Streamed:
    """What says by the interface on which stream it was filled."""

    def __init__(self, stream):
        self._stream = stream

    @property
    def __cuda_array_interface__(self):
        data = {"data": (4096, False), "shape": (4,), "typestr": "|u1", "version": 3}
        return data if self._stream is None else {**data, "stream": self._stream}


@pytest.mark.parametrize(("said", "found"), [(4711, (4711, None)), (1, None), (2, None), (None, None), ("x", None)])
def test_a_stream_that_has_to_be_waited_for_by_itself_is_told(said, found):
    assert ArrayRegistry(all_adapters()).stream(Streamed(said)) == found


def test_arrays_on_the_host_have_no_stream():
    assert ArrayRegistry(all_adapters()).stream(np.zeros(3)) is None
