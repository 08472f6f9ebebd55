"""Workers of Dask whose values are Numba's arrays, on the stand-in for a GPU, from end to end."""

import asyncio
import gc

import dask
import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import async_poll_for

from gpuspill.device.cuda import find
from tests.distributed.clusters import spilling

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed: make test-cuda")

MB = 2**20
KB = 2**10
#: A quarter of what the values take; the device has 16 MiB, and Numba keeps a fifth of that for later.
LIMIT = 8 * MB
CHUNK = 512 * KB
COUNT = 4 * LIMIT // CHUNK


@pytest.fixture
def opened(monkeypatch):
    """The process's device, opened anew."""
    found = find._Opened()
    monkeypatch.setattr(find, "_opened", found)
    yield found
    if found._device is not None:
        found._device.close()


def on_device(**options):
    return spilling(
        limits=(1, LIMIT),
        nthreads=[("127.0.0.1", 2)],
        config={"gpuspill.device": "cuda", "gpuspill.device-memory-limit": LIMIT},
        **options,
    )


# Tasks compute on the host: the stand-in runs no kernels. All their data comes from the device and goes back there.


def make(number):
    from numba import cuda

    return {"x": cuda.to_device(np.full(CHUNK // 8, float(number))), "number": number}


def add(one, other):
    from numba import cuda

    total = one["x"].copy_to_host() + other["x"].copy_to_host()
    return {"x": cuda.to_device(total), "number": one["number"] + other["number"]}


def halves(one):
    """Two views on one piece of memory."""
    array = one["x"]
    middle = array.shape[0] // 2
    return array[:middle], array[middle:]


def total(pair):
    return float(sum(part.copy_to_host().sum() for part in pair))


@on_device()
async def test_four_times_the_device_gives_what_numpy_does(c, s, a, opened, standin):
    """Through device, host and disk; nothing is used after it was freed, nothing is left, no loop calls the device."""
    tier = a.data.tier
    with standin.marking() as called:  # this is the loop's thread
        made = [dask.delayed(make)(number) for number in range(COUNT)]
        first = c.persist(made)
        await wait(first)
        assert tier.statistics().spilled_nbytes >= 2 * LIMIT
        sums = c.persist([dask.delayed(add)(first[i], first[-1 - i]) for i in range(COUNT)])
        await wait(sums)
        parts = c.persist([dask.delayed(halves)(one) for one in sums])
        got = await c.compute(dask.delayed(sum)([dask.delayed(total)(pair) for pair in parts]))
        assert a.data.statistics().disk_nbytes or tier.statistics().direct_spills
        del made, first, sums, parts
        await async_poll_for(lambda: not a.data, timeout=30)
    assert got == float((CHUNK // 8) * (COUNT - 1) * COUNT)
    assert set(called) <= HARMLESS, sorted(set(called) - HARMLESS)
    assert not standin.violation

    def nothing_is_left():
        gc.collect()
        tier.settle()
        return not tier.statistics().units

    await async_poll_for(nothing_is_left, timeout=30)
    await asyncio.to_thread(free)
    await async_poll_for(lambda: not standin.count("live_bytes"), timeout=30)
    tier.validate()


#: Questions that wait for nothing.
HARMLESS = {
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuEventQuery",
    "cuMemGetInfo_v2",
}


def free():
    from numba import cuda

    gc.collect()
    cuda.current_context().memory_manager.deallocations.clear()
    cuda.synchronize()
