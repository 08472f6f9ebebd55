"""Chaos runs: that harm is done, that what is wrong is found, and that gpuspill stands it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from distributed import Client

from gpuspill.bench.arms import ARMS, Arm
from gpuspill.bench.chaos import cluster as chaos_cluster
from gpuspill.bench.chaos import jobs, remains, trouble
from gpuspill.bench.chaos.cluster import Outcome, RoundResult, bounded, run_round
from gpuspill.bench.chaos.faults import _being_written, _mapped, _standing_still
from gpuspill.bench.chaos.jobs import Data, WrongAnswer, block, expect, expect_block, is_told_loss, total
from gpuspill.bench.chaos.plan import Fault, JobSpec, Round, read, rounds
from gpuspill.bench.chaos.run import chaos, is_fault_of_ours
from gpuspill.cli import gpuspill as command
from gpuspill.errors import DataLostError, StorageError, StorageFull
from gpuspill.storage.files import FileStore
from gpuspill.storage.wrappers import FaultyStore

MIB = 2**20


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("tcp://127.0.0.1:1"), jobs.Refused),
        (ConnectionError("reset"), jobs.Refused),
        (TimeoutError(), jobs.Refused),
        (KeyError("key"), KeyError),
        (ValueError("tcp://127.0.0.1:1"), ValueError),
    ],
)
def test_data_that_a_cluster_did_not_take_in(error: Exception, expected: type[Exception]) -> None:
    """distributed's scheduler looks for the worker that took the data, which may have left."""

    class Scattering:
        def scatter(self, *args: object, **options: object) -> None:
            raise error

    with pytest.raises(expected):
        jobs.run_scattered(cast(Client, Scattering()), Data(1, 8))


# -- answers ---------------------------------------------------------------------------------------


def test_no_two_blocks_are_alike_anywhere() -> None:
    blocks = [block(Data(seed, 800), number) for seed in (0, 1, 99) for number in range(30)]
    for place in (0, 1, 99):
        assert len({int(one[place]) for one in blocks}) == len(blocks)


def test_sums_are_exact() -> None:
    blocks = [block(Data(5, 80_000), number) for number in range(3)]
    assert total(*blocks) == sum(int(x) for one in blocks for x in one) % 2**64


def test_a_wrong_answer_is_noticed() -> None:
    expect(1, 1, "x")
    with pytest.raises(WrongAnswer, match="the sum: 1, not 2"):
        expect(1, 2, "the sum")
    wanted = block(Data(0, 80), 0)
    expect_block(wanted.copy(), wanted, "x")
    changed = wanted.copy()
    changed[7] ^= np.uint64(1)
    for wrong, message in [
        (changed, "element 7 is another one"),
        (wanted[1:], "not an array like"),
        (wanted.astype(float), "not an array like"),
        (wanted.tolist(), "a list"),
        (None, "a NoneType"),
    ]:
        with pytest.raises(WrongAnswer, match=message):
            expect_block(wrong, wanted, "x")


def test_only_what_nothing_can_compute_may_be_lost() -> None:
    lost = DataLostError("x", "key")
    assert {kind for kind in jobs.RUNS if is_told_loss(kind, lost)} == {"scattered", "actor", "parked"}
    assert is_told_loss("actor", RuntimeError("Worker holding Actor was lost"))
    assert not any(is_told_loss(kind, error) for kind in jobs.RUNS for error in (WrongAnswer("x"), OSError("x")))


# -- trouble with files ----------------------------------------------------------------------------


def test_a_store_in_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(trouble.time, "sleep", slept.append)
    tell = lambda *kinds: trouble.make_trouble(tmp_path, os.getpid(), *kinds)  # noqa: E731
    fault = trouble.partial(trouble._trouble, tmp_path)
    with FaultyStore(FileStore(tmp_path / "store"), fault) as store:
        receipt = store.write(b"header", [b"frame"])
        tell("unreadable")
        with pytest.raises(StorageError, match="input/output"):
            store.read(receipt)
        store.write(b"header", [b"frame"])
        tell("refuse", "slow")
        with pytest.raises(StorageFull):
            store.write(b"header", [b"frame"])
        assert slept == [trouble.SLOW]
        assert store.read(receipt)[0] == b"header"
        trouble.make_trouble(tmp_path, os.getpid() + 1, "unreadable", "refuse")
        tell()
        store.write(b"header", [b"frame"])
        assert len(slept) == 2


def test_files_of_stock_in_trouble(tmp_path: Path) -> None:
    files = trouble.TroubledFiles({"x": b"1"}, tmp_path)
    trouble.make_trouble(tmp_path, os.getpid(), "unreadable")
    with pytest.raises(OSError, match="input/output"):
        files["x"]
    files["y"] = b"2"
    trouble.make_trouble(tmp_path, os.getpid(), "refuse")
    with pytest.raises(OSError, match="no space"):
        files["z"] = b"3"
    assert files["y"] == b"2"
    del files["y"]
    assert set(files) == {"x"}


# -- what is left ----------------------------------------------------------------------------------


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process that has said that it is ready; it ends with its input."""
    with subprocess.Popen(
        [sys.executable, "-c", program + "\nprint(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_what_is_left_is_found(tmp_path: Path) -> None:
    before = remains.look()
    assert remains.remains(before, [tmp_path, tmp_path / "absent"], 0) == {}
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "x.dirlock").touch()
    assert remains.remains(before, [tmp_path], 0) == {}
    (tmp_path / "worker" / "1").touch()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="gpuspill-test", daemon=True)
    thread.start()
    with child("") as process:
        found = remains.remains(before, [tmp_path], 0)
        assert found["files"] == [str(tmp_path / "worker" / "1")]
        assert found["threads"] == ["gpuspill-test"]
        assert [text.split(":")[0] for text in found["processes"]] == [str(process.pid)]
    end.set()
    thread.join()


def test_what_a_killed_store_left_is_swept_as_the_next_worker_would(tmp_path: Path) -> None:
    before = remains.look()
    with child(f"from gpuspill.storage.files import FileStore; s = FileStore({str(tmp_path)!r}); s.write(b'', [b'x'])"):
        assert list(remains.remains(before, [tmp_path], 0)) == ["processes", "files"]
    assert remains.remains(before, [tmp_path], 10) == {}


def test_files_of_a_process(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    with child(
        f"open({str(own / 'open')!r}, 'w'); f = open({str(own / 'gone')!r}, 'w'); import os; os.unlink(f.name)"
    ) as process:
        for name in (f"gpuspill-{process.pid}-x", f"gpuspill-{process.pid}1-x"):
            (shared / name).mkdir(parents=True)
            (shared / name / "1").touch()
        found = remains.files_of(process.pid, [own, shared])
        assert found[:2] == [str(own / "open"), str(shared / f"gpuspill-{process.pid}-x" / "1")]
        assert [os.readlink(path) for path in found[2:]] == [f"{own / 'gone'} (deleted)"]
    assert remains.files_of(process.pid, [own])[1:] == []
    shutil.rmtree(shared)


def test_files_that_are_being_written(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("read", "written", "both", "closed")]
    for path in paths:
        path.touch()
    code = "; ".join(
        f"f{mode[0]} = open({str(path)!r}, {mode!r})" for path, mode in zip(paths, ("r", "ab", "br+"), strict=False)
    )
    with child(code) as process:
        inodes = {path.name: path.stat().st_ino for path in paths}
        assert _being_written(process.pid) & set(inodes.values()) == {inodes["written"], inodes["both"]}


def test_a_process_stands_still_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(4096))
    with child(f"import mmap; f = open({str(path)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096)") as process:
        status = psutil.Process(process.pid).status
        with _standing_still(process.pid):
            assert status() == psutil.STATUS_STOPPED
            assert os.stat(path).st_ino in _mapped(process.pid)
            with _standing_still(process.pid):
                pass
            assert status() == psutil.STATUS_STOPPED
        assert status() != psutil.STATUS_STOPPED
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(psutil.NoSuchProcess), _standing_still(process.pid):
            pass


# -- counting --------------------------------------------------------------------------------------


def outcome(verdict: str) -> Outcome:
    return Outcome(JobSpec("array", 1), verdict, 1.0, "because")


def test_arms_do_the_same_rounds_until_the_time_is_up(tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def run(arm: Arm, plan: Round, patience: float, dumps: Path) -> RoundResult:
        ran.append((arm.name, plan.number))
        return RoundResult([outcome("right"), outcome("lost")], seconds=2.0)

    lines: list[str] = []
    result, done = chaos(
        rounds(1),
        "gpuspill,stock",
        1.0,
        patience=9.0,
        dumps=tmp_path,
        parameters={"seed": 1},
        progress=lines.append,
        run=run,
        clock=lambda: 20.0 * len(ran),
    )
    assert ran == [(arm, number) for number in range(3) for arm in ("gpuspill", "stock")]
    assert done == list(islice(rounds(1), 3))
    assert [(sample.arm, sample.figure("rounds"), sample.figure("right")) for sample in result.samples] == [
        ("gpuspill", 3, 3),
        ("stock", 3, 3),
    ]
    assert result.correct
    assert not is_fault_of_ours(result)
    assert sum("1 right, 1 lost" in line for line in lines) == 6


@pytest.mark.parametrize(
    "bad",
    [
        RoundResult([outcome("wrong")]),
        RoundResult([outcome("failed")]),
        RoundResult([outcome("hung")], hung=1),
        RoundResult(hung=1, problems=["the cluster does not close"]),
        RoundResult(problems=["left behind: 1 files"]),
    ],
)
@pytest.mark.parametrize("arm", ["gpuspill", "stock"])
def test_what_goes_wrong_fails_the_run_unless_it_is_stocks(bad: RoundResult, arm: str, tmp_path: Path) -> None:
    def run(found: Arm, *args: object) -> RoundResult:
        return bad if found.name == arm else RoundResult([outcome("right")])

    result, _ = chaos(islice(rounds(1), 1), "stock,gpuspill", 1.0, patience=9.0, dumps=tmp_path, parameters={}, run=run)
    assert [sample.correct for sample in result.samples] == [arm != "stock", arm != "gpuspill"]
    assert is_fault_of_ours(result) == (arm == "gpuspill")
    assert all(note.startswith(f"{arm}, round 0: ") for note in result.notes)
    assert result.notes


def test_an_answer_within_a_time() -> None:
    assert bounded(lambda: 5, 10) == 5
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 10)
    end = threading.Event()
    with pytest.raises(TimeoutError):
        bounded(end.wait, 0.01)
    end.set()


# -- clusters --------------------------------------------------------------------------------------

#: Each job once.
ALL_JOBS = [JobSpec(kind, 11) for kind in jobs.RUNS]


@pytest.mark.cluster
@pytest.mark.slow
def test_all_jobs_without_a_fault(tmp_path: Path) -> None:
    plan = Round(0, workers=2, threads=2, limit=4 * MIB, at_once=2, jobs=ALL_JOBS)
    result = run_round(ARMS["gpuspill"], plan, 120.0, tmp_path)
    assert [(one.job.kind, one.verdict) for one in result.outcomes if one.verdict != "right"] == []
    assert len(result.outcomes) == len(ALL_JOBS)
    assert result.problems == []


@pytest.mark.cluster
def test_a_job_that_hangs_ends_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def hang(client: Client, data: Data) -> None:
        client.submit(pow, 2, 10).result()
        end.wait()

    monkeypatch.setitem(jobs.RUNS, "array", hang)  # type: ignore[arg-type]
    plan = Round(3, workers=1, threads=1, limit=MIB, at_once=1, jobs=[JobSpec("array", 1), JobSpec("gathered", 1)])
    result = run_round(ARMS["gpuspill"], plan, 2.0, tmp_path)
    end.set()
    assert [one.verdict for one in result.outcomes] == ["hung"]
    assert result.hung == 1
    (problem,) = result.problems
    (dump,) = tmp_path.iterdir()
    assert str(dump) in problem
    text = dump.read_text()
    assert "worker tcp://" in text
    assert "Current thread" in text.split("this process")[0]  # the worker's stacks
    assert "in hang" in text.split("this process")[1]


@pytest.mark.cluster
def test_a_worker_that_dies_by_itself_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(client: Client, data: Data) -> None:
        pids = client.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        client.submit(pow, 2, 10).result()

    monkeypatch.setitem(jobs.RUNS, "array", die)  # type: ignore[arg-type]
    plan = Round(0, workers=1, threads=1, limit=MIB, at_once=1, jobs=[JobSpec("array", 1)])
    result = run_round(ARMS["gpuspill"], plan, 60.0, tmp_path)
    assert [one.verdict for one in result.outcomes] == ["right"]
    assert [problem.split(":")[0] for problem in result.problems] == ["died by itself"]


@pytest.mark.cluster
def test_what_a_worker_keeps_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def keep(client: Client, data: Data) -> None:
        kept.append(client.submit(block, data, 1))
        kept[0].result()

    monkeypatch.setitem(jobs.RUNS, "array", keep)  # type: ignore[arg-type]
    monkeypatch.setattr(chaos_cluster, "_GRACE", 1.0)
    plan = Round(0, workers=1, threads=1, limit=MIB, at_once=1, jobs=[JobSpec("array", 1)])
    result = run_round(ARMS["gpuspill"], plan, 60.0, tmp_path)
    (problem,) = result.problems
    assert "is not at rest: {'keys': 1" in problem
    assert result.left["in workers"] == 1


@pytest.mark.fault(
    "worker stopped, restarted, retired", on=("host→disk", "disk→host", "send", "receive"), outcome="every answer right"
)
@pytest.mark.fault(
    "process killed", on=("host→disk", "send", "receive", "close"), outcome="every answer right, nothing left"
)
@pytest.mark.cluster
@pytest.mark.slow
def test_every_fault_is_injected_and_stood(tmp_path: Path) -> None:
    """Files are there to be damaged once an array is persisted."""
    kinds = ["slow", "flip", "stop", "truncate", "refuse", "remove", "full", "add", "remove-directory", "kill"]
    kinds += ["unreadable", "restart", "retire"]
    plan = Round(
        0,
        workers=2,
        threads=2,
        limit=4 * MIB,
        at_once=1,
        shared_directory=True,
        jobs=[JobSpec("persisted", seed) for seed in range(8)],
        faults=[Fault(30 + 60 * place, kind, place, 0.5) for place, kind in enumerate(kinds)],
    )
    result = run_round(ARMS["gpuspill"], plan, 120.0, tmp_path)
    assert [(one.verdict, one.detail) for one in result.outcomes if one.verdict != "right"] == []
    assert result.problems == []
    # One that was just killed and is not back yet cannot be restarted.
    assert all(line.startswith("restart: ") for line in result.skipped)
    assert set(result.injected) == set(kinds)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_chaos(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    arguments = ["bench", "chaos", "--minutes", "1", "--seed", "0", "--plan", str(plan), "--dumps", str(tmp_path)]
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code == 0, found.output
    assert "answers right" in found.output
    assert read(plan) == list(islice(rounds(0), len(read(plan))))
