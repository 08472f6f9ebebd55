"""CUDA's driver below the port: the conformance suite, names and signatures of what is called, errors, start-up."""

import ast
import inspect
import logging
import re
import sys
import types

import pytest

from gpuspill.device.cuda import driver as cuda_driver
from gpuspill.device.cuda import find as cuda
from gpuspill.device.cuda import memory as cuda_memory
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.driver import CudaDriver, NoDevice
from gpuspill.device.port import CopyPlan, DeviceError, MemoryInfo
from gpuspill.errors import ConfigError
from gpuspill.testing.devices import DeviceTests
from tests.threads import in_thread

MB = 2**20
TOTAL = 16 * MB


@pytest.fixture
def codes():
    from cuda.bindings.driver import CUresult

    return CUresult


@pytest.fixture(params=["stream-ordered", "plain"])
def driver(request, monkeypatch):
    monkeypatch.setenv("STANDIN_POOLS", "1" if request.param == "stream-ordered" else "0")
    return CudaDriver()


@pytest.mark.parametrize("staged", [False, True])
class TestConformance(DeviceTests):
    capacity = 14 * MB

    @pytest.fixture
    def device(self, driver, staged, standin):
        left = ("events", "streams", "pinned", "live_bytes")
        before = {what: standin.count(what) for what in left}
        device = GpuDevice(driver, plan=CopyPlan(MB, staged))
        yield device
        device.close()
        driver.synchronize()
        assert {what: standin.count(what) for what in left} == before
        assert not driver.connected()


class Checked:
    """A module whose functions are called as they are, but only with arguments that their signature takes."""

    def __init__(self, module):
        self._module = module
        self.called = set()

    def __getattr__(self, name):
        real = getattr(self._module, name)
        if inspect.isclass(real) or not callable(real):
            return real

        def call(*args):
            inspect.signature(real).bind(*args)
            self.called.add(name)
            return real(*args)

        return call


def test_every_call_is_one_that_the_bindings_have(standin, codes):
    """Names and numbers of arguments, for the installed release; on the way the whole boundary is used."""
    driver = CudaDriver()
    checked = driver._cuda = driver._own._cuda = Checked(driver._cuda)
    in_thread(use_all, driver, checked, standin, codes)()  # which has no context of its own
    assert written() - checked.called <= {"cuDeviceGetUuid_v2", "cuDeviceGetUuid"} | ONCE


def use_all(driver, checked, standin, codes):
    assert driver._initialise() == 2
    assert driver.memory_info().total == TOTAL
    assert len(driver.uuid) == 36
    assert driver.device_of(1) == "unknown"
    stream, other = driver.create_stream(), driver.create_stream()
    memory = driver.allocate(1000, stream)
    assert driver.device_of(memory.address) == "cuda:0"
    assert driver.memory_info().free < TOTAL
    standin.fail("cuMemHostRegister_v2", codes.CUDA_ERROR_NOT_SUPPORTED)
    driver.unpin(driver.pin(1000))
    host = driver.pin(1000)
    driver.copy("to_device", memory.address, host, 1000, stream)
    event = driver.record(stream)
    driver.order(other, event)
    driver.copy("to_host", memory.address, host, 1000, other)
    last = driver.record(other)
    driver.wait(last)
    assert driver.reached(event)
    standin.fail("cuCtxSynchronize", codes.CUDA_ERROR_LAUNCH_FAILED)
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        driver.synchronize()
    memory.free()
    for pools in (False, True):
        cuda_memory.OwnMemory(driver, checked, pools=pools).allocate(1000, stream).free()
    driver.unpin(host)
    for one in (event, last):
        driver.destroy_event(one)
    for one in (stream, other):
        driver.destroy_stream(one)


#: Called when the driver is made, before it can be looked at.
ONCE = {"cuDeviceGet", "cuDeviceTotalMem", "cuDeviceGetAttribute"}


def written():
    """The functions that are written in the two modules that call CUDA."""
    found = set()
    for module in (cuda_driver, cuda_memory):
        tree = ast.parse(inspect.getsource(module))
        found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in found if re.match("cu[A-Z]", name)}


def test_opening_makes_no_context(standin):
    before = standin.count("contexts")
    device = GpuDevice(CudaDriver())
    device.on_out_of_memory(lambda nbytes, retries: False)
    assert device.identity == "cuda:0"
    assert standin.count("contexts") == before
    device.close()


def test_the_current_context_is_left_as_it_was(driver, standin):
    from cuda.bindings import driver as raw

    (_, second) = raw.cuDeviceGet(1)
    (_, context) = raw.cuDevicePrimaryCtxRetain(second)
    raw.cuCtxPushCurrent(context)
    try:
        device = GpuDevice(driver)
        allocation = device.allocate(100)
        device.synchronize()  # it is there for the stream that is to fill it first
        device.copy_to_host(allocation, bytearray(100), device.stream("to_host")).wait()
        device.synchronize()
        del allocation
        assert int(raw.cuCtxGetCurrent()[1]) == int(context)
        device.close()
    finally:
        raw.cuCtxPopCurrent()
        raw.cuDevicePrimaryCtxRelease(second)


@pytest.mark.parametrize(
    ("function", "use"),
    [
        ("cuCtxSynchronize", lambda device: device.synchronize()),
        ("cuStreamCreateWithPriority", lambda device: device.stream("to_host")),
        ("cuEventRecord", lambda device: device.stream("to_host").record()),
    ],
)
def test_errors_are_told_by_name(driver, standin, codes, function, use):
    device = GpuDevice(driver, plan=CopyPlan())
    if function == "cuEventRecord":
        device.stream("to_host")
    standin.fail(function, codes.CUDA_ERROR_LAUNCH_FAILED)
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        use(device)
    device.close()


def test_a_copy_that_fails_fails_the_device_for_good(driver, standin, codes):
    device = GpuDevice(driver, plan=CopyPlan())
    allocation = device.allocate(1000)
    standin.fail("copy", codes.CUDA_ERROR_ECC_UNCORRECTABLE)
    with standin.held():  # else it may have failed before its event is recorded
        event = device.copy_to_device(bytes(1000), allocation, device.stream("to_device"))
    for _ in range(2):
        with pytest.raises(DeviceError, match="CUDA_ERROR_ECC_UNCORRECTABLE"):
            event.wait()
    with pytest.raises(DeviceError, match="CUDA_ERROR_ECC_UNCORRECTABLE"):
        device.synchronize()
    standin.reset()  # as a new process would be
    del allocation
    device.close()


def test_pinned_memory_that_the_system_does_not_give(driver, standin, codes):
    standin.fail("cuMemHostRegister_v2", codes.CUDA_ERROR_OUT_OF_MEMORY)
    standin.fail("cuMemHostAlloc", codes.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="10 bytes"):
        driver.pin(10)


@pytest.mark.parametrize("registered", [True, False])
def test_pinned_memory_is_the_process_s_own_or_else_the_driver_s(driver, standin, codes, registered):
    if not registered:
        standin.fail("cuMemHostRegister_v2", codes.CUDA_ERROR_NOT_SUPPORTED)
    address = driver.pin(3 * 2**20)
    assert (address in driver._registered) is registered
    # Pinned once more, so it is pinned.
    with driver.current():
        (status,) = driver._cuda.cuMemHostRegister(address, 2**20, 0)
    assert status == codes.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    driver.unpin(address)
    assert not driver._registered


# -- start-up ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """A process in which nothing was opened."""
    monkeypatch.setattr(cuda, "_opened", cuda._Opened())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_it_is_found(fresh, caplog):
    """One line says what is used and what is left alone."""
    with caplog.at_level(logging.INFO, "gpuspill"):
        device = cuda.device()
    assert device.identity == "cuda:0"
    assert device.memory_info().total == TOTAL
    (record,) = caplog.records
    for part in ("cuda:0", "NVML is not used", "2 devices", "left alone", "CUDA_VISIBLE_DEVICES"):
        assert part in record.getMessage()


def test_no_device_is_silent(fresh, standin, codes):
    standin.fail("cuInit", codes.CUDA_ERROR_NO_DEVICE)
    with pytest.raises(NoDevice, match="CUDA_ERROR_NO_DEVICE"):
        cuda.device()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("CUDA_ERROR_SYSTEM_NOT_READY", "fabric manager"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restarted"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", "another process"),
        ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_what_keeps_the_driver_from_starting_is_said(fresh, standin, codes, code, advice):
    standin.fail("cuInit", getattr(codes, code))
    with pytest.raises(ConfigError, match=f"{code}.*{advice}") as caught:
        cuda.device()
    assert not isinstance(caught.value, NoDevice)


def test_a_driver_that_is_too_old(fresh, monkeypatch):
    driver = types.SimpleNamespace(**vars(sys.modules["cuda.bindings.driver"]))
    driver.cuDriverGetVersion = lambda: (driver.CUresult.CUDA_SUCCESS, 11040)
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", driver)
    with pytest.raises(ConfigError, match=r"CUDA 11\.4.*newer driver"):
        cuda.device()


def test_an_integrated_device_has_nothing_to_spill_from(fresh, monkeypatch):
    monkeypatch.setenv("STANDIN_INTEGRATED", "1")
    with pytest.raises(ConfigError, match="no memory of its own"):
        cuda.device()


def test_free_memory_is_the_drivers_answer_without_nvml(driver):
    device = GpuDevice(driver, plan=CopyPlan())
    before = device.memory_info()
    allocation = device.allocate(3 * MB)
    assert device.memory_info() == MemoryInfo(before.free - 3 * MB, TOTAL)
    del allocation
    device.close()
