"""Each check sees what it is for, and the fixture turns that into a failed test."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import gpuspill.testing
from gpuspill.testing.leaks import (
    Check,
    DescriptorCheck,
    ProcessCheck,
    SpillFileCheck,
    ThreadCheck,
    find_leaks,
    format_leaks,
)


@contextmanager
def running_thread(name: str, daemon: bool) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name=name, daemon=daemon)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def open_descriptor() -> Iterator[None]:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(descriptor)


@contextmanager
def child_process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL):
        yield


@contextmanager
def ended_child_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # returns when it has ended, and leaves it a zombie
    yield
    process.wait()


@pytest.mark.parametrize(
    ("check", "leak", "description"),
    [
        (ThreadCheck(), lambda: running_thread("gpuspill-io-0", daemon=True), "gpuspill-io-0"),
        (ThreadCheck(), lambda: running_thread("anybody", daemon=False), "anybody (not a daemon)"),
        (DescriptorCheck(), open_descriptor, f"-> {os.devnull}"),
        (ProcessCheck(), child_process, "-c input()"),
        (ProcessCheck(), ended_child_process, "zombie"),
    ],
)
def test_a_check_sees_what_is_there_and_that_it_is_gone(
    check: Check, leak: Callable[[], AbstractContextManager[None]], description: str
) -> None:
    before = {check: check.snapshot()}
    with leak():
        found = find_leaks(before, grace=0)
        assert list(found) == [check]
        assert description in format_leaks(found)
    assert find_leaks(before, grace=5) == {}


def test_a_daemon_thread_of_somebody_else_is_no_leak() -> None:
    before = {ThreadCheck(): frozenset(threading.enumerate())}
    with running_thread("somebody else", daemon=True):
        assert find_leaks(before, grace=0) == {}


def test_the_pool_of_dasks_threaded_scheduler_is_no_leak() -> None:
    import dask

    before = {ThreadCheck(): frozenset(threading.enumerate())}
    assert dask.delayed(int)(1).compute(scheduler="threads") == 1
    assert find_leaks(before, grace=0) == {}


def test_spill_files_are_told_by_their_names_at_any_depth(tmp_path: Path) -> None:
    check = SpillFileCheck(lambda: [tmp_path, tmp_path / "absent"], names=["gpuspill-*"])
    (tmp_path / "worker" / "somebody-elses").mkdir(parents=True)
    assert check.snapshot() == frozenset()
    store = tmp_path / "worker" / "gpuspill-1"
    store.mkdir()
    (store / "gpuspill-lock").touch()
    (tmp_path / "gpuspill-stray").touch()
    found = check.snapshot()
    assert found == {store, tmp_path / "gpuspill-stray"}
    assert "1 entries: gpuspill-lock" in check.describe(store)
    shutil.rmtree(store)
    (tmp_path / "gpuspill-stray").unlink()


def test_a_leak_that_goes_away_within_the_grace_period_is_none() -> None:
    check = ThreadCheck()
    before = {check: check.snapshot()}
    looked = threading.Event()

    class Looked(ThreadCheck):
        def snapshot(self) -> frozenset[object]:
            found = super().snapshot()
            looked.set()  # only once it has been seen may the thread end
            return found

    thread = threading.Thread(target=looked.wait, name="gpuspill-ending")
    thread.start()
    assert find_leaks({Looked(): before[check]}, grace=60) == {}
    assert looked.is_set()


LEAKS = {
    "threads": """
        import threading
        def test_leak():
            threading.Thread(target=threading.main_thread().join, name="forgotten").start()
        """,
    "descriptors": """
        import os
        def test_leak():
            os.open(os.devnull, os.O_RDONLY)
        """,
    "processes": """
        import subprocess, sys
        children = []
        def test_leak():
            children.append(subprocess.Popen([sys.executable, "-c", ""]))
        """,
    "spill files": """
        import tempfile
        def test_leak():
            tempfile.mkdtemp(prefix="gpuspill-")
        """,
}


@pytest.fixture
def outcome(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pytest.RunResult]:
    """Run one test module in a process of its own, which takes what it leaks with it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(gpuspill.testing.__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess(
            "-p", "gpuspill.testing.pytest_plugin", "-p", "no:cacheprovider", "--leak-grace=0.2"
        )

    return run


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaks_fails(kind: str, outcome: Callable[[str], pytest.RunResult]) -> None:
    result = outcome(LEAKS[kind])
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leak*", f"left behind: 1 {kind}"])


@pytest.mark.leaking("spill files", reason="those that the inner test left behind")
def test_spill_files_in_a_tests_own_directory_count(
    outcome: Callable[[str], pytest.RunResult],
) -> None:
    result = outcome("def test_leak(tmp_path): (tmp_path / 'gpuspill-7').mkdir()")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["left behind: 1 spill files"])


def test_the_setting_switches_it_on(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an entry point does where gpuspill is installed: nothing happens without the setting."""
    monkeypatch.setenv("PYTHONPATH", str(Path(gpuspill.testing.__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    options = ("-p", "gpuspill.testing.pytest_option", "-p", "no:cacheprovider")
    pytester.makepyfile(LEAKS["descriptors"])
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=1)
    pytester.makeini("[pytest]\ngpuspill_testing = true\n")
    pytester.runpytest_subprocess(*options, "--leak-grace=0.2").assert_outcomes(passed=1, errors=1)


def test_the_entry_point_is_the_setting() -> None:
    (point,) = importlib.metadata.entry_points(group="pytest11", name="gpuspill")
    assert point.value == "gpuspill.testing.pytest_option"


def test_a_test_that_cleans_up_passes(outcome: Callable[[str], pytest.RunResult]) -> None:
    result = outcome(
        """
        import os, subprocess, sys, tempfile, threading
        def test_clean(tmp_path):
            thread = threading.Thread(target=int, name="gpuspill-io-0")
            thread.start()
            thread.join()
            os.close(os.open(os.devnull, os.O_RDONLY))
            subprocess.run([sys.executable, "-c", ""], check=True)
            os.rmdir(tempfile.mkdtemp(prefix="gpuspill-"))
            (tmp_path / "anything").touch()
        """
    )
    result.assert_outcomes(passed=1)


def test_what_a_fixture_cleans_up_is_no_leak(outcome: Callable[[str], pytest.RunResult]) -> None:
    result = outcome(
        """
        import os, pytest
        @pytest.fixture
        def store(tmp_path):
            (tmp_path / "gpuspill-1").mkdir()
            descriptor = os.open(os.devnull, os.O_RDONLY)
            yield
            os.close(descriptor)
            (tmp_path / "gpuspill-1").rmdir()
        def test_clean(store): pass
        """
    )
    result.assert_outcomes(passed=1)


def test_a_failed_test_is_reported_once(outcome: Callable[[str], pytest.RunResult]) -> None:
    result = outcome("import os\ndef test_it(): assert os.open(os.devnull, os.O_RDONLY) < 0")
    result.assert_outcomes(failed=1)


def test_leaking_allows_the_kinds_named(outcome: Callable[[str], pytest.RunResult]) -> None:
    result = outcome(
        """
        import os, pytest, tempfile
        @pytest.mark.leaking("descriptors", reason="on purpose")
        def test_named(): os.open(os.devnull, os.O_RDONLY)
        @pytest.mark.leaking("descriptors", reason="on purpose")
        def test_not_named(): tempfile.mkdtemp(prefix="gpuspill-")
        """
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_not_named*"])


@pytest.mark.parametrize("arguments", ['"descriptors"', '"files", reason="on purpose"', ""])
def test_leaking_wants_known_kinds_and_a_reason(arguments: str, outcome: Callable[[str], pytest.RunResult]) -> None:
    result = outcome(f"import pytest\n@pytest.mark.leaking({arguments})\ndef test_it(): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the marker 'leaking' takes kinds out of*"])


def test_temporary_files_go_to_a_directory_that_ends_with_the_run(
    outcome: Callable[[str], pytest.RunResult], tmp_path: Path
) -> None:
    result = outcome(
        f"""
        import os, pathlib, subprocess, sys, tempfile
        def test_where():
            seen = tempfile.gettempdir()
            code = "import tempfile; print(tempfile.gettempdir())"
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert child.stdout.strip() == seen
            pathlib.Path({str(tmp_path / "seen")!r}).write_text(seen)
        """
    )
    result.assert_outcomes(passed=1)
    seen = Path((tmp_path / "seen").read_text())
    assert seen.name.startswith("test-gpuspill-")
    assert not seen.exists()


def test_a_test_for_a_device_is_skipped_with_the_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuspill.testing.pytest_plugin.missing_device", lambda: "no CUDA driver: made up")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.gpu
        def test_device(): raise AssertionError("ran")
        def test_other(): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "gpuspill.testing.pytest_plugin", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no CUDA driver: made up"])
