"""What is particular to files: sizes, damage, failures of the system, and closing while in use."""

import errno
import gc
import itertools
import logging
import mmap
import os
import random
import shutil
import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError, StorageFull
from gpuspill.storage import record_io
from gpuspill.storage.buffers import BufferPool
from gpuspill.storage.codecs import Codec, CodecChooser
from gpuspill.storage.counters import StorageCounters
from gpuspill.storage.files import FileStore
from gpuspill.storage.wrappers import DelayedStore
from gpuspill.testing.stores import Pieces
from tests.threads import in_thread


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path) as store:
        yield store


def contents(result):
    header, frames = result
    return header, [bytes(frame) for frame in frames]


def files(store):
    return sorted(set(os.listdir(store.path)) - {"lock"})


class TestSizes:
    def test_receipt_and_file_agree(self, store):
        receipt = store.write(b"header", [b"x" * 1000, b"y"])
        assert os.path.getsize(store.path_of(receipt)) == receipt.nbytes
        assert receipt.payload_nbytes == 1001
        assert receipt.stored_nbytes == 1025

    @pytest.mark.parametrize("sizes", [[2**20], [10, 2**20, 1, 64], [70_000] * 50, [0, 100_000, 0], [5] * 3])
    def test_frames_come_back_aligned_each_in_its_own_buffer(self, store, sizes):
        receipt = store.write(b"h", [os.urandom(size) for size in sizes])
        _, frames = store.read(receipt, BufferPool(0).allocate)
        arrays = [np.frombuffer(frame, "u1") for frame in frames if frame.nbytes]
        assert all(array.ctypes.data % 64 == 0 for array in arrays)
        assert all(array.flags.writeable for array in arrays)
        assert len({id(frame.obj) for frame in frames}) == len(sizes)

    def test_exactly_what_is_needed_is_allocated(self, store):
        asked = []
        receipt = store.write(b"h" * 1000, [bytes(2**20)])
        store.read(receipt, lambda nbytes: asked.append(nbytes) or memoryview(bytearray(nbytes)))
        assert asked == [2**20]

    def test_a_small_record_costs_few_system_calls(self, store, monkeypatch):
        calls = []

        def spy(name):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs))

        for name in ("open", "writev", "preadv", "close", "rename", "unlink", "stat", "fstat", "lseek", "fsync"):
            spy(name)
        receipt = store.write(b"h", [b"x" * 1000])
        assert calls == ["open", "writev", "fstat", "close"]
        calls.clear()
        store.read(receipt)
        assert calls == ["open", "preadv", "close"]
        calls.clear()
        store.delete(receipt)
        assert calls == ["stat", "unlink"]

    @pytest.mark.skipif(
        not os.environ.get("GPUSPILL_TEST_LARGE"), reason="writes 2.1 GB; set GPUSPILL_TEST_LARGE=1 to run it"
    )
    def test_more_than_one_system_call_can_move(self, store):
        # Untouched private memory costs none, so only the read needs 2.1 GB.
        nbytes = 2_147_479_552 + 100
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as frame:
            frame[-5:] = b"12345"
            receipt = store.write(b"h", [b"first", memoryview(frame)])
        header, (first, large) = store.read(receipt)
        assert (header, bytes(first), large.nbytes) == (b"h", b"first", nbytes)
        assert bytes(large[-6:]) == b"\x0012345"
        del first, large


class TestDamage:
    """Whatever happened to a file, a read returns what was written or says that it is lost."""

    @pytest.fixture(params=[None, 1, 7, 64], autouse=True, ids=lambda nbytes: f"pieces of {nbytes or 'the usual size'}")
    def piece(self, request, monkeypatch):
        """How many bytes are read and hashed at a time."""
        if request.param is not None:
            monkeypatch.setattr(record_io, "_PIECE_NBYTES", request.param)

    @pytest.fixture
    def receipt(self, store):
        return store.write(b"header", [b"some frame", b"", b"another"])

    @pytest.fixture
    def path(self, store, receipt):
        return store.path_of(receipt)

    @pytest.mark.fault("record damaged", on="disk→host", outcome="noticed")
    def test_every_byte(self, store, receipt, path):
        with open(path, "r+b", buffering=0) as file:
            original = file.read()
            for position in range(len(original)):
                file.seek(position)
                file.write(bytes([original[position] ^ 0x10]))
                with pytest.raises(RecordCorrupt, match="checksum"):
                    store.read(receipt)
                file.seek(position)
                file.write(original[position : position + 1])
        assert contents(store.read(receipt)) == (b"header", [b"some frame", b"", b"another"])
        assert store.statistics().corrupt == len(original)

    @pytest.mark.fault("record cut off", on="disk→host", outcome="noticed")
    def test_every_length(self, store, receipt, path):
        for nbytes in reversed(range(receipt.nbytes)):
            os.truncate(path, nbytes)
            with pytest.raises(RecordLost, match=f"has {nbytes} bytes; {receipt.nbytes} were written"):
                store.read(receipt)
        assert store.statistics().lost == receipt.nbytes

    def test_longer(self, store, receipt, path):
        with open(path, "ab") as file:
            file.write(b"\0")
        with pytest.raises(RecordCorrupt, match="more than"):
            store.read(receipt)

    @pytest.mark.fault("record removed", on="release", outcome="no error")
    def test_removed(self, store, receipt, path):
        os.unlink(path)
        with pytest.raises(RecordLost, match="is gone"):
            store.read(receipt)
        store.delete(receipt)
        store.delete(receipt)
        assert store.statistics().nbytes == 0

    @pytest.mark.fault("another file in its place", on="disk→host", outcome="noticed")
    def test_swapped(self, store):
        first, second = (store.write(b"", [data]) for data in (b"first!", b"second"))
        assert first.nbytes == second.nbytes
        os.rename(store.path_of(first), store.path_of(first) + ".x")
        os.rename(store.path_of(second), store.path_of(first))
        os.rename(store.path_of(first) + ".x", store.path_of(second))
        for receipt in (first, second):
            with pytest.raises(RecordCorrupt, match="another one"):
                store.read(receipt)

    @pytest.mark.fault("another file in its place", on="disk→host", outcome="noticed")
    def test_replaced_by_a_link(self, store, receipt, path, tmp_path):
        os.rename(path, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", path)
        with pytest.raises(RecordLost, match="is gone"):
            store.read(receipt)
        store.delete(receipt)
        os.unlink(path)
        assert (tmp_path / "elsewhere").exists()

    def test_replaced_by_a_pipe(self, store, receipt, path):
        os.unlink(path)
        os.mkfifo(path)
        with pytest.raises(StorageError, match="Illegal seek"):  # and waits for nobody
            store.read(receipt)
        store.delete(receipt)
        os.unlink(path)

    def test_replaced_while_it_is_written(self, store, monkeypatch, path):
        writev = os.writev

        def replaced(fd, buffers):
            name = os.path.join(store.path, "2")
            os.rename(name, f"{name}-moved")
            with open(name, "wb") as file:
                file.write(b"theirs")
            os.link(name, f"{name}-theirs")
            os.unlink(f"{name}-moved")
            return writev(fd, buffers)

        monkeypatch.setattr(os, "writev", replaced)
        with pytest.raises(StorageError, match="No such file"):
            store.write(b"", [b"x"])
        for name in ("2", "2-theirs"):
            with open(os.path.join(store.path, name), "rb") as file:
                assert file.read() == b"theirs"
            os.unlink(os.path.join(store.path, name))

    @pytest.mark.fault("another file in its place", on="host→disk", outcome="stays in memory, tried again")
    def test_a_name_that_is_taken_already(self, store, receipt):
        name = os.path.join(store.path, "2")
        os.mkdir(name)
        with pytest.raises(StorageError, match="File exists"):
            store.write(b"", [b"x"])
        assert contents(store.read(store.write(b"", [b"y"]))) == (b"", [b"y"])
        os.rmdir(name)

    @pytest.mark.fault("another file in its place", on=("disk→host", "release"), outcome="noticed")
    def test_replaced_by_a_directory(self, store, receipt, path):
        os.unlink(path)
        os.mkdir(path)
        with pytest.raises(RecordLost, match="is gone"):
            store.read(receipt)
        store.delete(receipt)
        os.rmdir(path)

    @pytest.mark.fault("spill directory removed", on="disk→host", outcome="lost, and says so")
    def test_directory_removed(self, store, receipt, path):
        os.unlink(path)
        os.unlink(os.path.join(store.path, "lock"))
        os.rmdir(store.path)
        with pytest.raises(RecordLost):
            store.read(receipt)
        with pytest.raises(StorageError, match="was removed while it was in use"):
            store.write(b"", [b"x"])
        store.delete(receipt)
        store.close()

    @pytest.mark.fault("spill directory removed", on="host→disk", outcome="goes on in another")
    @pytest.mark.parametrize("parent", [False, True])
    def test_after_its_directory_was_removed_a_store_goes_on_in_another(self, tmp_path, parent):
        store = FileStore(tmp_path / "spill")
        receipt = store.write(b"", [b"lost"])
        before = store.path
        shutil.rmtree(tmp_path / "spill" if parent else before)
        with pytest.raises(StorageError, match=r"was removed while it was in use.*stays in memory") as caught:
            store.write(b"", [b"kept"])
        assert before in str(caught.value)
        assert store.path in str(caught.value)
        kept = store.write(b"", [b"kept"])
        assert os.listdir(tmp_path / "spill") == [os.path.basename(store.path)] != [os.path.basename(before)]
        assert contents(store.read(kept)) == (b"", [b"kept"])
        with pytest.raises(RecordLost, match="is gone"):
            store.read(receipt)
        store.delete(receipt)
        assert store.statistics().nbytes == kept.nbytes
        store.validate()
        store.close()
        assert os.listdir(tmp_path / "spill") == []

    def test_two_who_find_its_directory_removed_make_one(self, store, tmp_path):
        number = itertools.count()
        both = threading.Barrier(2)
        make = store._start_anew

        def together(gone):
            both.wait(10)
            return make(gone)

        def write():
            with pytest.raises(StorageError, match="was removed"):
                store.write(b"", [b"%d" % next(number)])

        store._start_anew = together
        shutil.rmtree(store.path)
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(write), pool.submit(write)]:
                future.result(10)
        assert os.listdir(tmp_path) == [os.path.basename(store.path)]

    def test_no_other_can_be_made(self, tmp_path):
        with FileStore(tmp_path / "spill") as store:
            shutil.rmtree(tmp_path / "spill")
            (tmp_path / "spill").write_bytes(b"a file")
            with pytest.raises(StorageError, match="cannot use"):
                store.write(b"", [b"kept"])
            os.unlink(tmp_path / "spill")
            with pytest.raises(StorageError, match="was removed"):
                store.write(b"", [b"kept"])
            store.write(b"", [b"kept"])

    def test_receipt_of_another_store(self, store, receipt, tmp_path):
        with FileStore(tmp_path) as other:
            same_number = other.write(b"", [b"theirs"])
            assert same_number.number == receipt.number
            with pytest.raises(RecordLost, match="another store wrote it"):
                store.read(same_number)
            store.delete(same_number)
            assert contents(store.read(receipt))[0] == b"header"

    @pytest.mark.fault("codec fails", on="disk→host", outcome="noticed")
    @pytest.mark.parametrize(
        ("decompress", "message"),
        [
            (lambda data: zlib.decompress(data)[:-1], "gave 99,999 bytes, not 100,000"),
            (lambda data: 1 / 0, "ZeroDivisionError"),
        ],
    )
    def test_codec_that_lost_the_data(self, tmp_path, decompress, message):
        calls = []

        def after_the_sample(data):
            calls.append(data)
            return zlib.decompress(data) if len(calls) == 1 else decompress(data)

        codec = Codec("zlib", lambda data: zlib.compress(data, 1), after_the_sample)
        with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec})) as store:
            receipt = store.write(b"", [bytes(100_000)])
            with pytest.raises(RecordCorrupt, match=message):
                store.read(receipt)

    @pytest.mark.fault("host memory runs out", on="disk→host", outcome="an error; not lost")
    def test_out_of_memory_while_decompressing_is_no_damage(self, tmp_path):
        def decompress(data):
            raise MemoryError

        codec = Codec("zlib", lambda data: zlib.compress(data, 1), zlib.decompress)
        chooser = CodecChooser("zlib", {"zlib": codec})
        with FileStore(tmp_path, codecs=chooser) as store:
            receipt = store.write(b"", [bytes(100_000)])
            chooser._codecs["zlib"] = Codec("zlib", zlib.compress, decompress)
            with pytest.raises(MemoryError):
                store.read(receipt)
            chooser._codecs["zlib"] = codec
            assert bytes(store.read(receipt)[1][0]) == bytes(100_000)

    def test_the_error_does_not_keep_the_buffer(self, store, path, receipt):
        os.truncate(path, 3)
        buffers = []

        def allocate(nbytes):
            array = np.zeros(nbytes, "u1")
            buffers.append(weakref.ref(array))
            return memoryview(array)

        errors = []
        try:
            store.read(receipt, allocate)
        except RecordLost as exc:
            errors.append(exc)
        gc.collect()
        assert len(errors) == len(buffers) == 1
        assert buffers[0]() is None


class TestPieces:
    """Records that are larger than what is read and hashed at a time."""

    PIECE = record_io._PIECE_NBYTES

    @pytest.mark.parametrize("nbytes", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1, 5 * PIECE - 100])
    def test_what_was_written_comes_back(self, store, nbytes, monkeypatch):
        data = os.urandom(nbytes)
        receipt = store.write(b"header", [data])
        preadv, sizes = os.preadv, []

        def spy(fd, buffers, offset):
            sizes.append(buffers[0].nbytes)
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", spy)
        assert contents(store.read(receipt)) == (b"header", [data])
        # The footer, and that there is no more: one call, the first; a small record is one call in all.
        if nbytes > self.PIECE:
            assert sizes.pop(0) == receipt.nbytes - receipt.stored_nbytes + 1
        assert sizes[:-1] == [self.PIECE] * (len(sizes) - 1)
        assert sum(sizes) == receipt.stored_nbytes

    def test_frames_end_where_they_like(self, store):
        frames = [os.urandom(nbytes) for nbytes in (3, self.PIECE - 3, 0, 1, 2 * self.PIECE, 100)]
        receipt = store.write(b"header", frames)
        assert contents(store.read(receipt)) == (b"header", frames)

    @pytest.mark.parametrize("nbytes", [100, 1000])
    def test_small_frames_are_read_together(self, store, nbytes, monkeypatch):
        """The system, and the checksum, see few pieces; each frame has memory of its own even so."""
        receipt = store.write(b"header", [i.to_bytes(2, "little") * (nbytes // 2) for i in range(1000)])
        preadv, buffers = os.preadv, []
        hashed = []
        feed = record_io.PayloadHash.feed
        monkeypatch.setattr(os, "preadv", lambda fd, into, at: buffers.extend(into) or preadv(fd, into, at))
        monkeypatch.setattr(record_io.PayloadHash, "feed", lambda self, piece: hashed.append(1) or feed(self, piece))
        _, frames = store.read(receipt)
        assert [bytes(frame) for frame in frames] == [i.to_bytes(2, "little") * (nbytes // 2) for i in range(1000)]
        assert len({id(frame.obj) for frame in frames}) == 1000
        assert len(buffers) <= 4
        assert len(hashed) <= 4

    @pytest.mark.parametrize("seed", range(20))
    def test_frames_of_any_size_side_by_side(self, store, seed):
        """Frames are read together, alone or in pieces; none of them notices."""
        rand = random.Random(seed)
        around = (0, 1, 63, 64, 1000, record_io._TOGETHER_NBYTES, self.PIECE)
        frames = [rand.randbytes(max(0, rand.choice(around) + rand.randint(-1, 1))) for _ in range(rand.randint(2, 30))]
        receipt = store.write(b"header", frames)
        assert contents(store.read(receipt)) == (b"header", frames)
        position = rand.randrange(receipt.stored_nbytes)
        os.truncate(store.path_of(receipt), position)
        with pytest.raises(RecordLost, match=f"has {position:,} bytes"):
            store.read(receipt)

    @pytest.mark.parametrize("position", [0, PIECE - 1, PIECE, 2 * PIECE - 1, 2 * PIECE, 3 * PIECE + 9, -1, -20, -100])
    def test_damage(self, store, position):
        receipt = store.write(b"header", [os.urandom(3 * self.PIECE + 10)])
        with open(store.path_of(receipt), "r+b") as file:
            file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(RecordCorrupt, match="checksum"):
            store.read(receipt)

    @pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE, 3 * PIECE + 10])
    def test_cut_off(self, store, nbytes):
        receipt = store.write(b"header", [os.urandom(3 * self.PIECE + 10)])
        os.truncate(store.path_of(receipt), nbytes)
        with pytest.raises(RecordLost, match=f"has {nbytes:,} bytes; {receipt.nbytes:,} were written"):
            store.read(receipt)

    @pytest.mark.parametrize("nth", [1, 2, 4])
    def test_a_call_that_fails(self, store, monkeypatch, nth):
        data = os.urandom(3 * self.PIECE + 10)
        receipt = store.write(b"header", [data])
        with monkeypatch.context() as patch:
            fail_nth(patch, "preadv", nth, errno.EIO)
            with pytest.raises(StorageError, match=r"reading .* failed"):
                store.read(receipt)
        assert contents(store.read(receipt)) == (b"header", [data])

    def test_calls_that_move_less_than_asked(self, store, monkeypatch):
        data = os.urandom(2 * self.PIECE + 10)
        receipt = store.write(b"header", [data])
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:100_001]], at))
        assert contents(store.read(receipt)) == (b"header", [data])

    def test_times_are_told_apart(self, tmp_path):
        """The clock shows how often it was asked: once more at the end of each read and of each hash."""
        ticks = itertools.count()
        told = {}
        with FileStore(
            tmp_path, clock=lambda: next(ticks), metrics=lambda *told_of: told.update([told_of[:2]])
        ) as store:
            receipt = store.write(b"header", [os.urandom(3 * self.PIECE + 10)])
            store.read(receipt)
        assert told["checksum"] == 4 + 1  # four pieces, and the footer
        # From the first to the last look at the clock, 9 ticks, without what was hashed meanwhile.
        assert told["disk-read"] == 9 - 4


class TestFinalisers:
    """The garbage collector may run anywhere, also while the thread that it interrupts holds a lock of the store."""

    @pytest.fixture
    def during(self, monkeypatch):
        """Do something once in the middle of an addition, under the lock; of what follows the outcome is returned."""
        add = StorageCounters.add

        def during(act, operation):
            outcome = []

            def add_and_act(counters, other):
                if not outcome:
                    outcome.append(None)
                    outcome[0] = act()
                add(counters, other)

            with monkeypatch.context() as patch:
                patch.setattr(StorageCounters, "add", add_and_act)
                result = in_thread(operation)()
            return result, outcome[0]

        return during

    @pytest.fixture
    def receipts(self, store):
        return [store.write(b"header", [b"%d" % number]) for number in range(3)]

    def test_they_read(self, store, receipts, during):
        read, read_inside = during(lambda: store.read(receipts[0]), lambda: store.read(receipts[1]))
        assert (contents(read), contents(read_inside)) == ((b"header", [b"1"]), (b"header", [b"0"]))
        assert store.statistics().reads == 2
        store.validate()

    @pytest.mark.fault("a finaliser in between", on="release", outcome="deleted when the operation ends")
    def test_they_delete_when_the_operation_ends(self, store, receipts, during):
        def delete():
            store.delete(receipts[0])
            return files(store)

        _, there = during(delete, lambda: store.read(receipts[1]))
        assert there == ["1", "2", "3"]
        assert files(store) == ["2", "3"]
        stats = store.statistics()
        assert (stats.records, stats.deletes, stats.reads) == (2, 1, 1)
        store.validate()

    def test_they_delete_what_is_just_read(self, store, receipts, during):
        read, _ = during(lambda: store.delete(receipts[1]), lambda: store.read(receipts[1]))
        assert contents(read) == (b"header", [b"1"])
        assert files(store) == ["1", "3"]
        store.validate()

    def test_they_do_not_write(self, store, receipts, during):
        def write():
            with pytest.raises(StorageError, match="a finaliser cannot write") as caught:
                store.write(b"", [b"x"])
            return caught.value.errno

        _, number = during(write, lambda: store.read(receipts[1]))
        assert number == errno.EDEADLK
        assert store.statistics().write_failures == 1
        store.validate()

    def test_they_find_nothing(self, store, receipts, during):
        def read():
            with pytest.raises(RecordLost):
                store.read(receipts[0])

        store.delete(receipts[0])
        during(read, lambda: store.read(receipts[1]))
        assert store.statistics().lost == 1
        assert store.statistics().reads == 1

    def test_whoever_is_inside_is_told(self, store):
        seen = []

        def allocate(nbytes):
            seen.append((store.inside, in_thread(lambda: store.inside)()))
            store.read(other)  # as a finaliser would; this one is still inside afterwards
            seen.append((store.inside, None))
            return memoryview(bytearray(nbytes))

        receipt, other = store.write(b"", [b"x"]), store.write(b"", [b"y"])
        store.read(receipt, allocate)
        assert seen == [(True, False), (True, None)]
        assert not store.inside
        assert DelayedStore(store, 0.0).inside is False


def fail_nth(monkeypatch, name, nth, number, partial=False):
    """Make the n-th call of a function of os fail, with one byte written before if `partial`."""
    real = getattr(os, name)
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(args)
        if len(calls) != nth:
            return real(*args, **kwargs)
        if partial:
            fd, buffers = args
            real(fd, [buffers[0][:1]])
        if name == "close":
            real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, wrapper)
    return calls


class TestStreams:
    def test_each_piece_is_written_before_the_next_one_comes(self, store):
        """So no more than one is held; and the file is what it would be if all had come at once."""
        sizes = []
        stream = Pieces(*[os.urandom(1000) for _ in range(5)])
        stream.between = lambda number: sizes.append(os.path.getsize(os.path.join(store.path, "1")) if number else None)
        with open(store.path_of(store.write(b"h", [b"first", stream])), "rb") as file:
            found = file.read()
        assert sizes == [None, 1064, 2064, 3064, 4064]
        stream.between = lambda number: None
        with open(store.path_of(store.write(b"h", [b"first", stream.read()])), "rb") as file:
            assert file.read() == found

    def test_streams_are_not_compressed(self, tmp_path):
        codec = Codec("zlib", lambda data: zlib.compress(data, 1), zlib.decompress)
        with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec}, min_nbytes=1)) as store:
            receipt = store.write(b"", [bytes(100_000), Pieces(bytes(50_000), bytes(50_000)), bytes(100_000)])
            assert 100_000 < receipt.stored_nbytes < 102_000
            assert store.statistics().compressed_frames == 2
            assert contents(store.read(receipt)) == (b"", [bytes(100_000)] * 3)

    @pytest.mark.parametrize("nbytes", [0, 1999, 2001])
    def test_a_stream_of_another_length_than_it_said(self, store, nbytes):
        with pytest.raises(StorageError, match="in pieces"):
            store.write(b"", [Pieces(bytes(1000), bytes(1000), nbytes=nbytes), b"after"])
        assert files(store) == []
        store.validate()

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize("partial", [False, True])
    @pytest.mark.parametrize("nth", range(1, 7))
    def test_the_disk_fails_at_any_piece(self, store, monkeypatch, nth, partial, number):
        calls = fail_nth(monkeypatch, "writev", nth, number, partial)
        stream = Pieces(*[os.urandom(1000)] * 4)
        with pytest.raises(StorageFull if number == errno.ENOSPC else StorageError):
            store.write(b"h", [b"before", stream])  # before, four pieces, and the footer
        assert len(calls) == nth
        assert files(store) == []
        store.validate()
        assert contents(store.read(store.write(b"h", [b"before", stream]))) == (b"h", [b"before", bytes(stream.read())])

    def test_closed_between_two_pieces(self, tmp_path):
        store = FileStore(tmp_path)
        stream = Pieces(*[bytes(1000)] * 4)
        stream.between = lambda number: store.close() if number == 2 else None
        with pytest.raises(StorageError, match="closed"):
            store.write(b"", [stream])
        assert os.listdir(tmp_path) == []


class TestFailures:
    @pytest.mark.fault("disk full", on="host→disk", outcome="stays in memory, tried again")
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    @pytest.mark.parametrize("partial", [False, True])
    @pytest.mark.parametrize("nth", range(1, 7))
    def test_disk_full_at_any_call(self, tmp_path, monkeypatch, nth, partial, number):
        with FileStore(tmp_path) as store:
            kept = store.write(b"", [b"kept"])
            # Five calls' worth of buffers, and the footer.
            frames = [bytes(500)] * 2400
            calls = fail_nth(monkeypatch, "writev", nth, number, partial)
            with pytest.raises(StorageFull) as info:
                store.write(b"", frames)
            assert len(calls) == nth
            assert info.value.errno == number
            for part in (store.path, f"{kept.nbytes:,} bytes in use", "free", "larger disk (directory)"):
                assert part in str(info.value)
            assert files(store) == [str(kept.number)]
            stats = store.statistics()
            assert (stats.nbytes, stats.write_failures) == (kept.nbytes, 1)
            store.validate()
            # The next one succeeds.
            receipt = store.write(b"", frames)
            assert len(calls) == nth + 6
            assert len(store.read(receipt)[1]) == 2400

    @pytest.mark.fault("error of the disk", on="host→disk", outcome="stays in memory, tried again")
    @pytest.mark.fault("no file descriptor left", on="host→disk", outcome="stays in memory, tried again")
    @pytest.mark.parametrize("name", ["open", "writev", "close", "fstat"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES, errno.EROFS])
    def test_any_call_of_a_write(self, store, monkeypatch, name, number):
        fail_nth(monkeypatch, name, 1, number)
        kind = StorageFull if number == errno.ENOSPC else StorageError
        with pytest.raises(kind) as info:
            store.write(b"", [b"x"])
        assert type(info.value) is kind
        assert info.value.errno == number
        assert store.path in str(info.value)
        assert files(store) == []
        store.validate()
        assert contents(store.read(store.write(b"", [b"x"]))) == (b"", [b"x"])

    @pytest.mark.parametrize("name", ["open", "preadv", "close"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EINVAL])
    def test_any_call_of_a_read(self, store, monkeypatch, name, number):
        receipt = store.write(b"", [b"x"])
        fail_nth(monkeypatch, name, 1, number)
        with pytest.raises(StorageError) as info:
            store.read(receipt)
        assert type(info.value) is StorageError
        assert info.value.errno == number
        # It may have passed.
        assert contents(store.read(receipt)) == (b"", [b"x"])

    @pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
    def test_a_file_that_is_gone_while_reading(self, store, monkeypatch, number):
        receipt = store.write(b"", [b"x"])
        fail_nth(monkeypatch, "preadv", 1, number)
        with pytest.raises(RecordLost):
            store.read(receipt)

    @pytest.mark.fault("error of the disk", on="release", outcome="never raises; counted against the limit")
    def test_delete_never_raises(self, tmp_path, monkeypatch, caplog):
        with FileStore(tmp_path) as store:
            receipts = [store.write(b"", [b"x"]) for _ in range(3)]
            unlink = os.unlink
            monkeypatch.setattr(os, "unlink", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            for receipt in receipts:
                store.delete(receipt)
                store.delete(receipt)
            monkeypatch.setattr(os, "unlink", unlink)
            stats = store.statistics()
            assert (stats.records, stats.deletes, stats.delete_failures) == (0, 0, 3)
            # Still on disk, so still counted.
            assert stats.nbytes == sum(receipt.nbytes for receipt in receipts)
            store.validate()
        assert len([record for record in caplog.records if "Could not remove" in record.message]) == 1
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
    def test_anything_raised_in_the_middle(self, store, monkeypatch, error):
        def writev(fd, buffers):
            raise error

        monkeypatch.setattr(os, "writev", writev)
        with pytest.raises(error):
            store.write(b"", [b"x"])
        assert files(store) == []
        store.validate()

    @pytest.mark.fault("error of the disk", on="close", outcome="removed at the end")
    def test_an_incomplete_file_that_cannot_be_removed(self, tmp_path, monkeypatch, caplog):
        store = FileStore(tmp_path)
        fail_nth(monkeypatch, "writev", 1, errno.ENOSPC)
        fail_nth(monkeypatch, "unlink", 1, errno.EIO)
        with pytest.raises(StorageFull):
            store.write(b"", [b"x"])
        assert "incomplete" in caplog.text
        store.close()
        assert os.listdir(tmp_path) == []

    def test_statvfs_fails_too(self, store, monkeypatch):
        fail_nth(monkeypatch, "writev", 1, errno.ENOSPC)
        fail_nth(monkeypatch, "statvfs", 1, errno.EIO)
        with pytest.raises(StorageFull, match="an unknown number of bytes free"):
            store.write(b"", [b"x"])


class TestConcurrency:
    def blocked(self, monkeypatch, name, after=False):
        """Make the next call of a function of os wait, before or after it is done. Returns (arrived, go on)."""
        real = getattr(os, name)
        arrived, go_on = threading.Event(), threading.Event()

        def wrapper(*args, **kwargs):
            first = not arrived.is_set()
            result = real(*args, **kwargs) if after else None
            if first:
                arrived.set()
                assert go_on.wait(60)
            return result if after else real(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapper)
        return arrived, go_on

    @pytest.mark.fault("closed meanwhile", on="host→disk", outcome="nothing left on disk")
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("name", ["open", "writev", "close", "fstat"])
    def test_close_while_writing(self, tmp_path, monkeypatch, name, after):
        store = FileStore(tmp_path)
        store.write(b"", [b"another"])
        arrived, go_on = self.blocked(monkeypatch, name, after)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(store.write, b"", [b"x"])
            assert arrived.wait(60)
            store.close()
            go_on.set()
            with pytest.raises(StorageError, match=r"closed|No such file"):
                future.result(60)
        assert os.listdir(tmp_path) == []
        store.validate()

    @pytest.mark.fault("closed meanwhile", on="disk→host", outcome="whole, or an error")
    @pytest.mark.parametrize("name", ["open", "preadv", "close"])
    def test_close_while_reading(self, tmp_path, monkeypatch, name):
        store = FileStore(tmp_path)
        receipt = store.write(b"", [b"x" * 1000])
        arrived, go_on = self.blocked(monkeypatch, name)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(store.read, receipt)
            assert arrived.wait(60)
            store.close()
            go_on.set()
            if name == "open":
                with pytest.raises(RecordLost):
                    future.result(60)
            else:
                assert contents(future.result(60)) == (b"", [b"x" * 1000])
        assert os.listdir(tmp_path) == []
        store.validate()

    def test_the_directory_is_not_given_up_while_it_is_emptied(self, tmp_path, monkeypatch):
        """Else its descriptor may be that of another store by then, whose files would go instead."""
        store = FileStore(tmp_path / "one")
        receipts = [store.write(b"", [b"x"]) for _ in range(3)]
        arrived, go_on = self.blocked(monkeypatch, "preadv")
        reading = in_thread(store.read, receipts[0])
        assert arrived.wait(60)
        other, theirs = FileStore(tmp_path / "other"), []
        first = iter([True])
        listdir = os.listdir

        def the_reader_leaves(where):
            if next(first, False):
                number = store._directory.fd
                go_on.set()
                reading()
                theirs.extend(other.write(b"", [b"%d" % number]) for number in range(3))
                with suppress(OSError):
                    os.fstat(number)
                    return listdir(where)
                # It is closed. The next directory that somebody opens gets its number.
                os.dup2(other._directory.fd, number)
            return listdir(where)

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", the_reader_leaves)
            store.close()
        assert [contents(other.read(receipt))[1] for receipt in theirs] == [[b"0"], [b"1"], [b"2"]]
        assert os.listdir(tmp_path / "one") == []
        other.close()

    @pytest.mark.parametrize("name", ["open", "preadv", "close"])
    def test_delete_while_reading(self, store, monkeypatch, name):
        receipt = store.write(b"", [b"x" * 1000])
        arrived, go_on = self.blocked(monkeypatch, name)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(store.read, receipt)
            assert arrived.wait(60)
            store.delete(receipt)
            go_on.set()
            if name == "open":
                with pytest.raises(RecordLost):
                    future.result(60)
            else:
                assert contents(future.result(60)) == (b"", [b"x" * 1000])
        store.validate()

    @pytest.mark.fault("closed meanwhile", on="release", outcome="nothing left on disk")
    def test_close_while_deleting(self, tmp_path, monkeypatch):
        store = FileStore(tmp_path)
        receipt = store.write(b"", [b"x"])
        arrived, go_on = self.blocked(monkeypatch, "unlink")
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(store.delete, receipt)
            assert arrived.wait(60)
            store.close()
            go_on.set()
            future.result(60)
        assert os.listdir(tmp_path) == []
        store.validate()

    @pytest.mark.fault("disk slow or stuck", on="host→disk", outcome="others do not wait")
    def test_nothing_waits_for_a_slow_write(self, store, monkeypatch):
        other = store.write(b"", [b"other"])
        arrived, go_on = self.blocked(monkeypatch, "writev")
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(store.write, b"", [b"slow"])
            assert arrived.wait(60)
            assert contents(store.read(other)) == (b"", [b"other"])
            store.write(b"", [b"fast"])
            store.delete(other)
            assert store.statistics().records == 1
            go_on.set()
            assert contents(store.read(future.result(60))) == (b"", [b"slow"])

    def test_no_lock_is_held_in_callbacks(self, tmp_path):
        # Each of them uses the store from another thread, and waits for it.
        with ThreadPoolExecutor(1) as pool:

            def use(*args):
                pool.submit(store.statistics).result(60)

            def allocate(nbytes):
                use()
                return memoryview(bytearray(nbytes))

            codec = Codec(
                "zlib", lambda data: use() or zlib.compress(data), lambda data: use() or zlib.decompress(data)
            )
            with FileStore(tmp_path, codecs=CodecChooser("zlib", {"zlib": codec}), metrics=use) as store:
                receipt = store.write(b"", [bytes(100_000), b"x"])
                assert len(store.read(receipt, allocate)[1]) == 2
                store.delete(receipt)


class TestMetrics:
    def test_labels_and_units(self, tmp_path):
        seen = {}

        def metrics(label, value, unit):
            seen[label, unit] = seen.get((label, unit), 0) + value

        ticks = iter(range(1000))
        codec = Codec("zlib", lambda data: zlib.compress(data, 1), zlib.decompress)
        chooser = CodecChooser("zlib", {"zlib": codec})
        with FileStore(tmp_path, codecs=chooser, metrics=metrics, clock=lambda: float(next(ticks))) as store:
            receipt = store.write(b"", [bytes(100_000)])
            store.read(receipt)
            store.read(receipt)
            stats = store.statistics()
        assert seen["disk-write", "bytes"] == stats.bytes_written == receipt.nbytes
        assert seen["disk-write", "count"] == 1
        assert seen["disk-read", "bytes"] == stats.bytes_read == 2 * receipt.nbytes
        assert seen["disk-read", "count"] == 2
        assert seen["disk-write", "seconds"] == stats.write_seconds > 0
        assert seen["disk-read", "seconds"] == stats.read_seconds > 0
        assert seen["compress", "seconds"] == stats.compress_seconds > 0
        assert seen["decompress", "seconds"] == stats.decompress_seconds > 0
        assert seen["checksum", "seconds"] == stats.checksum_seconds > 0

    def test_a_callback_that_fails(self, tmp_path, caplog):
        def metrics(label, value, unit):
            raise RuntimeError("no display")

        with FileStore(tmp_path, metrics=metrics) as store:
            receipt = store.write(b"", [b"x"])
            assert contents(store.read(receipt)) == (b"", [b"x"])
        records = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(records) == 1

    def test_repr(self, store):
        store.write(b"", [b"x"])
        assert store.path in repr(store)
        assert "1 records" in repr(store)


def test_many_records_leave_no_descriptors(store):
    before = len(os.listdir("/proc/self/fd"))
    receipts = [store.write(b"", [b"%d" % i]) for i in range(300)]
    for i, receipt in enumerate(receipts):
        assert contents(store.read(receipt)) == (b"", [b"%d" % i])
        os.truncate(store.path_of(receipt), 0)
        with pytest.raises(RecordLost):
            store.read(receipt)
        store.delete(receipt)
    assert len(os.listdir("/proc/self/fd")) == before
