#!/usr/bin/env python3
"""Run distributed's own tests with gpuspill as every worker's store, and compare with stock.

Three arms: ``stock`` (distributed as it is), ``gpuspill`` (ordinary limits) and ``gpuspill-1-byte``
(a host limit of 1 byte, so that every value spills at once). Test files run one after the other,
each in a process of its own. Results are kept in the output directory, one JSON for each arm, and
a later run with other ``--files`` adds to them; the comparison covers all that is there.

distributed's releases on PyPI contain no tests; they come from its repository, at the tag of the
installed release: cloned, or from ``--source``.

Exit status: 1 if a test that passes in stock does not in another arm, unless the page named by
``--explained`` has the test's name; 2 if an arm could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from suite_report import GOOD, Outcome, Results, compare

HERE = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/dask/distributed"

ARMS: dict[str, dict[str, str]] = {
    # name -> environment
    "stock": {},
    "gpuspill": {},
    "gpuspill-1-byte": {"DASK_GPUSPILL__HOST_LIMIT": "1"},
}

FILES = [
    *(
        f"distributed/tests/test_{name}.py"
        for name in (
            "worker_memory",
            "worker",
            "client",
            "scheduler",
            "nanny",
            "active_memory_manager",
            "steal",
            "cancelled_state",
            "failed_workers",
            "stress",
            "actor",
            "worker_client",
            "worker_metrics",
            "spans",
        )
    ),
    "distributed/shuffle/tests",
]


class SuiteError(Exception):
    """The suite cannot be run; the message says what to do."""


def checkout(source: str | None, ref: str, directory: Path) -> Path:
    """Put distributed's tests at `ref` into `directory` and return their root."""
    if source is not None and (Path(source) / "distributed" / "tests").is_dir():
        return Path(source)  # a work tree: taken as it is, whatever its version
    repository = Path(source) if source is not None else directory / "repository"
    if source is None:
        command = ["git", "clone", "--quiet", "--bare", "--depth=1", f"--branch={ref}"]
        if subprocess.run([*command, REPOSITORY, str(repository)], check=False).returncode:
            raise SuiteError(
                f"cannot clone {REPOSITORY} at tag {ref}; name a copy of it with --source, and "
                "another tag with --ref if it does not have that one"
            )
        ref = "HEAD"
    archive = directory / "tests.tar"
    git = ["git", "-C", str(repository), "archive", f"--output={archive}", ref]
    if subprocess.run([*git, "distributed", "conftest.py", "pyproject.toml"], check=False).returncode:
        raise SuiteError(f"{repository} has no tag {ref}; name one that it has with --ref")
    with tarfile.open(archive) as tar:
        tar.extractall(directory / "checkout", filter="data")
    return directory / "checkout"


def overlay(tests: Path, installed: Path, directory: Path) -> None:
    """Lay out `directory` like a checkout of distributed: the installed package, tests, the probe."""
    ignore = shutil.ignore_patterns("__pycache__")
    package = directory / "distributed"
    shutil.copytree(installed, package, ignore=ignore)
    for path in (tests / "distributed").rglob("tests"):
        if path.is_dir():
            target = package / path.relative_to(tests / "distributed")
            shutil.copytree(path, target, ignore=ignore, dirs_exist_ok=True)
    for path in (tests / "conftest.py", tests / "pyproject.toml", HERE / "suite" / "test_probe.py"):
        shutil.copy(path, directory)


class Arm:
    """Runs test files in one arm.

    Parameters
    ----------
    name
        One of :data:`ARMS`.
    root
        What :func:`overlay` laid out.
    output
        Where logs go, in a directory named after the arm.
    arguments
        Further arguments for pytest.
    test_timeout, file_timeout
        Seconds, for one test and for one file.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        output: Path,
        arguments: list[str],
        test_timeout: float,
        file_timeout: float,
    ) -> None:
        self.name = name
        self._root = root
        self._logs = output / name
        self._logs.mkdir(parents=True, exist_ok=True)
        self._file_timeout = file_timeout
        self._command = [
            *(sys.executable, "-m", "pytest", "-p", "suite_plugin", "--color=no", "--durations=0"),
            *("-c", str(root / "pyproject.toml"), "--rootdir", str(root)),
            *("-o", f"timeout={test_timeout:g}", "-o", "timeout_method=signal"),
            *("-p", "no:cacheprovider", *arguments),
        ]

    def run(self, label: str, targets: list[str]) -> tuple[dict[str, Outcome], dict[str, object]]:
        """Run `targets` in one process; return the outcome of each test, and facts about the run."""
        log = self._logs / f"{label}.log"
        start = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="suite-") as scratch,
            log.open("w", encoding="utf-8") as output,
        ):
            outcomes = Path(scratch, "outcomes")
            outcomes.touch()
            process = subprocess.Popen(
                [*self._command, *targets],
                cwd=self._root,
                env=self._environment(outcomes, scratch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what the tests leave running can be ended, too
            )
            try:
                exit_status: int | str = process.wait(self._file_timeout)
            except subprocess.TimeoutExpired:
                exit_status = f"ended after {self._file_timeout:g} s"
            finally:
                _end_session(process)
            lines = outcomes.read_text(encoding="utf-8").splitlines()
        tests = {}
        for record in map(json.loads, lines):
            name = record.pop("test")
            tests[name] = Outcome(**record)
        seconds = round(time.monotonic() - start, 1)
        return tests, {"seconds": seconds, "exit": exit_status, "tests": len(tests)}

    def _environment(self, outcomes: Path, scratch: str) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_", "PYTEST_"))}
        environment.update(ARMS[self.name])
        environment.update(
            SUITE_ARM=self.name,
            SUITE_OUTCOMES=str(outcomes),
            TMPDIR=scratch,
            # The last is for a working tree of gpuspill that is not installed.
            PYTHONPATH=os.pathsep.join(map(str, (HERE / "suite", self._root, HERE.parent))),
        )
        return environment


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # most tests leave nothing running
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_arm(arm: Arm, results: Results, files: list[str], rerun: bool, output: Path) -> None:
    """Probe the arm, run `files` and add their outcomes to `results`, saving after each file."""
    probe, facts = arm.run("probe", ["test_probe.py"])
    bad = [name for name, test in probe.items() if test.final not in GOOD]
    if bad or not probe or facts["exit"] != 0:
        raise SuiteError(f"arm {arm.name} is not what it should be: see {output / arm.name}/probe.log")
    for file in files:
        label = Path(file).stem
        tests, facts = arm.run(label, [file])
        failed = [name for name, test in tests.items() if test.outcome not in (*GOOD, "skipped")]
        if rerun:
            for name in failed:
                again, _ = arm.run(f"{label}-again", [name])
                tests[name].again = again[name].outcome if name in again else "not run"
        for name in [name for name in results.tests if name.partition("::")[0] == file]:
            del results.tests[name]
        results.files[file] = facts
        results.tests.update(tests)
        results.save(output)
        counts = Counter(test.final for test in tests.values())
        text = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        print(f"{arm.name:16} {file}: {text} ({facts['seconds']} s, exit {facts['exit']})", flush=True)


def expand(names: Iterable[str], root: Path) -> list[str]:
    """Return test files, relative to `root`, for paths, directories, and names such as ``test_worker``."""
    found: list[str] = []
    for name in names:
        candidates = [root / name, root / "distributed" / "tests" / f"{name}.py"]
        path = next((path for path in candidates if path.exists()), None)
        if path is None:
            raise SuiteError(f"distributed has no test file {name!r}")
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(root)) for file in files]
    return list(dict.fromkeys(found))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help="comma-separated (default: %(default)s)")
    add("--files", nargs="+", default=FILES, metavar="FILE", help="default: those that store data")
    add("--source", metavar="DIR", help="a work tree or git directory of distributed")
    add("--ref", help="tag or commit to take the tests from (default: the installed release)")
    add("--output", type=Path, default=Path("distributed-suite"), metavar="DIR")
    add("--explained", type=Path, default=HERE.parent / "docs" / "compatibility.md", metavar="PAGE")
    add("--test-timeout", type=float, default=120, metavar="SECONDS")
    add("--file-timeout", type=float, default=2400, metavar="SECONDS")
    add("--slow", action="store_true", help="also run the tests that distributed marks slow")
    add("--no-rerun", action="store_true", help="do not run failed tests again, each alone")
    add("--compare-only", action="store_true", help="run nothing; compare what is there")
    add("--pytest", action="append", default=[], metavar="ARGUMENT", help="passed on to pytest")
    options = parser.parse_args(arguments)
    options.arms = options.arms.split(",")
    unknown = sorted(set(options.arms) - set(ARMS))
    if unknown:
        parser.error(f"unknown arms {unknown}; there are {list(ARMS)}")
    return options


def run(options: argparse.Namespace) -> None:
    """Run the arms asked for."""
    import distributed

    options.output.mkdir(parents=True, exist_ok=True)
    output = options.output.resolve()
    installed = metadata.version("distributed")
    ref = options.ref or installed
    versions = {
        "distributed": installed,
        "tests": ref,
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory(prefix="distributed-suite-") as scratch:
        root = Path(scratch, "root")
        tests = checkout(options.source, ref, Path(scratch))
        overlay(tests, Path(distributed.__file__).parent, root)
        files = expand(options.files, root)
        for name in options.arms:
            results = Results.load(output, name) or Results(name, versions)
            results.versions = versions
            arguments = [*options.pytest, *(["--runslow"] if options.slow else [])]
            arm = Arm(name, root, output, arguments, options.test_timeout, options.file_timeout)
            run_arm(arm, results, files, not options.no_rerun, output)


def main(arguments: list[str] | None = None) -> int:
    """Run and compare; return the exit status."""
    options = parse(arguments)
    try:
        if not options.compare_only:
            run(options)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    loaded = [results for arm in ARMS if (results := Results.load(options.output, arm))]
    explained = options.explained.read_text("utf-8") if options.explained.exists() else ""
    return 1 if loaded and compare(loaded, explained) else 0


if __name__ == "__main__":
    sys.exit(main())
