"""What the pages say of options, statistics and commands is what the code has."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import gpuspill
from gpuspill.config import Settings
from gpuspill.config.settings import _SIMULATED
from gpuspill.manager.statistics import Statistics

from .pages import ROOT

sys.path.append(str(ROOT / "docs" / "_ext"))
import gpuspill_drawings
import gpuspill_reference

DOCS = ROOT / "docs"

#: Pages for users: every name in them is one that a user can type. (Others speak of names of the code, or of others'.)
USER_PAGES = [
    *(DOCS / f"{name}.md" for name in ("index", "how-it-works", "guarantees", "troubleshooting", "tuning", "faq")),
    *(DOCS / "start").glob("*.md"),
    *(DOCS / "reference" / f"{name}.md" for name in ("configuration", "statistics")),
]

#: Names of others in them.
FOREIGN = {
    "async_get",
    "dask_cuda",
    "map_partitions",
    "memory_limit",
    "memory_total",
    "performance_report",
    "set_offset",
    "worker_client",
}


def names(page: Path) -> set[str]:
    """The names with an underscore that stand alone in backticks."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text))


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_name_on_a_page_for_users_exists(page: Path) -> None:
    known = {field.name for field in (*fields(Statistics), *fields(Settings))} | set(gpuspill.__all__) | FOREIGN
    assert names(page) - known == set()


def test_no_foreign_name_is_listed_for_nothing() -> None:
    used = set().union(*(names(page) for page in USER_PAGES))
    assert FOREIGN - used == set()


def test_docstrings_become_markdown() -> None:
    assert gpuspill_reference.markdown("``x`` and :class:`~some.Thing`") == "`x` and `some.Thing`"


def test_every_option_can_be_looked_up() -> None:
    text = gpuspill_reference.render_options()
    assert re.findall(r"^````\{confval\} (\S+)$", text, flags=re.MULTILINE) == [
        field.name.replace("_", "-") for field in fields(Settings)
    ]
    limit = text.partition("{confval} buffer-pool\n")[2].partition("````")[0]
    assert ':default: "128.00 MiB"' in limit
    assert "a size such as '2 GiB'" in limit
    assert "DASK_GPUSPILL__BUFFER_POOL" in limit


def test_every_statistic_stands_in_one_table() -> None:
    text = gpuspill_reference.render_statistics()
    shown = [
        name for names in re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE) for name in re.findall(r"\w+", names)
    ]
    assert sorted(shown) == sorted(field.name for field in fields(Statistics))
    assert "| `wait_seconds` | seconds |" in text
    assert "| `disk_nbytes` | bytes |" in text


def test_every_command_has_a_section_with_its_options() -> None:
    text = gpuspill_reference.render_commands()
    for words, command in gpuspill_reference.commands():
        section = text.partition(f"## `{words}`\n")[2].partition("\n## ")[0]
        flags = [flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")]
        assert section
        assert [flag for flag in flags if flag not in section] == []


def test_the_first_page_names_every_option_with_its_default() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| option | default | meaning |")[2]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", table.partition("\n\n")[0], flags=re.MULTILINE)
    shown = {
        name: default
        for left, right in rows
        for name, default in zip(re.findall(r"`([\w-]+)`", left), right.replace("`", "").split(", "), strict=True)
    }
    actual = {field.name.replace("_", "-"): field.default for field in fields(Settings)}
    assert shown.keys() == actual.keys()
    for name, default in actual.items():
        if isinstance(default, str) and default != "auto":
            assert shown[name] == default, name
        elif default in (None, "auto") or isinstance(default, bool):
            expected = {None: ("off", "the worker's local directory"), True: ("true",), False: ("false",)}
            assert shown[name] in expected.get(default, ("auto",)), name
        else:
            assert shown[name] in (str(default), f"{int(default) // 2**20} MiB", str(int(default))), name


def test_the_page_of_the_simulated_device_names_its_options() -> None:
    text = (ROOT / "docs" / "simulated.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| `gpuspill\.simulated\.([\w-]+)` \|", text, flags=re.MULTILINE))
    assert shown == {name.replace("_", "-") for name in _SIMULATED}


def test_every_public_name_is_explained_on_the_page_of_the_api() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    explained = {name.rpartition(".")[2] for name in re.findall(r"\.\. auto(?:function|class|exception):: (\S+)", text)}
    assert set(gpuspill.__all__) - explained == {"__version__"}


def test_every_drawing_is_shown_and_whole() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert re.findall(r"^```\{drawing\} (\w+)$", page, flags=re.MULTILINE) == list(gpuspill_drawings.DRAWINGS)
    for draw in gpuspill_drawings.DRAWINGS.values():
        drawing = draw()
        assert drawing.count("<text") >= 10
        assert drawing.endswith("</svg>")


def test_words_that_do_not_fit_are_found() -> None:
    canvas = gpuspill_drawings.Canvas(100, "a test")
    with pytest.raises(ValueError, match="does not fit into 50"):
        canvas.box(0, 0, 50, 50, "many words in a small box")
    with pytest.raises(ValueError, match="2 lines do not fit"):
        canvas.box(0, 0, 50, 30, "a", "b")
