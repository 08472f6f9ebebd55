"""Out-of-memory callbacks in RMM's stack of resources: on a look-alike, and on RMM itself where it is installed.

Neither needs a GPU: memory comes from a simulated device, by RMM's resource that calls back into Python.
"""

import gc
import random
import sys
import threading
import types
import weakref

import pytest

from gpuspill.device.adapters import InterfaceAdapter
from gpuspill.device.arrays import ArrayRegistry, Recipe
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.rmm_chain import RmmChain
from gpuspill.device.port import CopyPlan, Layout
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated.device.device import ManualClock, SimulatedDevice
from gpuspill.storage.files import FileStore
from gpuspill.testing.devices import DeviceTests
from gpuspill.testing.fake_driver import FakeDriver, FakeMemory
from gpuspill.tier import DeviceTier

ORDINAL = 5


def look_alike():
    """What is used of ``rmm.mr``, doing what RMM's sources do."""

    class DeviceMemoryResource:
        pass

    class CallbackMemoryResource(DeviceMemoryResource):
        def __init__(self, allocate_func, deallocate_func):
            self.allocate = lambda nbytes, stream=None: allocate_func(nbytes, stream)
            self.deallocate = lambda ptr, nbytes, stream=None: deallocate_func(ptr, nbytes, stream)

    class UpstreamResourceAdaptor(DeviceMemoryResource):
        def __init__(self, upstream_mr):
            self.upstream_mr = upstream_mr

        def get_upstream(self):
            return self.upstream_mr

        def allocate(self, nbytes, stream=None):
            return self.upstream_mr.allocate(nbytes, stream)

        def deallocate(self, ptr, nbytes, stream=None):
            self.upstream_mr.deallocate(ptr, nbytes, stream)

    class FailureCallbackResourceAdaptor(UpstreamResourceAdaptor):
        def __init__(self, upstream_mr, callback):
            super().__init__(upstream_mr)
            self.callback = callback

        def allocate(self, nbytes, stream=None):
            while True:
                try:
                    return self.upstream_mr.allocate(nbytes, stream)
                except MemoryError:
                    try:
                        again = self.callback(nbytes)
                    except Exception as error:  # its way leads through C++
                        raise RuntimeError(str(error)) from None
                    if not again:
                        raise

    resources = {}
    return types.SimpleNamespace(
        CallbackMemoryResource=CallbackMemoryResource,
        UpstreamResourceAdaptor=UpstreamResourceAdaptor,
        FailureCallbackResourceAdaptor=FailureCallbackResourceAdaptor,
        StatisticsResourceAdaptor=type("StatisticsResourceAdaptor", (UpstreamResourceAdaptor,), {}),
        get_per_device_resource=resources.__getitem__,
        set_per_device_resource=resources.__setitem__,
    )


@pytest.fixture(params=["look-alike", "RMM"])
def mr(request):
    if request.param == "look-alike":
        return look_alike()
    return pytest.importorskip("rmm.mr", reason="RMM is not installed")


#: Every resource with callbacks. Where the garbage collector finds one in a cycle, RMM frees the callbacks first, and
#: calls them when the memory goes: the process ends.
KEPT: list[object] = []


class RmmDriver(FakeDriver):
    """A fake driver, all memory of which goes through RMM's resources."""

    def __init__(self, device, mr):
        super().__init__(device)
        self.mr = mr
        self.allocations = {}
        self.chain = RmmChain(mr, ORDINAL)
        self.reinitialize()

    def reinitialize(self):
        resource = self.mr.CallbackMemoryResource(self.take, self.give_back)
        KEPT.append(resource)
        self.mr.set_per_device_resource(ORDINAL, resource)

    def take(self, nbytes, stream):
        allocation = self.know(self.device.allocate(nbytes))
        self.allocations[allocation.address] = allocation
        return allocation.address

    def give_back(self, address, nbytes, stream):
        assert self.allocations.pop(address).nbytes == nbytes

    def allocate(self, nbytes, stream):
        resource = self.chain.resource()
        return Memory(resource, resource.allocate(nbytes), nbytes)

    def connected(self):
        return self.chain.connected()

    def connect(self, callback):
        self.chain.connect(callback)

    def disconnect(self):
        self.chain.disconnect()


class Memory(FakeMemory):
    def __init__(self, resource, address, nbytes):
        self.resource = resource
        self.address = address
        self.nbytes = nbytes

    def free(self):
        self.resource.deallocate(self.address, self.nbytes)


class TestConformance(DeviceTests):
    capacity = 1 << 20

    @pytest.fixture
    def driver(self, mr):
        return RmmDriver(SimulatedDevice(1 << 20, bandwidth=1e6, latency=0.5, clock=ManualClock()), mr)

    @pytest.fixture
    def device(self, driver):
        device = GpuDevice(driver, plan=CopyPlan())
        yield device
        device.close()
        assert not driver.connected()


@pytest.fixture
def driver(mr):
    return RmmDriver(SimulatedDevice(1000, clock=ManualClock()), mr)


@pytest.fixture
def device(driver):
    return GpuDevice(driver, plan=CopyPlan())


def refuse(asked, name):
    def hook(nbytes, *_):
        asked.append(name)
        return False

    return hook


def test_memory_set_up_anew_is_noticed_and_the_hook_put_back(device, driver):
    """And what was allocated before is given back to where it came from."""
    asked = []
    installation = device.on_out_of_memory(refuse(asked, "ours"))
    before = device.allocate(100)
    driver.reinitialize()
    assert not installation.installed
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    assert asked == []
    installation.reinstall()
    assert installation.installed
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    assert asked == ["ours"]
    del before
    assert driver.device.statistics().live_bytes == 0
    device.close()
    assert not installation.installed


def test_adaptors_stacked_on_ours_do_not_hide_it(device, driver, mr):
    asked = []
    installation = device.on_out_of_memory(refuse(asked, "ours"))
    mr.set_per_device_resource(ORDINAL, mr.StatisticsResourceAdaptor(driver.chain.resource()))
    assert installation.installed
    installation.reinstall()
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    assert asked == ["ours"]
    installation.uninstall()  # it cannot be taken out from below; it says no from now on
    assert not installation.installed
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    assert asked == ["ours"]
    installation.reinstall()
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    assert asked == ["ours", "ours"]


def test_callbacks_of_others_below_and_on_ours_are_asked_too(device, driver, mr):
    asked = []

    def stack(name):
        adaptor = mr.FailureCallbackResourceAdaptor(driver.chain.resource(), refuse(asked, name))
        mr.set_per_device_resource(ORDINAL, adaptor)

    stack("below")
    device.on_out_of_memory(refuse(asked, "ours"))
    stack("above")
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    assert asked == ["below", "ours", "above"]


def test_a_hook_that_makes_room_lets_a_library_have_it(device, driver):
    held = [device.allocate(400), device.allocate(400)]
    asked = []

    def hook(nbytes, retries):
        asked.append(retries)
        return bool(held and held.pop())

    device.on_out_of_memory(hook)
    resource = driver.chain.resource()
    address = resource.allocate(900)
    assert asked == [0, 1]
    assert driver.find(address).nbytes == 900
    resource.deallocate(address, 900)
    assert driver.device.statistics().live_bytes == 0


@pytest.mark.parametrize("spillable", [True, False])
def test_what_libraries_keep_for_later_goes_before_any_value(device, driver, monkeypatch, spillable):
    pool = [driver.device.allocate(900)]
    library = types.SimpleNamespace(get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=pool.clear))
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())  # half imported
    asked = []
    device.on_out_of_memory(lambda nbytes, retries: bool(asked.append(retries)) or spillable)
    assert device.allocate(800).nbytes == 800
    assert (pool, asked) == ([], [])


def test_what_a_spilled_value_left_to_its_library_is_asked_for(device, driver, monkeypatch):
    """What a spilled array had goes to its library's own pool, and only from there to the device."""
    pool, values = [], [driver.device.allocate(900)]
    library = types.SimpleNamespace(get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=pool.clear))
    monkeypatch.setitem(sys.modules, "cupy", library)

    def spill(nbytes, retries):
        pool.extend(values)
        values.clear()
        return retries == 0

    device.on_out_of_memory(spill)
    assert device.allocate(800).nbytes == 800


def pool_on_top(driver, mr, nbytes=2000):
    """Stack what holds a lock while it asks below, as a user does; for the look-alike, one that says so."""
    if hasattr(mr, "PoolMemoryResource"):
        return mr.LimitingResourceAdaptor(driver.chain.resource(), 10_000)

    class Pool(mr.UpstreamResourceAdaptor):
        def __init__(self, upstream):
            super().__init__(upstream)
            self.lock = threading.Lock()

        def allocate(self, nbytes, stream=None):
            assert self.lock.acquire(blocking=False), "the thread waits for itself"
            try:
                return super().allocate(nbytes, stream)
            finally:
                self.lock.release()

        def deallocate(self, ptr, nbytes, stream=None):
            assert self.lock.acquire(blocking=False), "the thread waits for itself"
            try:
                super().deallocate(ptr, nbytes, stream)
            finally:
                self.lock.release()

    return Pool(driver.chain.resource())


def test_below_a_pool_nothing_is_spilled_and_the_callback_goes_on_top(device, driver, mr):
    """A pool holds its lock while it asks below, and what is spilled goes back to that pool."""
    asked, held = [], []

    def hook(nbytes, retries):
        asked.append(nbytes)
        if not held:
            return False
        pool.deallocate(*held.pop())
        return True

    installation = device.on_out_of_memory(hook)
    pool = pool_on_top(driver, mr)
    mr.set_per_device_resource(ORDINAL, pool)
    held += [(pool.allocate(400), 400), (pool.allocate(400), 400)]
    assert not installation.installed
    with pytest.raises(MemoryError):  # before the next look at the chain
        pool.allocate(400)
    assert asked == []
    installation.reinstall()
    assert installation.installed
    resource = driver.chain.resource()
    address = resource.allocate(400)
    assert asked == [400]
    resource.deallocate(address, 400)
    for piece in held:
        pool.deallocate(*piece)


def test_callbacks_that_were_replaced_live_as_long_as_the_chain(driver):
    """RMM lets go of the callback, which is Python's, before its resource, which may call it."""
    callbacks = []
    for _ in range(3):
        callback = refuse([], "ours")
        callbacks.append(weakref.ref(callback))
        driver.chain.connect(callback)
        driver.reinitialize()
        del callback
    driver.chain.disconnect()
    gc.collect()
    assert all(callback() is not None for callback in callbacks)


class Cudf:
    """What matters of cuDF, doing what its sources do: options, and a spill manager made with the first buffer."""

    def __init__(self, monkeypatch, mr, **options):
        self.monkeypatch, self.mr = monkeypatch, mr
        self.options = {"spill": False, "spill_on_demand": True, **options}
        self.manager_exists = False
        self.asked = []

    def load(self):
        module = types.ModuleType("cudf")
        module.get_option = self.options.__getitem__
        manager = types.ModuleType("cudf.core.buffer.spill_manager")
        manager.get_global_manager = self.get_global_manager
        for name in ("cudf", "cudf.core", "cudf.core.buffer"):
            self.monkeypatch.setitem(sys.modules, name, module)
        self.monkeypatch.setitem(sys.modules, manager.__name__, manager)

    def get_global_manager(self):
        if self.manager_exists:
            return
        self.manager_exists = True
        if not (self.options["spill"] and self.options["spill_on_demand"]):
            return
        found = top = self.mr.get_per_device_resource(ORDINAL)
        while True:
            if isinstance(found, self.mr.FailureCallbackResourceAdaptor):
                raise ValueError("Spill on demand (or another failure callback resource) is already registered")
            if not isinstance(found, self.mr.UpstreamResourceAdaptor):
                break
            found = found.get_upstream()
        callback = refuse(self.asked, "cuDF")
        self.mr.set_per_device_resource(ORDINAL, self.mr.FailureCallbackResourceAdaptor(top, callback))

    def use(self):
        """Make a buffer."""
        self.get_global_manager()


def who_is_asked(driver, cudf):
    cudf.asked.clear()
    with pytest.raises(MemoryError):
        driver.chain.resource().allocate(2000)
    return list(cudf.asked)


@pytest.fixture
def no_environment(monkeypatch):
    for name in ("CUDF_SPILL", "CUDF_SPILL_ON_DEMAND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "cudf", raising=False)


@pytest.mark.usefixtures("no_environment")
class TestBesideCudf:
    """cuDF fails the task that makes its first buffer if somebody's callback is in RMM before its own."""

    @pytest.fixture
    def cudf(self, monkeypatch, mr):
        return Cudf(monkeypatch, mr, spill=True)

    def test_it_goes_first_if_it_is_there_first(self, device, driver, cudf):
        cudf.load()
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        assert installation.installed
        cudf.use()
        assert who_is_asked(driver, cudf) == ["cuDF", "ours"]

    def test_it_is_made_room_for_when_it_is_imported_later(self, device, driver, cudf):
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        assert who_is_asked(driver, cudf) == ["ours"]
        cudf.load()
        assert not installation.installed
        installation.reinstall()  # as before each task
        assert installation.installed
        cudf.use()
        assert who_is_asked(driver, cudf) == ["cuDF", "ours"]

    def test_its_spilling_may_be_switched_on_later(self, device, driver, cudf):
        cudf.options["spill"] = False
        cudf.load()
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        assert installation.installed
        cudf.options["spill"] = True
        installation.reinstall()
        cudf.use()
        assert who_is_asked(driver, cudf) == ["cuDF", "ours"]

    @pytest.mark.parametrize("value", ["on", "TRUE", "1"])
    def test_it_is_waited_for_if_the_environment_switches_it_on(self, device, driver, cudf, monkeypatch, value):
        monkeypatch.setenv("CUDF_SPILL", value)
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        assert not installation.installed
        cudf.load()  # in a task
        cudf.use()
        assert who_is_asked(driver, cudf) == ["cuDF"]
        installation.reinstall()
        assert installation.installed
        assert who_is_asked(driver, cudf) == ["cuDF", "ours"]

    @pytest.mark.parametrize(
        ("spill", "on_demand"), [("off", ""), ("0", ""), ("maybe", ""), ("on", "off"), ("on", "false"), ("on", "0")]
    )
    def test_it_is_not_waited_for_in_vain(self, device, cudf, monkeypatch, spill, on_demand):
        monkeypatch.setenv("CUDF_SPILL", spill)
        if on_demand:
            monkeypatch.setenv("CUDF_SPILL_ON_DEMAND", on_demand)
        assert device.on_out_of_memory(refuse(cudf.asked, "ours")).installed

    def test_without_its_spilling_on_demand(self, device, driver, cudf):
        cudf.options["spill_on_demand"] = False
        cudf.load()
        device.on_out_of_memory(refuse(cudf.asked, "ours"))
        cudf.use()
        assert who_is_asked(driver, cudf) == ["ours"]

    def test_memory_set_up_anew_drops_its_callback_for_good(self, device, driver, cudf):
        cudf.load()
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        driver.reinitialize()
        assert not installation.installed
        installation.reinstall()
        assert installation.installed
        assert who_is_asked(driver, cudf) == ["ours"]

    def test_what_is_stacked_on_ours_keeps_it_out(self, device, driver, cudf, mr, caplog):
        """Its task does not fail for that."""
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        mr.set_per_device_resource(ORDINAL, mr.StatisticsResourceAdaptor(driver.chain.resource()))
        cudf.load()
        installation.reinstall()
        assert installation.installed
        cudf.use()
        assert who_is_asked(driver, cudf) == ["ours"]
        (record,) = caplog.records
        assert "CUDF_SPILL_DEVICE_LIMIT" in record.getMessage()

    def test_a_version_without_that_manager(self, device, cudf, monkeypatch, caplog):
        cudf.load()
        monkeypatch.setitem(sys.modules, "cudf.core.buffer.spill_manager", types.ModuleType("empty"))
        assert device.on_out_of_memory(refuse(cudf.asked, "ours")).installed
        (record,) = caplog.records
        assert "CUDF_SPILL_ON_DEMAND=off" in record.getMessage()

    def test_half_imported_or_without_spilling(self, device, cudf, monkeypatch):
        monkeypatch.setitem(sys.modules, "cudf", types.ModuleType("cudf"))
        installation = device.on_out_of_memory(refuse(cudf.asked, "ours"))
        assert installation.installed
        monkeypatch.setenv("CUDF_SPILL", "on")
        assert not installation.installed
        installation.reinstall()
        assert not installation.installed
        cudf.options.clear()
        cudf.load()
        assert not cudf.manager_exists
        installation.reinstall()
        assert installation.installed
        assert not cudf.manager_exists


MB = 2**20

#: What RMM has that may hold a lock while it asks below. (Arenas too; they ask CUDA for a device.)
STACKED = {
    "pool": lambda mr, below: mr.PoolMemoryResource(below, initial_pool_size=16 * MB),
    "limit": lambda mr, below: mr.LimitingResourceAdaptor(below, 2**40),
    "bins": lambda mr, below: mr.BinningMemoryResource(below, 12, 13),
}


@pytest.mark.parametrize("kind", STACKED)
def test_rmms_own_resources_on_top(kind):
    """Spilling gives memory back to what was stacked on the callback. With the callback below, the thread hung."""
    mr = pytest.importorskip("rmm.mr", reason="RMM is not installed")
    driver = RmmDriver(SimulatedDevice(64 * MB, clock=ManualClock()), mr)
    device = GpuDevice(driver, plan=CopyPlan())
    held, asked = [], []

    def hook(nbytes, retries):
        asked.append(nbytes)
        if not held:
            return False
        driver.chain.resource().deallocate(*held.pop())
        return True

    installation = device.on_out_of_memory(hook)
    stacked = STACKED[kind](mr, driver.chain.resource())
    mr.set_per_device_resource(ORDINAL, stacked)
    assert not installation.installed
    with pytest.raises(MemoryError):  # nothing of ours in the middle of that, whose lock this thread may hold
        stacked.allocate(128 * MB)
    assert not asked
    installation.reinstall()
    resource = driver.chain.resource()
    assert installation.installed
    for _ in range(8):
        held.append((resource.allocate(12 * MB), 12 * MB))
    assert asked
    while held:
        resource.deallocate(*held.pop())
    installation.uninstall()
    # Now, and not at the end of the process, when nothing of Python's can be called any more.
    driver.reinitialize()
    driver.chain._made.clear()
    driver.chain._adaptor = None
    del resource, stacked


@pytest.mark.parametrize("seed", range(3))
def test_what_leaves_a_pool_lies_side_by_side(tmp_path, seed):
    """A pool that is full of small values has no room for a large one until some leave that are neighbours."""
    mr = pytest.importorskip("rmm.mr", reason="RMM is not installed")
    count, nbytes, large = 256, 64 * 1024, 16
    driver = RmmDriver(SimulatedDevice(count * nbytes, clock=ManualClock()), mr)
    pool = mr.PoolMemoryResource(driver.chain.resource(), count * nbytes, count * nbytes)
    mr.set_per_device_resource(ORDINAL, pool)
    device = GpuDevice(driver, plan=CopyPlan())
    host = ProxifyManager(limit=None, store=FileStore(tmp_path), serializer=PickleSerializer(), sizeof=lambda value: 8)
    tier = DeviceTier(device, host, limit=None, registry=ArrayRegistry([InterfaceAdapter()]))
    whole = Recipe("interface", Layout(0, (nbytes,), (1,), "|u1", 1))
    registry = ArrayRegistry([InterfaceAdapter()])
    values = [tier.proxify(registry.rebuild(whole, device.allocate(nbytes))) for _ in range(count)]
    assert tier.statistics().spilled_nbytes == 0
    for number in random.Random(seed).sample(range(count), count):
        tier.resolve(values[number])
    asked = device.allocate(large * nbytes)
    assert large * nbytes <= tier.statistics().spilled_nbytes <= 2 * large * nbytes
    tier.validate()
    del asked, values
    tier.settle()
    tier.close()
    host.close()
    device.close()
    # Now, and not at the end of the process, when nothing of Python's can be called any more.
    driver.reinitialize()
    driver.chain._made.clear()
    driver.chain._adaptor = None
    gc.collect()
    del pool
