"""What gpuspill takes from the inside of dask-cuda is there in the installed release."""

import os

import click
import pytest

pytest.importorskip("dask_cuda", reason="dask-cuda is not installed: see ci/test_dask_cuda.sh")

import dask_cuda.cli
import dask_cuda.utils
from dask_cuda.device_host_file import DeviceHostFile
from distributed import wait
from distributed.utils_test import gen_cluster

import gpuspill
from gpuspill.distributed.dask_cuda import adopted_options, bind, missing_parts, why_no_devices
from gpuspill.distributed.mapping import SpillStore


def test_nothing_is_missing():
    problems = missing_parts()
    assert not problems, f"dask-cuda {dask_cuda.__version__} has changed what gpuspill relies on: {problems}"


def test_what_is_missing_is_named(monkeypatch):
    class Changed:
        def __init__(self, devices=None, n_workers=None):
            pass

    monkeypatch.setattr(dask_cuda, "LocalCUDACluster", Changed)
    monkeypatch.setattr(dask_cuda.cli, "worker", click.Argument(["x"]))
    monkeypatch.delattr(dask_cuda.utils, "get_gpu_count")
    found = missing_parts()
    assert {
        "LocalCUDACluster(CUDA_VISIBLE_DEVICES=)",
        "LocalCUDACluster(**kwargs)",
        "dask_cuda.cli.worker, parameter worker_class",
        "dask_cuda.cli.worker.callback",
        "dask_cuda.utils.get_gpu_count",
    } <= set(found)
    assert "LocalCUDACluster(n_workers=)" not in found


def test_arguments_by_position_and_by_name():
    given = bind(dask_cuda.LocalCUDACluster, ("0,1", 2), {"memory_limit": "1 GB", "host": "127.0.0.1"})
    assert given == {"CUDA_VISIBLE_DEVICES": "0,1", "n_workers": 2, "memory_limit": "1 GB", "host": "127.0.0.1"}
    with pytest.raises(TypeError, match="n_workers"):
        bind(dask_cuda.LocalCUDACluster, ("0", 1), {"n_workers": 1})


@pytest.mark.parametrize("hidden", ["", "-1", []])
def test_devices_that_are_hidden(hidden):
    assert why_no_devices(hidden) == "CUDA_VISIBLE_DEVICES hides all devices"


def test_dask_cuda_counts_the_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", raising=False)
    monkeypatch.setattr(dask_cuda.utils, "get_gpu_count", lambda: 2)
    assert why_no_devices() is None
    assert why_no_devices("MIG-41b3359c-e721-56e5-8009-12e5797ed514") is None
    monkeypatch.setattr(dask_cuda.utils, "get_gpu_count", lambda: 0)
    assert why_no_devices() == "no CUDA device was found"

    def no_driver():
        raise OSError("driver is half there")

    monkeypatch.setattr(dask_cuda.utils, "get_gpu_count", no_driver)
    assert why_no_devices() == "no CUDA device was found (NVML: driver is half there)"
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")
    assert why_no_devices() is None


@pytest.mark.parametrize(("limit", "expected"), [(3 * 10**6, 3 * 10**6), (None, None)])
def test_the_limit_of_a_device_host_file_is_adopted(tmp_path, limit, expected):
    data = DeviceHostFile(str(tmp_path), device_memory_limit=limit, memory_limit=10**9)
    assert adopted_options(data) == {"device_memory_limit": expected}
    assert adopted_options({}) == {}


@pytest.mark.parametrize("configured", [None, "2 MB"])
def test_a_worker_that_dask_cuda_has_set_up_keeps_its_limit(configured):
    """--device-memory-limit counts although gpuspill comes by a preload; what gpuspill was told counts more."""
    config = {"gpuspill.device": "simulated", "gpuspill.simulated.memory": "8 MB"}
    if configured:
        config["gpuspill.device-memory-limit"] = configured
    limits = {"device_memory_limit": 3 * 10**6, "memory_limit": 10**9}

    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 1)],
        worker_kwargs={"data": (DeviceHostFile, limits), "preload": "gpuspill"},
        config=config,
    )
    async def body(c, s, a):
        assert isinstance(a.data, SpillStore)
        assert a.data.tier.manager.statistics().limit == (2 * 10**6 if configured else 3 * 10**6)
        future = c.submit(lambda: b"x" * 1000)
        await wait(future)
        assert await future == b"x" * 1000
        directory.append(a.local_directory)

    directory = []
    body()
    assert not os.path.exists(directory[0])


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"data": gpuspill.data()})
async def test_the_summary_of_dask_cuda_config_works(c, s, a):
    assert isinstance(a.data, SpillStore)
    found = await dask_cuda.utils.get_cluster_configuration(c)
    assert found["memory_limit"] == a.memory_manager.memory_limit
    assert "device-memory-limit" not in found  # it asks a DeviceHostFile
