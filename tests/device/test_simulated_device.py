"""The simulated device keeps the contract (the conformance suite), and is late and strict beyond it."""

import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuspill.device.port import (
    DeviceError,
    FreedUnderCopy,
    OutOfMemory,
    SourceChanged,
    UnorderedAccess,
    UseAfterFree,
)
from gpuspill.simulated.device.device import FRESH, PENDING, ManualClock, RealClock, SimulatedDevice
from gpuspill.testing.devices import DeviceTests, fetch, pattern, store


class TestConformance(DeviceTests):
    detects_misuse = True
    capacity = 1 << 20

    @pytest.fixture
    def device(self):
        device = SimulatedDevice(1 << 20, bandwidth=1e6, latency=0.5, clock=ManualClock())
        yield device
        device.close()


class TestConformanceInRealTime(DeviceTests):
    """Without checks and with threads that really run: what is promised does not depend on either."""

    detects_misuse = True
    capacity = 1 << 20

    @pytest.fixture
    def device(self):
        device = SimulatedDevice(1 << 20, bandwidth=1e10, latency=1e-6, checks=False, clock=RealClock())
        yield device
        device.close()


@pytest.fixture
def clock():
    return ManualClock(jump=False)


@pytest.fixture
def device(clock):
    """100 bytes a second and a second of latency, on a clock that only the test moves."""
    device = SimulatedDevice(1000, bandwidth=100, latency=1, clock=clock)
    yield device
    clock.advance(1e9)
    device.validate()


def filled(device, data):
    """Put bytes on the device without waiting for the clock."""
    return device.adopt(np.frombuffer(data, np.uint8).copy())


# -- late -------------------------------------------------------------------------------------------


def test_a_copy_to_the_host_lands_when_it_is_observed(device, clock):
    source = filled(device, bytes(range(100)))
    host = bytearray(100)
    event = device.copy_to_host(source, host, device.stream("to_host"))
    assert host == bytes([PENDING]) * 100
    clock.advance(1.999)
    assert not event.done()
    assert host == bytes([PENDING]) * 100
    clock.advance(0.001)
    assert host == bytes([PENDING]) * 100  # due, but nobody asked: time passing observes nothing
    assert event.done()
    assert host == bytes(range(100))


def test_a_copy_to_the_device_lands_when_it_is_observed(device, clock):
    allocation = filled(device, bytes(100))
    event = device.copy_to_device(bytes(range(100)), allocation, device.stream("to_device"))
    assert bytes(allocation.storage) == bytes([PENDING]) * 100
    clock.advance(2)
    assert bytes(allocation.storage) == bytes([PENDING]) * 100
    assert event.done()
    assert bytes(allocation.storage) == bytes(range(100))


def test_new_memory_is_not_zero(device):
    assert bytes(device.allocate(10).storage) == bytes([FRESH]) * 10


def test_waiting_blocks_until_the_clock_is_moved(device, clock):
    source = filled(device, bytes(range(100)))
    host = bytearray(100)
    event = device.copy_to_host(source, host, device.stream("to_host"))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(event.wait)
        clock.wait_for_waiters(1)
        assert host == bytes([PENDING]) * 100
        assert not waiter.done()
        clock.advance(2)
        assert waiter.result(timeout=60)
    assert host == bytes(range(100))


def test_waiting_with_a_timeout_gives_up_and_leaves_the_copy_in_flight(device, clock):
    source = filled(device, bytes(100))
    host = bytearray(100)
    event = device.copy_to_host(source, host, device.stream("to_host"))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(event.wait, 1.5)
        clock.wait_for_waiters(1)
        clock.advance(1.5)
        assert waiter.result(timeout=60) is False
    assert host == bytes([PENDING]) * 100
    assert device.statistics().copies_in_flight == 1
    clock.advance(1)
    assert event.wait(1.5)
    assert host == bytes(100)


def test_several_threads_may_wait_for_one_copy(device, clock):
    source = filled(device, bytes(range(100)))
    host = bytearray(100)
    event = device.copy_to_host(source, host, device.stream("to_host"))
    with ThreadPoolExecutor(3) as pool:
        waiters = [pool.submit(lambda: event.wait() and bytes(host)) for _ in range(3)]
        clock.wait_for_waiters(3)
        clock.advance(2)
        assert {waiter.result(timeout=60) for waiter in waiters} == {bytes(range(100))}
    assert device.statistics().copies_in_flight == 0


def test_bytes_are_taken_when_the_copy_lands_not_when_it_was_enqueued():
    """Without checks a changed source is not found out, and what arrives is what it was changed to."""
    device = SimulatedDevice(1000, checks=False, clock=ManualClock())
    host = bytearray(b"old")
    allocation = device.allocate(3)
    event = device.copy_to_device(host, allocation, device.stream("to_device"))
    host[:] = b"new"
    event.wait()
    assert fetch(device, allocation) == b"new"


# -- how long ---------------------------------------------------------------------------------------


@pytest.fixture
def timed():
    """100 bytes a second, no latency, on a clock that whoever waits moves."""
    return SimulatedDevice(10_000, bandwidth=100, clock=ManualClock())


def test_copies_in_one_direction_share_its_link(timed):
    source = filled(timed, bytes(100))
    hosts = [bytearray(100) for _ in range(4)]
    streams = [timed.stream("to_host"), timed.new_stream("another")]
    for i, host in enumerate(hosts):
        timed.copy_to_host(source, host, streams[i % 2])
    timed.synchronize()
    assert timed.clock.now() == pytest.approx(4)


def test_the_two_directions_run_at_the_same_time(timed):
    source, target = filled(timed, bytes(400)), timed.allocate(300)
    hosts = [bytearray(100) for _ in range(4)]
    for i, host in enumerate(hosts):
        timed.copy_to_host(source, host, timed.stream("to_host"), offset=100 * i)
    for i in range(3):
        timed.copy_to_device(bytes(100), target, timed.stream("to_device"), offset=100 * i)
    timed.stream("to_device").synchronize()
    assert timed.clock.now() == pytest.approx(3)
    timed.synchronize()
    assert timed.clock.now() == pytest.approx(4)


def test_a_stream_that_waits_for_another_starts_after_it(timed):
    allocation = timed.allocate(100)
    up, down = timed.stream("to_device"), timed.stream("to_host")
    down.wait(timed.copy_to_device(bytes(100), allocation, up))
    timed.copy_to_host(allocation, bytearray(100), down).wait()
    assert timed.clock.now() == pytest.approx(2)


def test_every_copy_takes_its_latency_and_its_bytes():
    device = SimulatedDevice(1000, bandwidth=100, latency=3, clock=ManualClock())
    store(device, bytes(50))
    assert device.clock.now() == pytest.approx(3.5)
    device.configure(bandwidth=None)
    store(device, bytes(50))
    assert device.clock.now() == pytest.approx(6.5)


def test_computations_take_their_latency_on_their_stream():
    device = SimulatedDevice(1000, kernel_latency=2, clock=ManualClock())
    allocation = device.allocate(10)
    device.kernels.launch("work", [], [allocation], device.configuration.kernel_latency)
    device.kernels.launch("work", [allocation], [], device.configuration.kernel_latency)
    down = device.stream("to_host")
    down.wait(device.default_stream.record())
    device.copy_to_host(allocation, bytearray(10), down).wait()
    assert device.clock.now() == pytest.approx(4)


def test_real_time_passes_by_itself():
    device = SimulatedDevice(1000, latency=1e-4)
    before = device.clock.now()
    store(device, bytes(10))
    assert device.clock.now() >= before + 1e-4


# -- strict -----------------------------------------------------------------------------------------


def test_time_does_not_order_anything(device, clock):
    """The copy was due long ago and the race is still a race: the next machine may be slower."""
    allocation = device.allocate(100)
    event = device.copy_to_device(bytes(100), allocation, device.stream("to_device"))
    clock.advance(1000)
    with pytest.raises(UnorderedAccess):
        device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
    assert event.done()
    device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))


def test_copying_a_result_without_regard_to_its_producer_is_found_out(timed):
    allocation = timed.allocate(100)
    timed.kernels.launch("work", [], [allocation], 0)
    with pytest.raises(UnorderedAccess, match=r"work on stream 'default'"):
        timed.copy_to_host(allocation, bytearray(100), timed.stream("to_host"))
    timed.stream("to_host").wait(timed.default_stream.record())
    timed.copy_to_host(allocation, bytearray(100), timed.stream("to_host")).wait()


def test_synchronising_the_device_orders_after_every_producer(timed):
    allocation = timed.allocate(100)
    with timed.use_stream(timed.new_stream("somebody's")):
        timed.kernels.launch("work", [], [allocation], 0)
    timed.synchronize()
    timed.copy_to_host(allocation, bytearray(100), timed.stream("to_host")).wait()


def test_an_event_recorded_before_the_work_does_not_cover_it(timed):
    allocation = timed.allocate(100)
    early = timed.default_stream.record()
    timed.kernels.launch("work", [], [allocation], 0)
    early.wait()
    timed.stream("to_host").wait(early)
    with pytest.raises(UnorderedAccess):
        timed.copy_to_host(allocation, bytearray(100), timed.stream("to_host"))


def test_order_is_handed_on(timed):
    """A third stream is ordered after the first because the second was."""
    allocation = timed.allocate(100)
    second = timed.new_stream("second")
    second.wait(timed.copy_to_device(pattern(100), allocation, timed.stream("to_device")))
    timed.stream("to_host").wait(second.record())
    host = bytearray(100)
    timed.copy_to_host(allocation, host, timed.stream("to_host")).wait()
    assert host == pattern(100).tobytes()


def test_a_computation_that_overwrites_what_is_being_copied_is_found_out(timed):
    allocation = filled(timed, bytes(100))
    event = timed.copy_to_host(allocation, bytearray(100), timed.stream("to_host"))
    timed.kernels.launch("reading", [allocation], [], 0)
    with pytest.raises(UnorderedAccess, match="writing"):
        timed.kernels.launch("writing", [], [allocation], 0)
    event.wait()
    timed.kernels.launch("writing", [], [allocation], 0)


def test_a_computation_has_the_bytes_of_the_copies_it_is_ordered_after(timed):
    """It waits for them; that does not count as observed, so a host that did not wait is still found out."""
    allocation = timed.allocate(100)
    event = timed.copy_to_device(pattern(100), allocation, timed.stream("to_device"))
    timed.default_stream.wait(event)
    timed.kernels.launch("work", [allocation], [], 0)
    assert bytes(allocation.storage) == pattern(100).tobytes()
    assert timed.clock.now() == pytest.approx(1)
    with pytest.raises(FreedUnderCopy):
        timed.free(allocation)
    event.wait()


def test_a_computation_that_only_reads_does_not_wait_for_a_copy_that_does_too(timed):
    allocation = filled(timed, bytes(100))
    timed.copy_to_host(allocation, bytearray(100), timed.stream("to_host"))
    timed.kernels.launch("work", [allocation], [], 0)
    assert timed.clock.now() == 0
    timed.synchronize()


def test_changing_the_source_of_a_copy_is_found_out(timed):
    allocation = timed.allocate(100)
    for change in (0, 50, 99):
        host = bytearray(pattern(100).tobytes())
        event = timed.copy_to_device(host, allocation, timed.stream("to_device"))
        host[change] ^= 1
        with pytest.raises(SourceChanged):
            event.wait()
    assert timed.statistics().violations == 3


def test_dropping_the_destination_under_a_copy_is_found_out(timed):
    allocation = timed.allocate(100)
    event = timed.copy_to_device(bytes(100), allocation, timed.stream("to_device"))
    del allocation
    with pytest.raises(FreedUnderCopy, match="dropped"):
        event.wait()


def test_a_failed_copy_is_told_to_whoever_synchronises_first(timed):
    allocation = timed.allocate(100)
    timed.copy_to_device(bytes(100), allocation, timed.stream("to_device"))
    del allocation
    with pytest.raises(FreedUnderCopy):
        timed.synchronize()
    timed.synchronize()
    assert timed.statistics().violations == 1


def test_a_failed_copy_does_not_stop_those_after_it(timed):
    allocation = timed.allocate(100)
    first = timed.copy_to_device(bytes(100), allocation, timed.stream("to_device"))
    del allocation
    other = timed.allocate(100)
    second = timed.copy_to_device(pattern(100), other, timed.stream("to_device"))
    with pytest.raises(FreedUnderCopy):
        second.wait()  # nobody was told of the first
    with pytest.raises(FreedUnderCopy):
        first.wait()
    assert second.wait()
    assert fetch(timed, other) == pattern(100).tobytes()


def test_two_copies_into_one_host_buffer_need_an_order(timed):
    source = filled(timed, bytes(100))
    host = bytearray(100)
    event = timed.copy_to_host(source, host, timed.stream("to_host"))
    with pytest.raises(UnorderedAccess):
        timed.copy_to_host(source, host, timed.new_stream("another"))
    event.wait()


def test_two_copies_from_one_host_buffer_need_none(timed):
    host = pattern(100)
    one, two = timed.allocate(100), timed.allocate(100)
    timed.copy_to_device(host, one, timed.stream("to_device"))
    timed.copy_to_device(host, two, timed.new_stream("another"))
    timed.synchronize()
    assert fetch(timed, one) == fetch(timed, two) == host.tobytes()


def test_a_destination_that_an_earlier_copy_still_reads_is_not_poisoned(timed):
    """From the device into staging, from there to elsewhere on the device, all enqueued at once."""
    source, target = filled(timed, pattern(100).tobytes()), timed.allocate(100)
    up, down = timed.stream("to_device"), timed.stream("to_host")
    timed.configure(checks=False)  # the staging buffer changes under the second copy, in the right order
    host = bytearray(100)
    up.wait(timed.copy_to_host(source, host, down))
    event = timed.copy_to_device(host, target, up)
    down.wait(event)
    timed.configure(checks=True)
    timed.copy_to_host(source, host, down, offset=0).wait()
    assert event.done()
    assert fetch(timed, target) == pattern(100).tobytes()


def test_events_and_streams_of_another_device_are_refused(timed):
    other = SimulatedDevice(1000)
    with pytest.raises(ValueError, match="not of"):
        timed.copy_to_host(timed.allocate(1), bytearray(1), other.stream("to_host"))
    with pytest.raises(ValueError, match="not of"):
        timed.copy_to_host(other.allocate(1), bytearray(1), timed.stream("to_host"))
    with pytest.raises(ValueError, match="no event"):
        timed.default_stream.wait(other.default_stream.record())
    with pytest.raises(ValueError, match="not of"), timed.use_stream(other.default_stream):
        pass


# -- memory -----------------------------------------------------------------------------------------


def test_two_devices_share_nothing():
    one, two = SimulatedDevice(1000), SimulatedDevice(2000)
    assert one.identity != two.identity
    a, b = one.allocate(600), two.allocate(600)
    assert a.address != b.address
    assert (one.memory_info(), two.memory_info()) == ((400, 1000), (1400, 2000))


def test_an_address_is_used_again_but_not_while_it_lives(timed):
    first = timed.allocate(100)
    address = first.address
    second = timed.allocate(100)
    assert second.address != address
    del first
    assert timed.allocate(100).address == address


def test_memory_in_a_cycle_is_freed_by_the_collector(timed):
    cycle = [timed.allocate(100)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert timed.statistics().live_bytes == 0


def test_memory_may_be_dropped_while_the_lock_is_held(timed):
    """As by a collection in the middle of the device's own code."""
    allocation = [timed.allocate(100)]
    with timed._lock:
        allocation.clear()
    assert timed.statistics().live_bytes == 0


def test_the_peak_is_the_most_there_was(timed):
    kept = timed.allocate(100)
    del kept
    kept = timed.allocate(60)
    assert timed.statistics().peak_bytes == 100
    timed.reset_peak()
    assert timed.statistics().peak_bytes == kept.nbytes == 60


def test_changing_the_configuration(timed):
    kept = timed.allocate(500)
    with pytest.raises(ValueError, match="500 bytes"):
        timed.configure(memory=499, latency=7)
    assert timed.configuration.latency == 0
    timed.configure(memory=500)
    with pytest.raises(OutOfMemory):
        timed.allocate(1)
    del kept
    for wrong in ({"memory": -1}, {"bandwidth": 0}, {"latency": -1}, {"kernel_latency": float("nan")}):
        (name,) = wrong
        with pytest.raises(ValueError, match=name):
            timed.configure(**wrong)
    with pytest.raises(TypeError, match="speed"):
        timed.configure(speed=1)


def test_a_hook_that_always_promises_does_not_hang_anybody(timed):
    timed.on_out_of_memory(lambda nbytes, retries: True)
    with pytest.raises(OutOfMemory, match="retried"):
        timed.allocate(20_000)


def test_hooks_can_be_dropped_by_others_and_are_then_missing(timed):
    installation = timed.on_out_of_memory(lambda nbytes, retries: False)
    timed.drop_hooks()
    assert not installation.installed
    installation.reinstall()
    assert installation.installed


def test_hooks_guard_each_thread_on_its_own(timed):
    """Two threads are in the hook at once: one being inside does not keep the other from being asked."""
    inside = threading.Barrier(2, timeout=60)

    def hook(nbytes, retries):
        inside.wait()
        return False

    timed.on_out_of_memory(hook)

    def allocate():
        with pytest.raises(OutOfMemory):
            timed.allocate(20_000)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(waiter.result(timeout=60) for waiter in [pool.submit(allocate), pool.submit(allocate)])


def test_every_use_of_freed_memory_fails(timed):
    allocation = timed.allocate(100)
    timed.free(allocation)
    for use in (
        lambda: allocation.storage,
        lambda: timed.kernels.launch("work", [allocation], [], 0),
        lambda: timed.free(allocation),
    ):
        with pytest.raises(UseAfterFree):
            use()


def test_the_device_errors_are_one_family():
    for error in (UnorderedAccess, FreedUnderCopy, SourceChanged, UseAfterFree):
        assert issubclass(error, DeviceError)
    assert issubclass(OutOfMemory, MemoryError)
    travelled = pickle.loads(pickle.dumps(OutOfMemory("why")))
    assert (type(travelled), str(travelled)) == (OutOfMemory, "why")


# -- the clock --------------------------------------------------------------------------------------


def test_a_manual_clock_stands_still_and_does_not_run_backwards(clock):
    assert clock.now() == 0
    clock.advance(2)
    assert clock.now() == 2
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_forgotten_manual_clock_says_so():
    with pytest.raises(RuntimeError, match="no thread advances"):
        ManualClock(jump=False, guard=0.01).wait_until(1)
    with pytest.raises(RuntimeError, match="waiting threads"):
        ManualClock(jump=False, guard=0.01).wait_for_waiters(1)
