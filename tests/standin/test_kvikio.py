"""KvikIO itself between the stand-in's memory and files, by its compatibility mode."""

import gc

import numpy as np
import pytest

from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.driver import CudaDriver
from gpuspill.device.past_host import PastHost, Trust
from gpuspill.device.port import CopyPlan
from gpuspill.testing.past_host_tests import DevicePastHostTests
from tests.standin.rig import Rig

pytest.importorskip("kvikio", reason="KvikIO is not installed: make test-cuda")

MB = 2**20


@pytest.fixture
def files():
    from gpuspill.device.cuda.kvikio_files import KvikioFiles

    return KvikioFiles()


class TestKvikio(DevicePastHostTests):
    @pytest.fixture
    def device(self):
        device = GpuDevice(CudaDriver(), plan=CopyPlan())
        yield device
        device.close()

    @pytest.fixture
    def driver(self, files, device):
        return files


def test_units_to_disk_and_back(files, tmp_path, standin):
    """Numba's arrays, of sizes that are pages, and are not."""
    cuda = pytest.importorskip("numba.cuda")
    past_host = PastHost(files, piece=4 * 4096, trust=Trust(minimum=1))
    rig = Rig(tmp_path, standin, host_limit=0, past_host=past_host)
    values = [np.random.default_rng(n).random(n) for n in (1, 511, 512, 513, MB // 8, MB // 8 + 1)]
    for number, value in enumerate(values):
        rig.put(number, [cuda.to_device(value)])
    for rounds in (1, 2):
        rig.to_host()
        assert rig.tier.statistics().device_nbytes == 0
        assert rig.disk.statistics().payload_nbytes == sum(value.nbytes for value in values)
        for number, value in enumerate(values):
            np.testing.assert_array_equal(rig.get(number)[0].copy_to_host(), value)
        assert past_host.writes == past_host.reads == rounds * len(values)
    rig.close()
    gc.collect()
