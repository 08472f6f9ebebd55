"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import socket
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gpuspill.bench.environment import environment
from gpuspill.bench.report import Result, Row, format_value, load, render, save, sparkline
from gpuspill.bench.runner import Sample
from gpuspill.errors import ConfigError


def result(**changes: object) -> Result:
    fields = {
        "benchmark": "example",
        "parameters": {"limit": 1024, "repeat": 2},
        "environment": environment(),
        "rows": [
            Row("wall", "wall time", "seconds", compare=True),
            Row("written", "written", "bytes"),
            Row("absent", "never measured", "count"),
            Row("correct", "result correct", "yes"),
        ],
        "samples": [
            Sample("stock", 0, {"wall": 10.0, "written": 2**30, "correct": True}),
            Sample("gpuspill", 0, {"wall": 5.0, "written": 0, "correct": True}),
            Sample("stock", 1, {"wall": 12.0, "written": 2**30, "correct": True}),
            Sample("gpuspill", 1, {"wall": 3.0, "written": 0, "correct": True}),
        ],
        "notes": ["a note with [brackets]"],
    }
    return Result(**(fields | changes))  # type: ignore[arg-type]


def printed(shown: Result, width: int = 140) -> str:
    console = Console(file=StringIO(), width=width)
    render(shown, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def lines_with(text: str, *wanted: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in wanted)]


def test_the_table_has_medians_spreads_and_ratios() -> None:
    text = printed(result())
    assert "example: median of 2" in text
    (wall,) = lines_with(text, "wall time")
    assert "11.00 s (10.00 s to 12.00 s)" in wall
    assert "4.00 s (3.00 s to 5.00 s)" in wall
    assert "0.38 (0.25 to 0.50)" in wall
    (written,) = lines_with(text, "written")
    assert "1.00 GiB" in written
    assert "to" not in written
    assert "never measured" not in text
    assert "a note with [brackets]" in text


def test_a_narrow_terminal_gets_two_tables() -> None:
    wide, narrow = printed(result()), printed(result(), width=75)
    assert len(lines_with(wide, "wall time")) == 1
    figures, ratios = lines_with(narrow, "wall time")
    assert "11.00 s (10.00 s to 12.00 s)" in figures
    assert "0.38 (0.25 to 0.50)" in ratios


def test_wrong_and_failed_runs_are_told() -> None:
    shown = result(
        samples=[
            Sample("stock", 0, {"wall": 1.0, "correct": False}),
            Sample("gpuspill", 0, error="RuntimeError: [gone]"),
        ]
    )
    text = printed(shown)
    assert not shown.correct
    assert "stock, run 1: the result is wrong" in text
    assert "gpuspill, run 1: RuntimeError: [gone]" in text
    (row,) = lines_with(text, "result correct")
    assert "NO" in row


def test_without_the_baseline_there_are_no_ratios() -> None:
    text = printed(result(samples=[Sample("gpuspill", 0, {"wall": 5.0})]))
    assert "/ stock" not in text
    assert "5.00 s" in text


def test_saving_and_loading_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    save(result(), path)
    again = load(path)
    assert printed(again) == printed(result())
    assert again.samples == result().samples
    document = json.loads(path.read_text())
    assert document["summary"]["stock"]["wall"] == {"median": 11.0, "low": 10.0, "high": 12.0, "count": 2}


def test_the_facts_about_a_machine_do_not_identify_it() -> None:
    text = json.dumps(environment())
    facts = json.loads(text)
    assert facts["cores"] >= 1
    assert facts["packages"]["distributed"]
    assert f'"{socket.gethostname()}"' not in text
    assert str(Path.home()) + "/" not in text
    assert "/tmp" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "is no result"), ('{"format": 0}', "is no result"), (None, "cannot be read")],
)
def test_files_that_are_no_results(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        save(result(), tmp_path / "missing" / "result.json")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.234, "seconds", "1.23 s"),
        (0.05, "milliseconds", "50.0 ms"),
        (1e-6, "microseconds", "1.0 µs"),
        (2**20, "bytes", "1.00 MiB"),
        (12345, "count", "12,345"),
        (0.555, "ratio", "0.56"),
        (1, "yes", "yes"),
        (0, "yes", "NO"),
    ],
)
def test_figures_have_units(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_a_flat_curve_looks_flat_and_a_rising_one_does_not() -> None:
    assert sparkline([5.0, 5.0, 5.0]) == "███"
    assert sparkline([1.0, 10.0, 100.0]) == "▁▂█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
