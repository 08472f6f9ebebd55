"""Tasks and transfers wait until they fit, without holding the event loop, and never for ever."""

from __future__ import annotations

import time

import numpy as np
import pytest
from distributed import Event, Status, wait
from distributed.utils_test import async_poll_for, inc

from tests.distributed.clusters import all_spilled, at_rest, attached, spilling

pytestmark = pytest.mark.cluster

MB = 2**20


def block_of(n, *args):
    return np.ones(n, dtype="u1")


class Peak:
    """The most that a worker ever had in memory, looked at whenever something is stored."""

    def __init__(self, worker):
        self.nbytes = 0
        self.worker = worker
        store = worker.data.manager.store

        def watched(key, value, nbytes=None, **options):
            store(key, value, nbytes, **options)
            self.nbytes = max(self.nbytes, worker.data.memory_total())

        worker.data.manager.store = watched


def slow_disk(worker, seconds=0.02):
    """Writing is much slower than computing."""
    write = worker.data.records.store.write

    def slow(header, frames):
        time.sleep(seconds)
        return write(header, frames)

    worker.data.records.store.write = slow


@spilling(limits=("10 MiB",), nthreads=[("", 2)], config={"gpuspill.follow-process-memory": False})
async def test_tasks_that_produce_faster_than_the_disk_takes(c, s, a):
    slow_disk(a)
    peak = Peak(a)
    first = c.submit(block_of, MB, key="block_of-0")
    await wait(first)  # the size of its kind is known now
    futures = [c.submit(block_of, MB, i, key=f"block_of-{i}") for i in range(1, 41)]
    await wait(futures)
    assert len(a.data) == 41
    assert peak.nbytes <= 12 * MB  # without waiting it is all 41
    statistics = a.data.statistics()
    assert statistics.waits > 0
    assert statistics.wait_seconds > 0
    assert a.status == Status.running


@spilling(limits=("10 MiB",), nthreads=[("", 2)], config={"gpuspill.admission": False})
async def test_without_admission(c, s, a):
    slow_disk(a)
    futures = [c.submit(block_of, MB, i, key=f"block_of-{i}") for i in range(30)]
    await wait(futures)
    assert a.data.statistics().wait_seconds == 0


@spilling(
    limits=("10 MiB",),
    nthreads=[("", 1), ("", 1)],
    timeout=120,
    config={"distributed.worker.transfer.message-bytes-limit": "2 MiB"},
)
async def test_transfers_wait(c, s, a, b):
    """One worker is asked for far more than it may hold."""
    slow_disk(b, 0.01)
    futures = [c.submit(block_of, MB, i, key=f"block_of-{i}", workers=[a.address]) for i in range(60)]
    await wait(futures)
    peak = Peak(b)
    parts = [c.submit(len, f, workers=[b.address]) for f in futures]
    assert await c.gather(parts) == [MB] * 60
    assert peak.nbytes <= 14 * MB
    assert b.data.statistics().loop_io == 0


@spilling(limits=("10 MiB",), nthreads=[("", 1)])
async def test_the_loop_is_free_while_a_task_waits(c, s, a):
    import threading

    gate = threading.Event()
    write = a.data.records.store.write
    a.data.records.store.write = lambda *args: (gate.wait(20), write(*args))[1]
    await wait(c.submit(block_of, MB, key="block_of-0"))
    futures = [c.submit(block_of, MB, i, key=f"block_of-{i}") for i in range(1, 20)]
    await async_poll_for(lambda: a.data.statistics().waiting, timeout=10)
    await a.heartbeat()
    assert await c.run(lambda: 1) == {a.address: 1}
    gate.set()
    await wait(futures)


@pytest.mark.fault("cancelled meanwhile", on="host→disk", outcome="nothing pinned, nothing promised")
@spilling(limits=("10 MiB",), nthreads=[("", 1)])
async def test_a_task_that_waits_can_be_cancelled(c, s, a):
    import threading

    gate = threading.Event()
    write = a.data.records.store.write
    a.data.records.store.write = lambda *args: (gate.wait(20), write(*args))[1]
    await wait(c.submit(block_of, MB, key="block_of-0"))
    futures = [c.submit(block_of, MB, i, key=f"block_of-{i}") for i in range(1, 20)]
    await async_poll_for(lambda: a.data.statistics().waiting, timeout=10)
    await c.cancel(futures)
    gate.set()
    await async_poll_for(lambda: not a.state.executing_count, timeout=10)
    assert await c.submit(inc, 1) == 2


@spilling(limits=("10 MiB",), nthreads=[("", 1)], clean=False)
async def test_a_worker_can_be_closed_while_a_task_waits(c, s, a):
    import threading

    gate = threading.Event()
    write = a.data.records.store.write
    a.data.records.store.write = lambda *args: (gate.wait(0.5), write(*args))[1]
    await wait(c.submit(block_of, MB, key="block_of-0"))
    futures = [c.submit(block_of, MB, i, key=f"block_of-{i}") for i in range(1, 20)]
    await async_poll_for(lambda: a.data.statistics().waiting, timeout=10)
    await a.close(timeout=5)
    statistics = a.data.statistics()
    assert statistics.waiting == statistics.pinned_nbytes == statistics.reserved_nbytes == 0
    del futures


@pytest.mark.fault("nothing can leave memory", on="disk→host", outcome="tasks go on, counted")
@spilling(limits=(1, "1 MiB"), nthreads=[("", 2)])
async def test_tasks_larger_than_the_limit_run_all_the_same(c, s, a):
    xs = [c.submit(block_of, 3 * MB, i, key=f"block_of-{i}") for i in range(4)]
    total = c.submit(lambda xs: sum(map(len, xs)), xs)
    assert await total == 12 * MB
    assert a.data.statistics().overruns > 0


@spilling(limits=("1 MiB",), nthreads=[("", 2)], timeout=120)
async def test_tasks_that_hold_their_inputs_for_long_stop_nobody(c, s, a):
    """Seceded tasks pin what they use until they end; what they wait for has to run meanwhile."""
    from distributed import worker_client

    def outer(x):
        with worker_client() as client:
            return sum(client.gather(client.map(inner, range(10), [len(x)] * 10, pure=False)))

    def inner(i, n):
        return len(np.ones(n, dtype="u1"))

    xs = [c.submit(block_of, MB, i, key=f"block_of-{i}") for i in range(3)]
    assert await c.gather(c.map(outer, xs)) == [10 * MB] * 3


@spilling(limits=("4 MiB",), nthreads=[("", 2)])
async def test_unspillable_values_stop_nobody(c, s, a):
    class Stubborn:
        def __init__(self):
            self.data = bytes(MB)

        def __reduce__(self):
            raise TypeError

        def __sizeof__(self):
            return MB

    futures = [c.submit(Stubborn, pure=False) for _ in range(10)]
    await wait(futures)
    assert await c.submit(lambda xs: len(xs), futures) == 10


class SlowToWrite:
    """Takes longer to serialise than the store waits before it tries again what failed for the first time."""

    def __init__(self):
        self.data = bytes(300_000)

    def __reduce__(self):
        time.sleep(0.3)
        return SlowToWrite, (), {"data": self.data}

    def __sizeof__(self):
        return MB


@pytest.mark.fault("disk full", on="host→disk", outcome="tasks go on")
@spilling(limits=("4 MiB",), nthreads=[("", 1)], config={"gpuspill.max-spill": "400 kB"})
async def test_a_full_disk_stops_nobody(c, s, a):
    futures = [c.submit(SlowToWrite, pure=False) for _ in range(12)]
    await wait(futures, timeout=30)
    statistics = a.data.statistics()
    assert statistics.disk_keys == 1
    assert statistics.overruns > 0
    assert statistics.disk_nbytes <= 400_000


@spilling(limits=("8 MiB",), nthreads=[("", 1)])
async def test_inputs_of_a_running_task_are_not_spilled(c, s, a):
    running, release = Event(), Event()

    def use(x, running, release):
        running.set()
        release.wait()
        return len(x)

    x = c.submit(block_of, MB)
    y = c.submit(use, x, running, release)
    await running.wait()
    # The task's thread holds the value anyway; the pin is what keeps it in the books.
    assert a.data.manager.is_resident(x.key)
    await all_spilled(a)
    assert a.data.manager.is_resident(x.key)
    await release.set()
    assert await y == MB


@spilling(limits=("1 GiB",), nthreads=[("", 1)])
async def test_nothing_is_admitted_while_there_is_plenty_of_room(c, s, a):
    admitted = []
    admit = a.data.manager.admit
    a.data.manager.admit = lambda *args, **kwargs: admitted.append(args) or admit(*args, **kwargs)
    assert await c.submit(sum, c.map(inc, range(10))) == 55
    assert not admitted
    x = c.submit(block_of, MB)
    await wait(x)
    await all_spilled(a)
    assert await c.submit(len, x) == MB
    assert len(admitted) == 1


@spilling(limits=("1 MiB",), nthreads=[("", 1)])
async def test_output_sizes_are_learned(c, s, a):
    await wait(c.submit(block_of, 1000, key="block_of-0"))
    assert 1000 <= attached(a).sizes.expected("block_of") < 1200

    async def coroutine_block():
        return bytes(5000)

    await wait(c.submit(coroutine_block, key="coroutine_block-0"))
    assert 5000 <= attached(a).sizes.expected("coroutine_block") < 5200


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_an_input_that_vanishes_before_the_task_starts(c, s, a):
    """As after a cancellation at the wrong moment: distributed makes an error of it, and nothing stays behind.

    It may come across the other inputs first. They are read beforehand all the same, and not on the event loop.
    """
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    job = attached(a).admit("y", "y", [x.key, "no such key"])
    assert list(job.admission.pids) == [x.key]
    assert not job.ready
    job.abandon()
    await at_rest(a)
    assert await c.submit(np.sum, x) == 1000


@pytest.mark.fault("several threads at once", on=("send", "receive"), outcome="every value right, all totals zero")
@spilling(limits=("4 MiB",), nthreads=[("", 2)] * 2, timeout=120)
async def test_heavy_traffic_both_ways(c, s, a, b):
    slow_disk(a, 0.002)
    slow_disk(b, 0.002)
    xs = [c.submit(block_of, MB // 4, i, key=f"block_of-{i}", workers=[(a, b)[i % 2].address]) for i in range(40)]
    ys = [
        c.submit(
            lambda x, y: int(x.sum()) + int(y.sum()),
            xs[i],
            xs[(i * 7 + 3) % 40],
            workers=[(a, b)[i % 3 % 2].address],
        )
        for i in range(40)
    ]
    assert await c.gather(ys) == [MB // 2] * 40
