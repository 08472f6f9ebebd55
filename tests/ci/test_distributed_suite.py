"""The tool that runs distributed's tests: what it makes of outcomes, and that its hook takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_suite import ARMS, SuiteError, expand, main, parse
from suite_report import Outcome, Results, compare

SUITE = Path(__file__).parents[2] / "ci" / "suite"
FILE = "distributed/tests/test_worker.py"


def results(arm: str, **tests: Outcome) -> Results:
    return Results(
        arm,
        versions={},
        files={FILE: {"exit": 0, "seconds": 1.0, "tests": len(tests)}},
        tests={f"{FILE}::{name}": outcome for name, outcome in tests.items()},
    )


PASSED = Outcome("passed", 0.1, "")
FAILED = Outcome("failed", 0.1, "AssertionError: isinstance(data, dict)\nmore")
FLAKY = Outcome("failed", 0.1, "TimeoutError", again="passed")


def test_results_survive_the_file(tmp_path: Path) -> None:
    stored = results("stock", test_a=PASSED, test_b=FLAKY)
    stored.save(tmp_path)
    assert Results.load(tmp_path, "stock") == stored
    assert Results.load(tmp_path, "gpuspill") is None


@pytest.mark.parametrize(
    ("outcome", "again", "final"),
    [
        ("passed", None, "passed"),
        ("failed", None, "failed"),
        ("failed", "passed", "passed"),
        ("failed", "error", "failed"),
        ("skipped", None, "skipped"),
    ],
)
def test_a_test_that_passes_when_run_again_has_passed(outcome: str, again: str | None, final: str) -> None:
    assert Outcome(outcome, 0.0, "", again).final == final


def test_only_what_stock_passes_and_no_page_explains_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stock = results("stock", test_a=PASSED, test_b=PASSED, test_c=FAILED, test_d=FLAKY)
    other = results("gpuspill", test_a=FAILED, test_b=FAILED, test_c=FAILED, test_d=PASSED)
    assert compare([stock, other], explained="") == 2
    assert compare([stock, other], explained="`test_a` asserts a dict; test_bb too.") == 1
    printed = capsys.readouterr().out
    assert "| 3 / 1 / 0 (1 again) | 1 / 3 / 0 |" in printed
    assert f"{FILE}::test_a: passed -> failed explained" in printed
    assert f"{FILE}::test_b: passed -> failed NOT EXPLAINED" in printed
    assert compare([stock, other], explained="`tests/test_x.py::test_a` and `tests/test_x.py::TestX::test_b`") == 2
    assert "test_c" not in printed


def test_a_test_that_did_not_run_differs(capsys: pytest.CaptureFixture[str]) -> None:
    stock = results("stock", test_a=PASSED)
    assert compare([stock, results("gpuspill")], explained="") == 1
    assert f"{FILE}::test_a: passed -> not run NOT EXPLAINED" in capsys.readouterr().out


def test_files_that_only_one_arm_ran_are_not_compared() -> None:
    stock = results("stock", test_a=PASSED)
    assert compare([stock, Results("gpuspill", versions={})], explained="") == 0


def test_files_are_found_by_path_directory_and_name(tmp_path: Path) -> None:
    for name in (FILE, "distributed/shuffle/tests/test_shuffle.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert expand(["test_worker", "distributed/shuffle/tests", FILE], tmp_path) == [
        FILE,
        "distributed/shuffle/tests/test_shuffle.py",
    ]
    with pytest.raises(SuiteError, match="'test_absent'"):
        expand(["test_absent"], tmp_path)


def test_a_source_without_the_tag_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "source")], check=True)
    arguments = ["--source", str(tmp_path / "source"), "--output", str(tmp_path), "--ref", "1.0"]
    assert main(arguments) == 2
    assert f"{tmp_path / 'source'} has no tag 1.0" in capfd.readouterr().err


def test_unknown_arms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--arms", "stock,another"])
    assert "unknown arms ['another']" in capsys.readouterr().err


INNER = """
import pytest
def test_passes(): pass
def test_fails(): raise ValueError("on purpose")
@pytest.mark.skip(reason="why not")
def test_skipped(): pass
@pytest.mark.xfail
def test_xfails(): raise ValueError
@pytest.mark.xfail
def test_xpasses(): pass
@pytest.fixture
def broken(): raise RuntimeError("broken fixture")
def test_setup(broken): pass
@pytest.fixture
def untidy():
    yield
    raise RuntimeError("untidy fixture")
def test_teardown(untidy): pass
def test_both(untidy): raise ValueError("on purpose")
"""


def test_outcomes_are_recorded_as_they_come(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(test_inner=INNER, test_uncollectable="import absent_module")
    outcomes = tmp_path / "outcomes"
    environment = {
        **os.environ,
        "PYTHONPATH": str(SUITE),
        "SUITE_OUTCOMES": str(outcomes),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "suite_plugin"]
    subprocess.run(
        [*command, "--continue-on-collection-errors"],
        env=environment,
        cwd=pytester.path,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    records = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found = {r["test"].rpartition("::")[2]: (r["outcome"], r["message"]) for r in records}
    uncollectable = found.pop("test_uncollectable.py")
    assert uncollectable[0] == "error"
    assert "absent_module" in uncollectable[1]
    assert found == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", "ValueError: on purpose"),
        "test_skipped": ("skipped", "Skipped: why not"),
        "test_xfails": ("xfailed", "ValueError"),
        "test_xpasses": ("xpassed", ""),
        "test_setup": ("error", "RuntimeError: broken fixture"),
        "test_teardown": ("error", "RuntimeError: untidy fixture"),
        "test_both": ("failed", "ValueError: on purpose"),
    }


STAND_IN = """
class Store(dict):
    pass
def data():
    return Store
"""

MAKE_WORKERS = """
import asyncio
import distributed
async def main():
    for arguments in ({}, {"data": dict}):
        worker = distributed.Worker("tcp://127.0.0.1:1", **arguments)
        print(type(worker.data).__name__)
asyncio.run(main())
"""


@pytest.mark.parametrize("arm", ARMS)
def test_the_default_store_of_a_worker_is_that_of_the_arm(arm: str, tmp_path: Path) -> None:
    (tmp_path / "gpuspill.py").write_text(STAND_IN)
    process = subprocess.run(
        [sys.executable, "-c", MAKE_WORKERS],
        env={**os.environ, "SUITE_ARM": arm, "PYTHONPATH": f"{SUITE}{os.pathsep}{tmp_path}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == ["SpillBuffer" if arm == "stock" else "Store", "dict"]
