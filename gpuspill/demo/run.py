# mypy: disallow-untyped-calls=False
"""Runs the jobs of the demonstration on each arm, checks the answers and reports."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dask
from dask.utils import format_bytes
from distributed import Client
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuspill.bench.arms import BASELINE, SMALL_WORKERS, Arm, ClusterShape, open_cluster, parse_arms
from gpuspill.bench.watch import WatchPlugin, WorkerFigures, figures, restart
from gpuspill.demo.arrays import ArrayJob
from gpuspill.demo.flights import FlightsJob
from gpuspill.demo.jobs import Answers, DemoJob, differences
from gpuspill.demo.view import ClusterView, WorkerState
from gpuspill.errors import ConfigError

__all__ = ["FULL", "QUICK", "Outcome", "Size", "demonstrate", "make_jobs"]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the demonstration is.

    Parameters
    ----------
    limit
        Memory limit of each of the two workers, bytes.
    copies, parts, rows
        Of the flights, see :class:`~gpuspill.demo.flights.FlightsJob`.
    blocks, block
        Of the array, see :class:`~gpuspill.demo.arrays.ArrayJob`.
    timeout
        Seconds that one run of one job may take. Stock spilling may not finish at all if the
        shuffle's memory, unknown to it, fills the worker; see :func:`demonstrate`.
    config
        Dask settings in force in all arms.
    """

    limit: int
    copies: int
    parts: int
    rows: int | None
    blocks: int
    block: int
    timeout: float
    config: Mapping[str, object] = field(default_factory=dict)


FULL = Size(
    limit=640 * 2**20,
    copies=25,
    parts=3,
    rows=None,
    blocks=9,
    block=1440,
    timeout=180.0,
    config=SMALL_WORKERS,
)
"""More than a gigabyte of memory, and more data than that."""

QUICK = Size(
    limit=2**30,
    copies=2,
    parts=2,
    rows=20_000,
    blocks=4,
    block=512,
    timeout=120.0,
    # Room for a few megabytes of values, so that even this little has to be spilled.
    config={**SMALL_WORKERS, "distributed.worker.memory.target": 0.003},
)
"""Seconds instead of minutes, to see that everything works."""


PATIENCE = 45.0
"""The other arms get this many seconds for a job, or three times what gpuspill took."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job on one arm.

    Parameters
    ----------
    job, arm
        Names.
    wall
        Seconds; until it failed, if it did.
    figures
        What the workers measured.
    so_far
        What was seen last of the workers, if the run did not end.
    wrong
        What is wrong with the answers.
    error
        Why there are no answers.
    """

    job: str
    arm: str
    wall: float
    figures: Sequence[WorkerFigures] = ()
    so_far: Sequence[WorkerState] = ()
    wrong: Sequence[str] = ()
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether it ended with the right answers."""
        return not self.wrong and not self.error


def make_jobs(names: str, size: Size, directory: Path) -> list[DemoJob]:
    """Make jobs from names separated by commas.

    Raises
    ------
    ConfigError
        If a name is unknown, none is given, or the data package is missing.
    """
    makers: Mapping[str, Callable[[], DemoJob]] = {
        FlightsJob.name: lambda: FlightsJob(directory, size.copies, size.parts, size.rows),
        ArrayJob.name: lambda: ArrayJob(size.blocks, size.block),
    }
    listed = [name.strip() for name in names.split(",") if name.strip()]
    for name in listed:
        if name not in makers:
            raise ConfigError(f"jobs: {name!r} is unknown; choose among {', '.join(makers)}")
    if not listed:
        raise ConfigError(f"jobs: none given; choose among {', '.join(makers)}")
    return [makers[name]() for name in dict.fromkeys(listed)]


def demonstrate(
    console: Console, size: Size = FULL, arms: str = "gpuspill,stock", jobs: str = "flights,array"
) -> list[Outcome]:
    """Run jobs on arms and show it.

    Parameters
    ----------
    console
        Where to show it; redrawn live if it is a terminal.
    size
        How large.
    arms, jobs
        Names, separated by commas.

    Returns
    -------
    list of Outcome
        In the order they ran.

    Raises
    ------
    ConfigError
        If the data package is missing, or an arm or a job unknown.
    """
    chosen = parse_arms(arms)
    started = time.monotonic()
    with dask.config.set(dict(size.config)):
        room = int(size.limit * dask.config.get("distributed.worker.memory.target"))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpuspill-demo-") as directory:
        for job in make_jobs(jobs, size, Path(directory)):
            console.print(
                f"[bold]{job.title}[/]: {format_bytes(job.nbytes)} of data; "
                f"2 workers with room for {format_bytes(room)} of values each",
                highlight=False,
            )
            begun = time.monotonic()
            with console.status("computing the expected answers without a cluster"):
                expected = job.reference()
            console.print(f"  without a cluster: {time.monotonic() - begun:.1f} s", highlight=False)
            patience = size.timeout
            for arm in chosen:
                outcome = _run(job, arm, size, patience, expected, console)
                outcomes.append(outcome)
                if outcome.good and outcome.arm == "gpuspill":
                    patience = min(size.timeout, max(PATIENCE, 3 * outcome.wall))
                console.print(f"  {arm.name}: {_verdict(outcome)} after {outcome.wall:.1f} s", highlight=False)
    console.print(_table(outcomes))
    for outcome in outcomes:
        for wrong in outcome.wrong:
            console.print(f"{outcome.job} on {outcome.arm}: {wrong}", style="bold red", markup=False)
    console.print(f"{time.monotonic() - started:.0f} s in all", style="dim", highlight=False)
    return outcomes


def _run(job: DemoJob, arm: Arm, size: Size, patience: float, expected: Answers, console: Console) -> Outcome:
    shape = ClusterShape(workers=2, threads=1, memory_limit=size.limit)
    with (
        dask.config.set(dict(size.config)),
        # The workers' warnings would be printed into the picture; what they are about is in the
        # table.
        open_cluster(arm, shape, watch=WatchPlugin(heartbeat=True), silence=logging.CRITICAL) as client,
    ):
        client.run(_import_libraries)
        before = restart(client)
        with ClusterView(client, console, f"{job.name} on {arm.name}", size.limit) as view:
            begun = time.monotonic()
            running = _Running(job, client, view)
            running.join(patience)
            wall = time.monotonic() - begun
        if running.is_alive():
            error = f"not finished within {patience:.0f} s, given up"
            outcome = Outcome(job.name, arm.name, wall, so_far=view.states, error=error)
        elif running.error is not None:
            error = f"{type(running.error).__name__}: {running.error}"
            outcome = Outcome(job.name, arm.name, wall, so_far=view.states, error=error)
        else:
            measured = figures(client)
            killed = set(before.values()) != {figure.pid for figure in measured.values()}
            outcome = Outcome(
                job.name,
                arm.name,
                wall,
                list(measured.values()),
                wrong=differences(expected, running.found or {}),
                error="a worker was killed for its memory" if killed else "",
            )
    # Closing the client has ended whatever the job was waiting for.
    running.join(10)
    return outcome


class _Running(threading.Thread):
    """A job in a thread of its own: dask's own waiting, inside of ``set_index``, knows no deadline.

    Started at once. Ends when the job does, or fails because its client was closed.
    """

    def __init__(self, job: DemoJob, client: Client, view: ClusterView) -> None:
        super().__init__(name="gpuspill-demo-job", daemon=True)
        self.found: Answers | None = None
        self.error: BaseException | None = None
        self._job = job
        self._client = client
        self._view = view
        self.start()

    def run(self) -> None:
        """Run the job."""
        try:
            self.found = self._job.run(self._client, self._view.step)
        except BaseException as error:  # also the cancellation of what it waits for
            self.error = error


def _import_libraries() -> None:
    """Import what tasks need, so that no arm's first task has to."""
    import pyarrow.parquet  # noqa: F401


def _verdict(outcome: Outcome) -> str:
    if outcome.error:
        return outcome.error
    return "answers WRONG" if outcome.wrong else "answers correct"


def _table(outcomes: Sequence[Outcome]) -> Table:
    """Lay the outcomes out, each job's arms below each other."""
    table = Table(title="The same jobs, the same memory")
    for heading in (
        "job",
        "spilling",
        "wall time",
        "CPU time",
        "spilled",
        "restored",
        "longest stall",
        "in stalls",
        "answers",
    ):
        table.add_column(heading, justify="left" if heading in ("job", "spilling", "answers") else "right")
    walls = {outcome.job: outcome.wall for outcome in outcomes if outcome.arm == BASELINE and outcome.good}
    for outcome in outcomes:
        ratio = ""
        if outcome.arm != BASELINE and outcome.job in walls and not outcome.error:
            ratio = f" (x {outcome.wall / walls[outcome.job]:.2f})"
        measured = outcome.figures
        cells = [
            "-",
            format_bytes(sum(state.written for state in outcome.so_far)),
            format_bytes(sum(state.read for state in outcome.so_far)),
            f"{max((state.longest_stall for state in outcome.so_far), default=0.0) * 1e3:.0f} ms",
            "-",
        ]
        if measured:
            cells = [
                f"{sum(figure.cpu for figure in measured):.1f} s",
                format_bytes(sum(figure.store.written_bytes for figure in measured)),
                format_bytes(sum(figure.store.read_bytes for figure in measured)),
                f"{max(figure.loop.longest for figure in measured) * 1e3:.0f} ms",
                f"{sum(figure.loop.stalled for figure in measured):.1f} s",
            ]
        style = "green" if outcome.good else "bold red"
        table.add_row(
            outcome.job,
            outcome.arm,
            f"{outcome.wall:.1f} s{ratio}",
            *cells,
            Text(_verdict(outcome).removeprefix("answers "), style=style),
        )
    return table
