"""The format of one record, as pure functions of bytes: no files, no clock.

A record is its frames followed by a footer::

    frame 0 | padding | frame 1 | ... | frame n-1 |  footer

    footer:
        raw lengths     n x u64    bytes of each frame as handed in
        stored lengths  n x u64    bytes of each frame in the record
        codec numbers   n x u8     0: as it is; k: compressed with the k-th name
        codec names     utf-8, separated by NUL
        header          opaque
        tail            stored payload length u64, header length u64, n u32, names length u16,
                        version u16, magic 8 bytes, checksum u64

All integers are little-endian. Frames that are not empty start at multiples of 64 bytes. The
checksum is the xxh3 (64 bits) of every byte before it.

Version 2 is a record of one frame that came past host memory, and so was not hashed: the checksum
is that of the footer alone, and the frame is padded to whole pages, so that none of them is written
in both ways.

Why a footer: lengths after compression and the checksum are known only once the last frame went by,
so a record is one forward stream that is never patched, whatever its size. Why the frames come
first and unpadded at the end: one read into an aligned buffer of exactly the payload's size leaves
every frame aligned, and a record of one frame costs not a byte of memory more than the frame.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from gpuspill.errors import RecordCorrupt, Unspillable
from gpuspill.storage.base import Buffer

__all__ = [
    "ALIGNMENT",
    "PayloadHash",
    "RecordEncoder",
    "StoredFrame",
    "claimed_parts",
    "decode_record",
    "digest",
    "flat",
    "whole_pages",
]

#: Frames start at multiples of this many bytes: what NumPy, Arrow and vector units like to find.
ALIGNMENT = 64

_MAGIC = b"GPUSPILL"
_VERSION = 1
#: Of a record whose frame was not hashed.
_UNSEEN_VERSION = 2
#: What direct I/O is aligned to.
_PAGE = 4096
_TAIL = struct.Struct("<QQIHH8sQ")
_CHECKSUM = struct.Struct("<Q")
_PADDING = memoryview(bytes(ALIGNMENT))
_MAX_CODECS = 255


class StoredFrame(NamedTuple):
    """A frame as it lies in a record."""

    #: A view of the payload.
    data: memoryview
    #: Bytes of the frame as it was handed in.
    raw_nbytes: int
    #: Name of the codec that `data` is compressed with; None if it is the frame itself.
    codec: str | None


def flat(frame: Buffer, index: int = 0) -> memoryview:
    """Return a frame's memory as one-dimensional bytes, without copying.

    Parameters
    ----------
    frame
        A buffer of any shape and format, contiguous in C or Fortran order.
    index
        Which frame it is; for the message only.

    Raises
    ------
    Unspillable
        The frame is not contiguous.
    """
    view = memoryview(frame)
    if view.nbytes == 0:
        # A zero in the shape cannot be cast.
        return memoryview(b"")
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    try:
        # Unlike memoryview.cast, this takes any format and Fortran order.
        return pickle.PickleBuffer(view).raw()
    except BufferError as exc:
        raise Unspillable(
            f"frame {index} (shape {view.shape}, strides {view.strides}) is not contiguous; "
            "its serializer has to hand out contiguous buffers"
        ) from exc


def digest(data: memoryview) -> int:
    """Return the xxh3 (64 bits) of flat bytes."""
    return xxhash.xxh3_64_intdigest(data)


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that `nbytes` bytes take."""
    return nbytes + -nbytes % _PAGE


def _gap(offset: int) -> int:
    return -offset % ALIGNMENT


class RecordEncoder:
    """Turns frames into the byte stream of one record; used once, by one thread.

    Call :meth:`start` for each frame and :meth:`finish` at the end, and write what they return and
    the frames, in order. :meth:`feed` takes what was written, in as many pieces as there are.

    Attributes
    ----------
    payload_nbytes : int
        Bytes of the frames begun so far, as they were before compression.
    stored_nbytes : int
        Bytes of those frames as stored, with the padding between them.
    checksum : int
        Of the whole record, once it is finished; of the footer, if the frame was not seen.
    hashed : bool
        Whether all frames were seen.
    """

    __slots__ = (
        "_codecs",
        "_hash",
        "_names",
        "_raw",
        "_stored",
        "checksum",
        "hashed",
        "payload_nbytes",
        "stored_nbytes",
    )

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._raw: list[int] = []
        self._stored: list[int] = []
        self._codecs = bytearray()
        self._names: list[str] = []
        self.payload_nbytes = 0
        self.stored_nbytes = 0
        self.checksum = 0
        self.hashed = True

    def pass_by(self, nbytes: int) -> None:
        """Note the only frame, `nbytes` written to the file unseen, padded to whole pages."""
        assert not self._raw
        self.start(nbytes)
        self.stored_nbytes = whole_pages(nbytes)
        self.hashed = False

    def start(self, nbytes: int, raw_nbytes: int | None = None, codec: str | None = None) -> list[memoryview]:
        """Begin a frame.

        Parameters
        ----------
        nbytes
            Bytes of it as stored.
        raw_nbytes
            Bytes of the frame before compression; by default as many.
        codec
            Name of the codec that it is compressed with.

        Returns
        -------
        list of memoryview
            Padding where needed, to be written, and fed, before the bytes of the frame are.
        """
        self._raw.append(nbytes if raw_nbytes is None else raw_nbytes)
        self._stored.append(nbytes)
        self._codecs.append(0 if codec is None else self._codec_number(codec))
        self.payload_nbytes += self._raw[-1]
        gap = _gap(self.stored_nbytes) if nbytes else 0
        self.stored_nbytes += gap + nbytes
        return [_PADDING[:gap]] if gap else []

    def feed(self, data: memoryview) -> None:
        """Note the next bytes of the record, padding included."""
        self._hash.update(data)

    def _codec_number(self, name: str) -> int:
        try:
            return self._names.index(name) + 1
        except ValueError:
            assert "\0" not in name, name
            assert len(self._names) < _MAX_CODECS, self._names
            self._names.append(name)
            return len(self._names)

    def finish(self, header: bytes) -> bytes:
        """Return the footer, and set :attr:`checksum`.

        Parameters
        ----------
        header
            Opaque bytes to keep with the frames.
        """
        n_frames = len(self._raw)
        names = "\0".join(self._names).encode()
        version = _VERSION if self.hashed else _UNSEEN_VERSION
        footer = b"".join(
            (
                struct.pack(f"<{2 * n_frames}Q", *self._raw, *self._stored),
                self._codecs,
                names,
                header,
                _TAIL.pack(self.stored_nbytes, len(header), n_frames, len(names), version, _MAGIC, 0),
            )
        )
        self._hash.update(memoryview(footer)[: -_CHECKSUM.size])
        self.checksum = self._hash.intdigest()
        return footer[: -_CHECKSUM.size] + _CHECKSUM.pack(self.checksum)


class PayloadHash:
    """The checksum of a record whose payload comes in pieces; used once, by one thread.

    Attributes
    ----------
    nbytes : int
        Bytes of the payload that were fed.
    """

    __slots__ = ("_hash", "nbytes")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.nbytes = 0

    def feed(self, piece: memoryview) -> None:
        """Note the next bytes of the payload."""
        self._hash.update(piece)
        self.nbytes += piece.nbytes

    def finish(self, rest: memoryview) -> int:
        """Return the checksum of the payload and of `rest`."""
        self._hash.update(rest)
        return self._hash.intdigest()


def claimed_parts(footer: memoryview, stored_nbytes: int) -> list[int] | None:
    """Return the bytes of each part of a payload, by a footer that is not verified yet.

    Returns
    -------
    list of int
        For each frame the padding before it, and the frame as stored. They add up to
        `stored_nbytes`. None if there is one frame, or if the footer makes no sense:
        :func:`decode_record` says why.
    """
    n_frames = _TAIL.unpack_from(footer, footer.nbytes - _TAIL.size)[2] if footer.nbytes >= _TAIL.size else 0
    if n_frames < 2 or footer.nbytes < 17 * n_frames + _TAIL.size:
        return None
    parts: list[int] = []
    offset = 0
    for nbytes in struct.unpack_from(f"<{n_frames}Q", footer, 8 * n_frames):
        parts += (_gap(offset) if nbytes else 0), nbytes
        offset += parts[-2] + nbytes
    return parts if offset == stored_nbytes else None


def decode_record(
    payload: memoryview | list[memoryview],
    footer: memoryview,
    checksum: int | None = None,
    where: str = "record",
    *,
    hashed: bool = True,
    seen: PayloadHash | None = None,
) -> tuple[bytes, list[StoredFrame]]:
    """Verify a record and take it apart.

    Parameters
    ----------
    payload
        The part of the record before the footer: in one piece, or its frames as
        :func:`claimed_parts` has them, if `seen` hashed all of it.
    footer
        What :meth:`RecordEncoder.finish` returned.
    checksum
        What the record's checksum has to be; by default what the footer says.
    where
        Names the record in messages.
    hashed
        As the encoder said. If not, `payload` is not looked at, and only its length is checked.
    seen
        What of the payload was hashed already; by default nothing.

    Returns
    -------
    header, frames
        The frames are views of `payload`, or its members.

    Raises
    ------
    RecordCorrupt
        Anything is not as it was written. Checked before anything in the footer is believed.
    """
    if footer.nbytes < _TAIL.size:
        raise RecordCorrupt(f"{where}: a footer of {footer.nbytes} bytes; it takes at least {_TAIL.size}")
    (stored_nbytes, header_nbytes, n_frames, names_nbytes, version, magic, written) = _TAIL.unpack_from(
        footer, footer.nbytes - _TAIL.size
    )
    seen = PayloadHash() if seen is None else seen
    if hashed and not isinstance(payload, list):
        seen.feed(payload[seen.nbytes :])
    found = seen.finish(footer[: -_CHECKSUM.size])
    if checksum is None:
        checksum = written
    if not found == written == checksum:
        what = (
            "an intact record, but another one than was written"
            if found == written
            else "bytes changed since they were written"
        )
        raise RecordCorrupt(f"{where}: checksum {found:016x}, expected {checksum:016x}: {what}")
    # From here on only a record made by something else, or a fault in this module, can fail.
    expected = _VERSION if hashed else _UNSEEN_VERSION
    if magic != _MAGIC or version != expected:
        raise RecordCorrupt(f"{where}: not a record of version {expected} (magic {magic!r}, version {version})")
    names_at = 17 * n_frames
    header_at = names_at + names_nbytes
    payload_nbytes = seen.nbytes if isinstance(payload, list) else payload.nbytes
    if (stored_nbytes, header_at + header_nbytes + _TAIL.size) != (payload_nbytes, footer.nbytes):
        raise RecordCorrupt(
            f"{where}: {payload_nbytes} + {footer.nbytes} bytes, but its lengths add up to "
            f"{stored_nbytes} + {header_at + header_nbytes + _TAIL.size}"
        )
    names = [None, *bytes(footer[names_at:header_at]).decode(errors="backslashreplace").split("\0")]
    header = bytes(footer[header_at : header_at + header_nbytes])
    lengths = struct.unpack_from(f"<{2 * n_frames}Q", footer)
    raw, stored, numbers = lengths[:n_frames], lengths[n_frames:], footer[16 * n_frames : names_at]
    frames = payload if isinstance(payload, list) else _views(payload, stored)
    if [frame.nbytes for frame in frames] != list(stored) or max(numbers, default=0) >= len(names):
        raise RecordCorrupt(f"{where}: a frame lies outside the record, or has a codec without a name")
    return header, [
        StoredFrame(frame, nbytes, names[number]) for frame, nbytes, number in zip(frames, raw, numbers, strict=True)
    ]


def _views(payload: memoryview, stored: Iterable[int]) -> list[memoryview]:
    """Return the frames of so many bytes each in a payload; of fewer, where it ends before."""
    frames = []
    offset = 0
    for nbytes in stored:
        if nbytes:
            offset += _gap(offset)
        frames.append(payload[offset : offset + nbytes])
        offset += nbytes
    return frames
