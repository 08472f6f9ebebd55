"""Run before each arm: every kind of worker has the store that the arm names, and it spills.

Without this, an arm in which gpuspill was not active would pass for one without differences.
"""

from __future__ import annotations

import asyncio
import os
import sys

from distributed import Client, LocalCluster, Nanny
from distributed.utils_test import gen_cluster, popen

ARM = os.environ["SUITE_ARM"]


def store(dask_worker=None):
    return type(dask_worker.data).__module__.partition(".")[0]


EXPECTED = "distributed" if ARM == "stock" else "gpuspill"


@gen_cluster(client=True)
async def test_workers_in_this_process(c, s, a, b):
    assert set((await c.run(store)).values()) == {EXPECTED}


@gen_cluster(client=True, Worker=Nanny, nthreads=[("", 1)])
async def test_workers_of_nannies(c, s, a):
    assert set((await c.run(store)).values()) == {EXPECTED}


def test_workers_of_a_local_cluster(loop):
    with (
        LocalCluster(n_workers=1, processes=True, dashboard_address=":0", loop=loop) as cluster,
        Client(cluster) as client,
    ):
        assert set(client.run(store).values()) == {EXPECTED}


@gen_cluster(client=True, nthreads=[])
async def test_workers_of_the_command_line(c, s):
    command = [sys.executable, "-m", "dask", "worker", s.address, "--no-dashboard"]
    with popen(command):
        await c.wait_for_workers(1)
        assert set((await c.run(store)).values()) == {EXPECTED}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_everything_spills_in_the_arm_of_that_name_and_nothing_in_the_others(c, s, a):
    future = await c.scatter(b"x" * 100_000)
    state = s.workers[a.address]
    if ARM.endswith("1-byte"):
        while state.memory.spilled < 100_000:
            await a.heartbeat()
            await asyncio.sleep(0.01)
    else:
        await a.heartbeat()
        assert state.memory.spilled == 0
    assert await future == b"x" * 100_000
