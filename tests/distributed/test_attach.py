"""All ways of switching gpuspill on, and taking over what a running worker has."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections import UserDict

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, Worker, wait
from distributed.spill import SpillBuffer
from distributed.utils_test import async_poll_for, gen_cluster, gen_test, inc

import gpuspill
from gpuspill.distributed.attach import attach, attach_owner
from gpuspill.distributed.mapping import SpillStore
from gpuspill.errors import ConfigError
from tests.distributed.clusters import all_spilled, at_rest, attached

pytestmark = pytest.mark.cluster


async def works(c, worker_data=None):
    """Whether a cluster computes and spills."""
    x = c.submit(np.ones, 1000)
    y = c.submit(np.ones, 2000)
    assert await c.submit(lambda x, y: x.sum() + y.sum(), x, y) == 3000

    async def spill(dask_worker):
        import asyncio

        data = dask_worker.data
        for _ in range(1000):
            await asyncio.to_thread(data.manager.limits.evict_all)
            if data.statistics().spills or not data:
                break
            await asyncio.sleep(0.01)  # for a moment, a thread that has run a task still holds the result
        statistics = data.statistics()
        return type(data).__name__, statistics.spills > 0, statistics.loop_io, statistics.limit

    answers = list((await c.run(spill)).values())
    assert {answer[0] for answer in answers} == {"SpillStore"}
    assert any(answer[1] for answer in answers)
    assert await c.submit(lambda x, y: x.sum() + y.sum(), x, y, pure=False) == 3000
    return answers


# -- before the worker has data ------------------------------------------------------------------


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"data": gpuspill.data(host_limit=12345)})
async def test_data(c, s, a):
    assert type(a).__name__ == "Worker"
    assert isinstance(a, Worker)
    assert attached(a).store is a.data is a.state.data is a.memory_manager.data
    assert (await works(c))[0][3] == 12345


def test_data_can_be_pickled():
    create, kwargs = pickle.loads(pickle.dumps(gpuspill.data(host_limit="1 MiB")))
    assert callable(create)
    assert kwargs == {"options": {"host_limit": "1 MiB"}}


def test_data_checks_its_options():
    with pytest.raises(gpuspill.ConfigError, match="host-limit"):
        gpuspill.data(host_limit="lots")
    with pytest.raises(gpuspill.ConfigError, match="hots"):
        gpuspill.data(hots=1)


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"data": gpuspill.data(), "memory_limit": 10**9},
    config={"gpuspill.prefetch": 3, "distributed.worker.memory.target": 0.5},
)
async def test_limits_are_known_before_the_first_value(c, s, a):
    statistics = a.data.statistics()
    assert statistics.limit == 5 * 10**8
    assert attached(a).settings.prefetch == 3
    assert a.data.manager.loop_thread is not None


@gen_test()
async def test_local_cluster_in_one_process():
    async with (
        LocalCluster(
            n_workers=2, processes=False, asynchronous=True, dashboard_address=":0", data=gpuspill.data()
        ) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        await works(c)
        first, second = cluster.workers.values()
        assert first.data is not second.data
        assert first.data.records.store.path != second.data.records.store.path


@gen_test(timeout=60)
async def test_nanny():
    async with (
        Scheduler(dashboard_address=":0") as s,
        Nanny(s.address, nthreads=1, data=gpuspill.data(host_limit=54321)),
        Client(s.address, asynchronous=True) as c,
    ):
        assert (await works(c))[0][3] == 54321


@gen_test(timeout=60)
async def test_gpuspill_nanny_restarts_with_gpuspill():
    async with (
        Scheduler(dashboard_address=":0") as s,
        gpuspill.Nanny(s.address, nthreads=1),
        Client(s.address, asynchronous=True) as c,
    ):
        await works(c)
        await c.restart()
        await works(c)


@gen_cluster(client=True, nthreads=[("", 1)], Worker=gpuspill.Worker)
async def test_worker_class(c, s, a):
    assert isinstance(a, gpuspill.Worker)
    await works(c)


def test_worker_class_in_a_cluster_of_processes_is_a_nanny():
    assert issubclass(gpuspill.Nanny, Nanny)
    assert issubclass(gpuspill.Worker, Worker)


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"preload": ["gpuspill"]})
async def test_preload(c, s, a):
    await works(c)


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"preload": ["gpuspill"], "preload_argv": ["--create-cuda-context"]},
)
async def test_preload_beside_another_that_takes_arguments(c, s, a):
    """All preloads are given the same arguments, those of dask-cuda's among them."""
    await works(c)


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"preload": ["gpuspill"], "data": gpuspill.data(host_limit=77)},
    Worker=Worker,
)
async def test_two_ways_at_once(c, s, a):
    assert (await works(c))[0][3] == 77
    store = a.data
    assert attach(a) is store


class Special(Worker):
    """Somebody's own worker class."""

    async def execute(self, key, *, stimulus_id):
        self.executed = getattr(self, "executed", 0) + 1
        return await super().execute(key, stimulus_id=stimulus_id)


@gen_cluster(client=True, nthreads=[("", 1)], Worker=Special, worker_kwargs={"data": gpuspill.data(host_limit=1)})
async def test_a_subclass_keeps_its_own_overrides(c, s, a):
    await works(c)
    assert a.executed == 4
    assert isinstance(a, Special)


@pytest.mark.leaking("processes", reason="multiprocessing's helpers of the commands' children")
@gen_test(timeout=90)
async def test_command_line(tmp_path):
    env = dict(os.environ, DASK_GPUSPILL__HOST_LIMIT="4321")
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-dashboard", "--nthreads=1"]
    async with Scheduler(dashboard_address=":0") as s, Client(s.address, asynchronous=True) as c:
        for option in (["--preload", "gpuspill"], ["--worker-class", "gpuspill.Worker"]):
            process = await asyncio.create_subprocess_exec(
                *worker, *option, "--local-directory", str(tmp_path), s.address, env=env
            )
            try:
                await c.wait_for_workers(1)
                assert (await works(c))[0][3] == 4321
            finally:
                process.terminate()
                await process.wait()
            await async_poll_for(lambda: not s.workers, timeout=10)


def what_plugins_have(worker):
    """Ask as dask-cuda does for its summary of a cluster, which expects a TypeError of what cannot be pickled."""
    unknown = set()
    for name, plugin in worker.plugins.items():
        found = {part: getattr(plugin, part) for part in dir(plugin) if not part.startswith("_") and part != "setup"}
        try:
            pickle.dumps(found)
        except TypeError:
            unknown.add(name)
    return unknown


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_what_plugins_have_can_be_asked_for(c, s, a):
    before = what_plugins_have(a)
    attach(a)
    assert what_plugins_have(a) == {*before, "gpuspill-hints"}


@gen_cluster(nthreads=[])
async def test_a_store_without_worker_is_reported(s, caplog):
    create, kwargs = gpuspill.data()
    store = create(worker_local_directory=dask.config.get("temporary-directory") or "/tmp", **kwargs)
    try:
        attach_owner(store)
        assert "no worker uses the store" in caplog.text
    finally:
        store.close()


# -- a worker that has data ----------------------------------------------------------------------


class CloudOnly:
    """Values that notice whether they are unpickled on the event loop's thread."""

    def __init__(self, payload):
        self.payload = payload

    def __sizeof__(self):
        return 10_000

    def __reduce__(self):
        return _restore, (self.payload,)


def _restore(payload):
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return CloudOnly(payload)
    raise AssertionError("unpickled on the event loop")


@gen_cluster(client=True, nthreads=[("", 1)] * 2, worker_kwargs={"memory_limit": 0})
async def test_plugin_takes_over_a_dict(c, s, a, b):
    assert type(a.data) is dict
    xs = c.map(lambda i: np.full(100, i), range(20))
    await wait(xs)
    old = a.data
    n = len(old)
    before = {key: old[key] for key in old}
    await c.register_plugin(gpuspill.SpillPlugin(host_limit="1 GiB"))
    assert isinstance(a.data, SpillStore)
    assert len(a.data) == n
    assert not old
    assert all(a.data[key] is value for key, value in before.items())
    before.clear()
    await all_spilled(a, b)
    assert sum(int(x[0]) for x in await c.gather(xs)) == sum(range(20))
    assert a.data.statistics().loop_io == 0
    assert a.data.statistics().limit == 2**30
    for worker in (a, b):
        await at_rest(worker)


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"memory_limit": 10**10},
    config={
        "distributed.worker.memory.target": 50_000 / 10**10,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
    },
)
async def test_plugin_takes_over_a_spill_buffer_without_reading_it(c, s, a):
    assert isinstance(a.data, SpillBuffer)
    xs = c.map(CloudOnly, range(20))
    await wait(xs)
    old = a.data
    n_memory, n_disk = len(old.memory), len(old.disk)
    assert n_memory + n_disk == 20
    assert n_disk >= 10
    written = old.cumulative_metrics["disk-write", "count"]
    await c.register_plugin(gpuspill.SpillPlugin())
    store = a.data
    assert isinstance(store, SpillStore)
    assert set(store) == {x.key for x in xs}
    assert len(store.disk) >= n_disk
    assert store.statistics().restores == 0
    assert store.spilled_total.memory >= n_disk * 10_000
    assert store.cumulative_metrics["disk-write", "count"] >= written
    assert store.statistics().limit == 50_000
    got = await c.submit(lambda xs: [x.payload for x in xs], xs)
    assert got == list(range(20))
    assert store.statistics().loop_io == 0
    await at_rest(a)
    # Spilling one of them again is no write, and releasing them deletes the old files.
    directory = os.path.join(a.local_directory, "storage")
    assert len(os.listdir(directory)) == n_disk
    writes = store.statistics().spills
    await all_spilled(a)
    assert store.statistics().spills - writes <= n_memory + 1
    del xs
    await async_poll_for(lambda: not os.listdir(directory), timeout=10)
    a.validate_state()


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"memory_limit": 10**10},
    config={
        "distributed.worker.memory.target": 20_000 / 10**10,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
    },
)
async def test_an_adopted_file_that_is_gone_is_computed_anew(c, s, a):
    xs = c.map(CloudOnly, range(6))
    await wait(xs)
    await c.register_plugin(gpuspill.SpillPlugin())
    directory = os.path.join(a.local_directory, "storage")
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    assert await c.submit(lambda xs: [x.payload for x in xs], xs) == list(range(6))


def work(x, y):
    return x + y


@gen_cluster(
    client=True,
    nthreads=[("", 2)] * 2,
    timeout=60,
    worker_kwargs={"memory_limit": 10**10},
    config={
        "distributed.worker.memory.target": 200_000 / 10**10,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.scheduler.worker-saturation": float("inf"),
    },
)
async def test_plugin_under_load(c, s, a, b):
    xs = c.map(lambda i: np.full(1000, i), range(60))
    await wait(xs)
    ys = [c.submit(work, xs[i % 60], xs[(i * 7) % 60]) for i in range(300)]
    zs = [c.submit(work, ys[i], ys[-i]) for i in range(200)]
    await async_poll_for(lambda: sum(y.status == "finished" for y in ys) > 20, timeout=20)
    assert any(len(w.data.disk) for w in (a, b))
    assert any(y.status != "finished" for y in ys)
    await c.register_plugin(gpuspill.SpillPlugin(host_limit=100_000))
    assert isinstance(a.data, SpillStore)
    assert isinstance(b.data, SpillStore)
    got = await c.gather(zs)
    expect = [i % 60 + (i * 7) % 60 for i in range(300)]
    assert [int(z[0]) for z in got] == [expect[i] + expect[-i] for i in range(200)]
    for worker in (a, b):
        await at_rest(worker)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_registering_again_changes_the_options(c, s, a):
    await c.register_plugin(gpuspill.SpillPlugin(host_limit=1000))
    store = a.data
    await c.register_plugin(gpuspill.SpillPlugin(host_limit=2000, prefetch=0, max_spill="1 MB"))
    assert a.data is store
    assert store.statistics().limit == 2000
    assert store.statistics().disk_limit == 10**6
    assert attached(a).hints.depth == 0


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_what_cannot_be_changed_is_named(c, s, a, caplog):
    attach(a)
    attach(a, compression="zlib", host_limit=99)
    assert "cannot change compression" in caplog.text
    assert a.data.statistics().limit == 99


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_new_workers_get_the_plugin(c, s, a):
    await c.register_plugin(gpuspill.SpillPlugin(host_limit=1000))
    async with Worker(s.address, nthreads=1) as b:
        assert isinstance(b.data, SpillStore)
        assert b.data.statistics().limit == 1000
        await works(c)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_unregistering_changes_nothing(c, s, a):
    await c.register_plugin(gpuspill.SpillPlugin(host_limit=1))
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    await c.unregister_worker_plugin("gpuspill")
    assert await c.submit(np.sum, x) == 1000
    await works(c)


def test_plugin_can_be_pickled_and_checks_its_options():
    plugin = pickle.loads(pickle.dumps(gpuspill.SpillPlugin(host_limit="1 MiB")))
    assert plugin.options == {"host_limit": "1 MiB"}
    with pytest.raises(gpuspill.ConfigError, match="prefetch"):
        gpuspill.SpillPlugin(prefetch=-1)


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"data": UserDict()})
async def test_data_that_cannot_be_taken_over(c, s, a):
    x = c.submit(inc, 1)
    await wait(x)
    with pytest.raises(gpuspill.ConfigError, match="UserDict"):
        attach(a)
    assert isinstance(a.data, UserDict)
    assert type(a) is Worker
    assert await c.submit(inc, x) == 3


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"data": UserDict()})
async def test_any_mapping_without_data_can_be_replaced(c, s, a):
    attach(a)
    await works(c)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_bad_option_changes_nothing(c, s, a):
    old = a.data
    with pytest.raises(gpuspill.ConfigError):
        attach(a, nonsense=1)
    with pytest.raises(gpuspill.ConfigError, match="compression"):
        attach(a, compression="nonsense")
    assert a.data is old
    assert type(a) is Worker


@gen_cluster(client=True, nthreads=[("", 1), ("", 1)], worker_kwargs={"memory_limit": 10**10})
async def test_mixed_cluster(c, s, a, b):
    """One worker with gpuspill and one without."""
    attach(a, host_limit=1)
    x = c.submit(np.ones, 1000, workers=[a.address])
    y = c.submit(np.ones, 2000, workers=[b.address])
    await wait([x, y])
    await all_spilled(a)
    for worker in (a, b):
        assert await c.submit(lambda x, y: x.sum() + y.sum(), x, y, workers=[worker.address], pure=False) == 3000
    assert await c.gather([x, y], direct=True)


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"data": gpuspill.data(host_limit=1)})
async def test_spill_directory(c, s, a):
    path = a.data.records.store.path
    assert os.path.dirname(path) == a.local_directory
    assert oct(os.stat(path).st_mode & 0o777) == "0o700"


@pytest.mark.fault("worker stopped, restarted, retired", on="close", outcome="nothing left")
@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"data": gpuspill.data(host_limit=1)})
async def test_closing_while_everything_is_busy(c, s, a):
    xs = c.map(lambda i: np.full(1000, i), range(10))
    await wait(xs)
    await all_spilled(a)
    ys = [c.submit(lambda x: x.sum(), x) for x in xs]
    path = a.data.records.store.path
    await a.close()
    await a.close()
    assert not os.path.exists(path)
    del ys


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_python_without_a_global_lock_is_refused(c, s, a):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        with pytest.raises(ConfigError, match=r"free-threaded.*PYTHON_GIL=1"):
            gpuspill.data()
        with pytest.raises(ConfigError, match=r"free-threaded.*PYTHON_GIL=1"):
            attach(a)
    assert not hasattr(a, "_gpuspill")
