"""Making values of bytes, and letting what they have on a device become known there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from gpuspill.errors import cut_loose
from gpuspill.manager.ports import Observer, Serializer
from gpuspill.manager.slots import Slot
from gpuspill.manager.transaction import Metadata

__all__ = ["Decoder", "Disperse"]

Disperse: TypeAlias = Callable[[Hashable, object, int], tuple[object, int] | None]
"""``disperse(key, value, nbytes)`` takes over what a value of so many bytes has on a device.

It returns what to keep in the value's place, which never leaves memory, and the bytes that this
takes there; None if the value has nothing on a device. Called in the thread that decoded it,
without a lock.
"""


class Decoder:
    """Decodes on behalf of a manager.

    Attributes
    ----------
    disperse
        Takes over the device memory of values that came as bytes; None if there is no device tier.
    """

    def __init__(self, metadata: Metadata, serializer: Serializer, observer: Observer | None) -> None:
        self._metadata = metadata
        self._serializer = serializer
        self._observer = observer
        self.disperse: Disperse | None = None

    def decode(self, slot: Slot, header: bytes, frames: Sequence[memoryview]) -> tuple[object, int | None]:
        """Return the value of a slot, or what stands for it with the bytes that this takes. Blocks.

        Raises
        ------
        MemoryError
            There is no room for it. If that is on a device the message names the key.
        Exception
            Whatever else the serialiser raises.
        """
        clock = self._metadata.clock
        start = clock()
        value = self._load(slot, header, frames)
        seconds = clock() - start
        disperse = self.disperse if slot.device_nbytes else None
        dispersed = None if disperse is None else disperse(slot.key, value, slot.sizeof)
        with self._metadata:
            self._metadata.totals["deserialize"] += seconds
        if self._observer is not None:
            self._observer("deserialize", seconds, "seconds")
        return (value, None) if dispersed is None else dispersed

    def _load(self, slot: Slot, header: bytes, frames: Sequence[memoryview]) -> object:
        try:
            return self._serializer.loads(header, frames)
        except MemoryError as error:
            if not slot.device_nbytes:
                raise
            problem = f"{type(error).__name__}: {error}"
            # The traceback has what was decoded so far, on the device.
            cut_loose(error)
        raise MemoryError(
            f"the value of {slot.key!r}, which came as bytes, takes {slot.device_nbytes:,} bytes on the device, and "
            f"there is no room for it ({problem}). Use smaller values, or tasks with fewer of them"
        )
