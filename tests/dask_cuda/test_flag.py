"""``dask cuda worker --enable-jit-unspill``, on dask-cuda's own command."""

import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import entry_points

import click
import pytest

pytest.importorskip("dask_cuda", reason="dask-cuda is not installed: see ci/test_dask_cuda.sh")

import dask
import dask_cuda.cli
from click.testing import CliRunner

from gpuspill.dask_cli import add_flag, gpuspill

MINE = "some.package.Worker"


@pytest.fixture
def command(monkeypatch):
    """dask-cuda's command, which notes what it is called with and what is configured then, and starts nothing."""
    called = {}

    class CUDAWorker:
        def __init__(self, *args, **kwargs):
            raise AssertionError("the worker was started")

    def callback(**options):
        configured = dask.config.get("gpuspill", {})
        called.update(options, config={name.replace("_", "-"): value for name, value in configured.items()})

    monkeypatch.setattr(dask_cuda.cli, "CUDAWorker", CUDAWorker)
    monkeypatch.setattr("gpuspill.dask_cli.why_no_devices", lambda: None)
    worker = dask_cuda.cli.worker
    stock = click.Command(
        worker.name,
        context_settings=worker.context_settings,
        params=[parameter for parameter in worker.params if parameter.name not in OURS],
        callback=callback,
    )
    assert add_flag(stock)

    def run(*words):
        called.clear()
        result = CliRunner().invoke(stock, ["tcp://127.0.0.1:1", *words])
        return result, called

    run.command = stock
    return run


OURS = ("enable_jit_unspill", "shared_filesystem")
#: Of dask-cuda, none with the value that it has anyway.
OPTIONS = """--enable-cudf-spill --cudf-spill-stats 2 --rmm-pool-size 2GB --rmm-maximum-pool-size 3GB
    --rmm-managed-memory --rmm-async --rmm-release-threshold 1GB --rmm-log-directory . --rmm-track-allocations
    --set-rmm-allocator-for-libs cupy,torch --protocol ucx --enable-tcp-over-ucx --enable-infiniband
    --enable-nvlink --enable-rdmacm --pre-import json --nthreads 2 --local-directory . --memory-limit 3GB"""


def test_it_is_on_dask_cudas_command_once():
    names = [parameter.name for parameter in dask_cuda.cli.worker.params]
    assert names.count("enable_jit_unspill") == 1
    assert not add_flag(dask_cuda.cli.worker)
    assert [parameter.name for parameter in dask_cuda.cli.worker.params] == names


def test_a_command_that_has_it_is_left_alone():
    def callback():
        pass

    option = click.Option(["--enable-jit-unspill/--disable-jit-unspill"])
    command = click.Command("worker", params=[option], callback=callback)
    assert not add_flag(command)
    assert command.callback is callback
    assert command.params == [option]
    assert not add_flag(None)


def test_it_is_shown(command):
    text = CliRunner().invoke(command.command, ["--help"]).output
    assert "--enable-jit-unspill / --disable-jit-unspill" in text
    assert text.index("--enable-jit-unspill") < text.index("--worker-class")
    assert "--shared-filesystem" not in text


@pytest.mark.skipif(
    not any(point.name == "gpuspill" for point in entry_points(group="dask_cli")),
    reason="gpuspill is not installed, so the dask command does not know of it",
)
def test_the_dask_command_shows_it_and_gpuspill():
    help_of = [sys.executable, "-m", "dask", "cuda", "worker", "--help"]
    done = subprocess.run(help_of, capture_output=True, text=True, check=True)
    assert "--enable-jit-unspill / --disable-jit-unspill" in done.stdout
    assert "Warning" not in done.stderr
    top = subprocess.run(
        [sys.executable, "-m", "dask", "gpuspill", "--help"], capture_output=True, text=True, check=True
    )
    assert "config" in top.stdout
    assert set(gpuspill.commands) >= {"config", "demo", "bench", "report"}


@pytest.mark.parametrize("words", [(), ("--disable-jit-unspill",), ("--device-memory-limit", "1GB")])
def test_without_it_nothing_changes(command, words):
    result, called = command(*words)
    assert result.exit_code == 0, result.output
    assert called["worker_class"] is None
    assert called["preload"] == ()
    assert called["device_memory_limit"] == ("1GB" if "1GB" in words else "default")
    assert called["config"] == {}
    assert not set(OURS) & set(called)


@pytest.mark.parametrize(
    ("given", "configured"),
    [(None, {}), ("default", {}), ("auto", None), ("0", "0"), ("2GB", "2GB"), ("0.5", "0.5")],
)
def test_it_hands_the_device_limit_to_gpuspill(command, given, configured):
    words = () if given is None else ("--device-memory-limit", given)
    result, called = command("--enable-jit-unspill", "--memory-limit", "3GB", *words)
    assert result.exit_code == 0, result.output
    assert called["worker_class"] == "gpuspill.Worker"
    assert called["memory_limit"] == "3GB"
    assert called["device_memory_limit"] == (given or "default")
    assert called["config"] == ({} if configured == {} else {"device-memory-limit": configured})


def test_a_worker_class_of_ones_own_gets_a_preload(command):
    result, called = command("--enable-jit-unspill", "--worker-class", MINE, "--preload", "json")
    assert result.exit_code == 0, result.output
    assert called["worker_class"] == MINE
    assert called["preload"] == ("json", "gpuspill")


def test_all_other_options_pass_through(command):
    words = OPTIONS.split()
    plain = dict(command()[1])
    result, called = command("--disable-jit-unspill", *words)
    assert result.exit_code == 0, result.output
    stock = dict(called)
    changed = [name for name in stock if stock[name] != plain[name]]
    assert len(changed) == sum(word.startswith("--") for word in words)
    result, called = command("--enable-jit-unspill", *words)
    assert result.exit_code == 0, result.output
    assert called == {**stock, "worker_class": "gpuspill.Worker"}


@pytest.mark.parametrize(
    ("configured", "words", "on"),
    [
        (True, (), True),
        ("on", (), True),
        (True, ("--disable-jit-unspill",), False),
        ("off", (), False),
        (False, ("--enable-jit-unspill",), True),
    ],
)
def test_the_variable_of_jit_unspill(command, configured, words, on):
    with dask.config.set({"jit-unspill": configured}):
        result, called = command(*words)
    assert result.exit_code == 0, result.output
    assert called["worker_class"] == ("gpuspill.Worker" if on else None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gpuspill.host-limit": "lots"}, "gpuspill.host-limit: expected a size such as"),
        ({"gpuspill": {"host-limits": 1}}, "gpuspill.host-limits: no such option. Did you mean 'host_limit'?"),
        ({"jit-unspill": "maybe"}, "jit-unspill (DASK_JIT_UNSPILL): expected true or false, found 'maybe'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(command, config, message):
    words = () if "jit-unspill" in config else ("--enable-jit-unspill",)
    with dask.config.set(config):
        result, called = command(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert not called


def test_a_wrong_limit_is_said(command):
    result, called = command("--enable-jit-unspill", "--device-memory-limit", "lots")
    assert result.exit_code == 2
    assert "gpuspill.device-memory-limit: expected a size such as" in result.output
    assert not called


@pytest.mark.parametrize(("word", "told"), [("--shared-filesystem", 1), ("--no-shared-filesystem", 0)])
def test_the_shared_filesystem_is_answered(command, caplog, word, told):
    with forgotten():
        result, called = command("--enable-jit-unspill", word)
    assert result.exit_code == 0, result.output
    assert called["worker_class"] == "gpuspill.Worker"
    assert len([r for r in caplog.records if r.getMessage().startswith("--shared-filesystem changes nothing")]) == told


@contextmanager
def forgotten():
    """Nothing has been answered in this process yet."""
    from gpuspill.config.jit_unspill import answer_once

    answer_once.cache_clear()
    yield


def test_a_simulated_device_needs_no_other(command, monkeypatch, caplog):
    monkeypatch.setattr("gpuspill.dask_cli.why_no_devices", lambda: "no CUDA device was found")
    for name in ("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    with dask.config.set({"gpuspill.device": "simulated"}):
        result, called = command("--enable-jit-unspill", "--device-memory-limit", "2GB")
    assert result.exit_code == 0, result.output
    assert called["device_memory_limit"] == 0
    assert called["config"]["device-memory-limit"] == "2GB"
    assert os.environ["DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC"] == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert "no CUDA device was found: starting worker(s) with simulated devices." in caplog.text


def test_without_a_device_it_says_what_to_do(command, monkeypatch):
    monkeypatch.setattr("gpuspill.dask_cli.why_no_devices", lambda: "no CUDA device was found")
    result, called = command("--enable-jit-unspill")
    assert result.exit_code == 1
    assert result.output.startswith("Error: no CUDA device was found")
    assert "dask worker ADDRESS --preload gpuspill" in result.output
    assert not called
    result, _ = command("--disable-jit-unspill")
    assert result.exit_code == 0, result.output
