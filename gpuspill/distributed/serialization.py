"""Values to bytes and back through dask's serialisation families.

A value is written to disk in the form in which distributed would send it: a header, and frames that
alias the value's memory wherever its type allows. An object of a type that dask was taught to
serialise (arrays, tables, device objects) takes its own way; anything else is pickled, with its
buffers apart (:mod:`gpuspill.distributed.pickling`).

What this does *not* do: splitting and compressing frames. The storage layer decides that by what it
measures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgpack
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.serialize import deserialize, deserialize_bytes, serialize

from gpuspill.classes import is_plain
from gpuspill.distributed.culprits import Named, culprit_of
from gpuspill.distributed.pickling import pickled, unpickled
from gpuspill.distributed.reductions import flat, keep_flag, registration
from gpuspill.distributed.sizes import passive_nbytes
from gpuspill.manager.ports import Serialized
from gpuspill.storage.base import Buffer, Frame

__all__ = ["FOREIGN_HEADER", "DaskSerializer", "DeviceFamilies"]

FOREIGN_HEADER = b""
"""Header of a record whose only frame ``SpillBuffer`` wrote. No header of ours is empty."""


class DaskSerializer:
    """The manager's serialiser on a Dask worker.

    Parameters
    ----------
    families
        Names of the serialisation families to try, in order.
    """

    def __init__(self, families: Sequence[str] = ("dask", "pickle")) -> None:
        self._families = tuple(families)
        self._refused: set[Named] = set()

    def dumps(self, value: object, given: Mapping[int, Any] = MappingProxyType({})) -> Serialized:
        """Serialise.

        Parameters
        ----------
        given
            See :func:`~gpuspill.distributed.pickling.pickled`.

        Raises
        ------
        TypeError
            No family can; the message names the type.
        Exception
            Whatever the type's own serialisation raises.
        """
        frames: Sequence[Frame]
        if "dask" in self._families and _has_a_way(value):
            header, parts = serialize(value, serializers=("dask",), on_error="raise")
            keep_flag(header, value)
            frames = [flat(part) for part in parts]
        else:
            header, frames = pickled(value, tuple(self._refused), given)
        packed: bytes = msgpack.packb(header, use_bin_type=True)
        return Serialized(packed, frames)

    def loads(self, header: bytes, frames: Sequence[Buffer]) -> object:
        """Rebuild the value; it may alias the frames, which have to be writable for it to be.

        Raises
        ------
        Exception
            Whatever the value's classes raise. If it is clear which class or function cannot make
            the value, a note says so, and from now on no value with it is serialised.
        """
        if header == FOREIGN_HEADER:
            return deserialize_bytes(frames[0])
        # Decoded anew each time: dask takes keys out of the header while it rebuilds collections.
        decoded = msgpack.unpackb(header, raw=False, use_list=False, strict_map_key=False)
        if decoded.get("serializer") != "pickle" or "compression" in decoded:
            return deserialize(decoded, list(frames))  # type: ignore[no-untyped-call]
        try:
            return unpickled(decoded, frames)
        except MemoryError:
            raise
        except Exception as error:
            culprit = culprit_of(frames)
            if culprit is not None:
                self._refused.add(culprit)
                with suppress(Exception):
                    name = ".".join(culprit)
                    error.add_note(
                        f"gpuspill: {name} cannot make a value from its pickle; such values now stay in memory"
                    )
            raise


def _has_a_way(value: Any) -> bool:
    """Whether dask has a way for the type of an object itself, and that way keeps all of it."""
    cls = type(value)
    if cls is getattr(sys.modules.get("numpy"), "ndarray", None):
        # Dask pickles objects in an array by itself, and what else the objects are in is not known
        # there.
        return not (value.dtype.hasobject or value.dtype.metadata)
    return registration(cls) == "exact"


class DeviceFamilies(DaskSerializer):
    """How objects of a device move: by ``cuda``, without a copy; others as bytes."""

    def takes_apart(self, cls: type) -> bool:
        """Whether a type, or one that it derives from, is registered with the ``cuda`` family."""
        if not is_plain(cls):
            return False
        try:
            cuda_serialize.dispatch(cls)  # type: ignore[no-untyped-call]
        except Exception:  # TypeError if not; anything, where what dask has for the type's library does not suit it
            return False
        return True

    def take_apart(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Return header and frames by the ``cuda`` family."""
        return serialize(value, serializers=("cuda",), on_error="raise")

    def passive_nbytes(self, value: Any) -> int | None:
        """Return what ``sizeof`` says of a type that dask knows; else ``nbytes``."""
        return passive_nbytes(value)

    def put_together(self, header: Any, frames: Sequence[Any]) -> Any:
        """Return the value on its frames, by the ``cuda`` family."""
        return deserialize(header, list(frames), deserializers=("cuda",))  # type: ignore[no-untyped-call]
