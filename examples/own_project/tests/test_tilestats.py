"""tilestats on a device that CI has: a simulated one."""

import dask.array as da
import gpuspill
import numpy as np
import pytest
from dask.distributed import Client, LocalCluster
from gpuspill import simulated
from gpuspill.device.port import OutOfMemory
from tilestats import contrast, normalise


@pytest.fixture
def device():
    """A device of 10 MB; fails the test if memory is used too early or without order."""
    device = simulated.SimulatedDevice(10_000_000)
    with simulated.use(device):
        yield device
    assert device.statistics().violations == 0


@pytest.fixture
def client():
    """A worker that keeps 1 MB of values on its device."""
    data = gpuspill.data(device="simulated", device_memory_limit="1 MB")
    with (
        LocalCluster(
            n_workers=1, processes=False, dashboard_address=None, data=data
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_a_tile_stays_on_the_device(device):
    tile = np.random.default_rng(0).random((100, 100))
    result = normalise(simulated.asarray(tile))
    assert isinstance(result, simulated.Array)
    np.testing.assert_allclose(simulated.asnumpy(result), normalise(tile))


def test_nothing_is_copied_to_the_host_unasked(device):
    with pytest.raises(TypeError):
        np.asarray(simulated.asarray(np.ones(3)))


def test_a_tile_that_does_not_fit_is_an_error(device):
    with pytest.raises(OutOfMemory):
        simulated.empty((2_000, 2_000))


def test_an_image_larger_than_the_device_limit(client):
    image = np.random.default_rng(0).random((1_000, 500))  # 4 MB
    tiles = da.from_array(image, chunks=(100, 500)).map_blocks(simulated.asarray).persist()
    found = contrast(tiles).map_blocks(simulated.asnumpy).compute()
    expected = contrast(da.from_array(image, chunks=(100, 500))).compute(
        scheduler="synchronous"
    )
    np.testing.assert_allclose(found, expected)
    assert gpuspill.statistics(client)["device_spills"].sum() > 0
