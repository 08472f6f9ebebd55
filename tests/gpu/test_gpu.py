"""What can be shown on a GPU only: the conformance suites on CUDA, running out of memory with RMM, and whole ways.

Skipped, with the reason, where there is none. ``ci/gpu.sh`` makes an environment for it.
"""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuspill.device.cuda import find as cuda
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.port import CopyPlan
from gpuspill.errors import ConfigError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.storage.files import FileStore
from gpuspill.testing.devices import ArrayTests, DeviceTests
from gpuspill.tier import DeviceTier

pytestmark = pytest.mark.gpu

MB = 2**20
CAPACITY = 64 * MB


@pytest.fixture(scope="module")
def driver():
    """The first GPU."""
    try:
        cuda.device()
    except ConfigError as error:
        pytest.skip(f"no GPU to test on: {error}")
    return cuda.CudaDriver()


@pytest.fixture
def mr(driver):
    """RMM's resources; the one in force is put back."""
    import rmm.mr

    before = rmm.mr.get_per_device_resource(0)
    yield rmm.mr
    rmm.mr.set_per_device_resource(0, before)


@pytest.fixture(params=["cuda", "pool", "async"])
def resource(request, mr):
    """A kind of memory of which there is little."""
    kinds = {
        "cuda": mr.CudaMemoryResource,
        "pool": lambda: mr.PoolMemoryResource(
            mr.CudaMemoryResource(), initial_pool_size=2 * CAPACITY, maximum_pool_size=2 * CAPACITY
        ),
        "async": mr.CudaAsyncMemoryResource,
    }
    limited = mr.LimitingResourceAdaptor(kinds[request.param](), CAPACITY)
    mr.set_per_device_resource(0, limited)
    return limited


@pytest.fixture
def small(driver, resource):
    """The GPU, of which there is little memory."""
    device = GpuDevice(driver, plan=CopyPlan(4 * MB, staged=True))
    yield device
    device.close()


class TestConformance(DeviceTests):
    capacity = CAPACITY

    @pytest.fixture
    def device(self, small):
        return small


# -- arrays -----------------------------------------------------------------------------------------


@pytest.fixture
def plain(driver):
    device = GpuDevice(driver)
    yield device
    device.close()


class TestCupy(ArrayTests):
    @pytest.fixture
    def device(self, plain):
        self.cupy = pytest.importorskip("cupy")
        return plain

    def asarray(self, host):
        return self.cupy.asarray(host)

    def asnumpy(self, array):
        return self.cupy.asnumpy(array)


class TestNumba(ArrayTests):
    @pytest.fixture
    def device(self, plain):
        self.cuda = pytest.importorskip("numba.cuda")
        return plain

    def asarray(self, host):
        return self.cuda.to_device(host)

    def asnumpy(self, array):
        return array.copy_to_host()

    def views(self, array):
        return [array, array[1:], array[:, 2:5], array[2, 3:], array[::2]]  # its transpose is a copy


class TestTorch(ArrayTests):
    @pytest.fixture
    def device(self, plain):
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this build of PyTorch sees no GPU")
        return plain

    def asarray(self, host):
        return self.torch.tensor(host, device="cuda")

    def asnumpy(self, array):
        return array.cpu().numpy()


# -- the whole way ----------------------------------------------------------------------------------


class Rig:
    """Three tiers, of which the lowest is files."""

    def __init__(self, device, directory, *, limit=None):
        self.device = device
        self.files = FileStore(directory)
        self.host = ProxifyManager(
            limit=None, store=self.files, serializer=PickleSerializer(), sizeof=lambda value: 100
        )
        self.tier = DeviceTier(device, self.host, limit=limit)
        self.skeletons = {}

    def put(self, key, value):
        self.skeletons[key] = self.tier.proxify(value)

    def get(self, key):
        return self.tier.resolve(self.skeletons[key])

    def to_disk(self):
        gc.collect()
        self.tier.settle()
        self.tier.manager.limits.evict_all()
        assert self.tier.statistics().device_nbytes == 0
        self.host.limits.evict_all()

    def close(self):
        self.skeletons.clear()
        self.tier.validate()
        self.tier.close()
        self.host.close()
        self.files.close()


@pytest.fixture
def make(tmp_path):
    rigs = []

    def make(device, **options):
        rigs.append(Rig(device, str(tmp_path), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(params=["cupy", "numba", "torch", "rmm"])
def library(request):
    """How to make an array of a library from NumPy's, and back."""
    if request.param == "cupy":
        cupy = pytest.importorskip("cupy")
        return cupy.asarray, cupy.asnumpy
    if request.param == "numba":
        numba_cuda = pytest.importorskip("numba.cuda")
        return numba_cuda.to_device, lambda array: array.copy_to_host()
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this build of PyTorch sees no GPU")
        return lambda host: torch.tensor(host, device="cuda"), lambda array: array.cpu().numpy()
    import rmm

    return (
        lambda host: rmm.DeviceBuffer.to_device(host.tobytes()),
        lambda buffer: np.frombuffer(buffer.tobytes(), np.float64),
    )


@pytest.mark.parametrize("plan", [None, CopyPlan(MB, staged=True), CopyPlan(MB, staged=False)])
def test_device_host_disk_and_back(driver, make, library, plan):
    asarray, asnumpy = library
    rig = make(GpuDevice(driver, plan=plan))
    values = [np.random.default_rng(i).random(n) for i, n in enumerate((1, 1000, MB // 8 + 1, 20 * MB // 8))]
    for i, host in enumerate(values):
        rig.put(i, {"value": [asarray(host)]})
    for host_limit in (None, 0):  # by way of the host's memory, and past it
        rig.host.limits.set_limit(host_limit, None)
        rig.to_disk()
        for i, host in enumerate(values):
            np.testing.assert_array_equal(asnumpy(rig.get(i)["value"][0]).ravel(), host)
    assert rig.tier.statistics().direct_spills == len(values)
    rig.device.close()


@pytest.mark.parametrize("kind", ["blocking", "non-blocking", "per-thread"])
def test_what_is_still_being_computed_is_waited_for(driver, make, kind):
    """On streams that the port knows nothing of, and which do not wait for the default one."""
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream.ptds if kind == "per-thread" else cupy.cuda.Stream(non_blocking=kind == "non-blocking")
    rig = make(GpuDevice(driver, plan=CopyPlan(MB, staged=True)))
    with stream:
        array = cupy.zeros(8 * MB)
        for _ in range(500):
            array += 1.0
    rig.put("x", array)
    del array
    rig.to_disk()
    np.testing.assert_array_equal(cupy.asnumpy(rig.get("x")), np.full(8 * MB, 500.0))
    rig.device.close()


def test_memory_that_was_dropped_while_in_use_is_not_overwritten(driver, resource, make):
    """A restored array dies with work on it in flight: what is restored next gets its memory when that has ended."""
    cupy = pytest.importorskip("cupy")
    rig = make(GpuDevice(driver, plan=CopyPlan(MB, staged=True)))
    size = 16 * MB // 8
    rig.put("a", cupy.full(size, 1.0))
    rig.put("b", cupy.full(size, 2.0))
    rig.to_disk()
    array = rig.get("a")
    total = cupy.zeros(size)
    for _ in range(2000):
        total += array
    del array
    rig.skeletons.pop("a")
    rig.tier.settle()
    rig.get("b")
    np.testing.assert_array_equal(cupy.asnumpy(total), np.full(size, 2000.0))
    rig.device.close()


# -- out of memory ----------------------------------------------------------------------------------


@pytest.fixture
def through_rmm():
    """Let CuPy allocate through RMM."""
    cupy = pytest.importorskip("cupy")
    from rmm.allocators.cupy import rmm_cupy_allocator

    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    yield cupy
    cupy.cuda.set_allocator(before)


def test_a_library_that_runs_out_of_memory_makes_room(small, make, through_rmm):
    cupy = through_rmm
    rig = make(small)
    size = CAPACITY // 8 // 8
    for i in range(24):  # three times what there is
        rig.put(i, cupy.full(size, float(i)))
    statistics = rig.tier.statistics()
    assert statistics.out_of_memory == statistics.out_of_memory_helped > 0
    for i in range(24):
        np.testing.assert_array_equal(cupy.asnumpy(rig.get(i)), np.full(size, float(i)))
    with pytest.raises(MemoryError):
        cupy.empty(2 * CAPACITY, cupy.uint8)


def test_garbage_is_collected_and_its_memory_is_had(small, make, through_rmm):
    cupy = through_rmm
    rig = make(small)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            cycle = [cupy.empty(CAPACITY // 2 - MB, cupy.uint8)]
            cycle.append(cycle)
        del cycle
        assert cupy.empty(CAPACITY // 2, cupy.uint8).nbytes == CAPACITY // 2
    finally:
        gc.enable()
    assert rig.tier.statistics().out_of_memory_helped == 1


def test_memory_set_up_anew_by_a_user(driver, mr, make):
    import rmm

    device = GpuDevice(driver, plan=CopyPlan(MB, staged=True))
    rig = make(device)
    rmm.reinitialize(pool_allocator=True, initial_pool_size=CAPACITY, maximum_pool_size=CAPACITY)
    rig.tier.verify()
    held = [rmm.DeviceBuffer(size=CAPACITY - MB)]
    device.on_out_of_memory(lambda nbytes, retries: bool(held and held.pop()))
    assert rmm.DeviceBuffer(size=CAPACITY // 2).size == CAPACITY // 2
    assert not held
    device.close()


def test_many_threads_run_out_of_memory_at_once(small, make, through_rmm):
    cupy = through_rmm
    rig = make(small)
    size = CAPACITY // 16 // 8
    barrier = threading.Barrier(4, timeout=60)

    def work(thread):
        barrier.wait()
        for i in range(12):
            rig.put((thread, i), cupy.full(size, float(100 * thread + i)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for (thread, i), _ in list(rig.skeletons.items()):
        np.testing.assert_array_equal(cupy.asnumpy(rig.get((thread, i))), np.full(size, float(100 * thread + i)))
