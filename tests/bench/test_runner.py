"""The order of runs, and what becomes of their figures."""

from __future__ import annotations

import math

import pytest

from gpuspill.bench.arms import ARMS, Arm, ClusterShape, parse_arms
from gpuspill.bench.runner import Metrics, Sample, Spread, interleave, paired_difference, paired_ratio, spread
from gpuspill.errors import ConfigError


def samples_of(figures: dict[str, list[float | None]]) -> list[Sample]:
    rounds = len(next(iter(figures.values())))
    return [Sample(arm, number, {"wall": figures[arm][number]}) for number in range(rounds) for arm in figures]


def test_arms_take_turns() -> None:
    ran: list[tuple[str, int]] = []

    def run(arm: Arm, number: int) -> Metrics:
        ran.append((arm.name, number))
        return {"wall": float(len(ran))}

    told: list[Sample] = []
    samples = interleave(parse_arms("gpuspill,stock"), 3, run, told.append)
    assert ran == [(arm, number) for number in range(3) for arm in ("gpuspill", "stock")]
    assert [(sample.arm, sample.repeat, sample.metrics["wall"]) for sample in samples] == [
        (arm, number, place + 1.0) for place, (arm, number) in enumerate(ran)
    ]
    assert told == samples


def test_a_failed_run_is_recorded_and_the_others_go_on() -> None:
    def run(arm: Arm, number: int) -> Metrics:
        if arm.name == "stock" and number == 0:
            raise RuntimeError("the worker died")
        return {"wall": 1.0, "correct": True}

    failed, *others = interleave(parse_arms("stock,nospill"), 2, run)
    assert failed.error == "RuntimeError: the worker died"
    assert not failed.correct
    assert math.isnan(failed.figure("wall"))
    assert all(sample.correct for sample in others)
    assert spread([failed, *others], "stock", "wall") == Spread(1.0, 1.0, 1.0, 1)


def test_spread_is_median_and_range() -> None:
    samples = samples_of({"stock": [3.0, 1.0, 2.0]})
    assert spread(samples, "stock", "wall") == Spread(2.0, 1.0, 3.0, 3)
    assert spread(samples, "stock", "cpu") is None
    assert spread(samples, "gpuspill", "wall") is None


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is ten times slower in the second round: the ratio of medians would be 5.5 / 11 in any case, but
    # the spread must not show a machine that changed its mind.
    samples = samples_of({"stock": [2.0, 20.0], "gpuspill": [1.0, 10.0]})
    assert paired_ratio(samples, "gpuspill", "stock", "wall") == Spread(0.5, 0.5, 0.5, 2)
    assert paired_difference(samples, "gpuspill", "stock", "wall") == Spread(-5.5, -10.0, -1.0, 2)


def test_ratios_need_both_figures() -> None:
    samples = samples_of({"stock": [2.0, None, 0.0], "gpuspill": [1.0, 10.0, 3.0]})
    assert paired_ratio(samples, "gpuspill", "stock", "wall") == Spread(0.5, 0.5, 0.5, 1)
    assert paired_ratio(samples, "gpuspill", "nospill", "wall") is None


@pytest.mark.parametrize(
    ("metrics", "error", "correct"),
    [({}, "", True), ({"correct": True}, "", True), ({"correct": False}, "", False), ({"correct": True}, "x", False)],
)
def test_a_sample_is_correct_if_it_ended_with_the_right_result(metrics: Metrics, error: str, correct: bool) -> None:
    assert Sample("stock", 0, metrics, error).correct is correct


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "none given; choose among stock, gpuspill, nospill"),
        (" , ", "none given"),
        ("stock,stick", "'stick' is unknown; choose among stock, gpuspill, nospill"),
        ("stock,stock", "'stock' is named twice"),
    ],
)
def test_unusable_arms(names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arms(names)


def test_arms_differ_in_nothing_but_the_store() -> None:
    shape = ClusterShape(workers=3, threads=2, memory_limit=12345)
    stock, gpuspill, nospill = (ARMS[name].cluster_arguments(shape) for name in ("stock", "gpuspill", "nospill"))
    differing = {name for name in stock if not stock[name] == gpuspill[name] == nospill[name]}
    assert differing == {"memory_limit", "data"}
    assert (stock["memory_limit"], gpuspill["memory_limit"], nospill["memory_limit"]) == (12345, 12345, 0)
    assert stock["data"] is None
    assert nospill["data"] is None
    assert gpuspill["data"] is not None
    assert parse_arms(["nospill", "stock"]) == [ARMS["nospill"], ARMS["stock"]]
