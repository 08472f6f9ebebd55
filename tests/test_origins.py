"""Where the value of an option comes from."""

from __future__ import annotations

from pathlib import Path

import dask
import pytest

from gpuspill.config import Settings
from gpuspill.config.origins import configured_files, origins


def test_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPUSPILL__HOST_LIMIT", "2 GB")
    config = {"gpuspill": {"host-limit": "2 GB", "spill_threads": 3}}
    with dask.config.set(config):
        found = origins(Settings.load(prefetch=9))
    assert found.pop("host_limit") == "DASK_GPUSPILL__HOST_LIMIT"
    assert found.pop("spill_threads") == "configuration"
    assert found.pop("prefetch") == "keyword"
    assert set(found.values()) == {"default"}


def test_a_variable_that_something_else_overrode_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPUSPILL__HOST_LIMIT", "2 GB")
    with dask.config.set({"gpuspill.host-limit": "1 GB"}):
        assert origins(Settings.load())["host_limit"] == "configuration"
        assert origins(Settings.load(host_limit="3 GB"))["host_limit"] == "keyword"
        # Given in code, although it is the default.
        assert origins(Settings.load(host_limit="auto"))["host_limit"] == "keyword"


def test_values_that_cannot_be_used_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.load(host_limit="1 GB")
    monkeypatch.setenv("DASK_GPUSPILL__HOST_LIMIT", "lots")
    with dask.config.set({"gpuspill.host-limit": "lots"}):
        assert origins(settings)["host_limit"] == "keyword"
    with dask.config.set({"gpuspill": "nothing"}):
        assert origins(settings)["host_limit"] == "keyword"


def test_the_last_file_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("gpuspill:\n  host-limit: 1 GB\n  prefetch: 7\n")
    second.write_text("gpuspill:\n  host_limit: 2 GB\ndistributed: {}\n")
    monkeypatch.setattr("dask.config.paths", [str(tmp_path)])
    files = configured_files()
    assert files == {"host_limit": str(second), "prefetch": str(first)}
    with dask.config.set(gpuspill={"host-limit": "2 GB", "prefetch": 7}):
        found = origins(Settings.load(), files)
    assert found["host_limit"] == str(second)
    assert found["prefetch"] == str(first)
