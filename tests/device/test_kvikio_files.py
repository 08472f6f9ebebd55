"""KvikIO: finding out whether it will do, with a fake of the library; and the library itself, on host memory."""

import importlib
import sys
import types

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.cuda import kvikio_files as module
from gpuspill.device.cuda.kvikio_files import KvikioFiles, kvikio_files
from gpuspill.device.past_host import FileDriverError, PastHost, Trust
from gpuspill.errors import ConfigError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice
from gpuspill.storage.files import FileStore
from gpuspill.testing.past_host_tests import PastHostTests
from gpuspill.tier import DeviceTier


class FakeKvikio(types.ModuleType):
    """As much of KvikIO as is asked for; checks what it is asked for."""

    def __init__(self, *, mode="AUTO", driver=True, takes=True):
        super().__init__("kvikio")
        self.CompatMode = types.SimpleNamespace(OFF="OFF", ON="ON", AUTO="AUTO")
        self.mode, self.driver, self.takes = mode, driver, takes
        self.opened = []
        self.defaults = types.ModuleType("kvikio.defaults")
        self.defaults.get = lambda name: {"compat_mode": self.mode}[name]
        self.defaults.set = self.set
        self.cufile_driver = types.ModuleType("kvikio.cufile_driver")
        self.cufile_driver.get = lambda name: {"is_gds_available": self.driver}[name]

    def set(self, name, value):
        assert name == "compat_mode"
        kvikio, before = self, self.mode
        self.mode = value

        class Context:
            def __enter__(self):
                pass

            def __exit__(self, *_):
                kvikio.mode = before

        return Context()

    def CuFile(self, path, flags):
        with open(path, "r+b"):
            self.opened.append((path, flags, self.mode))
        if not self.takes and self.mode == "OFF":
            raise RuntimeError("cuFile: operation not supported on the file system")
        return types.SimpleNamespace(close=lambda: self.opened.append("closed"))


@pytest.fixture
def install(monkeypatch):
    def install(**options):
        fake = FakeKvikio(**options)
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object() if name == "kvikio" else None)
        monkeypatch.setitem(sys.modules, "kvikio", fake)
        for name in ("defaults", "cufile_driver"):
            monkeypatch.setitem(sys.modules, f"kvikio.{name}", getattr(fake, name))
        return fake

    return install


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install kvikio-cu12 or kvikio-cu13"):
        kvikio_files(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"mode": "ON"}, "KVIKIO_COMPAT_MODE"),
        ({"driver": False}, "nvidia-fs"),
        ({"takes": False}, r"cuFile does not take files in .*not supported on the file system"),
    ],
)
def test_what_kvikio_would_take_through_host_memory_is_not_used(install, tmp_path, options, found):
    fake = install(**options)
    with pytest.raises(ConfigError, match=found):
        kvikio_files(str(tmp_path))
    assert fake.mode == options.get("mode", "AUTO")
    assert list(tmp_path.iterdir()) == []


def test_a_library_of_another_make(install, tmp_path):
    fake = install()
    del fake.cufile_driver.get
    with pytest.raises(ConfigError, match="KvikIO is installed and cannot be used"):
        kvikio_files(str(tmp_path))


def test_where_there_is_a_driver(install, tmp_path):
    """A file is tried, strictly, in the directory, which may have to be made; nothing of it stays."""
    fake = install()
    directory = tmp_path / "to be made"
    assert isinstance(kvikio_files(str(directory)), KvikioFiles)
    (path, flags, mode), closed = fake.opened
    assert (flags, mode, closed, fake.mode) == ("r+", "OFF", "closed", "AUTO")
    assert path.startswith(str(directory))
    assert list(directory.iterdir()) == []


class Memory:
    """Host memory in the place of an allocation."""

    def __init__(self, content):
        self.array = np.array(content)
        self.address = self.array.ctypes.data
        self.nbytes = self.array.nbytes


@pytest.fixture
def driver(tmp_path):
    """KvikIO itself, if it takes host memory here."""
    pytest.importorskip("kvikio")
    files = KvikioFiles()
    (tmp_path / "try").write_bytes(b"x")
    try:
        file = files.open(str(tmp_path / "try"), write=False)
        file.read(Memory(np.zeros(1, np.uint8)), 0, 1).get()
    except FileDriverError as error:
        pytest.skip(f"KvikIO does not take host memory here: {error}")
    return files


class TestKvikio(PastHostTests):
    """The library itself, through its compatibility mode: all of the adapter but the GPU."""

    def memory(self, content):
        return Memory(content)

    def content(self, allocation):
        return allocation.array

    def test_without_a_driver_it_is_not_used(self, driver, tmp_path):
        if importlib.import_module("kvikio.cufile_driver").get("is_gds_available"):
            pytest.skip("there is a driver")
        with pytest.raises(ConfigError, match=r"nvidia-fs|KVIKIO_COMPAT_MODE"):
            kvikio_files(str(tmp_path))


class OnSimulated:
    """KvikIO for a simulated device, whose memory is in the host's: what is written is really there at once."""

    def __init__(self, files):
        self.files = files
        self.opened = 0

    def open(self, path, *, write):
        self.opened += 1
        file = self.files.open(path, write=write)

        def begin(call):
            def at(allocation, offset, nbytes):
                return call(types.SimpleNamespace(address=allocation.host_address), offset, nbytes)

            return at

        return types.SimpleNamespace(write=begin(file.write), read=begin(file.read), close=file.close)


def test_units_to_disk_and_back(driver, tmp_path):
    """Of sizes that are pages, and are not; each time a record with a footer behind it."""
    device = SimulatedDevice(2**26, clock=ManualClock())
    past_host = PastHost(OnSimulated(driver), piece=4 * 4096, trust=Trust(minimum=1))
    store = FileStore(tmp_path)
    host = ProxifyManager(limit=0, store=store, serializer=PickleSerializer(), sizeof=lambda value: 100)
    tier = DeviceTier(device, host, limit=None, past_host=past_host)
    values = [np.random.default_rng(n).random(n) for n in (1, 511, 512, 513, 2**17, 2**17 + 1)]
    with simulated.use(device):
        kept = [tier.proxify([simulated.asarray(value)]) for value in values]
        for rounds in (1, 2):
            tier.settle()
            tier.manager.limits.evict_all()
            assert device.statistics().live_bytes == 0
            assert store.statistics().payload_nbytes == sum(value.nbytes for value in values)
            for skeleton, value in zip(kept, values, strict=True):
                (array,) = tier.resolve(skeleton)
                np.testing.assert_array_equal(simulated.asnumpy(array), value)
            del array
            assert past_host.writes == past_host.reads == rounds * len(values)
            assert store.statistics().records == 0
        kept.clear()
    tier.close()
    host.close()
    device.validate()
    assert device.statistics().violations == 0
