"""Any value as a pickle, with large buffers apart from it.

As distributed pickles, with three differences. What comes back is what went in, where pickle can
have it so (:mod:`gpuspill.distributed.reductions`). What dask has a way for is written that way
wherever in the value it is, so an array that a value has twice is one array afterwards. And what a
client or a scheduler keeps for an object of distributed's, such as a future, is not dropped with
the object: a value with such objects is not pickled.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import cloudpickle
from distributed import Actor, BaseActorFuture, Client, Event, Future, MultiLock, Queue, Semaphore, Variable
from distributed.protocol.serialize import pickle_loads

from gpuspill.classes import named
from gpuspill.distributed.culprits import Named
from gpuspill.distributed.reductions import Reduce, flat, reduce_registered, reduction_of, registration
from gpuspill.errors import cut_loose
from gpuspill.storage.base import Buffer, Frame, FrameStream

__all__ = ["pickled", "unpickled"]

#: Bytes from which a buffer is a frame of its own. Smaller ones are cheaper to copy than to be told
#: apart.
_APART_NBYTES: Final = 4096
#: Bytes of one piece of a pickle that was not put together from others: large ``bytes`` are handed
#: on as they are.
_WHOLE_NBYTES: Final = 192 * 1024
#: Bytes in such pieces from which they are not copied into one frame, which would take their memory
#: once more. A frame can be compressed, a stream of pieces cannot.
_STREAM_NBYTES: Final = 64 * 2**20

#: Bytes of a pickle from which it is read in pieces.
_LONG_NBYTES: Final = 2**20

#: What is bound to the client or worker of a process.
_BOUND: Final = (Actor, BaseActorFuture, Client, Event, Future, MultiLock, Queue, Semaphore, Variable)


class _BoundObject(TypeError):
    """The value has an object of distributed's that has to stay in this process."""


class _Pieces:
    """A file to which pickle writes: keeps what it is given, large bytes as they are."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def write(self, piece: Any) -> None:
        self.pieces.append(piece)

    def frame(self) -> memoryview | FrameStream:
        """Return everything as one frame."""
        whole = sum(len(piece) for piece in self.pieces if len(piece) >= _WHOLE_NBYTES)
        return _Stream(self.pieces) if whole >= _STREAM_NBYTES else memoryview(b"".join(self.pieces))

    def __contains__(self, text: bytes) -> bool:
        return any(text in piece for piece in self.pieces if len(piece) < _WHOLE_NBYTES)


class _Reader:
    """A file from which pickle reads, a frame of some 64 kB at a time.

    Reading and writing pickles is one long call to Python's interpreter, which keeps its lock
    meanwhile: the event loop would stand still for a second or more. It lets others have the lock
    when these methods are called.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def read(self, nbytes: int) -> bytes:
        start, self._at = self._at, self._at + nbytes
        return bytes(self._view[start : self._at])

    def readinto(self, buffer: Any) -> int:
        nbytes = memoryview(buffer).nbytes
        start, self._at = self._at, self._at + nbytes
        piece = self._view[start : self._at]
        buffer[: piece.nbytes] = piece
        return piece.nbytes

    def readline(self) -> bytes:
        at = self._at
        while not (found := bytes(self._view[at : at + 256]).partition(b"\n"))[1] and found[0]:
            at += 256
        end = at + len(found[0]) + len(found[1])
        start, self._at = self._at, end
        return bytes(self._view[start:end])


class _Stream(FrameStream):
    """Pieces, one after the other."""

    def __init__(self, pieces: Sequence[bytes | bytearray]) -> None:
        self._pieces = [memoryview(piece) for piece in pieces]
        self.nbytes = sum(piece.nbytes for piece in self._pieces)

    def copy_to(self, sink: Callable[[memoryview], object]) -> None:
        """See :meth:`FrameStream.copy_to`."""
        for piece in self._pieces:
            sink(piece)


class _Attempt:
    """One attempt at a value.

    Parameters
    ----------
    by_value
        Whether classes and functions that others cannot import travel with the value, as
        cloudpickle has them.
    by_base
        Whether an object is written in dask's way for a base of its type: for types that cannot be
        pickled.
    """

    def __init__(self, given: Mapping[int, Any], *, by_value: bool = False, by_base: bool = False) -> None:
        self._given = given
        self.pieces = _Pieces()
        self.buffers: list[memoryview] = []
        self.inherits = False
        self._by_base = by_base
        self._pickler = (_CloudPickler if by_value else _Pickler)(
            self.pieces,
            protocol=5,
            buffer_callback=self._take,
        )
        self._pickler.attempt = self
        # By identity, with the types, for one that pickle makes on the way could be gone before the
        # end.
        self._ways: dict[int, tuple[type, Reduce | None]] = {}

    def dump(self, value: object) -> None:
        """Write the value. Raises whatever the value's types do."""
        try:
            self._pickler.dump(value)
        finally:
            del self._pickler  # it refers to the value, and to this

    def names_what_others_lack(self) -> bool:
        """Whether the pickle names something that means another thing elsewhere."""
        by_value = [name.encode() for name in cloudpickle.list_registry_pickle_by_value()]
        return any(name in self.pieces for name in (b"__main__", *by_value))

    def names(self, module: str, name: str) -> bool:
        """Whether the pickle refers to a class or function."""
        return module.encode() in self.pieces and name.encode() in self.pieces

    def outcome(self) -> tuple[dict[str, Any], list[Frame]]:
        """Return header and frames."""
        header = {"serializer": "pickle", "writeable": tuple(not buffer.readonly for buffer in self.buffers)}
        return header, [self.pieces.frame(), *self.buffers]

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _APART_NBYTES:
            return True
        self.buffers.append(raw)
        return False

    def reduce(self, value: Any) -> Any:
        """See :meth:`pickle.Pickler.reducer_override`."""
        if id(value) in self._given:
            return self._given[id(value)]
        cls = type(value)
        known = self._ways.get(id(cls))
        if known is None:
            known = self._ways[id(cls)] = cls, self._way(cls)
        return NotImplemented if known[1] is None else known[1](value)

    def _way(self, cls: type) -> Reduce | None:
        if any(type.__subclasscheck__(bound, cls) for bound in _BOUND):
            return _refuse
        if registration(cls) == "inherited":
            self.inherits = True
            if self._by_base:
                return reduce_registered
        return reduction_of(cls)


def _refuse(value: Any) -> Any:
    raise _BoundObject(
        f"it has a {named(type(value))}, which scheduler and client must know of while the value is there"
    )


class _Pickler(pickle.Pickler):
    attempt: _Attempt

    def reducer_override(self, value: Any) -> Any:
        """See :meth:`_Attempt.reduce`."""
        return self.attempt.reduce(value)


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    attempt: _Attempt

    def reducer_override(self, value: Any) -> Any:
        """See :meth:`_Attempt.reduce`."""
        reduced = self.attempt.reduce(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def pickled(
    value: object, refused: Collection[Named] = (), given: Mapping[int, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], list[Frame]]:
    """Return header and frames by distributed's ``pickle``. Frames alias the value.

    Parameters
    ----------
    refused
        Classes and functions that failed to make a value from a pickle.
    given
        What ``__reduce__`` of objects in the value is to return, by their identity.

    Raises
    ------
    TypeError
        It cannot be pickled, or must not be: it has an object that is bound to this process, or one
        that would not come back.
    MemoryError
        There is no room for what has to be copied.
    """
    by_value, by_base = False, False
    while True:
        attempt = _Attempt(given, by_value=by_value, by_base=by_base)
        try:
            attempt.dump(value)
        except (MemoryError, RecursionError, _BoundObject):
            raise
        except Exception as error:
            if by_value and (by_base or not attempt.inherits):
                raise TypeError(f"cannot serialise an object of type {named(type(value))}: {_told(error)}") from error
            by_base = by_value
            cut_loose(error)
        else:
            if known := next((name for name in refused if attempt.names(*name)), None):
                raise TypeError(f"{'.'.join(known)} could not make a value from what was written before")
            if by_value or not attempt.names_what_others_lack():
                return attempt.outcome()
        by_value = True


def unpickled(header: dict[str, Any], frames: Sequence[Buffer]) -> object:
    """Return the value from ``pickle``'s or :func:`pickled`'s header and frames.

    Without holding the interpreter's lock all the time, if it is a long pickle.
    """
    view = flat(frames[0])
    if view.nbytes < _LONG_NBYTES:
        return pickle_loads(header, list(frames))
    buffers = [
        _flagged(memoryview(frame), writeable) for frame, writeable in zip(frames[1:], header["writeable"], strict=True)
    ]
    # The collector would look at all that is there again and again as the objects are made, four
    # times as long as it takes to make them, and each time in one piece. Whatever another thread
    # does about it meanwhile is lost.
    collects = gc.isenabled()
    gc.disable()
    try:
        return pickle.Unpickler(_Reader(view), buffers=buffers).load()
    finally:
        if collects:
            gc.enable()


def _flagged(piece: memoryview, writeable: bool) -> memoryview:
    """Return a buffer that may be written to, or not."""
    if not writeable:
        return piece.toreadonly()
    return memoryview(bytearray(piece)) if piece.readonly else piece


def _told(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
