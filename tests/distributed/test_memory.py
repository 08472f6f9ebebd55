"""The worker's memory settings, and following the memory of the process."""

from __future__ import annotations

import threading

import dask
import numpy as np
import pytest
from distributed import Client, KilledWorker, Nanny, Scheduler, Status, wait
from distributed.utils_test import async_poll_for, gen_cluster, gen_test

import gpuspill
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.distributed.memory import MemoryFollower, Thresholds, return_free_memory
from gpuspill.storage.buffers import BufferPool
from tests.distributed.clusters import attached

G = 10**9
M = 2**20


@pytest.mark.parametrize(
    ("settings", "limit", "follows"),
    [
        ({"memory_limit": G, "target": 0.6, "spill": 0.7}, 0.6 * G, True),
        ({"memory_limit": G, "target": 0.6, "spill": False}, 0.6 * G, False),
        ({"memory_limit": G, "target": False, "spill": 0.7}, 0.7 * G, True),
        ({"memory_limit": G, "target": False, "spill": False}, None, False),
        ({"memory_limit": None, "target": 0.6, "spill": 0.7}, None, False),
        ({"memory_limit": 0, "target": 0.6, "spill": 0.7}, None, False),
        ({"memory_limit": G, "target": 0.6, "spill": 0.7, "host_limit": 5}, 5, True),
        ({"memory_limit": None, "target": 0.6, "spill": 0.7, "host_limit": 5}, 5, False),
        ({"memory_limit": G, "target": 0.6, "spill": 0.7, "host_limit": None}, 0.7 * G, True),
        ({"memory_limit": G, "target": 0.6, "spill": False, "host_limit": None}, None, False),
    ],
)
def test_limit(settings, limit, follows):
    thresholds = Thresholds(**settings)
    assert thresholds.limit == limit
    assert thresholds.follows_process is follows


@pytest.mark.parametrize(
    "settings",
    [
        {"target": 0.6, "spill": 0.7},
        {"target": 0.6, "spill": 0.5},
        {"target": False, "spill": 0.7},
        {"target": 0.6, "spill": 0.7, "host_limit": int(0.2 * G)},
        {"target": 0.6, "spill": 0.7, "host_limit": int(0.9 * G)},
        {"target": 0.6, "spill": 0.7, "host_limit": None},
    ],
)
def test_offset_says_that_the_process_is_too_large(settings):
    """The store spills just when values exceed their limit or the process exceeds its own."""
    thresholds = Thresholds(memory_limit=G, **settings)
    values_alone = thresholds.limit if settings["target"] and settings.get("host_limit", "auto") is not None else None
    for accounted in np.linspace(0, G, 21).astype(int):
        for process in np.linspace(0, 1.2 * G, 25).astype(int):
            over = accounted + thresholds.offset(int(process), int(accounted)) > thresholds.limit
            wanted = process > settings["spill"] * G or (values_alone is not None and accounted > values_alone)
            assert over == wanted, (accounted, process)


@pytest.mark.parametrize(
    "settings", [{"memory_limit": G, "target": 0.6, "spill": False}, {"memory_limit": 0, "spill": 0.7}]
)
def test_no_offset_unless_the_process_counts(settings):
    assert Thresholds(**settings).offset(10 * G, 0) == 0


class Rig:
    """A follower with everything around it made up."""

    def __init__(self, pool=None, **settings):
        self.process = 0
        self.accounted = 0
        self.offset = 0
        self.evicted = 0
        self.now = 100.0
        self.work = []
        self.calls = 0
        settings = {"memory_limit": G, "target": 0.6, "spill": 0.7, **settings}
        self.follower = MemoryFollower(
            Thresholds(**settings),
            process_memory=lambda: self.process,
            accounted=lambda: self.accounted,
            set_offset=self.set_offset,
            evicted=lambda: self.evicted,
            in_background=self.work.append,
            pool=pool,
            clock=lambda: self.now,
        )

    def set_offset(self, n):
        self.offset = n
        self.calls += 1

    def run(self):
        work = self.work.pop()
        work()


def test_follower_tells_the_store_what_changed():
    rig = Rig()
    rig.process, rig.accounted = int(0.2 * G), int(0.1 * G)
    rig.follower.update()
    assert (rig.offset, rig.calls) == (0, 0)
    rig.process = int(0.5 * G)
    rig.follower.update()
    assert rig.offset == int(0.3 * G)
    rig.follower.update()
    assert rig.calls == 1
    rig.follower.thresholds = Thresholds(memory_limit=G, target=0.6, spill=False)
    rig.follower.update()
    assert rig.offset == 0


def test_room_is_left_for_buffers_that_come_and_go():
    pool = BufferPool(64 * M)
    rig = Rig(pool)
    rig.process, rig.accounted = int(0.5 * G), int(0.1 * G)
    rig.follower.update()
    without = rig.offset
    pool.allocate(16 * M).release()
    rig.follower.update()
    assert rig.offset == without, "idle already, and part of the process"
    buffer = pool.allocate(16 * M)
    for _ in range(rig.follower.REMEMBERED):
        rig.follower.update()
        assert rig.offset == without + 16 * M, "in use, and soon idle again"
    rig.follower.update()
    assert rig.offset == without, "it has been in use for long"
    del buffer


def test_room_for_buffers_is_a_small_part_of_a_small_worker():
    pool = BufferPool(64 * M)
    rig = Rig(pool, memory_limit=64 * M)
    rig.process, rig.accounted = 40 * M, 10 * M
    rig.follower.update()
    without = rig.offset
    held = [pool.allocate(16 * M) for _ in range(3)]
    held.clear()
    held.extend(pool.allocate(16 * M) for _ in range(3))
    rig.follower.update()
    assert rig.offset == without + 4 * M


def test_allocators_are_asked_when_spilling_does_not_help():
    rig = Rig()
    rig.process, rig.accounted = int(0.8 * G), int(0.3 * G)
    rig.follower.update()
    assert not rig.work  # nothing was evicted yet
    rig.evicted = MemoryFollower.TRIM_AFTER_NBYTES
    rig.follower.update()
    assert len(rig.work) == 1
    rig.evicted *= 3
    rig.now += 10
    rig.follower.update()
    assert len(rig.work) == 1  # the last request has not been dealt with
    rig.run()
    rig.follower.update()
    assert len(rig.work) == 1
    rig.run()
    rig.now += MemoryFollower.TRIM_INTERVAL / 2
    rig.evicted *= 3
    rig.follower.update()
    assert not rig.work  # not that often
    rig.process = int(0.6 * G)
    rig.now += 10
    rig.follower.update()
    assert not rig.work  # no need


def test_allocators_are_asked_when_what_was_deleted_does_not_come_back():
    """A worker that could not spill was paused; now its values are gone, and it must not stay so."""
    rig = Rig()
    rig.process, rig.accounted = int(0.8 * G), MemoryFollower.TRIM_AFTER_NBYTES
    rig.follower.update()
    assert not rig.work
    rig.accounted -= MemoryFollower.TRIM_AFTER_NBYTES - 1
    rig.follower.update()
    assert not rig.work
    rig.accounted -= 1
    rig.follower.update()
    assert len(rig.work) == 1
    rig.run()
    rig.now += MemoryFollower.TRIM_INTERVAL
    rig.follower.update()  # that was that; what helps now is another matter
    assert rig.follower._deleted == 0


def test_garbage_is_collected_when_trimming_does_not_help(monkeypatch):
    collections = []
    monkeypatch.setattr("gc.collect", lambda: collections.append(1))
    rig = Rig()
    rig.process, rig.evicted = int(0.8 * G), MemoryFollower.TRIM_AFTER_NBYTES
    rig.follower.update()
    rig.run()
    assert not collections
    for _ in range(3):
        rig.now += MemoryFollower.TRIM_INTERVAL + 1
        rig.follower.update()
        if rig.work:
            rig.run()
    assert len(collections) == 1  # not again within the interval
    rig.now += MemoryFollower.COLLECT_INTERVAL
    rig.follower.update()
    rig.run()
    assert len(collections) == 2


def test_a_loop_that_is_closing_does_not_matter():
    rig = Rig()

    def refuse(work):
        raise RuntimeError("closing")

    rig.follower._in_background = refuse
    rig.process, rig.evicted = int(0.8 * G), MemoryFollower.TRIM_AFTER_NBYTES
    rig.follower.update()


def test_return_free_memory():
    import pyarrow  # noqa: F401

    return_free_memory()


# -- in a worker ---------------------------------------------------------------------------------


def memory_cluster(limit=10**9, **config):
    prefix = "distributed.worker.memory."
    names = {name.replace("_", "-"): value for name, value in config.items()}
    return gen_cluster(
        client=True,
        nthreads=[("", 1)],
        config={prefix + "monitor-interval": "10ms", **{prefix + name: value for name, value in names.items()}},
        worker_kwargs={"data": gpuspill.data(), "memory_limit": limit},
    )


class Big:
    """10 kB that say they are 100 MB."""

    def __init__(self, i):
        self.i = i
        self.bytes = bytes(10_000)

    def __sizeof__(self):
        return 10**8


pytestmark = pytest.mark.cluster


@memory_cluster(target=0.65, spill=False, pause=False)
async def test_target(c, s, a):
    a.monitor.get_process_memory = lambda: 2 * 10**9  # does not matter
    futures = c.map(Big, range(10))
    await wait(futures)
    await async_poll_for(lambda: a.data.memory_total() <= 6.5 * 10**8, timeout=10)
    assert a.data.statistics().limit == 6.5 * 10**8
    assert a.data.statistics().offset_nbytes == 0
    assert len(a.data.memory) == 6


@memory_cluster(target=False, spill=0.7, pause=False)
async def test_spill_without_target(c, s, a):
    process = 10**8
    a.monitor.get_process_memory = lambda: process
    futures = c.map(Big, range(5))
    await wait(futures)
    await async_poll_for(lambda: a.data.statistics().offset_nbytes == 10**8 - a.data.memory_total(), timeout=10)
    # They say that they are more than there is, but they are not.
    futures += c.map(Big, range(5, 9))
    await wait(futures)
    assert a.data.memory_total() > 7 * 10**8
    assert not a.data.disk
    process = 8 * 10**8
    await async_poll_for(lambda: len(a.data.disk) >= 1, timeout=10)


@memory_cluster(target=0.9, spill=0.7, pause=False)
async def test_spill_before_target(c, s, a):
    more = 0
    a.monitor.get_process_memory = lambda: a.data.memory_total() + more
    attached(a).follower.update()  # it may have seen this process's own memory, whatever that is after other tests
    futures = c.map(Big, range(4))
    await wait(futures)
    assert not a.data.disk
    more = 5 * 10**8
    await async_poll_for(lambda: len(a.data.disk) >= 2, timeout=10)


@memory_cluster(target=False, spill=False, pause=False)
async def test_no_spilling_at_all(c, s, a):
    assert a.data.statistics().limit is None
    a.monitor.get_process_memory = lambda: 2 * 10**9
    futures = c.map(Big, range(20))
    await wait(futures)
    assert not a.data.disk
    assert "gpuspill" in a.periodic_callbacks


@memory_cluster(limit=0)
async def test_no_memory_limit(c, s, a):
    assert a.data.statistics().limit is None
    futures = c.map(Big, range(20))
    await wait(futures)
    assert not a.data.disk


@memory_cluster(target=0.6, spill=0.7, pause=0.8, max_spill="25 kB")
async def test_max_spill(c, s, a):
    a.monitor.get_process_memory = lambda: 0
    futures = c.map(Big, range(12))
    await wait(futures)
    await async_poll_for(lambda: a.data.statistics().set_aside, timeout=10)
    assert len(a.data.disk) == 2
    assert a.data.statistics().disk_nbytes <= 25_000
    assert a.data.statistics().disk_limit == 25_000


@memory_cluster(target=False, spill=False, pause=0.8)
async def test_pause_is_left_to_distributed(c, s, a):
    a.monitor.get_process_memory = lambda: 9 * 10**8
    await async_poll_for(lambda: a.status == Status.paused, timeout=10)
    a.monitor.get_process_memory = lambda: 1 * 10**8
    await async_poll_for(lambda: a.status == Status.running, timeout=10)


@pytest.mark.leaking("processes", reason="multiprocessing's helpers of the nanny's child")
@gen_test(timeout=90)
async def test_terminate_is_left_to_distributed():
    def hog():
        kept = b"x" * (700 * 2**20)
        threading.Event().wait(60)  # to be killed
        return len(kept)

    memory = {"target": False, "spill": False, "pause": False, "terminate": 0.9, "monitor-interval": "10ms"}
    with dask.config.set({f"distributed.worker.memory.{name}": value for name, value in memory.items()}):
        async with (
            Scheduler(dashboard_address=":0", allowed_failures=0) as s,
            Nanny(s.address, nthreads=1, memory_limit="600 MiB", data=gpuspill.data()),
            Client(s.address, asynchronous=True) as c,
        ):
            with pytest.raises(KilledWorker):
                await c.submit(hog)


@pytest.mark.parametrize(("compression", "smaller"), [(None, False), ("zlib", True)])
def test_spill_compression(tmp_path, compression, smaller):
    with dask.config.set({"distributed.worker.memory.spill-compression": compression}):
        store = build_store(Settings(), str(tmp_path))
    try:
        store["x"] = np.zeros(100_000)
        store.manager.limits.evict_all()
        assert store.spilled_total.memory >= 800_000
        assert (store.spilled_total.disk < 100_000) is smaller
    finally:
        store.close()


@memory_cluster(target=0.6, spill=0.7)
async def test_the_follower_measures_through_the_worker(c, s, a):
    seen = []
    a.monitor.get_process_memory = lambda: seen.append(1) or 0
    await async_poll_for(lambda: seen, timeout=10)
    assert attached(a).follower.thresholds.memory_limit == 10**9
