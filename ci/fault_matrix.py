"""Write docs/faults.md: which fault, met at which step, ends how, and which test shows it.

    python ci/fault_matrix.py          # write the page
    python ci/fault_matrix.py --check  # exit with 1 if the page is not what the tests say

Tests say it by a marker, which is read from their source:

    @pytest.mark.fault("disk full", on="host→disk", outcome="stays in memory")

``on`` is one step, or several in a tuple. A fault has to be listed in FAULTS below, with the steps at which it can
happen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"

#: The steps of a value's life, and what each is.
STEPS: Mapping[str, str] = {
    "device→host": "leaving the device",
    "host→disk": "writing a record, also straight from the device",
    "disk→host": "reading a record and rebuilding the value",
    "host→device": "coming back to the device",
    "send": "answering a peer or a client",
    "receive": "taking in what a peer sends",
    "release": "deleting a key, a value, a record",
    "close": "closing the store or the worker",
}

_MOVES = "device→host host→disk disk→host host→device"
_ALL = " ".join(STEPS)

#: Faults, and the steps at which each can happen.
FAULTS: Mapping[str, str] = {
    "disk full": "host→disk receive",
    "disk limit used up": "host→disk receive",
    "error of the disk": "host→disk disk→host send receive release close",
    "disk slow or stuck": "host→disk disk→host send receive release close",
    "disk reads or writes less than asked": "host→disk disk→host",
    "no file descriptor left": "host→disk disk→host send",
    "record damaged": "disk→host send",
    "record cut off": "disk→host send",
    "record removed": "disk→host send release",
    "another file in its place": "host→disk disk→host send release close",
    "spill directory removed": "host→disk disk→host send close",
    "no locks on the file system": "host→disk close",
    "files of others in the spill directory": "close",
    "value cannot be serialised": "device→host host→disk send",
    "value cannot be rebuilt": "disk→host send receive",
    "value's code raises anything": _ALL,
    "codec fails": "host→disk disk→host",
    "host memory runs out": "device→host host→disk disk→host receive",
    "device memory runs out": "device→host host→disk disk→host host→device send receive",
    "copy on the device fails": "device→host host→disk host→device send",
    "GPUDirect Storage fails": "host→disk disk→host",
    "no pinned memory": "device→host host→device",
    "nothing can leave memory": "host→disk disk→host receive",
    "used meanwhile": f"{_MOVES} send receive",
    "deleted meanwhile": f"{_MOVES} send receive",
    "overwritten meanwhile": f"{_MOVES} send receive",
    "changed in place meanwhile": "device→host host→disk",
    "held by user code": "device→host host→disk",
    "cancelled meanwhile": "host→disk disk→host host→device send receive",
    "closed meanwhile": f"{_MOVES} send receive release",
    "several threads at once": _ALL,
    "a finaliser in between": _ALL,
    "a thread cannot be started or ends": f"{_MOVES} send receive release close",
    "process forked": _ALL,
    "process killed": "host→disk send receive close",
    "worker stopped, restarted, retired": "host→disk disk→host send receive close",
    "connection lost": "send receive",
    "a peer without gpuspill": "send receive",
}


class WrongMarker(Exception):
    """A marker that says something that it cannot; says where."""


@dataclass(frozen=True, slots=True)
class Shown:
    """That a test shows how a fault ends at a step."""

    fault: str
    step: str
    outcome: str
    test: str


def markers(root: Path = ROOT) -> list[Shown]:
    """Return what the markers of all tests say, in the order of their files.

    Raises
    ------
    WrongMarker
        One names a fault or a step that is not listed, or is not written with plain texts.
    """
    found: list[Shown] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        for test, marker in _marked(ast.parse(path.read_text(encoding="utf-8")).body, name):
            found += _shown(marker, test)
    return found


def _marked(body: Sequence[ast.stmt], where: str) -> Iterator[tuple[str, ast.Call]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{where}::{node.name}"
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
                    yield name, decorator
            if isinstance(node, ast.ClassDef):
                yield from _marked(node.body, name)


def _shown(marker: ast.Call, test: str) -> Iterator[Shown]:
    try:
        (fault,) = (ast.literal_eval(argument) for argument in marker.args)
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in marker.keywords}
        steps, outcome = named.pop("on"), named.pop("outcome")
    except (ValueError, KeyError) as error:
        raise WrongMarker(f"{test}: expected fault(name, on=..., outcome=...) with plain texts ({error!r})") from None
    if named or not isinstance(outcome, str) or not outcome:
        raise WrongMarker(f"{test}: expected fault(name, on=..., outcome=...), found {ast.unparse(marker)}")
    if fault not in FAULTS:
        raise WrongMarker(f"{test}: the fault {fault!r} is not listed in ci/fault_matrix.py")
    for step in (steps,) if isinstance(steps, str) else steps:
        if step not in FAULTS[fault].split():
            raise WrongMarker(f"{test}: {fault!r} is not listed for the step {step!r}, but for {FAULTS[fault]}")
        yield Shown(fault, step, outcome, test)


def cells(shown: Sequence[Shown]) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Return the tests by outcome, for each fault and each step at which it can happen; none where there is no test."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {
        (fault, step): {} for fault, steps in FAULTS.items() for step in STEPS if step in steps.split()
    }
    for one in shown:
        tests = found[one.fault, one.step].setdefault(one.outcome, [])
        if one.test not in tests:
            tests.append(one.test)
    return found


HEAD = """# Faults

<!-- Written by ci/fault_matrix.py from the tests' markers. Change those, and run it again. -->

Each row is a fault, each column a step in the life of a value. A cell says how it ends, as shown by
the tests below. **?**: it can happen there, and no test shows what comes of it. A dot: it cannot.

"""

MIDDLE = """
`gpuspill bench chaos` injects many of these into clusters at random: see
[benchmarks](benchmarks.md).

## The tests

"""


def page(shown: Sequence[Shown]) -> str:
    """Return the page."""
    found = cells(shown)
    empty = sum(not outcomes for outcomes in found.values())
    lines = [
        f"| fault | {' | '.join(STEPS)} |",
        f"|---|{'---|' * len(STEPS)}",
        *(f"| {fault} | {' | '.join(_cell(found, fault, step) for step in STEPS)} |" for fault in FAULTS),
        "",
        f"{len(FAULTS)} faults, {len(found)} cells, {empty} of them without a test. The steps:",
        "",
        *(f"* **{step}**: {what}." for step, what in STEPS.items()),
    ]
    proofs = ["| fault | step | outcome | shown by |", "|---|---|---|---|"]
    for (fault, step), outcomes in found.items():
        for outcome, tests in outcomes.items():
            proofs.append(f"| {fault} | {step} | {outcome} | {', '.join(f'`{test}`' for test in tests)} |")
    return HEAD + "\n".join(lines) + "\n" + MIDDLE + "\n".join(proofs) + "\n"


def _cell(found: Mapping[tuple[str, str], Mapping[str, object]], fault: str, step: str) -> str:
    if (fault, step) not in found:
        return "·"
    return "<br>".join(found[fault, step]) or "**?**"


def main(arguments: Sequence[str]) -> int:
    """Write or check the page; return the exit status."""
    text = page(markers())
    if list(arguments) == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is not what the tests' markers say: run python ci/fault_matrix.py")
            return 1
        return 0
    if arguments:
        print(__doc__)
        return 2
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except WrongMarker as error:
        print(error)
        status = 1
    sys.exit(status)
