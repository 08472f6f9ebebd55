"""The benchmark of fairness, with very little data: what it reports, never how fast it is."""

from __future__ import annotations

import pytest

from gpuspill.bench import fair
from gpuspill.bench.fair import Fair
from gpuspill.bench.job import benchmark
from gpuspill.errors import ConfigError


def test_each_row_is_measured() -> None:
    job = Fair(lists=20_000, inputs=600, floats=200, keys=500, delay=0.001)
    result = benchmark(job, "gpuspill", 1)
    assert result.correct, [sample.error for sample in result.samples]
    (sample,) = result.samples
    assert {row.metric for row in fair.ROWS} <= set(sample.metrics)
    assert all(sample.figure(row.metric) >= 0 for row in fair.ROWS if row.metric != "correct")
    # What a key takes, and no value, of which each has its bytes already.
    assert 0 < sample.figure("key_nbytes") < 2_000


@pytest.mark.parametrize("wrong", [{"lists": 0}, {"inputs": 0}, {"floats": -1}, {"keys": 0}, {"delay": -1}])
def test_what_cannot_be_done_is_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        Fair(**wrong)  # type: ignore[arg-type]
