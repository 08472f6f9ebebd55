"""The benchmark of a link: what it counts and how it adds up, never how fast this machine is."""

from __future__ import annotations

import pytest

from gpuspill.bench.job import benchmark
from gpuspill.bench.link import ARMS, ROWS, LinkJob, _Garbage
from gpuspill.errors import ConfigError
from gpuspill.simulated.device.thread_clock import ThreadClock


def test_what_it_reports() -> None:
    result = benchmark(LinkJob(link=55e9), "200x1MiB", 1)
    assert result.correct, [sample.error for sample in result.samples]
    (sample,) = result.samples
    assert {row.metric for row in ROWS} <= set(sample.metrics)
    for way in ("down", "up"):
        # Never faster than the link.
        assert 0 < sample.figure(f"{way}_share") < 1
        assert sample.figure(way) == pytest.approx(sample.figure(f"{way}_share") * 55e9)


def test_garbage_that_is_collected_in_the_simulation_is_no_time_of_the_tiers() -> None:
    clock = ThreadClock()
    garbage = _Garbage(clock)
    with clock.call():
        garbage("start", {})
        sum(range(100_000))
        garbage("stop", {})
    assert garbage.seconds == 0
    garbage("start", {})
    sum(range(100_000))
    garbage("stop", {})
    assert garbage.seconds > 0


@pytest.mark.parametrize(("options", "message"), [({"link": 0}, "link"), ({"link": 1e9, "model": "abacus"}, "model")])
def test_unusable_jobs(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{message}"):
        LinkJob(**options)  # type: ignore[arg-type]


def test_its_arms_are_what_they_are_called() -> None:
    assert list(ARMS) == ["1x4GiB", "4x1GiB", "200x1MiB", "10000x64KiB"]
