from __future__ import annotations

from gpuspill.monitoring.samples import ClusterSample, changes, combined, fullest, rates, steps
from tests.monitoring.cluster_samples import worker


def test_workers_together():
    found = combined({"a": worker(host_nbytes=1, limit=10), "b": worker(host_nbytes=2, limit=30)})
    assert (found["host_nbytes"], found["limit"]) == (3, 40)


def test_a_limit_that_one_worker_does_not_have_is_none_for_all():
    assert combined({"a": worker(limit=10), "b": worker(limit=None)})["limit"] is None


def test_only_totals_change():
    before, after = ClusterSample(0, {"a": worker(spills=3, keys=5)}), ClusterSample(2, {"a": worker(spills=7, keys=2)})
    assert changes(before, after)["a"]["spills"] == 4
    assert "keys" not in changes(before, after)["a"]
    assert rates(before, after)["a"]["spills"] == 2


def test_a_worker_that_came_or_was_started_anew_counts_from_zero():
    before = ClusterSample(0, {"old": worker(spills=100), "gone": worker(spills=1)})
    after = ClusterSample(1, {"old": worker(spills=4), "new": worker(spills=2)})
    assert {address: grown["spills"] for address, grown in changes(before, after).items()} == {"old": 4, "new": 2}


def test_two_samples_of_one_moment_have_no_rates():
    same = ClusterSample(5, {"a": worker(spills=1)})
    assert rates(same, ClusterSample(5, {"a": worker(spills=9)}))["a"]["spills"] == 0


def test_a_worker_that_one_sample_misses_goes_on_from_there():
    one, two = {"a": worker(spills=100)}, {"a": worker(spills=103)}
    grown = [
        changes(before, after)
        for before, after in steps([ClusterSample(0, one), ClusterSample(1), ClusterSample(2, two)])
    ]
    assert [step["a"]["spills"] for step in grown if "a" in step] == [3]


def test_the_fullest_workers():
    workers = {"a": worker(host_nbytes=5), "b": worker(spilled_nbytes=9), "c": worker(), "d": worker(device_nbytes=7)}
    assert fullest(workers, 2) == ["b", "d"]
    assert fullest(workers, None) == fullest(workers, 4) == ["a", "b", "c", "d"]
