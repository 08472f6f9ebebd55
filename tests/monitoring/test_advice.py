"""Each rule speaks up for its fault, and for nothing else."""

from __future__ import annotations

import pytest

from gpuspill.monitoring.advice import Run, advise
from gpuspill.monitoring.samples import ClusterSample
from tests.monitoring.cluster_samples import run, worker

FULL = {"host_nbytes": 950}

#: For each rule a run that has its fault: what the worker says at the end, and so at each moment before.
FAULTS = {
    "lost": {"lost": 2, "spills": 5},
    "disk-limit": {"spill_failures": 9, "disk_nbytes": 990, "disk_limit": 1000, "spills": 5},
    "disk-refuses": {"spill_failures": 3, "spills": 5},
    "unspillable": {"unspillable": 40, "spills": 1, **FULL},
    "overcommits": {"overruns": 8, "waits": 10, "spills": 5, **FULL},
    "unmanaged-memory": {"offset_nbytes": 600, "host_nbytes": 350, "spills": 5},
    "disk-bound": {"write_seconds": 9.0, "written_nbytes": 4000, "wait_seconds": 5.0, "spills": 5},
    "waits": {"write_seconds": 3.0, "written_nbytes": 4000, "wait_seconds": 5.0, "spills": 5},
    "reads-in-tasks": {"misses": 8, "restores": 10, "read_seconds": 5.0, "spills": 5},
    "limit-too-low": {"restored_total_nbytes": 9000, "spilled_nbytes": 2000, "read_seconds": 3.0, "spills": 5},
    "serialisation-bound": {"serialize_seconds": 6.0, "write_seconds": 0.5, "spills": 5},
    "reads-on-the-loop": {"loop_io": 3, "spills": 5},
    "device-out-of-memory": {"device_out_of_memory": 2, "device_spills": 5},
}


def rules(samples: list[ClusterSample]) -> list[str]:
    return [advice.rule for advice in advise(Run(samples))]


@pytest.mark.parametrize("rule", FAULTS)
def test_the_fault_is_found_and_nothing_else(rule):
    faulty = worker(**FAULTS[rule])
    quiet = {name: 0 if name not in ("limit", "disk_limit", "device_limit") else faulty[name] for name in faulty}
    half = {name: number if name.endswith("nbytes") or not number else number / 2 for name, number in faulty.items()}
    half["limit"], half["disk_limit"] = faulty["limit"], faulty["disk_limit"]
    assert rules(run(quiet, half, faulty, seconds=5.0)) == [rule]


@pytest.mark.parametrize("rule", sorted(FAULTS.keys() - {"unspillable", "unmanaged-memory"}))  # those are states
def test_what_happened_before_the_run_is_not_its_fault(rule):
    faulty = worker(**FAULTS[rule])
    assert rules(run(faulty, faulty, faulty, seconds=5.0)) == ["nothing-spilled"]


def test_a_run_that_spilled_and_kept_up():
    samples = run(worker(), worker(spills=9, spilled_nbytes=500, written_nbytes=500, write_seconds=0.2), seconds=10.0)
    assert rules(samples) == ["healthy"]


def test_nothing_was_spilled():
    assert rules(run(worker(), worker(host_nbytes=10))) == ["nothing-spilled"]


def test_no_worker_has_gpuspill():
    (advice,) = advise(Run([ClusterSample(0.0), ClusterSample(1.0)]))
    assert advice.rule == "no-gpuspill"
    assert "SpillPlugin" in advice.remedy


def test_a_few_overcommits_are_usual():
    samples = run(worker(), worker(overruns=3, waits=500, spills=9, **FULL), seconds=10.0)
    assert rules(samples) == ["healthy"]


def test_one_overcommit_of_many_tasks_is_usual():
    """Without waits, too: a run that had room for all but one output."""
    assert rules(run(worker(), worker(overruns=1, hits=50))) == ["nothing-spilled"]


def test_what_is_let_in_because_of_memory_of_no_value_is_put_down_to_that():
    samples = run(worker(), worker(overruns=1, waits=2, offset_nbytes=1200, spills=3))
    (advice,) = advise(Run(samples))
    assert advice.rule == "unmanaged-memory"
    assert "1 task or transfer was let in" in advice.finding


def test_reads_ahead_of_tasks_cost_them_nothing():
    samples = run(worker(), worker(restores=100, prefetches=98, misses=2, read_seconds=8.0, spills=5), seconds=10.0)
    assert rules(samples) == ["healthy"]


def test_the_disk_limit_of_one_worker_among_empty_ones():
    full = worker(spill_failures=1, disk_nbytes=890, disk_limit=900, spills=1)
    others = {name: worker(disk_limit=1000) for name in "abcdef"}
    (advice,) = advise(Run([ClusterSample(0.0, {"w": worker(), **others}), ClusterSample(1.0, {"w": full, **others})]))
    assert (advice.rule, advice.finding) == (
        "disk-limit",
        "1 write was refused: a worker used 890 B of its disk limit of 900 B.",
    )


def test_what_a_worker_did_before_it_left_or_was_started_anew_counts():
    first, again = worker(spills=5, lost=3), worker(spills=1, lost=1)
    run_ = Run(
        [
            ClusterSample(0.0, {"w": worker()}),
            ClusterSample(1.0, {"w": first}),
            ClusterSample(2.0, {"w": again}),
            ClusterSample(3.0),
        ]
    )
    assert run_.grew("lost") == run_.growth["w"]["lost"] == 4
    assert run_.last == {"w": again}


def test_every_finding_says_its_figures_and_every_remedy_what_to_do():
    for rule, numbers in FAULTS.items():
        (advice,) = advise(Run(run(worker(), worker(**numbers), seconds=10.0)))
        assert advice.rule == rule
        assert any(letter.isdigit() for letter in advice.finding), advice.finding
        assert advice.remedy.endswith(".")


def test_a_run_needs_a_sample():
    with pytest.raises(ValueError, match="without a sample"):
        Run([])
