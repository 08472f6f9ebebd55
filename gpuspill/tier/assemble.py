"""Putting values together again, on memory where it is now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuspill.device.arrays import ArrayRegistry
from gpuspill.tier.composites import Composite, DeviceObject, Families
from gpuspill.tier.registry import Book
from gpuspill.tier.units import DeviceMemory, Leaf, Skeleton
from gpuspill.walk import replace

__all__ = ["Builder", "OthersInPlace"]


class OthersInPlace(Exception):
    """Others replaced a unit since it was asked for: ask anew for what is needed now."""


class Builder:
    """Builds what skeletons stand for.

    Parameters
    ----------
    families
        Put composites together; None if there are none.
    book
        Knows the arrays and the composites that are still alive.

    Notes
    -----
    Thread-safe, copies nothing.
    """

    def __init__(self, registry: ArrayRegistry, families: Families | None, book: Book) -> None:
        self._registry = registry
        self._families = families
        self._book = book

    def build(self, value: Any, memories: Mapping[Any, DeviceMemory | DeviceObject]) -> Any:
        """Return the value that a skeleton stands for; anything else itself.

        Parameters
        ----------
        memories
            Where its units are on the device: unit → memory.

        Raises
        ------
        OthersInPlace
            A composite was taken apart meanwhile.
        """
        if type(value) is not Skeleton:
            return value

        def build(item: Any) -> Any:
            if type(item) is Leaf:
                memory = memories[item.unit]
                if isinstance(memory, DeviceObject):
                    return memory.value
                assert item.recipe is not None
                return self._book.array(memory, item.recipe)
            return self._put_together(item, memories) if type(item) is Composite else item

        return replace(value.tree, build)

    def _put_together(self, composite: Composite, memories: Mapping[Any, Any]) -> Any:
        whole = memories.get(composite.unit)
        value = whole.value if isinstance(whole, DeviceObject) else None
        if value is None:
            value = composite.value
        if value is None:
            assert self._families is not None
            assert composite.frames is not None
            if not memories.keys() >= composite.units:
                raise OthersInPlace
            frames = [
                self._registry.rebuild(frame.recipe, memories[frame.unit].allocation)
                if type(frame) is Leaf and frame.recipe is not None
                else frame
                for frame in composite.frames
            ]
            value = self._book.remember(composite, composite.put_together(self._families, frames))
        return value
