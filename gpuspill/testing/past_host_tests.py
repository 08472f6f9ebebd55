"""What :class:`gpuspill.device.past_host.PastHost` does on every driver of files, as tests.

Make a subclass whose name begins with ``Test``, with a fixture `driver`, and how to make memory and
look at it. pytest is needed, which is why nothing else imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuspill.device.past_host import FileDriver, PastHost, Trust
from gpuspill.device.port import Device
from gpuspill.storage.base import FrameStream, Lend
from gpuspill.storage.files import FileStore
from gpuspill.storage.inplace import FileMemory

__all__ = ["DevicePastHostTests", "PastHostTests"]

_PAGE = 4096
#: Bytes of one transfer here.
PIECE = 4 * _PAGE

SIZES = [1, 100, _PAGE - 1, _PAGE, _PAGE + 1, PIECE, PIECE + 1, 11 * PIECE, 11 * PIECE + 4000]


class _Stream(FrameStream):
    """The frame of an allocation."""

    past_host = True

    def __init__(self, way: PastHost, allocation: Any) -> None:
        self.nbytes = allocation.nbytes
        self._way = way
        self._allocation = allocation

    def copy_into(self, fd: int, before_each: Callable[[], object]) -> bool:
        """See :meth:`FrameStream.copy_into`."""
        return self._way.write(self._allocation, fd, before_each)

    def copy_to(self, sink: Callable[[memoryview], object]) -> None:
        """See :meth:`FrameStream.copy_to`."""
        raise AssertionError("it did not go past the host")


class PastHostTests:
    """See the module."""

    def memory(self, content: np.ndarray[Any, Any]) -> Any:
        """Return an allocation with these bytes, which are there already."""
        raise NotImplementedError

    def content(self, allocation: Any) -> np.ndarray[Any, Any]:
        """Return the bytes of an allocation."""
        raise NotImplementedError

    @pytest.fixture
    def past_host(self, driver: FileDriver) -> PastHost:
        """Return what is tested."""
        return PastHost(driver, piece=PIECE)

    @pytest.fixture
    def fd(self, tmp_path: Path) -> Any:
        """Yield an open file, written by one process only, as records are made."""
        fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        yield fd
        os.close(fd)

    @staticmethod
    def bytes(nbytes: int) -> np.ndarray[Any, Any]:
        """Return so many bytes, each unlike its neighbours."""
        return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_there_and_back(
        self, driver: FileDriver, past_host: PastHost, fd: int, tmp_path: Path, nbytes: int
    ) -> None:
        """Of every size, aligned or not."""
        expected = self.bytes(nbytes)
        os.posix_fallocate(fd, 0, nbytes + -nbytes % _PAGE)
        calls: list[None] = []
        assert past_host.write(self.memory(expected), fd, lambda: calls.append(None))
        assert len(calls) == -(-nbytes // PIECE)
        stored = (tmp_path / "file").read_bytes()
        assert stored[:nbytes] == expected.tobytes()
        assert stored[nbytes:] == bytes(-nbytes % _PAGE)
        target = self.memory(np.zeros(nbytes, np.uint8))
        reader = PastHost(driver, piece=PIECE, trust=Trust(minimum=1))
        again = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            (tmp_path / "file").unlink()  # readers have it open
            assert reader.read(again, target)
        finally:
            os.close(again)
        np.testing.assert_array_equal(self.content(target), expected)

    def test_what_is_behind_it_stays(self, past_host: PastHost, fd: int, tmp_path: Path) -> None:
        """The footer of a record is written in another way, to pages of its own."""
        nbytes = PIECE + 77
        padded = nbytes + -nbytes % _PAGE
        os.posix_fallocate(fd, 0, padded)
        assert past_host.write(self.memory(self.bytes(nbytes)), fd, lambda: None)
        os.pwrite(fd, b"footer", padded)
        stored = (tmp_path / "file").read_bytes()
        assert (len(stored), stored[:nbytes], stored[padded:]) == (padded + 6, self.bytes(nbytes).tobytes(), b"footer")

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_as_a_record(self, driver: FileDriver, tmp_path: Path, nbytes: int) -> None:
        """Its footer is written, and its frame may be read, by the page cache."""
        past_host = PastHost(driver, piece=PIECE, trust=Trust(minimum=1))
        expected = self.bytes(nbytes)
        with FileStore(tmp_path) as store:
            receipt = store.write(b"header", [_Stream(past_host, self.memory(expected))])
            assert not receipt.hashed
            header, (frame,) = store.read(receipt)
            assert (header, bytes(frame)) == (b"header", expected.tobytes())
            header, (frame,) = store.read(receipt, lend=Lend.FILE)
            assert isinstance(frame.obj, FileMemory)
            target = self.memory(np.zeros(nbytes, np.uint8))
            assert past_host.read(frame.obj.fileno(), target)
            np.testing.assert_array_equal(self.content(target), expected)
            del frame
            store.validate()

    def test_a_file_that_ends_too_early(self, driver: FileDriver, tmp_path: Path, caplog: Any) -> None:
        """Fewer bytes than asked for are a failure."""
        path = tmp_path / "short"
        path.write_bytes(bytes(3 * PIECE - 1))
        fd = os.open(path, os.O_RDONLY)
        try:
            reader = PastHost(driver, piece=PIECE, trust=Trust(minimum=1))
            assert not reader.read(fd, self.memory(np.ones(3 * PIECE, np.uint8)))
        finally:
            os.close(fd)
        assert len(caplog.records) == 1

    def test_interrupted_between_two_pieces(self, past_host: PastHost, fd: int) -> None:
        """What is raised is passed on, and is no failure of the driver."""
        os.posix_fallocate(fd, 0, 11 * PIECE)
        calls: list[None] = []

        def interrupt() -> None:
            calls.append(None)
            if len(calls) == 7:
                raise KeyError("stop")

        with pytest.raises(KeyError, match="stop"):
            past_host.write(self.memory(self.bytes(11 * PIECE)), fd, interrupt)
        assert past_host.writes == 0
        assert past_host.worth(2**20)

    def test_a_file_that_cannot_be_opened(self, past_host: PastHost, caplog: Any) -> None:
        """It is said once, and not tried for ever."""
        allocation = self.memory(self.bytes(PIECE))
        assert not past_host.write(allocation, 10**6, lambda: None)
        assert not past_host.write(allocation, 10**6, lambda: None)
        assert past_host.worth(2**20)
        assert not past_host.write(allocation, 10**6, lambda: None)
        assert not past_host.worth(2**20)
        assert [record.levelname for record in caplog.records] == ["WARNING"]


class DevicePastHostTests(PastHostTests):
    """The same for the memory of the device that the fixture `device` returns."""

    @pytest.fixture(autouse=True)
    def _keep_device(self, device: Device) -> None:
        self._device = device

    def memory(self, content: np.ndarray[Any, Any]) -> Any:
        """See the base class."""
        allocation = self._device.allocate(content.nbytes)
        self._device.copy_to_device(content, allocation, self._device.stream("to_device")).wait()
        return allocation

    def content(self, allocation: Any) -> np.ndarray[Any, Any]:
        """See the base class."""
        host = np.empty(allocation.nbytes, np.uint8)
        self._device.copy_to_host(allocation, host, self._device.stream("to_host")).wait()
        return host
