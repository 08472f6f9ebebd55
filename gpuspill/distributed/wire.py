"""Values on their way to others as bytes: spilled ones as they are, and what is on a device.

A value on disk is sent without being decoded and without coming back into memory. What the other
side gets depends on what it can do with it:

* A worker with gpuspill says so when it connects. It gets a :class:`Wire`, which stays bytes on
  arrival: its store keeps the bytes until a task needs the value.
* Everybody else gets distributed's own ``Serialized``, which is on the network what the value
  itself would have been. They need not know gpuspill.
* Peers without gpuspill in the same process, and those that restrict how values are serialised, get
  the value. It is decoded for them and not put in memory here.

Bytes read for sending are in memory until they are written to the network. They are bounded by a
:class:`SendBuffer`, not by the store's budget: making room for them there would evict what tasks
need.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import msgpack
from dask.sizeof import sizeof
from distributed.protocol.serialize import Serialized as DaskSerialized
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from gpuspill.classes import attribute_of
from gpuspill.distributed.serialization import FOREIGN_HEADER
from gpuspill.manager.ports import Encoded
from gpuspill.storage.base import Buffer

__all__ = ["Form", "SendBuffer", "Slot", "Wire", "real_type", "type_name", "wrap"]

#: Version of what a :class:`Wire` looks like on the network.
_VERSION = 2

Form: TypeAlias = Literal["wire", "serialized", "value"]


class Wire:
    """A value as bytes between two workers that both have gpuspill.

    Parameters
    ----------
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
    # The value's own header travels as one opaque piece: distributed reads and changes keys of the
    # headers that it sees.
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
    # A new header for each message: distributed notes in it how it splits and compresses the
    # frames.
    header = msgpack.unpackb(encoded.header, raw=False, use_list=False, strict_map_key=False)
    return DaskSerialized(header, list(encoded.frames))  # type: ignore[no-untyped-call]


def type_name(cls: type) -> str:
    """Return a type's name as dask's ``typename`` does, without its metaclass's code."""
    module, name = attribute_of(cls, "__module__"), attribute_of(cls, "__name__")
    return str(name) if module == "builtins" else f"{module}.{name}"


def real_type(type_name: str) -> type:
    """Return the type of a name, or a stand-in if its module is not loaded here.

    Nothing is imported: this runs on the event loop, and a value that is only passed on should not
    cost an import.
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


class SendBuffer:
    """Bounds the bytes that are read for sending and not written yet. Used on one event loop.

    A peer that does not read holds no more than its share, and only for a while: what it has not
    taken then counts against itself alone. So it stops no one else.

    Parameters
    ----------
    limit
        Bytes. A request that is larger goes alone.
    share
        Bytes of one peer; half of the limit by default. A request that is larger is the only one of
        its peer.
    patience
        Seconds after which bytes that were not written no longer count against other peers.
    """

    def __init__(self, limit: int, *, share: int | None = None, patience: float = 5.0) -> None:
        self._limit = limit
        self._share = limit // 2 if share is None else share
        self._patience = patience
        self._used = 0
        self._overdue = 0
        self._lately = 0
        self._peers: defaultdict[Hashable, int] = defaultdict(int)
        # One line for each peer that waits; the peers take turns.
        self._lines: OrderedDict[Hashable, deque[_Turn]] = OrderedDict()

    @property
    def used(self) -> int:
        """Bytes under way."""
        return self._used

    def buffered(self) -> None:
        """Note that what is under way is in buffers, not mapped: they are used again."""
        self._lately = max(self._lately, self._used)

    def lately(self) -> int:
        """Bytes in buffers under way lately: halves about every ten calls."""
        self._lately = self._lately * 15 // 16
        return self._lately

    async def take(self, nbytes: int, peer: Hashable = None) -> Slot:
        """Wait until `nbytes` may be read for a peer. Cancelling it leaves the line.

        Requests of one peer are served first come first served; peers take turns.
        """
        slot = Slot(self, nbytes, peer)
        if not self._lines and self._within_share(slot) and self._fits(slot):
            self._enter(slot)
            return slot
        turn = _Turn(slot, asyncio.get_running_loop().create_future())
        self._lines.setdefault(peer, deque()).append(turn)
        self._advance()
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn.come.done() and not turn.come.cancelled():
                slot.release()  # it was our turn in the very moment
            else:
                self._advance()
            raise
        return slot

    def _fits(self, slot: Slot) -> bool:
        counted = self._used - self._overdue
        return not counted or counted + slot.nbytes <= self._limit

    def _within_share(self, slot: Slot) -> bool:
        used = self._peers.get(slot.peer, 0)
        return not used or used + slot.nbytes <= self._share

    def _enter(self, slot: Slot) -> None:
        self._used += slot.nbytes
        self._peers[slot.peer] += slot.nbytes
        slot.timer = asyncio.get_running_loop().call_later(self._patience, self._lapse, slot)

    def _lapse(self, slot: Slot) -> None:
        """It was not written for long: others do not wait for it any more."""
        slot.timer = None
        self._overdue += slot.nbytes
        self._advance()

    def leave(self, slot: Slot) -> None:
        """The bytes of a slot have been written or given up."""
        if slot.timer is not None:
            slot.timer.cancel()
        self.resize(slot, 0)

    def resize(self, slot: Slot, nbytes: int) -> None:
        """It turned out that a slot takes `nbytes`. Waits for no one."""
        more = nbytes - slot.nbytes
        self._used += more
        self._peers[slot.peer] += more
        if slot.timer is None:
            self._overdue += more
        if not self._peers[slot.peer]:
            del self._peers[slot.peer]
        slot.nbytes = nbytes
        if more < 0:
            self._advance()

    def _advance(self) -> None:
        """Serve those who wait, peer by peer, until one does not fit; skip greedy peers."""
        left = len(self._lines)
        while left:
            peer, line = next(iter(self._lines.items()))
            while line and line[0].come.done():  # cancelled
                line.popleft()
            if not line:
                del self._lines[peer]
                left -= 1
                continue
            slot = line[0].slot
            if not self._within_share(slot):
                self._lines.move_to_end(peer)
                left -= 1
            elif self._fits(slot):
                self._enter(slot)
                line.popleft().come.set_result(None)
                self._lines.move_to_end(peer)
                left = len(self._lines)
            else:
                return


class Slot:
    """Bytes of a window that are under way to a peer.

    Attributes
    ----------
    timer
        Runs until the bytes no longer count against other peers; then None.
    """

    __slots__ = ("_window", "nbytes", "peer", "timer")

    def __init__(self, window: SendBuffer, nbytes: int, peer: Hashable) -> None:
        self._window = window
        self.nbytes = nbytes
        self.peer = peer
        self.timer: asyncio.TimerHandle | None = None

    def resize(self, nbytes: int) -> None:
        """It takes `nbytes`, as it turns out."""
        self._window.resize(self, nbytes)

    def release(self) -> None:
        """The bytes have been written or given up. To be called once."""
        self._window.leave(self)


class _Turn(NamedTuple):
    slot: Slot
    come: asyncio.Future[None]
