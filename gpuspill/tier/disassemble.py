"""Taking values apart: what they have on a device is replaced by what stands for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace as replace_fields
from typing import Any

from gpuspill.classes import is_instance, named
from gpuspill.device.arrays import ArrayDescription, Recipe
from gpuspill.device.external import external_types
from gpuspill.errors import contained
from gpuspill.tier.composites import Composite, DeviceObject
from gpuspill.tier.entry import UnitIntake
from gpuspill.tier.finding import Finder, FoundKind
from gpuspill.tier.registry import Book
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
        Lets go of what is not referenced any more.

    Notes
    -----
    Thread-safe, copies nothing.
    """

    def __init__(self, finder: Finder, book: Book, entry: UnitIntake, settle: Callable[[], None]) -> None:
        self._finder = finder
        self._book = book
        self._entry = entry
        self._settle = settle

    def disassemble(self, value: Any) -> Any:
        """Return a ``Skeleton`` of a value that has something on the device, or the value.

        What fails while it is taken apart stays whole.
        """
        boring = self._boring(value)
        if boring is None:
            return value
        units: dict[Unit, None] = {}
        leaves: dict[int, Leaf | Composite] = {}  # by the identity of what the value keeps alive
        find, externals = self._finder.find, external_types()

        def stand_in(item: Any) -> Any:
            if externals and is_instance(item, *externals):
                return item
            leaf = leaves.get(id(item))
            if leaf is None:
                found = find(item)
                if found is None:
                    return item
                leaf = self._composite(item, units) if found is FoundKind.COMPOSITE else self._array(item, found, units)
                if leaf is None:
                    return item
                leaves[id(item)] = leaf
            return leaf

        try:
            tree = replace(value, stand_in, boring)
        except BaseException as error:
            self._give_back(units)
            if isinstance(error, KeyboardInterrupt):
                raise
            # Looking into a user's types runs their code. Storing must not fail for it: then the
            # value stays whole.
            logger.debug("cannot take a value of type %s apart", named(type(value)), exc_info=True)
            return value
        return self._book.skeleton(tree, tuple(units)) if units else value

    def _boring(self, value: Any) -> set[int] | None:
        with contained:  # what cannot be looked into stays whole
            return self._finder.boring(value)
        return None

    def _array(self, item: Any, found: ArrayDescription, units: dict[Unit, None]) -> Leaf | None:
        """Return what stands for an array or opaque object, now in `units`; None if it stays."""
        unit = (
            self._entry.join_object(item, found)
            if found.recipe is None
            else self._entry.join(item, found, self._finder.stream(item))
        )
        if unit is None:
            return None
        self._count(unit, units)
        return Leaf(unit, found.recipe)

    def _composite(self, item: Any, units: dict[Unit, None]) -> Composite | None:
        known = self._book.join_composite(item)
        if known is not None:
            for unit in known.counted:
                self._count(unit, units)
            return known
        nbytes = self._finder.passive_nbytes(item)
        if nbytes is not None:
            whole = self._entry.join_composite(item, nbytes)
            for unit in whole.counted:
                self._count(unit, units)
            return whole
        apart = self._frames(item, units)
        if apart is None:
            return None
        composite = Composite(*apart)
        self._book.remember(composite, item)
        return composite

    def take_apart(self, memory: DeviceObject) -> None:
        """Let units replace a composite that has to leave. Blocks for what its type does.

        Raises
        ------
        TypeError
            It cannot be taken apart.
        """
        composite, unit = memory.composite, memory.unit
        assert composite is not None
        if composite.frames is None:
            units: dict[Unit, None] = {}
            apart = self._frames(memory.value, units)
            if apart is None:
                raise TypeError(f"a {named(type(memory.value))} cannot be taken apart")
            if not self._book.take_apart(composite, *apart, tuple(units)):
                self._give_back(units)
                return
        memory.value = None  # it would keep the parts from leaving
        self._entry.take_place(unit)

    def _frames(self, item: Any, units: dict[Unit, None]) -> tuple[Any, list[Any]] | None:
        """Take a composite apart: return its header, and its frames with leaves for units."""
        taken = self._finder.take_apart(item)
        if taken is None:
            return None
        header, frames = taken
        leaves: list[Any] = []
        for frame, found in frames:
            if found is None:
                leaves.append(frame)
                continue
            joined = self._entry.join(None, found, self._finder.stream(frame))
            assert joined is not None, f"{found.identity} was borrowed and now cannot be"
            self._count(joined, units)
            leaves.append(Leaf(joined, _frame_recipe(found)))
        return header, leaves

    def _give_back(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.offered = None
        self._book.dead.append((False, tuple(units)))
        self._settle()

    def _count(self, unit: Unit, units: dict[Unit, None]) -> None:
        if unit in units:
            self._book.dead.append((False, (unit,)))  # one reference for each skeleton
        units[unit] = None

    def new_nbytes(self, value: Any) -> int:
        """Bytes of a value's memory on the device that is not known yet, each once."""
        boring = self._boring(value)
        if boring is None:
            return 0
        found: dict[Any, int] = {}
        finder, book, externals = self._finder, self._book, external_types()

        def note(described: ArrayDescription) -> None:
            if not book.knows(described.identity, described.token):
                found[described.identity] = described.identity.nbytes

        def look(item: Any) -> Any:
            if externals and is_instance(item, *externals):
                return item
            described = finder.find(item)
            if described is FoundKind.COMPOSITE:
                nbytes = finder.passive_nbytes(item)
                if book.knows_composite(item):
                    pass
                elif nbytes is not None:
                    found[id(item)] = nbytes
                else:
                    taken = finder.take_apart(item)
                    for _, frame in () if taken is None else taken[1]:
                        if frame is not None:
                            note(frame)
            elif described is not None and described.recipe is not None:
                note(described)
            elif described is not None and not book.knows_object(item):
                found[described.identity] = described.identity.nbytes
            return item

        with contained:
            replace(value, look, boring)
            return sum(found.values())
        return 0  # nothing of it will be known


def _frame_recipe(found: ArrayDescription) -> Recipe:
    """Return how to build a frame: as what it was, or as anything that has the array interface."""
    if found.recipe is not None:
        return found.recipe
    low, _ = found.layout.span
    return Recipe("interface", replace_fields(found.layout, offset=-low))
