"""Turns samples into a table for people and a JSON document for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dask.utils import format_bytes
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpuspill.bench.arms import BASELINE
from gpuspill.bench.runner import Sample, Spread, paired_ratio, spread
from gpuspill.errors import ConfigError

__all__ = ["Result", "Row", "format_value", "load", "render", "save", "sparkline"]

FORMAT = 1
"""Version of the JSON document; counted up when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class Row:
    """A metric as a line of the table.

    Parameters
    ----------
    metric
        Its name among a sample's metrics.
    label
        What people call it.
    unit
        ``seconds``, ``milliseconds``, ``microseconds``, ``bytes``, ``rate`` (bytes a second),
        ``count``, ``ratio`` or ``yes``. Metrics of the first three are in seconds, whatever they
        are shown in.
    compare
        Whether a ratio to the baseline makes sense.
    """

    metric: str
    label: str
    unit: str
    compare: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark that has been run.

    Parameters
    ----------
    benchmark, parameters, environment
        Its name, what it was asked to do, and where.
    rows
        Which metrics the table shows.
    samples
        Every run.
    notes
        Lines to show below the table.
    """

    benchmark: str
    parameters: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    samples: Sequence[Sample]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def arms(self) -> list[str]:
        """The arms that ran, in the order they ran."""
        return list(dict.fromkeys(sample.arm for sample in self.samples))

    @property
    def correct(self) -> bool:
        """Whether every run ended and was right."""
        return all(sample.correct for sample in self.samples)


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "seconds": lambda value: f"{value:.2f} s",
    "milliseconds": lambda value: f"{value * 1e3:.1f} ms",
    "microseconds": lambda value: f"{value * 1e6:.1f} µs",
    "bytes": lambda value: format_bytes(int(value)),
    "rate": lambda value: f"{value / 1e9:.2f} GB/s",
    "count": lambda value: f"{value:,.0f}",
    "ratio": lambda value: f"{value:.2f}",
    "yes": lambda value: "yes" if value else "NO",
}


def format_value(value: float, unit: str) -> str:
    """Write a figure with its unit (see :class:`Row`)."""
    return _FORMATS[unit](value)


def sparkline(values: Sequence[float]) -> str:
    """Draw figures as a line of blocks, from 0 to the largest: a flat curve looks flat."""
    blocks = "▁▂▃▄▅▆▇█"
    top = max(values, default=0.0)
    if top <= 0:
        return blocks[0] * len(values)
    return "".join(blocks[round(max(0.0, value) / top * (len(blocks) - 1))] for value in values)


def _cell(found: Spread | None, unit: str) -> str:
    if found is None:
        return "-"
    if unit == "yes":
        return format_value(found.low, unit)
    text = format_value(found.median, unit)
    if found.count > 1 and found.low != found.high:
        text += f" ({format_value(found.low, unit)} to {format_value(found.high, unit)})"
    return text


def _ratio_cell(found: Spread | None) -> str:
    if found is None:
        return "-"
    text = f"{found.median:.2f}"
    return text + (f" ({found.low:.2f} to {found.high:.2f})" if found.count > 1 else "")


def _table(title: str, labels: Sequence[str], headings: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """Lay out the lines in which there is something."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    for label, line in zip(labels, cells, strict=True):
        if any(cell not in ("", "-") for cell in line):
            table.add_row(escape(label), *line)
    return table


def render(result: Result, console: Console) -> None:
    """Print the table of a result: medians, with smallest and largest where there are several runs.

    Ratios are medians of the ratios within each round. Wrong results and failed runs are listed
    below.
    """
    rounds = max((sample.repeat for sample in result.samples), default=-1) + 1
    arms = result.arms
    compared = [arm for arm in arms if arm != BASELINE] if BASELINE in arms else []
    title = f"{result.benchmark}: median of {rounds} (smallest to largest)"
    figures = [[_cell(spread(result.samples, arm, row.metric), row.unit) for arm in arms] for row in result.rows]
    ratios = [
        [
            _ratio_cell(paired_ratio(result.samples, arm, BASELINE, row.metric)) if row.compare else ""
            for arm in compared
        ]
        for row in result.rows
    ]
    labels = [row.label for row in result.rows]
    ratio_headings = [f"{arm} / {BASELINE}" for arm in compared]
    wide = _table(title, labels, [*arms, *ratio_headings], [a + b for a, b in zip(figures, ratios, strict=True)])
    if console.measure(wide, options=console.options.update(max_width=1000)).maximum <= console.width:
        console.print(wide)
    else:
        console.print(_table(title, labels, arms, figures))
        if compared:
            console.print(_table("ratios within each round", labels, ratio_headings, ratios))
    for note in result.notes:
        console.print(note, markup=False, highlight=False)
    for sample in result.samples:
        if not sample.correct:
            why = sample.error or "the result is wrong"
            console.print(f"{sample.arm}, run {sample.repeat + 1}: {why}", style="bold red", markup=False)


def save(result: Result, path: Path) -> None:
    """Write a result with every sample as JSON.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    document = {
        "format": FORMAT,
        "benchmark": result.benchmark,
        "parameters": dict(result.parameters),
        "environment": dict(result.environment),
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "samples": [dataclasses.asdict(sample) for sample in result.samples],
        "summary": {
            arm: {
                row.metric: dataclasses.asdict(found)
                for row in result.rows
                if (found := spread(result.samples, arm, row.metric)) is not None
            }
            for arm in result.arms
        },
        "notes": list(result.notes),
    }
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error


def load(path: Path) -> Result:
    """Read back what :func:`save` wrote.

    Raises
    ------
    ConfigError
        If the file cannot be read or is no such document.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"{path}: is no result of this version of gpuspill bench")
    return Result(
        document["benchmark"],
        document["parameters"],
        document["environment"],
        [Row(**row) for row in document["rows"]],
        [Sample(**sample) for sample in document["samples"]],
        document["notes"],
    )
