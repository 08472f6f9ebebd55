"""A record that is gone or damaged: the value is computed anew, or whoever waits for it gets an error that names it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest
from distributed import Client, Event, LocalCluster, wait
from distributed.client import FutureCancelledError
from distributed.utils_test import async_poll_for, gen_test, inc

import gpuspill
from gpuspill import DataLostError
from gpuspill.errors import StorageError
from tests.distributed.clusters import all_spilled, spill_directory, spilling

pytestmark = pytest.mark.cluster

#: The scheduler gives a worker all the tasks there are, not only as many as it has threads.
ALL_AT_ONCE = {"distributed.scheduler.worker-saturation": float("inf")}


def remove(path):
    os.unlink(path)


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def flip(path):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


async def damage_all(*workers, how=remove):
    """Spill everything and damage every record."""
    await all_spilled(*workers)
    for worker in workers:
        directory = spill_directory(worker)
        records = [name for name in os.listdir(directory) if name.isdigit()]
        assert len(records) == worker.data.statistics().disk_keys > 0
        for name in records:
            how(os.path.join(directory, name))


def total(*args):
    return sum(np.sum(x) for x in args)


async def total_later(*args):
    return total(*args)


def fail_reads(monkeypatch, number, *, times=None):
    """Let the disk fail at reads, for ever or so many times; return what counts them."""
    preadv = os.preadv
    calls = []

    def failing(fd, buffers, offset):
        calls.append(fd)
        if times is None or len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    return calls


@pytest.mark.fault("error of the disk", on="disk→host", outcome="tried again, then computed anew")
@pytest.mark.parametrize("use", [total, total_later])
@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_what_the_disk_cannot_read_is_computed_anew(c, s, a, use, monkeypatch):
    """On the only copy, twice: not a failed task."""
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    with monkeypatch.context() as patch:
        fail_reads(patch, errno.EIO, times=2)
        assert await c.submit(use, x) == 1000
    assert [t.finish for t in s.story(x.key)].count("memory") == 2


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_a_disk_that_cannot_be_read_any_more_is_an_error_in_the_end(c, s, a, monkeypatch):
    """Or values could be computed, written and lost for ever."""
    xs = c.map(np.ones, [1000] * 12, pure=False)
    await wait(xs)
    await all_spilled(a)
    with monkeypatch.context() as patch:
        fail_reads(patch, errno.EIO)
        with suppress(StorageError):  # or they are used before they are written again
            assert await c.submit(total, *xs) == 12_000
    assert 0 < a.data.statistics().lost <= 8


@pytest.mark.fault("no file descriptor left", on="disk→host", outcome="tried again, with pauses")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_a_full_file_table_is_waited_for(c, s, a, number, monkeypatch):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    with monkeypatch.context() as patch:
        fail_reads(patch, number, times=4)
        assert await c.submit(total, x) == 1000
    assert [t.finish for t in s.story(x.key)].count("memory") == 1


@pytest.mark.fault("record damaged", on="disk→host", outcome="computed anew")
@pytest.mark.fault("record cut off", on="disk→host", outcome="computed anew")
@pytest.mark.fault("record removed", on="disk→host", outcome="computed anew")
@pytest.mark.parametrize("how", [remove, truncate, flip])
@pytest.mark.parametrize("use", [total, total_later])
@spilling(limits=(1,))
async def test_an_input_is_computed_anew(c, s, a, b, how, use):
    x = c.submit(np.ones, 1000)
    y = c.submit(np.add, x, 1)
    await wait(y)
    await damage_all(*(w for w in (a, b) if len(w.data)), how=how)
    assert await c.submit(use, y) == 2000
    assert await c.submit(use, x, pure=False) == 1000


@spilling(limits=(1,), nthreads=[("127.0.0.1", 2)], config=ALL_AT_ONCE)
async def test_many_tasks_need_the_lost_input(c, s, a):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await damage_all(a)
    futures = [c.submit(lambda x, i: float(x.sum()) + i, x, i) for i in range(20)]
    assert await c.gather(futures) == [1000.0 + i for i in range(20)]


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)], config=ALL_AT_ONCE)
async def test_tasks_that_wait_their_turn_are_taken_back(c, s, a):
    """The worker is busy while the loss of their common input is found out."""
    release = Event()

    def block(release):
        release.wait()

    x = c.submit(np.ones, 1000)
    await wait(x)
    await damage_all(a)
    blocker = c.submit(block, release)
    await async_poll_for(lambda: a.state.executing_count, timeout=5)
    futures = [c.submit(lambda x, i: float(x.sum()) + i, x, i) for i in range(5)]
    await async_poll_for(lambda: len(a.state.ready) == 5, timeout=5)
    # A client asks for the value: the loss is found, and everything that counts on it starts over.
    value = asyncio.ensure_future(c.gather(x, direct=True, asynchronous=True))
    await async_poll_for(lambda: a.data.statistics().lost == 1, timeout=5)
    await release.set()
    assert (await value).sum() == 1000
    assert await c.gather(futures) == [1000.0 + i for i in range(5)]
    del blocker


@pytest.mark.fault("record removed", on="disk→host", outcome="another copy is used")
@spilling(limits=(1,))
async def test_another_replica_is_used(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await c.replicate(x, n=2)
    scattered = await c.scatter(np.ones(500), broadcast=True)
    await damage_all(a)
    assert await c.submit(total, x, workers=[a.address]) == 1000
    assert await c.submit(total, scattered, workers=[a.address]) == 500
    assert s.tasks[x.key].run_spec is not None
    assert not s.tasks[scattered.key].run_spec


@pytest.mark.fault("record removed", on="send", outcome="computed anew")
@pytest.mark.parametrize("direct", [False, True])
@spilling(limits=(1,))
async def test_a_client_gathers_a_lost_result(c, s, a, b, direct):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await damage_all(a)
    assert (await c.gather(x, direct=direct)).sum() == 1000


@pytest.mark.fault("record removed", on="send", outcome="computed anew")
@spilling(limits=(1,))
async def test_another_worker_needs_it(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await damage_all(a)
    assert await c.submit(total, x, workers=[b.address]) == 1000


@pytest.mark.fault("spill directory removed", on="send", outcome="computed anew")
@spilling(limits=(1,))
async def test_another_worker_needs_what_was_in_a_directory_that_is_gone(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address], allow_other_workers=True)
    await wait(x)
    await all_spilled(a)
    shutil.rmtree(spill_directory(a))
    assert await c.submit(total, x, workers=[b.address]) == 1000
    # And on in another one.
    y = c.submit(np.ones, 500, workers=[a.address], pure=False)
    await wait(y)
    await all_spilled(a)
    assert await c.submit(total, y, workers=[b.address]) == 500


@spilling(limits=(1,))
async def test_replicate_a_lost_value(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await damage_all(a)
    with suppress(AssertionError):  # the scheduler's, which does not expect what it replicates to vanish
        await c.replicate(x, n=2)
    assert (await x).sum() == 1000


# -- what nobody can compute ---------------------------------------------------------------------


@pytest.mark.fault("record removed", on="disk→host", outcome="what nothing can compute: an error names it")
@pytest.mark.parametrize("use", [total, total_later])
@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_a_task_needs_scattered_data_that_is_lost(c, s, a, use):
    x = (await c.scatter({"my-data": np.ones(1000)}))["my-data"]
    await damage_all(a)
    y = c.submit(use, x)
    with pytest.raises(DataLostError, match="my-data") as caught:
        await y
    assert caught.value.key == "my-data"
    z = c.submit(inc, y)
    with pytest.raises(DataLostError, match="my-data"):
        await z
    assert await c.submit(inc, 1) == 2


@gen_test()
async def test_a_worker_in_the_process_of_the_scheduler_loses_scattered_data():
    async with (
        LocalCluster(
            n_workers=1, processes=False, data=gpuspill.data(host_limit=1), dashboard_address=None, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        (worker,) = cluster.workers.values()
        x = (await client.scatter({"my-data": np.ones(1000)}))["my-data"]
        await damage_all(worker)
        with pytest.raises(DataLostError, match="my-data"):
            await client.submit(total, x)
        assert await client.submit(inc, 1) == 2


@pytest.mark.parametrize("direct", [False, True])
@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_a_client_gathers_scattered_data_that_is_lost(c, s, a, direct):
    x = (await c.scatter({"my-data": np.ones(1000)}))["my-data"]
    await damage_all(a)
    with pytest.raises(DataLostError, match="my-data") as caught:
        await c.gather(x, direct=direct)
    assert caught.value.key == "my-data"


@pytest.mark.fault("record removed", on="send", outcome="what nothing can compute: an error names it")
@spilling(limits=(1,))
async def test_another_worker_needs_scattered_data_that_is_lost(c, s, a, b):
    x = (await c.scatter({"my-data": np.ones(1000)}, workers=[a.address]))["my-data"]
    await damage_all(a)
    y = c.submit(total, x, workers=[b.address])
    with pytest.raises(DataLostError, match="my-data"):
        await y
    # The other worker knows by now; so does a client that asks it.
    assert "my-data" in b.data
    with pytest.raises(DataLostError, match="my-data"):
        b.data["my-data"]
    with pytest.raises(DataLostError, match="my-data"):
        await b.data.async_get(["my-data"])
    with pytest.raises(DataLostError, match="my-data"):
        await x
    with pytest.raises(DataLostError, match="my-data"):
        await c.submit(total, x, workers=[b.address], pure=False)
    assert await c.submit(inc, 1) == 2


@gen_test()
async def test_in_one_process():
    async with (
        LocalCluster(
            n_workers=1,
            processes=False,
            asynchronous=True,
            dashboard_address=":0",
            data=gpuspill.data(host_limit=1),
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        (worker,) = cluster.workers.values()
        x = (await c.scatter({"my-data": np.ones(1000)}))["my-data"]
        y = c.submit(np.ones, 500)
        await wait(y)
        await damage_all(worker)
        assert (await y).sum() == 500
        with pytest.raises(FutureCancelledError, match="my-data"):
            await x


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)], loop_io=None)
async def test_whoever_reads_worker_data_gets_the_error_and_the_scheduler_is_told(c, s, a):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await damage_all(a)
    with pytest.raises(DataLostError, match=x.key):
        a.data[x.key]
    await async_poll_for(lambda: [t.finish for t in s.story(x.key)].count("memory") == 2, timeout=5)
    assert (await x).sum() == 1000


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_async_get_raises_for_lost_values(c, s, a):
    x = (await c.scatter({"my-data": np.ones(1000)}))["my-data"]
    await damage_all(a)
    with pytest.raises(DataLostError, match="my-data"):
        await a.data.async_get(["my-data"])
    del x


@pytest.mark.fault("record removed", on="disk→host", outcome="what nothing can compute: an error names it")
@spilling(limits=(1,))
async def test_both_copies_are_found_lost_at_once(c, s, a, b):
    """Neither may be given up for the other."""
    x = (await c.scatter({"my-data": np.ones(1000)}, broadcast=True))["my-data"]
    await damage_all(a, b)
    both, who_has = asyncio.Barrier(2), s.handlers["who_has"]

    async def answer_both(keys=None):
        await both.wait()
        return who_has(keys=keys)

    s.handlers["who_has"] = answer_both
    ys = [c.submit(total, x, workers=[worker.address], pure=False) for worker in (a, b)]
    for y in ys:
        with pytest.raises(DataLostError, match="my-data"):
            await y
    assert set(s.workers) == {a.address, b.address}
    assert {worker.address for worker in s.tasks["my-data"].who_has} == {a.address, b.address}
    assert await c.submit(inc, 1) == 2
