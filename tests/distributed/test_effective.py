"""The settings in force: in the worker's log, for clients and on the command line."""

from __future__ import annotations

import logging
import sys

import dask
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster, Scheduler, SpecCluster, Worker
from distributed.utils_test import captured_logger, gen_cluster

import gpuspill
from gpuspill import simulated
from gpuspill.cli import gpuspill as command
from gpuspill.config.jit_unspill import answer_once
from gpuspill.distributed.attach import attach
from gpuspill.distributed.settings_report import announce_settings

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
    answer_once.cache_clear()
    with captured_logger("gpuspill", logging.WARNING) as log:
        for _ in range(2):
            assert len(await gpuspill.settings(c)) == 0
            assert len(await gpuspill.statistics(c)) == 0
    (line,) = log.getvalue().splitlines()
    assert line.startswith(f"no worker of the cluster at {s.address} has gpuspill attached")
    assert "client.register_plugin(gpuspill.SpillPlugin())" in line
    await c.register_plugin(gpuspill.SpillPlugin(host_limit="1 GB"))
    found = await gpuspill.settings(c)
    assert tuple(found.loc[a.address, "host_limit"]) == (10**9, 10**9, "keyword")


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_nothing_is_said_if_some_worker_has_it_or_there_is_none(c, s, a, b):
    answer_once.cache_clear()
    attach(b)
    with captured_logger("gpuspill", logging.WARNING) as log:
        assert list((await gpuspill.statistics(c)).index) == [b.address]
        await a.close()
        await b.close()
        assert len(await gpuspill.statistics(c)) == 0
    assert log.getvalue() == ""


@gen_cluster(nthreads=[])
async def test_a_worker_is_called_by_its_address_or_its_name(s):
    for name in ("alice", None):
        with captured_logger("distributed.worker", logging.INFO) as log:
            worker = Worker(s.address, name=name)
            attach(worker)
        assert f"gpuspill is attached to {'worker alice' if name else 'this worker'}. Settings" in log.getvalue()
        async with worker:
            with captured_logger("distributed.worker", logging.INFO) as log:
                announce_settings(worker)
            assert f"gpuspill is attached to worker {worker.address}. Settings" in log.getvalue()


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
    for what in ("gds off", "store files", "spill-directory the worker's", "eviction-policy by use"):
        value = what.split(" ", 1)[1]
        assert f"{what} {value} default" in lines
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
        shown = "".join(lines).replace(" ", "")
        assert all(worker.local_directory in shown for worker in cluster.workers.values()), "each has its own"
        path = tmp_path / "scheduler.json"
        client.write_scheduler_file(str(path))
        assert invoke(str(path)).count("prefetch 7 7 keyword") == 1


@pytest.mark.cluster
def test_the_command_line_shows_workers_that_differ_one_after_another():
    options = [{"prefetch": 7}, {"prefetch": 8}, None, {"prefetch": 7}]
    spec = {
        name: {
            "cls": Worker,
            "options": {
                "nthreads": 1,
                "host": "127.0.0.1",
                "data": given and gpuspill.data(host_limit="1 GB", **given),
            },
        }
        for name, given in enumerate(options)
    }
    with SpecCluster(spec, {"cls": Scheduler, "options": {"dashboard_address": ":0", "host": "127.0.0.1"}}) as cluster:
        lines = invoke(cluster.scheduler_address)
        addresses = [cluster.workers[name].address for name in range(4)]
    headings = [line for line in lines if "tcp://" in line]
    assert len(headings) == 3
    assert sorted(("prefetch 7 7 keyword", "prefetch 8 8 keyword")) == sorted(
        x for x in lines if x.startswith("prefet")
    )
    for heading in headings:
        named = {address for address in addresses if address in heading}
        assert named in ({addresses[0], addresses[3]}, {addresses[1]}, {addresses[2]})
        assert ("without gpuspill" in heading) is (named == {addresses[2]})
        if named != {addresses[2]}:
            prefetch = next(x for x in lines[lines.index(heading) :] if x.startswith("prefetch"))
            assert ("7 7" in prefetch) is (addresses[0] in named)


@pytest.mark.parametrize("content", [None, "no json", "[]", "{}"])
def test_what_is_no_scheduler_file_is_one_line(tmp_path, content):
    path = tmp_path / "nosuchfile.json"
    if content is not None:
        path.write_text(content)
    found = CliRunner().invoke(command, ["config", str(path)])
    assert found.exit_code == 2
    (line,) = found.output.splitlines()
    assert line.startswith(
        f"gpuspill: {path}: no such file, " if content is None else f"gpuspill: {path}: no scheduler"
    )


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ("nosuchfile.json", "no such file, and no address such as tcp://host:8786"),
        ("tcq://127.0.0.1:1", "cannot connect to a scheduler there: unknown address scheme"),
        ("127.0.0.1:1", "cannot connect to a scheduler there: "),
    ],
)
@pytest.mark.leaking("descriptors", reason="a Client that finds no scheduler leaves its event loop to the collector")
def test_no_scheduler_is_one_line(scheduler, message):
    with dask.config.set({"distributed.comm.timeouts.connect": "100 ms"}):
        found = CliRunner().invoke(command, ["config", scheduler])
    assert found.exit_code == 2
    (line,) = found.output.splitlines()
    assert line.startswith(f"gpuspill: {scheduler}: {message}")


@pytest.mark.parametrize("ask", [gpuspill.statistics, gpuspill.settings])
def test_without_pandas_it_says_so_before_it_asks(monkeypatch, ask):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=rf"gpuspill.{ask.__name__} returns a pandas.DataFrame.*pip install pandas"):
        ask(None)
