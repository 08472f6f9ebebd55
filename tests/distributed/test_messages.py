"""What users are told names the setting that they made, and is said where they are."""

from __future__ import annotations

import errno
import os
import tempfile

import dask
import distributed.protocol.compression
import numpy as np
import pytest
from distributed.utils_test import async_poll_for, gen_cluster

import gpuspill
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.errors import ConfigError, StorageError
from gpuspill.storage.filesystems import file_system_type

OURS, THEIRS = "gpuspill.compression", "distributed.worker.memory.spill-compression"


def test_a_codec_of_distributeds_registry_will_do(monkeypatch):
    """For both settings: a codec is checked in one place."""
    codecs = distributed.protocol.compression.compressions
    monkeypatch.setitem(codecs, "made-up", codecs["zlib"])
    for make in (gpuspill.data, lambda **options: Settings.load(**options)):
        make(compression="made-up")
        with dask.config.set({OURS: "made-up"}):
            make()
    with dask.config.set({THEIRS: "made-up"}):
        gpuspill.data()


@pytest.mark.parametrize("make", [gpuspill.data, gpuspill.SpillPlugin])
@pytest.mark.parametrize("configured", [True, False])
def test_an_unknown_compression_is_an_error_before_a_worker_is_started(make, configured):
    message = rf"^{OURS}: expected 'auto', one of 'lz4', .*found 'lz5'$"
    with dask.config.set({OURS: "lz5" if configured else "lz4"}), pytest.raises(ConfigError, match=message):
        make(**({} if configured else {"compression": "lz5"}))


def test_so_is_one_of_distributeds_setting():
    with dask.config.set({THEIRS: "lz5"}):
        with pytest.raises(ConfigError, match=rf"^{THEIRS}: .*found 'lz5'$"):
            gpuspill.data()
        gpuspill.data(compression="lz4")


@pytest.mark.parametrize("value", [None, False, "auto", "zlib", "snappy"])
def test_what_may_be_installed_where_the_workers_are_is_none(value):
    with dask.config.set({THEIRS: value}):
        gpuspill.data()
    gpuspill.data(compression=value)


def test_options_of_the_simulated_device_are_checked_before_a_worker_is_started():
    with (
        dask.config.set({"gpuspill.simulated.memory": "a lot"}),
        pytest.raises(ConfigError, match=r"gpuspill\.simulated\.memory: found 'a lot'"),
    ):
        gpuspill.data(device="simulated")


@pytest.mark.parametrize(("option", "named"), [("zstd", OURS), ("auto", THEIRS)])
def test_a_compression_that_a_worker_does_not_have_names_setting_and_package(tmp_path, monkeypatch, option, named):
    without = {name: codec for name, codec in distributed.protocol.compression.compressions.items() if name != "zstd"}
    monkeypatch.setattr("gpuspill.distributed.factory.compressions", without)
    with (
        dask.config.set({THEIRS: "zstd"}),
        pytest.raises(ConfigError, match=rf"^{named}: found 'zstd', which needs the package zstandard: it is not"),
    ):
        build_store(Settings.load(compression=option), str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("given", [True, False])
def test_a_directory_that_cannot_be_used_names_where_it_comes_from(tmp_path, given):
    path = tmp_path / "file"
    path.touch()
    settings, local = (Settings(spill_directory=str(path)), tmp_path) if given else (Settings(), path)
    with pytest.raises(StorageError) as caught:
        build_store(settings, str(local))
    message = str(caught.value)
    assert ("gpuspill.spill-directory: cannot use" in message) is given
    assert ("--local-directory" in message) is not given
    assert str(path) in message
    assert message.count("File exists") == message.count("Errno") == 1


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "ext4", "nfs4", None])
def test_a_directory_in_memory_draws_one_warning(tmp_path, monkeypatch, caplog, kind):
    monkeypatch.setattr("gpuspill.distributed.factory.file_system_type", lambda path: kind)
    store = build_store(Settings(spill_directory=str(tmp_path)), "/nowhere")
    for number in range(10):
        store[number] = np.zeros(1000)
    store.manager.limits.evict_all()
    store.close()
    messages = [record.getMessage() for record in caplog.records]
    if kind not in ("tmpfs", "ramfs"):
        assert messages == []
        return
    (message,) = messages
    assert f"{tmp_path} is on a file system in memory ({kind})" in message
    assert "gpuspill.spill-directory" in message


@pytest.mark.skipif(file_system_type("/dev/shm") != "tmpfs", reason="there is no file system in memory")
def test_a_real_file_system_in_memory(caplog):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        build_store(Settings(), directory).close()
    assert "in memory (tmpfs)" in caplog.text


@pytest.mark.parametrize("given", [True, False])
def test_a_full_disk_names_the_settings_that_help(tmp_path, monkeypatch, caplog, given):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gpuspill.storage.recordfile.write_all", write)
    monkeypatch.setattr("gpuspill.distributed.factory.file_system_type", lambda path: "ext4")
    store = build_store(Settings(spill_directory=str(tmp_path) if given else None), str(tmp_path))
    try:
        store.manager.limits.set_limit(None, None, disk_limit_from="gpuspill.max-spill")
        store["x"] = np.zeros(1000)
        store.manager.limits.evict_all()
        assert store.manager.is_resident("x")
    finally:
        store.close()
    (message,) = (record.getMessage() for record in caplog.records)
    assert ("larger disk (gpuspill.spill-directory)" in message) is given
    assert ("larger disk (the worker's local directory (--local-directory" in message) is not given
    assert message.endswith("The value stays in memory. To leave room to others, set gpuspill.max-spill")
    assert message.count("Errno") == message.count("No space left") == 1


@pytest.mark.parametrize(
    ("options", "config", "named"),
    [
        ({"max_spill": 1000}, {}, "(gpuspill.max-spill)"),
        ({}, {"gpuspill.max-spill": 1000}, "(gpuspill.max-spill)"),
        ({}, {"distributed.worker.memory.max-spill": 1000}, "(distributed.worker.memory.max-spill)"),
    ],
)
def test_a_disk_limit_names_the_setting_that_it_comes_from(caplog, options, config, named):
    @gen_cluster(
        client=True,
        nthreads=[("", 1)],
        worker_kwargs={"data": gpuspill.data(host_limit=1, **options)},
        config=config,
    )
    async def body(c, s, a):
        x = c.submit(np.zeros, 1000)
        await x
        await async_poll_for(lambda: a.data.statistics().spill_failures, timeout=10)
        del x

    body()
    (message,) = (r.getMessage() for r in caplog.records if r.name == "gpuspill" and "disk limit" in r.getMessage())
    assert message.startswith(f"the disk limit of 1,000 bytes {named} is used up")
