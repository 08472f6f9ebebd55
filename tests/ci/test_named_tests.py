"""Every test that a page names exists, and every row of its tables names one or says why there is none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Pages, and the heading of the column in which tests are named.
PAGES = {
    "docs/proofs.md": "proved by",
    "docs/faults.md": "shown by",
    "docs/compatibility.md": "shown by",
    "docs/design/predecessors.md": "shown by",
}
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def tables(text: str, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables whose last column has a heading."""
    within = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            within = False
        elif not within:
            within = cells[-1] == heading
        elif set(cells[-1]) != {"-"}:
            yield cells


@cache
def classes() -> dict[str, ast.ClassDef]:
    """The classes of the tests and of the test kit, from which tests are inherited."""
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "gpuspill" / "testing").glob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def methods(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in classes():
            yield from methods(classes()[base.id])


@cache
def named_in(path: str) -> set[str]:
    """The tests of a file as pytest calls them, without parameters; and its test classes."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):  # ``TestX = Machine.TestCase``
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
            found.update(f"{node.name}::{name}" for name in methods(node))
    return {name for name in found if name.rpartition("::")[2].lower().startswith("test")}


def missing(text: str) -> list[str]:
    """Return the tests that a text names and that do not exist."""
    return [
        f"{path}::{name}"
        for path, name in NAMED.findall(text)
        if not (ROOT / path).exists() or name not in named_in(path)
    ]


def silent(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows that neither name a test, nor say "No" and why."""
    return [
        cells
        for cells in rows
        if not NAMED.search(cells[-1]) and not (cells[-1] == "—" and re.match(r"\*\*No\.\*\* \w", cells[-2]))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_exists(page):
    assert missing((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("page", "heading"), PAGES.items())
def test_every_row_names_a_test_or_says_why_not(page, heading):
    rows = list(tables((ROOT / page).read_text(encoding="utf-8"), heading))
    assert len(rows) >= 10
    assert silent(rows) == []


def first_cells(text: str, heading: str) -> list[str]:
    """Return the first cell of each row of the tables whose first column has a heading."""
    rows = (re.fullmatch(r"\| ([^|]+) \|.*", line) for line in text.splitlines())
    cells = [row[1] for row in rows if row]
    return [cell for cell in cells if cell != heading]


def test_promises_and_proofs_are_the_same_ones():
    promises = first_cells((ROOT / "docs/guarantees.md").read_text(encoding="utf-8"), "name")
    proofs = first_cells((ROOT / "docs/proofs.md").read_text(encoding="utf-8"), "promise")
    assert len(promises) >= 20
    assert len(promises) == len(set(promises))
    assert sorted(promises) == sorted(proofs)


def test_what_does_not_exist_is_found():
    here = "tests/ci/test_named_tests.py"
    assert (
        missing(
            f"`{here}::test_what_does_not_exist_is_found`, `tests/storage/test_store_conformance.py::TestFileStore`"
        )
        == []
    )
    assert (
        missing("`tests/storage/test_store_conformance.py::TestFileStore::test_ten_thousand_frames`") == []
    )  # inherited
    absent = [
        f"{here}::test_absent",
        f"{here}::missing",
        "tests/ci/test_absent.py::test_x",
        "tests/storage/test_file_store.py::test_every_byte",  # it is in a class
        "tests/storage/test_file_store.py::TestDamage::test_absent",
    ]
    assert missing(" ".join(f"`{name}`" for name in absent)) == absent


def test_rows_that_say_nothing_are_found():
    text = """
| what | gpuspill | shown by |
|---|---|---|
| a | yes | `tests/x.py::test_y` |
| b | **No.** It would be slow | — |
| c | yes | — |
| d | **No.** | — |
| e | yes | by hand |
| f | on its way | — (open) |

| what | meaning |
|---|---|
| g | no table of tests |
"""
    rows = list(tables(text, "shown by"))
    assert [cells[0] for cells in rows] == list("abcdef")
    assert [cells[0] for cells in silent(rows)] == list("cdef")
