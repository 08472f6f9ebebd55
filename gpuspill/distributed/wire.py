"""Values on their way to others as bytes: spilled ones as they are, and what is on a device.

A value on disk is sent without being decoded and without coming back into memory. What the other side gets depends on
what it can do with it:

* A worker with gpuspill says so when it connects. It gets a :class:`Wire`, which stays bytes on arrival: its store
  keeps the bytes until a task needs the value.
* Everybody else gets distributed's own ``Serialized``, which is on the network what the value itself would have been.
  They need not know gpuspill.
* Peers without gpuspill in the same process, and those that restrict how values are serialised, get the value. It is
  decoded for them and not put in memory here.

Bytes read for sending are in memory until they are written to the network. They are bounded by a :class:`Window`, not
by the store's budget: making room for them there would evict what tasks need.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgpack
from dask.sizeof import sizeof
from distributed.protocol.serialize import Serialized as DaskSerialized
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from gpuspill.classes import attribute_of
from gpuspill.distributed.serialization import FOREIGN_HEADER
from gpuspill.manager.serialization import Encoded
from gpuspill.storage.base import Buffer

__all__ = ["Form", "Window", "Wire", "real_type", "type_name", "wrap"]

#: Version of what a :class:`Wire` looks like on the network.
_VERSION = 2

Form: TypeAlias = Literal["wire", "serialized", "value"]


class Wire:
    """A value as bytes between two workers that both have gpuspill.

    Parameters
    ----------
    encoded
        The value.
    type_name
        Module and qualified name of its type, as far as the sender knows.
    """

    __slots__ = ("__weakref__", "encoded", "type_name")

    def __init__(self, encoded: Encoded, type_name: str) -> None:
        self.encoded = encoded
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"<{self.type_name} of {self.encoded.nbytes} bytes, not decoded>"


@sizeof.register(Wire)  # type: ignore[no-untyped-call,untyped-decorator]
def _sizeof_wire(wire: Wire) -> int:
    return wire.encoded.nbytes


@dask_serialize.register(Wire)  # type: ignore[no-untyped-call,untyped-decorator]
def _serialize_wire(wire: Wire) -> tuple[dict[str, Any], list[Buffer]]:
    encoded = wire.encoded
    # The value's own header travels as one opaque piece: distributed reads and changes keys of the headers that it
    # sees.
    header = {
        "version": _VERSION,
        "value": encoded.header,
        "nbytes": encoded.nbytes,
        "device-nbytes": encoded.device_nbytes,
        "type-name": wire.type_name,
    }
    return header, list(encoded.frames)


@dask_deserialize.register(Wire)  # type: ignore[no-untyped-call,untyped-decorator]
def _deserialize_wire(header: Mapping[str, Any], frames: Sequence[Buffer]) -> Wire:
    if header["version"] != _VERSION:
        raise ValueError(
            f"received a spilled value in version {header['version']} of gpuspill's form, here it is {_VERSION}; "
            "use the same release of gpuspill on all workers"
        )
    encoded = Encoded(header["value"], list(frames), header["nbytes"], header["device-nbytes"])
    return Wire(encoded, header["type-name"])


def wrap(encoded: Encoded, form: Form, kind: type | None) -> Any:
    """Return what stands for a value in a message."""
    if form == "wire":
        return Wire(encoded, "object" if kind is None else type_name(kind))
    assert form == "serialized"
    assert encoded.header != FOREIGN_HEADER
    # A new header for each message: distributed notes in it how it splits and compresses the frames.
    header = msgpack.unpackb(encoded.header, raw=False, use_list=False, strict_map_key=False)
    return DaskSerialized(header, list(encoded.frames))  # type: ignore[no-untyped-call]


def type_name(cls: type) -> str:
    """Return the name of a type as dask's ``typename`` does, without running code of its metaclass."""
    module, name = attribute_of(cls, "__module__"), attribute_of(cls, "__name__")
    return str(name) if module == "builtins" else f"{module}.{name}"


def real_type(type_name: str) -> type:
    """Return the type that a name stands for, or a stand-in of the same name if its module is not loaded here.

    Nothing is imported: this runs on the event loop, and a value that is only passed on should not cost an import.
    """
    module_name, _, name = type_name.rpartition(".")
    module = sys.modules.get(module_name or "builtins")
    found = getattr(module, "__dict__", {}).get(name)  # getattr could make a module import what it provides lazily
    if isinstance(found, type):
        return found
    return _stand_in(module_name or "builtins", name)


@lru_cache(maxsize=1024)  # distributed keeps what it measures of transfers by type: one class a name
def _stand_in(module_name: str, name: str) -> type:
    return type(name, (), {"__module__": module_name, "__doc__": "Stands for a type that is not loaded."})


class Window:
    """Bounds the bytes that are read for sending and not written yet. Used on one event loop.

    Parameters
    ----------
    limit
        Bytes. A value that is larger goes alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._lately = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes under way."""
        return self._used

    def buffered(self) -> None:
        """Note that what is under way is read into buffers, which will be used again. Not if it is mapped."""
        self._lately = max(self._lately, self._used)

    def lately(self) -> int:
        """Bytes in buffers that were under way at a time not long ago: halves about every ten calls."""
        self._lately = self._lately * 15 // 16
        return self._lately

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self._limit

    async def take(self, nbytes: int) -> None:
        """Wait, first come first served, until `nbytes` may be read. Cancelling it leaves the line."""
        if not self._line and self._fits(nbytes):
            self._used += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(nbytes)  # it was our turn in the very moment
            else:
                self._advance()
            raise

    def give_back(self, nbytes: int) -> None:
        """`nbytes` have been written or given up."""
        self._used -= nbytes
        self._advance()

    def _advance(self) -> None:
        while self._line:
            nbytes, turn = self._line[0]
            if turn.done():  # cancelled
                self._line.popleft()
            elif self._fits(nbytes):
                self._line.popleft()
                self._used += nbytes
                turn.set_result(None)
            else:
                return
