"""A Dask array pipeline, task by task: after each, the ledger is compared with what the device says of itself.

In one thread, so that at each step everything is at rest; the same on a cluster: ``tests/distributed/test_device.py``.
"""

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import convert_legacy_graph
from dask.order import order

from gpuspill import simulated
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.stores import MemoryStore
from gpuspill.tier import DeviceTier

N, CHUNK = 128, 32
BLOCK = CHUNK * CHUNK * 8
NBYTES = N * N * 8
DEVICE, HOST = NBYTES // 4, NBYTES // 2


class Runner:
    """Runs graphs, with every value in the tier between two tasks."""

    def __init__(self, limit):
        self.device = SimulatedDevice(4 * NBYTES, clock=ManualClock())
        self.store = MemoryStore()
        self.host = ProxifyManager(limit=HOST, store=self.store, serializer=PickleSerializer(), sizeof=lambda value: 8)
        self.tier = DeviceTier(self.device, self.host, limit=limit)
        self.beyond = []  # bytes on the device beyond what may be there, at each allocation in a task
        self.largest = 0
        self.steps = 0
        for name in ("allocate", "adopt"):
            setattr(self.device, name, self._watched(getattr(self.device, name)))

    def _watched(self, allocate):
        def watched(what):
            made = allocate(what)
            statistics = self.tier.manager.statistics()
            if statistics.limit is not None:
                self.largest = max(self.largest, made.nbytes)
                live = self.device.statistics().live_bytes
                self.beyond.append(live - statistics.limit - statistics.pinned_nbytes - made.nbytes)
            return made

        return watched

    def run(self, array):
        graph = convert_legacy_graph(dict(array.__dask_graph__()))
        places = order(graph)
        wanted = [key for row in array.__dask_keys__() for key in (row if isinstance(row, list) else [row])]
        uses = dict.fromkeys(graph, 0)
        for node in graph.values():
            for key in node.dependencies:
                uses[key] += 1
        for key in wanted:
            uses[key] += 1
        values = {}
        for key in sorted(graph, key=places.__getitem__):
            node = graph[key]
            inputs = {name: values[name] for name in node.dependencies}
            with self.tier.admit(key, inputs.values()) as admission:
                assert admission.wait(60)
                values[key] = self.tier.proxify(node(self.tier.resolve_all(inputs, admission)), key)
            del inputs
            for name in node.dependencies:
                uses[name] -= 1
                if not uses[name]:
                    del values[name]
            self.at_rest()
        return {key: values[key] for key in wanted}

    def at_rest(self):
        with self.tier.manager.admission.reserve(0) as room:
            assert room.wait(60)
        # Nothing is told apart any more: what the last spill dropped has been dropped when its move has ended.
        self.tier.settle()
        self.tier.manager.limits.make_room(0)
        self.tier.validate()
        self.host.validate()
        self.device.validate()
        statistics = self.tier.statistics()
        live = self.device.statistics().live_bytes
        assert live == statistics.device_nbytes + statistics.lingering_nbytes
        if statistics.limit is not None:
            assert live <= statistics.limit
        assert self.host.memory_total() <= HOST
        self.steps += 1


@pytest.mark.parametrize("limited", [True, False])
def test_after_every_step_the_ledger_is_the_truth(limited):
    """Four times the device, twice what the host may hold; without a limit the device itself says when it is full."""
    runner = Runner(DEVICE if limited else None)
    if not limited:
        runner.device.configure(memory=DEVICE + 4 * BLOCK)
    host = np.random.default_rng(1).integers(0, 1000, (N, N))
    with simulated.use(runner.device):
        x = da.from_array(host, chunks=CHUNK, name="x", asarray=False).map_blocks(asarray)
        y = (x + x.T) * 2 - x[::-1, ::-1]
        total = y.sum(axis=0) + x.max(axis=1)
        found = [asnumpy(runner.tier.resolve(value)) for value in runner.run(total).values()]
    np.testing.assert_array_equal(
        np.concatenate(found), ((host + host.T) * 2 - host[::-1, ::-1]).sum(axis=0) + host.max(axis=1)
    )
    statistics = runner.tier.statistics()
    assert runner.steps > 100
    assert statistics.spills > (30 if limited else 10)
    assert runner.host.statistics().spills > 0  # how many depends on the order of eviction
    assert (statistics.out_of_memory > 0) == (not limited)
    if limited:
        # At each allocation: the limit, what the task has pinned, and that allocation.
        assert len(runner.beyond) > 100
        assert max(runner.beyond) <= 0
    runner.tier.settle()
    runner.tier.close()
    runner.host.close()
    assert runner.device.statistics().live_bytes == 0
    assert runner.device.statistics().violations == 0
