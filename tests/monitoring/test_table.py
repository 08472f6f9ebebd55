"""The numbers in a terminal."""

from __future__ import annotations

from rich.console import Console

from gpuspill.monitoring.samples import ClusterSample
from gpuspill.monitoring.table import render
from tests.monitoring.cluster_samples import worker


def text(before: ClusterSample | None, now: ClusterSample, width: int = 160) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(render(before, now, "tcp://s:1"))
    return captured.get().splitlines()


def test_one_worker():
    now = ClusterSample(1.0, {"tcp://a:1": worker(limit=1024, host_nbytes=512, wait_seconds=2, lost=3)})
    lines = text(None, now)
    (row,) = [line for line in lines if "tcp://a:1" in line]
    assert "████████░░░░░░░░ 512 B of 1.00 KiB" in row
    assert "2.00 s" in row
    assert "3 lost" in row
    assert not any("all" in line.split() for line in lines)


def test_several_workers_have_a_row_together_and_speeds_from_two_samples():
    before = ClusterSample(0.0, {"a": worker(), "b": worker()})
    now = ClusterSample(
        2.0, {"a": worker(written_nbytes=4096, host_nbytes=1), "b": worker(written_nbytes=2048, limit=None)}
    )
    lines = text(before, now)
    (row,) = [line for line in lines if "all 2" in line]
    assert "3.00 KiB/s" in row
    assert "1 B" in row
    assert " of " not in row  # one of them has no limit


def test_no_worker_has_gpuspill():
    assert any("no worker has gpuspill attached" in line for line in text(None, ClusterSample(0.0)))


def test_a_window_shows_the_fullest_of_many_workers_and_the_sums_of_all():
    now = ClusterSample(0.0, {f"tcp://{i}:1": worker(host_nbytes=i) for i in range(300)})
    console = Console(width=160)
    with console.capture() as captured:
        console.print(render(None, now, rows=2))
    lines = captured.get().splitlines()
    assert [line.split()[1] for line in lines if "tcp://" in line] == ["tcp://298:1", "tcp://299:1"]
    assert any("all 300" in line for line in lines)
    assert any("the 2 workers with most" in line for line in lines)
