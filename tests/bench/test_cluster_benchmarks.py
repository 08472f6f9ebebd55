"""The benchmarks that start clusters, with very little data: what they report, never how fast they are."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator

import dask
import pytest
from distributed import Worker

from gpuspill.bench.arms import ARMS, ClusterShape, open_cluster
from gpuspill.bench.job import benchmark
from gpuspill.bench.persist_sum import ROWS, PersistSum
from gpuspill.bench.tiny import BATCH, Tiny, _Contestant, _order
from gpuspill.bench.watch import WatchPlugin, restart
from gpuspill.errors import ConfigError

MIB = 2**20


@pytest.fixture
def little_room() -> Iterator[None]:
    """Room for ten megabytes of values, whatever the process itself needs."""
    with dask.config.set({"distributed.worker.memory.target": 0.01}):
        yield


@pytest.mark.cluster
@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("compressible", [False, True])
def test_persist_sum_on_all_arms(compressible: bool) -> None:
    job = PersistSum(limit=1024 * MIB, ratio=1 / 16, chunk=2 * MIB, compressible=compressible)
    result = benchmark(job, "stock,gpuspill,nospill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    assert result.parameters["nbytes"] == job.nbytes == 64 * MIB
    stock, gpuspill, nospill = result.samples
    assert [sample.arm for sample in result.samples] == ["stock", "gpuspill", "nospill"]
    for sample in result.samples:
        assert {row.metric for row in ROWS} <= set(sample.metrics)
        assert sample.figure("wall") == pytest.approx(sum(sample.figure(n) for n in ("persist", "sum_1", "sum_2")))
        assert sample.figure("peak_memory") > 50 * MIB
        assert sample.figure("cpu") > 0
    # 54 of 64 megabytes find no room; both sums have to read them.
    spilled = 20 * MIB if compressible else 50 * MIB
    for sample in (stock, gpuspill):
        assert sample.figure("written") > spilled
        assert sample.figure("read") > spilled
    assert stock.figure("loop_operations") > 50
    assert gpuspill.figure("loop_operations") == 0
    assert gpuspill.figure("written_ratio") < 1.05
    assert (nospill.figure("written"), nospill.figure("read"), nospill.figure("loop_operations")) == (0, 0, 0)
    if stock.metrics["loop_file_bytes"] is not None:
        # What the kernel has counted for the loop's thread agrees with what the stores say.
        assert stock.figure("loop_file_bytes") > stock.figure("written") + stock.figure("read")
        assert gpuspill.figure("loop_file_bytes") < 2 * MIB


def _kind_of_files(dask_worker: Worker) -> str:
    return type(dask_worker.data.slow.data.d).__name__  # type: ignore[attr-defined]


def _storage_delay(dask_worker: Worker) -> float:
    return dask_worker.data.settings.storage_delay  # type: ignore[attr-defined, no-any-return]


@pytest.mark.cluster
def test_a_delay_reaches_every_store_that_has_files() -> None:
    shape = ClusterShape(workers=1, threads=1, processes=False)
    with open_cluster(ARMS["stock"], shape, delay=0.25) as client:
        assert list(client.run(_kind_of_files).values()) == ["DelayedFiles"]
    with open_cluster(ARMS["stock"], shape) as client:
        assert list(client.run(_kind_of_files).values()) == ["AnyKeyFile"]
    with open_cluster(ARMS["gpuspill"], shape, delay=0.25) as client:
        assert list(client.run(_storage_delay).values()) == [0.25]


@pytest.mark.cluster
@pytest.mark.usefixtures("little_room")
def test_results_are_right_with_slow_files() -> None:
    job = PersistSum(limit=1024 * MIB, ratio=1 / 32, chunk=2 * MIB, delay=0.001)
    result = benchmark(job, "stock,gpuspill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    stock, gpuspill = result.samples
    assert stock.figure("written") > 0
    assert gpuspill.figure("written") > 0
    assert gpuspill.figure("loop_operations") == 0


@pytest.mark.cluster
def test_tiny_in_turns() -> None:
    result = benchmark(Tiny(tasks=2 * BATCH + 2), "stock,control,gpuspill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    assert [sample.arm for sample in result.samples] == ["stock", "control", "gpuspill"]
    for sample in result.samples:
        assert sample.figure("written") == 0
        assert sample.figure("task") > 0
        assert sample.figure("task_cpu") > 0
        assert math.isnan(sample.figure("more")) == math.isnan(sample.figure("more_cpu")) == (sample.arm == "stock")
    assert len(result.notes) == 4


@pytest.mark.cluster
def test_tiny_without_stock_compares_with_nothing() -> None:
    result = benchmark(Tiny(tasks=2), "gpuspill,nospill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    assert all(sample.metrics["more"] is None for sample in result.samples)
    assert not result.notes


@pytest.mark.cluster
def test_a_turn_that_takes_too_long_is_a_failed_round() -> None:
    result = benchmark(Tiny(tasks=2, timeout=1e-6), "stock,gpuspill", 1)
    assert [sample.error.split(":")[0] for sample in result.samples] == ["TimeoutError"] * 2
    assert not result.correct


@pytest.fixture
def own_size_ignored() -> Iterator[None]:
    """Count values only: workers in the tests' process would spill for how large it has grown."""
    names = (
        "distributed.worker.memory.spill",
        "distributed.worker.memory.pause",
        "gpuspill.follow-process-memory",
    )
    with dask.config.set(dict.fromkeys(names, False)):
        yield


@pytest.mark.cluster
@pytest.mark.usefixtures("own_size_ignored")
def test_tiny_in_this_process() -> None:
    level = logging.getLogger("gpuspill").level
    result = benchmark(Tiny(tasks=40, mode="inprocess"), "stock,gpuspill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    for sample in result.samples:
        assert sample.figure("written") == 0
        assert sample.figure("task") > 0
        assert sample.figure("task_cpu") > 0
    assert len(result.notes) == 2
    assert logging.getLogger("gpuspill").level == level


@pytest.mark.parametrize("arms", [2, 3, 4])
def test_nobody_always_comes_first_in_a_turn(arms: int) -> None:
    contestants = [_Contestant(str(number), "") for number in range(arms)]
    orders = [_order(contestants, number) for number in range(2 * arms)]
    for one in contestants:
        places = [order.index(one) for order in orders]
        assert sorted(places) == sorted(2 * list(range(arms)))
        for other in contestants:
            if other is not one:
                assert sum(order.index(one) < order.index(other) for order in orders) == arms


@pytest.mark.cluster
def test_a_run_that_takes_too_long_is_a_failed_run() -> None:
    result = benchmark(PersistSum(limit=256 * MIB, ratio=0.05, chunk=2 * MIB, timeout=1e-6), "nospill", 1)
    (sample,) = result.samples
    assert sample.error.startswith("TimeoutError")
    assert not result.correct


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit"),
        ({"ratio": -1.0}, "ratio"),
        ({"chunk": 4}, "chunk"),
        ({"chunk": 2**40}, "chunk"),
        ({"threads": 0}, "threads"),
        ({"delay": -0.1}, "delay"),
    ],
)
def test_unusable_jobs(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        PersistSum(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"), [({"tasks": 3}, "tasks"), ({"tasks": 0}, "tasks"), ({"mode": "x"}, "mode")]
)
def test_unusable_tiny_jobs(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Tiny(**options)  # type: ignore[arg-type]


def test_the_array_is_the_same_every_time_and_half_zero_if_compressible() -> None:
    job = PersistSum(limit=MIB, ratio=1.0, chunk=MIB // 4, compressible=True)
    values = job.array().compute(scheduler="synchronous")
    assert values.nbytes == job.nbytes == MIB
    assert (values[1::2] == 0).all()
    assert (values[::2] > 0).all()
    assert float(values.sum()) == pytest.approx(job.reference(), rel=1e-12)


def _full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


@pytest.mark.cluster
def test_garbage_is_collected_before_anything_is_measured() -> None:
    """Else it depends on what an arm has imported whether a full collection falls into its job."""
    shape = ClusterShape(workers=2, threads=1, memory_limit=1024 * MIB)
    with open_cluster(ARMS["nospill"], shape, watch=WatchPlugin(), silence=logging.CRITICAL) as client:
        before = client.run(_full_collections)
        restart(client)
        after = client.run(_full_collections)
    assert all(after[worker] > before[worker] for worker in before)
