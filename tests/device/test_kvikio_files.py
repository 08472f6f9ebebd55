"""KvikIO: finding out whether it will do, with a fake of the library; and the library itself, on host memory."""

import sys
import types

import numpy as np
import pytest

from gpuspill.device import kvikio_files as module
from gpuspill.device.kvikio_files import KvikioFiles, kvikio_files
from gpuspill.device.past_host import FileDriverError
from gpuspill.errors import ConfigError
from gpuspill.testing.past_host_tests import PastHostTests


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


class TestKvikio(PastHostTests):
    """The library itself, through its compatibility mode: all of the adapter but the GPU."""

    @pytest.fixture
    def driver(self, tmp_path):
        pytest.importorskip("kvikio")
        files = KvikioFiles()
        (tmp_path / "try").write_bytes(b"x")
        try:
            file = files.open(str(tmp_path / "try"), write=False)
            file.read(Memory(np.zeros(1, np.uint8)), 0, 1).get()
        except FileDriverError as error:
            pytest.skip(f"KvikIO does not take host memory here: {error}")
        return files

    def memory(self, content):
        return Memory(content)

    def content(self, allocation):
        return allocation.array

    def test_without_a_gpu_it_is_not_used(self, driver, tmp_path):
        with pytest.raises(ConfigError, match=r"nvidia-fs|KVIKIO_COMPAT_MODE|cuFile does not take"):
            kvikio_files(str(tmp_path))
