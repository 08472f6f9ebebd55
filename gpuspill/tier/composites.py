"""Values that a library takes apart itself: data frames, sparse matrices, registered types.

A *composite* is taken apart by the serialisation family for devices into a header and frames that
alias its memory. The frames are arrays like others, so their memory becomes units. That may copy on
the device, and wait for it: cuDF takes it for a write if a program asks for the address of shared
memory. So a composite that tells its size without that is one unit until it has to leave. Then it
is taken apart, by the thread that makes it leave: units of its memory take the place of its own,
which stands for nothing from then on.

What no family for devices knows but says that its memory is on the device is *opaque*: it is moved
whole, by the families for the host, and its size is what it claims.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from gpuspill.device.port import AllocationId
from gpuspill.manager.ports import Serializer
from gpuspill.tier.units import Leaf, Unit

__all__ = ["Composite", "DeviceObject", "Families", "TakenApart"]


class Families(Serializer, Protocol):
    """The serialisation families. As a serialiser: those for the host."""

    def takes_apart(self, cls: type) -> bool:
        """Whether :meth:`take_apart` knows a type. Fast."""
        ...

    def take_apart(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Return a header and frames, which alias the value or are in host memory. No copy."""
        ...

    def put_together(self, header: Any, frames: Sequence[Any]) -> Any:
        """Return a value on its frames. It may change the header."""
        ...

    def passive_nbytes(self, value: Any) -> int | None:
        """Return the size that a value tells from outside, in bytes; None if it tells none."""
        ...


class Composite:
    """Stands for a composite in a skeleton. Shared by all skeletons of the same object.

    Parameters
    ----------
    header
        What the family returned.
    frames
        What it returned, with leaves in the place of what is on the device. None while it is whole.
    unit
        What stands for the whole, if it is or was.
    """

    __slots__ = ("__weakref__", "_value", "frames", "header", "unit")

    def __init__(self, header: Any, frames: Sequence[Leaf | Any] | None, unit: Unit | None = None) -> None:
        self.header = header
        self.frames = None if frames is None else tuple(frames)
        self.unit = unit
        self._value: weakref.ref[Any] | None = None

    @property
    def counted(self) -> tuple[Unit, ...]:
        """The units that a skeleton counts as references to."""
        return tuple(self.units) if self.unit is None else (self.unit,)

    @property
    def units(self) -> set[Unit]:
        """The units of its frames."""
        return {frame.unit for frame in self.frames or () if type(frame) is Leaf}

    @property
    def value(self) -> Any:
        """The object, while it is alive; else None."""
        return None if self._value is None else self._value()

    def remember(self, value: Any) -> None:
        """Note the object, now in use. One without weak references is made anew at each read."""
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
    """An opaque object, or a whole composite, on the device: a value of its manager.

    Parameters
    ----------
    unit
        What stands for it.
    value
        The object; None of a composite that was taken apart.
    identity
        The memory that it says it looks at.
    composite
        What stands for it in skeletons, if it is a composite.
    """

    __slots__ = ("__weakref__", "composite", "identity", "unit", "value")

    def __init__(self, unit: Unit, value: Any, identity: AllocationId, composite: Composite | None = None) -> None:
        self.unit = unit
        self.value = value
        self.identity = identity
        self.composite = composite


class TakenApart:
    """What is left of a composite's unit when others replaced it: a value of no bytes."""

    __slots__ = ("__weakref__",)
