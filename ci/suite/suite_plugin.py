"""pytest plugin: append the outcome of each test to a file as soon as it is known.

A line each, so that what was known is there even if the run is ended from outside. The file is named
by ``SUITE_OUTCOMES``.
"""

from __future__ import annotations

import json
import os

import pytest

_SEVERITY = ("passed", "xpassed", "xfailed", "skipped", "failed", "error")


class _Recorder:
    def __init__(self, path: str) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._worst: dict[str, tuple[str, str]] = {}

    def _write(self, name: str, outcome: str, message: str) -> None:
        record = {
            "test": name,
            "outcome": outcome,
            "seconds": round(self._seconds.pop(name, 0.0), 3),
            "message": message,
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that could not be collected as one failed test."""
        if report.failed:
            self._write(report.nodeid, "error", _message(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of setup, call and teardown; write after the last of them."""
        name = report.nodeid
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed and report.when != "call":
            outcome = "error"
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        worst, _ = self._worst.setdefault(name, ("passed", ""))
        # A test that failed and then could not be torn down has failed first of all.
        if worst != "failed" and _SEVERITY.index(outcome) > _SEVERITY.index(worst):
            self._worst[name] = (outcome, _message(report))
        if report.when == "teardown":
            self._write(name, *self._worst.pop(name))


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2][:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:  # only a traceback: what matters is at its end
        return report.longreprtext.strip()[-300:]
    return str(crash.message).strip()[:300]


def pytest_configure(config: pytest.Config) -> None:
    """Start recording."""
    # A mark of pytest-rerunfailures, which is not needed: a test that failed is run again alone in any case.
    config.addinivalue_line("markers", "flaky: may be run again")
    config.pluginmanager.register(_Recorder(os.environ["SUITE_OUTCOMES"]))
