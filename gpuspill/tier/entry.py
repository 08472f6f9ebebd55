"""How memory that a task allocated becomes a unit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from gpuspill.device.arrays import ArrayDescription
from gpuspill.device.port import AllocationId, Device
from gpuspill.manager import ProxifyManager
from gpuspill.tier.composites import Composite, DeviceObject, TakenApart
from gpuspill.tier.registry import Book
from gpuspill.tier.units import DeviceMemory, Unit

__all__ = ["UnitIntake"]


class UnitIntake:
    """Gives memory on a device its unit: the one that it has, or a new one in the device's manager.

    Parameters
    ----------
    book
        Knows the units there are.

    Notes
    -----
    Thread-safe, copies nothing. Several threads may come with the same memory at once: all get the
    same unit. Each unit that is returned has one reference more, which is the caller's.
    """

    def __init__(self, device: Device, book: Book, manager: ProxifyManager) -> None:
        self._device = device
        self._book = book
        self._manager = manager

    def join(self, array: Any, found: ArrayDescription, stream: tuple[int, Any] | None = None) -> Unit | None:
        """Return the unit of an array; None if its memory cannot be moved.

        Parameters
        ----------
        array
            The array, which counts as in use from now on. None for the memory of a composite, which
            the storing thread has in hand.
        found
            Its description.
        stream
            On which it is used, with what keeps it; see :meth:`Finder.stream
            <gpuspill.tier.finding.Finder.stream>`.
        """
        unit = self._book.join(found.identity, found.token, found.owner)
        if unit is not None:
            self._note(unit, array, found, stream)
            return unit
        try:
            allocation = self._device.borrow(found.identity, found.owner, found.token)
        except (ValueError, TypeError):
            return None
        new = self._book.create(found.identity.nbytes, estimated=found.estimated)
        memory = DeviceMemory(new, allocation, found.owner, found.token)
        self._note(new, array, found, stream)  # in use: it stays here until the walk is over
        self._book.watch(memory)
        # Before it can be found by others. No lock is held, so another thread may do the same.
        self._manager.store(new, memory, new.nbytes)
        unit = self._book.enter(memory, unless_known=True)
        if unit is not new:
            self._withdraw(new)
            self._note(unit, array, found, stream)
        return unit

    def join_object(self, item: Any, found: ArrayDescription) -> Unit:
        """Return the unit of an opaque object."""
        unit = self._book.join_object(item)
        if unit is None:
            new = self._book.create(found.identity.nbytes, estimated=True)
            memory = DeviceObject(new, item, found.identity)
            self._manager.store(new, memory, new.nbytes)
            unit = self._book.enter_object(memory, unless_known=True)
            if unit is not new:
                self._withdraw(new)
        return unit

    def join_composite(self, value: Any, nbytes: int) -> Composite:
        """Return what stands for a composite that stays whole until it has to leave."""
        unit = self._book.create(nbytes, estimated=True)
        new = Composite(None, None, unit)
        self._manager.store(
            unit, DeviceObject(unit, value, AllocationId(self._device.identity, 0, nbytes), new), nbytes
        )
        composite = self._book.enter_composite(new, value)
        if composite is not new:
            self._withdraw(unit)
        return composite

    def take_place(self, unit: Unit) -> None:
        """Let the parts of a unit, which are known, leave in its place."""
        self.invalidate(unit.parts)
        self._manager.store(unit, TakenApart(), 0, spillable=False)
        # As what was used up: they are next, as it was.
        self._manager.uses.expect(unit.parts, (float("inf"),), unit)
        self._manager.uses.drop(unit.parts, unit)
        if not unit.references:  # given up meanwhile
            with suppress(KeyError):
                self._manager.discard(unit)

    def invalidate(self, units: Iterable[Unit]) -> None:
        """Count the memory that the caller has in hand as units, wherever they were."""
        try:
            self._manager.invalidate(units)
        finally:
            for unit in units:
                unit.offered = None

    def _withdraw(self, unit: Unit) -> None:
        self._book.give_up(unit)
        self._manager.discard(unit)

    def _note(self, unit: Unit, array: Any, found: ArrayDescription, stream: tuple[int, Any] | None) -> None:
        if stream is not None:
            unit.streams[stream[0]] = stream[1]
        # A buffer that is its own owner would seem in use for ever.
        if array is not None and array is not found.owner:
            assert found.recipe is not None
            self._book.note(unit, found.recipe, array)
