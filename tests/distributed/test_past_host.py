"""Whether a worker lets bytes go past host memory: what the setting says, and what there is."""

import logging

import pytest

from gpuspill.config import Settings
from gpuspill.device.cuda import kvikio_files as kvikio
from gpuspill.device.past_host import PastHost
from gpuspill.distributed.devices import find_past_host
from gpuspill.distributed.factory import build_store
from gpuspill.errors import ConfigError
from gpuspill.simulated.device.device import SimulatedDevice


@pytest.fixture
def device():
    """Some device that is not asked for anything here."""
    return SimulatedDevice(1000)


@pytest.fixture
def library(monkeypatch):
    """Let there be a library that says `problem`, or nothing; returns the directories that were tried."""

    def library(problem):
        tried = []

        def find(directory):
            tried.append(directory)
            if problem:
                raise ConfigError(problem)
            return object()

        monkeypatch.setattr(kvikio, "kvikio_files", find)
        return tried

    return library


@pytest.mark.parametrize("problem", [None, "there is no driver"])
def test_it_is_off_unless_asked_for(library, device, problem):
    tried = library(problem)
    assert find_past_host(Settings.load(), device, "there") is None
    assert tried == []


@pytest.mark.parametrize("gds", ["auto", "on"])
def test_where_there_is_a_driver(library, device, gds):
    tried = library(None)
    assert isinstance(find_past_host(Settings(gds=gds), device, "there"), PastHost)
    assert tried == ["there"]


def test_without_one_auto_says_nothing(library, device, caplog):
    library("there is no driver")
    with caplog.at_level(logging.INFO):
        assert find_past_host(Settings(gds="auto"), device, "there") is None
    assert caplog.records == []


def test_without_one_on_is_an_error(library, device):
    library("there is no driver")
    with pytest.raises(ConfigError, match=r"gpuspill\.gds: found 'on', but there is no driver\. Set it to auto"):
        find_past_host(Settings(gds="on"), device, "there")


@pytest.mark.parametrize("which", [None, "simulated"])
def test_there_is_none_for_what_is_no_gpu(library, device, which, tmp_path):
    tried = library(None)
    ours = device if which else None
    assert find_past_host(Settings(gds="auto", device=which), ours, "there") is None
    with pytest.raises(ConfigError, match="no CUDA device has a tier here"):
        find_past_host(Settings(gds="on", device=which), ours, "there")
    with pytest.raises(ConfigError, match="no CUDA device has a tier here"):
        build_store(Settings(gds="on", device=None), str(tmp_path))
    assert tried == []
    assert list(tmp_path.iterdir()) == []
