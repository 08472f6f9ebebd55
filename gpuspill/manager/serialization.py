"""Values to bytes and back: the port that the manager uses, and an implementation that needs nothing but Python.

The worker integration brings its own, over dask's serialisation families
(:mod:`gpuspill.distributed.serialization`); this one serves the manager outside a worker, and
tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gpuspill.storage.base import Buffer, Frame

__all__ = ["Encoded", "PickleSerializer", "Serialized", "Serializer"]


class Serialized(NamedTuple):
    """A value as bytes.

    Attributes
    ----------
    header
        Small; whatever :meth:`Serializer.loads` needs besides the frames.
    frames
        Buffers, or streams of bytes. They may alias the value's own memory, so the value must stay unchanged while
        they are in use.
    """

    header: bytes
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Encoded:
    """A value that is kept as bytes until somebody needs it: how it came over the network, or how it lies on disk.

    Attributes
    ----------
    header, frames
        As in :class:`Serialized`; the frames belong to whoever holds this object.
    nbytes
        Bytes that the value will take in memory, on a device included.
    device_nbytes
        The part of it that it will take on a device.
    """

    header: bytes
    frames: Sequence[Buffer]
    nbytes: int
    device_nbytes: int = 0


class Serializer(Protocol):
    """Turns values into bytes and back. Called from any thread, never on the event loop, never under a lock."""

    def dumps(self, value: object) -> Serialized:
        """Serialise. Whatever it raises marks the value as unspillable."""
        ...

    def loads(self, header: bytes, frames: Sequence[memoryview]) -> object:
        """Rebuild. The value may alias the frames, which are writable and not used by anybody else."""
        ...


class PickleSerializer:
    """Pickle protocol 5 with out-of-band buffers: large buffers are neither copied on the way out nor on the way in."""

    def dumps(self, value: object) -> Serialized:
        """Serialise by pickle; buffers stay where they are."""
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return Serialized(header, [buffer.raw() for buffer in buffers])

    def loads(self, header: bytes, frames: Sequence[memoryview]) -> object:
        """Rebuild by pickle on top of `frames`."""
        return pickle.loads(header, buffers=frames)
