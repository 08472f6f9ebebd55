"""Answering requests for values without decoding them, and without holding the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed.protocol.serialize import Serialized, serialize
from distributed.utils import offload

from gpuspill.classes import is_instance
from gpuspill.core.policy import Order
from gpuspill.distributed.attachment import Attachment
from gpuspill.distributed.internals import forget_lost, recover
from gpuspill.distributed.lost import LostValue
from gpuspill.distributed.serialization import FOREIGN_HEADER, DaskSerializer
from gpuspill.distributed.sizes import measure
from gpuspill.distributed.task_inputs import granted, in_turns, in_turns_later
from gpuspill.distributed.wire import Form, SendBuffer, Slot, Wire, type_name, wrap
from gpuspill.errors import DataLostError, ManagerClosed, cut_loose
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.manager.ports import Encoded
from gpuspill.storage.base import Lend, frame_nbytes, in_memory
from gpuspill.tier import DeviceTier, Skeleton

__all__ = ["Parcel", "Receiver", "pack"]

#: Bytes of a header up to which it is decoded on the event loop.
_ON_LOOP_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Receiver:
    """What the other side of a connection can do with what it is sent.

    Attributes
    ----------
    form
        What it gets for a value that is not in memory.
    by_system
        Whether only the system looks at the bytes on this side: then they may lie in memory that is
        a file's.
    same_process
        Whether it is in this process, and gets the objects themselves.
    takes_device_memory
        Whether what is on a device goes to its device without coming to the host's memory.
    serializers
        The families that it takes; None for distributed's own choice.
    substitute
        Makes what it gets for a value that is lost for good; None if it cannot be given anything.
    peer
        Tells it from others.
    """

    form: Form
    by_system: bool = False
    same_process: bool = False
    takes_device_memory: bool = False
    serializers: Collection[str] | None = None
    substitute: Callable[[DataLostError], LostValue] | None = None
    peer: Hashable = field(default=None, compare=False)

    @property
    def borrows(self) -> bool:
        """Whether a record's bytes may lie in the file's memory; decoded ones may not."""
        return self.by_system and self.form != "value"

    @property
    def keeps_bytes(self) -> bool:
        """Whether it wants what is on a device as bytes, which it decodes when they are needed."""
        return self.form == "wire" and not (self.same_process or self.takes_device_memory)


class Parcel:
    """The answer to one request, and what has to be given back when it is written.

    Parameters
    ----------
    window
        Bounds what is read from disk for sending.
    tier
        Of the device, if there is one.
    order
        How urgent it is, where it has to wait for room on the device.

    Attributes
    ----------
    values
        What to send, by key.
    """

    def __init__(
        self, manager: ProxifyManager, window: SendBuffer, tier: DeviceTier | None = None, order: Order = ()
    ) -> None:
        self._tier = tier
        self._order = order
        self._manager = manager
        self._window = window
        self._pins: Admission | None = None
        self._slot: Slot | None = None
        self.values: dict[Any, Any] = {}

    async def fill(
        self,
        keys: Iterable[Any],
        receiver: Receiver,
        type_of: Callable[[Any], type | None],
    ) -> None:
        """Pin `keys` in their turn, and get ready what to send. Release after a failure.

        Parameters
        ----------
        keys
            Those that are unknown are left out.
        receiver
            For whom.
        type_of
            Returns the type of the value of a key, if it is known.

        Raises
        ------
        DataLostError
            One of them is lost.
        """
        manager = self._manager
        keys = list(keys)
        missing = manager.admission.missing_nbytes(keys)
        if missing:
            self._slot = await self._window.take(missing, receiver.peer)
        # Only now: a request that waits keeps nothing in memory.
        self._pins = await in_turns(manager.admission.pin_in_pieces(keys))
        if self._slot is not None:
            self._slot.resize(manager.admission.missing_nbytes(keys))
            if not receiver.borrows:
                self._window.buffered()
        exported = await asyncio.wrap_future(
            manager.batch.export(self._pins, lend=Lend.MEMORY if receiver.borrows else None)
        )
        for key, value in exported.items():
            if type(value) is not Encoded:
                self.values[key] = value
            elif receiver.form == "value" or value.header == FOREIGN_HEADER:
                # Decoded for the receiver alone: putting it into the store would push something
                # else out. Of a record that distributed's own buffer wrote, only its own reader
                # makes sense.
                try:
                    self.values[key] = await self._decoded(value, receiver)
                except (ManagerClosed, MemoryError):
                    raise
                except Exception as error:
                    # Who asks would ask again without an end.
                    raise DataLostError(
                        f"the value of {key!r} cannot be made from its record: {error!r}", key
                    ) from error
            elif receiver.form == "serialized" and len(value.header) > _ON_LOOP_NBYTES:
                self.values[key] = await offload(wrap, value, receiver.form, type_of(key))
            else:
                self.values[key] = wrap(value, receiver.form, type_of(key))
        if self._tier is not None:
            if receiver.keeps_bytes:
                await self._wrap(self._tier)
            elif not receiver.same_process:
                await self._turn_into_bytes(self._tier, receiver.serializers)
            self.values = await asyncio.wrap_future(self._tier.resolve_later(self.values))

    async def _turn_into_bytes(self, tier: DeviceTier, serializers: Collection[str] | None) -> None:
        """Serialise what has left the device, one by one: it may not have room for all.

        One is brought back, when there is room for it, and may leave again as soon as there are
        bytes of it. That the others are not pinned meanwhile may make some of them leave, which are
        then sent in the same way.
        """
        while True:
            away = (k for k, value in self.values.items() if type(value) is Skeleton and not tier.is_ready(value))
            key = next(away, None)
            if key is None:
                return
            self.values[key] = await self._brought(
                tier, self.values[key], partial(_serialized, serializers=serializers)
            )

    async def _wrap(self, tier: DeviceTier) -> None:
        """Serialise all that was on the device, one by one, for a receiver of bytes.

        Its device may not have room for all of them either.
        """
        for key, value in list(self.values.items()):
            if type(value) is Skeleton:
                self.values[key] = await self._brought(tier, value, partial(_as_wire, tier, nbytes=value.device_nbytes))

    async def _brought(self, tier: DeviceTier, skeleton: Skeleton, convert: Callable[[Any], Any]) -> Any:
        """Return what `convert` makes, off the loop, of a value, brought back if it fits."""
        admission = None if tier.is_ready(skeleton) else tier.admit(None, [skeleton], order=self._order)
        try:
            if admission is not None:
                await granted(admission)
            found = await asyncio.wrap_future(tier.resolve_later({None: skeleton}, admission))
            return await offload(convert, found.pop(None))
        finally:
            if admission is not None:
                admission.release()

    async def _decoded(self, encoded: Encoded, receiver: Receiver) -> Any:
        """Return the value of bytes, or what stands for it if the device lacks room."""
        manager, tier = self._manager, self._tier
        if receiver.same_process or tier is None or not encoded.device_nbytes:
            return await asyncio.wrap_future(manager.batch.decode(encoded))
        admission = tier.admit(None, (), encoded.device_nbytes, order=self._order)
        try:
            await granted(admission)
            value = await asyncio.wrap_future(manager.batch.decode(encoded))
            return await offload(_serialized, value, receiver.serializers)
        finally:
            admission.release()

    def release(self) -> None:
        """It is written, or never will be. Idempotent."""
        self.values = {}
        if self._slot is not None:
            self._slot.release()
            self._slot = None
        if self._pins is not None:
            in_turns_later(self._pins.release_in_pieces())


def _serialized(value: Any, serializers: Collection[str] | None) -> Serialized:
    """Return what stands for a value in a message, on the network the same as the value itself."""
    return Serialized(*serialize(value, serializers=serializers))  # type: ignore[no-untyped-call]


def _as_wire(tier: DeviceTier, value: Any, nbytes: int) -> Any:
    """Return a value that looks at `nbytes` on a device as bytes; itself if it cannot.

    Then distributed finds that out once more, and tells the receiver.
    """
    try:
        header, frames = DaskSerializer().dumps(value, tier.overlaps(value))
    except Exception as error:
        cut_loose(error)
        return value
    # It may be a small part of the memory that it looks at.
    device_nbytes = min(nbytes, sum(map(frame_nbytes, frames)))
    return Wire(
        Encoded(header, [in_memory(frame) for frame in frames], measure(value), device_nbytes), type_name(type(value))
    )


async def pack(
    worker: Any,
    attachment: Attachment,
    keys: Collection[Any],
    receiver: Receiver,
    type_of: Callable[[Any], type | None],
    order: Order = (),
) -> Parcel:
    """Get ready what is there of `keys`, as urgent as `order`.

    A key that is lost is left out, and the scheduler has been told when this returns. If nothing
    can recompute it and the receiver can be given a substitute, it gets that in its place.
    """
    store, substitute = attachment.store, receiver.substitute
    lost: dict[Any, Any] = {}
    while True:
        parcel = Parcel(store.manager, attachment.window, store.tier, order)
        has_lost_values = store.has_lost_values  # a key may go while its value is read
        try:
            wanted = (key for key in keys if key not in lost)
            await parcel.fill(wanted, receiver, type_of)
            parcel.values |= lost
            if has_lost_values:
                for key in [key for key, value in parcel.values.items() if is_instance(value, LostValue)]:
                    value = parcel.values.pop(key)
                    if substitute is not None:
                        parcel.values[key] = substitute(value.error)
                    else:
                        forget_lost(worker, key)
            return parcel
        except DataLostError as error:
            parcel.release()
            if await recover(worker, error.key):
                continue
            if substitute is not None:
                lost[error.key] = substitute(error)
            else:
                forget_lost(worker, error.key)
        except BaseException:
            parcel.release()
            raise
