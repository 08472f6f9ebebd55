"""After every step of anything, what the tier believes to be on the device is what the driver has given out.

``GPUSPILL_DEVICE_STEPS`` and ``GPUSPILL_SEED`` make it longer and other; ``ci/long.sh`` sets them.
"""

import gc
import os
import tempfile

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from gpuspill.device.port import OutOfMemory
from gpuspill.testing.walks import pick, run_steps
from tests.standin.rig import Rig

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed: make test-cuda")

SEED = int(os.environ.get("GPUSPILL_SEED", "0"))
STEPS = int(os.environ.get("GPUSPILL_DEVICE_STEPS", "1500"))
indices = st.integers(0, 10**6)


def half(array):
    """A view, never an empty one: memory of no bytes takes one."""
    return array[array.shape[0] // 2 :]


class Machine(RuleBasedStateMachine):
    """Values of Numba's arrays, in keys and in hands.

    ``expected`` is what keys hold and ``hands`` what somebody has in use: NumPy's arrays beside them. There are no
    threads: what leaves the device does so in a step.
    """

    def __init__(self, steps, standin):
        super().__init__()
        from numba import cuda

        self.cuda, self.steps, self.standin = cuda, steps, standin
        from cuda.bindings import driver

        cuda.current_context()  # which streams belong to
        self.destroy = driver.cuStreamDestroy
        self.made = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))[1]
        self.streams = [0, cuda.stream(), cuda.external_stream(int(self.made))]
        self.pending = cuda.current_context().memory_manager.deallocations
        self.pending.clear()
        cuda.synchronize()
        self.before = standin.count("live_bytes")
        # Pinned memory for a few of the larger ones at a time; the others are staged.
        self.rig = Rig(tempfile.mkdtemp(), standin, pinned_limit=2**16)
        self.expected, self.hands, self.numbers = {}, [], iter(range(1, 10**9))

    def array(self, nbytes, stream=0):
        host = np.full(nbytes // 8, float(next(self.numbers)))
        return host, self.cuda.to_device(host, stream=self.streams[stream])

    @rule(by_stream=st.booleans())
    def wait_for_the_default_stream_or_the_device(self, by_stream):
        self.rig.device.fence_by_stream = by_stream

    @rule(size=st.integers(1, 200), shape=st.integers(0, 2), stream=st.integers(0, 2))
    def store(self, size, shape, stream):
        """Enqueue what fills it, on the default stream, on a blocking one, or on one that is in no order with it."""
        host, array = self.array(80 * size, stream)
        key = next(self.numbers)
        if shape == 0:
            self.expected[key], value = [host], [array]
        elif shape == 1:  # a view, whose whole is gone
            self.expected[key], value = [host[3:7]], [array[3:7]]
        else:
            self.expected[key], value = [host, host[::2], host[1:2]], [array, array[::2], array[1:2]]
        del array
        self.rig.put(key, value)

    @rule(size=st.integers(1, 200), shape=st.integers(0, 2), stream=st.integers(0, 2))
    def store_what_is_not_there_yet_and_have_it_leave(self, size, shape, stream):
        """Nothing is done that no thread waits for, so a copy that waits for too little shows."""
        with self.standin.held():
            self.store(size, shape, stream)
            self.leave_the_device()

    @precondition(lambda self: self.expected)
    @rule(index=indices, view=st.booleans())
    def store_under_another_name(self, index, view):
        key = pick(list(self.expected), index)
        new, value = next(self.numbers), self.rig.get(key)
        self.expected[new] = [half(part) if view else part for part in self.expected[key]]
        self.rig.put(new, [half(part) if view else part for part in value])

    @precondition(lambda self: self.expected)
    @rule(index=indices, view=st.booleans())
    def take_in_hand(self, index, view):
        key = pick(list(self.expected), index)
        parts = list(zip(self.expected[key], self.rig.get(key), strict=True))
        self.hands.append([(host[:2], array[:2]) if view else (host, array) for host, array in parts])

    @precondition(lambda self: self.hands)
    @rule(index=indices)
    def let_go(self, index):
        self.look(self.hands.pop(index % len(self.hands)))

    @precondition(lambda self: self.expected)
    @rule(index=indices)
    def delete(self, index):
        key = pick(list(self.expected), index)
        del self.expected[key], self.rig.skeletons[key]

    @rule()
    def leave_the_device(self):
        self.rig.tier.settle()
        self.rig.tier.manager.limits.evict_all()

    @rule()
    def go_to_disk(self):
        self.rig.host.limits.evict_all()

    @rule(more=st.integers(1, 20_000))
    def run_out_of_memory(self, more):
        """As much as is free and a bit: values make room for it, unless they are all in use."""
        free = self.rig.device.memory_info().free
        try:
            ballast = self.rig.device.allocate(free + more)
        except OutOfMemory:
            return
        del ballast

    @precondition(lambda self: self.expected)
    @rule(index=indices)
    def a_restore_does_not_fit_at_first(self, index):
        from cuda.bindings.driver import CUresult

        self.standin.fail("cuMemAllocAsync", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        try:
            self.rig.get(pick(list(self.expected), index))
        except MemoryError:
            pass
        finally:
            self.standin.fail("cuMemAllocAsync", CUresult.CUDA_SUCCESS, times=0)

    @precondition(lambda self: self.expected)
    @rule(index=indices)
    def read(self, index):
        key = pick(list(self.expected), index)
        self.look(list(zip(self.expected[key], self.rig.get(key), strict=True)))

    def look(self, parts):
        for host, array in parts:
            np.testing.assert_array_equal(array.copy_to_host(), host)

    def check_invariants(self, settings, output, runtimes):
        self.steps.done += 1
        tier = self.rig.tier
        tier.settle()
        self.pending.clear()
        self.rig.device.synchronize()
        statistics = tier.statistics()
        known = statistics.device_nbytes + statistics.lingering_nbytes
        assert self.standin.count("live_bytes") - self.before == known, statistics
        assert not self.standin.violation, self.standin.violation
        tier.validate()

    def teardown(self):
        try:
            while self.hands:
                self.look(self.hands.pop())
            for key in self.expected:
                self.look(zip(self.expected[key], self.rig.get(key), strict=True))
        finally:
            self.rig.close()
        self.pending.clear()
        self.rig.device.synchronize()
        assert self.standin.count("live_bytes") == self.before
        self.destroy(self.made)


def test_the_ledger_is_the_drivers_own(standin):
    standin.speed(latency=0)
    gc.collect()
    gc.freeze()
    gc.disable()  # it would free what a failed example left, in the middle of another; and nothing may need it
    try:
        steps = run_steps(lambda count: Machine(count, standin), STEPS, seed=SEED)
    finally:
        gc.enable()
    print(f"{steps.done} steps")
