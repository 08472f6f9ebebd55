"""The record format: pure bytes, no files."""

import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.errors import RecordCorrupt, Unspillable
from gpuspill.storage.record import ALIGNMENT, RecordEncoder, decode_record, flat
from gpuspill.testing.store_tests import frame_lists


def add(encoder, data, raw_nbytes=None, codec=None):
    """Feed a whole frame; return it with the padding before it."""
    parts = [*encoder.start(data.nbytes, raw_nbytes, codec), data]
    for part in parts:
        encoder.feed(part)
    return parts


def encode(header, frames, codecs=None):
    encoder = RecordEncoder()
    parts = []
    for i, frame in enumerate(frames):
        codec = codecs[i] if codecs else None
        raw_nbytes = None if codec is None else 10 * len(frame) + 1
        parts += add(encoder, memoryview(frame), raw_nbytes, codec)
    payload = b"".join(parts)
    footer = encoder.finish(header)
    assert encoder.stored_nbytes == len(payload)
    return payload, footer, encoder


def decode(payload, footer, checksum=None):
    return decode_record(memoryview(payload), memoryview(footer), checksum)


@settings(deadline=None)
@given(header=st.binary(max_size=200), frames=frame_lists(), piece=st.integers(1, 100))
def test_a_frame_in_pieces_is_the_same_record(header, frames, piece):
    payload, footer, encoder = encode(header, frames)
    pieces = RecordEncoder()
    parts = []
    for frame in frames:
        padding = pieces.start(len(frame))
        parts += padding
        for part in padding:
            pieces.feed(part)
        for low in range(0, len(frame), piece):
            parts.append(memoryview(frame)[low : low + piece])
            pieces.feed(parts[-1])
    assert b"".join(parts) == payload
    assert pieces.finish(header) == footer
    assert pieces.checksum == encoder.checksum


@settings(deadline=None)
@given(header=st.binary(max_size=200), frames=frame_lists(max_frames=20))
def test_round_trip(header, frames):
    payload, footer, encoder = encode(header, frames)
    found, stored = decode(payload, footer, encoder.checksum)
    assert found == header
    assert [bytes(frame.data) for frame in stored] == frames
    assert [frame.raw_nbytes for frame in stored] == [len(frame) for frame in frames]
    assert {frame.codec for frame in stored} <= {None}
    assert encoder.payload_nbytes == sum(map(len, frames))


@settings(deadline=None)
@given(data=st.data(), frames=frame_lists(max_frames=20))
def test_round_trip_with_codecs(data, frames):
    names = st.sampled_from([None, "lz4", "zstd", "ein Name mit ü"])
    codecs = data.draw(st.lists(names, min_size=len(frames), max_size=len(frames)))
    payload, footer, encoder = encode(b"h", frames, codecs)
    _, stored = decode(payload, footer, encoder.checksum)
    assert [frame.codec for frame in stored] == codecs
    assert [bytes(frame.data) for frame in stored] == frames
    for frame, codec in zip(stored, codecs, strict=True):
        assert frame.raw_nbytes == (frame.data.nbytes if codec is None else 10 * frame.data.nbytes + 1)


@settings(deadline=None)
@given(frames=frame_lists(max_frames=20))
def test_frames_are_aligned_and_not_moved_more_than_needed(frames):
    payload, footer, _ = encode(b"", frames)
    _, stored = decode(payload, footer)
    start = np.frombuffer(payload, "u1").ctypes.data if payload else 0
    end = 0
    for frame in stored:
        if frame.data.nbytes:
            offset = np.frombuffer(frame.data, "u1").ctypes.data - start
            assert offset % ALIGNMENT == 0
            assert 0 <= offset - end < ALIGNMENT
            end = offset + frame.data.nbytes
    # Nothing behind the last frame: a record of one frame takes a buffer of that frame's size.
    assert end == len(payload)


def test_checksum_is_xxh3_of_all_before_it():
    # Computed here another way: a record can be verified without this package.
    payload, footer, encoder = encode(b"header", [b"a" * 100, b"", b"b" * 3])
    assert xxhash.xxh3_64_intdigest(payload + footer[:-8]) == encoder.checksum
    assert struct.unpack("<Q", footer[-8:]) == (encoder.checksum,)


def test_format_does_not_change_unnoticed():
    payload, footer, encoder = encode(b"header", [b"frame", b"", b"xy"], [None, None, "lz4"])
    assert payload == b"frame" + bytes(59) + b"xy"
    assert footer[:-8] == (
        struct.pack("<3Q3Q3B", 5, 0, 21, 5, 0, 2, 0, 0, 1)
        + b"lz4"
        + b"header"
        + struct.pack("<QQIHH8s", 66, 6, 3, 3, 1, b"GPUSPILL")
    )
    assert encoder.checksum == 0x599F8E2720B04B62


def test_every_changed_byte_is_noticed():
    payload, footer, encoder = encode(b"some header", [b"frame" * 5, b"", b"another" * 3], [None, None, "lz4"])
    record = payload + footer
    for position in range(len(record)):
        for bit in (0, 7):
            changed = bytearray(record)
            changed[position] ^= 1 << bit
            with pytest.raises(RecordCorrupt, match="checksum"):
                decode(changed[: len(payload)], changed[len(payload) :], encoder.checksum)


def test_bytes_that_changed_places_are_noticed():
    payload, footer, encoder = encode(b"", [b"a" * 64, b"b" * 64])
    with pytest.raises(RecordCorrupt, match="bytes changed"):
        decode(payload[64:] + payload[:64], footer, encoder.checksum)


def test_an_intact_record_that_is_another_one():
    payload, footer, _ = encode(b"", [b"now"])
    _, _, before = encode(b"", [b"old"])
    with pytest.raises(RecordCorrupt, match="another one"):
        decode(payload, footer, before.checksum)


def test_footer_cut_anywhere():
    payload, footer, encoder = encode(b"h", [b"frame"])
    for nbytes in range(len(footer)):
        with pytest.raises(RecordCorrupt):
            decode(payload, footer[:nbytes], encoder.checksum)


def forge(payload, footer):
    """Return the footer with a checksum that fits, as a faulty writer would make it."""
    body = footer[:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(payload + body))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_the_footer_says_is_never_trusted(data):
    # Whatever stands in a footer whose checksum fits: an error of ours, or frames inside the payload.
    payload, footer, _ = encode(b"h", [b"frame", b"x"], [None, "lz4"])
    changed = bytearray(footer)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(footer) - 9))] = data.draw(st.integers(0, 255))
    try:
        _, stored = decode(payload, forge(payload, bytes(changed)))
    except RecordCorrupt:
        return
    assert sum(frame.data.nbytes for frame in stored) <= len(payload)


def test_another_version_or_kind_of_file():
    payload, footer, _ = encode(b"h", [b"frame"])
    newer = footer[:-18] + struct.pack("<H", 2) + footer[-16:]
    with pytest.raises(RecordCorrupt, match="version 2"):
        decode(payload, forge(payload, newer))
    other = footer[:-16] + b"ELSEWISE" + footer[-8:]
    with pytest.raises(RecordCorrupt, match="ELSEWISE"):
        decode(payload, forge(payload, other))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.arange(10).astype("c16"),
        np.array(True),
        np.zeros((3, 0, 2)),
        np.zeros(5, dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(100, dtype="u1")[10:20],
    ],
    ids=lambda array: f"{array.shape}-{array.dtype}",
)
def test_flat_takes_any_contiguous_memory(array):
    view = flat(array)
    assert (view.ndim, view.format, view.nbytes) == (1, "B", array.nbytes)
    assert bytes(view) == array.tobytes(order="A")
    if array.nbytes:
        assert np.shares_memory(np.frombuffer(view, "u1"), array)


@pytest.mark.parametrize("array", [np.arange(10)[::2], np.zeros((4, 4))[:, 1:3], np.arange(9)[::-1]])
def test_flat_refuses_the_rest(array):
    with pytest.raises(Unspillable, match=r"frame 7 .* not contiguous"):
        flat(array, 7)


def test_many_codecs():
    frames = [b"x"] * 255
    codecs = [f"codec-{i}" for i in range(255)]
    random.Random(0).shuffle(codecs)
    payload, footer, _ = encode(b"", frames, codecs)
    assert [frame.codec for frame in decode(payload, footer)[1]] == codecs


def test_importing_the_format_does_not_import_numpy():
    code = "import sys, gpuspill.storage.files, gpuspill.storage.buffers; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
