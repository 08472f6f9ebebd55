"""The demonstration's jobs, the picture it draws, and how it judges answers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from distributed import Client, Future, LocalCluster
from rich.console import Console

from gpuspill.demo.arrays import ArrayJob
from gpuspill.demo.flights import FlightsJob, _in_order, load_part, load_tables
from gpuspill.demo.jobs import Answers, DemoJob, differences
from gpuspill.demo.run import FULL, QUICK, Size, demonstrate, make_jobs
from gpuspill.demo.view import ClusterView, Rates, WorkerState, _Meter, draw, line
from gpuspill.errors import ConfigError

MIB = 2**20
STILL = Rates()


def state(**changes: Any) -> WorkerState:
    known = {
        "name": "0",
        "status": "running",
        "silent": 0.2,
        "process": 300 * MIB,
        "host": 200 * MIB,
        "disk": 500 * MIB,
        "written": 600 * MIB,
        "read": 100 * MIB,
        "longest_stall": 0.25,
    }
    return WorkerState(**(known | changes))


def shown(title: str, *states: WorkerState, rates: Rates = STILL) -> str:
    console = Console(file=StringIO(), width=140)
    console.print(draw(title, states, 400 * MIB, rates))
    return cast("StringIO", console.file).getvalue()


def test_the_picture_shows_tiers_moves_and_stalls() -> None:
    text = shown("flights on stock", state(), rates=Rates(5 * MIB, 7 * MIB))
    assert "flights on stock" in text
    assert "300.00 MiB of 400.00 MiB" in text
    # Twenty cells: half of the limit are values, another quarter is the rest of the process.
    assert "█" * 10 + "▒" * 5 + "·" * 5 in text
    assert "500.00 MiB" in text
    assert "250 ms" in text
    assert "spilling 5.00 MiB/s" in text
    assert "restoring 7.00 MiB/s" in text
    assert "running" in text


def test_the_picture_shows_a_worker_that_has_gone_silent() -> None:
    assert "silent for 4.0 s" in shown("x", state(silent=4.0))
    assert "paused" in shown("x", state(status="paused"))


@pytest.mark.parametrize(("host", "process"), [(0, 0), (500, 300), (1000, 1000), (100, 500)])
def test_the_bar_has_the_same_length_whatever_it_shows(host: int, process: int) -> None:
    text = shown("x", state(host=host * MIB, process=process * MIB))
    assert sum(text.count(cell) for cell in "█▒·") == 20


def test_the_line_adds_up_the_workers() -> None:
    text = line("array on gpuspill", [state(), state(name="1", longest_stall=0.5)], Rates(MIB, 0.0))
    assert text.startswith("array on gpuspill: process 600.00 MiB, in memory 400.00 MiB, on disk 0.98 GiB")
    assert "restored 200.00 MiB" in text
    assert "longest stall 500 ms" in text


def test_rates_are_those_of_the_last_seconds() -> None:
    meter = _Meter()
    assert meter.update(0.0, [state(written=0, read=0)]) == Rates(0.0, 0.0)
    assert meter.update(1.0, [state(written=100, read=10)]) == Rates(100.0, 10.0)
    for second in range(2, 10):
        rates = meter.update(float(second), [state(written=100, read=10 * second)])
    assert rates == Rates(0.0, 10.0)


def test_rates_are_not_negative_when_a_worker_starts_again() -> None:
    meter = _Meter()
    meter.update(0.0, [state(written=1000)])
    assert meter.update(1.0, [state(written=0)]).written == 0.0


class FakeClient:
    """Answers with the same states; raises at first, as a cluster that is just starting may."""

    def __init__(self, states: list[WorkerState]) -> None:
        self.states = states
        self.looks = 0
        self.seen = threading.Event()

    def run_on_scheduler(self, function: Callable[..., Any]) -> list[WorkerState]:
        self.looks += 1
        if self.looks == 1:
            raise OSError("not there yet")
        if self.looks == 4:
            self.seen.set()
        return self.states


@pytest.mark.parametrize("terminal", [False, True])
def test_the_view_survives_failing_looks_and_ends_with_its_block(terminal: bool) -> None:
    client = FakeClient([state()])
    console = Console(file=StringIO(), width=140, force_terminal=terminal)
    with ClusterView(cast("Client", client), console, "job on arm", 400 * MIB, interval=0.001, every=0.001) as view:
        view.step("sorting")
        assert client.seen.wait(30)
    text = cast("StringIO", console.file).getvalue()
    assert "job on arm" in text
    assert "sorting" in text
    assert not any(thread.name == "gpuspill-demo-view" for thread in threading.enumerate())


FRAME = pd.DataFrame({"n": [1, 2], "x": [0.5, np.nan]}, index=pd.Index(["a", "b"], name="key"))


@pytest.mark.parametrize(
    ("expected", "found", "why"),
    [
        (FRAME, FRAME.assign(n=[1, 3]), "column n"),
        (FRAME, FRAME.assign(x=[0.5000001, np.nan]), "column x"),
        (FRAME, FRAME.assign(x=[0.5, 0.5]), "column x"),
        (FRAME, FRAME.rename(index={"b": "c"}), "index"),
        (FRAME, FRAME[["x", "n"]], "columns"),
        (FRAME, FRAME.iloc[:1], "index"),
        (np.ones(3), np.array([1.0, 1.0, 1.1]), "answer"),
        (np.ones(3), np.ones(4), "answer"),
        (5, 6, "answer"),
        (True, False, "answer"),
    ],
)
def test_wrong_answers_are_found(expected: Any, found: Any, why: str) -> None:
    (told,) = differences({"answer": expected}, {"answer": found})
    assert told.startswith("answer: ")
    assert why in told
    assert "\n" not in told


def test_right_answers_are_accepted() -> None:
    answers = {"frame": FRAME, "array": np.ones(3), "count": 5, "sorted": True}
    close = answers | {"frame": FRAME.assign(x=[0.5 + 1e-13, np.nan]), "array": np.ones(3) + 1e-12}
    assert differences(answers, close) == []


def test_missing_and_unexpected_answers_are_found() -> None:
    assert differences({"a": 1}, {"b": 1}) == ["a: missing", "b: not asked for"]


def edges(*parts: tuple[int, bool, str, str]) -> pd.DataFrame:
    frame = pd.DataFrame(parts, columns=["rows", "sorted", "first", "last"])
    return frame.assign(first=pd.to_datetime(frame["first"]), last=pd.to_datetime(frame["last"]))


def test_order_is_checked_within_and_between_partitions() -> None:
    first, second = (2, True, "2013-01-01", "2013-01-05"), (2, True, "2013-01-05", "2013-01-09")
    empty = (0, True, "NaT", "NaT")
    assert _in_order(edges(first, empty, second))
    assert not _in_order(edges(second, first))
    assert not _in_order(edges(first, (2, False, "2013-01-05", "2013-01-09")))


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> FlightsJob:
    pytest.importorskip("pyarrow")
    return FlightsJob(tmp_path_factory.mktemp("flights"), copies=3, parts=2, rows=2_000)


def test_the_files_that_workers_read_make_up_the_copies(flights: FlightsJob) -> None:
    for copy in range(3):
        pd.testing.assert_frame_equal(
            pd.concat([load_part(copy, path) for path in flights._paths]), flights.load_copy(copy)
        )


def test_copies_differ(flights: FlightsJob) -> None:
    first, last = flights.load_copy(0), flights.load_copy(2)
    assert 2_000 <= len(last) == len(first) < 3_000
    assert (last["year"] == 2015).all()
    assert (last["flight"] == first["flight"] + 2).all()
    assert (last["time_hour"].dt.year >= 2015).all()
    assert np.nanmax((last["dep_delay"] - first["dep_delay"] - 2).abs()) == 0


def test_the_flights_expected_are_those_of_all_copies_at_once(flights: FlightsJob) -> None:
    # The reference goes copy by copy and adds up; here is the textbook version, which needs all in memory.
    tables = load_tables()
    together = pd.concat([flights.load_copy(copy) for copy in range(3)])
    airlines = together.merge(tables.airlines, on="carrier").groupby("name")
    weather = together.merge(tables.weather, on=["month", "day", "hour", "origin"]).groupby("visib")
    weekly = together.set_index("time_hour").sort_index()[["distance", "dep_delay"]].resample("7D")
    textbook = {
        "airlines": airlines.agg({"dep_delay": "mean", "flight": "sum", "distance": "sum"}),
        "weather": weather.agg({"dep_delay": "mean", "flight": "count", "distance": "sum"}),
        "weeks": weekly.agg({"distance": "sum", "dep_delay": "mean"}),
        "rows": len(together),
        "sorted": True,
    }
    assert differences(flights.reference(), textbook) == []


def test_the_array_expected_is_that_of_the_whole_array_at_once() -> None:
    job = ArrayJob(blocks=3, block=20, wanted=5)
    a = job._array().compute(scheduler="synchronous")
    z = (a - a.mean(axis=0)) / a.std(axis=0)
    textbook = {"symmetric": (a + a.T).mean(axis=0), "correlation": z[:, :5].T @ z / len(z)}
    assert differences(job.reference(), textbook) == []
    assert a.nbytes == job.nbytes


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.cluster
def test_jobs_give_the_expected_answers(flights: FlightsJob, client: Client) -> None:
    for job in (flights, ArrayJob(blocks=3, block=50)):
        steps: list[str] = []
        found = job.run(client, steps.append)
        assert differences(job.reference(), found) == []
        assert len(steps) > 2


TINY = Size(
    limit=2**30,
    copies=2,
    parts=2,
    rows=1_000,
    blocks=2,
    block=128,
    timeout=120.0,
    config={"distributed.worker.memory.target": 1e-4},
)


def table_of(size: Size, arms: str, jobs: str) -> tuple[list[Any], str]:
    console = Console(file=StringIO(), width=160)
    outcomes = demonstrate(console, size, arms, jobs)
    return outcomes, cast("StringIO", console.file).getvalue()


@pytest.mark.cluster
@pytest.mark.slow
def test_the_demonstration_compares_the_arms() -> None:
    outcomes, text = table_of(TINY, "gpuspill,stock", "flights,array")
    assert [(outcome.job, outcome.arm) for outcome in outcomes] == [
        ("flights", "gpuspill"),
        ("flights", "stock"),
        ("array", "gpuspill"),
        ("array", "stock"),
    ]
    assert all(outcome.good for outcome in outcomes), [(o.wrong, o.error) for o in outcomes]
    for outcome in outcomes:
        assert len(outcome.figures) == 2
        assert sum(figure.store.written_bytes for figure in outcome.figures) > 0
    assert all(figure.store.loop_operations == 0 for o in outcomes if o.arm == "gpuspill" for figure in o.figures)
    assert "2 workers with room for 104.86 kiB of values each" in text
    assert text.count("answers correct") == 4
    assert "longest stall" in text
    assert "(x " in text


class WrongJob(ArrayJob):
    def reference(self) -> Answers:
        return dict(super().reference()) | {"symmetric": np.zeros(256)}


class FailingJob(ArrayJob):
    def run(self, client: Client, step: Callable[[str], None]) -> Answers:
        raise RuntimeError("of its own making")


class EndlessJob(ArrayJob):
    def run(self, client: Client, step: Callable[[str], None]) -> Answers:
        # Nobody computes this key. What ends the wait is that the client is closed.
        return cast("Answers", Future("nowhere", client).result())


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (WrongJob, "answers WRONG"),
        (FailingJob, "RuntimeError: of its own making"),
        (EndlessJob, "not finished within 1 s, given up"),
    ],
    ids=["wrong", "failing", "endless"],
)
def test_wrong_and_unfinished_jobs_are_told(kind: type[DemoJob], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuspill.demo.run.ArrayJob", kind)
    size = dataclasses.replace(TINY, timeout=1.0 if kind is EndlessJob else 120.0)
    (outcome,), text = table_of(size, "nospill", "array")
    assert not outcome.good
    assert told in text
    assert ("array on nospill: symmetric:" in text) is (kind is WrongJob)
    assert not any(thread.name == "gpuspill-demo-job" for thread in threading.enumerate())


def test_unusable_jobs(tmp_path: Path) -> None:
    for names in ("", "flight", "array,x"):
        with pytest.raises(ConfigError, match="choose among flights, array"):
            make_jobs(names, TINY, tmp_path)
    (job,) = make_jobs("array,array", TINY, tmp_path)
    assert job.name == "array"


def test_the_full_demonstration_has_more_data_than_memory(tmp_path: Path) -> None:
    for job in make_jobs("flights,array", FULL, tmp_path):
        assert job.nbytes > 2 * FULL.limit
    for job in make_jobs("flights,array", QUICK, tmp_path):
        assert job.nbytes > 2 * QUICK.limit * cast("float", QUICK.config["distributed.worker.memory.target"])
