"""The statistics of a cluster as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuspill.monitoring import units
from gpuspill.monitoring.samples import ClusterSample, Numbers, combined, fullest, rates

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["render"]

_BAR = 16


def render(before: ClusterSample | None, now: ClusterSample, title: str = "", rows: int | None = None) -> Table:
    """Return a row for each worker, and one for all of them if there are several.

    Parameters
    ----------
    before
        The sample before, for what moves per second; None if there is none yet.
    now
        The newest sample.
    title
        Above the table.
    rows
        How many workers to show at most: those with most in memory and on disk. By default all.
    """
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", expand=False)
    with_device = any(numbers.get("device_limit") or numbers.get("device_nbytes") for numbers in now.workers.values())
    table.add_column("worker", overflow="fold")
    if with_device:
        table.add_column("device")
    for heading in ("host memory", "on disk", "written", "read", "waiting", "waited", "notable"):
        table.add_column(heading, justify="left" if heading in ("host memory", "notable") else "right")
    speeds = {} if before is None else rates(before, now)
    shown = fullest(now.workers, rows)
    for address in shown:
        table.add_row(*_cells(address, now.workers[address], speeds.get(address, {}), with_device))
    if len(shown) < len(now.workers):
        table.caption = f"the {len(shown)} workers with most in memory and on disk"
    if not now.workers:
        table.caption = "no worker has gpuspill attached: client.register_plugin(gpuspill.SpillPlugin()) attaches it"
    if len(now.workers) > 1:
        speed: dict[str, float] = {}
        for numbers in speeds.values():
            for name, number in numbers.items():
                speed[name] = speed.get(name, 0.0) + number
        table.add_section()
        table.add_row(*_cells(f"all {len(now.workers)}", combined(now.workers), speed, with_device))
    return table


def _cells(address: str, numbers: Numbers, speed: dict[str, float], with_device: bool) -> list[str]:
    def number(name: str) -> float:
        return numbers.get(name) or 0.0

    device = [_bar(number("device_nbytes"), numbers.get("device_limit"))] if with_device else []
    return [
        address,
        *device,
        _bar(number("host_nbytes"), numbers.get("limit")),
        units.nbytes(number("spilled_nbytes")),
        units.rate(speed.get("written_nbytes", 0.0)),
        units.rate(speed.get("read_nbytes", 0.0)),
        units.count(number("waiting")),
        units.duration(number("wait_seconds")),
        ", ".join(
            f"{units.count(number(name))} {word}"
            for name, word in (
                ("lost", "lost"),
                ("overruns", "overcommits"),
                ("unspillable", "unspillable"),
                ("spill_failures", "failed writes"),
                ("loop_io", "reads on the loop"),
            )
            if number(name)
        ),
    ]


def _bar(used: float, limit: float | None) -> str:
    if not limit:
        return units.nbytes(used)
    filled = min(_BAR, round(_BAR * used / limit))
    return f"{'█' * filled}{'░' * (_BAR - filled)} {units.nbytes(used)} of {units.nbytes(limit)}"
