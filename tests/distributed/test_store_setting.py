"""Records in other places than files: the setting ``store``."""

from __future__ import annotations

import os
import zlib

import dask
import dask.array as da
import fsspec
import numpy as np
import pytest
import zict
from distributed import Client, LocalCluster, wait
from distributed.utils_test import gen_cluster

import gpuspill
from gpuspill.config import Settings
from gpuspill.distributed.attach import attach
from gpuspill.errors import ConfigError
from gpuspill.storage.files import FileStore
from gpuspill.storage.wrappers import WrapperStore
from tests.distributed.clusters import all_spilled

pytestmark = pytest.mark.cluster


def in_memory_files(directory):
    return fsspec.get_mapper(f"memory://{os.path.basename(directory)}", create=True)


def local_files(directory):
    return fsspec.get_mapper(f"file://{directory}/records", create=True)


def zict_files(directory):
    return zict.File(os.path.join(directory, "zict"))


def compressed(directory):
    return zict.Func(zlib.compress, zlib.decompress, {})


class Wrapped(WrapperStore):
    pass


def a_store(directory):
    return Wrapped(FileStore(directory))


def nonsense(directory):
    return [directory]


STORES = [in_memory_files, local_files, zict_files, compressed, a_store]


@pytest.mark.parametrize("store", STORES)
def test_an_array_larger_than_memory(store):
    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 1), ("127.0.0.1", 2)],
        worker_kwargs={"data": gpuspill.data(store=store, host_limit="1 MiB")},
        config={"distributed.worker.memory.spill": False},
    )
    async def body(c, s, *workers):
        x = c.persist(da.from_array(np.arange(1_000_000.0).reshape(1000, 1000), chunks=100))
        await wait(x)
        for _ in range(2):
            assert await c.compute((x + x.T).sum()) == 2 * np.arange(1_000_000.0).sum()
        for worker in workers:
            found = worker.data.statistics()
            assert found.spills > 0
            assert found.restores > 0
            assert found.loop_io == 0
            assert found.written_nbytes <= worker.data.cumulative_metrics["disk-write", "bytes"]
            assert worker.data.cumulative_metrics["disk-read", "count"] > 0
        del x

    body()


def test_by_name_in_the_configuration():
    with dask.config.set({"gpuspill.store": "zict:File"}):
        assert Settings.load().store is zict.File


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "gpuspill.store: expected a function"),
        ("nothing", "gpuspill.store: expected a function"),
        (":x", "gpuspill.store: expected a function"),
        (
            "no_such_package:x",
            "gpuspill.store: 'no_such_package:x' cannot be imported: ModuleNotFoundError: No",
        ),
        ("zict:no_such_name", "gpuspill.store: 'zict:no_such_name' cannot be imported"),
        ("zict:__doc__", "gpuspill.store: expected a function"),
    ],
)
def test_what_is_no_store_is_one_clear_error_where_the_cluster_is_made(value, message):
    with pytest.raises(ConfigError, match=message):
        gpuspill.data(store=value)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_function_that_returns_no_store(c, s, a):
    with pytest.raises(ConfigError, match=r"gpuspill.store: .*nonsense.* returned builtins.list; expected"):
        attach(a, store=nonsense)
    assert not hasattr(a, "_gpuspill")


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"data": gpuspill.data(store=zict_files, host_limit=1)})
async def test_it_is_shown_by_its_name(c, s, a):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    shown = (await gpuspill.settings(c)).loc[(a.address, "store")]
    assert shown["value"] == f"{__name__}:zict_files"
    assert shown["in_force"] == f"{__name__}:zict_files"
    assert shown["origin"] == "keyword"


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path):
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            dashboard_address=":0",
            local_directory=str(tmp_path),
            data=gpuspill.data(store=zict_files, host_limit=1),
        ) as cluster,
        Client(cluster) as client,
    ):
        xs = client.map(np.ones, [100_000] * 5, pure=False)
        assert sum(client.gather(client.map(np.sum, xs))) == 500_000
        assert gpuspill.statistics(client)["spills"].sum() > 0
