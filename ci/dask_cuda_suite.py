#!/usr/bin/env python3
"""Run dask-cuda's own tests on a machine without devices, without and with gpuspill installed.

Arms: ``stock`` (gpuspill must not be installed), ``gpuspill`` (it is) and ``jit-unspill`` (it is, and
``DASK_JIT_UNSPILL=True`` makes ``dask cuda worker`` use it). Many of dask-cuda's tests need a device; those that pass
in ``stock`` here are the ones that do not, and they alone are run in the other arms. ``ci/test_dask_cuda.sh`` calls
this before and after it installs gpuspill.

Exit status: 1 if a test that passes in stock does not in another arm; 2 if an arm could not be run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from distributed_suite import Arm, SuiteError
from suite_report import GOOD, Outcome, Results, compare

HERE = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/rapidsai/dask-cuda"

ARMS: dict[str, dict[str, str]] = {"stock": {}, "gpuspill": {}, "jit-unspill": {"DASK_JIT_UNSPILL": "True"}}


class DeviceFree(Arm):
    """Runs dask-cuda's tests with its own switch for machines without devices."""

    def _environment(self, outcomes: Path, scratch: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_", "PYTEST_", "CUDA_"))}
        return {
            **kept,
            **ARMS[self.name],
            "DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC": "1",
            "DASK_CUDA_WAIT_WORKERS_MIN_TIMEOUT": "60",  # its own setting; 10 s are not enough on a machine under load
            "SUITE_ARM": "stock",  # stores are chosen as a user would, and not by sitecustomize
            "SUITE_OUTCOMES": str(outcomes),
            "TMPDIR": scratch,
            "PYTHONPATH": str(HERE / "suite"),  # not the working tree: gpuspill counts only if it is installed
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        }


def checkout(source: str | None, ref: str, directory: Path) -> Path:
    """Put dask-cuda's tests at `ref` into `directory`, without the package itself, and return the new root.

    Its conftest.py stays behind: it asks the driver about devices before any test is run.
    """
    root = directory / "root"
    if source is None:
        source = str(directory / "repository")
        command = ["git", "clone", "--quiet", "--bare", "--depth=1", f"--branch={ref}", REPOSITORY, source]
        if subprocess.run(command, check=False).returncode:
            raise SuiteError(f"cannot clone {REPOSITORY} at {ref}; name a copy with --source, another tag with --ref")
        ref = "HEAD"
    archive = directory / "tests.tar"
    command = ["git", "-C", source, "archive", f"--output={archive}", ref, "dask_cuda/tests", "pyproject.toml"]
    if subprocess.run(command, check=False).returncode:
        raise SuiteError(f"{source} has no {ref}; name a tag or commit that it has with --ref")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    (directory / "dask_cuda" / "tests" / "conftest.py").unlink(missing_ok=True)
    root.mkdir()
    (directory / "dask_cuda" / "tests").rename(root / "tests")
    (directory / "pyproject.toml").rename(root / "pyproject.toml")
    return root


def run_arm(arm: DeviceFree, results: Results, root: Path, stock: Results | None, output: Path) -> None:
    """Run every test file, in a process each; of an arm that is not stock, what passed in stock."""
    for path in sorted((root / "tests").glob("test_*.py")):
        file = f"tests/{path.name}"
        targets = [file]
        if stock is not None:
            targets = [n for n, test in stock.tests.items() if n.startswith(f"{file}::") and test.final in GOOD]
            if not targets:
                continue
        tests, facts = arm.run(path.stem, targets)
        for name in [name for name, test in tests.items() if stock is not None and test.outcome not in GOOD]:
            again, _ = arm.run(f"{path.stem}-again", [name])
            tests[name].again = again[name].outcome if name in again else "not run"
        results.files[file] = facts
        results.tests.update(tests)
        results.save(output)
        counts = Counter(test.final for test in tests.values())
        text = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        print(f"{arm.name:12} {file}: {text} ({facts['seconds']} s, exit {facts['exit']})", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the arms asked for, compare with what is there; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arms", default="gpuspill,jit-unspill", help="comma-separated (default: %(default)s)")
    add("--source", metavar="DIR", help="a git directory of dask-cuda")
    add("--ref", help="tag or commit to take the tests from (default: the installed release)")
    add("--output", type=Path, default=Path("dask-cuda-suite"), metavar="DIR")
    add("--test-timeout", type=float, default=60, metavar="SECONDS")
    add("--file-timeout", type=float, default=1800, metavar="SECONDS")
    add("--pytest", action="append", default=[], metavar="ARGUMENT", help="passed on to pytest")
    options = parser.parse_args(arguments)
    installed = metadata.version("dask-cuda")
    year, month, patch = installed.split(".")[:3]
    ref = options.ref or f"v{year}.{int(month):02}.{int(patch):02}"
    versions = {"dask-cuda": installed, "tests": ref, "distributed": metadata.version("distributed")}
    options.output.mkdir(parents=True, exist_ok=True)
    output = options.output.resolve()
    try:
        with tempfile.TemporaryDirectory(prefix="dask-cuda-suite-") as scratch:
            root = checkout(options.source, ref, Path(scratch))
            for name in options.arms.split(","):
                if name not in ARMS:
                    raise SuiteError(f"unknown arm {name!r}; there are {', '.join(ARMS)}")
                if (find_spec("gpuspill") is None) != (name == "stock"):
                    raise SuiteError(f"for arm {name}, gpuspill must {'not ' * (name == 'stock')}be installed")
                stock = None if name == "stock" else Results.load(output, "stock")
                if stock is None and name != "stock":
                    raise SuiteError(f"run the arm stock first: {output} has no results of it")
                arm = DeviceFree(name, root, output, options.pytest, options.test_timeout, options.file_timeout)
                run_arm(arm, Results(name, versions), root, stock, output)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    loaded = [results for arm in ARMS if (results := Results.load(output, arm))]
    for other in loaded[1:]:
        # What did not pass in stock was not asked of the others.
        asked = {name for name, test in loaded[0].tests.items() if test.final in GOOD}
        other.tests = {name: other.tests.get(name, Outcome("not run", 0.0, "")) for name in asked}
    if loaded and loaded[0].arm == "stock":
        passed = {name: test for name, test in loaded[0].tests.items() if test.final in GOOD}
        print(f"\nstock: {len(passed)} of {len(loaded[0].tests)} tests pass without a device.")
        loaded[0].tests = passed
    return 1 if loaded and compare(loaded, "") else 0


if __name__ == "__main__":
    sys.exit(main())
