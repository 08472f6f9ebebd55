"""The benchmarks of transfers, with very little data: what they report, never how fast they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import dask
import pytest

from gpuspill.bench import transfer, transpose
from gpuspill.bench.job import benchmark
from gpuspill.bench.transfer import TransferBenchmark
from gpuspill.bench.transpose import Transpose
from gpuspill.errors import ConfigError

MIB = 2**20


@pytest.fixture
def little_room() -> Iterator[None]:
    """Room for ten megabytes of values, whatever the process itself needs."""
    with dask.config.set({"distributed.worker.memory.target": 0.01}):
        yield


@pytest.mark.cluster
@pytest.mark.usefixtures("little_room")
def test_transfer_on_all_arms() -> None:
    job = TransferBenchmark(limit=1024 * MIB, ratio=1 / 32, chunk=2 * MIB)
    result = benchmark(job, "stock,gpuspill,memory", 1)
    assert result.correct, [sample.error for sample in result.samples]
    assert result.parameters["nbytes"] == job.nbytes == 32 * MIB
    stock, gpuspill, memory = result.samples
    for sample in result.samples:
        assert {row.metric for row in transfer.ROWS} <= set(sample.metrics)
        assert sample.figure("rate") == pytest.approx(job.nbytes / sample.figure("wall"))
        assert sample.figure("use") > 0
    assert stock.figure("decodes") > 0
    assert gpuspill.figure("decodes") == gpuspill.figure("loop_operations") == gpuspill.figure("written") == 0
    assert gpuspill.figure("read") > 20 * MIB
    assert gpuspill.metrics["same"]
    assert 0 < gpuspill.figure("resident_before") == gpuspill.figure("resident_after") <= 11 * MIB
    assert memory.figure("resident_before") == memory.figure("resident_after") == 32 * MIB
    assert (memory.figure("written"), memory.figure("read"), memory.figure("decodes")) == (0, 0, 0)


@pytest.mark.cluster
@pytest.mark.usefixtures("little_room")
def test_transfer_to_a_peer_without_room() -> None:
    job = TransferBenchmark(limit=1024 * MIB, ratio=1 / 64, chunk=2 * MIB, peer="limited")
    result = benchmark(job, "gpuspill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    assert result.samples[0].figure("decodes") == 0


@pytest.mark.cluster
@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("persisted", ["array", "sum"])
def test_transpose(persisted: Literal["array", "sum"]) -> None:
    job = Transpose(limit=1024 * MIB, ratio=1 / 64, chunk=2 * MIB, persisted=persisted)
    result = benchmark(job, "gpuspill,nospill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    gpuspill, nospill = result.samples
    for sample in result.samples:
        assert {row.metric for row in transpose.ROWS} <= set(sample.metrics)
        assert sample.figure("wall") == pytest.approx(sample.figure("persist") + sample.figure("rest"))
    assert gpuspill.figure("written") > 10 * MIB
    assert gpuspill.figure("loop_operations") == 0
    assert nospill.figure("written") == nospill.figure("read") == 0


@pytest.mark.cluster
def test_a_run_that_takes_too_long_is_a_failed_run() -> None:
    result = benchmark(Transpose(limit=256 * MIB, ratio=0.02, chunk=2 * MIB, timeout=1e-6), "nospill", 1)
    assert result.samples[0].error.startswith("TimeoutError")


@pytest.mark.parametrize("job", [TransferBenchmark, Transpose])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit"),
        ({"ratio": -1.0}, "ratio"),
        ({"chunk": 4}, "chunk"),
        ({"chunk": 2**40}, "chunk"),
        ({"threads": 0}, "threads"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_unusable_jobs(job: type, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        job(**options)


def test_unusable_peer_and_arms() -> None:
    with pytest.raises(ConfigError, match=r"^peer"):
        TransferBenchmark(peer="rich")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="choose among stock, gpuspill, memory"):
        benchmark(TransferBenchmark(limit=MIB, chunk=MIB), "nospill", 1)
    with pytest.raises(ConfigError, match=r"^workers"):
        Transpose(workers=0)


def test_the_array_is_square_and_at_least_as_large_as_asked_for() -> None:
    job = Transpose(limit=MIB, ratio=2.6, chunk=MIB // 4)
    array = job.array()
    assert array.shape[0] == array.shape[1]
    assert array.nbytes == job.nbytes >= 2.6 * 2 * MIB
    value = array.compute(scheduler="synchronous")
    assert math.isclose((value + value.T).mean(), job.reference(), rel_tol=1e-12)
