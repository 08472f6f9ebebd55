"""Finding a GPU and the libraries for it. What is done with them: ``tests/standin``."""

import ast
import inspect
import logging
import re
import subprocess
import sys
import types

import pytest

from gpuspill.config import Settings
from gpuspill.device.cuda import driver as cuda_driver
from gpuspill.device.cuda import find as cuda
from gpuspill.device.cuda import memory as cuda_memory
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.driver import Nvml
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


def test_the_driver_has_all_of_the_boundary():
    boundary = {name for name in vars(Driver) if not name.startswith("_")}
    assert boundary <= set(dir(cuda.CudaDriver))


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
        "from gpuspill.config import Settings; from gpuspill.device.cuda import find as cuda;"
        "cuda._driver_installed = lambda: False;"
        "import gpuspill.device.cuda.find;"
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
    machine.setattr(cuda, "CudaDriver", lambda: FakeDriver(SimulatedDevice(1000)))
    assert isinstance(open_device(), GpuDevice)


@pytest.mark.parametrize("setting", ["none", "0", None])
def test_a_device_that_is_switched_off_is_not_looked_for(machine, setting):
    machine.setattr(cuda, "_driver_installed", lambda: pytest.fail("looked"))
    assert find_device(Settings.load(device=setting)) is None


@pytest.mark.parametrize(
    ("missing", "install"),
    [("cuda.bindings", "cuda-bindings")],
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


def test_a_library_that_cannot_be_imported_is_reported(machine, caplog):
    machine.setattr(cuda, "CudaDriver", fail(ImportError("librmm.so: cannot open shared object file")))
    with pytest.raises(ConfigError, match=r"librmm\.so"):
        open_device()
    with caplog.at_level(logging.WARNING, "gpuspill"):
        assert find_device(Settings.load(device="auto")) is None
    (record,) = caplog.records
    assert "librmm.so" in record.getMessage()


def test_the_process_has_one_device(machine):
    machine.setattr(cuda, "CudaDriver", lambda: FakeDriver(SimulatedDevice(1000)))
    assert open_device() is open_device()


def test_a_failure_is_not_remembered(machine):
    """A device that was busy when the first worker asked may be there for the next."""
    machine.setattr(cuda, "CudaDriver", fail(cuda.NoDevice("busy")))
    assert find_device(Settings.load(device="auto")) is None
    machine.setattr(cuda, "CudaDriver", lambda: FakeDriver(SimulatedDevice(1000)))
    assert find_device(Settings.load(device="auto")) is not None


def test_a_store_has_a_tier_for_it(machine, tmp_path):
    """Its limit is a part of the device's memory; the callback is there before the first value and gone in the end."""
    driver = FakeDriver(SimulatedDevice(10_000))
    machine.setattr(cuda, "CudaDriver", lambda: driver)
    store = build_store(Settings.load(device="cuda", device_memory_limit=0.5), str(tmp_path))
    try:
        assert store.tier.device is cuda.device()
        assert store.tier.manager.limits.limit == 5000
        assert driver.connected()
        assert store.statistics().device_limit == 5000
        assert driver.streams == 0
    finally:
        store.close()
    assert not driver.connected()


# -- NVML -------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch):
    """NVML's Python module, as far as it is used, on which nothing is known yet."""
    module = types.ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    for name in ("NotFound", "InvalidArgument", "NotSupported", "LibraryNotFound"):
        setattr(module, f"NVMLError_{name}", type(name, (module.NVMLError,), {}))
    module.known, module.asked = {}, []
    module.nvmlInit = lambda: None

    def handle(name):
        module.asked.append(name.decode())
        if name.decode() not in module.known:
            raise module.NVMLError_NotFound
        return name.decode()

    def memory(found):
        if isinstance(module.known[found], Exception):
            raise module.known[found]
        return module.known[found]

    module.nvmlDeviceGetHandleByUUID, module.nvmlDeviceGetMemoryInfo = handle, memory
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_an_instance_of_a_shared_device_is_found_by_its_uuid(nvml, kind):
    nvml.known[f"{kind}-{UUID}"] = types.SimpleNamespace(free=3, total=4, used=1)
    assert Nvml.find(UUID).memory_info() == MemoryInfo(3, 4)
    assert nvml.asked == [f"GPU-{UUID}", f"MIG-{UUID}"][: 1 + (kind == "MIG")]


def test_where_nvml_cannot_tell_the_driver_is_asked(nvml, monkeypatch):
    assert Nvml.find(UUID) is None
    nvml.known[f"GPU-{UUID}"] = nvml.NVMLError_NotSupported()
    assert Nvml.find(UUID) is None
    nvml.nvmlInit = fail(nvml.NVMLError_LibraryNotFound())
    assert Nvml.find(UUID) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml.find(UUID) is None


def test_an_error_of_nvml_is_one_of_the_device(nvml):
    nvml.known[f"GPU-{UUID}"] = types.SimpleNamespace(free=3, total=4, used=1)
    found = Nvml.find(UUID)
    nvml.known[f"GPU-{UUID}"] = nvml.NVMLError("lost")
    with pytest.raises(DeviceError, match="lost"):
        found.memory_info()


# -- every call, against the oldest and the newest bindings ----------------------------------------------

#: Parameters by function, in cuda-bindings 12.8.0 and 13.5.0: they are the same in both.
SIGNATURES = {
    "cuCtxGetCurrent": "",
    "cuCtxPopCurrent": "",
    "cuCtxPushCurrent": "ctx",
    "cuCtxSynchronize": "",
    "cuDeviceGet": "ordinal",
    "cuDeviceGetAttribute": "attrib dev",
    "cuDeviceGetCount": "",
    "cuDeviceGetUuid": "dev",
    "cuDevicePrimaryCtxGetState": "dev",
    "cuDevicePrimaryCtxRetain": "dev",
    "cuDeviceTotalMem": "dev",
    "cuDriverGetVersion": "",
    "cuEventCreate": "Flags",
    "cuEventDestroy": "hEvent",
    "cuEventQuery": "hEvent",
    "cuEventRecord": "hEvent hStream",
    "cuEventSynchronize": "hEvent",
    "cuGetErrorString": "error",
    "cuInit": "Flags",
    "cuMemAlloc": "bytesize",
    "cuMemAllocAsync": "bytesize hStream",
    "cuMemFree": "dptr",
    "cuMemFreeAsync": "dptr hStream",
    "cuMemFreeHost": "p",
    "cuMemGetInfo": "",
    "cuMemHostAlloc": "bytesize Flags",
    "cuMemHostRegister": "p bytesize Flags",
    "cuMemHostUnregister": "p",
    "cuMemcpyDtoHAsync": "dstHost srcDevice ByteCount hStream",
    "cuMemcpyHtoDAsync": "dstDevice srcHost ByteCount hStream",
    "cuPointerGetAttribute": "attribute ptr",
    "cuStreamCreate": "Flags",
    "cuStreamDestroy": "hStream",
    "cuStreamWaitEvent": "hStream hEvent Flags",
}


def called():
    """Yield each call of the driver in the two modules that make any: its name, and how many arguments it has."""
    for module in (cuda_driver, cuda_memory):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and re.match("cu[A-Z]", node.func.attr):
                yield node.func.attr, len(node.args)


def test_every_call_fits_the_oldest_and_the_newest_bindings():
    assert len(set(called())) > 30
    for name, count in called():
        assert count == len(SIGNATURES[name].split()), name


def test_the_installed_bindings_are_as_those():
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed")
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(driver, name)).parameters) == parameters.split(), name
