"""The device of a GPU keeps the contract: on a driver of which only the boundary is real, and copies are late."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.port import Driver
from gpuspill.device.port import AllocationId, CopyPlan, DeviceError, FreedUnderCopy, SourceChanged, UnorderedAccess
from gpuspill.simulated.device.device import PENDING, ManualClock, RealClock, SimulatedDevice
from gpuspill.testing.devices import DeviceTests, fetch, pattern, store
from gpuspill.testing.fake_driver import FakeDriver

PLAN = CopyPlan(1000)


class TestConformance(DeviceTests):
    capacity = 1 << 20

    @pytest.fixture
    def device(self):
        device = GpuDevice(FakeDriver(SimulatedDevice(1 << 20, bandwidth=1e6, latency=0.5, clock=ManualClock())))
        yield device
        device.close()


class TestConformanceInRealTime(DeviceTests):
    capacity = 1 << 20

    @pytest.fixture
    def device(self):
        simulated = SimulatedDevice(1 << 20, bandwidth=1e10, latency=1e-6, checks=False, clock=RealClock())
        device = GpuDevice(FakeDriver(simulated))
        yield device
        device.close()


@pytest.fixture
def clock():
    return ManualClock(jump=False)


@pytest.fixture
def driver(clock):
    """100 bytes a second and a second of latency, on a clock that only the test moves."""
    simulated = SimulatedDevice(1000, bandwidth=100, latency=1, clock=clock)
    yield FakeDriver(simulated)
    clock.advance(1e9)
    simulated.validate()


@pytest.fixture
def device(driver):
    device = GpuDevice(driver, plan=PLAN)
    yield device
    driver.device.clock.advance(1e9)
    device.validate()
    device.close()


def filled(device, clock, data):
    allocation = device.allocate(len(data))
    event = device.copy_to_device(data, allocation, device.stream("to_device"))
    clock.advance(100)
    assert event.done()
    return allocation


def test_the_fake_has_all_of_the_boundary(driver):
    boundary = {name for name in vars(Driver) if not name.startswith("_")}
    assert boundary <= set(dir(driver))


def test_nothing_is_done_on_the_device_before_it_is_used():
    """No stream means no context, which would take memory of the device in every process."""
    driver = FakeDriver(SimulatedDevice(1000))
    device = GpuDevice(driver)
    device.on_out_of_memory(lambda nbytes, retries: False)
    device.memory_info()
    device.statistics()
    device.borrow(AllocationId(device.identity, 1, 2), object())
    device.close()
    assert driver.streams == driver.events == 0


def test_both_ends_are_kept_until_the_copy_was_observed(device, driver, clock):
    """Dropping the source of a copy in flight, or its destination, does not corrupt anybody."""
    data = pattern(100)
    allocation = filled(device, clock, data)
    host = bytearray(100)
    event = device.copy_to_host(allocation, memoryview(host), device.stream("to_host"))
    del allocation
    gc.collect()
    assert device.statistics().live_bytes == 100
    assert host == bytes([PENDING]) * 100
    clock.advance(2)
    assert event.done()
    assert host == data.tobytes()
    assert device.statistics().live_bytes == 0


def test_freeing_under_a_copy_is_refused(device, clock):
    allocation = filled(device, clock, pattern(100))
    event = device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
    with pytest.raises(FreedUnderCopy, match="1 copies"):
        device.free(allocation)
    clock.advance(2)
    assert event.done()
    device.free(allocation)


def test_pinned_memory_is_not_released_under_a_copy(device, driver, clock):
    allocation = filled(device, clock, pattern(100))
    buffer = device.pinned(1000)
    event = device.copy_to_host(allocation, buffer.view[500:600], device.stream("to_host"))
    with pytest.raises(FreedUnderCopy):
        buffer.release()
    clock.advance(2)
    assert event.done()
    buffer.release()
    assert not driver.pinned


def test_pinned_memory_lives_as_long_as_a_view_of_it(device, driver):
    view = device.pinned(100).view
    view[:] = bytes(range(100))
    gc.collect()
    assert bytes(view) == bytes(range(100))
    assert device.statistics().pinned_bytes == 100
    del view
    assert not driver.pinned
    assert device.statistics().pinned_bytes == 0


def test_a_copy_that_is_not_ordered_after_its_producer_is_found_out(device, driver, clock):
    """By an event of the producer's stream, where that is known; else by waiting for everything."""
    simulated = driver.device

    def computed():
        allocation = device.allocate(100)
        memory = driver.find(allocation.address)
        simulated.kernels.produced(simulated.kernels.launch("work", [], [memory], 0), memory, "work")
        return allocation

    with pytest.raises(UnorderedAccess, match="work"):
        device.copy_to_host(computed(), bytearray(100), device.stream("to_host"))
    stream = device.stream("to_host")
    allocation = computed()
    stream.wait(device.producer(simulated.default_stream).record())
    device.copy_to_host(allocation, bytearray(100), stream)
    clock.advance(100)
    allocation = computed()
    device.synchronize()
    device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))


def test_the_port_does_not_copy_on_the_streams_of_others(device, driver):
    producer = device.producer(driver.device.default_stream)
    with pytest.raises(ValueError, match="streams"):
        device.copy_to_host(device.allocate(1), bytearray(1), producer)


def test_whoever_asks_is_told_that_a_copy_failed(device, clock):
    """Also when somebody else looked first, and however often."""
    allocation = device.allocate(100)
    source = bytearray(100)
    event = device.copy_to_device(source, allocation, device.stream("to_device"))
    source[0] = 1
    clock.advance(2)
    assert device.statistics().copies_in_flight == 0
    for ask in (event.done, event.wait, event.done):
        with pytest.raises(SourceChanged):
            ask()


def test_waiting_with_a_timeout_gives_up(device, clock):
    allocation = filled(device, clock, pattern(100))
    event = device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
    assert event.wait(timeout=0) is False
    assert device.statistics().copies_in_flight == 1
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(event.wait, 60)
        clock.advance(2)
        assert waiter.result(timeout=60) is True


def test_events_are_given_back(device, driver, clock):
    allocation = filled(device, clock, pattern(100))
    for _ in range(10):
        event = device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
        clock.advance(2)
        assert event.done()
    del event
    assert driver.events == 0


def test_observing_one_copy_lets_go_of_those_before_it(device, driver, clock):
    allocation = filled(device, clock, pattern(100))
    hosts = [bytearray(100) for _ in range(5)]
    events = [device.copy_to_host(allocation, host, device.stream("to_host")) for host in hosts]
    clock.advance(100)
    last = events.pop()
    del events
    assert driver.events > 1
    assert last.wait()
    assert driver.events == 1


def test_what_is_borrowed_is_not_freed(device, driver):
    owner = driver.know(driver.device.allocate(10))
    borrowed = device.borrow(AllocationId(device.identity, owner.address, 10), owner)
    with pytest.raises(ValueError, match="borrowed"):
        device.free(borrowed)
    with pytest.raises(ValueError, match="not on"):
        device.borrow(AllocationId("cuda:7", owner.address, 10), owner)
    mine = device.allocate(10)
    assert device.borrow(mine.identity, mine.owner) is mine


def test_memory_of_another_device_is_refused(device, driver):
    other = GpuDevice(FakeDriver(SimulatedDevice(1000)), plan=PLAN)
    with pytest.raises(ValueError, match="not of"):
        device.free(other.allocate(1))
    with pytest.raises(ValueError, match="streams"):
        device.copy_to_host(device.allocate(1), bytearray(1), other.stream("to_host"))
    with pytest.raises(ValueError, match="no event"):
        device.stream("to_host").wait(other.stream("to_host").record())


# -- out of memory ----------------------------------------------------------------------------------


def test_allocations_of_libraries_ask_too(device, driver):
    """They go through the same allocator, and know nothing of the port."""
    held = [device.allocate(900)]
    asked = []

    def hook(nbytes, retries):
        asked.append((nbytes, retries))
        return bool(held and held.pop())

    device.on_out_of_memory(hook)
    library = driver.device.allocate(800)
    assert asked == [(800, 0)]
    assert library.nbytes == 800


def test_the_hooks_know_how_often_they_were_asked_for_one_allocation(device, driver):
    """The allocator does not say: of two allocations of one size in a row, each starts from 0."""
    held = [driver.device.allocate(200) for _ in range(5)]
    asked = []

    def hook(nbytes, retries):
        asked.append(retries)
        return bool(held and held.pop())

    device.on_out_of_memory(hook)
    kept = [driver.device.allocate(400)]
    assert asked == [0, 1]
    kept.append(driver.device.allocate(400))
    assert asked == [0, 1, 0, 1]
    with pytest.raises(MemoryError):
        driver.device.allocate(400)
    assert asked == [0, 1, 0, 1, 0, 1]


def test_hooks_of_others_are_asked_as_well(device, driver):
    asked = []
    driver.device.on_out_of_memory(lambda nbytes, retries: asked.append("theirs"))
    device.on_out_of_memory(lambda nbytes, retries: asked.append("ours"))
    driver.device.on_out_of_memory(lambda nbytes, retries: asked.append("later"))
    with pytest.raises(MemoryError):
        device.allocate(2000)
    assert asked == ["theirs", "ours", "later"]


def test_a_library_that_sets_up_its_memory_anew_is_noticed(device, driver):
    asked = []
    installation = device.on_out_of_memory(lambda nbytes, retries: asked.append(nbytes))
    driver.device.drop_hooks()
    assert not installation.installed
    installation.reinstall()
    installation.reinstall()
    assert installation.installed
    with pytest.raises(MemoryError):
        driver.device.allocate(2000)
    assert asked == [2000]
    installation.uninstall()
    assert not driver.connected()


def test_a_hook_that_always_promises_does_not_hang_anybody(device):
    device.on_out_of_memory(lambda nbytes, retries: True)
    with pytest.raises(MemoryError):
        device.allocate(2000)


def test_two_threads_are_in_the_hook_at_once(device):
    inside = threading.Barrier(2, timeout=60)
    device.on_out_of_memory(lambda nbytes, retries: inside.wait() < 0)

    def allocate(_):
        with pytest.raises(MemoryError):
            device.allocate(2000)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(allocate, range(2)))


def test_an_error_of_the_driver_is_no_lack_of_memory(device, driver, monkeypatch):
    def fail(*args):
        raise DeviceError("broken")

    monkeypatch.setattr(driver, "allocate", fail)
    with pytest.raises(DeviceError, match="broken"):
        device.allocate(1)
    assert device.statistics().out_of_memory == 0


# -- how to copy ------------------------------------------------------------------------------------


def test_how_to_copy_is_found_out_once_and_not_in_a_hook():
    simulated = SimulatedDevice(256 * 2**20, bandwidth=1e9, latency=1e-3, checks=False, clock=ManualClock())
    device = GpuDevice(FakeDriver(simulated))
    plans = []

    def hook(nbytes, retries):
        plans.append(device.plan())
        return False

    device.on_out_of_memory(hook)
    with pytest.raises(MemoryError):
        device.allocate(2**30)
    assert plans == [CopyPlan(8 * 2**20, True)]
    assert simulated.statistics().copies_to_host == 0
    plan = device.plan()
    copies = simulated.statistics().copies_to_host
    assert copies > 0
    assert device.plan() is plan
    assert simulated.statistics().copies_to_host == copies
    assert device.statistics().live_bytes == device.statistics().pinned_bytes == 0
    device.close()


def test_without_room_to_try_a_plan_is_assumed():
    device = GpuDevice(FakeDriver(SimulatedDevice(2**20)))
    assert device.plan() == CopyPlan(8 * 2**20, True)


def test_memory_that_is_stored_is_fetched(device, clock):
    """The kit's helpers work where nobody moves the clock by hand."""
    quick = GpuDevice(FakeDriver(SimulatedDevice(1000, clock=ManualClock())), plan=PLAN)
    data = pattern(500)
    assert fetch(quick, store(quick, data)) == data.tobytes()
    np.testing.assert_array_equal(np.frombuffer(fetch(quick, store(quick, data)), np.uint8), data)
