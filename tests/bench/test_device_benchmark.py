"""The benchmark of a simulated device, with very little data: what it reports, never how fast it is."""

from __future__ import annotations

import pytest

from gpuspill.bench.device import ROWS, DeviceJob
from gpuspill.bench.job import benchmark
from gpuspill.errors import ConfigError

MIB = 2**20


@pytest.mark.cluster
def test_device_on_both_arms() -> None:
    job = DeviceJob(limit=16 * MIB, ratio=2.0, chunk=MIB, passes=2, balance=0.1, bandwidth=1e9, thin=2)
    result = benchmark(job, "gpuspill,fits", 1)
    assert result.correct, [sample.error for sample in result.samples]
    assert result.parameters["chunks"] == job.chunks == 32
    spilling, fits = result.samples
    for sample in result.samples:
        assert {row.metric for row in ROWS} <= set(sample.metrics)
        assert sample.figure("kernels") == 64
        # Two threads: the busier one has at least half of the kernels, and all of them at most.
        busiest = sample.figure("compute") / job.kernel
        assert busiest == pytest.approx(round(busiest))
        assert 32 <= round(busiest) <= 64
        assert sample.figure("violations") == sample.figure("loop_operations") == 0
    # 32 blocks and room for 16: at least as many have to come in each pass, and as many to leave.
    for direction in ("to_host", "to_device"):
        assert spilling.figure(f"bytes_{direction}") >= 16 * MIB
        assert spilling.figure(direction) >= spilling.figure(f"bytes_{direction}") / 1e9
        assert fits.figure(f"bytes_{direction}") == 0
    assert spilling.figure("ideal") == max(spilling.figure(n) for n in ("compute", "to_host", "to_device"))
    assert spilling.figure("ratio") == pytest.approx(spilling.figure("wall") / spilling.figure("ideal"))
    assert spilling.figure("peak") <= 20 * MIB < fits.figure("peak")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit"),
        ({"chunk": 2**30}, "limit"),
        ({"chunk": 4096}, "chunk"),
        ({"thin": 0}, "thin"),
        ({"balance": -1.0}, "balance"),
        ({"latency": -1.0}, "latency"),
    ],
)
def test_unusable_jobs(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{message}"):
        DeviceJob(**options)  # type: ignore[arg-type]
