"""KvikIO on memory of a GPU: through its compatibility mode where there is no GPUDirect Storage, else by that."""

import gc

import numpy as np
import pytest

from gpuspill.device.cuda import find as cuda
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.kvikio_files import KvikioFiles, kvikio_files
from gpuspill.device.past_host import PastHost, Trust
from gpuspill.device.port import CopyPlan
from gpuspill.errors import ConfigError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.storage.files import FileStore
from gpuspill.testing.past_host_tests import DevicePastHostTests
from gpuspill.tier import DeviceTier

pytestmark = pytest.mark.gpu

MB = 2**20


@pytest.fixture
def device():
    try:
        cuda.device()
    except ConfigError as error:
        pytest.skip(f"no GPU to test on: {error}")
    pytest.importorskip("kvikio")
    device = GpuDevice(cuda.CudaDriver(), plan=CopyPlan(MB, staged=True))
    yield device
    device.close()


class TestKvikio(DevicePastHostTests):
    @pytest.fixture
    def driver(self):
        return KvikioFiles()


@pytest.mark.parametrize("found", [False, True], ids=["as it is", "GPUDirect Storage"])
def test_arrays_there_and_back(device, tmp_path, found):
    """Computed on a stream that nobody knows of, of whole pages and not; the memory is used again at once."""
    cupy = pytest.importorskip("cupy")
    files = KvikioFiles()
    if found:
        try:
            files = kvikio_files(str(tmp_path))
        except ConfigError as error:
            pytest.skip(f"no GPUDirect Storage here: {error}")
    past_host = PastHost(files, trust=Trust(minimum=1))
    store = FileStore(tmp_path)
    host = ProxifyManager(limit=0, store=store, serializer=PickleSerializer(), sizeof=lambda value: 100)
    tier = DeviceTier(device, host, limit=None, past_host=past_host)
    sizes = (1, 1000, MB // 8, 40 * MB // 8 + 3)
    kept = {}
    for size in sizes:
        with cupy.cuda.Stream(non_blocking=True):
            array = cupy.arange(float(size))
            for _ in range(100):
                array += 1.0
        kept[size] = tier.proxify([array, array[size // 2 :]])
        del array
    for _ in range(2):
        gc.collect()
        tier.settle()
        tier.manager.limits.evict_all()
        assert tier.statistics().device_nbytes == 0
        for size in sizes:
            array, half = tier.resolve(kept[size])
            np.testing.assert_array_equal(cupy.asnumpy(array), np.arange(float(size)) + 100)
            half[0] = -1.0
            assert float(array[size // 2]) == -1.0
            half[0] = size // 2 + 100.0
            del array, half
    assert tier.statistics().past_host_spills == past_host.reads == 2 * len(sizes)
    kept.clear()
    tier.close()
    host.close()
