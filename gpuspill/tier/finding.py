"""What of a value is on a device."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any, Literal

from gpuspill.classes import attribute_of, named
from gpuspill.device.arrays import ArrayAdapter, ArrayDescription, ArrayRegistry
from gpuspill.device.port import Device
from gpuspill.errors import cut_loose
from gpuspill.tier.composites import Families
from gpuspill.walk import is_container, kinds

__all__ = ["Finder", "FoundKind"]

logger = logging.getLogger("gpuspill")


class FoundKind(Enum):
    """What is found instead of an array."""

    COMPOSITE = "composite"


class Finder:
    """Finds what objects have on a device. Keeps nothing of them, and moves nothing.

    Parameters
    ----------
    families
        Know composite types; None if there are none.

    Notes
    -----
    Thread-safe. Runs the code of other libraries, and holds no lock meanwhile.
    """

    def __init__(self, device: Device, registry: ArrayRegistry, families: Families | None) -> None:
        self._device = device
        self._registry = registry
        self._families = families

    def boring(self, value: Any) -> set[int] | None:
        """Return identities of types in a value whose objects have nothing on the device.

        None if that are all of them.
        """
        found = kinds(value)
        boring = {ident for ident, cls in found.items() if not self._concerns(cls)}
        return None if len(boring) == len(found) else boring

    def may_concern(self, value: Any) -> bool:
        """Whether a value may have something on the device, as far as its type tells. Fast."""
        return is_container(value) or self._concerns(type(value))

    def _concerns(self, cls: type) -> bool:
        adapter = self._registry.adapter(cls)
        if adapter is not None:
            return adapter.on_device
        if attribute_of(cls, "__cuda_array_interface__") is not None:
            return True
        return self._families is not None and self._families.takes_apart(cls)

    def find(self, item: Any) -> ArrayDescription | Literal[FoundKind.COMPOSITE] | None:
        """Describe an array on the device, or say that an object is for the families to take apart.

        None for anything else, and for what cannot be moved here.
        """
        adapter = self._registry.adapter(type(item))
        if adapter is None and self._families is not None and self._families.takes_apart(type(item)):
            # A family finds a type by what it derives from, and puts that together again.
            return None if self._registry.derives(type(item)) else FoundKind.COMPOSITE
        return self._describe(item, adapter)

    def _describe(self, item: Any, adapter: ArrayAdapter | None) -> ArrayDescription | None:
        if adapter is not None and not adapter.on_device:
            return None
        found = self._registry.describe(item)
        if found is None or found.identity.device != self._device.identity:
            return None
        # Without a recipe it is opaque: only the families can move it.
        return None if found.recipe is None and self._families is None else found

    def stream(self, item: Any) -> tuple[int, Any] | None:
        """Return a stream to wait for before an array is copied, and what keeps it.

        If nothing does, it is there now, as the array is: an event of it, or None if there can be
        none.
        """
        found = self._registry.stream(item)
        if found is None or found[1] is not None:
            return found
        return found[0], self._device.produced(found[0])

    def passive_nbytes(self, composite: Any) -> int | None:
        """Return the size of a composite, in bytes, as far as known from outside."""
        return None if self._families is None else self._families.passive_nbytes(composite)

    def take_apart(self, composite: Any) -> tuple[Any, list[tuple[Any, ArrayDescription | None]]] | None:
        """Return the header and the frames of a composite, described where they are on the device.

        None if none is, or if one cannot be moved.
        """
        assert self._families is not None
        try:
            header, frames = self._families.take_apart(composite)
            described = [(frame, self._describe(frame, self._registry.adapter(type(frame)))) for frame in frames]
            for _, found in described:
                if found is not None:
                    self._device.borrow(found.identity, found.owner)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.debug("cannot take a value of type %s apart: %r", named(type(composite)), error)
            cut_loose(error)
            return None
        if not any(found is not None for _, found in described):
            return None
        if any(found is None and self._registry.is_on_device(frame) for frame, found in described):
            return None
        return header, described
