"""Values that a task parks in its worker's store."""

import asyncio
import pathlib
import pickle
import threading
from functools import partial

import numpy as np
import pytest
from distributed import Worker, get_client, get_worker, wait, worker_client
from distributed.utils_test import async_poll_for, gen_cluster

import gpuspill
import gpuspill.walk
from gpuspill import simulated
from gpuspill.distributed.internals import current_store
from gpuspill.distributed.parking import Parked
from gpuspill.simulated import asarray, asnumpy
from gpuspill.testing.stores import Gate, GatedStore
from tests.processes import in_child

from .clusters import spilling
from .test_device import CHUNK, LIMIT, device, make, on_device  # noqa: F401

ONE = (("127.0.0.1", 1),)
NBYTES = 80_000


def manager():
    return get_worker().memory_manager.data.manager


def empty(store):
    statistics = store.statistics()
    return statistics.keys == statistics.values == 0 and len(store) == 0


@spilling(nthreads=ONE)
async def test_a_parked_value_is_spilled_and_comes_back(c, s, a):
    def task():
        store = get_worker().memory_manager.data
        handle = gpuspill.proxify(np.arange(10_000))
        before = len(store), list(store)
        store.manager.limits.evict_all()
        assert store.manager.spilled_count == 1
        with handle as first:
            assert first.sum() == 49_995_000
            store.manager.limits.evict_all()
            with handle as again:
                assert again is first  # pinned
        del first, again
        store.manager.limits.evict_all()
        assert store.manager.spilled_count == 1
        assert store.statistics().pinned_nbytes == 0
        return before, int(handle.resolve()[7])

    assert await c.submit(task, key="t") == ((0, []), 7)
    a.data.statistics()
    assert not a.data._parked
    assert set(a.data) <= {"t"}


@spilling(nthreads=ONE, limits=(3 * NBYTES,))
async def test_more_can_be_parked_than_fits(c, s, a):
    """Whoever parks waits for those who write."""

    def task():
        handles, most = [], 0
        for number in range(30):
            handles.append(gpuspill.proxify(np.full(10_000, number)))
            most = max(most, manager().memory_total())
        return most, [int(handle.resolve()[5]) for handle in handles]

    most, numbers = await c.submit(task)
    assert numbers == list(range(30))
    assert most <= 3 * NBYTES


@spilling(nthreads=ONE, limits=(NBYTES + 1000,))
async def test_parking_waits_until_something_is_written(c, s, a):
    spiller = a.data.manager._spiller
    spiller._store = GatedStore(spiller._store)
    gate = spiller._store.before["write"] = Gate()
    a.parked = []

    def task():
        parked = get_worker().parked
        for number in range(2):
            parked.append(gpuspill.proxify(np.full(10_000, number)))
        return len(parked)

    future = c.submit(task)
    assert await asyncio.to_thread(gate.arrived.acquire, timeout=10)
    await async_poll_for(lambda: a.data.statistics().waiting == 1, timeout=10)
    assert len(a.parked) == 1
    gate.open()
    assert await future == 2
    a.parked.clear()


@spilling(nthreads=ONE, limits=(1,))
async def test_parking_does_not_wait_for_what_never_comes(c, s, a):
    """Nothing can leave: the caller has the values in hand, or they cannot be written."""

    def held():
        values = [np.full(10_000, number) for number in range(5)]
        return len([gpuspill.proxify(value) for value in values])

    def unspillable():
        return len([gpuspill.proxify(threading.Lock()) for _ in range(5)])

    async def on_the_loop():
        return len([gpuspill.proxify(np.full(10_000, number)) for number in range(5)])

    assert await c.submit(held) == 5
    assert await c.submit(unspillable) == 5
    assert await c.submit(on_the_loop) == 5
    assert await c.run(on_the_loop) == {a.address: 5}


@spilling(nthreads=ONE)
async def test_handles_in_containers(c, s, a):
    def task():
        handles = {"x": gpuspill.proxify(np.ones(10)), "y": [gpuspill.proxify("text"), 1]}
        manager().limits.evict_all()
        found = gpuspill.unproxify(handles)
        assert gpuspill.unproxify(5) == 5
        assert gpuspill.unproxify(gpuspill.proxify({"in": [gpuspill.proxify(7)]})) == {"in": [7]}
        assert gpuspill.proxify(handles["x"]) is handles["x"]
        return found["x"].sum(), found["y"]

    assert await c.submit(task) == (10.0, ["text", 1])


@spilling(nthreads=ONE)
async def test_a_handle_travels_as_its_value(c, s, a):
    def task():
        handle = gpuspill.proxify(np.arange(10_000))
        manager().limits.evict_all()
        return pickle.dumps([handle, 1])

    value, one = pickle.loads(await c.submit(task))
    np.testing.assert_array_equal(value, np.arange(10_000))
    assert one == 1


@spilling(nthreads=ONE)
async def test_in_threads_that_tasks_start(c, s, a):
    def task():
        found = []
        store = get_worker().memory_manager.data

        def run():
            handle = gpuspill.proxify(np.arange(10))
            found.append(handle._store is store)
            found.append(int(handle.resolve().sum()))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        return found

    assert await c.submit(task) == [True, 45]


@spilling(nthreads=(("127.0.0.1", 1), ("127.0.0.1", 1)))
async def test_each_worker_has_its_own(c, s, a, b):
    def task(address):
        handle = gpuspill.proxify(1)
        return handle._store is get_worker().memory_manager.data and get_worker().address == address

    for worker in (a, b):
        assert await c.submit(task, worker.address, workers=[worker.address])


@spilling(nthreads=(("127.0.0.1", 1), ("127.0.0.1", 1)))
async def test_beside_several_workers_no_store_is_meant(c, s, a, b):
    value = np.arange(10)
    handle = gpuspill.proxify(value)
    assert handle._store is None
    assert gpuspill.unproxify({"x": handle})["x"] is value
    await b.close()
    assert gpuspill.proxify(value)._store is a.data, "the one that is left"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_in_a_task_of_a_worker_without_gpuspill_the_handle_keeps_the_value(c, s, a):
    def task():
        value = np.arange(10)
        handle = gpuspill.proxify(value)
        with handle as found:
            return handle._store is None and found is value

    # Beside one that has it, which is none of the task's business.
    async with Worker(s.address, data=gpuspill.data()) as other:
        assert await c.submit(task, workers=[a.address], pure=False)
        assert not await c.submit(task, workers=[other.address], pure=False)


@on_device()
async def test_parked_on_a_device(c, s, a, device):  # noqa: F811
    def task():
        store = get_worker().memory_manager.data
        handle = gpuspill.proxify({"x": make(3)})
        store.tier.settle()
        store.tier.manager.limits.evict_all()
        assert simulated.device().statistics().live_bytes == 0
        store.manager.limits.evict_all()
        with handle as value:
            return int(asnumpy(value["x"]).sum())

    assert await c.submit(task) == 3 * CHUNK // 8
    a.data.statistics()
    assert device.statistics().live_bytes == 0


@on_device(limits=(LIMIT * 100,))
async def test_more_can_be_parked_than_fits_on_the_device(c, s, a, device):  # noqa: F811
    def task():
        handles, most = [], 0
        for number in range(3 * LIMIT // CHUNK):
            handles.append(gpuspill.proxify(make(number)))
            most = max(most, simulated.device().statistics().live_bytes)
        return most, [int(asnumpy(handle.resolve())[0]) for handle in handles]

    most, numbers = await c.submit(task)
    assert numbers == list(range(3 * LIMIT // CHUNK))
    assert most <= LIMIT


def test_without_a_worker_it_just_keeps_the_value():
    value = asarray(np.arange(3.0))
    handle = gpuspill.proxify(value)
    assert type(handle) is Parked
    with handle as found:
        assert found is value
    assert gpuspill.unproxify([handle])[0] is value
    assert pickle.loads(pickle.dumps(gpuspill.proxify("x"))) == "x"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@spilling(nthreads=ONE)
async def test_a_task_that_forks(c, s, a):
    """The child has the worker's data, parks in its own memory, and leaves the worker's alone."""

    def child(handle, store):
        parked = gpuspill.proxify(np.full(10_000, 3))
        assert parked._store is None
        assert current_store() is None
        with parked as found, handle as inherited:
            assert found.sum() == 30_000
            assert inherited.sum() == 49_995_000
        assert store["x"].sum() == 10_000
        store["y"] = np.zeros(10)
        del store["x"], handle
        store.clear()

    def task():
        store = get_worker().memory_manager.data
        handle = gpuspill.proxify(np.arange(10_000))
        store.manager.limits.evict_all()
        for _ in range(3):
            in_child(partial(child, handle, store))
        return handle.resolve().sum()

    x = c.submit(np.ones, 10_000, key="x")
    await wait(x)
    assert await c.submit(task) == 49_995_000
    assert (await x).sum() == 10_000


@pytest.mark.parametrize("dropped", ["entered", "entered twice", "in a generator"])
@spilling(limits=(1,), nthreads=ONE)
async def test_a_handle_that_is_dropped_while_it_is_open_keeps_nothing(c, s, a, dropped):
    def task():
        def generator():
            with gpuspill.proxify(np.arange(10_000)) as value:
                yield value.sum()

        if dropped == "in a generator":
            next(generator())
            return
        handle = gpuspill.proxify(np.arange(10_000))
        for _ in dropped.split():
            handle.__enter__()

    await c.submit(task, key="t")
    await async_poll_for(lambda: a.data.statistics().pinned_nbytes == 0, timeout=10)
    assert not a.data._parked
    assert a.data.manager.keys() == ["t"]


@pytest.mark.parametrize("coroutine", [False, True], ids=["thread", "coroutine"])
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [1, {"a": x}], lambda x: (x, x)], ids=["bare", "nested", "twice"]
)
@spilling(nthreads=ONE)
async def test_a_task_that_returns_a_handle_returns_the_value(c, s, a, wrap, coroutine):
    def task():
        handle = gpuspill.proxify(np.arange(NBYTES // 8))
        get_worker().memory_manager.data.manager.limits.evict_all()
        return wrap(handle)

    async def coroutine_task():
        return task()

    def look(x):
        found = []
        gpuspill.walk.replace(x, lambda item: found.append(item) or item)
        assert all(type(item) is np.ndarray for item in found)
        return len(found), int(found[0].sum())

    x = c.submit(coroutine_task if coroutine else task, key="x")
    assert await c.submit(look, x) == (1, sum(range(NBYTES // 8)))
    assert type(await c.gather(x)) is type(wrap(np.zeros(1)))
    assert s.tasks["x"].nbytes >= NBYTES
    assert await c.submit(lambda: get_worker().state.tasks["x"].type) is type(wrap(np.zeros(1)))
    await async_poll_for(lambda: not a.data.settle_parked() and not a.data.parked, 10)


@pytest.mark.parametrize("coroutine", [False, True], ids=["thread", "coroutine"])
@spilling(nthreads=ONE)
async def test_a_task_that_scatters_a_handle_scatters_the_value(c, s, a, coroutine):
    def task():
        with worker_client() as client:
            return kinds(client.gather(client.scatter([gpuspill.proxify(np.arange(5)), 1], hash=False)))

    async def coroutine_task():
        client = get_client()
        return kinds(await client.gather(await client.scatter([gpuspill.proxify(np.arange(5)), 1], hash=False)))

    def kinds(values):
        return [type(value) for value in values]

    assert await c.submit(coroutine_task if coroutine else task) == [np.ndarray, int]


@pytest.mark.parametrize("coroutine", [False, True], ids=["thread", "coroutine"])
@spilling(nthreads=ONE, limits=(1,), loop_io=None)
async def test_a_task_that_returns_a_handle_of_what_is_lost_fails(c, s, a, coroutine):
    def task():
        store = get_worker().memory_manager.data
        handle = gpuspill.proxify(np.arange(NBYTES // 8))
        store.manager.limits.evict_all()
        for path in pathlib.Path(get_worker().local_directory).rglob("*"):
            if path.is_file() and path.name.isdigit():
                path.unlink()
        return handle

    async def coroutine_task():
        return task()

    with pytest.raises(gpuspill.DataLostError):
        await c.submit(coroutine_task if coroutine else task, retries=0)
