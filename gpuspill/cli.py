"""The ``gpuspill`` command.

Everything heavy is imported by the command that needs it: ``gpuspill --version`` must not wait for
dask, and a worker process started by a benchmark imports this module again.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from gpuspill.bench.commands import bench, console, progress
from gpuspill.errors import GpuspillError

__all__ = ["gpuspill", "main"]


def _version() -> str:
    try:
        return metadata.version("gpuspill")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


class _Failure(click.ClickException):
    """What ends a command with one line."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"gpuspill: {self.message}", err=True)


class _Group(click.Group):
    """Says in one line what gpuspill raises on purpose, also where ``dask`` runs the command."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GpuspillError as error:
            raise _Failure(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="gpuspill")
def gpuspill() -> None:
    """Spilling for Dask workers that never stops the worker: see it work, and measure it."""


gpuspill.add_command(bench)


@gpuspill.command(short_help="Run real jobs on more data than memory.")
@click.option(
    "--arms",
    default="gpuspill,stock",
    show_default=True,
    help="What to run, in this order: stock, gpuspill, nospill.",
)
@click.option("--jobs", default="flights,array", show_default=True, help="Which jobs: flights, array.")
@click.option("--quick", is_flag=True, help="Use very little data: to see that it works, not how well.")
def demo(arms: str, jobs: str, quick: bool) -> None:
    """Run real jobs on a cluster smaller than their data, beside stock spilling."""
    from gpuspill.demo.run import FULL, QUICK, demonstrate

    outcomes = demonstrate(console(), QUICK if quick else FULL, arms, jobs)
    # What stock spilling does not manage in the time it is given is a finding, not a failure of
    # this command.
    if any(outcome.wrong or (outcome.error and outcome.arm != "stock") for outcome in outcomes):
        raise SystemExit(1)


@gpuspill.command(short_help="Record a run, and write one page about it.")
@click.argument("scheduler")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="gpuspill-report.html",
    show_default=True,
    help="The page to write.",
)
@click.option("--seconds", type=click.FloatRange(min=0.1), help="Stop after so long.  [default: on Ctrl-C]")
@click.option("--interval", type=click.FloatRange(min=0.1), default=0.5, show_default=True, help="Between two samples.")
def report(scheduler: str, output: Path, seconds: float | None, interval: float) -> None:
    """Record what the workers of SCHEDULER spill, and write one page about it.

    SCHEDULER is an address such as tcp://host:8786, or the path of a scheduler file.
    """
    from threading import Event

    from gpuspill.distributed.observing import report as recording
    from gpuspill.distributed.settings_report import connect

    with connect(scheduler) as client:
        try:
            with recording(output, client, interval=interval):
                progress(f"recording {scheduler}" + ("" if seconds else "; Ctrl-C ends it"))
                with suppress(KeyboardInterrupt):
                    Event().wait(seconds)
        except OSError as error:
            raise GpuspillError(f"cannot write {output}: {error}") from error
    progress(f"wrote {output}")


@gpuspill.command(short_help="Show live what the workers do.")
@click.argument("scheduler")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Between two looks.")
@click.option("--once", is_flag=True, help="Print the numbers once, and what moves per second from two looks.")
def top(scheduler: str, interval: float, once: bool) -> None:
    """Show live what the workers of SCHEDULER hold in memory, spill and wait for; Ctrl-C ends it.

    SCHEDULER is an address such as tcp://host:8786, or the path of a scheduler file.
    """
    import time

    from rich.live import Live

    from gpuspill.distributed.observing import take_sample
    from gpuspill.distributed.settings_report import connect
    from gpuspill.monitoring.samples import ClusterSample, remembering
    from gpuspill.monitoring.table import render

    screen = console()

    def rows() -> int | None:  # what a window has room for, beside heading and sums; its size may change
        return max(1, screen.height - 10) if screen.is_terminal else None

    with connect(scheduler) as client:
        now = client.sync(take_sample, client)
        if once:
            time.sleep(interval)
            screen.print(render(now, client.sync(take_sample, client), scheduler))
            return
        before: ClusterSample | None = None
        try:
            with (
                suppress(KeyboardInterrupt),
                Live(render(None, now, scheduler, rows()), console=screen, screen=screen.is_terminal) as live,
            ):
                while True:
                    time.sleep(interval)
                    before, now = remembering(before, now), client.sync(take_sample, client)
                    live.update(render(before, now, scheduler, rows()), refresh=True)
        except OSError as error:
            raise GpuspillError(f"{scheduler}: the scheduler has gone: {error}") from error


@gpuspill.command(short_help="Print the settings, and their origins.")
@click.argument("scheduler", required=False)
def config(scheduler: str | None) -> None:
    """Print the settings in force here, or on the workers of SCHEDULER, and where each comes from.

    SCHEDULER is an address such as tcp://host:8786, or the path of a scheduler file. Workers that
    differ in more than their own directories are shown one after another.
    """
    from rich.table import Table

    from gpuspill.distributed.settings_report import here, of_cluster, text

    if scheduler is not None and sys.stderr.isatty():
        # No scheduler may be there, which takes as long to find out as
        # distributed.comm.timeouts.connect says.
        progress(f"asking the workers of {scheduler}")
    for title, rows in here() if scheduler is None else of_cluster(scheduler):
        if not rows:
            console().print(title, markup=False, highlight=False)
            continue
        table = Table(title=title, title_justify="left")
        for heading in ("option", "value", "in force", "from"):
            table.add_column(heading, overflow="fold")
        for name, row in rows.items():
            given, found = text(name, row["value"]), text(name, row["in_force"])
            table.add_row(name.replace("_", "-"), given, found, str(row["origin"]))
        console().print(table, markup=False)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; exits with 0, with 1 if a result is wrong, with 2 if it was used wrongly.

    Parameters
    ----------
    arguments
        The words after ``gpuspill``; those of the process by default.

    Raises
    ------
    SystemExit
        Always.
    """
    gpuspill.main(args=arguments, prog_name="gpuspill")


if __name__ == "__main__":
    main()
