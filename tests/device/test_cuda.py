"""Finding a GPU and the libraries for it, and calling these by names and arguments that they have."""

import inspect
import logging
import subprocess
import sys
import types

import pytest

from gpuspill.config import Settings
from gpuspill.device.cuda import driver as cuda
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.port import Driver
from gpuspill.device.port import DeviceError, MemoryInfo
from gpuspill.distributed.devices import find_device
from gpuspill.distributed.factory import build_store
from gpuspill.errors import ConfigError
from gpuspill.simulated.device.device import SimulatedDevice
from gpuspill.testing.fake_driver import FakeDriver


@pytest.fixture
def machine(monkeypatch):
    """A machine with a driver, on which all libraries are installed and nothing was opened yet."""
    monkeypatch.setattr(cuda, "_opened", cuda._Opened())
    monkeypatch.setattr(cuda, "_driver_installed", lambda: True)
    monkeypatch.setattr(cuda, "missing_libraries", dict)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def fail(error):
    def make(*args):
        raise error

    return make


def open_device():
    return find_device(Settings.load(device="cuda"))


# -- finding it -------------------------------------------------------------------------------------


def test_without_a_driver_nothing_is_said_or_imported(machine, caplog):
    machine.setattr(cuda, "_driver_installed", lambda: False)
    machine.setattr(cuda, "missing_libraries", lambda: pytest.fail("looked for libraries"))
    with caplog.at_level(logging.DEBUG, "gpuspill"):
        assert find_device(Settings.load(device="auto")) is None
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"gpuspill.device: found 'cuda'.*no NVIDIA driver"):
        open_device()


def test_looking_for_a_device_imports_no_library():
    code = (
        "import sys; sys.modules['numpy'] = None;"
        "from gpuspill.config import Settings; from gpuspill.device.cuda import driver as cuda;"
        "cuda._driver_installed = lambda: False;"
        "import gpuspill.device.cuda.driver;"
        "\ntry: cuda.device()\nexcept cuda.NoDevice: pass\nelse: raise AssertionError\n"
        "found = {'rmm', 'cupy', 'cuda.bindings', 'pynvml', 'numba', 'torch'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("visible", ["", "-1", " ", "-1,0"])
def test_devices_that_are_hidden_are_not_there(machine, visible):
    machine.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        open_device()
    assert find_device(Settings.load(device="auto")) is None


@pytest.mark.parametrize("visible", ["0", "3,1", "GPU-84fd49f2", "MIG-d6ac2d46-159b"])
def test_devices_by_any_name_are(machine, visible):
    machine.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine.setattr(cuda, "CudaDriver", lambda: "driver")
    assert isinstance(open_device(), GpuDevice)


@pytest.mark.parametrize("setting", ["none", "0", None])
def test_a_device_that_is_switched_off_is_not_looked_for(machine, setting):
    machine.setattr(cuda, "_driver_installed", lambda: pytest.fail("looked"))
    assert find_device(Settings.load(device=setting)) is None


@pytest.mark.parametrize(
    ("missing", "install"),
    [("rmm", "rmm-cu12"), ("cuda.bindings", "cuda-bindings"), ("pynvml", "nvidia-ml-py")],
)
def test_a_library_that_is_missing_is_named(machine, caplog, missing, install):
    machine.setattr(cuda, "missing_libraries", lambda: {missing: cuda._LIBRARIES[missing]})
    with pytest.raises(ConfigError, match=rf"{missing} \(install .*{install}"):
        open_device()
    with caplog.at_level(logging.WARNING, "gpuspill"):
        assert find_device(Settings.load(device="auto")) is None
    (record,) = caplog.records
    assert missing in record.getMessage()


def test_which_libraries_are_missing():
    found = {name: name not in cuda.missing_libraries() for name in cuda._LIBRARIES}
    for name, installed in found.items():
        if installed:
            __import__(name)
        else:
            with pytest.raises(ImportError):
                __import__(name)


def test_a_library_that_cannot_be_imported_is_reported(machine):
    machine.setattr(cuda, "CudaDriver", fail(ImportError("librmm.so: cannot open shared object file")))
    with pytest.raises(ConfigError, match=r"librmm\.so"):
        open_device()


def test_the_process_has_one_device(machine):
    machine.setattr(cuda, "CudaDriver", lambda: "driver")
    assert open_device() is open_device()


def test_a_failure_is_not_remembered(machine):
    """A device that was busy when the first worker asked may be there for the next."""
    machine.setattr(cuda, "CudaDriver", fail(cuda.NoDevice("busy")))
    assert find_device(Settings.load(device="auto")) is None
    machine.setattr(cuda, "CudaDriver", lambda: "driver")
    assert find_device(Settings.load(device="auto")) is not None


def test_a_store_has_a_tier_for_it(machine, tmp_path):
    """Its limit is a part of the device's memory; the callback is there before the first value and gone in the end."""
    driver = FakeDriver(SimulatedDevice(10_000))
    machine.setattr(cuda, "CudaDriver", lambda: driver)
    store = build_store(Settings.load(device="cuda", device_memory_limit=0.5), str(tmp_path))
    try:
        assert store.tier.device is cuda.device()
        assert store.tier.manager.limit == 5000
        assert driver.connected()
        assert store.statistics().device_limit == 5000
        assert driver.streams == 0
    finally:
        store.close()
    assert not driver.connected()


# -- calling the libraries --------------------------------------------------------------------------


class Scripted:
    """A module of which only functions are replaced, and called with arguments that the real ones would take."""

    def __init__(self, module, **results):
        self._module = module
        self._results = results
        self.calls = []

    def __getattr__(self, name):
        real = getattr(self._module, name)
        if inspect.isclass(real) or not callable(real):
            return real

        def call(*args):
            inspect.signature(real).bind(*args)
            self.calls.append((name, *args))
            result = self._results[name]
            return result(*args) if callable(result) else result

        return call


@pytest.fixture
def libraries(monkeypatch):
    """CUDA's bindings, RMM and NVML, as if there were a GPU with number 1."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda.bindings is not installed")
    driver = pytest.importorskip("cuda.bindings.driver")
    rmm = pytest.importorskip("rmm", reason="RMM is not installed")
    pynvml = pytest.importorskip("pynvml", reason="pynvml is not installed")
    ok = runtime.cudaError_t.cudaSuccess
    current = [0]

    def set_current(ordinal):
        current[0] = ordinal
        return (ok,)

    scripted = Scripted(
        runtime,
        cudaGetDeviceCount=(ok, 2),
        cudaDeviceGetAttribute=(ok, 0),
        cudaGetDevice=lambda: (ok, current[0]),
        cudaSetDevice=set_current,
        cudaStreamCreateWithFlags=lambda flags: (ok, runtime.cudaStream_t(0x51)),
        cudaStreamDestroy=(ok,),
        cudaEventCreateWithFlags=lambda flags: (ok, runtime.cudaEvent_t(0xE1)),
        cudaEventRecord=(ok,),
        cudaEventDestroy=(ok,),
        cudaEventQuery=(ok,),
        cudaEventSynchronize=(ok,),
        cudaStreamWaitEvent=(ok,),
        cudaDeviceSynchronize=(ok,),
        cudaMemcpyAsync=(ok,),
        cudaHostAlloc=(ok, 0xA000),
        cudaFreeHost=(ok,),
        cudaGetLastError=(ok,),
        cudaGetErrorString=(ok, b"what went wrong"),
    )
    found = types.SimpleNamespace(bytes=bytes(range(16)))
    good = driver.CUresult.CUDA_SUCCESS
    by_uuid = Scripted(driver, cuDeviceGet=(good, 1), cuDeviceGetUuid=(good, found), cuDeviceGetUuid_v2=(good, found))

    def handle(name):
        if name.startswith(b"GPU-"):
            raise pynvml.NVMLError_NotFound
        return name

    nvml = Scripted(
        pynvml,
        nvmlInit=None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=types.SimpleNamespace(free=3, total=4, used=1),
    )
    import cuda.bindings as bindings  # the libraries' own package

    monkeypatch.setattr(bindings, "runtime", scripted)
    monkeypatch.setattr(bindings, "driver", by_uuid)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    before = rmm.mr.get_per_device_resource(1)
    yield types.SimpleNamespace(runtime=scripted, nvml=nvml, real=runtime, mr=rmm.mr, current=current, pynvml=pynvml)
    rmm.mr.set_per_device_resource(1, before)


@pytest.fixture
def driver(libraries):
    return cuda.CudaDriver(1)


def test_the_driver_has_all_of_the_boundary():
    boundary = {name for name in vars(Driver) if not name.startswith("_")}
    assert boundary <= set(dir(cuda.CudaDriver))


def test_an_instance_of_a_shared_device_is_found_by_its_uuid(driver, libraries):
    assert driver.identity == "cuda:1"
    assert driver.memory_info() == MemoryInfo(3, 4)
    names = [call[1] for call in libraries.nvml.calls if call[0] == "nvmlDeviceGetHandleByUUID"]
    assert names == [f"{kind}-00010203-0405-0607-0809-0a0b0c0d0e0f".encode() for kind in ("GPU", "MIG")]


def test_an_integrated_device_is_not_used(libraries):
    libraries.runtime._results["cudaDeviceGetAttribute"] = (libraries.real.cudaError_t.cudaSuccess, 1)
    with pytest.raises(ConfigError, match="no memory of its own") as caught:
        cuda.CudaDriver(1)
    assert not isinstance(caught.value, cuda.NoDevice)


def test_a_device_of_which_nvml_knows_no_memory_is_not_used(libraries):
    libraries.nvml._results["nvmlDeviceGetMemoryInfo"] = fail(libraries.pynvml.NVMLError_NotSupported())
    with pytest.raises(ConfigError, match="no memory of its own"):
        cuda.CudaDriver(1)


def test_no_device_is_no_error_of_its_own(libraries):
    libraries.runtime._results["cudaGetDeviceCount"] = (libraries.real.cudaError_t.cudaErrorNoDevice, None)
    with pytest.raises(cuda.NoDevice, match="cudaErrorNoDevice: what went wrong"):
        cuda.CudaDriver(0)


def test_opening_makes_no_context(driver, libraries):
    device = GpuDevice(driver)
    device.on_out_of_memory(lambda nbytes, retries: False)
    harmless = {"cudaGetDeviceCount", "cudaDeviceGetAttribute", "cudaGetDevice", "cudaGetErrorString", "cudaSetDevice"}
    assert {call[0] for call in libraries.runtime.calls} <= harmless
    device.close()


def test_calls_have_the_right_arguments_and_leave_the_current_device(driver, libraries):
    real, runtime = libraries.real, libraries.runtime
    stream = driver.create_stream()
    assert stream.__cuda_stream__() == (0, 0x51)
    assert stream.rmm.__cuda_stream__() == (0, 0x51)
    driver.copy("to_host", 0xD000, 0x4000, 100, stream)
    driver.copy("to_device", 0xD000, 0x4000, 100, stream)
    event = driver.record(stream)
    driver.record(0x77)
    driver.order(stream, event)
    assert driver.reached(event)
    driver.wait(event)
    driver.synchronize()
    address = driver.pin(10)
    driver.unpin(address)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    assert libraries.current == [0]
    calls = [call for call in runtime.calls if call[0] not in ("cudaGetDevice", "cudaSetDevice")][2:]
    kinds = real.cudaMemcpyKind
    flags = real.cudaEventDisableTiming | real.cudaEventBlockingSync
    assert calls == [
        ("cudaStreamCreateWithFlags", real.cudaStreamNonBlocking),
        ("cudaMemcpyAsync", 0x4000, 0xD000, 100, kinds.cudaMemcpyDeviceToHost, stream.raw),
        ("cudaMemcpyAsync", 0xD000, 0x4000, 100, kinds.cudaMemcpyHostToDevice, stream.raw),
        ("cudaEventCreateWithFlags", flags),
        ("cudaEventRecord", event, stream.raw),
        ("cudaEventCreateWithFlags", flags),
        ("cudaEventRecord", calls[6][1], 0x77),
        ("cudaStreamWaitEvent", stream.raw, event, 0),
        ("cudaEventQuery", event),
        ("cudaEventSynchronize", event),
        ("cudaDeviceSynchronize",),
        ("cudaHostAlloc", 10, real.cudaHostAllocPortable),
        ("cudaFreeHost", 0xA000),
        ("cudaEventDestroy", event),
        ("cudaStreamDestroy", stream.raw),
    ]


def test_errors_of_cuda(driver, libraries):
    codes = libraries.real.cudaError_t
    results = libraries.runtime._results
    results["cudaEventQuery"] = (codes.cudaErrorNotReady,)
    assert driver.reached(object()) is False
    assert libraries.runtime.calls[-2:][0] == ("cudaGetLastError",)
    results["cudaEventQuery"] = (codes.cudaErrorIllegalAddress,)
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress: what went wrong"):
        driver.reached(object())
    results["cudaHostAlloc"] = (codes.cudaErrorMemoryAllocation, None)
    with pytest.raises(MemoryError, match="10 bytes"):
        driver.pin(10)
    results["cudaEventRecord"] = (codes.cudaErrorInvalidResourceHandle,)
    with pytest.raises(DeviceError):
        driver.record(0)
    assert "cudaEventDestroy" in [call[0] for call in libraries.runtime.calls]


def test_memory_is_of_the_resource_in_force_and_goes_back_to_it(driver, libraries):
    calls = []

    def resource(name):
        def allocate(nbytes, stream):
            calls.append(("allocate", name, nbytes, stream.__cuda_stream__()[1], libraries.current[0]))
            return 0xD000

        def free(address, nbytes, stream):
            calls.append(("free", name, address, nbytes, stream.__cuda_stream__()[1], libraries.current[0]))

        return libraries.mr.CallbackMemoryResource(allocate, free)

    libraries.mr.set_per_device_resource(1, resource("first"))
    stream = driver.create_stream()
    memory = driver.allocate(100, stream)
    assert memory.address == 0xD000
    libraries.mr.set_per_device_resource(1, resource("second"))
    memory.free()
    # On the port's stream, which is going to fill it; and back on the default one, on which it was used.
    assert calls == [("allocate", "first", 100, 0x51, 1), ("free", "first", 0xD000, 100, 0, 1)]


def test_an_error_of_rmm_is_one_of_the_device(driver, libraries):
    broken = libraries.mr.CallbackMemoryResource(fail(KeyError("broken")), fail(AssertionError()))
    libraries.mr.set_per_device_resource(1, broken)
    with pytest.raises(DeviceError, match="broken"):
        driver.allocate(100, driver.create_stream())
