"""``gpuspill.LocalCUDACluster`` on a machine without devices."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster, Nanny, Worker

import gpuspill
from gpuspill.config.jit_unspill import answer_once
from gpuspill.distributed.attach import create
from gpuspill.distributed.mapping import SpillStore
from gpuspill.errors import ConfigError

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are some; and there is no dask-cuda, also where it is installed."""
    monkeypatch.setattr("gpuspill.cluster.cluster_class", lambda: None)
    monkeypatch.setattr("gpuspill.cluster.why_no_devices", lambda visible: "there are none")
    answer_once.cache_clear()


def start(**keywords: object) -> gpuspill.LocalCUDACluster:
    return gpuspill.LocalCUDACluster(dashboard_address=":0", **keywords)


def options_of(cluster: LocalCluster) -> dict[str, object]:
    return cluster.new_spec["options"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gpuspill"]


def test_keywords_keep_their_meaning(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    with start(
        n_workers=0,
        threads_per_worker=3,
        memory_limit="2 GB",
        device_memory_limit="1 GB",
        local_directory=str(tmp_path),
        resources={"GPU": 1},
        host="127.0.0.1",
    ) as cluster:
        assert isinstance(cluster, LocalCluster)
        options = options_of(cluster)
        assert options["nthreads"] == 3
        assert options["memory_limit"] == "2 GB"
        assert options["local_directory"] == str(tmp_path)
        assert options["resources"] == {"GPU": 1}
        assert options["data"] == (create, {"options": {"device_memory_limit": "1 GB"}})
        assert cluster.new_spec["cls"] is Nanny
    assert told(caplog) == ["there are none: starting 0 worker(s) on the CPU only."]


def test_what_is_about_devices_is_ignored_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with start(
        n_workers=0,
        CUDA_VISIBLE_DEVICES="MIG-1,MIG-2",
        protocol="ucx",
        enable_nvlink=True,
        enable_infiniband=None,
        enable_cudf_spill=False,
        rmm_pool_size=0.5,
        rmm_async=True,
        rmm_of_tomorrow=1,
        log_spilling=True,
        pre_import="cudf",
    ) as cluster:
        assert cluster.scheduler_address.startswith("tcp://")
        assert not {name for name in options_of(cluster) if name.startswith(("rmm", "enable", "pre_import", "log_sp"))}
    (message,) = told(caplog)
    assert message.endswith(
        "Ignored, because it is about devices: CUDA_VISIBLE_DEVICES, enable_nvlink, log_spilling, pre_import, "
        "protocol, rmm_async, rmm_of_tomorrow, rmm_pool_size."
    )


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 1), ("0,1", 2), ([0, "GPU-1", 2], 3), ("-1", 1), ("", 1)], ids=repr
)
def test_a_worker_for_each_device_that_was_asked_for(visible: object, count: int) -> None:
    with start(CUDA_VISIBLE_DEVICES=visible, processes=False, jit_unspill=False) as cluster:
        assert len(cluster.workers) == count
        assert all(worker.state.nthreads == 1 for worker in cluster.workers.values())


def test_an_automatic_limit_is_a_workers_part_of_the_memory() -> None:
    limits = {}
    for limit in ("auto", None):
        with start(memory_limit=limit, n_workers=2, processes=False, jit_unspill=False) as cluster:
            limits[limit] = {worker.memory_manager.memory_limit for worker in cluster.workers.values()}
    with LocalCluster(n_workers=2, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster:
        assert limits["auto"] == {worker.memory_manager.memory_limit for worker in cluster.workers.values()}
    assert limits[None] == {None}


def test_workers_spill_by_gpuspill_on_simulated_devices_if_these_are_configured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"gpuspill.device": "simulated", "gpuspill.simulated.memory": "64 MB"}
    with (
        dask.config.set(config),
        start(processes=False, device_memory_limit="auto") as cluster,
        Client(cluster) as client,
    ):
        assert client.submit(sum, [1, 2]).result() == 3
        (worker,) = cluster.workers.values()
        assert isinstance(worker.data, SpillStore)
        assert worker.data.tier is not None
        # dask-cuda's "auto" is no limit.
        assert worker.data.tier.manager.statistics().limit is None
    assert "there are none: starting 1 worker(s) with simulated devices." in told(caplog)


@pytest.mark.parametrize("keywords", [{"jit_unspill": False}, {"enable_jit_unspill": False}])
@pytest.mark.parametrize("configured", [None, True])
def test_switched_off_it_is_a_stock_cluster(keywords: dict[str, bool], configured: bool | None) -> None:
    with (
        dask.config.set({"jit-unspill": configured}),
        start(n_workers=0, shared_filesystem=True, **keywords) as cluster,
    ):
        assert "data" not in options_of(cluster)


def test_the_variable_of_jit_unspill_counts_if_no_keyword_is_given() -> None:
    with dask.config.set({"jit-unspill": "off"}):
        with start(n_workers=0) as cluster:
            assert "data" not in options_of(cluster)
        with start(n_workers=0, jit_unspill=True) as cluster:
            assert options_of(cluster)["data"] == (create, {"options": {}})


def test_a_worker_class_gets_its_processes() -> None:
    class Mine(Worker):
        pass

    class MyNanny(Nanny):
        pass

    with start(n_workers=0, worker_class=Mine) as cluster:
        assert isinstance(cluster.new_spec["cls"], partial)
        assert cluster.new_spec["cls"].func is Nanny
        assert cluster.new_spec["cls"].keywords == {"worker_class": Mine}
    with start(n_workers=0, worker_class=MyNanny) as cluster:
        assert cluster.new_spec["cls"] is MyNanny


def test_the_shared_filesystem_is_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with start(n_workers=0, shared_filesystem=True) as cluster:
            assert "shared_filesystem" not in options_of(cluster)
    answered = [message for message in told(caplog) if "shared_filesystem" in message]
    assert len(answered) == 1
    assert answered[0].startswith("shared_filesystem=True changes nothing: ")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"jit_unspill": True, "enable_jit_unspill": False}, "two names of one switch"),
        ({"jit_unspill": "maybe"}, "jit_unspill: expected true or false, found 'maybe'"),
        ({"data": dict}, "data= was given"),
        ({"device_memory_limit": "lots"}, "gpuspill.device-memory-limit: expected a size"),
        ({"CUDA_VISIBLE_DEVICES": 0}, "CUDA_VISIBLE_DEVICES: expected a list of devices.* found 0: write '0'"),
    ],
)
def test_what_cannot_be_meant_is_an_error(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(n_workers=0, **keywords)


@pytest.mark.parametrize("number", [-1, "2", 1.5])
def test_a_wrong_number_of_workers_is_an_error(number: object, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=f"n_workers: expected how many workers to start, found {number!r}"):
        start(n_workers=number)
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n_wrkers", "Did you mean 'n_workers'"),
        ("memory_limt", "Did you mean 'memory_limit'"),
        ("device_memory_limits", "'device_memory_limit'"),
        ("enable_jitunspill", "'enable_jit_unspill'"),
        (
            "prefetch",
            "It is an option of gpuspill, which the workers read from dask's configuration: gpuspill.prefetch.",
        ),
        ("xyzzy", None),
    ],
)
@pytest.mark.parametrize("switch", [{}, {"jit_unspill": False}])
def test_an_unknown_keyword_is_an_error_at_once(name: str, message: str | None, switch: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match=f"LocalCUDACluster got an unexpected keyword argument '{name}'") as caught:
        start(**{name: 1}, **switch)
    assert str(caught.value).endswith("'xyzzy'.") if message is None else message in str(caught.value)


def test_keywords_of_workers_and_nannies_reach_them(tmp_path: Path) -> None:
    """Of every class on the way, and those of a class of one's own."""

    class Mine(Worker):
        def __init__(self, *args: object, mine: int = 0, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)

    keywords = {
        "resources": {"x": 1},  # of both
        "lifetime": "1 hour",  # of workers
        "env": {"x": "1"},  # of nannies
        "connection_args": {},  # of servers
        "silence_logs": 40,  # of the cluster
    }
    with start(n_workers=0, **keywords) as cluster:
        assert {*keywords, "interface"} - {"silence_logs"} <= {*options_of(cluster)}
    with start(n_workers=0, worker_class=Mine, mine=7, and_others=8) as cluster:
        assert (options_of(cluster)["mine"], options_of(cluster)["and_others"]) == (7, 8)


def test_arguments_have_to_be_named_without_dask_cuda() -> None:
    with pytest.raises(ConfigError, match="name them"):
        gpuspill.LocalCUDACluster("0", 1)


def test_messages_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with start(n_workers=0):
        pass
    assert [record.levelno for record in caplog.records if record.name == "gpuspill"] == [logging.WARNING]
