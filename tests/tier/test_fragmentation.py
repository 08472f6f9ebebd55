"""A device whose free memory is in no one piece: what leaves for a large allocation lies side by side."""

import random

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.port import OutOfMemory
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import SimulatedDevice
from gpuspill.storage.files import FileStore
from gpuspill.tier import DeviceTier

KB = 1024
COUNT = 256


@pytest.fixture(params=[True])
def device(request):
    device = SimulatedDevice(COUNT * KB, fragments=request.param)
    with simulated.use(device):
        yield device
    device.validate()
    assert device.statistics().violations == 0


@pytest.fixture
def tier(device, tmp_path):
    host = ProxifyManager(limit=None, store=FileStore(tmp_path), serializer=PickleSerializer(), sizeof=lambda value: 8)
    tier = DeviceTier(device, host, limit=None)
    yield tier
    tier.validate()
    tier.close()
    host.close()


def fill(tier, seed):
    """Fill the device with values that were used in an order that has nothing to do with their addresses."""
    values = [tier.proxify(simulated.asarray(np.full(KB // 8, float(number)))) for number in range(COUNT)]
    for number in random.Random(seed).sample(range(COUNT), COUNT):
        tier.resolve(values[number])
    return values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("units", [3, 16, 40])
def test_no_more_than_twice_what_was_asked_for_leaves(device, tier, seed, units):
    values = fill(tier, seed)
    large = simulated.empty(units * KB, np.uint8)
    # What was used longest ago left first; that it was not enough showed only then.
    assert units * KB <= tier.statistics().spilled_nbytes <= 2 * units * KB
    del large
    for number, value in enumerate(values):
        assert simulated.asnumpy(tier.resolve(value)).tolist() == [number] * (KB // 8)


@pytest.mark.parametrize("device", [False], indirect=True)
def test_a_device_that_has_room_in_one_piece_evicts_by_use_alone(device, tier):
    values = fill(tier, 0)
    simulated.empty(16 * KB, np.uint8)
    assert tier.statistics().spilled_nbytes == 16 * KB
    oldest = random.Random(0).sample(range(COUNT), COUNT)[:16]
    assert [number for number, value in enumerate(values) if not tier.is_ready(value)] == sorted(oldest)


def test_what_is_in_use_is_gone_around(device, tier):
    """Every eighth value is in use, so 7 kB is all that there can be in one piece."""
    values = fill(tier, 0)
    hands = [tier.resolve(value) for value in values[::8]]
    simulated.empty(7 * KB, np.uint8)
    assert tier.statistics().spilled_nbytes <= 14 * KB
    with pytest.raises(OutOfMemory):
        simulated.empty(8 * KB, np.uint8)
    assert [int(simulated.asnumpy(hand)[0]) for hand in hands] == list(range(0, COUNT, 8))


def test_one_that_is_not_the_first_to_be_asked_begins_by_use(device, request):
    """As where two workers in one process share a device: the hook of the other one is asked before."""
    installation = device.on_out_of_memory(lambda nbytes, retries: retries == 0)
    tier = request.getfixturevalue("tier")
    values = fill(tier, 0)
    simulated.empty(16 * KB, np.uint8)
    assert tier.statistics().spilled_nbytes <= 32 * KB
    assert len(values) == COUNT
    installation.uninstall()


def test_what_was_given_up_and_not_let_go_of_yet_counts(device, request):
    """It is let go of when an allocation does not fit: then there is room, though nothing has to leave."""
    installation = device.on_out_of_memory(lambda nbytes, retries: retries == 0)
    tier = request.getfixturevalue("tier")
    values = fill(tier, 0)
    values.clear()
    assert simulated.empty(16 * KB, np.uint8).nbytes == 16 * KB
    assert tier.statistics().spilled_nbytes == 0
    installation.uninstall()
