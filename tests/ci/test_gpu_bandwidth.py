"""What the bandwidth benchmark for GPUs computes, on a link of which the speed is known."""

import gc
import sys
import types

import pytest
from gpu_bandwidth import TIER_ROUNDS, measure, measure_dask_cuda, measure_tier, problems, table

from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.port import CopyPlan
from gpuspill.simulated.device.device import ManualClock, SimulatedDevice
from gpuspill.testing.fake_driver import FakeDriver

MB = 2**20
NBYTES = 8 * MB


def figures(latency=0.0, raw=1e9):
    """1 GB/s in each direction, without anything else that takes time."""
    clock = ManualClock()
    simulated = SimulatedDevice(64 * MB, bandwidth=1e9, latency=latency, checks=False, clock=clock)
    device = GpuDevice(FakeDriver(simulated), plan=CopyPlan(MB, staged=True))
    copies = {kind: lambda: clock.advance(NBYTES / raw) for kind in ("to_host", "to_device")}
    return measure(device, copies, NBYTES, clock.now)


def test_a_link_that_is_as_fast_as_it_says():
    found = figures()
    speeds = ("raw_to_host", "raw_to_device", "port_to_host", "port_to_device", "staged_to_host", "pageable_to_device")
    assert [found[name] for name in speeds] == pytest.approx([1e9] * len(speeds))
    assert found["port_both"] == pytest.approx(2e9)
    assert found["port_share"] == pytest.approx(1)
    assert found["both_share"] == pytest.approx(2)
    assert problems(found) == []
    assert "| port, pinned, pieces of 1 MiB | 1.0 | 1.0 | 2.0 |" in table(found)


def test_a_port_that_is_slower_than_a_raw_copy_is_noticed():
    """Each piece costs half as much again."""
    found = figures(latency=MB / 1e9 / 2)
    assert found["port_share"] == pytest.approx(1 / 1.5)
    (problem,) = problems(found)
    assert "67%" in problem


def test_directions_that_wait_for_each_other_are_noticed():
    found = figures() | {"both_share": 1.1}
    (problem,) = problems(found)
    assert "1.10" in problem


def test_the_tier_is_measured_on_what_it_does():
    """At the speed of the link in each direction; what moves is counted."""
    clock = ManualClock()
    simulated = SimulatedDevice(64 * MB, bandwidth=1e9, checks=False, clock=clock)
    device = GpuDevice(FakeDriver(simulated), plan=CopyPlan(MB, staged=True))
    found = measure_tier(device, [(1, 8 * MB), (50, 64 * 1024)], clock.now)
    assert found.keys() == {"1 x 8.00 MiB", "50 x 64.00 kiB"}
    for speeds in found.values():
        assert speeds["to_host"] == pytest.approx(1e9)
        assert speeds["to_device"] == pytest.approx(1e9)
        assert 1e9 <= speeds["both"] * 1.001 <= 2.01e9
    gc.collect()
    statistics = device.statistics()
    assert statistics.violations == 0
    assert statistics.live_bytes == statistics.pinned_bytes == 0
    assert "| the tier, 1 x 8.00 MiB | 1.0 | 1.0 |" in table(figures() | {"tier": found})


def test_dask_cudas_way_is_measured_beside_it_if_it_is_there(monkeypatch):
    clock, moved = ManualClock(), []

    def moves(seconds):
        def move(value):
            moved.append(len(value))
            clock.advance(seconds)
            return value

        return move

    numba = types.ModuleType("numba.cuda")
    numba.device_array, numba.synchronize = (lambda nbytes, dtype: bytes(nbytes)), (lambda: None)
    theirs = types.ModuleType("dask_cuda.device_host_file")
    theirs.device_to_host, theirs.host_to_device = moves(0.5), moves(0.25)
    monkeypatch.setitem(sys.modules, "numba", types.ModuleType("numba"))
    monkeypatch.setitem(sys.modules, "numba.cuda", numba)
    monkeypatch.setitem(sys.modules, "dask_cuda", types.ModuleType("dask_cuda"))
    monkeypatch.setitem(sys.modules, "dask_cuda.device_host_file", theirs)
    found = figures() | {"dask_cuda": measure_dask_cuda([(4, MB)], clock.now)}
    assert moved == [4, 4] * TIER_ROUNDS
    assert found["dask_cuda"] == {"4 x 1.00 MiB": {"to_host": 4 * MB / 0.5, "to_device": 4 * MB / 0.25}}
    assert "| dask-cuda's DeviceHostFile, 4 x 1.00 MiB | 0.0 | 0.0 |  |" in table(found)
    monkeypatch.setitem(sys.modules, "dask_cuda.device_host_file", None)
    assert measure_dask_cuda() == {}
