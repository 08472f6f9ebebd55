"""Pinned memory for what left the device: lent in parts, back with the last view, never to two at once."""

import gc
import logging

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gpuspill import simulated
from gpuspill.bench.link import ARMS, LinkJob
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.simulated.device.costs import MODELS
from gpuspill.simulated.device.modelled import ModelledDevice
from gpuspill.testing.stores import MemoryStore
from gpuspill.tier import DeviceTier
from gpuspill.tier.pinned_pool import PinnedPool

KB = 1024
SLAB = 64 * KB
LIMIT = 4 * SLAB


def at_once(work):
    work()


def pool(limit=LIMIT, grow=at_once, device=None):
    return PinnedPool(SimulatedDevice(KB, clock=ManualClock()) if device is None else device, lambda: limit, grow)


class PoolMachine(RuleBasedStateMachine):
    """What is lent holds what its user wrote, whatever the others do."""

    lent = Bundle("lent")

    def __init__(self):
        super().__init__()
        self.pool = pool()
        self.number = 0

    @rule(target=lent, nbytes=st.integers(1, 3 * LIMIT // 4))
    def allocate(self, nbytes):
        parts = self.pool.allocate(nbytes)
        if parts is None:
            return multiple()
        assert sum(part.nbytes for part in parts) == nbytes
        self.number = self.number % 255 + 1
        for part in parts:
            assert self.pool.owns(part.obj)
            np.frombuffer(part, np.uint8)[:] = self.number
        return self.number, parts

    @rule(lent=lent)
    def look(self, lent):
        number, parts = lent
        assert all((np.frombuffer(part, np.uint8) == number).all() for part in parts)

    @rule(target=lent, lent=consumes(lent))
    def keep_a_view_only(self, lent):
        number, parts = lent
        return number, [memoryview(np.frombuffer(part, np.uint8)[part.nbytes // 2 :]) for part in parts]

    @rule(lent=consumes(lent))
    def drop(self, lent):
        del lent

    @rule()
    def trim(self):
        self.pool.trim()

    @invariant()
    def adds_up(self):
        self.pool.validate()
        statistics = self.pool.statistics()
        assert statistics.lent_nbytes <= statistics.pinned_nbytes <= statistics.limit


TestPool = PoolMachine.TestCase


def test_memory_is_used_again_when_the_last_view_is_gone():
    lender = pool()
    parts = lender.allocate(60 * KB)
    array = np.frombuffer(parts[0], np.uint8)[10:20]
    del parts
    assert lender.statistics().lent_nbytes > 0
    del array
    gc.collect()
    assert lender.statistics().lent_nbytes == 0
    assert lender.trim() == lender.statistics().limit // 4
    assert lender.statistics().pinned_nbytes == 0


def test_a_finaliser_that_still_looks_keeps_it():
    lender = pool()
    seen = []

    class Late:
        def __init__(self, view):
            self.view, self.myself = view, self

        def __del__(self):
            # The weak reference has called back by now.
            seen.append(lender.allocate(64 * KB))
            self.view[:1] = b"x"

    lender.reserve(64 * KB)
    (part,) = lender.allocate(64 * KB)
    late = Late(part)
    del part, late
    gc.collect()
    assert len(seen) == 1
    lender.validate()


def test_it_grows_on_another_thread_to_its_limit_and_no_further():
    waiting = []
    lender = pool(grow=waiting.append)
    assert lender.allocate(100 * KB) is None
    assert lender.allocate(100 * KB) is None
    assert len(waiting) == 1  # one is at it
    waiting.pop()()
    kept = [lender.allocate(100 * KB), lender.allocate(100 * KB)]
    assert all(kept)
    assert lender.statistics().pinned_nbytes == LIMIT
    assert lender.allocate(100 * KB) is None
    assert not waiting
    assert lender.statistics().refused == 3


def test_a_system_that_pins_no_more_is_asked_once(caplog):
    class Mean(SimulatedDevice):
        left = 2

        def pinned(self, nbytes):
            if not self.left:
                raise MemoryError("ulimit")
            self.left -= 1
            return super().pinned(nbytes)

    lender = pool(device=Mean(KB, clock=ManualClock()))
    with caplog.at_level(logging.WARNING, "gpuspill"):
        kept = [lender.allocate(64 * KB) for _ in range(5)]
    assert [each is not None for each in kept] == [True, True, False, False, False]
    assert len(caplog.records) == 1
    assert "gpuspill.pinned-memory" in caplog.text


def test_what_was_not_needed_since_it_was_last_looked_at_is_given_back():
    lender = pool()
    lender.reserve(4 * SLAB)
    kept = lender.allocate(SLAB)
    more = lender.allocate(2 * SLAB)
    del more
    assert lender.shrink() == SLAB  # three were needed at a time
    assert lender.shrink() == 2 * SLAB  # and one since then
    assert lender.shrink() == 0
    assert lender.statistics().pinned_nbytes == SLAB == lender.statistics().lent_nbytes
    del kept
    assert lender.shrink() == 0  # it was needed until now
    assert lender.shrink() == SLAB
    lender.validate()


def test_it_is_looked_at_now_and_then_on_the_other_thread():
    asked = []
    lender = pool(grow=asked.append)
    lender.tend(0.0)
    assert not asked  # nothing is pinned
    lender.reserve(SLAB)
    lender.tend(1.0)
    lender.tend(2.0)
    lender.tend(30.0)
    assert not asked
    lender.tend(31.0)
    asked.pop()()
    assert lender.statistics().pinned_nbytes == 0
    lender.validate()


def test_what_is_in_use_stays_when_it_is_closed():
    lender = pool()
    kept = lender.allocate(64 * KB)
    np.frombuffer(kept[0], np.uint8)[:] = 7
    lender.close()
    assert lender.allocate(KB * 8) is None
    assert (np.frombuffer(kept[0], np.uint8) == 7).all()
    lender.validate()


SIZES = [1, 4095, 4096, 5000, 64 * KB, 100_000, 300 * KB]


@pytest.fixture
def device():
    device = ModelledDevice(256 * KB * KB, bandwidth=1e9, costs=MODELS["h200"], moves=True)
    with simulated.use(device):
        yield device


@pytest.mark.parametrize("through", ["host", "disk"])
def test_there_and_back_in_parts(device, through):
    host = ProxifyManager(limit=None, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8)
    tier = DeviceTier(device, host, limit=None, pinned_limit=4 * KB * KB)
    tier.pinned.reserve(2 * KB * KB)
    expected = [np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8) for nbytes in SIZES]
    skeleton = tier.proxify([asarray(each) for each in expected])
    device.plan()
    before = device.pageable_nbytes
    tier.manager.limits.make_room(sum(SIZES))
    assert tier.statistics().host_pinned_used_nbytes >= sum(SIZES[2:])
    if through == "disk":
        host.limits.evict_all()
        assert tier.statistics().host_pinned_used_nbytes == 0
    tier.validate()
    value = tier.resolve(skeleton)
    for found, right in zip(value, expected, strict=True):
        np.testing.assert_array_equal(asnumpy(found), right)
    if through == "host":
        moved = device.pageable_nbytes - before - sum(SIZES)  # asnumpy's are to ordinary memory
        assert moved <= 2 * sum(SIZES[:2])
    del value
    tier.settle()
    assert tier.statistics().host_pinned_used_nbytes == 0
    tier.validate()
    tier.close()
    host.close()
    assert device.statistics().violations == 0


def test_a_host_that_is_full_gets_idle_memory_back(device):
    host = ProxifyManager(limit=0, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8)
    tier = DeviceTier(device, host, limit=None, pinned_limit=4 * KB * KB)
    tier.pinned.reserve(2 * KB * KB)
    skeleton = tier.proxify(asarray(np.arange(100_000, dtype=np.uint8)))
    tier.manager.limits.make_room(100_000)
    assert tier.statistics().direct_spills == 1
    assert tier.statistics().host_pinned_nbytes == 0
    np.testing.assert_array_equal(asnumpy(tier.resolve(skeleton)), np.arange(100_000, dtype=np.uint8))
    tier.close()
    host.close()


@pytest.mark.parametrize("arm", ["1x4GiB", "200x1MiB"])
def test_large_allocations_take_no_detour(arm):
    """Counted: what the benchmark copies goes from and to pinned memory, but for what finding out how to copy takes."""
    found = LinkJob(link=55e9).run(ARMS[arm], None)
    assert found["correct"]
    assert found["pageable"] <= 2**26
