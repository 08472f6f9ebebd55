"""The story of a key, asked of the workers of a cluster."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import gpuspill
from gpuspill import DataLostError
from tests.distributed.clusters import all_spilled, spilling
from tests.distributed.test_lost import damage_all

pytestmark = pytest.mark.cluster


@spilling(limits=(1,))
async def test_the_story_of_a_key_over_a_cluster(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    y = c.submit(np.ones, 1000, workers=[b.address], pure=False)
    await wait([x, y])
    await all_spilled(a, b)
    found = await gpuspill.story(c, x)
    assert list(found) == [a.address]
    assert [event.what for event in found[a.address]] == ["written", "evicted"]
    assert list(await gpuspill.story(c, y.key)) == [b.address]
    assert await gpuspill.story(c, "unknown") == {}
    await c.submit(np.sum, x, workers=[a.address])
    assert "read" in [event.what for event in (await gpuspill.story(c, x.key))[a.address]]


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1)])
async def test_the_error_of_a_task_tells_the_story_of_the_input_that_is_lost(c, s, a):
    x = (await c.scatter({"my-data": np.ones(1000)}))["my-data"]
    await damage_all(a)
    with pytest.raises(DataLostError, match="my-data") as caught:
        await c.submit(np.sum, x)
    (note,) = caught.value.__notes__
    assert "written (disk" in note
    assert "lost (disk" in note


@spilling(limits=(1,))
async def test_so_does_the_error_on_another_worker(c, s, a, b):
    x = (await c.scatter({"my-data": np.ones(1000)}, workers=[a.address]))["my-data"]
    await damage_all(a)
    with pytest.raises(DataLostError, match="my-data") as caught:
        await c.submit(np.sum, x, workers=[b.address])
    assert "written (disk" in caught.value.__notes__[0]


def test_from_a_client_that_waits():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, data=gpuspill.data(), dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        assert gpuspill.story(client, client.submit(int)) == {}
