"""The benchmark of priorities, with very little data: what it reports, never how fast it is."""

from __future__ import annotations

import pytest

from gpuspill.bench import priority
from gpuspill.bench.job import benchmark
from gpuspill.bench.priority import Priority
from gpuspill.errors import ConfigError


@pytest.mark.cluster
@pytest.mark.slow
def test_on_both_arms() -> None:
    job = Priority(limit=8_000_000, chunk=1_000_000, delay=0.01, tasks=200, waiting=5)
    result = benchmark(job, "gpuspill,unadmitted", 1)
    assert result.correct, [sample.error for sample in result.samples]
    ours, unadmitted = result.samples
    assert {row.metric for row in priority.ROWS} <= set(ours.metrics)
    assert ours.figure("urgent") > 0
    assert unadmitted.figure("urgent") > 0
    # The first of the transfers, and nothing of the rest.
    assert ours.metrics["promised"] == job.limit // 5 <= ours.figure("largest")
    assert ours.metrics["asked"] == 5 * (job.limit // 5) + 8 * (job.limit // 2)
    assert ours.metrics["seceded"] >= ours.figure("before") - job.threads * job.chunk


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"chunk": 0}, {"delay": -1}, {"chunk": 10**9}, {"waiting": 0}])
def test_what_cannot_be_done_is_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        Priority(**wrong)  # type: ignore[arg-type]
