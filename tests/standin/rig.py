"""Three tiers whose device is a stand-in for a GPU."""

import gc

from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.driver import CudaDriver
from gpuspill.device.port import CopyPlan
from gpuspill.distributed.serialization import DaskSerializer, DeviceFamilies
from gpuspill.manager import ProxifyManager
from gpuspill.storage.files import FileStore
from gpuspill.tier import DeviceTier

MB = 2**20


class Rig:
    def __init__(self, directory, standin, *, limit=None, host_limit=None, staged=True, **options):
        self.standin = standin
        self.device = GpuDevice(CudaDriver(), plan=CopyPlan(MB, staged))
        self.disk = FileStore(directory)
        self.host = ProxifyManager(
            limit=host_limit, store=self.disk, serializer=DaskSerializer(), sizeof=lambda value: 100
        )
        self.tier = DeviceTier(self.device, self.host, limit=limit, families=DeviceFamilies(), **options)
        self.skeletons = {}

    def put(self, key, value):
        self.skeletons[key] = self.tier.proxify(value)

    def get(self, key):
        return self.tier.resolve(self.skeletons[key])

    def to_host(self):
        gc.collect()
        self.tier.settle()
        self.tier.manager.limits.evict_all()

    def to_disk(self):
        self.to_host()
        self.host.limits.evict_all()

    def close(self):
        self.skeletons.clear()
        self.tier.settle()
        self.tier.validate()
        self.tier.close()
        self.host.close()
        self.device.close()
