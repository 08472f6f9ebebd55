"""Arrays of Numba's CUDA simulator: of a device that gpuspill does not know, in a class that dask fails to look up.

The simulator is switched on by a variable that Numba reads when it is imported: workers are processes of their own.
"""

from __future__ import annotations

import asyncio
import logging
from importlib.util import find_spec

import numpy as np
import pytest
from distributed import Nanny, wait
from distributed.utils_test import async_poll_for, gen_cluster

import gpuspill

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("numba") is None, reason="needs Numba, for its CUDA simulator: make test-numba"),
]

N = 1000
NBYTES = 8 * N
COUNT = 4


def with_simulator(**config):
    """As ``gen_cluster``, with one worker in a process of its own, which spills whatever can be spilled.

    It has one thread: the simulator runs one kernel at a time.
    """
    return gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 1)],
        Worker=Nanny,
        worker_kwargs={"env": {"NUMBA_ENABLE_CUDASIM": "1"}, "data": gpuspill.data(host_limit=1, **config)},
        timeout=120,
    )


def make(i):
    from numba import config, cuda

    assert config.ENABLE_CUDASIM
    return cuda.to_device(np.arange(N) + float(i))


def double(array):
    """Run a kernel on an array, in place."""
    global cuda  # it is there that the simulator puts what a kernel may call
    from numba import cuda

    @cuda.jit
    def kernel(array):
        for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
            array[i] *= 2

    kernel[2, 4](array)
    return array


def doubled(array):
    """What a kernel makes of an array, on the host, and of which class the array is."""
    return type(array).__name__, double(array).copy_to_host()


def assert_doubled(found):
    for i, (name, array) in enumerate(found):
        assert name == "FakeCUDAArray"
        np.testing.assert_array_equal(array, 2 * (np.arange(N) + i))


def teach():
    """Teach dask to serialise the class, by the public way."""
    from distributed.protocol import dask_deserialize, dask_serialize
    from numba import cuda

    cls = type(cuda.to_device(np.zeros(1)))

    @dask_serialize.register(cls)
    def serialize(array):
        host = array.copy_to_host()
        return {"dtype": host.dtype.str, "shape": host.shape}, [memoryview(host)]

    @dask_deserialize.register(cls)
    def deserialize(header, frames):
        (frame,) = frames
        return cuda.to_device(np.frombuffer(frame, header["dtype"]).reshape(header["shape"]))


async def evict_all(dask_worker):
    await asyncio.to_thread(dask_worker.data.manager.limits.evict_all)
    dask_worker.data.manager.validate()
    return dask_worker.data.statistics()


async def evicted(c):
    (statistics,) = (await c.run(evict_all)).values()
    return statistics


def listen(dask_worker):
    """Keep what gpuspill logs in the worker's process."""

    class Kept(logging.Handler):
        def emit(self, record):
            dask_worker.logged.append(record.getMessage())

    dask_worker.logged = []
    logging.getLogger("gpuspill").addHandler(Kept())


async def logged(c):
    (messages,) = (await c.run(lambda dask_worker: dask_worker.logged)).values()
    return messages


DEVICES = pytest.mark.parametrize("device", [None, "simulated"])


@DEVICES
def test_arrays_that_dask_was_taught_to_serialise_spill_and_come_back(device):
    @with_simulator(device=device)
    async def body(c, s, nanny):
        await c.run(listen)
        await c.run(teach)
        xs = c.map(make, range(COUNT))
        several = c.submit(lambda: {"a": make(0), "b": [make(1)]})
        await wait([*xs, several])
        statistics = await evicted(c)
        assert (statistics.disk_keys, statistics.host_nbytes, statistics.unspillable) == (COUNT + 1, 0, 0)
        assert statistics.estimated_nbytes == COUNT * NBYTES
        assert (statistics.device_nbytes, statistics.device_spilled_nbytes) == (0, 0)
        assert_doubled(await c.gather(c.map(doubled, xs)))
        assert_doubled(await c.submit(lambda found: [doubled(found["a"]), doubled(found["b"][0])], several))
        statistics = await evicted(c)
        assert statistics.restores >= COUNT + 1
        assert await logged(c) == []

    body()


@DEVICES
def test_arrays_that_cannot_be_serialised_stay_and_stop_nobody(device):
    @with_simulator(device=device)
    async def body(c, s, nanny):
        await c.run(listen)
        xs = c.map(make, range(COUNT))
        ys = c.map(lambda i: np.full(N, i), range(COUNT))
        await wait([*xs, *ys])
        statistics = await evicted(c)
        assert (statistics.unspillable, statistics.disk_keys) == (COUNT, COUNT)
        assert statistics.host_nbytes == statistics.estimated_nbytes == COUNT * NBYTES
        (message,) = await logged(c)
        assert "cannot serialise" in message
        assert "FakeCUDAArray" in message
        assert_doubled(await c.gather(c.map(doubled, xs)))
        assert await c.gather(c.map(np.sum, ys)) == [N * i for i in range(COUNT)]
        assert len(await logged(c)) == 1
        xs = [x.key for x in xs]

        async def forget(dask_worker):
            await async_poll_for(lambda: not any(key in dask_worker.data for key in xs), timeout=30)

        await c.run(forget)
        statistics = await evicted(c)
        assert (statistics.unspillable, statistics.estimated_nbytes) == (0, 0)

    body()
