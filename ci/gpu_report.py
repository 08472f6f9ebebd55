"""Puts what ``ci/gpu.sh`` found into one JSON document: ``ci/gpu_report.py FOLDER``.

The folder has a JUnit file for each section (``conformance.xml``) and the figures of ``ci/gpu_bandwidth.py``
(``bandwidth.json``). The document, ``report.json`` there, says of each section how many tests ran, failed and were
skipped, and why, and how many seconds they took. The exit status is 1 if something failed, or a section is missing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SECTIONS = ("conformance", "libraries", "out-of-memory", "cluster")


def section(path: Path) -> dict[str, Any]:
    """Return what a JUnit file says of a section."""
    found: dict[str, Any] = {"tests": 0, "seconds": 0.0, "failed": []}
    skipped: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        found["tests"] += 1
        found["seconds"] += float(case.get("time", 0))
        skip = case.find("skipped")
        if skip is not None:
            skipped[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(f"{case.get('classname')}::{case.get('name')}")
    return found | {"seconds": round(found["seconds"], 3), "skipped": dict(skipped)}


def report(folder: Path) -> dict[str, Any]:
    """Return the document; None in the place of a section that is not there."""
    found: dict[str, Any] = {}
    for name in SECTIONS:
        path = folder / f"{name}.xml"
        found[name] = section(path) if path.exists() else None
    figures = folder / "bandwidth.json"
    found["bandwidth"] = json.loads(figures.read_text()) if figures.exists() else None
    return found


def main(argv: list[str]) -> int:
    """Write the document and print one line a section."""
    (folder,) = map(Path, argv)
    found = report(folder)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    good = True
    for name, each in found.items():
        if each is None:
            said = "did not end"
        elif name == "bandwidth":
            said = "measured"
        else:
            ran = each["tests"] - sum(each["skipped"].values())
            said = f"{ran} tests, {len(each['failed'])} failed, {each['tests'] - ran} skipped, {each['seconds']:.0f} s"
        good = good and each is not None and not each.get("failed")
        print(f"{name:14} {said}")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
