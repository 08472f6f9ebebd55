"""What a client sees of the workers' stores: live, recorded, and in a report."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster, wait
from distributed.utils_test import async_poll_for, gen_cluster

import gpuspill
from gpuspill.cli import gpuspill as command
from gpuspill.distributed.observing import Recorder, take_sample
from gpuspill.monitoring.advice import Run, advise
from tests.distributed.clusters import all_spilled, spilling

pytestmark = pytest.mark.cluster

ARRAY = 80_000
"""Bytes."""


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_sample_has_what_the_last_heartbeats_said(c, s, a):
    xs = c.map(lambda i: np.full(ARRAY // 8, i), range(5))
    await wait(xs)
    await all_spilled(a)
    await a.heartbeat()
    sample = await take_sample(c)
    assert list(sample.workers) == [a.address]
    assert sample.workers[a.address]["disk_keys"] == 5
    assert sample.tasks == 0


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_workers_without_gpuspill_are_no_part_of_a_sample(c, s, a):
    assert (await take_sample(c)).workers == {}


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_report(c, s, a, tmp_path):
    path = tmp_path / "run.html"
    async with gpuspill.report(path, c, interval=0.05, title="A test"):
        xs = c.map(lambda i: np.full(ARRAY // 8, i), range(5))
        await wait(xs)
        await all_spilled(a)
        logging.getLogger("gpuspill").warning("the disk %s", "is full")
        await async_poll_for(lambda: s.get_events("gpuspill"), 10)
        await a.heartbeat()
    page = path.read_text()
    assert "<title>A test</title>" in page
    assert "the disk is full" in page
    assert a.address in page
    assert "391 KiB" in page  # written


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_block_that_raises_has_its_report(c, s, a, tmp_path):
    with pytest.raises(ZeroDivisionError):
        async with gpuspill.report(tmp_path / "run.html", c):
            1 / 0  # noqa: B018
    assert (tmp_path / "run.html").exists()


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_page_that_cannot_be_written_is_found_out_before_the_job(c, s, a, tmp_path):
    ran = False
    with pytest.raises(FileNotFoundError, match="nowhere"):
        async with gpuspill.report(tmp_path / "nowhere" / "run.html", c):
            ran = True
    assert not ran


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_report_has_what_no_heartbeat_has_told_yet(c, s, a):
    a.periodic_callbacks["heartbeat"].stop()
    x = c.submit(np.ones, ARRAY // 8, key="x")  # before the run: no part of it
    await wait(x)
    await all_spilled(a)
    recorder = Recorder(c, 60)
    await recorder.start()
    y = c.submit(np.ones, ARRAY // 8, key="y")
    await wait(y)
    await all_spilled(a)
    await recorder.stop()
    assert Run(recorder.samples).grew("spills") == 1


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_worker_that_does_not_answer_holds_up_no_report(c, s, a, monkeypatch):
    monkeypatch.setattr("gpuspill.distributed.observing._PATIENCE", 0.01)
    asked = asyncio.Event()

    async def never(*args, **kwargs):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(c, "run", never)
    recorder = Recorder(c, 60)
    await recorder.start()
    await recorder.stop()
    assert asked.is_set()
    assert [list(sample.workers) for sample in recorder.samples] == [[a.address]] * 2


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_recording_of_many_workers_is_thinned_out_sooner(c, s, a, monkeypatch):
    monkeypatch.setattr("gpuspill.distributed.observing._MOST_NUMBERS", 6)  # of one worker: as if it were hundreds
    recorder = Recorder(c, 0.001)
    await recorder.start()
    await async_poll_for(lambda: recorder._interval >= 0.004, 10)
    await recorder.stop()
    assert len(recorder.samples) <= 7


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_a_long_recording_is_thinned_out(c, s, a, monkeypatch):
    monkeypatch.setattr("gpuspill.distributed.observing._MOST_SAMPLES", 6)
    recorder = Recorder(c, 0.001)
    await recorder.start()
    await async_poll_for(lambda: recorder._interval >= 0.004, 10)
    await recorder.stop()
    await recorder.stop()
    assert len(recorder.samples) <= 7
    times = [sample.time for sample in recorder.samples]
    assert times == sorted(times)


@spilling(limits=(1,), nthreads=[("", 1)], loop_io=None)
async def test_advice_about_reads_on_the_loop(c, s, a):
    """A job that has the fault: a function on the event loop reads what is on disk."""
    recorder = Recorder(c, 60)
    await recorder.start()
    x = c.submit(np.ones, ARRAY // 8, key="x")
    await wait(x)
    await all_spilled(a)
    await c.run(lambda dask_worker: float(dask_worker.data["x"].sum()))
    await a.heartbeat()
    await recorder.stop()
    assert [one.rule for one in advise(Run(recorder.samples))] == ["reads-on-the-loop"]


@spilling(limits=(1,), nthreads=[("", 1)], config={"distributed.worker.memory.max-spill": ARRAY + 10_000})
async def test_advice_about_the_disk_limit(c, s, a):
    recorder = Recorder(c, 60)
    await recorder.start()
    xs = c.map(lambda i: np.random.default_rng(i).random(ARRAY // 8), range(3))
    await wait(xs)
    await async_poll_for(lambda: a.data.statistics().spill_failures, 10)
    await async_poll_for(lambda: a.data.statistics().disk_keys == 1, 10)
    await a.heartbeat()
    await recorder.stop()
    assert "disk-limit" in [one.rule for one in advise(Run(recorder.samples))]


class Unpicklable:
    def __sizeof__(self) -> int:
        return ARRAY

    def __reduce_ex__(self, protocol):
        raise TypeError("not me")


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_advice_about_values_that_cannot_leave(c, s, a):
    recorder = Recorder(c, 60)
    await recorder.start()
    x = c.submit(Unpicklable)
    await wait(x)
    await async_poll_for(lambda: a.data.statistics().unspillable, 10)
    await a.heartbeat()
    await recorder.stop()
    assert "unspillable" in [one.rule for one in advise(Run(recorder.samples))]


@spilling(limits=(1,), nthreads=[("", 1)])
async def test_clients_hear_of_warnings(c, s, a):
    heard = []
    c.subscribe_topic("gpuspill", heard.append)
    logging.getLogger("gpuspill").info("nothing of note")
    while not heard:  # until the subscription has reached the scheduler
        logging.getLogger("gpuspill").warning("watch out for %d", 7)
        await asyncio.sleep(0.01)
    _, event = heard[0]
    assert (event["level"], event["message"], event["worker"]) == ("WARNING", "watch out for 7", a.address)


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1)])
async def test_of_two_workers_in_one_process_one_tells(c, s, a, b):
    logging.getLogger("gpuspill").warning("once")
    await async_poll_for(lambda: s.get_events("gpuspill"), 10)
    await asyncio.gather(a.heartbeat(), b.heartbeat())
    assert [event["message"] for _, event in s.get_events("gpuspill")] == ["once"]


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    with (
        LocalCluster(
            n_workers=1, processes=False, dashboard_address=":0", data=gpuspill.data(host_limit=1), silence_logs=False
        ) as cluster,
        Client(cluster) as client,
    ):
        x = client.submit(np.ones, ARRAY)
        wait(x)
        address = cluster.scheduler.address
        with gpuspill.report(tmp_path / "inside.html", interval=0.05):
            client.submit(lambda x: x.sum(), x).result()
        runner = CliRunner()
        shown = runner.invoke(command, ["top", address, "--once", "--interval", "0.1"])
        assert shown.exit_code == 0, shown.output
        assert "host memory" in shown.output
        path = tmp_path / "run.html"
        made = runner.invoke(command, ["report", address, "-o", str(path), "--seconds", "0.3"])
        assert made.exit_code == 0, made.output
        assert "gpuspill: report of a run" in path.read_text()
        failed = runner.invoke(command, ["report", address, "-o", str(tmp_path), "--seconds", "0.1"])
        assert failed.exit_code == 2
        assert (tmp_path / "inside.html").exists()


PROGRAM = """
import logging, sys
import gpuspill
from distributed import Client, LocalCluster

if __name__ == "__main__":
    silence = {"silence_logs": logging.ERROR} if sys.argv[1] == "silent" else {"silence_logs": False}
    options = dict(n_workers=1, dashboard_address=":0", data=gpuspill.data(), processes=sys.argv[2] == "process")
    with LocalCluster(**options, **silence) as cluster, Client(cluster) as client:
        client.run(lambda: logging.getLogger("gpuspill").warning("mind the disk"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["process", "thread"])
@pytest.mark.parametrize(("how", "times"), [("loud", 1), ("silent", 0)])
def test_a_cluster_that_silences_logs_silences_warnings(tmp_path, how, times, where):
    """In a program of its own: pytest sets up logging, and then nothing is printed."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(path), how, where], capture_output=True, text=True, check=True, timeout=100, cwd=tmp_path
    )
    assert (done.stderr + done.stdout).count("mind the disk") == times
