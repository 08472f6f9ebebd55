"""Values to bytes and back through dask's serialisation families.

A value is written to disk in the form in which distributed would send it: a header, and frames that alias the
value's memory wherever its type allows. Types that somebody taught dask to serialise (arrays, frames, device
objects) take their own way, everything else is pickled with its buffers out of band.

What this does *not* do: splitting and compressing frames. The storage layer decides that by what it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import msgpack
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.serialize import (
    Pickled,
    Serialize,
    ToPickle,
    deserialize,
    deserialize_bytes,
    pickle_dumps,
    serialize,
)
from distributed.protocol.serialize import (
    Serialized as DaskSerialized,
)

from gpuspill.classes import is_plain
from gpuspill.manager.serialization import Serialized
from gpuspill.storage.base import Buffer

__all__ = ["FOREIGN_HEADER", "DaskSerializer", "DeviceFamilies"]

FOREIGN_HEADER = b""
"""Header of a record whose only frame is what distributed's ``SpillBuffer`` wrote. No header of ours is empty."""

# Dask unwraps these when it serialises, so what comes back would not be what went in.
_UNWRAPPED = (Serialize, DaskSerialized, ToPickle, Pickled)


def _flat(frame: Any) -> memoryview:
    """Return `frame` as flat bytes without copying it, unless its memory has gaps."""
    view = memoryview(frame)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.contiguous:
        return memoryview(view.tobytes())
    if view.ndim == 1 and view.format == "B":
        return view
    return PickleBuffer(view).raw()  # memoryview.cast cannot do Fortran order


def _keep_flags(header: Any, value: Any) -> None:
    """Put into a header which arrays may be written to; of one with gaps dask takes the flag of the copy it makes."""
    if "is-collection" in header:
        if type(value) not in (list, tuple, set, dict):
            return  # what dask unwraps on the way
        for part, item in zip(header["sub-headers"], value.values() if isinstance(value, dict) else value, strict=True):
            _keep_flags(part, item)
        return
    about = header.get("sub-header")
    if isinstance(about, dict) and "writeable" in about:
        writeable = getattr(getattr(value, "flags", None), "writeable", None)
        if isinstance(writeable, bool):
            about["writeable"] = [writeable]


class DaskSerializer:
    """The manager's serialiser on a Dask worker.

    Parameters
    ----------
    families
        Names of the serialisation families to try, in order.
    """

    def __init__(self, families: Sequence[str] = ("dask", "pickle")) -> None:
        self._families = tuple(families)

    def dumps(self, value: object) -> Serialized:
        """Serialise.

        Raises
        ------
        TypeError
            No family can; the message names the type.
        Exception
            Whatever the type's own serialisation raises.
        """
        if isinstance(value, _UNWRAPPED):
            header, frames = pickle_dumps(value)  # type: ignore[no-untyped-call]
        else:
            header, frames = serialize(value, serializers=self._families, on_error="raise")
            _keep_flags(header, value)
        packed: bytes = msgpack.packb(header, use_bin_type=True)
        return Serialized(packed, [_flat(frame) for frame in frames])

    def loads(self, header: bytes, frames: Sequence[Buffer]) -> object:
        """Rebuild the value; it may alias the frames, which have to be writable for it to be."""
        if header == FOREIGN_HEADER:
            return deserialize_bytes(frames[0])
        # Decoded anew each time: dask takes keys out of the header while it rebuilds collections.
        decoded = msgpack.unpackb(header, raw=False, use_list=False, strict_map_key=False)
        return deserialize(decoded, list(frames))  # type: ignore[no-untyped-call]


class DeviceFamilies(DaskSerializer):
    """How objects of a device move: by ``cuda``, which copies nothing; what it does not know, as bytes."""

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

    def put_together(self, header: Any, frames: Sequence[Any]) -> Any:
        """Return the value on its frames, by the ``cuda`` family."""
        return deserialize(header, list(frames), deserializers=("cuda",))  # type: ignore[no-untyped-call]
