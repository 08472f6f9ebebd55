"""Borrowing a record: looking at the file instead of copying it, and reading it where that cannot be."""

import errno
import os
import socket
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError
from gpuspill.storage import mapped
from gpuspill.storage.base import Lend
from gpuspill.storage.codecs import Codec, CodecChooser
from gpuspill.storage.files import FileStore
from tests.processes import in_child

LARGE = 3 * 2**20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are mapped on Linux only")


def is_mapped(path):
    return path in Path("/proc/self/maps").read_text()


def noise(nbytes):
    return np.random.default_rng(nbytes).bytes(nbytes)


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path) as store:
        yield store


class Allocated(list):
    """What was asked for, and memory for it."""

    def __call__(self, nbytes):
        self.append(nbytes)
        return memoryview(bytearray(nbytes))


def test_the_kernel_can_do_it(store):
    """Else the tests below show nothing; Linux before 5.14 cannot."""
    receipt = store.write(b"h", [noise(LARGE)])
    if mapped.map_file(store._directory.fd, str(receipt.number), receipt.nbytes) is None:
        pytest.skip("this kernel does not bring in pages on request")


def test_a_large_record_is_not_copied(store):
    frames = [noise(LARGE), b"", noise(100)]
    receipt = store.write(b"h", frames)
    allocated = Allocated()
    header, borrowed = store.read(receipt, allocated, lend=Lend.MEMORY)
    assert (header, [bytes(frame) for frame in borrowed]) == (b"h", frames)
    assert allocated == []
    assert all(frame.readonly for frame in borrowed if frame.nbytes)
    with pytest.raises(TypeError):
        borrowed[0][0] = 1
    statistics = store.statistics()
    assert (statistics.reads, statistics.bytes_read, statistics.payload_read) == (1, receipt.nbytes, LARGE + 100)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.fault("record cut off", on="send", outcome="noticed")
@pytest.mark.parametrize("left", [0, 1, LARGE // 2, LARGE])
def test_a_file_that_is_cut_off_before_it_is_lent_or_while_it_is_sent(store, left):
    """The system says so to the process that sends; it is this process that must not look."""
    receipt = store.write(b"h", [noise(LARGE), noise(LARGE)])
    _, (_, last) = store.read(receipt, lend=Lend.MEMORY)
    os.truncate(store.path_of(receipt), left)

    def send():
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(OSError, match="Bad address"):
            ours.sendall(last)

    in_child(send)
    with pytest.raises(RecordLost, match=f"has {left:,} bytes"):
        store.read(receipt, lend=Lend.MEMORY)


def test_it_is_let_go_with_the_last_view(store):
    receipt = store.write(b"h", [noise(LARGE)])
    before = len(os.listdir("/proc/self/fd"))
    _, borrowed = store.read(receipt, lend=Lend.MEMORY)
    part = borrowed[0][10:20]
    del borrowed
    path = store.path_of(receipt)
    assert is_mapped(path)
    del part
    assert not is_mapped(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_small_record_is_read(store):
    receipt = store.write(b"h", [noise(1000)])
    allocated = Allocated()
    store.read(receipt, allocated, lend=Lend.MEMORY)
    assert allocated == [1000]


def test_compressed_frames_are_decompressed_into_memory_of_their_own(tmp_path):
    codec = Codec("zlib", lambda frame: zlib.compress(frame, 1), zlib.decompress)
    with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec})) as store:
        frames = [b"compressible " * 300_000, noise(LARGE)]
        receipt = store.write(b"h", frames)
        assert store.statistics().compressed_frames == 1
        allocated = Allocated()
        _, borrowed = store.read(receipt, allocated, lend=Lend.MEMORY)
        assert [bytes(frame) for frame in borrowed] == frames
        assert allocated == [len(frames[0])]


class TestWhereItCannotBe:
    """The file is read, which either works or says what is wrong."""

    @pytest.fixture
    def frame(self):
        return noise(LARGE)

    @pytest.fixture
    def receipt(self, store, frame):
        return store.write(b"h", [frame])

    def test_the_kernel_does_not_know_how(self, store, receipt, frame, monkeypatch):
        monkeypatch.setattr(mapped, "_POPULATE_READ", 9999)
        allocated = Allocated()
        assert bytes(store.read(receipt, allocated, lend=Lend.MEMORY)[1][0]) == frame
        assert allocated == [LARGE]
        assert not is_mapped(store.path_of(receipt))

    def test_no_such_call(self, store, receipt, frame, monkeypatch):
        def no_library(name):
            raise OSError("no C library")

        monkeypatch.setattr(mapped.ctypes, "CDLL", no_library)
        assert bytes(store.read(receipt, lend=Lend.MEMORY)[1][0]) == frame

    def test_another_system(self, store, receipt, frame, monkeypatch):
        monkeypatch.setattr(sys, "platform", "darwin")
        allocated = Allocated()
        store.read(receipt, allocated, lend=Lend.MEMORY)
        assert allocated == [LARGE]

    def test_a_file_that_may_only_be_read(self, store, receipt, frame, monkeypatch):
        real = os.open

        def open_(path, flags, *args, **kwargs):
            if flags & os.O_RDWR:
                raise PermissionError(13, "Permission denied")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", open_)
        assert bytes(store.read(receipt, lend=Lend.MEMORY)[1][0]) == frame

    @pytest.mark.fault("record damaged", on="send", outcome="noticed")
    def test_damaged(self, store, receipt):
        with open(store.path_of(receipt), "r+b") as file:
            file.seek(LARGE // 2)
            file.write(b"?")
        with pytest.raises(RecordCorrupt, match="changed since"):
            store.read(receipt, lend=Lend.MEMORY)
        assert not is_mapped(store.path_of(receipt))

    @pytest.mark.fault("record cut off", on="send", outcome="noticed")
    @pytest.mark.parametrize("nbytes", [0, 1, LARGE])
    def test_cut_off(self, store, receipt, nbytes):
        os.truncate(store.path_of(receipt), nbytes)
        with pytest.raises(RecordLost):
            store.read(receipt, lend=Lend.MEMORY)

    def test_longer(self, store, receipt):
        with open(store.path_of(receipt), "ab") as file:
            file.write(b"?")
        with pytest.raises(RecordCorrupt, match="more than"):
            store.read(receipt, lend=Lend.MEMORY)

    def test_removed(self, store, receipt):
        os.unlink(store.path_of(receipt))
        with pytest.raises(RecordLost):
            store.read(receipt, lend=Lend.MEMORY)

    def test_unreadable(self, store, receipt, monkeypatch):
        def failing(*args):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("gpuspill.storage.record_io.map_file", lambda *args: None)
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(StorageError, match="Input/output"):
            store.read(receipt, lend=Lend.MEMORY)

    @pytest.mark.fault("no file descriptor left", on="send", outcome="an error; not lost")
    def test_no_descriptor_is_left(self, store, receipt, frame, monkeypatch):
        def failing(*args, **kwargs):
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing)
            with pytest.raises(StorageError, match="Too many open files"):
                store.read(receipt, lend=Lend.MEMORY)
        assert bytes(store.read(receipt, lend=Lend.MEMORY)[1][0]) == frame

    @pytest.mark.fault("another file in its place", on="send", outcome="noticed")
    def test_another_record_in_its_place(self, store, receipt):
        other = store.write(b"h", [noise(LARGE + 64)[:LARGE]])
        os.replace(store.path_of(other), store.path_of(receipt))
        with pytest.raises(RecordCorrupt, match="another"):
            store.read(receipt, lend=Lend.MEMORY)
        with pytest.raises(RecordLost):
            store.read(other, lend=Lend.MEMORY)
