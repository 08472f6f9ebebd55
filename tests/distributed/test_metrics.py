"""Everything that reads distributed's SpillBuffer today reads the same numbers of a SpillStore."""

from __future__ import annotations

import asyncio

import msgpack
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, wait
from distributed.utils_test import gen_cluster, gen_test, inc
from tornado.httpclient import AsyncHTTPClient

import gpuspill
from gpuspill.distributed.metrics import LABELS, WAIT, Metrics
from gpuspill.distributed.reporting import heartbeat
from gpuspill.manager.statistics import Statistics
from tests.distributed.clusters import all_spilled, spilling

pytestmark = pytest.mark.cluster


def test_metrics_add_up_and_reach_the_context():
    from distributed.metrics import context_meter

    metrics = Metrics()
    seen = []
    with context_meter.add_callback(lambda *event: seen.append(event)):
        metrics("disk-read", 2, "count")
        metrics("disk-read", 3, "count")
        metrics("checksum", 1.0, "seconds")
    assert metrics.totals() == {("disk-read", "count"): 5}
    assert seen == [("disk-read", 2, "count"), ("disk-read", 3, "count")]
    metrics.add({("disk-read", "count"): 10, ("compress", "seconds"): 0.5})
    assert metrics.totals() == {("disk-read", "count"): 15, ("compress", "seconds"): 0.5}


def test_a_finaliser_may_report_in_the_middle_of_a_report():
    metrics = Metrics()

    class Number(int):
        """What is added has a finaliser run."""

        def __radd__(self, other: int) -> int:
            metrics("disk-read", 10, "count")
            assert metrics.totals() == {("disk-read", "count"): other}
            return other + int(self)

    metrics("disk-read", 1, "count")
    metrics("disk-read", Number(5), "count")
    assert metrics.totals() == {("disk-read", "count"): 16}


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_heartbeat(c, s, a):
    xs = c.map(lambda i: np.full(1000, i), range(5))
    await wait(xs)
    await all_spilled(a)
    await a.heartbeat()
    (ws,) = s.workers.values()
    memory, disk = a.data.spilled_total
    assert memory >= 40_000
    assert disk >= 40_000
    assert ws.memory.spilled == disk
    metrics = ws.metrics
    assert metrics["spilled_bytes"] == {"memory": memory, "disk": disk}
    assert metrics["gpuspill"]["disk_keys"] == 5
    assert set(metrics["gpuspill"]) == set(Statistics.__slots__)
    assert ws.memory.managed <= a.data.memory_total()


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_heartbeat_can_travel(c, s, a):
    numbers = heartbeat(a.data)
    assert msgpack.unpackb(msgpack.packb(numbers)) == numbers


async def scrape(worker):
    response = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{worker.http_server.port}/metrics")
    families = {}
    for line in response.body.decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            families[name] = float(value)
    return families


@pytest.mark.leaking("descriptors", reason="the HTTP client's idle connection")
@spilling(limits=(1,), nthreads=[("", 1)])
async def test_prometheus(c, s, a):
    pytest.importorskip("prometheus_client")
    xs = c.map(lambda i: np.full(1000, i), range(5))
    y = c.submit(np.sum, xs[0])
    await wait([*xs, y])
    await all_spilled(a)
    n_disk = len(a.data.disk)
    families = await scrape(a)
    assert families['dask_worker_tasks{state="disk"}'] == n_disk
    assert families.get('dask_worker_tasks{state="memory"}', 0) == 6 - n_disk
    assert families['dask_worker_memory_bytes{type="spilled"}'] == a.data.spilled_total.disk
    assert families['dask_worker_spill_count_total{activity="disk-write"}'] >= n_disk
    assert families['dask_worker_spill_bytes_total{activity="disk-write"}'] >= 40_000
    assert families['dask_worker_spill_time_seconds_total{activity="serialize"}'] > 0
    activities = {name for name in families if name.startswith("dask_worker_spill_")}
    assert not any("checksum" in name for name in activities)


def booked(worker, prefix):
    """Fine performance metrics of the tasks of a kind: {(label, unit): value}."""
    totals = {}
    for name, value in worker.digests_total.items():
        if name[0] == "execute" and name[2] == prefix:
            totals[name[3:]] = totals.get(name[3:], 0) + value
    return totals


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_reading_is_booked_on_the_task(c, s, a):
    x = c.submit(np.ones, 1000, key="x-1")
    await wait(x)
    await all_spilled(a)
    await wait(c.submit(np.sum, x, key="total-1"))
    got = booked(a, "total")
    assert got["disk-read", "count"] == 1
    assert got["disk-read", "bytes"] >= 8000
    assert got["disk-read", "seconds"] > 0
    assert got["deserialize", "seconds"] > 0
    assert ("memory-read", "count") not in got
    assert ("disk-read", "count") not in booked(a, "x")


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_reading_is_booked_on_a_coroutine_task(c, s, a):
    async def total(x):
        return x.sum()

    x = c.submit(np.ones, 1000, key="x-1")
    await wait(x)
    await all_spilled(a)
    await wait(c.submit(total, x, key="total-1"))
    assert booked(a, "total")["disk-read", "count"] == 1


@spilling(limits=("1 GiB",), nthreads=[("", 1)])
async def test_hits_are_booked_on_the_task(c, s, a):
    x = c.submit(np.ones, 1000, key="x-1")
    await wait(c.submit(np.sum, x, key="total-1"))
    assert booked(a, "total")["memory-read", "count"] == 1
    assert booked(a, "total")["memory-read", "bytes"] >= 8000
    assert a.data.cumulative_metrics["memory-read", "count"] >= 1


@spilling(limits=(1,), nthreads=[("", 1)] * 2)
async def test_reading_for_another_worker_is_booked_on_the_transfer(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await all_spilled(a)
    await wait(c.submit(np.sum, x, workers=[b.address]))
    assert a.digests_total["get-data", "disk-read", "count"] == 1


@spilling(limits=(1,), nthreads=[("", 1)], config={"gpuspill.storage-delay": "50ms"})
async def test_slow_reads_show_in_the_task_stream_and_not_in_the_compute_time(c, s, a):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    y = c.submit(np.sum, x)
    await wait(y)
    actions = s.tasks[y.key].group.all_durations
    assert actions["disk-read"] >= 0.05
    assert actions["compute"] < 0.05


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_all_labels_are_known_to_distributed(c, s, a):
    xs = c.map(lambda i: np.full(1000, i), range(5))
    await wait(xs)
    await c.submit(sum, xs)
    assert {label for label, _ in a.data.cumulative_metrics} <= LABELS
    assert WAIT not in LABELS


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_statistics_of_workers_without_gpuspill(c, s, a, b):
    from gpuspill.distributed.attach import attach

    attach(a)
    frame = await gpuspill.statistics(c)
    assert list(frame.index) == [a.address]
    assert list(frame.columns) == list(Statistics.__slots__)


@gen_test()
async def test_statistics_from_a_client_that_is_not_asynchronous():
    async with LocalCluster(
        n_workers=2, processes=False, asynchronous=True, dashboard_address=":0", data=gpuspill.data(host_limit=1)
    ) as cluster:

        def ask():
            with Client(cluster.scheduler_address) as c:
                c.submit(inc, 1).result()
                return gpuspill.statistics(c)

        frame = await asyncio.to_thread(ask)
        assert isinstance(frame, pd.DataFrame)
        assert len(frame) == 2
        assert (frame["limit"] == 1).all()


@gen_cluster(client=True, nthreads=[])
async def test_statistics_without_workers(c, s):
    frame = await gpuspill.statistics(c)
    assert len(frame) == 0
    assert "spills" in frame.columns
