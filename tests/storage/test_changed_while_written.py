"""Whoever has a frame's memory may change it while it is written: what is read back was there, and is never refused."""

import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest

from gpuspill.storage import record_io, recordfile
from gpuspill.storage.codecs import CodecChooser
from gpuspill.storage.files import FileStore

MIB = 2**20


class Changer:
    """Changes all frames at one moment of a write, counted from 0: before it, and between any two calls of the system.

    A call moves at most `at_most` bytes, so that there are moments in the middle of a frame.
    """

    def __init__(self, monkeypatch, frames, moment, at_most):
        self._frames, self._moment, self._at_most = frames, moment, at_most
        self._moments = itertools.count()
        self.changed = False
        writev, update = os.writev, record_io.RecordEncoder.feed

        def write(fd, buffers):
            self.pass_by()
            moved = 0
            for buffer in buffers:
                piece = buffer[: self._at_most - moved]
                moved += writev(fd, [piece])
                if moved == self._at_most:
                    break
            return moved

        def feed(encoder, data):
            self.pass_by()
            update(encoder, data)

        monkeypatch.setattr("gpuspill.storage.vectored.os.writev", write)
        monkeypatch.setattr(record_io.RecordEncoder, "feed", feed)

    def pass_by(self):
        if next(self._moments) == self._moment:
            self.changed = True
            for frame in self._frames:
                np.frombuffer(frame, np.uint8)[:] = 1


@pytest.fixture(params=[False, True], ids=["mapped", "read back"])
def look(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(recordfile, "map_range", lambda *args: None)


@pytest.mark.parametrize("sizes", [(100,), (3 * MIB,), (100, 2 * MIB, 5, 0, 3 * MIB), (40 * MIB,)])
@pytest.mark.usefixtures("look")
def test_at_every_moment(tmp_path, monkeypatch, sizes):
    with FileStore(tmp_path) as store:
        for moment in itertools.count():
            frames = [bytearray(size) for size in sizes]
            with monkeypatch.context() as patch:
                changer = Changer(patch, frames, moment, max(sizes) // 2)
                receipt = store.write(b"header", frames)
            header, found = store.read(receipt)
            store.delete(receipt)
            assert header == b"header"
            assert [frame.nbytes for frame in found] == list(sizes)
            for frame in found:
                values = np.frombuffer(frame, np.uint8)
                assert values.max(initial=0) <= 1, "these bytes never were there"
            if not changer.changed:
                break
        assert moment >= 2


def test_in_the_middle_of_compressing(tmp_path):
    """What a codec makes of a frame that changes under it stands for nothing: it is stored as it is."""
    frame = bytearray(MIB)

    def compress(data):
        if len(data) == len(frame):  # no sample
            frame[:] = b"1" * len(frame)
        return b"half of it"

    codec = SimpleNamespace(compress=compress, decompress=bytes)
    with FileStore(tmp_path, codecs=CodecChooser("half", {"half": codec})) as store:
        _, (found,) = store.read(store.write(b"", [frame]))
        assert store.statistics().compressed_frames == 0
    assert found == frame
