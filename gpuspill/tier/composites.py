"""Values that a library takes apart itself: data frames, sparse matrices, whatever somebody registered.

A *composite* is taken apart by the serialisation family for devices into a header and frames that alias its memory.
The frames are arrays like others, so their memory becomes units. What no family for devices knows but says that its
memory is on the device is *opaque*: it is moved whole, by the families for the host, and its size is what it claims.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from gpuspill.device.port import AllocationId
from gpuspill.manager.ports import Serializer
from gpuspill.tier.units import Leaf, Unit

__all__ = ["Composite", "DeviceObject", "Families"]


class Families(Serializer, Protocol):
    """The serialisation families. As a serialiser: those for the host."""

    def takes_apart(self, cls: type) -> bool:
        """Whether :meth:`take_apart` knows a type. Fast."""
        ...

    def take_apart(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Return a header and frames, which alias the memory of the value or are in host memory. Copies nothing."""
        ...

    def put_together(self, header: Any, frames: Sequence[Any]) -> Any:
        """Return a value on its frames. It may change the header."""
        ...


class Composite:
    """Stands for a composite in a skeleton. Shared by all skeletons of the same object.

    Parameters
    ----------
    header
        What the family returned.
    frames
        What it returned, with leaves in the place of what is on the device.
    """

    __slots__ = ("__weakref__", "_value", "frames", "header")

    def __init__(self, header: Any, frames: Sequence[Leaf | Any]) -> None:
        self.header = header
        self.frames = tuple(frames)
        self._value: weakref.ref[Any] | None = None

    @property
    def units(self) -> set[Unit]:
        """The units of its frames."""
        return {frame.unit for frame in self.frames if type(frame) is Leaf}

    @property
    def value(self) -> Any:
        """The object, while somebody has it; else None."""
        return None if self._value is None else self._value()

    def remember(self, value: Any) -> None:
        """Note the object and that it is in use. What cannot be weakly referenced is made anew at each reading."""
        try:
            self._value = weakref.ref(value)
        except TypeError:
            return
        for unit in self.units:
            unit.arrays[self] = self._value

    def put_together(self, families: Families, frames: Sequence[Any]) -> Any:
        """Return the object anew, on memory where its units are now."""
        return families.put_together(copy.deepcopy(self.header), list(frames))


class DeviceObject:
    """An opaque object while it is on the device: a value of the device's manager.

    Parameters
    ----------
    unit
        What stands for it.
    value
        The object.
    identity
        The memory that it says it looks at.
    """

    __slots__ = ("__weakref__", "identity", "unit", "value")

    def __init__(self, unit: Unit, value: Any, identity: AllocationId) -> None:
        self.unit = unit
        self.value = value
        self.identity = identity
