"""Results of ``ci/distributed_suite.py``: what is kept of each arm, and how arms are compared."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

GOOD = ("passed", "xfailed", "xpassed")


@dataclass
class Outcome:
    """What became of one test: its outcome, that of running it again, and why."""

    outcome: str
    seconds: float
    message: str
    again: str | None = None

    @property
    def final(self) -> str:
        """The outcome, counting a test as passed that failed and passed when run again alone."""
        return self.again if self.again in GOOD and self.outcome not in GOOD else self.outcome


@dataclass
class Results:
    """One arm's results, as in its JSON."""

    arm: str
    versions: dict[str, str]
    files: dict[str, dict[str, object]] = field(default_factory=dict)
    tests: dict[str, Outcome] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Write ``<arm>.json``."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        (directory / f"{self.arm}.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path, arm: str) -> Results | None:
        """Read what :meth:`save` wrote, if it did."""
        path = directory / f"{arm}.json"
        if not path.exists():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        data["tests"] = {name: Outcome(**test) for name, test in data["tests"].items()}
        return cls(**data)


def cells(results: Results, file: str) -> str:
    """Return passed/failed/skipped of `file`, and how many of the passed passed only when run again."""
    if file not in results.files:
        return "-"
    tests = [test for name, test in results.tests.items() if name.partition("::")[0] == file]
    passed = sum(test.final in GOOD for test in tests)
    skipped = sum(test.final == "skipped" for test in tests)
    again = sum(test.final != test.outcome for test in tests)
    ended = isinstance(results.files[file]["exit"], str)
    text = f"{passed} / {len(tests) - passed - skipped} / {skipped}"
    return text + (f" ({again} again)" if again else "") + (" ENDED" if ended else "")


def compare(arms: list[Results], explained: str) -> int:
    """Print the table and the tests that differ; return how many need an explanation."""
    files = sorted({file for arm in arms for file in arm.files})
    print("\nTests passed / failed / skipped; in brackets, how many passed only when run again alone.\n")
    rows = [["file", *(arm.arm for arm in arms)]]
    rows += [[file, *(cells(arm, file) for arm in arms)] for file in files]
    print(_table(rows))
    stock, *others = arms
    unexplained = 0
    for arm in others:
        common = [file for file in files if file in stock.files and file in arm.files]
        names = sorted(name for name in stock.tests.keys() | arm.tests.keys() if name.partition("::")[0] in common)
        missing = Outcome("not run", 0.0, "")
        differing = [(name, stock.tests.get(name, missing), arm.tests.get(name, missing)) for name in names]
        differing = [d for d in differing if d[1].final != d[2].final]
        print(f"\n{len(differing)} tests differ between {stock.arm} and {arm.arm}:")
        for name, before, after in differing:
            note = ""
            if before.final in GOOD and after.final not in GOOD:
                # By itself: as part of the id of a test (of gpuspill's own, say) it explains nothing.
                known = re.search(rf"(?<![\w:]){re.escape(_function(name))}\b", explained)
                note = "explained" if known else "NOT EXPLAINED"
                unexplained += not known
            print(f"  {name}: {before.final} -> {after.final} {note}".rstrip())
            message = (after.message or before.message).partition("\n")[0][:160]
            if message:
                print(f"      {message}")
    return unexplained


def _function(name: str) -> str:
    return name.rpartition("::")[2].partition("[")[0]


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
