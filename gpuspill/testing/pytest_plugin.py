"""The pytest plugin of gpuspill's own tests, and of other projects' stores and devices.

Switch it on with ``gpuspill_testing = true`` in pytest's settings, or load it with
``pytest_plugins = ["gpuspill.testing.pytest_plugin"]`` in the top ``conftest.py``. It

* fails a test that passed but left behind threads, file descriptors, child processes or spill files
  (fixture :func:`no_leaks`, for every test);
* keeps temporary files of a run in a directory of that run, so that the default place for spilling
  is known and no other process writes to it;
* skips tests marked ``gpu``, with the reason, where there is no device.

A test that has to leave something behind says so: ``@pytest.mark.leaking("descriptors",
reason="...")``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Generator, Hashable
from pathlib import Path

import pytest

from gpuspill.testing.leaks import (
    Check,
    DescriptorCheck,
    ProcessCheck,
    SpillFileCheck,
    ThreadCheck,
    find_leaks,
    format_leaks,
)

__all__ = ["missing_device", "no_leaks"]

_KINDS = frozenset(c.kind for c in (ThreadCheck, DescriptorCheck, ProcessCheck, SpillFileCheck))
_passed = pytest.StashKey[bool]()
_scratch = pytest.StashKey["_Scratch"]()


class _Scratch:
    """A directory for this run's temporary files, put in the place of the system's."""

    def __init__(self) -> None:
        # Where pytest keeps the last runs' tmp_path directories stays where it was, so that one can
        # look at them afterwards.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix="test-gpuspill-"))
        self._tempdir = tempfile.tempdir
        self._variable = os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.path)

    def close(self) -> None:
        tempfile.tempdir = self._tempdir
        if self._variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._variable
        shutil.rmtree(self.path, ignore_errors=True)


def missing_device() -> str | None:
    """Return why no CUDA device can be used here, or ``None`` if one can.

    Asks the driver itself, so that it needs no library and creates no context.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver: {error}"
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the CUDA driver answers with error {status}"
    return None if count.value else "the CUDA driver knows of no device"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--leak-grace``."""
    parser.getgroup("gpuspill").addoption(
        "--leak-grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for what a test left behind to go away (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and move temporary files to a directory of this run."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers",
        f"leaking(*kinds, reason): may leave behind these kinds of things ({', '.join(sorted(_KINDS))})",
    )
    config.stash[_scratch] = _Scratch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the directory of this run."""
    config.stash[_scratch].close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no device (not asked if no test needs one)."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_device() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether the test passed: one that failed keeps things alive in its traceback."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


def _checks(request: pytest.FixtureRequest) -> list[Check]:
    roots: list[Path] = [request.config.stash[_scratch].path]
    if "tmp_path" in request.fixturenames:
        # Asked for here, it is set up before and goes after this check.
        roots.append(request.getfixturevalue("tmp_path"))
    allowed: set[str] = set()
    for marker in request.node.iter_markers("leaking"):
        unknown = set(marker.args) - _KINDS
        if unknown or not marker.args or not marker.kwargs.get("reason"):
            raise pytest.UsageError(
                f"{request.node.nodeid}: the marker 'leaking' takes kinds out of {sorted(_KINDS)} "
                f"and a reason; found {marker.args} and {marker.kwargs}"
            )
        allowed.update(marker.args)
    if request.node.get_closest_marker("gpu"):
        allowed.add(DescriptorCheck.kind)  # a CUDA context opens its own, for the process's life
    checks = (ThreadCheck(), DescriptorCheck(), ProcessCheck(), SpillFileCheck(lambda: roots))
    return [check for check in checks if check.kind not in allowed]


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Generator[None]:
    """Fail a test that passed but left something behind."""
    before: dict[Check, frozenset[Hashable]] = {c: c.snapshot() for c in _checks(request)}
    yield
    if not request.node.stash.get(_passed, False):
        return
    leaks = find_leaks(before, grace=request.config.getoption("--leak-grace"))
    if leaks:
        pytest.fail(format_leaks(leaks), pytrace=False)
