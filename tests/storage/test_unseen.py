"""Records of a frame whose bytes nobody saw: what is written and checked of them, and how they are read."""

import errno
import gc
import os

import pytest

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError, StorageFull
from gpuspill.storage.base import FrameStream, Lend
from gpuspill.storage.files import FileStore
from gpuspill.storage.inplace import FileMemory
from gpuspill.storage.record import RecordEncoder, decode_record, whole_pages

PAGE = 4096
DATA = os.urandom(2 * PAGE + 123)


class Unseen(FrameStream):
    """A frame that is written by whoever has it."""

    past_host = True

    def __init__(self, data=DATA, *, able=True, during=lambda: None):
        self.nbytes = len(data)
        self._data = data
        self._able = able
        self._during = during

    def copy_into(self, fd, before_each):
        assert os.fstat(fd).st_size == whole_pages(self.nbytes)
        before_each()
        self._during()
        os.pwrite(fd, self._data[: len(self._data) if self._able else 10], 0)
        before_each()
        return self._able

    def copy_to(self, sink):
        sink(memoryview(self._data))


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path) as store:
        yield store
        store.validate()


def read(store, receipt, allocate=None, **lend):
    header, (frame,) = store.read(receipt, allocate, **lend)
    return header, bytes(frame)


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, len(DATA)])
def test_it_is_read_as_any_other(store, nbytes):
    receipt = store.write(b"header", [Unseen(DATA[:nbytes])])
    assert not receipt.hashed
    assert (receipt.payload_nbytes, receipt.stored_nbytes) == (nbytes, whole_pages(nbytes))
    assert os.path.getsize(store.path_of(receipt)) == receipt.nbytes
    assert read(store, receipt) == read(store, receipt, lend=Lend.MEMORY) == (b"header", DATA[:nbytes])
    statistics = store.statistics()
    assert statistics.bytes_written == statistics.nbytes == receipt.nbytes
    assert statistics.payload_written == nbytes
    store.delete(receipt)
    assert store.statistics().nbytes == 0


def test_who_can_fetch_it_is_lent_the_file(store):
    receipt = store.write(b"header", [Unseen()])
    asked = []
    header, (frame,) = store.read(receipt, lambda n: asked.append(n), lend=Lend.FILE)
    memory = frame.obj
    assert isinstance(memory, FileMemory)
    assert (header, frame.nbytes, frame.readonly, asked) == (b"header", len(DATA), True, [])
    store.delete(receipt)
    store.close()
    assert os.pread(memory.fileno(), 2 * len(DATA), 0)[: len(DATA)] == DATA
    assert memory.load(frame, lambda n: memoryview(bytearray(n))) == DATA
    fd = memory.fileno()
    del memory, frame
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_what_is_hashed_is_read_and_checked_also_then(store):
    receipt = store.write(b"header", [DATA])
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return memoryview(bytearray(nbytes))

    assert read(store, receipt, allocate, lend=Lend.FILE) == (b"header", DATA)
    assert asked == [len(DATA)]
    with open(store.path_of(receipt), "r+b") as file:
        file.write(bytes([DATA[0] ^ 1]))
    with pytest.raises(RecordCorrupt):
        store.read(receipt, lend=Lend.FILE)


def test_if_it_cannot_be_done_the_record_is_as_any_other(store):
    receipt = store.write(b"header", [Unseen(able=False)])
    assert receipt.hashed
    with open(store.path_of(receipt), "rb") as file:
        found = file.read()
    other = store.write(b"header", [DATA])
    with open(store.path_of(other), "rb") as file:
        assert file.read() == found
    assert read(store, receipt, lend=Lend.FILE) == (b"header", DATA)


def test_beside_other_frames_it_is_hashed(store):
    """A page of its own takes more than the others would gain."""
    receipt = store.write(b"", [b"first", Unseen()])
    assert receipt.hashed
    assert [bytes(frame) for frame in store.read(receipt)[1]] == [b"first", DATA]


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageError)])
def test_a_disk_without_room_says_so_first(store, monkeypatch, number, error):
    def refuse(fd, offset, nbytes):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(error) as caught:
        store.write(b"", [Unseen(during=pytest.fail)])
    assert caught.value.errno == number
    assert os.listdir(store.path) == ["lock"]
    assert store.statistics().nbytes == 0


def test_a_file_system_that_allocates_nothing_in_advance(store, monkeypatch):
    def refuse(fd, offset, nbytes):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    receipt = store.write(b"", [Unseen()])
    assert not receipt.hashed
    assert read(store, receipt) == (b"", DATA)


def test_interrupted_or_closed_in_the_middle(store):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(b"", [Unseen(during=interrupt)])
    assert os.listdir(store.path) == ["lock"]
    with pytest.raises(StorageError, match="was closed"):
        store.write(b"", [Unseen(during=store.close)])
    assert not os.path.exists(store.path)


@pytest.mark.parametrize("lend", [None, *Lend])
def test_its_length_and_its_footer_are_checked(store, lend):
    size = store.write(b"header", [Unseen()]).nbytes
    for length in (0, 1, PAGE, whole_pages(len(DATA)), size - 1):
        receipt = store.write(b"header", [Unseen()])
        os.truncate(store.path_of(receipt), length)
        with pytest.raises(RecordLost):
            store.read(receipt, lend=lend)
    receipt = store.write(b"header", [Unseen()])
    os.truncate(store.path_of(receipt), size + 1)
    with pytest.raises(RecordCorrupt):
        store.read(receipt, lend=lend)
    for at in range(whole_pages(len(DATA)), size):
        receipt = store.write(b"header", [Unseen()])
        with open(store.path_of(receipt), "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(RecordCorrupt):
            store.read(receipt, lend=lend)
        store.delete(receipt)


def test_a_file_that_is_cut_off_after_it_was_lent(store):
    receipt = store.write(b"", [Unseen()])
    _, (frame,) = store.read(receipt, lend=Lend.FILE)
    os.truncate(store.path_of(receipt), PAGE)
    with pytest.raises(RecordLost, match="4,096 bytes of the 8,315"):
        frame.obj.load(frame, lambda n: memoryview(bytearray(n)))


def test_one_kind_is_not_taken_for_the_other():
    """A record says itself which it is, and a checksum of one is none of the other."""
    seen, unseen = RecordEncoder(), RecordEncoder()
    seen.start(PAGE)
    seen.feed(memoryview(bytes(PAGE)))
    unseen.pass_by(PAGE)
    payload = memoryview(bytes(PAGE))
    footers = {True: memoryview(seen.finish(b"")), False: memoryview(unseen.finish(b""))}
    for hashed, footer in footers.items():
        assert len(decode_record(payload, footer, hashed=hashed)[1]) == 1
        with pytest.raises(RecordCorrupt):
            decode_record(payload, footer, hashed=not hashed)
