"""``gpuspill bench suite``, with very little data: what it reports, never how fast anything is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import dask
import pytest
from distributed import Client

from gpuspill.bench import suite as module
from gpuspill.bench.arms import ARMS
from gpuspill.bench.job import benchmark
from gpuspill.bench.report import Result, load, save
from gpuspill.bench.runner import Sample
from gpuspill.bench.suite import Suite
from gpuspill.bench.workloads import WORKLOADS, Workload
from gpuspill.errors import ConfigError

MIB = 2**20


def run(name: str, arms: str) -> Result:
    job = Suite(limit=1024 * MIB, ratio=1 / 32, chunk=2 * MIB, only=name)
    # Room for ten megabytes of values in each worker, whatever the process itself needs.
    with dask.config.set({"distributed.worker.memory.target": 0.01}):
        result = benchmark(job, arms, 1)
    assert result.correct, [sample.error for sample in result.samples]
    for sample in result.samples:
        assert {row.metric for row in result.rows} == set(sample.metrics)
        assert sample.figure(f"{name}.cpu") > 0
    return result


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {"dot"}))
def test_each_workload_spills_and_is_right(name: str) -> None:
    (sample,) = run(name, "gpuspill").samples
    assert sample.figure(f"{name}.written") > 5 * MIB


@pytest.mark.cluster
@pytest.mark.slow
def test_what_spills_is_compared_with_what_does_not(tmp_path: Path) -> None:
    result = run("dot", "gpuspill,nospill")
    gpuspill, nospill = result.samples
    assert gpuspill.figure("dot.written") > 5 * MIB
    assert nospill.figure("dot.written") == nospill.figure("dot.read") == 0
    assert [note.split(":")[0] for note in result.notes] == [
        "gpuspill / nospill, wall",
        "gpuspill / nospill, cpu",
        "gpuspill",
    ]
    save(result, tmp_path / "suite.json")
    assert load(tmp_path / "suite.json").notes == result.notes


class Constant(Workload):
    """A workload that says what it is told to."""

    answer: ClassVar[Any] = 1.0

    def expected(self) -> Mapping[str, Any]:
        return {"answer": 1.0}

    def run(self, client: Client) -> Mapping[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"answer": self.answer}


class Right(Constant):
    name = "right"


class Wrong(Constant):
    name = "wrong"
    answer = 2.0


class Failing(Constant):
    name = "failing"
    answer = ValueError("by design")


class Waiting(Constant):
    name = "waiting"

    def run(self, client: Client) -> Mapping[str, Any]:
        from distributed import Event

        Event("never").wait()
        return {}


@pytest.mark.cluster
def test_a_workload_that_goes_wrong_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKLOADS", {each.name: each for each in (Right, Wrong, Failing)})
    result = benchmark(Suite(limit=1024 * MIB, ratio=0.01), "nospill", 1)
    assert not result.correct
    right, wrong, failing = result.samples
    assert right.figure("right.wall") > 0
    assert not right.error
    assert wrong.error.startswith("wrong: RuntimeError: answer: ")
    assert failing.error == "failing: ValueError: by design"


@pytest.mark.cluster
def test_a_workload_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKLOADS", {Waiting.name: Waiting})
    result = benchmark(Suite(limit=1024 * MIB, ratio=0.01, timeout=0.5), "nospill", 1)
    assert [sample.error for sample in result.samples] == ["waiting: TimeoutError: no answer after 0.5 s"]


def _samples(arm: str, *rounds: Mapping[str, float]) -> list[Sample]:
    # One sample a workload, as the suite has them.
    return [
        Sample(arm, number, {metric: value})
        for number, metrics in enumerate(rounds)
        for metric, value in metrics.items()
    ]


def test_notes_say_geometric_means_and_what_a_byte_costs() -> None:
    gib = float(2**30)
    figures = {"dot.written": 2 * gib, "dot.read": 2 * gib, "rechunk.written": 0.0, "rechunk.read": 0.0}
    samples = [
        *_samples("stock", {"dot.wall": 8.0, "rechunk.wall": 2.0, "dot.cpu": 9.0} | figures),
        *_samples("gpuspill", {"dot.wall": 2.0, "rechunk.wall": 2.0, "dot.cpu": 6.0} | figures),
        *_samples("nospill", {"dot.wall": 2.0, "rechunk.wall": 1.0, "dot.cpu": 4.0}),
        Sample("stock", 1, error="dot: killed"),
    ]
    job = Suite(only="dot, rechunk, dot")
    assert job.workloads == ["dot", "rechunk"]
    notes = job.notes([ARMS[name] for name in ("stock", "gpuspill", "nospill")], samples)
    assert "gpuspill / stock, wall: geometric mean 0.50 of 2 workloads, 0.25 to 1.00" in notes
    assert "gpuspill / nospill, wall: geometric mean 1.41 of 2 workloads, 1.00 to 2.00" in notes
    assert "stock: CPU s beyond nospill per GiB moved: dot 1.25" in notes
    assert "gpuspill: CPU s beyond nospill per GiB moved: dot 0.50" in notes


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"limit": 0}, "limit"), ({"ratio": -1}, "ratio"), ({"chunk": 1}, "chunk"), ({"only": "dots"}, "'dots'")],
)
def test_arguments_that_make_no_sense(arguments: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Suite(**arguments)
