# mypy: disallow-untyped-calls=False
"""One round: a cluster, its jobs, the harm done to it, and what was left."""

from __future__ import annotations

import gc
import logging
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import dask
import psutil
from distributed import Client, LocalCluster

from gpuspill.bench.arms import Arm, ClusterShape
from gpuspill.bench.chaos.faults import Finished, Injector, running
from gpuspill.bench.chaos.jobs import RUNS, Data, Refused, WrongAnswer, is_told_loss
from gpuspill.bench.chaos.plan import JobSpec, Round
from gpuspill.bench.chaos.remains import look, remains
from gpuspill.bench.chaos.state import HELD, describe, examine
from gpuspill.bench.chaos.trouble import Troubled
from gpuspill.errors import cut_loose

__all__ = ["Outcome", "RoundResult", "run_round"]

T = TypeVar("T")

MEMORY = 2**30
"""Memory limit of a worker: its values may take a small part of it, the process takes the rest."""

_GRACE = 40.0
"""Seconds for a cluster to come to rest, or to close.

More than the 30 for which distributed tries to connect to a worker that has gone
(``distributed.comm.timeouts``): what is promised to the transfer stays promised meanwhile.
"""

_BLOCKS_IN_MEMORY = 4

_ADMISSIONS = 3
"""More admissions than that for a task mean that it does not get on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one job went.

    Parameters
    ----------
    job
        Which.
    verdict
        ``right``; ``wrong``; ``lost``: an error says that something is lost that cannot be computed
        again; ``refused``: the cluster did not take the data; ``failed``: any other error;
        ``hung``: no end within the patience.
    seconds
        How long it took.
    detail
        The error, or what is wrong.
    """

    job: JobSpec
    verdict: str
    seconds: float
    detail: str = ""


@dataclass(slots=True)
class RoundResult:
    """What a round came to.

    Parameters
    ----------
    outcomes
        Of the jobs that were begun.
    injected
        Faults by kind, of those that hit something.
    problems
        What must not be, beside wrong answers: lines of text.
    skipped
        Faults that could not be injected, and why.
    left
        How many things were left, by kind.
    hung
        Jobs, faults and closings without an end.
    overruns
        Admissions beyond the limit, on the workers that were there at the end.
    seconds
        From the start of the cluster to the end.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    overruns: int = 0
    seconds: float = 0.0


def run_round(arm: Arm, plan: Round, patience: float, dumps: Path) -> RoundResult:
    """Run jobs on a new cluster that comes to harm, and look what is left.

    Parameters
    ----------
    arm
        Which store.
    plan
        What happens.
    patience
        Seconds after which a job that has not ended counts as hung. The round ends then.
    dumps
        Where the state of a cluster that hangs is written to.

    Notes
    -----
    Blocks. Does not raise for what an arm does, and ends the processes that it has started whatever
    happens.
    """
    started = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    result = RoundResult()
    before = look()
    try:
        with dask.config.set({**arm.config, **_settings(plan, directory)}):
            _run(arm, plan, patience, directory, dumps, result)
        for kind, items in remains(before, [directory / "workers", directory / "shared"], _GRACE).items():
            result.left[kind] += len(items)
            result.problems.append(f"left behind: {len(items)} {kind}: {', '.join(items[:5])}")
    finally:
        _kill_all(before.processes)
        shutil.rmtree(directory, ignore_errors=True)
    result.seconds = time.monotonic() - started
    return result


def _settings(plan: Round, directory: Path) -> dict[str, object]:
    settings: dict[str, object] = {
        # Both stores take their limit from it.
        "distributed.worker.memory.target": plan.limit / MEMORY,
        # A task is not to blame for the deaths of its workers.
        "distributed.scheduler.allowed-failures": 1000,
        # Shuffled by tasks: distributed's own shuffle keeps its data outside of any store.
        "dataframe.shuffle.method": "tasks",
    }
    if plan.shared_directory:
        settings["gpuspill.spill-directory"] = str(directory / "shared")
    return settings | {f"gpuspill.{name.replace('_', '-')}": value for name, value in plan.settings.items()}


def _run(arm: Arm, plan: Round, patience: float, directory: Path, dumps: Path, result: RoundResult) -> None:
    shape = ClusterShape(plan.workers, plan.threads, MEMORY, directory=str(directory / "workers"))
    for name in ("notes", "workers", "shared"):
        (directory / name).mkdir()
    # Closed below, each within a time: a cluster that was done harm may not close at all.
    cluster = LocalCluster(**arm.cluster_arguments(shape), silence_logs=logging.CRITICAL)
    client = Client(cluster)
    injector = None
    try:
        client.register_plugin(Troubled(directory / "notes"))
        finished = Finished()
        cast("Any", cluster.scheduler).add_plugin(finished)
        shared = directory / "shared" if plan.shared_directory else None
        injector = Injector(cluster, client, plan.faults, finished, directory / "notes", shared)
        jobs = _Jobs(client, plan, patience, result)
        jobs.join()
        if result.hung:
            path = dumps / f"chaos-{os.getpid()}-{arm.name}-round-{plan.number}.txt"
            path.write_text(describe(cluster, directory / "notes"))
            result.problems.append(f"the state of the cluster that hangs is in {path}")
        injector.finish()
        if not result.hung:
            _examine(client, result)
            if result.overruns > _ADMISSIONS * finished.count:
                result.problems.append(f"{result.overruns} admissions beyond the limit for {finished.count} tasks")
    finally:
        if injector is not None:
            _collect(injector, result)
        _close(client, cluster, result)


def _collect(injector: Injector, result: RoundResult) -> None:
    injector.finish()
    result.injected += injector.injected
    result.skipped += injector.failed
    result.hung += len(injector.hung)
    result.problems += [f"did not end: {kind}" for kind in injector.hung]
    result.problems += [f"died by itself: {one}" for one in injector.died]


def _close(client: Client, cluster: LocalCluster, result: RoundResult) -> None:
    if result.hung:
        for nanny in running(cluster):
            with suppress(ProcessLookupError, TypeError):
                os.kill(cast("int", nanny.pid), signal.SIGKILL)
    for what, close in [("client", client.close), ("cluster", cluster.close)]:
        try:
            bounded(close, 3 * _GRACE)
        except Exception as error:
            result.hung += isinstance(error, TimeoutError)
            result.problems.append(f"closing the {what}: {type(error).__name__}: {error}")


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Return what `work` returns, which runs in a thread of its own.

    Raises
    ------
    TimeoutError
        If it takes longer; the thread goes on.
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="chaos-bounded", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return cast("T", answer)


class _Jobs:
    """Runs the jobs, a few at once, each in a thread, with a deadline."""

    def __init__(self, client: Client, plan: Round, patience: float, result: RoundResult) -> None:
        self._client = client
        self._plan = plan
        self._patience = patience
        self._result = result
        self._left = list(reversed(plan.jobs))
        self._begun: dict[JobSpec, float] = {}
        self._changed = threading.Condition()
        self._closed = False
        for number in range(plan.at_once):
            threading.Thread(target=self._work, name=f"chaos-jobs-{number}", daemon=True).start()

    def join(self) -> None:
        """Wait until all have ended, or one has taken too long: then no further one is begun."""
        with self._changed:
            while self._left or self._begun:
                now = time.monotonic()
                late = {job: now - begun for job, begun in self._begun.items() if now - begun > self._patience}
                if late:
                    self._closed = True
                    for job, seconds in late.items():
                        self._result.outcomes.append(Outcome(job, "hung", seconds))
                    self._result.hung += len(late)
                    return
                self._changed.wait(0.5)

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._closed or not self._left:
                    return
                job = self._left.pop()
                begun = self._begun[job] = time.monotonic()
            verdict, detail = self._run(job)
            with self._changed:
                del self._begun[job]
                if not self._closed:
                    self._result.outcomes.append(Outcome(job, verdict, time.monotonic() - begun, detail))
                self._changed.notify_all()

    def _run(self, job: JobSpec) -> tuple[str, str]:
        try:
            RUNS[job.kind](self._client, Data(job.seed, self._plan.limit // _BLOCKS_IN_MEMORY))
        except WrongAnswer as error:
            return "wrong", str(error)
        except Refused as error:
            return "refused", str(error)
        except BaseException as error:  # also the cancellation of what it waits for
            verdict = "lost" if is_told_loss(job.kind, error) else "failed"
            # The client keeps the error beside a future, and the error keeps the frames that keep
            # the future.
            traceback.clear_frames(error.__traceback__)
            cut_loose(error)
            return verdict, f"{type(error).__name__}: {error}"
        return "right", ""


def _examine(client: Client, result: RoundResult) -> None:
    """Wait until the workers rest; note what they have kept and what does not fit."""
    deadline = time.monotonic() + _GRACE
    refused = any(outcome.verdict == "refused" for outcome in result.outcomes)
    while True:
        gc.collect()  # a job that failed has left futures in the frames of its error
        try:
            found: Mapping[str, Any] = bounded(lambda: client.run(examine, on_error="return"), _GRACE)
        except (TimeoutError, OSError) as error:
            result.hung += 1
            result.problems.append(f"workers do not answer: {error}")
            return
        bad = {address: answer for address, answer in found.items() if isinstance(answer, BaseException) or answer[1]}
        if not bad or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for address, answer in bad.items():
        # Of data that was scattered in part the scheduler knows nothing, and the workers keep it.
        if refused and not isinstance(answer, BaseException) and set(answer[1]) <= HELD:
            continue
        what = answer if isinstance(answer, BaseException) else answer[1]
        result.problems.append(f"worker {address} is not at rest: {what!r:.500}")
        result.left["in workers"] += 1
    result.overruns += sum(answer[0] for address, answer in found.items() if address not in bad)


def _kill_all(spared: frozenset[int]) -> None:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.pid not in spared and "resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
