"""Computations of one's own on the simulated device, and what it was doing when."""

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.port import UnorderedAccess
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy, empty, run_kernel
from gpuspill.simulated.device.timeline import Span, busy_seconds, common_seconds


@pytest.fixture
def device():
    device = SimulatedDevice(10**6, bandwidth=1e6, clock=ManualClock())
    with simulated.use(device):
        yield device
    device.validate()


def scaled(x, out, factor):
    out[:] = x * factor


def test_a_computation_takes_the_devices_time_and_not_the_callers(device):
    x, y = asarray(np.arange(10.0)), empty(10)
    start = device.clock.now()
    assert run_kernel(scaled, x, y, factor=3, writes=(y,), seconds=2.0) is None
    assert device.clock.now() == start
    assert not device.current_stream().record().done()
    device.current_stream().synchronize()
    assert device.clock.now() == start + 2.0
    np.testing.assert_array_equal(asnumpy(y), np.arange(10.0) * 3)


def test_results_are_on_the_device_also_without_arguments_there(device):
    made = run_kernel(np.arange, 5, seconds=1.0)
    assert made.device is device
    np.testing.assert_array_equal(asnumpy(made), np.arange(5))
    with simulated.use(SimulatedDevice(1000)):
        assert run_kernel(np.add, made, 1).device is device


def test_it_is_ordered_as_any_other_computation(device):
    x, y = asarray(np.arange(10.0)), empty(10)
    with device.use_stream(device.new_stream("other")) as other:
        run_kernel(scaled, x, y, 2, writes=(y,), seconds=1.0)
    with pytest.raises(UnorderedAccess, match="scaled"):
        asnumpy(y)
    other.synchronize()
    np.testing.assert_array_equal(asnumpy(y), np.arange(10.0) * 2)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_seconds_that_make_no_sense(device, seconds):
    with pytest.raises(ValueError, match=r"^seconds"):
        run_kernel(np.zeros, 3, seconds=seconds)
    assert device.statistics().kernels == 0


def test_host_arrays_are_not_welcome(device):
    with pytest.raises(TypeError, match="asarray"):
        run_kernel(np.add, asarray([1.0]), np.ones(1))


def test_the_timeline_has_what_was_scheduled(device):
    x = asarray(np.zeros(1000, np.uint8))
    device.start_timeline()
    down, up = device.stream("to_host"), device.stream("to_device")
    there = device.allocate(2000)
    events = [
        device.copy_to_host(x.allocation, bytearray(1000), down),
        device.copy_to_device(bytearray(2000), there, up),
        device.copy_to_host(x.allocation, bytearray(500), down),
    ]
    run_kernel(np.zeros, 3, seconds=0.25)
    now = device.clock.now()
    for event in events:
        event.wait()
    spans = device.stop_timeline()
    assert [(lane, pytest.approx(start - now), pytest.approx(end - now), n) for lane, start, end, n in spans] == [
        ("to_host", 0, 0.001, 1000),
        ("to_device", 0, 0.002, 2000),
        ("to_host", 0.001, 0.0015, 500),
        ("default", 0, 0.25, 0),
    ]
    asnumpy(x)
    assert device.stop_timeline() == []


def test_what_overlaps_counts_once():
    some = [Span("a", 4.0, 6.0), Span("a", 0.0, 2.0), Span("a", 1.0, 3.0)]
    others = [Span("b", 2.5, 4.5), Span("b", 5.0, 5.5), Span("b", 7.0, 9.0)]
    assert busy_seconds(some) == 5.0
    assert common_seconds(some, others) == common_seconds(others, some) == 0.5 + 0.5 + 0.5
    assert common_seconds(some, some) == 5.0
    assert busy_seconds([]) == common_seconds(some, []) == 0.0


def test_a_fence_is_for_what_was_enqueued_for_one_allocation(device):
    x, y, untouched = asarray(np.arange(10.0)), empty(10), empty(10)
    with device.use_stream(device.new_stream("producer")):
        run_kernel(scaled, x, y, 2, writes=(y,), seconds=2.0)
    with device.use_stream(device.new_stream("reader")):
        run_kernel(np.sum, x, seconds=5.0)
    with device.use_stream(device.new_stream("somebody else")):
        run_kernel(np.zeros, 3, seconds=100.0)
    start = device.clock.now()
    assert device.fence(untouched.allocation).done()
    written, read = device.fence(y.allocation), device.fence(x.allocation)
    assert not written.done()
    assert device.clock.now() == start
    written.wait()
    assert device.clock.now() == start + 2.0
    np.testing.assert_array_equal(asnumpy(y), np.arange(10.0) * 2)  # raises if that were not known to be done
    assert device.fence(y.allocation).done()
    assert not read.done()
    read.wait()
    assert start + 5.0 <= device.clock.now() < start + 100.0
    device.copy_to_device(bytearray(80), x.allocation, device.stream("to_device")).wait()


def test_a_fence_is_for_copies_as_well(device):
    allocation = device.allocate(1000)
    copy = device.copy_to_device(b"\x01" * 1000, allocation, device.stream("to_device"))
    host = bytearray(1000)
    with pytest.raises(UnorderedAccess):
        device.copy_to_host(allocation, host, device.stream("to_host"))
    device.fence(allocation).wait()
    device.copy_to_host(allocation, host, device.stream("to_host")).wait()
    assert bytes(host) == b"\x01" * 1000
    assert copy.done()


def test_only_the_device_that_has_it_knows_what_was_enqueued_for_an_allocation(device):
    with pytest.raises(ValueError, match="is not of"):
        SimulatedDevice(1000).fence(device.allocate(10))
