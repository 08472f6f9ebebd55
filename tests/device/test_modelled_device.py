"""The simulated device that says what its use costs the host: the model is added up exactly."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpuspill.device.host import as_bytes
from gpuspill.simulated.device.costs import MODELS, HostCosts
from gpuspill.simulated.device.modelled import ModelledDevice
from gpuspill.simulated.device.thread_clock import ThreadClock
from gpuspill.storage.buffers import BufferPool

MIB = 2**20
#: Much slower than Python, so that each part can be told in the sum.
COSTS = HostCosts(call=100.0, latency=0.0, memcpy=4 * MIB, fresh=2 * MIB, pin=8 * MIB)


def device(**options):
    return ModelledDevice(64 * MIB, bandwidth=MIB, costs=COSTS, **options)


def seconds(of, work):
    of.clock.begin()
    work()
    return of.clock.elapsed()


def near(number):
    return pytest.approx(number, abs=0.9)


def test_a_copy_to_pinned_memory_takes_the_call_and_is_waited_for():
    gpu = device()
    source, target = gpu.allocate(8 * MIB), gpu.pinned(8 * MIB)
    stream = gpu.stream("to_host")
    events = []
    assert seconds(gpu, lambda: events.append(gpu.copy_to_host(source, target.view, stream))) == near(100)
    # The link works by itself.
    assert seconds(gpu, events[0].wait) == near(100)
    assert gpu.pageable_nbytes == 0


def test_a_copy_to_pageable_memory_takes_the_thread():
    gpu, pool = device(), BufferPool(0)
    source, target = gpu.allocate(8 * MIB), pool.allocate(8 * MIB)
    stream = gpu.stream("to_host")
    # 8 s on the link, 4 s for fresh pages: the call, and the longer of them, since they overlap.
    assert seconds(gpu, lambda: gpu.copy_to_host(source, target, stream).wait()) == near(100 + 8 + 100)
    assert gpu.pageable_nbytes == 8 * MIB


def test_memory_is_fresh_once():
    gpu = device()
    target, source = (as_bytes(BufferPool(0).allocate(8 * MIB), writable=True) for _ in range(2))
    assert seconds(gpu, lambda: gpu.copy_on_host(target, source)) == near(4)
    assert seconds(gpu, lambda: gpu.copy_on_host(target, source)) == near(2)
    other = as_bytes(BufferPool(0).allocate(8 * MIB), writable=True)
    assert seconds(gpu, lambda: gpu.copy_on_host(other, source)) == near(4)


def test_pinning_takes_its_time_and_what_is_pinned_is_never_fresh():
    gpu = device()
    found = []
    assert seconds(gpu, lambda: found.append(gpu.pinned(16 * MIB))) == near(100 + 2)
    target = as_bytes(found[0].view, writable=True)
    assert seconds(gpu, lambda: gpu.copy_on_host(target[: 8 * MIB], target[8 * MIB :])) == near(2)


def test_bytes_move_if_they_are_to():
    gpu = device(moves=True)
    source, target = gpu.allocate(MIB), gpu.pinned(MIB)
    gpu.copy_to_device(np.arange(MIB, dtype=np.uint64).view(np.uint8)[:MIB], source, gpu.stream("to_device")).wait()
    gpu.copy_to_host(source, target.view, gpu.stream("to_host")).wait()
    assert bytes(target.view) == np.arange(MIB // 8, dtype=np.uint64).tobytes()
    gpu.validate()


def test_threads_that_begin_together_take_as_long_as_the_slowest():
    clock = ThreadClock(seconds=10.0)
    clock.spend(5.0)
    clock.begin()
    start = clock.now()

    def work():
        clock.spend(70.0)
        with clock.call(), clock.call():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    clock.spend(30.0)
    clock.wait_until(start + 40.0)
    thread.join()
    assert clock.elapsed() == near(80)
    assert clock.python() < 0.9
    clock.begin()
    assert clock.elapsed() == near(0)
    assert clock.now() == near(85)  # time goes on from the one that was furthest


@pytest.mark.parametrize("name", ["call", "latency", "memcpy", "fresh", "pin"])
def test_costs_make_sense(name):
    good = {"call": 0.0, "latency": 0.0, "memcpy": 1.0, "fresh": 1.0, "pin": 1.0}
    with pytest.raises(ValueError, match=f"^{name}"):
        HostCosts(**good | {name: -1.0})
    assert MODELS["h200"].fresh < MODELS["h200"].memcpy
