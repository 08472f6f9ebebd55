"""Compression, where it pays.

On a fast disk compressing before writing makes spilling slower, not faster (lz4 does 0.5 GB/s where
a disk does 2.5); on a slow one it is the other way round, for data that shrinks. So the choice is
made for each frame, from a sample of it and from how fast the store really reads and writes.

Both are compared in one currency. While processors are idle, that is time, and a codec's processor
time counts as much as waiting for the disk. While all of them are busy, tasks would have had what a
codec takes, and waiting for the disk costs them nothing: then processor time alone counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpuspill import forks
from gpuspill.config import CODECS
from gpuspill.errors import ConfigError
from gpuspill.storage.base import Buffer

__all__ = [
    "PLAIN",
    "Choice",
    "Codec",
    "CodecChooser",
    "CodecLike",
    "CodecSample",
    "Throughput",
    "best_choice",
    "price",
    "take_sample",
]

#: Which codecs "auto" considers, where they are registered. Names as in distributed.
AUTO_CODECS = ("lz4", "snappy", "zstd", "zlib")

#: A frame that does not shrink to less than this share of itself is stored as it is.
MAX_RATIO = 0.9
#: Share of the time that compression has to save to be worth a CPU that tasks could use.
MIN_GAIN = 0.1

#: Largest input lz4 takes (LZ4_MAX_INPUT_SIZE). Others take more, but none compresses such frames
#: fast.
_MAX_NBYTES = 0x7E000000


class CodecLike(Protocol):
    """What a registry has to hold: for instance `distributed.protocol.compression.compressions`."""

    @property
    def compress(self) -> Callable[[Any], Any]:
        """Function of a buffer that returns a buffer."""

    @property
    def decompress(self) -> Callable[[Any], Any]:
        """Function of what `compress` returned that returns the original bytes."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A named pair of functions on buffers."""

    name: str
    compress: Callable[[Any], Buffer]
    decompress: Callable[[Any], Buffer]


class CodecSample(NamedTuple):
    """What a codec did to a sample of a frame."""

    codec: Codec
    #: Compressed size through size.
    ratio: float
    #: Uncompressed bytes per second of CPU time.
    compress_rate: float
    decompress_rate: float


class Choice(NamedTuple):
    """How to store a frame."""

    #: None: as it is.
    codec: Codec | None
    #: Expected stored bytes per byte.
    ratio: float


#: Store the frame as it is.
PLAIN = Choice(None, 1.0)


class Throughput:
    """Bytes per second, recent operations counting more.

    Parameters
    ----------
    decay
        What an observation still counts for after the next one.

    Notes
    -----
    A quotient of sums, not a mean of quotients: an operation counts for the time it took, so one
    small slow operation does not outweigh a large one. Not thread-safe.
    """

    __slots__ = ("_decay", "_nbytes", "_seconds")

    def __init__(self, decay: float = 0.8) -> None:
        self._decay = decay
        self._nbytes = 0.0
        self._seconds = 0.0

    def observe(self, nbytes: int, seconds: float) -> None:
        """Take one operation into account."""
        self._nbytes = self._nbytes * self._decay + nbytes
        self._seconds = self._seconds * self._decay + seconds

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before the first observation."""
        return self._nbytes / max(self._seconds, 1e-9) if self._nbytes else None


def price(seconds: float, cpu: float, busy: float) -> float:
    """Return what an operation costs, in seconds.

    Parameters
    ----------
    seconds, cpu
        Wall time, and processor time of the thread, which is part of it.
    busy
        Share of the machine's processors that are busy, 0 to 1.
    """
    return cpu + (1.0 - busy) * max(0.0, seconds - cpu)


def cost(
    ratio: float,
    compress_rate: float,
    decompress_rate: float,
    write_rate: float,
    read_rate: float,
) -> float:
    """Return seconds per byte to compress, write, read and decompress. Rates in bytes/s."""
    return (
        1 / max(compress_rate, 1.0)
        + 1 / max(decompress_rate, 1.0)
        + ratio * (1 / max(write_rate, 1.0) + 1 / max(read_rate, 1.0))
    )


def plain_cost(write_rate: float, read_rate: float) -> float:
    """Return seconds per byte to write and read. Rates in bytes per second."""
    return 1 / max(write_rate, 1.0) + 1 / max(read_rate, 1.0)


def best_choice(
    samples: Iterable[CodecSample],
    write_rate: float | None,
    read_rate: float | None,
    *,
    max_ratio: float = MAX_RATIO,
    min_gain: float = MIN_GAIN,
) -> Choice:
    """Decide how to store a frame. A pure function.

    Parameters
    ----------
    samples
        What each codec did to a sample of the frame.
    write_rate, read_rate
        Of the store, bytes per second; None if not known yet. One stands in for the other; with
        neither, the disk is taken to be fast.
    max_ratio
        A frame that does not shrink to less than this share of itself is stored as it is.
    min_gain
        Share of the time that compression has to save to be worth a CPU that tasks could use.
    """
    shrinking = [sample for sample in samples if sample.ratio < max_ratio]
    if not shrinking:
        return PLAIN
    write_rate = read_rate if write_rate is None else write_rate
    read_rate = write_rate if read_rate is None else read_rate
    if write_rate is None or read_rate is None:
        return PLAIN
    costs = {
        sample: cost(sample.ratio, sample.compress_rate, sample.decompress_rate, write_rate, read_rate)
        for sample in shrinking
    }
    best = min(costs, key=costs.__getitem__)
    if costs[best] > (1 - min_gain) * plain_cost(write_rate, read_rate):
        return PLAIN
    return Choice(best.codec, best.ratio)


def take_sample(frame: memoryview, nbytes: int, count: int) -> memoryview:
    """Return `count` blocks of `nbytes` bytes each, spread over a frame, as one buffer.

    A frame that is not larger than that is returned as it is.
    """
    if frame.nbytes <= nbytes * count:
        return frame
    last = frame.nbytes - nbytes
    starts = [last * i // max(count - 1, 1) for i in range(count)]
    return memoryview(b"".join(frame[start : start + nbytes] for start in starts))


class CodecChooser:
    """Chooses a codec for each frame.

    Parameters
    ----------
    setting
        None or False: never compress. A codec's name: that codec wherever a sample shrinks, as
        distributed does. ``"auto"``: the codec, if any, that makes writing and reading back
        together fastest.
    registry
        Codecs by name. Keys that are not names (distributed has None, False and "auto" in its
        registry) are ignored.
    named
        Where `setting` comes from, for messages.
    min_nbytes
        Frames smaller than this are stored as they are.
    clock
        CPU seconds of the calling thread. Not wall time: a sample takes 0.1 ms, and getting the
        interpreter lock back after it can take 5 on a busy worker.
    busy
        Returns the share of the machine's processors that are busy, 0 to 1; by default they are all
        idle.

    Raises
    ------
    ConfigError
        `setting` is not among the above, or the library of that codec is not installed.

    Notes
    -----
    Thread-safe; no lock is held while a codec runs. One chooser serves one store, since it learns
    that store's speed.
    """

    #: In "auto", a codec that cannot pay is tried again on every so many frames: data and load
    #: change.
    RETRY_EVERY = 64
    #: In "auto", samples take at most this share of the processor time of writing, and so many
    #: seconds besides.
    TRIAL_SHARE = 0.01
    TRIAL_SECONDS = 0.01
    #: Size of each block of a sample, bytes, and how many there are.
    SAMPLE_NBYTES, SAMPLES = 10_000, 5
    #: Reads and writes smaller than this say more about latency than about bandwidth, and are not
    #: taken into account.
    LEAST_NBYTES = 262_144
    #: Of so many kinds of frames it is remembered how they shrank.
    MOST_KINDS = 256

    def __init__(
        self,
        setting: str | bool | None = None,
        registry: Mapping[Any, CodecLike] | None = None,
        *,
        named: str = "setting",
        min_nbytes: int = 10_000,
        clock: Callable[[], float] = time.thread_time,
        busy: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.setting = None if setting is False else setting
        self._codecs = {
            name: Codec(name, codec.compress, codec.decompress)
            for name, codec in (registry or {}).items()
            if isinstance(name, str) and name != "auto"
        }
        if self.setting is None:
            names: list[str] = []
        elif self.setting == "auto":
            names = [name for name in AUTO_CODECS if name in self._codecs]
        elif isinstance(self.setting, str) and self.setting in self._codecs:
            names = [self.setting]
        else:
            package = CODECS.get(self.setting) if isinstance(self.setting, str) else None
            found = (
                f"found {setting!r}, which needs the package {package}: it is not installed here, or too old. Install "
                "it or choose"
                if package
                else f"found {setting!r}, expected"
            )
            raise ConfigError(f"{named}: {found} {', '.join(map(repr, sorted(self._codecs)))}, 'auto' or None")
        self._candidates = [self._codecs[name] for name in names]
        self._min_nbytes = min_nbytes
        self.clock = clock
        self._busy = busy
        # Re-entrant: a finaliser may read a record in the middle. An observation may be lost by
        # that: the next is near.
        self._lock = forks.lock()
        self._write = Throughput()
        self._read = Throughput()
        self._compress = {name: Throughput() for name in names}
        self._decompress = {name: Throughput() for name in names}
        self._frames = 0
        self._credit = self.TRIAL_SECONDS
        self._kinds: dict[Hashable, dict[str, float]] = {}  # ratios by codec

    def codec(self, name: str) -> Codec:
        """Return a codec by name, whatever the setting. KeyError if there is none."""
        return self._codecs[name]

    def choose(self, frame: memoryview, *, kind: Hashable = None) -> Choice:
        """Decide how to store a frame, by a sample of it or by how the last of its kind shrank.

        Parameters
        ----------
        frame
            Flat bytes.
        kind
            Equal for frames that shrink alike, as far as one can tell.
        """
        if not self._candidates or not self._min_nbytes <= frame.nbytes <= _MAX_NBYTES:
            return PLAIN
        if self.setting != "auto":
            # The user has decided that it pays; what is left to see is whether it shrinks.
            samples = self._sample(self._candidates, frame, kind)
            return next((Choice(each.codec, each.ratio) for each in samples if each.ratio < MAX_RATIO), PLAIN)
        codecs, write, read = self._worth_trying()
        if not codecs:
            return PLAIN
        samples = self._sample(codecs, frame, kind) if self._credit > 0 else self._recall(codecs, kind)
        return best_choice(samples, write, read)

    def observe_write(self, nbytes: int, seconds: float, cpu: float = 0.0, spent: float = 0.0) -> None:
        """Learn from a write of the store.

        Parameters
        ----------
        nbytes
            Bytes on disk.
        seconds, cpu
            Wall time and processor time of writing them.
        spent
            Processor time of it all, codecs included.
        """
        with self._lock:
            self._credit = min(self.TRIAL_SECONDS, self._credit + self.TRIAL_SHARE * spent)
        self._observe(self._write, nbytes, seconds, cpu)

    def observe_read(self, nbytes: int, seconds: float, cpu: float = 0.0) -> None:
        """Learn from a read: bytes on disk, wall time and processor time in seconds."""
        self._observe(self._read, nbytes, seconds, cpu)

    def _observe(self, throughput: Throughput, nbytes: int, seconds: float, cpu: float) -> None:
        if nbytes >= self.LEAST_NBYTES:
            paid = price(seconds, cpu, self._busy())  # which may read a file
            with self._lock:
                throughput.observe(nbytes, paid)

    def observe_ratio(self, kind: Hashable, codec: str, ratio: float) -> None:
        """Learn how a frame of a kind shrank: compressed size / size. The last counts half."""
        with self._lock:
            known = self._kinds.pop(kind, None)
            if known is None:
                known = {}
                while len(self._kinds) >= self.MOST_KINDS:
                    del self._kinds[next(iter(self._kinds))]
            self._kinds[kind] = known  # the last to be forgotten
            known[codec] = (known.get(codec, ratio) + ratio) / 2

    def rates(self) -> dict[str, float | None]:
        """Return what was learnt, in bytes per second; None where nothing is known yet.

        Those of the store are by :func:`price`: more than it reads and writes in a second of a busy
        machine. Keys are ``write``, ``read``, and, for each codec considered, ``compress-<name>``
        and ``decompress-<name>``.
        """
        with self._lock:
            return {
                "write": self._write.rate,
                "read": self._read.rate,
                **{f"compress-{name}": t.rate for name, t in self._compress.items()},
                **{f"decompress-{name}": t.rate for name, t in self._decompress.items()},
            }

    def _worth_trying(self) -> tuple[list[Codec], float | None, float | None]:
        """Return the codecs that would pay if a frame shrank to nothing, and the store's rates."""
        with self._lock:
            write, read = self._write.rate, self._read.rate
            self._frames += 1
            write = read if write is None else write
            read = write if read is None else read
            if write is None or read is None:
                return [], None, None
            if self._frames % self.RETRY_EVERY == 0:
                return self._candidates, write, read
            limit = (1 - MIN_GAIN) * plain_cost(write, read)
            codecs = []
            for codec in self._candidates:
                compress = self._compress[codec.name].rate
                decompress = self._decompress[codec.name].rate
                if compress is None or decompress is None or cost(0.0, compress, decompress, write, read) <= limit:
                    codecs.append(codec)
            return codecs, write, read

    def _sample(self, codecs: list[Codec], frame: memoryview, kind: Hashable) -> list[CodecSample]:
        start = self.clock()
        data = take_sample(frame, self.SAMPLE_NBYTES, self.SAMPLES)
        samples = [sample for codec in codecs if (sample := self._try(codec, data)) is not None]
        for sample in samples:
            self.observe_ratio(kind, sample.codec.name, sample.ratio)
        with self._lock:
            self._credit -= self.clock() - start
        return samples

    def _recall(self, codecs: list[Codec], kind: Hashable) -> list[CodecSample]:
        with self._lock:
            known = self._kinds.get(kind, {})
            found = [
                (codec, known.get(codec.name), self._compress[codec.name].rate, self._decompress[codec.name].rate)
                for codec in codecs
            ]
        return [
            CodecSample(codec, ratio, compress, decompress)
            for codec, ratio, compress, decompress in found
            if ratio is not None and compress is not None and decompress is not None
        ]

    def _try(self, codec: Codec, data: memoryview) -> CodecSample | None:
        try:
            start = self.clock()
            compressed = codec.compress(data)
            middle = self.clock()
            codec.decompress(compressed)
            end = self.clock()
        except Exception:
            # A codec that fails on this data is no choice for it.
            return None
        nbytes = data.nbytes
        with self._lock:
            self._compress[codec.name].observe(nbytes, middle - start)
            self._decompress[codec.name].observe(nbytes, end - middle)
        return CodecSample(
            codec,
            memoryview(compressed).nbytes / nbytes,
            nbytes / max(middle - start, 1e-9),
            nbytes / max(end - middle, 1e-9),
        )
