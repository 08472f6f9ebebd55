"""Memory comes back when the last view of it is gone, and never before."""

import ctypes
import gc
import mmap
import os
import pickle
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuspill.storage import buffers
from gpuspill.storage.buffers import SMALL_NBYTES, BufferPool, size_class

MB = 2**20


@pytest.fixture
def pool():
    return BufferPool(64 * MB)


def address(view):
    return np.frombuffer(view, "u1").ctypes.data


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, SMALL_NBYTES, SMALL_NBYTES + 1, MB, 3 * MB + 1])
def test_what_is_handed_out(pool, nbytes):
    view = pool.allocate(nbytes)
    assert isinstance(view, memoryview)
    assert (view.nbytes, view.ndim, view.format, view.readonly) == (nbytes, 1, "B", False)
    if nbytes:
        assert address(view) % 64 == 0
        view[0] = view[-1] = 255


def test_os_calls_take_it(pool, tmp_path):
    view = pool.allocate(MB)
    view[:] = os.urandom(MB)
    (tmp_path / "file").write_bytes(view)
    other = pool.allocate(MB)
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert file.readinto(other) == MB
    assert other == view


@settings(deadline=None)
@given(nbytes=st.integers(SMALL_NBYTES + 1, 2**40))
def test_size_classes(nbytes):
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % mmap.PAGESIZE == 0
    assert size - nbytes <= max(mmap.PAGESIZE, nbytes / 8)
    assert size_class(size) == size
    assert size_class(nbytes + 1) >= size


def test_powers_of_two_lose_nothing():
    assert all(size_class(2**k) == 2**k for k in range(16, 40))


def test_memory_is_used_again(pool):
    first = pool.allocate(MB)
    where = address(first)
    del first
    second = pool.allocate(MB - 5)
    assert address(second) == where
    stats = pool.statistics()
    assert (stats.hits, stats.misses, stats.lent_nbytes, stats.idle_nbytes) == (1, 1, MB, 0)


def test_memory_in_use_is_not_used_again(pool):
    first, second = pool.allocate(MB), pool.allocate(MB)
    first[:] = b"1" * MB
    second[:] = b"2" * MB
    assert set(bytes(first)) == set(b"1")


KEEPERS = {
    "the view": lambda view: view,
    "a slice": lambda view: view[10:20],
    "a slice of a slice": lambda view: view[10:20][3:4],
    "a cast": lambda view: view.cast("d"),
    "an array": lambda view: np.frombuffer(view, "f8"),
    "a view of an array": lambda view: np.frombuffer(view, "f8").reshape(2, -1)[1:, ::7],
    "a pickle buffer": lambda view: pickle.PickleBuffer(view),
    "an unpickled array": lambda view: pickle.loads(
        pickle.dumps(np.frombuffer(view), protocol=5, buffer_callback=[].append), buffers=[view]
    ),
    "a ctypes object": lambda view: ctypes.c_uint64.from_buffer(view, 64),
    "an iterator": lambda view: iter(view),
    "a cycle": lambda view: make_cycle(view),
}


def make_cycle(view):
    cycle = [view]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_any_view_keeps_the_memory(pool, keep):
    view = pool.allocate(MB)
    view[:] = bytes(MB)
    kept = keep(view)
    del view
    gc.collect()
    assert pool.statistics().lent_buffers == 1
    other = pool.allocate(MB)
    other[:] = b"x" * MB
    assert pool.statistics().misses == 2
    del kept
    gc.collect()
    assert pool.statistics().lent_buffers == 1
    assert pool.idle_nbytes == MB


def test_arrow_keeps_the_memory(pool):
    pa = pytest.importorskip("pyarrow")
    kept = pa.py_buffer(pool.allocate(MB))
    gc.collect()
    assert pool.statistics().lent_buffers == 1
    del kept
    assert pool.statistics().lent_buffers == 0


def test_finalizer_that_brings_memory_back_to_life(pool):
    # The collector calls the weak reference back before this finalizer, which then uses the memory.
    saved = []

    class Resurrect:
        def __init__(self, view):
            self.view = view
            self.cycle = self

        def __del__(self):
            saved.append(self.view)

    view = pool.allocate(MB)
    view[:] = b"1" * MB
    Resurrect(view)
    del view
    gc.collect()
    assert len(saved) == 1
    others = [pool.allocate(MB) for _ in range(3)]
    for other in others:
        other[:] = b"2" * MB
    assert bytes(saved[0]) == b"1" * MB


def test_finalizer_that_uses_memory_while_it_is_collected(pool):
    # The same, but the finalizer itself makes the pool hand out memory.
    seen = []

    class Use:
        def __init__(self, view):
            self.view = view
            self.cycle = self

        def __del__(self):
            other = pool.allocate(MB)
            other[:] = b"2" * MB
            seen.append(bytes(self.view))

    view = pool.allocate(MB)
    view[:] = b"1" * MB
    Use(view)
    del view
    gc.collect()
    assert seen == [b"1" * MB]


@pytest.mark.parametrize("inside", ["_map", "size_class"])
def test_memory_that_comes_back_in_the_middle_of_an_allocation(pool, monkeypatch, inside):
    real = getattr(buffers, inside)
    held = [pool.allocate(MB) for _ in range(5)]

    def drop(nbytes):
        held.clear()
        return real(nbytes)

    monkeypatch.setattr(buffers, inside, drop)
    view = pool.allocate(2 * MB if inside == "_map" else MB)
    assert view.nbytes
    assert pool.statistics().lent_buffers == 1


def test_idle_memory_is_bounded_without_another_allocation():
    pool = BufferPool(3 * MB)
    views = [pool.allocate(MB) for _ in range(10)]
    assert pool.idle_nbytes == 0
    views.clear()
    stats = pool.statistics()
    assert (stats.idle_nbytes, stats.idle_buffers, stats.trimmed_nbytes) == (3 * MB, 3, 7 * MB)


def test_the_longest_idle_goes_first():
    pool = BufferPool(10 * MB)
    views = [pool.allocate(size * MB) for size in (1, 2, 3, 4)]
    # Back in the order 2, 4, 1, 3.
    for i in (1, 3, 0, 2):
        views[i] = None
    assert pool.trim(9 * MB) == 2 * MB
    assert pool.trim(9 * MB) == 0
    assert pool.trim(5 * MB) == 4 * MB
    assert pool.trim() == 4 * MB
    assert pool.idle_nbytes == 0


def test_a_buffer_larger_than_all_that_may_be_idle():
    pool = BufferPool(MB)
    small = pool.allocate(MB // 2)
    del small
    large = pool.allocate(8 * MB)
    del large
    assert pool.idle_nbytes <= MB


def test_zero_keeps_nothing():
    pool = BufferPool(0)
    for _ in range(3):
        view = pool.allocate(MB)
        del view
    stats = pool.statistics()
    assert (stats.idle_nbytes, stats.hits, stats.misses) == (0, 0, 3)
    with pytest.raises(ValueError, match="at least 0"):
        BufferPool(-1)


def test_trimmed_memory_goes_back_to_the_system():
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    pool = BufferPool(1024 * MB)
    view = pool.allocate(200 * MB)
    before = process.memory_info().rss
    np.frombuffer(view, "u1")[:] = 1
    assert process.memory_info().rss - before > 150 * MB
    del view
    assert process.memory_info().rss - before > 150 * MB
    pool.trim()
    assert process.memory_info().rss - before < 50 * MB


def test_close_leaves_buffers_in_use_alone(pool):
    kept, dropped = pool.allocate(MB), pool.allocate(MB)
    kept[:] = b"1" * MB
    del dropped
    pool.close()
    assert pool.idle_nbytes == 0
    later = pool.allocate(MB)
    later[:] = b"2" * MB
    assert bytes(kept) == b"1" * MB
    del kept, later
    assert pool.idle_nbytes == 0


def test_memory_outlives_the_pool():
    pool = BufferPool(64 * MB)
    view = pool.allocate(MB)
    view[:] = b"1" * MB
    reference = weakref.ref(pool)
    del pool
    assert reference() is None, "the pool is part of a cycle"
    assert bytes(view) == b"1" * MB
    del view


def test_out_of_memory(pool, monkeypatch):
    idle = pool.allocate(8 * MB)
    del idle
    real = mmap.mmap
    calls = []

    def fail_while_something_is_idle(*args, **kwargs):
        calls.append(pool.idle_nbytes)
        if calls[-1]:
            raise OSError(12, "Cannot allocate memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", fail_while_something_is_idle)
    view = pool.allocate(MB)
    assert view.nbytes == MB
    assert calls == [8 * MB, 0]


def test_out_of_memory_for_good(pool, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(MemoryError, match="1,048,576 bytes"):
        pool.allocate(MB)


def test_without_huge_pages(pool, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert pool.allocate(8 * MB).nbytes == 8 * MB


def test_repr(pool):
    view = pool.allocate(MB)
    del view
    assert "1,048,576 of 67,108,864 bytes idle" in repr(pool)


def test_threads():
    # Each thread fills what it gets and hands it to another, which checks and drops it.
    pool = BufferPool(4 * MB)
    n_threads = 4
    barrier = threading.Barrier(n_threads)
    lists = [[] for _ in range(n_threads)]

    def work(me):
        rng = random.Random(me)
        barrier.wait(60)
        for turn in range(300):
            view = pool.allocate(rng.choice([100_000, 100_500, 200_000, 500_000]))
            array = np.frombuffer(view, "u4", count=view.nbytes // 4)
            array[:] = me * 1000 + turn
            del view
            lists[rng.randrange(n_threads)].append((array, me * 1000 + turn))
            while len(lists[me]) > 3:
                array, value = lists[me].pop(rng.randrange(len(lists[me])))
                assert (array == value).all()
            if turn % 50 == 0:
                pool.trim(MB)
                pool.statistics()

    with ThreadPoolExecutor(n_threads) as executor:
        list(executor.map(work, range(n_threads)))
    for kept in lists:
        for array, value in kept:
            assert (array == value).all()
    del kept, array, value
    lists.clear()
    gc.collect()
    stats = pool.statistics()
    assert (stats.lent_buffers, stats.lent_nbytes) == (0, 0)
    assert stats.idle_nbytes <= 4 * MB
    assert stats.hits > 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of taking, slicing and dropping; every live buffer keeps its contents."""

    MAX_IDLE = 400_000

    def __init__(self):
        super().__init__()
        self.pool = BufferPool(self.MAX_IDLE)
        self.live = []
        self.turn = self.pooled = 0

    @rule(nbytes=st.sampled_from([0, 10, 65_536, 65_537, 70_000, 100_000, 131_072, 300_000, 500_000]))
    def allocate(self, nbytes):
        self.turn += 1
        self.pooled += nbytes > SMALL_NBYTES
        view = self.pool.allocate(nbytes)
        assert view.nbytes == nbytes
        pattern = bytes([self.turn % 256])
        view[:] = pattern * nbytes
        self.live.append((view, pattern))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def narrow(self, data):
        i = data.draw(st.integers(0, len(self.live) - 1))
        view, pattern = self.live[i]
        start = data.draw(st.integers(0, view.nbytes))
        self.live[i] = view[start : start + 100], pattern

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data):
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))

    @rule(nbytes=st.integers(0, 400_000))
    def trim(self, nbytes):
        self.pool.trim(nbytes)
        assert self.pool.idle_nbytes <= nbytes

    @invariant()
    def contents_are_intact(self):
        for view, pattern in self.live:
            assert view == pattern * view.nbytes

    @invariant()
    def idle_is_bounded(self):
        stats = self.pool.statistics()
        assert stats.idle_nbytes <= self.MAX_IDLE
        assert stats.lent_buffers <= len(self.live)
        assert stats.hits + stats.misses == self.pooled


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_the_most_that_was_idle_is_told_once():
    pool = BufferPool(1 << 20)
    held = [pool.allocate(100_000) for _ in range(3)]
    assert pool.peak_idle_nbytes() == 0
    held.clear()
    idle = pool.idle_nbytes
    held = [pool.allocate(100_000) for _ in range(2)]
    assert pool.peak_idle_nbytes() == idle
    assert pool.peak_idle_nbytes() == pool.idle_nbytes == idle // 3
