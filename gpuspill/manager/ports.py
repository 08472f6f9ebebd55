"""The ports of the manager: bytes for values, observers, custody of memory elsewhere.

The worker integration serialises over dask's families (:mod:`gpuspill.distributed.serialization`).
:class:`PickleSerializer`, which needs nothing but Python, serves the manager outside a worker, and
tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from gpuspill.storage.base import Buffer, Frame, Receipt

__all__ = [
    "Custody",
    "Encoded",
    "LoadsTogether",
    "Observer",
    "PickleSerializer",
    "Serialized",
    "Serializer",
    "observe_write",
]


class Serialized(NamedTuple):
    """A value as bytes.

    Attributes
    ----------
    header
        Small; whatever :meth:`Serializer.loads` needs besides the frames.
    frames
        Buffers, or streams of bytes. They may alias the value's own memory, so the value must stay
        unchanged while they are in use.
    """

    header: bytes
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Encoded:
    """A value kept as bytes until its first use, as it came by network or lies on disk.

    Attributes
    ----------
    header, frames
        As in :class:`Serialized`; the frames belong to the holder of this object.
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
    """Turns values into bytes and back. Called from any thread but the loop's, unlocked."""

    def dumps(self, value: object) -> Serialized:
        """Serialise. Whatever it raises marks the value as unspillable."""
        ...

    def loads(self, header: bytes, frames: Sequence[memoryview]) -> object:
        """Rebuild. The value may alias the frames, which are writable and its own."""
        ...


#: ``loads_together(records)``: the values of several records, or None for those that it does not
#: know how to rebuild. If it raises, nothing is left of any.
LoadsTogether: TypeAlias = Callable[[Sequence[tuple[bytes, Sequence[memoryview]]]], list[Any]]


class Observer(Protocol):
    """Told about every unit of work, in the thread that did it and without a lock held.

    Labels and units are those of distributed's fine performance metrics: ``disk-read``,
    ``disk-write``, ``memory-read``, ``serialize``, ``deserialize``; ``seconds``, ``bytes``,
    ``count``.
    """

    def __call__(self, label: str, value: float, unit: str, /) -> None:
        """Add `value` to the metric."""
        ...


def observe_write(observer: Observer | None, receipt: Receipt, seconds: float) -> None:
    """Tell of a record that was written."""
    if observer is not None:
        observer("disk-write", seconds, "seconds")
        observer("disk-write", 1, "count")
        observer("disk-write", receipt.nbytes, "bytes")


class Custody(Protocol):
    """Knows values that stand for memory elsewhere, such as a device's.

    Its methods are called with the metadata lock held: they must be fast, take no lock that is ever
    held around a call of a manager, and not raise.
    """

    def held(self, value: Any) -> bool:
        """Whether the memory is in use elsewhere, so that evicting the value would free nothing."""
        ...

    def leave(self, value: Any) -> Callable[[], Any] | None:
        """`value` leaves memory, or is forgotten.

        Returns
        -------
        callable or None
            ``ghost()`` returns a value in its place if the memory is still there when it is wanted
            again, else None. It is called without a lock, from any thread.
        """
        ...


class PickleSerializer:
    """Pickle protocol 5 with out-of-band buffers: large ones are copied neither way."""

    def dumps(self, value: object) -> Serialized:
        """Serialise by pickle; buffers stay where they are."""
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return Serialized(header, [buffer.raw() for buffer in buffers])

    def loads(self, header: bytes, frames: Sequence[memoryview]) -> object:
        """Rebuild by pickle on top of `frames`."""
        return pickle.loads(header, buffers=frames)
