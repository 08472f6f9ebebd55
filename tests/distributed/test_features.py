"""What people do with a cluster works as without gpuspill, and the event loop reads nothing from disk meanwhile.

Each test runs with a limit of 1 byte, so that every value is spilled as soon as nobody uses it.
"""

from __future__ import annotations

import asyncio
import operator
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import ClassVar

import dask
import numpy as np
import pytest
from dask._task_spec import Alias, Task, TaskRef
from distributed import Actor, Event, Reschedule, Status, get_client, get_worker, secede, wait, worker_client
from distributed.utils_test import async_poll_for, inc

from gpuspill.errors import ReadInterrupted
from gpuspill.manager.proxy import Proxy
from tests.distributed.clusters import all_spilled, at_rest, spilling
from tests.things import DEADLY, Deadly

pytestmark = pytest.mark.cluster


class Counter:
    """An actor."""

    def __init__(self, start=0):
        self.n = start

    def increment(self, by=1):
        self.n += by
        return self.n

    async def aincrement(self):
        self.n += 1
        return self.n


def no_proxy(*args, **kwargs):
    """Sum everything; a proxy anywhere fails."""
    total = 0
    for value in [*args, *kwargs.values()]:
        if isinstance(value, dict):
            total += no_proxy(*value.values())
        elif isinstance(value, list | tuple):
            total += no_proxy(*value)
        else:
            assert not isinstance(value, Proxy)
            total += np.sum(value)
    return total


@spilling()
async def test_nested_arguments(c, s, a, b):
    x, y, z = (c.submit(np.full, 1000, i, pure=False) for i in (1, 2, 3))
    await wait([x, y, z])
    await all_spilled(a, b)
    futures = [
        c.submit(no_proxy, x, y),
        c.submit(no_proxy, [x, {"y": y}], z=z),
        c.submit(no_proxy, {"a": [x, (y, z)]}),
        c.submit(no_proxy, x, x, x),
    ]
    assert await c.gather(futures) == [3000, 6000, 6000, 3000]
    lazy = dask.delayed(no_proxy)([x, y], other={"z": z})
    assert await c.compute(lazy) == 6000


@spilling(limits=(1,))
@pytest.mark.parametrize("error", DEADLY)
async def test_an_input_whose_deserialiser_raises_what_is_no_error_fails_its_task_only(c, s, a, b, error):
    deadly = [c.submit(Deadly, error, pure=False, workers=[a.address]) for _ in range(4)]
    await wait(deadly)
    await all_spilled(a)
    used = [c.submit(type, x, pure=False, workers=[a.address]) for x in deadly]
    used.append(c.submit(coroutine_task, deadly[0], workers=[a.address]))
    for future in used:
        assert isinstance(await future.exception(), ReadInterrupted)
    for x in deadly:
        with pytest.raises(ReadInterrupted):
            await a.data.async_get([x.key])
    y = c.submit(no_proxy, c.submit(np.ones, 1000, workers=[a.address]), workers=[a.address])
    assert await y == 1000
    assert a.status == b.status == Status.running


async def coroutine_task(x):
    return 0


class Lazy:
    """Finds out its size when it is asked, if at all; dask knows none for its type."""

    asked: ClassVar[list[int]] = []

    def __init__(self, error=None):
        self.error = error

    @property
    def nbytes(self):
        Lazy.asked.append(threading.get_ident())
        if self.error is not None:
            raise DEADLY[self.error]
        return 12_345


@spilling(nthreads=(("127.0.0.1", 1),), limits=(None, 1))
@pytest.mark.parametrize("error", [None, "builtins.SystemExit"])
async def test_what_a_value_claims_to_have_is_asked_once_in_the_thread_of_its_task(c, s, a, error):
    """It may take its time, during which the event loop would stand still."""
    Lazy.asked.clear()
    x = c.submit(Lazy, error, key="x")
    await wait(x)
    assert len(Lazy.asked) == 1
    assert Lazy.asked[0] != threading.get_ident()
    assert a.data.statistics().estimated_nbytes == (0 if error else 12_345)
    assert a.status == Status.running


@spilling(nthreads=(("127.0.0.1", 1),), limits=(None, 1))
@pytest.mark.parametrize("changed", [False, True])
async def test_another_name_for_a_value_is_no_reason_to_write_it_again(c, s, a, changed):
    """dask's optimisation leaves tasks that only pass on their input; a task of somebody's may have changed it."""

    def twice(x):
        x *= 2
        return x

    x = c.submit(np.ones, 1000, key="x")
    await wait(x)
    await all_spilled(a)
    assert a.data.statistics().spills == 1
    y = c.get({"y": Task("y", twice, TaskRef("x")) if changed else Alias("y", "x")}, "y", sync=False)
    await wait(y)
    x.release()
    await async_poll_for(lambda: "x" not in a.data, timeout=10)
    await all_spilled(a)
    assert a.data.statistics().spills == 1 + changed
    assert await c.submit(np.sum, y) == 1000 * (1 + changed)


@spilling()
async def test_identity_of_the_argument_within_a_task(c, s, a, b):
    x = await c.scatter(np.ones(1000), hash=False)
    await all_spilled(a, b)
    assert await c.submit(operator.is_, x, x)


@spilling()
async def test_arrays_and_frames(c, s, a, b):
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd

    rng = np.random.default_rng(0)
    values = rng.random((400, 400))
    x = c.persist(da.from_array(values, chunks=100))
    await wait(x)
    await all_spilled(a, b)
    np.testing.assert_allclose(await c.compute((x + x.T).mean(axis=0)), (values + values.T).mean(axis=0))
    np.testing.assert_array_equal(await c.compute(x), values)

    strings = ["s" * i for i in range(10)] * 100
    frame = pd.DataFrame({"a": rng.integers(0, 10, 1000), "b": rng.random(1000), "c": strings})
    df = c.persist(dd.from_pandas(frame, npartitions=8))
    await wait(df)
    await all_spilled(a, b)
    got = await c.compute(df.groupby("a").b.sum())
    pd.testing.assert_series_equal(got.sort_index(), frame.groupby("a").b.sum())
    pd.testing.assert_frame_equal(await c.compute(df), frame, check_dtype=False)


@pytest.mark.parametrize("method", ["p2p", "tasks"])
@spilling(limits=(1,), worker_kwargs={}, timeout=120)
async def test_shuffle(c, s, a, b, method):
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame({"k": np.arange(600) % 7, "v": np.arange(600)})
    df = dd.from_pandas(frame, npartitions=6)
    with dask.config.set({"dataframe.shuffle.method": method}):
        shuffled = c.persist(df.shuffle("k"))
        await wait(shuffled)
        await all_spilled(a, b)
        got = await c.compute(shuffled)
        merged = await c.compute(df.merge(df, on="k").v_x.sum())
    pd.testing.assert_frame_equal(got.sort_values("v").reset_index(drop=True), frame)
    assert merged == frame.merge(frame, on="k").v_x.sum()


@spilling(limits=(1,), timeout=120)
async def test_rechunk(c, s, a, b):
    import dask.array as da

    values = np.arange(120 * 120).reshape(120, 120)
    x = c.persist(da.from_array(values, chunks=(120, 10)))
    await wait(x)
    await all_spilled(a, b)
    with dask.config.set({"array.rechunk.method": "p2p"}):
        np.testing.assert_array_equal(await c.compute(x.rechunk((10, 120))), values)


@spilling()
async def test_coroutine_tasks(c, s, a, b):
    async def total(x, worker_has):
        await asyncio.sleep(0)
        assert not isinstance(x, Proxy)
        # The code of the task runs in the context of the hook and sees the store all the same.
        assert (worker_has in get_worker().data) is True
        return x.sum()

    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await all_spilled(a, b)
    assert await c.submit(total, x, x.key, workers=[a.address]) == 1000


@spilling(limits=(1,))
async def test_coroutine_task_that_is_cancelled_while_it_waits(c, s, a, b):
    started = Event()

    async def wait_for_ever(x, started):
        await started.set()
        await asyncio.Event().wait()

    x = c.submit(np.ones, 1000, workers=[a.address])
    y = c.submit(wait_for_ever, x, started, workers=[a.address])
    await started.wait()
    assert a.data.statistics().pinned_nbytes == 8000
    await a.close()
    assert a.data.statistics().pinned_nbytes == 0
    del y


@spilling()
async def test_executors(c, s, a, b):
    with ThreadPoolExecutor(1) as threads, ProcessPoolExecutor(1) as processes:
        for worker in (a, b):
            worker.executors["threads"] = threads
            worker.executors["processes"] = processes
        x = c.submit(np.ones, 1000)
        await wait(x)
        for executor in ("default", "threads", "processes", "offload"):
            await all_spilled(a, b)
            with dask.annotate(executor=executor):
                assert await c.submit(no_proxy, x, pure=False) == 1000
        with dask.annotate(executor="nonsense"), raises_value_error():
            await c.submit(no_proxy, x, pure=False)


def raises_value_error():
    return pytest.raises(ValueError, match="Invalid executor 'nonsense'")


@spilling(limits=(1,), worker_kwargs={"executor": "offload"})
async def test_default_executor_is_the_shared_one(c, s, a, b):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a, b)
    assert await c.submit(no_proxy, x) == 1000


@spilling()
async def test_actors(c, s, a, b):
    start = c.submit(lambda: 10)
    await wait(start)
    await all_spilled(a, b)
    counter = await c.submit(Counter, start, actor=True)
    assert isinstance(counter, Actor)
    assert await counter.increment(np.int64(5)) == 15
    assert await counter.aincrement() == 16
    # An actor as the input of a task, beside an input that is spilled.
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a, b)

    def use(counter, x):
        return counter.increment(int(x.sum())).result()

    assert await c.submit(use, counter, x) == 1016


@spilling(nthreads=[("127.0.0.1", 2), ("127.0.0.1", 2)], timeout=120)
async def test_worker_client(c, s, a, b):
    def nested(x):
        with worker_client() as client:
            futures = client.map(inc, [int(x.sum()), 1, 2])
            scattered = client.scatter(np.ones(500))
            return sum(client.gather(futures)) + client.submit(np.sum, scattered).result() + scattered.result().sum()

    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a, b)
    assert await c.submit(nested, x) == 1001 + 2 + 3 + 500 + 500


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_worker_client_gathers_what_its_worker_has_spilled(c, s, a):
    def gather(keys):
        client = get_client()
        secede()
        from distributed import Future

        return sum(v.sum() for v in client.gather([Future(key, client) for key in keys]))

    xs = c.map(lambda i: np.full(100, i), range(5))
    await wait(xs)
    await all_spilled(a)
    before = a.data.statistics().restores
    assert await c.submit(gather, [x.key for x in xs]) == 1000
    assert a.data.statistics().restores - before in (5, 6)  # the result may have been spilled, too
    assert a.transfer_outgoing_count_total == 1  # the result; nothing went through a connection to itself


@spilling(loop_io=None)
async def test_get_worker_data_in_a_task(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await all_spilled(a)

    def read(key):
        data = get_worker().data
        assert key in data
        return type(data).__name__, data[key].sum(), sorted(map(str, data)) != []

    assert await c.submit(read, x.key, workers=[a.address]) == ("SpillStore", 1000, True)
    assert a.data.statistics().loop_io == 0


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)], loop_io=1)
async def test_client_run_reads_on_the_loop_and_is_counted(c, s, a):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    result = await c.run(lambda dask_worker, key: dask_worker.data[key].sum(), key=x.key)
    assert result == {a.address: 1000}

    async def read(dask_worker, key):
        return (await dask_worker.data.async_get([key]))[key].sum()

    await all_spilled(a)
    assert await c.run(read, key=x.key) == {a.address: 1000}


@spilling()
async def test_scatter(c, s, a, b):
    value = np.arange(1000)
    x = await c.scatter(value, workers=[a.address])
    y = await c.scatter(value, broadcast=True)
    z = await c.scatter({"z": value}, direct=True)
    await all_spilled(a, b)
    for future in (x, y, z["z"]):
        np.testing.assert_array_equal(await future, value)
    assert await c.submit(no_proxy, x, y, z["z"]) == 3 * value.sum()
    assert set(await c.who_has(y)) == {y.key}


@pytest.mark.parametrize("direct", [False, True])
@spilling()
async def test_gather(c, s, a, b, direct):
    xs = c.map(lambda i: np.full(1000, i), range(8))
    await wait(xs)
    await all_spilled(a, b)
    got = await c.gather(xs, direct=direct)
    assert [int(x[0]) for x in got] == list(range(8))


@spilling()
async def test_publish(c, s, a, b):
    x = c.submit(np.ones, 1000)
    await c.publish_dataset(x=x)
    await all_spilled(a, b)
    again = await c.get_dataset("x")
    assert (await again).sum() == 1000
    await c.unpublish_dataset("x")


@spilling()
async def test_dependencies_from_another_worker(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    y = c.submit(np.ones, 2000, workers=[b.address])
    await wait([x, y])
    await all_spilled(a, b)
    assert await c.submit(no_proxy, x, y, workers=[b.address]) == 3000
    await all_spilled(a, b)
    assert await c.submit(no_proxy, x, y, workers=[a.address], pure=False) == 3000


@spilling()
async def test_replicate_and_rebalance(c, s, a, b):
    xs = c.map(lambda i: np.full(1000, i), range(6), workers=[a.address])
    await wait(xs)
    await all_spilled(a)
    await c.replicate(xs[:2], n=2)
    assert {x.key for x in xs[:2]} <= set(b.data)
    await all_spilled(a, b)
    await c.rebalance()
    assert [int(x[0]) for x in await c.gather(xs)] == list(range(6))


@spilling(amm=True)
async def test_active_memory_manager_retires_a_worker(c, s, a, b):
    xs = c.map(lambda i: np.full(1000, i), range(6), workers=[a.address], allow_other_workers=True)
    await wait(xs)
    await all_spilled(a, b)
    await c.retire_workers([a.address])
    assert {x.key for x in xs} <= set(b.data)
    assert [int(x[0]) for x in await c.gather(xs)] == list(range(6))


@spilling()
async def test_errors_keep_their_traceback(c, s, a, b):
    import traceback

    def fail(x):
        raise ZeroDivisionError(str(x.sum()))

    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a, b)
    y = c.submit(fail, x)
    with pytest.raises(ZeroDivisionError, match="1000"):
        await y
    frames = [frame.filename for frame in traceback.extract_tb(await y.traceback())]
    assert frames
    assert not any("gpuspill/distributed" in name for name in frames)
    z = c.submit(inc, y)
    with pytest.raises(ZeroDivisionError, match="1000"):
        await z


@spilling()
async def test_retries(c, s, a, b):
    class Flaky:
        def __init__(self):
            self.calls = 0

    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a, b)
    failures = Event()

    def fail_once(x, failures):
        if not failures.is_set():
            failures.set()
            raise OSError("once")
        return x.sum()

    assert await c.submit(fail_once, x, failures, retries=2) == 1000


@spilling()
async def test_a_task_that_asks_to_be_rescheduled(c, s, a, b):
    again = Event()

    def reschedule_once(x, again):
        if not again.is_set():
            again.set()
            raise Reschedule
        return x.sum()

    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a, b)
    assert await c.submit(reschedule_once, x, again) == 1000


@spilling(nthreads=[("127.0.0.1", 2)], timeout=120)
async def test_cancel_storm(c, s, a):
    release = Event()

    def block(x, release):
        release.wait()
        return x.sum()

    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    for _ in range(5):
        futures = [c.submit(block, x, release, pure=False) for _ in range(20)]
        await async_poll_for(lambda: a.state.executing_count, timeout=10)
        await c.cancel(futures)
    await release.set()
    await async_poll_for(lambda: not a.state.executing_count, timeout=10)
    assert await c.submit(no_proxy, x) == 1000
    await at_rest(a)


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_an_input_that_is_released_while_the_task_runs(c, s, a):
    running, release = Event(), Event()

    def use(x, running, release):
        running.set()
        release.wait()
        return x.sum()

    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    y = c.submit(use, x, running, release)
    await running.wait()
    await c.cancel([x, y])
    await async_poll_for(lambda: not s.tasks, timeout=10)
    await release.set()
    await async_poll_for(lambda: not a.state.tasks, timeout=10)
    assert len(a.data) == 0


@spilling(nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1)], timeout=120)
async def test_work_stealing(c, s, a, b):
    def slow(x, i):
        import time

        time.sleep(0.01)
        return float(x.sum()) + i

    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await all_spilled(a)
    futures = [c.submit(slow, x, i, workers=[a.address], allow_other_workers=True) for i in range(60)]
    assert await c.gather(futures) == [1000.0 + i for i in range(60)]


@spilling()
async def test_resources(c, s, a, b):
    await a.set_resources(gpu=1)
    xs = [c.submit(np.full, 100, i, resources={"gpu": 1}) for i in range(4)]
    ys = [c.submit(no_proxy, x, resources={"gpu": 1}) for x in xs]
    assert await c.gather(ys) == [0, 100, 200, 300]


@spilling(limits=(1,))
async def test_values_of_all_kinds_survive_being_spilled(c, s, a, b):
    from collections import OrderedDict, namedtuple

    values = [
        None,
        0,
        True,
        "text",
        b"bytes",
        bytearray(b"bytes"),
        (1, (2, [3])),
        {"a": {1: np.ones(3)}},
        OrderedDict(a=1),
        {1, 2},
        frozenset({3}),
        range(5),
        np.float32(1.5),
        np.array(["a", None], dtype=object),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(20)[::3],
        np.ma.masked_array([1, 2], [True, False]),
        np.broadcast_to(np.arange(3), (4, 3)),
        complex(1, 2),
        ValueError("an exception"),
    ]
    futures = [(await c.scatter({f"x-{i}": value}))[f"x-{i}"] for i, value in enumerate(values)]
    await all_spilled(a, b)
    for future, value in zip(futures, values, strict=True):
        got = await future
        assert type(got) is type(value)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(got, value)
            assert got.dtype == value.dtype
        elif isinstance(value, ValueError):
            assert got.args == value.args
        elif isinstance(value, dict) and "a" in value and isinstance(value["a"], dict):
            np.testing.assert_array_equal(got["a"][1], value["a"][1])
        else:
            assert got == value
    assert namedtuple is not None


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not me")


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_a_value_that_cannot_be_serialised_stays_and_stops_nobody(c, s, a):
    x = c.submit(Unpicklable)
    ys = c.map(lambda i: np.full(1000, i), range(4))
    await wait([x, *ys])
    await all_spilled(a)
    statistics = a.data.statistics()
    assert statistics.unspillable == 1
    assert statistics.disk_keys == 4
    assert await c.submit(lambda x: type(x).__name__, x) == "Unpicklable"
    assert await c.submit(no_proxy, ys) == 6000


class Unreadable:
    def __reduce__(self):
        return _fail, ()


def _fail():
    raise RuntimeError("cannot be read")


@pytest.mark.fault("value cannot be rebuilt", on="disk→host", outcome="the task that needs it fails")
@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_a_value_that_cannot_be_deserialised_fails_the_task_that_needs_it(c, s, a):
    x = c.submit(Unreadable)
    await wait(x)
    await all_spilled(a)
    assert a.data.statistics().disk_keys == 1

    async def later(x):
        return x

    with pytest.raises(RuntimeError, match="cannot be read"):
        await c.submit(no_proxy, x)
    with pytest.raises(RuntimeError, match="cannot be read"):
        await c.submit(later, x)
    assert await c.submit(inc, 1) == 2


@spilling(timeout=120)
async def test_many_small_tasks(c, s, a, b):
    futures = c.map(inc, range(300))
    futures = c.map(inc, futures)
    assert await c.submit(sum, futures) == sum(range(2, 302))
