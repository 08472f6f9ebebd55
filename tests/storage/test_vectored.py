"""Reads and writes are complete, whatever the system does in one call."""

import errno
import itertools
import os
import random

import pytest

from gpuspill.storage import vectored
from gpuspill.storage.vectored import read_all, write_all


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def make_buffers(sizes, seed=0):
    rng = random.Random(seed)
    return [memoryview(rng.randbytes(size)) for size in sizes]


SHAPES = {
    "none": [],
    "empty": [0, 0, 0],
    "one": [1000],
    "mixed": [0, 1, 0, 0, 500, 64, 3, 0],
    "many": [i % 4 for i in range(1100)],
}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_round_trip(fd, sizes):
    buffers = make_buffers(sizes)
    assert write_all(fd, buffers) == sum(sizes)
    targets = [memoryview(bytearray(size)) for size in sizes]
    assert read_all(fd, targets) == sum(sizes)
    assert targets == buffers


@pytest.mark.fault(
    "disk reads or writes less than asked", on=("host→disk", "disk→host"), outcome="goes on where it ended"
)
@pytest.mark.parametrize("step", [1, 2, 63, 64, 65, 499, 500, 501, 10_000])
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_the_system_moves_less_than_asked(fd, sizes, step, monkeypatch):
    writev, preadv = os.writev, os.preadv

    def short(buffers):
        # The first `step` bytes of what was asked.
        left, part = step, []
        for buffer in buffers:
            part.append(buffer[:left])
            left -= part[-1].nbytes
        return part

    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, short(buffers)))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, short(buffers), offset))
    buffers = make_buffers(sizes)
    assert write_all(fd, buffers) == sum(sizes)
    assert os.fstat(fd).st_size == sum(sizes)
    targets = [memoryview(bytearray(size)) for size in sizes]
    assert read_all(fd, targets) == sum(sizes)
    assert targets == buffers


def test_never_more_buffers_than_the_system_takes(fd, monkeypatch):
    writev, preadv = os.writev, os.preadv
    seen = []
    monkeypatch.setattr(os, "writev", lambda fd, buffers: seen.append(len(buffers)) or writev(fd, buffers))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: seen.append(len(buffers)) or preadv(fd, buffers, at))
    buffers = make_buffers([2] * 3000)
    write_all(fd, buffers)
    read_all(fd, [memoryview(bytearray(2)) for _ in range(3000)])
    assert seen == [1024, 1024, 952] * 2


def test_more_bytes_than_one_call_takes(fd, monkeypatch):
    # The kernel's limit, without the gigabytes: buffers that claim their size, and a file that only counts.
    class Huge:
        def __init__(self, nbytes):
            self.nbytes = nbytes

        def __getitem__(self, part):
            return Huge(self.nbytes - part.start)

    limit = 2_147_479_552
    written = []

    def writev(fd, buffers):
        written.append(min(limit, sum(buffer.nbytes for buffer in buffers)))
        return written[-1]

    offsets = []

    def preadv(fd, buffers, offset):
        offsets.append(offset)
        return min(limit, sum(buffer.nbytes for buffer in buffers))

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "preadv", preadv)
    sizes = [3 * 2**30, 1, 2**31, 5]
    assert write_all(fd, [Huge(size) for size in sizes]) == sum(sizes)
    assert written == [limit, limit, sum(sizes) - 2 * limit]
    assert read_all(fd, [Huge(size) for size in sizes]) == sum(sizes)
    assert offsets == [0, limit, 2 * limit]


@pytest.mark.fault(
    "disk reads or writes less than asked", on=("host→disk", "disk→host"), outcome="goes on where it ended"
)
def test_interrupted_calls_are_repeated(fd, monkeypatch):
    writev, preadv = os.writev, os.preadv
    turns = itertools.count()

    def interrupted(call):
        def wrapper(*args):
            if next(turns) % 3 != 2:
                raise InterruptedError(errno.EINTR, "interrupted")
            return call(*args)

        return wrapper

    monkeypatch.setattr(os, "writev", interrupted(writev))
    monkeypatch.setattr(os, "preadv", interrupted(preadv))
    buffers = make_buffers([2] * 3000)
    assert write_all(fd, buffers) == 6000
    targets = [memoryview(bytearray(2)) for _ in range(3000)]
    assert read_all(fd, targets) == 6000
    assert targets == buffers


def test_nothing_written_is_an_error(fd, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda fd, buffers: 0)
    with pytest.raises(OSError, match="no bytes") as info:
        write_all(fd, make_buffers([10]))
    assert info.value.errno == errno.EIO


def test_a_file_that_ends_early(fd):
    os.write(fd, b"12345")
    target = memoryview(bytearray(4)), memoryview(bytearray(4))
    assert read_all(fd, target) == 5
    assert bytes(target[0]) + bytes(target[1]) == b"12345\0\0\0"


@pytest.mark.parametrize(("enough", "calls"), [(None, 2), (6, 2), (5, 1), (4, 1)])
def test_enough_is_enough(fd, monkeypatch, enough, calls):
    os.write(fd, b"12345")
    preadv, seen = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: seen.append(args) or preadv(*args))
    assert read_all(fd, [memoryview(bytearray(8))], enough) == 5
    assert len(seen) == calls


def test_before_each_can_stop_a_write(fd):
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        write_all(fd, make_buffers([1] * 5000), stop)
    assert os.fstat(fd).st_size == 2 * vectored._IOV_MAX


@pytest.mark.parametrize("start", [0, 1, 4, 5, 9])
def test_from_the_middle(fd, start):
    os.write(fd, b"12345")
    target = memoryview(bytearray(2)), memoryview(bytearray(2))
    expected = b"12345"[start:][:4]
    assert read_all(fd, target, start=start) == len(expected)
    assert (bytes(target[0]) + bytes(target[1])).rstrip(b"\0") == expected


def test_the_middle_in_small_moves(fd, monkeypatch):
    os.write(fd, b"0123456789")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1]], at))
    target = memoryview(bytearray(3)), memoryview(bytearray(2))
    assert read_all(fd, target, start=4) == 5
    assert bytes(target[0]) + bytes(target[1]) == b"45678"
