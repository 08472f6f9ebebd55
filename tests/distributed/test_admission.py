"""Tasks and transfers wait until they fit, without holding the event loop, and never for ever."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import numpy as np
import pytest
from distributed import Event, Future, Status, wait, worker_client
from distributed.utils_test import async_poll_for, inc

from gpuspill.core.budget import Kind
from gpuspill.manager.transaction import BATCH, at_once
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


@spilling(
    limits=("4 MiB",),
    nthreads=[("", 1), ("", 1)],
    config={"gpuspill.spill-timeout": "200 ms", "gpuspill.follow-process-memory": False},
)
async def test_a_write_that_hangs_stops_no_task_and_no_transfer(c, s, a, b):
    gate = threading.Event()
    write = a.data.records.store.write
    a.data.records.store.write = lambda *args: (gate.wait(60), write(*args))[1]
    xs = [c.submit(block_of, MB, i, key=f"block_of-{i}", workers=[a.address]) for i in range(12)]
    ys = [c.submit(block_of, MB, i, key=f"other-{i}", workers=[b.address]) for i in range(4)]
    await wait(xs + ys)
    total = c.submit(lambda xs: sum(len(x) for x in xs), ys, workers=[a.address])
    assert await total == 4 * MB
    assert not gate.is_set()
    assert a.data.statistics().overruns > 0
    gate.set()
    assert [await c.submit(len, x) for x in xs] == [MB] * 12


@pytest.mark.fault("cancelled meanwhile", on="host→disk", outcome="nothing pinned, nothing promised")
@spilling(limits=("10 MiB",), nthreads=[("", 1)])
async def test_a_task_that_waits_can_be_cancelled(c, s, a):
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
    admit = a.data.manager.admission.admit_in_pieces
    a.data.manager.admission.admit_in_pieces = lambda *args, **kwargs: admitted.append(args) or admit(*args, **kwargs)
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
    job = at_once(attached(a).admit("y", "y", [x.key, "no such key"]))
    assert list(job.admission.pids) == [x.key]
    assert not job.ready
    job.abandon()
    await at_rest(a)
    assert await c.submit(np.sum, x) == 1000


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_many_inputs_of_a_task_are_pinned_and_let_go_in_pieces(c, s, a):
    """The event loop runs in between."""
    inputs = await c.scatter([number + 10**6 for number in range(4 * BATCH)])
    await all_spilled(a)
    entries = a.data.manager._ledger.entries
    seen = []

    async def watch():
        while True:
            pinned = sum(entry.pins for entry in list(entries.values()))
            if not seen or seen[-1] != pinned:
                seen.append(pinned)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    assert await c.submit(len, inputs) == len(inputs)
    await at_rest(a)
    watching.cancel()
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert max(seen) >= 4 * BATCH
    assert max(map(abs, steps)) <= BATCH
    assert seen[-1] == 0


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


# -- who goes first ----------------------------------------------------------------------------------------------------


class Gated:
    """A disk that takes nothing until it is told to."""

    def __init__(self, worker):
        self.gate = threading.Event()
        write = worker.data.records.store.write
        worker.data.records.store.write = lambda *args: (self.gate.wait(30), write(*args))[1]


def line_of(worker):
    """Those who wait for room on a worker, whose turn it is first."""
    with worker.data.manager._metadata as state:
        line = state.memory.line
        return [line.first(), *line.waiting] if line.waiting else []


async def waits(worker, kind, count=1):
    await async_poll_for(lambda: sum(r.kind is kind for r in line_of(worker)[1:]) >= count, timeout=20)


TWO = [("", 2), ("", 1)]


async def crowded(c, a):
    """Two tasks of the lowest priority wait for room on a worker."""
    await wait(c.submit(block_of, MB, workers=[a.address], key="block_of-0"))  # the size of its kind is known now
    futures = [c.submit(block_of, MB, n, workers=[a.address], key=f"block_of-{n}", priority=-10) for n in range(1, 40)]
    await waits(a, Kind.TASK, 2)
    return futures


@spilling(limits=("10 MiB",), nthreads=TWO)
async def test_a_transfer_is_as_urgent_as_the_task_that_waits_for_it(c, s, a, b):
    disk = Gated(a)
    x = c.submit(block_of, MB, -1, workers=[b.address], key="x")
    await wait(x)
    low = await crowded(c, a)
    y = c.submit(len, x, workers=[a.address], key="y", priority=10)
    await waits(a, Kind.TRANSFER)
    first = line_of(a)[0]
    assert (first.kind, first.order) == (Kind.TRANSFER, a.state.tasks["y"].priority)
    disk.gate.set()
    assert await y == MB
    assert not all(future.done() for future in low)
    await c.cancel(low)


@spilling(limits=("10 MiB",), nthreads=TWO)
async def test_a_transfer_that_waits_becomes_more_urgent(c, s, a, b):
    """Because of a task that comes later and needs the same value, or another one from the same worker."""
    disk = Gated(a)
    x, z = (c.submit(block_of, MB, n, workers=[b.address], key=f"from-b-{n}") for n in range(2))
    await wait([x, z])
    low = await crowded(c, a)
    y = c.submit(len, x, workers=[a.address], key="y", priority=-20)
    await waits(a, Kind.TRANSFER)
    (transfer,) = (r for r in line_of(a)[1:] if r.kind is Kind.TRANSFER)
    assert transfer.order == a.state.tasks["y"].priority
    later = []
    for key, value, priority in (("same", x, 5), ("another", z, 10)):
        later.append(c.submit(len, value, workers=[a.address], key=key, priority=priority))
        await async_poll_for(lambda key=key: key in a.state.tasks, timeout=10)
        await async_poll_for(lambda key=key: transfer.order == a.state.tasks[key].priority, timeout=10)
        assert line_of(a)[0] is transfer
    disk.gate.set()
    assert await c.gather([y, *later]) == [MB] * 3
    await c.cancel(low)


@spilling(limits=("10 MiB",), nthreads=[("", 1)])
async def test_what_a_task_gathers_is_as_urgent_as_the_task(c, s, a):
    x = c.submit(block_of, MB, key="x")
    await wait(x)
    await all_spilled(a)
    asked = []
    get_many = a.data.manager.batch.get_many

    def watched(keys, missing="raise", *, order=()):
        asked.append((list(keys), order, a.state.tasks["gathers"].priority))
        return get_many(keys, missing, order=order)

    a.data.manager.batch.get_many = watched

    def gathers():
        with worker_client() as client:
            return len(client.gather(Future("x", client)))

    assert await c.submit(gathers, key="gathers", priority=7) == MB
    ((keys, order, expected),) = asked
    assert keys == ["x"]
    assert order == expected
    assert order[0] == -7


# -- those who may wait for others -------------------------------------------------------------------------------------


def waits_for(event, nbytes, *args):
    with worker_client():
        event.wait()
    return np.ones(nbytes, dtype="u1")


@spilling(limits=("20 MiB",), nthreads=[("", 2)])
async def test_seceded_tasks_keep_no_room_for_their_outputs(c, s, a):
    event = Event()
    await event.set()
    await wait(c.submit(waits_for, event, 2 * MB, key="waits_for-0"))  # the size of its kind is known now
    await event.clear()
    blocks = [c.submit(block_of, MB, n, key=f"block_of-{n}") for n in range(16)]
    await wait(blocks)
    before = a.data.memory_total()
    assert before > 10 * MB  # or nothing would be promised
    seceded = [c.submit(waits_for, event, 2 * MB, n, key=f"waits_for-{n}") for n in range(1, 11)]
    await async_poll_for(lambda: len(a.state.long_running) == 10, timeout=20)
    statistics = a.data.statistics()
    assert (statistics.reserved_nbytes, statistics.waiting) == (0, 0)
    # One after the other they were promised room for an output, and no more.
    assert statistics.host_nbytes >= before - 4 * MB
    asked = []
    reserve = a.data.manager.admission.reserve
    a.data.manager.admission.reserve = lambda *args, **kwargs: (
        asked.append(kwargs["outputs"]) or reserve(*args, **kwargs)
    )
    await event.set()
    assert await c.gather([c.submit(len, future) for future in seceded]) == [2 * MB] * 10
    assert sorted(key for outputs in asked for key in outputs) == sorted(future.key for future in seceded)
    assert a.data.statistics().loop_io == 0


@spilling(limits=("10 MiB",), nthreads=[("", 2)], timeout=60)
async def test_a_task_with_a_client_is_not_waited_for(c, s, a):
    """It takes all the memory there is, and its client may be what it needs others for."""
    x = c.submit(block_of, 12 * MB, key="x")
    await wait(x)
    # Spilled, so that each of the two brings it back; what a clock says lets no one in.
    await all_spilled(a)
    a.data.manager._spiller._relent = lambda *args: float("inf")

    def first(x, event):
        event.wait()  # by the client of this task
        return len(x)

    def second(x, event, n):
        event.set()
        return len(x) + n

    y = c.submit(block_of, 12 * MB, 1, key="other")
    await wait(y)
    await all_spilled(a)
    event = Event()
    one = c.submit(first, x, event, key="first", priority=1)
    two = c.submit(second, y, event, 1, key="second")
    assert await c.gather([one, two]) == [12 * MB, 12 * MB + 1]
    assert a.data.statistics().overruns >= 2
