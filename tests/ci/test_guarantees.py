"""Every test that docs/guarantees.md names exists, and every guarantee names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_every_named_test_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"def {name}\(", (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not missing


def test_every_guarantee_names_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| name", "| method"))]
    assert rows
    assert [row for row in rows if "::test_" not in row] == []
