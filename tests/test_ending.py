"""What dies is dead to weak references before anything of it is freed: else another thread could take hold of it."""

import weakref

import pytest

from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.port import AllocationId, CopyPlan
from gpuspill.ending import Ending
from gpuspill.simulated import ManualClock, SimulatedDevice
from gpuspill.testing.fake_driver import FakeDriver, FakeMemory
from gpuspill.tier.units import DeviceMemory, Skeleton, Unit


class Watching(FakeDriver):
    """Looks at what is freed when it is."""

    def __init__(self):
        super().__init__(SimulatedDevice(1000, clock=ManualClock()))
        self.watched = lambda: None
        self.found = []

    def allocate(self, nbytes, stream):
        outer = self

        class Memory(FakeMemory):
            def free(self):
                outer.found.append(outer.watched())
                super().free()

        return Memory(self.know(self.device.allocate(nbytes)))


@pytest.fixture
def driver():
    return Watching()


@pytest.fixture
def device(driver):
    device = GpuDevice(driver, plan=CopyPlan())
    yield device
    device.close()


def test_memory_of_the_port(device, driver):
    allocation = device.allocate(100)
    driver.watched = weakref.ref(allocation)
    del allocation
    assert driver.found == [None]


def test_memory_that_was_freed_is_not_freed_again(device, driver):
    allocation = device.allocate(100)
    device.free(allocation)
    del allocation
    assert len(driver.found) == 1


class Owner:
    """What owns a library's memory."""

    def __init__(self, watched, found):
        self.watched, self.found = watched, found

    def __del__(self):
        self.found.append(self.watched[0]())


def test_borrowed_memory(device):
    watched, found = [], []
    allocation = device.borrow(AllocationId(device.identity, 0x1000, 10), Owner(watched, found))
    assert type(allocation.owner) is Owner
    watched.append(weakref.ref(allocation))
    del allocation
    assert found == [None]


def test_a_units_memory(device):
    watched, found = [], []
    owner = Owner(watched, found)
    allocation = device.borrow(AllocationId(device.identity, 0x1000, 10), owner)
    memory = DeviceMemory(Unit(1, 10), allocation, owner)
    assert (memory.allocation, memory.keeper, memory.token) == (allocation, owner, owner)
    watched.append(weakref.ref(memory))
    del owner, allocation, memory
    assert found == [None]


def test_a_skeleton():
    class Dead(list):
        def append(self, entry):
            super().append((entry, watched()))

    dead, unit = Dead(), Unit(1, 10)
    skeleton = Skeleton([], (unit,), dead)
    watched = weakref.ref(skeleton)
    del skeleton
    assert dead == [((True, (unit,)), None)]


def test_memory_of_a_simulated_device():
    class Dropped(list):
        def append(self, address):
            super().append((address, watched()))

    device = SimulatedDevice(1000, clock=ManualClock())
    first = device.allocate(100)
    dropped = Dropped()
    first._heap.dropped = dropped
    allocation = device.allocate(100)
    watched = weakref.ref(allocation)
    address = allocation.address
    del allocation
    assert list(dropped) == [(address, None)]
    dropped.clear()


def test_one_that_is_cancelled_does_nothing():
    found = []
    Ending(lambda: found.append(1)).cancel()
    Ending(lambda: found.append(2))
    assert found == [2]
