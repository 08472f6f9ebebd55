"""The plan of a chaos run: the same for the same seed, complete, and the same after it was written down."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuspill.bench.chaos import faults, jobs
from gpuspill.bench.chaos.plan import FAULTS, JOBS, LONGEST, choose, describe, dump, load, read, rounds, write
from gpuspill.bench.chaos.state import _scheduler
from gpuspill.config import Settings
from gpuspill.errors import ConfigError


def test_a_plan_follows_from_its_seed() -> None:
    one, same, other = (list(islice(rounds(seed), 20)) for seed in (7, 7, 8))
    assert one == same
    assert one != other
    assert [found.number for found in one] == list(range(20))


def test_each_kind_comes_up_once_before_one_comes_up_again() -> None:
    found = list(islice(rounds(0), 40))
    for kinds, known in [
        ([job.kind for one in found for job in one.jobs], JOBS),
        # In a round they are sorted by when they are due; each draw is as long as the list of kinds.
        (sorted(fault.kind for one in found for fault in one.faults), FAULTS),
    ]:
        counts = [kinds.count(kind) for kind in known]
        assert max(counts) - min(counts) <= 1
        assert set(kinds) == set(known)


def test_a_round_can_be_run() -> None:
    for found in islice(rounds(3), 200):
        assert found.workers >= 2  # one of them may be killed, and its work goes on
        assert found.jobs
        assert found.faults
        due = [fault.after for fault in found.faults]
        assert due == sorted(due)
        assert due[0] >= 0
        assert due[-1] < sum(JOBS[job.kind] for job in found.jobs)
        assert all(0 < fault.seconds <= LONGEST and 0 < fault.share <= 1 for fault in found.faults)
        Settings.load(**found.settings)


def test_only_the_kinds_asked_for() -> None:
    for found in islice(rounds(0, ["array"], ["kill", "flip"]), 20):
        assert {job.kind for job in found.jobs} == {"array"}
        assert {fault.kind for fault in found.faults} <= {"kill", "flip"}


def test_a_plan_that_was_written_down_is_the_same(tmp_path: Path) -> None:
    found = list(islice(rounds(5), 10))
    assert load(dump(found)) == found
    write(found, tmp_path / "plan.json")
    assert read(tmp_path / "plan.json") == found


def test_faults_of_an_edited_plan_are_sorted() -> None:
    document = json.loads(dump(list(islice(rounds(5), 1))))
    document["rounds"][0]["faults"].reverse()
    (found,) = load(json.dumps(document))
    assert found == next(rounds(5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop("jobs"), "jobs"),
        (lambda one: one.update(color="red"), "no such field: color"),
        (lambda one: one["jobs"][0].update(kind="riddle"), "'riddle' is unknown; there are: array"),
        (lambda one: one["faults"][0].update(kind="rust"), "'rust' is unknown; there are: kill"),
        (lambda one: one["faults"][0].update(color="red"), "color"),
        (lambda one: one["faults"][0].pop("after"), "after"),
    ],
)
def test_what_is_no_plan(change, message: str) -> None:  # type: ignore[no-untyped-def]
    document = json.loads(dump([next(rounds(0))]))
    change(document["rounds"][0])
    with pytest.raises(ConfigError, match=f"plan.json: is no plan.*{message}"):
        load(json.dumps(document), "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0, "rounds": []}'])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^plan\.json: is no"):
        load(text, "plan.json")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--replay .*: cannot be read"):
        read(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"^--plan .*: cannot be written"):
        write([], tmp_path / "absent" / "plan")


def test_names() -> None:
    assert choose(None, FAULTS, "--faults") == list(FAULTS)
    assert choose("flip, kill,flip", FAULTS, "--faults") == ["flip", "kill"]
    with pytest.raises(ConfigError, match="--faults: 'rust' is unknown; choose among kill, stop"):
        choose("kill,rust", FAULTS, "--faults")
    with pytest.raises(ConfigError, match="--jobs: none given; choose among array"):
        choose(" ,", JOBS, "--jobs")


def test_every_kind_is_known_to_who_does_it() -> None:
    assert list(jobs.RUNS) == list(JOBS)
    done = {name.removeprefix("_do_").replace("_", "-") for name in vars(faults.Injector) if name.startswith("_do_")}
    assert done | {"add"} == set(FAULTS)


def test_a_round_is_described_in_full() -> None:
    for found in islice(rounds(1), 10):
        text = "\n".join(describe(found))
        assert all(f"{job.kind} {job.seed}" in text for job in found.jobs)
        assert all(f"after {fault.after} tasks: {fault.kind}, worker {fault.worker}" in text for fault in found.faults)
        assert all(f"{name}={value}" in text for name, value in found.settings.items())


def test_the_state_of_a_task_that_waits_for_nothing_is_told() -> None:
    task = SimpleNamespace(state="erred", processing_on=None, waiting_on=None, dependencies=())
    assert list(_scheduler(SimpleNamespace(workers={}, tasks={"x": task}))) == ["task 'x': erred, waits for []"]
