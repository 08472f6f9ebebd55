"""How one record gets into its file and back: codecs, checksum, file, in that order and reverse.

Nothing here is shared between threads but what is passed in and says that it may be. Times are
added to the counters of the operation.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError
from gpuspill.storage.base import Allocate, FrameStream, Receipt
from gpuspill.storage.codecs import MAX_RATIO, PLAIN, Codec, CodecChooser
from gpuspill.storage.counters import StorageCounters
from gpuspill.storage.inplace import open_in_place
from gpuspill.storage.mapped import MAP_FROM_NBYTES, map_file
from gpuspill.storage.record import (
    PayloadHash,
    RecordEncoder,
    StoredFrame,
    claimed_parts,
    decode_record,
    digest,
    flat,
    whole_pages,
)
from gpuspill.storage.recordfile import NewFile, open_record
from gpuspill.storage.vectored import read_all

__all__ = ["RecordReader", "RecordWriter"]

logger = logging.getLogger(__name__)

#: So many bytes are written at a time, and hashed while the system still has them in memory. Of
#: compressed frames no more than that, and one frame, waits in ours.
_FLUSH_NBYTES = 32 * 2**20
#: Records are read, and hashed, in pieces of so many bytes: a piece is still in the processor's
#: cache when it is hashed (second-level caches have 1 to 2 MiB), and not so small that the calls
#: count.
_PIECE_NBYTES = 512 * 2**10
#: Frames up to this size are read together, and copied: less work than a buffer for each in one
#: call.
_TOGETHER_NBYTES = 128 * 2**10
#: Of a header, to tell what kind of value it is of.
_KIND_NBYTES = 32
#: What says that the file is not there (or something else is), rather than that it cannot be read
#: now.
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


class RecordWriter:
    """Writes one record; used once, by one thread.

    Parameters
    ----------
    header
        Opaque bytes.
    frames
        Flat bytes, or streams of them, which are stored as they are.
    codecs
        Decides how to store each frame.
    clock
        Wall time in seconds.
    counts
        Gets the times, and how many frames were compressed.

    Attributes
    ----------
    cpu : float
        Processor seconds of what `counts` has as ``write_seconds``.
    """

    def __init__(
        self,
        header: bytes,
        frames: Sequence[memoryview | FrameStream],
        codecs: CodecChooser,
        clock: Callable[[], float],
        counts: StorageCounters,
    ) -> None:
        self._header = header
        self._codecs = codecs
        self._clock = clock
        self._counts = counts
        self.cpu = 0.0
        start = clock()
        # Headers begin with what says how the value was serialised: for an array that is its dtype.
        begin = header[:_KIND_NBYTES]
        kinds: list[Hashable] = [(begin, place, frame.nbytes.bit_length()) for place, frame in enumerate(frames)]
        self._frames = [
            (frame, PLAIN if isinstance(frame, FrameStream) else codecs.choose(frame, kind=kind), kind)
            for frame, kind in zip(frames, kinds, strict=True)
        ]
        counts.compress_seconds += clock() - start
        self._unseen = next((frame for frame in frames if isinstance(frame, FrameStream) and frame.past_host), None)
        if len(frames) > 1:
            self._unseen = None  # its place would have to be a whole page

    def write(self, number: int, file: NewFile) -> Receipt:
        """Write everything and give the file its name.

        Parameters
        ----------
        file
            Where to write. The caller discards it if this raises.

        Raises
        ------
        OSError
            As the system reports it.
        """
        clock, counts = self._clock, self._counts
        encoder = RecordEncoder()
        pending: list[memoryview] = []
        waiting = 0
        unseen = self._unseen is not None and self._pass_by(self._unseen, encoder, file)
        for frame, choice, kind in () if unseen else self._frames:
            if isinstance(frame, FrameStream):
                pending += encoder.start(frame.nbytes)
                self._append(file, self._hash(file, encoder, pending))
                waiting = 0
                self._copy(frame, encoder, file)
                continue
            data, codec = frame, None
            if choice.codec is not None:
                start = clock()
                compressed = self._compress(choice.codec, frame, kind)
                counts.compress_seconds += clock() - start
                if compressed is not None:
                    data, codec = compressed, choice.codec.name
                    counts.compressed_frames += 1
            pending += encoder.start(data.nbytes, frame.nbytes, codec)
            while data.nbytes:
                piece, data = data[: _FLUSH_NBYTES - waiting], data[_FLUSH_NBYTES - waiting :]
                pending.append(piece)
                waiting += piece.nbytes
                if waiting == _FLUSH_NBYTES:
                    self._append(file, self._hash(file, encoder, pending))
                    waiting = 0
        pending = self._hash(file, encoder, pending)
        footer = encoder.finish(self._header)
        pending.append(memoryview(footer))
        self._append(file, pending)
        start, cpu = clock(), self._codecs.clock()
        file.publish()
        counts.write_seconds += clock() - start
        self.cpu += self._codecs.clock() - cpu
        return Receipt(
            number=number,
            nbytes=encoder.stored_nbytes + len(footer),
            payload_nbytes=encoder.payload_nbytes,
            stored_nbytes=encoder.stored_nbytes,
            checksum=encoder.checksum,
            hashed=encoder.hashed,
        )

    def _hash(self, file: NewFile, encoder: RecordEncoder, pending: list[memoryview]) -> list[memoryview]:
        """Hash what is pending, as it is or will be in the file; return what is unwritten.

        Other holders of a frame's memory may change it meanwhile. So what is hashed is never that
        memory: it is what the system has of the file, and of a few bytes a copy.
        """
        nbytes = sum(part.nbytes for part in pending)
        if not nbytes:
            return []
        small = nbytes < MAP_FROM_NBYTES
        copy = [memoryview(b"".join(pending))] if small else []
        begin = file.nbytes
        if not small:
            self._append(file, pending)
        pending.clear()
        start = self._clock()
        for piece in copy if small else file.look(begin):
            encoder.feed(piece)
        self._counts.checksum_seconds += self._clock() - start
        return copy

    def _append(self, file: NewFile, parts: list[memoryview]) -> None:
        """Write some bytes."""
        if not parts:
            return
        start, cpu = self._clock(), self._codecs.clock()
        file.append(parts)
        self._counts.write_seconds += self._clock() - start
        self.cpu += self._codecs.clock() - cpu

    def _pass_by(self, frame: FrameStream, encoder: RecordEncoder, file: NewFile) -> bool:
        """Have a frame written past host memory; False if that cannot be done."""
        start, cpu = self._clock(), self._codecs.clock()
        done = file.fill(whole_pages(frame.nbytes), frame.copy_into)
        self._counts.write_seconds += self._clock() - start
        self.cpu += self._codecs.clock() - cpu
        if done:
            encoder.pass_by(frame.nbytes)
        return done

    def _copy(self, frame: FrameStream, encoder: RecordEncoder, file: NewFile) -> None:
        """Write a frame, which was begun, as its bytes come."""

        def sink(piece: memoryview) -> None:
            start = self._clock()
            encoder.feed(piece)
            self._counts.checksum_seconds += self._clock() - start
            self._append(file, [piece])

        frame.copy_to(sink)
        if file.nbytes != encoder.stored_nbytes:
            # Its length is in the footer, so it would be read back as something else.
            raise StorageError(
                errno.EIO,
                f"a frame of {frame.nbytes:,} bytes came in pieces, {file.nbytes:,} bytes are written of the "
                f"{encoder.stored_nbytes:,} that there should be",
            )

    def _compress(self, codec: Codec, frame: memoryview, kind: Hashable) -> memoryview | None:
        """Return a frame compressed; None if that fails or does not pay."""
        before = digest(frame)
        try:
            data = flat(codec.compress(frame))
        except Exception as exc:
            # Not a reason to keep the value in memory.
            logger.debug("Compressing %d bytes with %s failed: %r", frame.nbytes, codec.name, exc)
            return None
        if digest(frame) != before:
            return None  # it was changed meanwhile, and what came out may stand for nothing at all
        # The sample may have been misleading.
        self._codecs.observe_ratio(kind, codec.name, data.nbytes / frame.nbytes)
        return data if data.nbytes < MAX_RATIO * frame.nbytes else None


class RecordReader:
    """Reads one record; used once, by one thread.

    Parameters
    ----------
    where
        Its path, for messages.
    allocate
        Where to take memory from.
    codecs
        Knows the codecs by name.
    clock
        Wall time in seconds.
    counts
        Gets the times.

    Attributes
    ----------
    cpu : float
        Processor seconds of what `counts` has as ``read_seconds``.
    """

    def __init__(
        self,
        receipt: Receipt,
        where: str,
        allocate: Allocate,
        codecs: CodecChooser,
        clock: Callable[[], float],
        counts: StorageCounters,
    ) -> None:
        self._receipt = receipt
        self._where = where
        self._allocate = allocate
        self._codecs = codecs
        self._clock = clock
        self._counts = counts
        self.cpu = 0.0

    def read(self, directory_fd: int, name: str) -> tuple[bytes, list[memoryview]]:
        """Return header and frames, verified.

        Raises
        ------
        RecordLost, RecordCorrupt, StorageError
            As for :meth:`gpuspill.storage.base.Store.read`.
        """
        return self._decode(*self._load(directory_fd, name))

    def _decode(
        self, payload: memoryview | list[memoryview], footer: memoryview, seen: PayloadHash | None = None
    ) -> tuple[bytes, list[memoryview]]:
        clock, counts, receipt = self._clock, self._counts, self._receipt
        start = clock()
        header, stored = decode_record(payload, footer, receipt.checksum, self._where, hashed=receipt.hashed, seen=seen)
        counts.checksum_seconds += clock() - start
        start = clock()
        frames = [frame.data if frame.codec is None else self._decompress(frame, frame.codec) for frame in stored]
        counts.decompress_seconds += clock() - start
        return header, frames

    def borrow(self, directory_fd: int, name: str) -> tuple[bytes, list[memoryview]] | None:
        """Return header and frames, verified, raw frames without a copy; None if impossible.

        Raises
        ------
        RecordCorrupt
            As for :meth:`read`.
        """
        clock, counts, receipt = self._clock, self._counts, self._receipt
        start = clock()
        record = map_file(directory_fd, name, receipt.nbytes)
        counts.read_seconds += clock() - start
        if record is None:
            return None
        return self._decode(record[: receipt.stored_nbytes], record[receipt.stored_nbytes :])

    def lend(self, directory_fd: int, name: str) -> tuple[bytes, list[memoryview]] | None:
        """Return header and frames as unread ``FileMemory``; None if impossible.

        Raises
        ------
        RecordCorrupt
            As for :meth:`read`, of the footer.
        """
        receipt = self._receipt
        start = self._clock()
        parts = open_in_place(directory_fd, name, receipt.stored_nbytes, receipt.nbytes)
        self._counts.read_seconds += self._clock() - start
        return None if parts is None else self._decode(parts[0], parts[1])

    def _load(self, directory_fd: int, name: str) -> tuple[memoryview | list[memoryview], memoryview, PayloadHash]:
        """Return the payload for :func:`decode_record`, the footer, and the hash of its pieces."""
        receipt, where = self._receipt, self._where
        seen = PayloadHash()
        start, cpu = self._clock(), self._codecs.clock()
        hashing = self._counts.checksum_seconds
        try:
            with open_record(directory_fd, name) as fd:
                nbytes, payload, footer = self._read(fd, seen)
        except OSError as exc:
            if exc.errno in _GONE:
                raise RecordLost(f"{where} is gone: {exc.strerror}") from exc
            raise StorageError(exc.errno, f"reading {where} failed: {exc.strerror}") from exc
        if nbytes < receipt.nbytes:
            raise RecordLost(f"{where} has {nbytes:,} bytes; {receipt.nbytes:,} were written")
        if nbytes > receipt.nbytes:
            raise RecordCorrupt(f"{where} has more than the {receipt.nbytes:,} bytes written")
        self._counts.read_seconds += self._clock() - start - (self._counts.checksum_seconds - hashing)
        self.cpu += self._codecs.clock() - cpu
        return payload, footer, seen

    def _read(self, fd: int, seen: PayloadHash) -> tuple[int, memoryview | list[memoryview], memoryview]:
        """Return payload, footer and how many bytes there were, one more if the file goes on."""
        receipt = self._receipt
        stored = receipt.stored_nbytes
        # One byte more than the record has: that the file ends there is seen without another call.
        end = memoryview(bytearray(receipt.nbytes - stored + 1))
        footer = end[:-1]
        if stored <= _PIECE_NBYTES or not receipt.hashed:
            payload = self._allocate(stored) if stored else memoryview(b"")
            nbytes = read_all(fd, [payload, end], receipt.nbytes)
            lengths = claimed_parts(footer, stored) if receipt.hashed else None
            if lengths is None or nbytes < receipt.nbytes:
                return nbytes, payload, footer
            self._feed([payload], seen)
            return nbytes, self._apart(payload, lengths), footer
        # What the frames take is needed first, so that each of them has memory of its own.
        after = read_all(fd, [end], footer.nbytes, start=stored)
        lengths = claimed_parts(footer, stored)
        if lengths is None:
            payload = self._allocate(stored)
            nbytes = self._fill(fd, [payload], 0, seen)
            return nbytes + (after if nbytes == stored else 0), payload, footer
        frames: list[memoryview] = []
        together: memoryview | None = None
        nbytes = 0
        for run in _runs(lengths):
            if len(run) == 2:
                parts = [memoryview(bytearray(run[0])), self._allocate(run[1])]
            else:
                if together is None:
                    together = self._allocate(_PIECE_NBYTES)
                parts = [together[: sum(run)]]
            moved = self._fill(fd, parts, nbytes, seen)
            nbytes += moved
            if moved < sum(run):
                return nbytes, frames, footer
            frames += parts[1:] or self._apart(parts[0], run)
        return nbytes + after, frames, footer

    def _fill(self, fd: int, parts: list[memoryview], start: int, seen: PayloadHash) -> int:
        """Fill memory from byte `start` of a file, hash it; return how many bytes there were."""
        nbytes = 0
        for pieces in _pieces(parts):
            wanted = sum(piece.nbytes for piece in pieces)
            moved = read_all(fd, pieces, start=start + nbytes)
            nbytes += moved
            if moved < wanted:
                break
            self._feed(pieces, seen)
        return nbytes

    def _feed(self, pieces: list[memoryview], seen: PayloadHash) -> None:
        start, cpu = self._clock(), self._codecs.clock()
        for piece in pieces:
            seen.feed(piece)
        self._counts.checksum_seconds += self._clock() - start
        self.cpu -= self._codecs.clock() - cpu  # all of reading is added at the end

    def _apart(self, payload: memoryview, lengths: list[int]) -> list[memoryview]:
        """Give each frame memory of its own: who keeps one must not keep all."""
        frames = []
        offset = 0
        for gap, nbytes in zip(lengths[::2], lengths[1::2], strict=True):
            frame = self._allocate(nbytes)
            offset += gap
            frame[:] = payload[offset : offset + nbytes]
            offset += nbytes
            frames.append(frame)
        return frames

    def _decompress(self, frame: StoredFrame, name: str) -> memoryview:
        where = self._where
        try:
            data = flat(self._codecs.codec(name).decompress(frame.data))
        except MemoryError:
            raise
        except Exception as exc:
            raise RecordCorrupt(f"{where}: decompressing with {name} failed: {exc!r}") from exc
        if data.nbytes != frame.raw_nbytes:
            raise RecordCorrupt(
                f"{where}: decompressing with {name} gave {data.nbytes:,} bytes, not {frame.raw_nbytes:,}"
            )
        # The codecs make memory of their own; the caller gets memory that it can account for.
        buffer = self._allocate(frame.raw_nbytes)
        buffer[:] = data
        return buffer


def _runs(lengths: list[int]) -> Iterator[list[int]]:
    """Yield neighbours of :func:`claimed_parts` to read together; large frames alone."""
    run: list[int] = []
    nbytes = 0
    for gap, frame in zip(lengths[::2], lengths[1::2], strict=True):
        large = frame > _TOGETHER_NBYTES
        if run and (large or nbytes + gap + frame > _PIECE_NBYTES):
            yield run
            run, nbytes = [], 0
        run += gap, frame
        nbytes += gap + frame
        if large:
            yield run
            run, nbytes = [], 0
    if run:
        yield run


def _pieces(parts: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield memory in steps that are still in the processor's cache when hashed."""
    pieces: list[memoryview] = []
    left = _PIECE_NBYTES
    for part in parts:
        while part.nbytes:
            piece, part = part[:left], part[left:]
            pieces.append(piece)
            left -= piece.nbytes
            if not left:
                yield pieces
                pieces, left = [], _PIECE_NBYTES
    if pieces:
        yield pieces
