"""Taking values apart: what they have on a device is replaced by what stands for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace as replace_fields
from typing import Any

from gpuspill.device.arrays import ArrayDescription, Recipe
from gpuspill.device.external import external_types
from gpuspill.tier.book import Book
from gpuspill.tier.composites import Composite
from gpuspill.tier.entry import Entry
from gpuspill.tier.finding import Finder
from gpuspill.tier.units import Leaf, Unit
from gpuspill.walk import replace

__all__ = ["Disassembler"]

logger = logging.getLogger("gpuspill")


class Disassembler:
    """Takes values apart.

    Parameters
    ----------
    finder
        Finds what an object has on the device.
    book
        Knows the units and the composites there are.
    entry
        Gives memory its unit.
    settle
        Lets go of what nobody refers to any more.

    Notes
    -----
    Thread-safe, copies nothing.
    """

    def __init__(self, finder: Finder, book: Book, entry: Entry, settle: Callable[[], None]) -> None:
        self._finder = finder
        self._book = book
        self._entry = entry
        self._settle = settle

    def disassemble(self, value: Any) -> Any:
        """Return a :class:`~gpuspill.tier.units.Skeleton` of a value that has something on the device, or the value.

        What fails while it is taken apart stays whole.
        """
        walk = _Walk(self._finder, self._book, self._entry)
        try:
            tree = replace(value, walk.stand_in)
        except BaseException as error:
            self._book.dead.append((False, tuple(walk.units)))
            self._settle()
            if not isinstance(error, Exception):
                raise
            # Looking into somebody's types runs their code. Storing must not fail for it: then the value stays whole.
            logger.debug("cannot take a value of type %s apart", type(value).__qualname__, exc_info=True)
            return value
        return self._book.skeleton(tree, tuple(walk.units)) if walk.units else value

    def new_nbytes(self, value: Any) -> int:
        """Bytes of the memory that a value has on the device and that is not known yet, each allocation once."""
        found: dict[Any, int] = {}
        finder, book, externals = self._finder, self._book, external_types()

        def note(described: ArrayDescription) -> None:
            if not book.knows(described.identity):
                found[described.identity] = described.identity.nbytes

        def look(item: Any) -> Any:
            if externals and isinstance(item, externals):
                return item
            if finder.is_composite(item):
                if not book.knows_composite(item):
                    taken = finder.take_apart(item)
                    for _, frame in () if taken is None else taken[1]:
                        if frame is not None:
                            note(frame)
                return item
            described = finder.describe(item)
            if described is not None and described.recipe is not None:
                note(described)
            elif described is not None and not book.knows_object(item):
                found[described.identity] = described.identity.nbytes
            return item

        try:
            replace(value, look)
        except Exception:
            return 0  # nothing of it will be known
        return sum(found.values())


class _Walk:
    """One value being taken apart.

    Attributes
    ----------
    units
        What it has, with one reference to each.
    """

    __slots__ = ("_book", "_entry", "_externals", "_finder", "_leaves", "units")

    def __init__(self, finder: Finder, book: Book, entry: Entry) -> None:
        self._finder = finder
        self._book = book
        self._entry = entry
        self._externals = external_types()
        self._leaves: dict[int, Leaf | Composite] = {}  # by the identity of what the value keeps alive
        self.units: dict[Unit, None] = {}

    def stand_in(self, item: Any) -> Any:
        """Return what stands for an object; itself if it stays as it is."""
        if self._externals and isinstance(item, self._externals):
            return item
        leaf = self._leaves.get(id(item))
        if leaf is None:
            leaf = self._composite(item) if self._finder.is_composite(item) else self._array(item)
            if leaf is None:
                return item
            self._leaves[id(item)] = leaf
        return leaf

    def _array(self, item: Any) -> Leaf | None:
        found = self._finder.describe(item)
        if found is None:
            return None
        unit = self._entry.join_object(item, found) if found.recipe is None else self._entry.join(item, found)
        if unit is None:
            return None
        self._count(unit)
        return Leaf(unit, found.recipe)

    def _composite(self, item: Any) -> Composite | None:
        known = self._book.join_composite(item)
        if known is not None:
            for unit in known.units:
                self._count(unit)
            return known
        taken = self._finder.take_apart(item)
        if taken is None:
            return None
        header, frames = taken
        leaves: list[Any] = []
        for frame, found in frames:
            if found is None:
                leaves.append(frame)
                continue
            joined = self._entry.join(None, found)
            assert joined is not None, f"{found.identity} was borrowed and now cannot be"
            self._count(joined)
            leaves.append(Leaf(joined, _frame_recipe(found)))
        composite = Composite(header, leaves)
        self._book.remember(composite, item)
        return composite

    def _count(self, unit: Unit) -> None:
        if unit in self.units:
            self._book.dead.append((False, (unit,)))  # one reference for each skeleton
        self.units[unit] = None


def _frame_recipe(found: ArrayDescription) -> Recipe:
    """Return how to build a frame: as what it was, or as anything that has the array interface."""
    if found.recipe is not None:
        return found.recipe
    low, _ = found.layout.span
    return Recipe("interface", replace_fields(found.layout, offset=-low))
