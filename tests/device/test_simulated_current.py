"""Which device is the current one, and how it is configured."""

import contextvars
import threading

import dask
import pytest

from gpuspill import simulated
from gpuspill.errors import ConfigError
from gpuspill.simulated import SimulatedDevice
from gpuspill.simulated.arrays.current import _Default


def test_there_is_one_default_device_a_process():
    device = simulated.device()
    assert isinstance(device, SimulatedDevice)
    found = []
    thread = threading.Thread(target=lambda: found.append(simulated.device()))
    thread.start()
    thread.join()
    assert found == [device]


def test_a_context_may_use_another_device():
    default, one, two = simulated.device(), SimulatedDevice(100), SimulatedDevice(100)
    with simulated.use(one):
        assert simulated.device() is one
        assert simulated.empty(1).device is one
        with simulated.use(two):
            assert simulated.device() is two
        assert simulated.device() is one
        assert contextvars.Context().run(simulated.device) is default
    assert simulated.device() is default


def test_the_default_device_comes_from_the_settings():
    settings = {
        "gpuspill.simulated": {
            "memory": "64 MiB",
            "bandwidth": "10 GB",
            "latency": "5 us",
            "kernel-latency": "1 ms",
            "checks": "false",
        }
    }
    with dask.config.set(settings):
        found = _Default().get().configuration
    assert found.memory == 64 * 2**20
    assert found.bandwidth == 10e9
    assert found.latency == pytest.approx(5e-6)
    assert found.kernel_latency == 1e-3
    assert found.checks is False


def test_without_settings_it_has_a_gibibyte_and_no_delays():
    with dask.config.set({"gpuspill.simulated": None}):
        found = _Default().get().configuration
    assert (found.memory, found.bandwidth, found.latency, found.checks) == (2**30, None, 0, True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"memory": "a lot"}, "gpuspill.simulated.memory"),
        ({"memory": "-1"}, "gpuspill.simulated"),
        ({"speed": 1}, "gpuspill.simulated.speed"),
        ({"latency": "fast"}, "gpuspill.simulated.latency"),
        ({"bandwidth": 0.0001 * -1}, "gpuspill.simulated"),
        ({"checks": "perhaps"}, "gpuspill.simulated.checks"),
        ("1 GiB", "gpuspill.simulated"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, named):
    with dask.config.set({"gpuspill.simulated": settings}), pytest.raises(ConfigError, match=named):
        _Default().get()


def test_configuring_changes_what_is_given_and_keeps_the_rest():
    with simulated.use(SimulatedDevice(1000, latency=1)) as device:
        assert simulated.configure(memory="2 kB", bandwidth="1 MB") is device
        assert device.memory_info().total == 2000
        assert device.configuration.bandwidth == 1e6
        assert device.configuration.latency == 1
        simulated.configure(bandwidth=None, latency=0)
        assert device.configuration.bandwidth is None
        assert device.configuration.latency == 0
        kept = device.allocate(500)
        for wrong in ({"memory": 499}, {"latency": "-1 s"}, {"speed": 1}):
            with pytest.raises(ConfigError):
                simulated.configure(**wrong)
        assert device.memory_info() == (1500, 2000)
        del kept
