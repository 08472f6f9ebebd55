"""The ``gpuspill`` command, as somebody at a terminal meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gpuspill.bench.commands import ByteSize
from gpuspill.cli import gpuspill, main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(gpuspill, list(arguments))


def test_help_names_every_command() -> None:
    top, bench = run("--help"), run("bench", "--help")
    assert top.exit_code == bench.exit_code == 0
    assert all(name in top.output for name in ("bench", "demo", "report"))
    assert all(name in bench.output for name in ("persist-sum", "tiny", "keys"))


@pytest.mark.parametrize("group", [gpuspill, gpuspill.commands["bench"]], ids=["gpuspill", "bench"])
def test_no_summary_of_a_command_is_cut(group: click.Group) -> None:
    found = CliRunner().invoke(group, ["--help"], terminal_width=80)
    summaries = found.output.partition("Commands:\n")[2].splitlines()
    assert len(summaries) == len(group.commands)
    assert [line for line in summaries if line.endswith("...")] == []


@pytest.mark.parametrize("command", ["persist-sum", "tiny", "keys"])
def test_every_benchmark_takes_arms_repeat_and_json(command: str) -> None:
    found = run("bench", command, "--help")
    assert found.exit_code == 0
    assert all(option in found.output for option in ("--arms", "--repeat", "--json"))


def test_the_version_is_told_without_loading_dask() -> None:
    program = "import sys, gpuspill.cli as c\ntry: c.main(['--version'])\nfinally: assert 'dask' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpuspill, version ")


def test_the_dask_command_gets_its_part_without_loading_what_a_worker_needs() -> None:
    """``dask`` imports every registered module at each start, whatever it is then asked to do."""
    # Without dask-cuda, whose own command imports distributed.
    program = "import sys; sys.modules['dask_cuda'] = None; import gpuspill.dask_cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "gpuspill.distributed.dask_cuda" in loaded
    assert not {"distributed", "tornado", "numpy", "rich"} & set(loaded)
    ours = {name.removeprefix("gpuspill.") for name in loaded if name.startswith("gpuspill.")}
    settings = {"config", "config.jit_unspill", "config.settings"}
    command = {"bench", "bench.commands", "cli", "dask_cli"}
    assert ours == settings | command | {"distributed", "distributed.dask_cuda", "errors"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "keys", "--arms", "stick"], "'stick' is unknown; choose among stock, gpuspill"),
        (["bench", "persist-sum", "--chunk", "2GiB"], "chunk: must be between"),
        (["bench", "tiny", "--tasks", "3"], "tasks: must be an even number"),
        (["bench", "show", "missing.json"], "missing.json: cannot be read"),
        (["demo", "--jobs", "x"], "jobs: 'x' is unknown"),
    ],
)
def test_a_wrong_use_is_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("gpuspill: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "persist-sum", "--limit", "lots"], "'lots' is no amount of memory"),
        (["bench", "persist-sum", "--limit", "0"], "must be larger than 0"),
        (["bench", "keys", "--sizes", "1,two"], "is no list of numbers"),
        (["bench", "keys", "--repeat", "0"], "--repeat"),
        (["bench", "sleep"], "No such command"),
    ],
)
def test_a_wrong_option_is_told(arguments: list[str], message: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert message in found.output


@pytest.mark.parametrize(("text", "size"), [("32MiB", 2**25), ("1 GB", 10**9), ("4096", 4096), (4096, 4096)])
def test_sizes(text: object, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


def test_sizes_that_are_none() -> None:
    with pytest.raises(click.BadParameter):
        ByteSize().convert("-1", None, None)


def test_a_benchmark_prints_a_table_and_writes_a_report_that_can_be_printed_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    found = run("bench", "keys", "--arms", "stock,gpuspill", "--repeat", "2", "--sizes", "5,20", "--json", str(path))
    assert found.exit_code == 0, found.output
    assert "evict, 20 keys" in found.stdout
    assert "gpuspill / stock" in found.stdout
    assert "run 2 gpuspill: done" in found.stderr
    document = json.loads(path.read_text())
    assert document["parameters"]["sizes"] == [5, 20]
    assert len(document["samples"]) == 4
    again = run("bench", "show", str(path))
    assert again.exit_code == 0
    assert again.stdout == found.stdout


@pytest.mark.cluster
def test_persist_sum_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "sum.json"
    found = run(
        *("bench", "persist-sum", "--arms", "nospill", "--repeat", "1", "--limit", "256MiB", "--ratio", "0.02"),
        *("--chunk", "1MiB", "--json", str(path)),
    )
    assert found.exit_code == 0, found.output
    assert "result correct" in found.stdout
    assert json.loads(path.read_text())["parameters"]["chunks"] == 6


def test_a_wrong_result_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuspill.bench.keys.Keys.run", lambda self, arm, expected: {"correct": False})
    found = run("bench", "keys", "--arms", "stock", "--repeat", "1", "--sizes", "5")
    assert found.exit_code == 1
    assert "the result is wrong" in found.stdout
