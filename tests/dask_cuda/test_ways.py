"""Every way of switching gpuspill on beside the real dask-cuda starts, computes on a device, spills and stops.

On a machine without devices, with simulated ones. Depends on nothing but installed packages: ``ci/wheel.sh`` runs this
file against a wheel, away from the checkout.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("dask_cuda", reason="dask-cuda is not installed: see ci/test_dask_cuda.sh")

import dask_cuda
import dask_cuda.cli
from distributed import Client, LocalCluster

import gpuspill

pytestmark = pytest.mark.cluster

COUNT, NBYTES = 48, 2**18
LIMIT = COUNT * NBYTES // 4
#: In the environment, which reaches worker processes however they are started. The second is dask-cuda's own switch.
ENVIRONMENT = {
    "DASK_GPUSPILL__DEVICE": "simulated",
    "DASK_GPUSPILL__SIMULATED__MEMORY": str(2 * LIMIT),
    "DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC": "1",
    "CUDA_VISIBLE_DEVICES": "0",
}
#: How the command of dask-cuda 26.06 ends whenever it is asked to stop, whether gpuspill is installed or not.
STOPPED = "RuntimeError: Event loop stopped before Future completed."


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    import dask

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with dask.config.set(gpuspill=dask.config.collect_env()["gpuspill"]):
        yield


def compute(client):
    """Run a job on more than fits on the device, twice over; return the workers' numbers."""

    def make(i, count):
        import numpy as np

        from gpuspill import simulated

        return simulated.asarray(np.full(count, i, "f8"))

    def doubled_sum(value):
        from gpuspill import simulated

        assert isinstance(value, simulated.Array)
        return float((value + value).sum())

    values = client.map(make, range(COUNT), count=NBYTES // 8, pure=False)
    for _ in range(2):
        sums = client.gather(client.map(doubled_sum, values, pure=False))
        assert sums == [2.0 * i * (NBYTES // 8) for i in range(COUNT)]
    numbers = gpuspill.statistics(client)
    assert numbers.device_spills.sum() > 0
    assert numbers.device_restores.sum() > 0
    assert (numbers.device_limit == LIMIT).all()
    assert (numbers.loop_io == 0).all()
    return numbers


def directories(client):
    return list(client.run(lambda dask_worker: dask_worker.local_directory).values())


def check(client, workers=1):
    client.wait_for_workers(workers, timeout=60)
    assert len(compute(client)) == workers
    return directories(client)


def test_its_cluster_class(tmp_path):
    with (
        gpuspill.LocalCUDACluster(
            enable_jit_unspill=True, device_memory_limit=LIMIT, local_directory=tmp_path, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        assert isinstance(cluster, dask_cuda.LocalCUDACluster)
        left = check(client)
    assert not any(map(os.path.exists, left))


def test_the_stock_cluster_class():
    data = gpuspill.data(device_memory_limit=LIMIT)
    with (
        dask_cuda.LocalCUDACluster(data=data, device_memory_limit=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        left = check(client)
    assert not any(map(os.path.exists, left))


def test_its_cluster_class_where_dask_cuda_finds_no_device(monkeypatch, caplog):
    """As in another project's CI: not even dask-cuda's switch is set."""
    monkeypatch.delenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with (
        gpuspill.LocalCUDACluster(
            n_workers=2,
            jit_unspill=True,
            device_memory_limit=LIMIT,
            rmm_pool_size="1 GB",
            protocol="ucx",
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        assert not isinstance(cluster, dask_cuda.LocalCUDACluster)
        left = check(client, workers=2)
    assert not any(map(os.path.exists, left))
    (told,) = [record.getMessage() for record in caplog.records if record.name == "gpuspill"]
    assert told == (
        "CUDA_VISIBLE_DEVICES hides all devices: starting 2 worker(s) with simulated devices. "
        "Ignored, because it is about devices: protocol, rmm_pool_size."
    )


@contextlib.contextmanager
def scheduler():
    with LocalCluster(n_workers=0, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield cluster.scheduler_address, client


@contextlib.contextmanager
def command(*words, **environment):
    """Run ``dask ...`` until the end of the block, then ask it to stop, as a terminal would, and wait for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = []
    try:
        yield output
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    except BaseException:
        process.kill()
        print(process.communicate()[0])
        raise
    output.append(text)
    if words[0] == "cuda" and hasattr(dask_cuda.cli, "install_signal_handlers"):
        assert text.rstrip().endswith(STOPPED), text
    else:
        assert process.returncode == 0, text


def test_the_flag_of_dask_cuda_worker():
    with scheduler() as (address, client):
        flag = ("--enable-jit-unspill", "--device-memory-limit", str(LIMIT))
        with command("cuda", "worker", address, *flag, "--no-dashboard") as output:
            left = check(client)
        assert "gpuspill is attached to" in output[0]
    assert not any(map(os.path.exists, left))


def test_the_preload_of_dask_cuda_worker():
    environment = {"DASK_GPUSPILL__DEVICE_MEMORY_LIMIT": str(LIMIT)}
    with scheduler() as (address, client):
        words = ("--preload", "gpuspill", "--device-memory-limit", "0", "--no-dashboard")
        with command("cuda", "worker", address, *words, **environment):
            left = check(client)
    assert not any(map(os.path.exists, left))


def test_the_worker_class_of_dask_cuda_worker():
    environment = {"DASK_GPUSPILL__DEVICE_MEMORY_LIMIT": str(LIMIT)}
    with scheduler() as (address, client):
        words = ("--worker-class", "gpuspill.Worker", "--device-memory-limit", "0", "--no-dashboard")
        with command("cuda", "worker", address, *words, **environment):
            left = check(client)
    assert not any(map(os.path.exists, left))


def test_the_preload_of_dask_worker():
    environment = {"DASK_GPUSPILL__DEVICE_MEMORY_LIMIT": str(LIMIT)}
    words = ("--nthreads", "1", "--preload", "gpuspill", "--no-dashboard")
    with scheduler() as (address, client), command("worker", address, *words, **environment):
        left = check(client)
    assert not any(map(os.path.exists, left))


def test_the_plugin_on_a_cluster_of_dask_cuda():
    with (
        dask_cuda.LocalCUDACluster(device_memory_limit=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(gpuspill.SpillPlugin(device_memory_limit=LIMIT))
        left = check(client)
    assert not any(map(os.path.exists, left))
