"""``gpuspill.LocalCUDACluster`` on the real class of dask-cuda: what reaches it and the workers. None is started."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("dask_cuda", reason="dask-cuda is not installed: see ci/test_dask_cuda.sh")

import dask
import dask_cuda
from dask_cuda.plugins import CUDFSetup, RMMSetup

import gpuspill
from gpuspill.distributed.attach import create

MIG = "MIG-41b3359c-e721-56e5-8009-12e5797ed514"
GPU = "GPU-84fd49f2-48ad-50e8-9f2e-3bf0dfd47ccb"


class Unscaled(gpuspill.LocalCUDACluster):
    """A user's subclass; one that starts no workers."""

    def scale(self, n):
        self.asked_for = n


class Stock(dask_cuda.LocalCUDACluster):
    scale = Unscaled.scale


pytestmark = pytest.mark.filterwarnings("ignore:Cannot get CPU affinity", "ignore:When using NVLink")


@pytest.fixture(autouse=True)
def _devices(monkeypatch):
    """As on a machine with devices, as far as dask-cuda gets without them if it is told the limit."""
    monkeypatch.setattr("gpuspill.cluster.why_no_devices", lambda visible: None)


def start(*args, **kwargs):
    return Unscaled(*args, dashboard_address=":0", **kwargs)


def options_of(cluster):
    """Return the options of the first worker that would be started, by the name of its device."""
    ((name, spec),) = cluster.new_worker_spec().items()
    return name, spec["options"]


def plugin_of(options, kind):
    (plugin,) = (plugin for plugin in options["plugins"] if isinstance(plugin, kind))
    return plugin


def test_it_is_dask_cudas_class_and_gpuspills():
    with start(CUDA_VISIBLE_DEVICES="0", device_memory_limit="1 GB") as cluster:
        assert isinstance(cluster, Unscaled)
        assert isinstance(cluster, gpuspill.LocalCUDACluster)
        assert isinstance(cluster, dask_cuda.LocalCUDACluster)
        assert type(cluster).__name__ == "Unscaled"
        assert cluster.device_memory_limit == 10**9
        assert cluster.asked_for == 1


def test_an_unknown_keyword_is_an_error_at_once_and_those_of_dask_cuda_are_known():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'rmm_pool_sze'\. Did you mean .*'rmm_pool_size'"):
        start(CUDA_VISIBLE_DEVICES="0", device_memory_limit="1 GB", rmm_pool_sze=1)
    with start(
        CUDA_VISIBLE_DEVICES="0", device_memory_limit="1 GB", rmm_async=True, resources={"x": 1}, lifetime="1 h"
    ) as cluster:
        assert options_of(cluster)[1]["lifetime"] == "1 h"


def test_without_devices_a_misspelt_keyword_is_an_error_too(monkeypatch):
    monkeypatch.setattr("gpuspill.cluster.why_no_devices", lambda visible: "there are none")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'rmm_pool_sze'\. Did you mean .*'rmm_pool_size'"):
        start(n_workers=0, rmm_pool_sze=1)
    with start(n_workers=0, rmm_pool_size=1):
        pass


@pytest.mark.parametrize("limit", ["default", "auto", 0.5])
def test_told_to_touch_no_device_it_asks_none_for_the_limit(monkeypatch, limit):
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")

    def asked(*args):
        raise AssertionError("the device was asked")

    monkeypatch.setattr("dask_cuda.utils.has_device_memory_resource", asked)
    monkeypatch.setattr("dask_cuda.utils.get_device_total_memory", asked)
    with start("0", 1, 3, device_memory_limit=limit) as cluster:
        _, options = options_of(cluster)
        assert options["nthreads"] == 3
        expected = {"default": {}, "auto": {"device_memory_limit": None}}
        assert options["data"][1] == {"options": expected.get(limit, {"device_memory_limit": limit})}


@pytest.mark.parametrize(
    ("limit", "option"), [("1 GB", "1 GB"), (10**9, 10**9), ("0", "0"), (0, 0), (None, None)], ids=repr
)
@pytest.mark.parametrize("switch", [{}, {"jit_unspill": True}, {"enable_jit_unspill": True}, {"jit_unspill": "on"}])
def test_the_device_limit_reaches_gpuspill(limit, option, switch):
    with start(CUDA_VISIBLE_DEVICES=[0], device_memory_limit=limit, **switch) as cluster:
        _, options = options_of(cluster)
        assert options["data"] == (create, {"options": {"device_memory_limit": option}})


def test_by_default_the_limit_is_what_gpuspill_is_configured_to(monkeypatch):
    # dask-cuda itself asks NVML what its default comes to.
    monkeypatch.setattr("dask_cuda.local_cuda_cluster.parse_device_memory_limit", lambda limit, device_index: limit)
    with start(CUDA_VISIBLE_DEVICES="0") as cluster:
        assert cluster.device_memory_limit == "default"
        assert options_of(cluster)[1]["data"] == (create, {"options": {}})
    with start(CUDA_VISIBLE_DEVICES="0", device_memory_limit="auto") as cluster:
        assert cluster.device_memory_limit == "auto"
        assert options_of(cluster)[1]["data"] == (create, {"options": {"device_memory_limit": None}})


@pytest.mark.parametrize("devices", [f"{MIG},{GPU}", [MIG, GPU]])
def test_devices_with_uuids(monkeypatch, devices):
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")  # it looks up their CPUs else, by number
    with start(devices, device_memory_limit="1 GB") as cluster:
        assert cluster.asked_for == 2
        name, options = options_of(cluster)
        assert name in (MIG, GPU)
        assert options["env"]["CUDA_VISIBLE_DEVICES"].split(",")[0] == name


def test_arguments_by_position():
    with start("0,1", 2, 3, "2 GB", "1 GB") as cluster:
        _, options = options_of(cluster)
        assert cluster.asked_for == 2
        assert options["nthreads"] == 3
        assert options["memory_limit"] == 2 * 10**9
        assert options["data"][1] == {"options": {"device_memory_limit": "1 GB"}}


def test_what_is_about_rmm_and_hosts_passes_through(tmp_path):
    with start(
        CUDA_VISIBLE_DEVICES="0",
        device_memory_limit="1 GB",
        memory_limit="3 GB",
        threads_per_worker=2,
        local_directory=str(tmp_path),
        rmm_pool_size="2 GB",
        rmm_maximum_pool_size="3 GB",
        rmm_managed_memory=True,
        rmm_allocator_external_lib_list="cupy,torch",
        rmm_log_directory=str(tmp_path),
        rmm_track_allocations=True,
        pre_import="json",
        host="127.0.0.1",
        resources={"GPU": 1},
    ) as cluster:
        _, options = options_of(cluster)
    plugin = plugin_of(options, RMMSetup)
    assert plugin.initial_pool_size == "2 GB"
    assert plugin.maximum_pool_size == "3 GB"
    assert plugin.managed_memory is True
    assert plugin.external_lib_list == ["cupy", "torch"]
    assert plugin.log_directory == str(tmp_path)
    assert plugin.rmm_track_allocations is True
    assert options["nthreads"] == 2
    assert options["memory_limit"] == 3 * 10**9
    assert options["local_directory"] == str(tmp_path)
    assert options["resources"] == {"GPU": 1}
    assert options["preload"] == ["dask_cuda.initialize"]
    assert "PreImport" in {type(plugin).__name__ for plugin in options["plugins"]}


def test_the_asynchronous_allocator_passes_through():
    with start(
        CUDA_VISIBLE_DEVICES="0", device_memory_limit=0, rmm_async=True, rmm_release_threshold="1 GB"
    ) as cluster:
        plugin = plugin_of(options_of(cluster)[1], RMMSetup)
    assert plugin.async_alloc is True
    assert plugin.release_threshold == "1 GB"


def test_what_is_about_cudf_passes_through(monkeypatch):
    options = {}
    monkeypatch.setitem(sys.modules, "cudf", SimpleNamespace(set_option=options.__setitem__))
    with start(CUDA_VISIBLE_DEVICES="0", device_memory_limit=0, enable_cudf_spill=True, cudf_spill_stats=2) as cluster:
        plugin = plugin_of(options_of(cluster)[1], CUDFSetup)
    assert (plugin.spill, plugin.spill_stats) == (True, 2)
    assert options == {"spill": True, "spill_stats": 2}  # in this process


def test_errors_are_dask_cudas_own():
    with pytest.raises(TypeError, match="requires protocol='ucx'"):
        start(CUDA_VISIBLE_DEVICES="0", device_memory_limit=0, protocol="tcp", enable_nvlink=True)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES must be comma-separated"):
        start(CUDA_VISIBLE_DEVICES="first", device_memory_limit=0)
    with pytest.raises(ValueError, match="Processes are necessary"):
        start(CUDA_VISIBLE_DEVICES="0", device_memory_limit=0, processes=False)


@pytest.mark.parametrize("switch", [{"jit_unspill": False}, {"enable_jit_unspill": False}])
def test_switched_off_it_is_stock(monkeypatch, switch):
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")
    with (
        start(CUDA_VISIBLE_DEVICES="0", device_memory_limit="1 GB", **switch) as cluster,
        Stock(CUDA_VISIBLE_DEVICES="0", device_memory_limit="1 GB", dashboard_address=":0") as stock,
    ):
        ours, theirs = options_of(cluster)[1], options_of(stock)[1]
        assert ours["data"] == theirs["data"]
        assert ours.keys() == theirs.keys()


def test_the_variable_of_jit_unspill_switches_it_off_and_a_keyword_on(monkeypatch):
    monkeypatch.setenv("DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC", "1")
    with dask.config.set({"jit-unspill": "off"}):
        with start(CUDA_VISIBLE_DEVICES="0", device_memory_limit=0) as cluster:
            assert options_of(cluster)[1]["data"] == {}
        with start(CUDA_VISIBLE_DEVICES="0", device_memory_limit=0, jit_unspill=True) as cluster:
            assert options_of(cluster)[1]["data"][0] is create


def test_the_gpu_libraries_can_be_imported_beside_it():
    """They are here, if without a device; nothing of gpuspill fails over them."""
    import cupy
    import rmm
    from numba import cuda

    assert cupy.__version__
    assert rmm.__version__
    assert not cuda.is_available()
    assert gpuspill.data()[0] is create
