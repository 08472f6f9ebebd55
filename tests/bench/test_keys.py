"""The benchmark of the store alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuspill.bench.job import benchmark
from gpuspill.bench.keys import OPERATIONS, GpuspillStore, Keys, StockStore, StoreUnderTest, metric, slope
from gpuspill.errors import ConfigError


@pytest.mark.parametrize(
    ("power", "expected"),
    [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (-0.5, -0.5)],
    ids=["flat", "scan", "quadratic", "falling"],
)
def test_slope_is_the_power(power: float, expected: float) -> None:
    sizes = [10, 100, 1_000]
    assert slope(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(expected)


def test_slope_needs_two_points() -> None:
    assert slope([10], [1.0]) != slope([10], [1.0])


@pytest.mark.parametrize("kind", [StockStore, GpuspillStore])
def test_eviction_puts_on_disk_what_was_used_least_recently(kind: type[StoreUnderTest], tmp_path: Path) -> None:
    store = kind(tmp_path)
    try:
        for number in range(20):
            store.mapping[f"key-{number}"] = bytes([number]) * 1000
        assert store.mapping["key-0"] == bytes(1000)
        store.evict(5)
        assert sorted(store.spilled()) == [f"key-{number}" for number in range(1, 6)]
        assert all(store.mapping[f"key-{number}"] == bytes([number]) * 1000 for number in range(20))
        assert store.spilled() == []
    finally:
        store.close()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_every_operation_is_measured_at_every_size() -> None:
    told: list[str] = []
    result = benchmark(Keys(sizes=[10, 40], operations=10), "stock,gpuspill", 2, told.append)
    assert result.correct, [sample.error for sample in result.samples]
    assert [(sample.arm, sample.repeat) for sample in result.samples] == [
        ("stock", 0),
        ("gpuspill", 0),
        ("stock", 1),
        ("gpuspill", 1),
    ]
    for sample in result.samples:
        for operation in OPERATIONS:
            assert sample.figure(metric(operation, 10)) > 0
            assert sample.figure(metric(operation, 40)) > 0
            assert f"{operation}_slope" in sample.metrics
    assert {row.metric for row in result.rows} == set(result.samples[0].metrics)
    assert len(told) == 5
    assert len(result.notes) == 1 + 2 * len(OPERATIONS)


@pytest.mark.parametrize(
    ("arms", "message"),
    [("nospill", "'nospill' is unknown"), ("stock,nospill", "choose among stock, gpuspill"), ("x", "unknown")],
)
def test_arms_without_a_store(arms: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        benchmark(Keys(sizes=[10]), arms, 1)


@pytest.mark.parametrize("options", [{"sizes": []}, {"sizes": [0]}, {"value": 0}, {"operations": 0}])
def test_unusable_numbers(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="larger than 0"):
        Keys(**options)  # type: ignore[arg-type]
