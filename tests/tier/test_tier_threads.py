"""Several threads at once on one tier: whatever the order, values are right and the ledger is true in the end."""

import random
import threading
from contextlib import suppress

import numpy as np
import pytest

from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.manager.transaction import Bell
from gpuspill.simulated import Array, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.stores import MemoryStore
from gpuspill.tier import DeviceTier

KB = 1024
KEYS = 40
OPERATIONS = 400


class Threads:
    """Threads that store, read, share, delete and evict, each by its own dice."""

    def __init__(self, tier, device, count=4):
        self.tier, self.device = tier, device
        self.keys = {}
        self.errors = []
        self.threads = [threading.Thread(target=self.run, args=(seed,)) for seed in range(count)]

    def run(self, seed):
        dice = random.Random(seed)
        try:
            for _ in range(OPERATIONS):
                action = dice.choice(
                    [self.store, self.share, self.read, self.read, self.read_later, self.drop, self.evict]
                )
                with suppress(MemoryError):  # all the rest is in use by others
                    action(dice, dice.randrange(KEYS))
        except BaseException as error:
            self.errors.append(error)

    def store(self, dice, key):
        array = asarray(np.full(128, key), device=self.device)
        value = array if dice.random() < 0.5 else {"a": array, "b": [array[::2]]}
        self.keys[key] = self.tier.proxify(value)

    def share(self, dice, key):
        skeleton = self.keys.get(key)
        if skeleton is not None:
            self.keys[dice.randrange(KEYS)] = self.tier.proxify(self.first(self.tier.resolve(skeleton))[::-1])

    def read(self, dice, key):
        skeleton = self.keys.get(key)
        if skeleton is not None:
            with self.tier.admit(None, [skeleton]) as admission:
                assert admission.wait(60)
                self.check(self.tier.resolve_all({key: skeleton}, admission)[key])

    def read_later(self, dice, key):
        skeleton = self.keys.get(key)
        if skeleton is not None:
            self.check(self.tier.resolve_later({key: skeleton}).result(60)[key])

    def drop(self, dice, key):
        self.keys.pop(key, None)
        self.tier.settle()

    def evict(self, dice, key):
        self.tier.manager.limits.make_room(dice.randrange(5 * KB))

    @staticmethod
    def first(value):
        return value if isinstance(value, Array) else value["a"]

    def check(self, value):
        host = asnumpy(self.first(value))
        assert (host == host[0]).all()


@pytest.mark.fault(
    "several threads at once", on=("device→host", "host→device"), outcome="every value right, all totals zero"
)
@pytest.mark.parametrize(("memory", "limit", "host_limit"), [(64 * KB, 16 * KB, 16 * KB), (20 * KB, None, 8 * KB)])
def test_any_interleaving(memory, limit, host_limit):
    device = SimulatedDevice(memory)
    host = ProxifyManager(limit=host_limit, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8)
    tier = DeviceTier(device, host, limit=limit)
    work = Threads(tier, device)
    for thread in work.threads:
        thread.start()
    for thread in work.threads:
        thread.join(120)
        assert not thread.is_alive()
    assert work.errors == []
    with tier.manager.admission.reserve(0) as room:
        room.wait(60)
    assert tier.statistics().spills > 0
    assert tier.statistics().restores > 0
    for key in list(work.keys):
        work.check(tier.resolve(work.keys[key]))
    work.keys.clear()
    tier.close()  # ends what is still moving
    statistics = tier.statistics()
    assert (statistics.units, statistics.device_nbytes, statistics.lingering_nbytes) == (0, 0, 0)
    tier.validate()
    host.validate()
    assert len(host) == 0
    assert device.statistics().live_bytes == 0
    assert device.statistics().violations == 0
    host.close()


@pytest.mark.parametrize("who", ["out of memory", "evict all"])
def test_what_another_thread_is_letting_go_of_is_waited_for(monkeypatch, who):
    """It has left by then: nothing is being spilled, and its memory is not free yet."""
    device = SimulatedDevice(KB)
    let_go, began, go = device.let_go, threading.Event(), threading.Event()

    def late(held):
        began.set()
        assert go.wait(60)
        let_go(held)

    monkeypatch.setattr(device, "let_go", late)
    slept, wait = [], Bell.wait

    def sleep(bell):
        slept.append(bell)
        go.set()
        wait(bell)

    host = ProxifyManager(limit=None, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8)
    tier = DeviceTier(device, host, limit=None)
    skeleton = tier.proxify(asarray(np.zeros(100), device=device))
    other = threading.Thread(target=tier.manager.limits.evict_all)
    other.start()
    assert began.wait(60)
    monkeypatch.setattr(Bell, "wait", sleep)
    if who == "out of memory":
        assert device.allocate(800).nbytes == 800
        assert device.statistics().failed_allocations == 0
    else:
        tier.manager.limits.evict_all()
        assert device.statistics().live_bytes == 0
    assert slept
    go.set()
    other.join(60)
    assert not other.is_alive()
    del skeleton
    tier.close()
    host.close()
