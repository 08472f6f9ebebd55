"""The settings in force: in the worker's log, for clients and on the command line."""

from __future__ import annotations

import logging

import dask
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster
from distributed.utils_test import gen_cluster

import gpuspill
from gpuspill import simulated
from gpuspill.cli import gpuspill as command
from gpuspill.legacy import answer_once

CONFIG = {
    "gpuspill": {
        "device": "simulated",
        "simulated": {"memory": "10 MB"},
        "device-memory-limit": 0.5,
        "spill-threads": 3,
    }
}


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1)],
    worker_kwargs={"data": gpuspill.data(prefetch=7), "memory_limit": "1 GB"},
    config={**CONFIG, "distributed.worker.memory.target": 0.5, "distributed.worker.memory.max-spill": "4 GB"},
)
async def test_a_client_reads_them(c, s, a, b):
    found = await gpuspill.settings(c)
    assert set(found.index.get_level_values("worker")) == {a.address, b.address}
    rows = found.loc[a.address]
    assert tuple(rows.loc["host_limit"]) == ("auto", 500_000_000, "default")
    assert tuple(rows.loc["max_spill"]) == ("auto", 4 * 10**9, "default")
    assert tuple(rows.loc["device"]) == ("simulated", "SimulatedDevice", "configuration")
    total = simulated.device().memory_info().total  # the process has one, maybe since before this test
    assert tuple(rows.loc["device_memory_limit"]) == (0.5, total // 2, "configuration")
    assert tuple(rows.loc["spill_threads"]) == (3, 3, "configuration")
    assert tuple(rows.loc["prefetch"]) == (7, 7, "keyword")
    assert tuple(rows.loc["spill_directory"]) == (None, a.local_directory, "default")
    assert list(found.columns) == ["value", "in_force", "origin"]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_workers_without_gpuspill_have_none(c, s, a):
    assert len(await gpuspill.settings(c)) == 0
    await c.register_plugin(gpuspill.SpillPlugin(host_limit="1 GB"))
    found = await gpuspill.settings(c)
    assert tuple(found.loc[a.address, "host_limit"]) == (10**9, 10**9, "keyword")


def test_each_worker_logs_them_once_and_answers_old_settings(caplog):
    answer_once.cache_clear()
    caplog.set_level(logging.INFO, logger="distributed.worker")

    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1)],
        worker_kwargs={"data": gpuspill.data(host_limit="1 GiB")},
        config={"gds-spilling": True},
    )
    async def body(c, s, a, b):
        await c.register_plugin(gpuspill.SpillPlugin())  # attached already
        logs = await c.get_worker_logs()
        assert all(any("Settings in force" in text for _, text in lines) for lines in logs.values())

    body()
    reports = [r.getMessage() for r in caplog.records if "gpuspill is attached to worker" in r.getMessage()]
    assert len(reports) == 2
    assert all("host-limit             1.00 GiB                 keyword" in report for report in reports)
    answers = [r for r in caplog.records if "gds-spilling" in r.getMessage()]
    assert [(r.name, r.levelno) for r in answers] == [("gpuspill", logging.WARNING)]


def invoke(*words):
    found = CliRunner().invoke(command, ["config", *words])
    assert found.exit_code == 0, found.output
    return [" ".join(line.split()) for line in found.output.replace("│", " ").splitlines()]


def test_the_command_line_shows_those_of_this_machine(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("gpuspill: {spill-threads: 3}\n")
    monkeypatch.setattr("dask.config.paths", [str(tmp_path)])
    monkeypatch.setenv("DASK_GPUSPILL__HOST_LIMIT", "1 GiB")
    with dask.config.set(gpuspill={"spill-threads": 3, "host-limit": "1 GiB"}):
        lines = invoke()
    assert "host-limit 1.00 GiB 1.00 GiB DASK_GPUSPILL__HOST_LIMIT" in lines
    assert "prefetch 4 4 default" in lines
    # A long path takes several lines.
    start = next(i for i, line in enumerate(lines) if line.startswith("spill-threads 3 3"))
    assert str(path).startswith(lines[start].split()[-1])


@pytest.mark.cluster
def test_the_command_line_shows_those_of_a_cluster_alike_workers_together(tmp_path):
    with (
        LocalCluster(
            n_workers=2, processes=False, protocol="tcp", data=gpuspill.data(prefetch=7), dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        lines = invoke(cluster.scheduler_address)
        assert lines.count("prefetch 7 7 keyword") == 1
        assert all(any(worker.address in line for line in lines) for worker in cluster.workers.values())
        path = tmp_path / "scheduler.json"
        client.write_scheduler_file(str(path))
        assert invoke(str(path)).count("prefetch 7 7 keyword") == 1
