# mypy: disallow-untyped-calls=False
"""Shows a running cluster: what is in which tier, what moves, and the loops' stalls.

In a terminal the picture is redrawn several times a second; elsewhere (a log file, CI) a line is
printed every few seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from dask.utils import format_bytes
from distributed import Client, Scheduler
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuspill.bench.watch import HEARTBEAT

__all__ = ["ClusterView", "WorkerState", "draw", "line", "observe"]

_BAR = 20
_WINDOW = 2.0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What is known of one worker, as of its last heartbeat.

    Parameters
    ----------
    name, status
        As the scheduler has them.
    silent
        Seconds since the worker was last heard of: a worker whose event loop stands still sends no
        heartbeats.
    process
        Resident memory, bytes.
    host, disk
        Bytes of values in memory, and of records on disk.
    written, read
        Bytes spilled and restored so far.
    longest_stall
        Of its event loop so far, seconds.
    """

    name: str
    status: str
    silent: float
    process: int
    host: int
    disk: int
    written: int
    read: int
    longest_stall: float


def observe(dask_scheduler: Scheduler) -> list[WorkerState]:
    """Collect what heartbeats told; runs on the scheduler (``client.run_on_scheduler``)."""
    states = []
    for worker in dask_scheduler.workers.values():
        bench = cast("Mapping[str, Any]", worker.metrics.get(HEARTBEAT) or {})
        states.append(
            WorkerState(
                name=str(worker.name),
                status=worker.status.name,
                silent=max(0.0, time.time() - worker.last_seen),
                process=int(worker.metrics.get("memory", 0)),
                host=int(bench.get("host_bytes", 0)),
                disk=int(bench.get("disk_bytes", 0)),
                written=int(bench.get("written_bytes", 0)),
                read=int(bench.get("read_bytes", 0)),
                longest_stall=float(bench.get("longest_stall", 0.0)),
            )
        )
    return states


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second, over the last seconds, all workers together."""

    written: float = 0.0
    read: float = 0.0


def draw(title: str, states: Sequence[WorkerState], limit: int, rates: Rates) -> RenderableType:
    """Draw the cluster.

    Parameters
    ----------
    title
        Stands above.
    states
        The workers.
    limit
        Memory limit of a worker, bytes.
    rates
        Shown below.
    """
    table = Table(box=None, padding=(0, 1), expand=False)
    for heading in ("worker", "memory", "", "on disk", "spilled", "restored", "longest stall", ""):
        table.add_column(heading, justify="left" if heading in ("worker", "") else "right", no_wrap=True)
    for state in states:
        late = state.silent > 1.5
        table.add_row(
            state.name,
            _bar(state.host, state.process, limit),
            f"{format_bytes(state.process)} of {format_bytes(limit)}",
            format_bytes(state.disk),
            format_bytes(state.written),
            format_bytes(state.read),
            f"{state.longest_stall * 1e3:.0f} ms",
            Text(f"silent for {state.silent:.1f} s", style="bold red")
            if late
            else Text(state.status, style="yellow" if state.status == "paused" else "green"),
        )
    below = f"spilling {format_bytes(int(rates.written))}/s   restoring {format_bytes(int(rates.read))}/s"
    return Group(Text(title, style="bold"), table, Text(below, style="dim"))


def _bar(host: int, process: int, limit: int) -> Text:
    """Draw memory against its limit: values in memory, then the rest of the process."""
    cells = [round(_BAR * min(1.0, size / limit)) for size in (host, process)]
    values = min(cells)
    return Text.assemble(
        ("█" * values, "cyan"),
        ("▒" * (cells[1] - values), "blue"),
        ("·" * (_BAR - max(cells[1], values)), "dim"),
    )


def line(title: str, states: Sequence[WorkerState], rates: Rates) -> str:
    """Say the same in one line."""
    return (
        f"{title}: process {format_bytes(sum(state.process for state in states))}, "
        f"in memory {format_bytes(sum(state.host for state in states))}, "
        f"on disk {format_bytes(sum(state.disk for state in states))}, "
        f"spilled {format_bytes(sum(state.written for state in states))} "
        f"({format_bytes(int(rates.written))}/s), "
        f"restored {format_bytes(sum(state.read for state in states))} ({format_bytes(int(rates.read))}/s), "
        f"longest stall {max((state.longest_stall for state in states), default=0.0) * 1e3:.0f} ms"
    )


class _Meter:
    """Turns totals into rates over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def update(self, now: float, states: Sequence[WorkerState]) -> Rates:
        self._seen.append((now, sum(s.written for s in states), sum(s.read for s in states)))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        then, written, read = self._seen[0]
        elapsed = now - then
        if elapsed <= 0:
            return Rates()
        # A worker that was started again counts from zero.
        return Rates(
            max(0.0, (self._seen[-1][1] - written) / elapsed),
            max(0.0, (self._seen[-1][2] - read) / elapsed),
        )


class ClusterView:
    """Watches a cluster from a thread of its own, until the ``with`` block ends.

    Parameters
    ----------
    client
        Of the cluster; its workers publish their counters
        (:class:`~gpuspill.bench.watch.WatchPlugin`).
    console
        Where to show it.
    title
        What runs.
    limit
        Memory limit of a worker, bytes.
    interval
        Seconds between two looks; in a terminal also between two pictures.
    every
        Seconds between two lines, where the console is no terminal.

    Attributes
    ----------
    states
        The workers when last looked at.
    """

    def __init__(
        self,
        client: Client,
        console: Console,
        title: str,
        limit: int,
        interval: float = 0.25,
        every: float = 5.0,
    ) -> None:
        self._client = client
        self._console = console
        self._title = title
        self._limit = limit
        self._interval = interval
        self._every = every
        self._step = ""
        self.states: list[WorkerState] = []
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuspill-demo-view", daemon=True)
        self._meter = _Meter()

    def step(self, text: str) -> None:
        """Show what is being done now. From any thread."""
        self._step = text

    def __enter__(self) -> ClusterView:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> tuple[str, list[WorkerState], Rates]:
        states = self.states = cast("list[WorkerState]", self._client.run_on_scheduler(observe))
        now = time.monotonic()
        title = f"{self._title} | {now - self._started:.0f} s | {self._step}"
        return title, states, self._meter.update(now, states)

    def _run(self) -> None:
        if self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                self._repeat(self._interval, lambda *seen: self._show(live, *seen))
        else:
            self._repeat(self._every, lambda *seen: self._console.print(line(*seen), highlight=False, soft_wrap=True))

    def _show(self, live: Live, title: str, states: Sequence[WorkerState], rates: Rates) -> None:
        live.update(draw(title, states, self._limit, rates), refresh=True)

    def _repeat(self, interval: float, show: Callable[[str, Sequence[WorkerState], Rates], None]) -> None:
        while not self._stop.wait(interval):
            try:
                seen = self._look()
            except Exception:
                # A view must not end the job it looks at: the job itself will say what is wrong.
                continue
            show(*seen)
