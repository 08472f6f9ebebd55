"""Which memory belongs to which unit, and what lingers.

An allocation is known by (device, address, size) and by a token that lives exactly as long as the
memory. Addresses are used again, so what is known of memory that died is worth nothing: each entry
refers weakly to its token, and memory with another token is the same only as long as the entry's
own is certain to be kept.

Memory *lingers* when its unit has left the device, or is gone altogether, while a view on it
is alive: its bytes are where they were. They count against the limit, and if the unit is wanted
again it is put on them without copying.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

from gpuspill import forks
from gpuspill.device.arrays import ArrayRegistry, Recipe
from gpuspill.device.port import Allocation, AllocationId, Device
from gpuspill.tier.composites import Composite, DeviceObject, TakenApart
from gpuspill.tier.units import AllocationRef, Dead, DeviceMemory, Skeleton, Unit

__all__ = ["Book"]

#: So many arrays may be noted for a unit before those that died are looked for.
_MANY_ARRAYS = 32
#: So many places that units have left are remembered.
_MANY_VACATED = 4096


@dataclass(slots=True, eq=False)
class _BookedUnit:
    unit: Unit
    watch: AllocationRef
    memory: weakref.ref[DeviceMemory]


class _Revival:
    """Brings a unit back. An object: a closure would cost the garbage collector five."""

    __slots__ = ("_book", "_unit", "_watch")

    def __init__(self, book: Book, unit: Unit, watch: AllocationRef) -> None:
        self._book = book
        self._unit = unit
        self._watch = watch

    def __call__(self) -> DeviceMemory | None:
        return self._book.revive(self._unit, self._watch)


class Book:
    """Knows the units of one device. Its manager's :class:`gpuspill.manager.slots.Custody`.

    Attributes
    ----------
    dead
        What skeletons let go of.
    skeletons
        How many there are.
    taken_apart
        How many units stand for nothing, since others took their place.
    departures
        How often a unit left the device.
    estimated_nbytes
        Bytes of the units whose size is estimated, wherever they are.

    Notes
    -----
    Thread-safe. Its lock is held for microseconds, and never around a call of a manager, the device
    or a library. It is re-entrant because the garbage collector may run any finaliser, which
    may come here, in the middle of it. Weak references that die, and skeletons, take no lock: they
    put themselves in a queue that :meth:`settle` empties.
    """

    def __init__(self, device: Device, registry: ArrayRegistry) -> None:
        self._device = device
        self._registry = registry
        self._lock = forks.lock()
        self._numbers = itertools.count(1)
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._known: dict[AllocationId, _BookedUnit] = {}
        self._left: dict[AllocationId, _BookedUnit] = {}
        self._departed: deque[_BookedUnit] = deque()
        self._gone: deque[Any] = deque()
        self._objects: weakref.WeakValueDictionary[int, DeviceObject] = weakref.WeakValueDictionary()
        self._composites: weakref.WeakValueDictionary[int, Composite] = weakref.WeakValueDictionary()
        self.dead: Dead = deque()
        self._vacated: deque[AllocationId] = deque(maxlen=_MANY_VACATED)
        self.departures = 0
        self.skeletons = 0
        self.taken_apart = 0
        self.estimated_nbytes = 0
        # What is reported for an object to which only its DeviceObject refers; it differs between
        # releases of Python.
        alone = DeviceObject(Unit(0, 0), object(), AllocationId("", 0, 0))
        self._unheld = getrefcount(alone.value)
        self._unkept: int | None = None

    # -- units -------------------------------------------------------------------------------------

    def create(self, nbytes: int, *, estimated: bool = False) -> Unit:
        """Return a new unit without references."""
        unit = Unit(next(self._numbers), nbytes, estimated=estimated)
        with self._lock:
            self._units[unit.number] = unit
            self.estimated_nbytes += nbytes if estimated else 0
        return unit

    def give_up(self, unit: Unit) -> None:
        """Forget a unit that never came into force."""
        with self._lock:
            self.estimated_nbytes -= unit.nbytes if unit.estimated else 0

    def unit(self, number: int) -> Unit:
        """Return a unit by its number. KeyError if it is gone."""
        with self._lock:
            return self._units[number]

    def skeleton(self, tree: Any, units: tuple[Unit, ...]) -> Skeleton:
        """Return a skeleton, to which the references to `units` go that the caller has."""
        with self._lock:
            self.skeletons += 1
        return Skeleton(tree, units, self.dead)

    def knows(self, identity: AllocationId, token: object) -> bool:
        """Whether :meth:`join` would find a unit."""
        with self._lock:
            entry = self._known.get(identity)
            if entry is None or not entry.unit.references:
                return False
            found = entry.watch()
            if found is None:
                return False
            # An address is used again when its memory is gone. It is not gone if the token says so,
            # if it is the port's own, or while the manager keeps it.
            return found is token or isinstance(found, Allocation) or entry.memory() is not None

    def join(self, identity: AllocationId, token: object, keeper: object = None) -> Unit | None:
        """Return the unit of a live allocation, with one reference more; None without one.

        Parameters
        ----------
        identity, token
            As in a description of an array on it.
        keeper
            What the caller has in hand that keeps the memory. If the unit has left, it is put back
            on it by that.
        """
        with self._lock:
            if not self.knows(identity, token):
                return None
            entry = self._known[identity]
            entry.unit.references += 1
            if entry.memory() is None:
                entry.unit.offered = keeper
            return entry.unit

    def enter(self, memory: DeviceMemory, *, unless_known: bool = False) -> Unit:
        """Note where a unit is.

        Parameters
        ----------
        unless_known
            Whether it is new. Another thread may have entered the same allocation meanwhile: then
            that unit stays. The unit in force gets a reference.

        Returns
        -------
        Unit
            The unit of the allocation.
        """
        watch = memory.watch or self.watch(memory)
        with self._lock:
            if unless_known:
                known = self.join(memory.identity, memory.token)
                if known is not None:
                    return known
                memory.unit.references += 1
            self._known[memory.identity] = _BookedUnit(memory.unit, watch, weakref.ref(memory))
            left = self._left.get(memory.identity)
            if left is not None and left.watch is not watch:  # else it has left again already
                del self._left[memory.identity]
        return memory.unit

    def watch(self, memory: DeviceMemory) -> AllocationRef:
        """Notice from now on when the memory goes, or leaves in use; before it can be evicted."""
        keeps = memory.token is memory.keeper
        try:
            watch = AllocationRef(memory.token, self._gone.append, memory.identity, keeps=keeps)
        except TypeError:
            # It cannot be watched. What is known is given up when the unit leaves, which it does
            # not while anything else refers to what keeps it.
            watch = AllocationRef(memory, self._gone.append, memory.identity, keeps=False)
            if self._unkept is None:
                self._unkept = self._count_references(memory)
        memory.watch = watch
        return watch

    # -- composites and opaque objects -------------------------------------------------------------

    def knows_composite(self, value: Any) -> bool:
        """Whether :meth:`join_composite` would find it."""
        with self._lock:
            known = self._composites.get(id(value))
            return known is not None and known.value is value and all(unit.references > 0 for unit in known.counted)

    def join_composite(self, value: Any) -> Composite | None:
        """Return what stands for a known composite; its units get one reference more."""
        with self._lock:
            if not self.knows_composite(value):
                return None
            known = self._composites[id(value)]
            for unit in known.counted:
                unit.references += 1
            return known

    def enter_composite(self, composite: Composite, value: Any) -> Composite:
        """Note a whole composite; returns the one in force, with one reference more."""
        with self._lock:
            known = self.join_composite(value)
            if known is not None:
                return known
            assert composite.unit is not None
            composite.unit.references += 1
            composite.remember(value)
            self._composites[id(value)] = composite
        return composite

    def take_apart(self, composite: Composite, header: Any, frames: Sequence[Any], parts: tuple[Unit, ...]) -> bool:
        """Note the parts of a composite. Its unit takes over the caller's references to them.

        False if no skeleton has it any more.
        """
        unit = composite.unit
        assert unit is not None
        with self._lock:
            if not unit.references:
                return False
            self.estimated_nbytes -= unit.nbytes
            self.taken_apart += 1
            unit.parts = parts
            unit.nbytes, unit.estimated = 0, False
            composite.header, composite.frames = header, tuple(frames)
            value = composite.value
            if value is not None:
                composite.remember(value)  # they are in use while it is alive
        return True

    def remember(self, composite: Composite, value: Any) -> Any:
        """Note the object of a composite; returns the one to use, as threads may race."""
        with self._lock:
            existing = composite.value
            if existing is None:
                composite.remember(value)
                self._composites[id(value)] = composite
                existing = value
        return existing

    def knows_object(self, value: Any) -> bool:
        """Whether :meth:`join_object` would find a unit."""
        with self._lock:
            memory = self._objects.get(id(value))
            return memory is not None and memory.value is value and memory.unit.references > 0

    def join_object(self, value: Any) -> Unit | None:
        """Return the unit of an opaque object, with one reference more; None if there is none."""
        with self._lock:
            if not self.knows_object(value):
                return None
            unit = self._objects[id(value)].unit
            unit.references += 1
            return unit

    def enter_object(self, memory: DeviceObject, *, unless_known: bool = False) -> Unit:
        """Note which object a unit is; as :meth:`enter`."""
        with self._lock:
            if unless_known:
                known = self.join_object(memory.value)
                if known is not None:
                    return known
                memory.unit.references += 1
            self._objects[id(memory.value)] = memory
        return memory.unit

    # -- arrays ------------------------------------------------------------------------------------

    def note(self, unit: Unit, recipe: Recipe, array: Any) -> Any:
        """Remember an array on a unit; returns the one to use, as threads may race."""
        with self._lock:
            if unit.arrays:  # else it need not be hashed
                ref = unit.arrays.get(recipe)
                existing = None if ref is None else ref()
                if existing is not None:
                    return existing
            if len(unit.arrays) >= _MANY_ARRAYS:
                unit.arrays = {known: ref for known, ref in unit.arrays.items() if ref() is not None}
            with suppress(TypeError):
                unit.arrays[recipe] = weakref.ref(array)
        return array

    def array(self, memory: DeviceMemory, recipe: Recipe) -> Any:
        """Return an array on a unit on the device: the earlier one, if it is alive."""
        if memory.unit.arrays:
            ref = memory.unit.arrays.get(recipe)
            array = None if ref is None else ref()
            if array is not None:
                return array
        array = self._registry.rebuild(recipe, memory.allocation)
        # A buffer that is its own owner would seem in use for ever.
        return array if array is memory.keeper else self.note(memory.unit, recipe, array)

    # -- custody: called under the manager's lock --------------------------------------------------

    def held(self, memory: DeviceMemory | DeviceObject | TakenApart) -> bool:
        """Whether an array on it is in use, or its memory is kept where that cannot be noticed."""
        if type(memory) is DeviceObject:
            return memory.value is not None and getrefcount(memory.value) > self._unheld
        if type(memory) is not DeviceMemory:
            return False
        if memory.unit.in_use:
            return True
        if self._unkept is None or memory.watch is None or memory.watch() is not memory:
            return False
        return getrefcount(memory.keeper) > self._unkept

    def _count_references(self, like: DeviceMemory) -> int:
        """Return the report for a keeper that only its memory refers to, in `like`'s ways."""
        keeper = object()
        alone = DeviceMemory(like.unit, self._device.borrow(like.identity, keeper, keeper), keeper, keeper)
        del keeper
        return getrefcount(alone.keeper)

    def leave(self, memory: DeviceMemory | DeviceObject | TakenApart) -> Callable[[], DeviceMemory | None] | None:
        """Note that a unit leaves the device; return what brings it back if its memory lingers."""
        if type(memory) is not DeviceMemory:
            return None
        watch, unit = memory.watch, memory.unit
        if watch is None:
            return None
        self._departed.append(_BookedUnit(unit, watch, weakref.ref(memory)))
        self._vacated.append(memory.identity)
        self.departures += 1
        return _Revival(self, unit, watch)

    def revive(self, unit: Unit, watch: AllocationRef) -> DeviceMemory | None:
        """Put a unit that has left on the memory that it had, if that is still there."""
        token = watch()
        keeper = token if watch.keeps else unit.offered
        if token is None or keeper is None:
            return None
        allocation = keeper if isinstance(keeper, Allocation) else self._device.borrow(watch.identity, keeper, token)
        memory = DeviceMemory(unit, allocation, keeper, token)
        self.enter(memory)
        return memory

    # -- what happened meanwhile -------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether there is something for :meth:`settle` to do."""
        return bool(self.dead or self._departed or self._gone)

    def settle(self) -> list[Unit]:
        """Take into account what died or left; returns the units without any reference."""
        unused = []
        with self._lock:
            while self.dead:
                whole, units = self.dead.popleft()
                self.skeletons -= whole
                for unit in units:
                    unit.references -= 1
                    if not unit.references:
                        unused.append(unit)
                        self.estimated_nbytes -= unit.nbytes if unit.estimated else 0
                        if unit.parts:
                            self.taken_apart -= 1
                            self.dead.append((False, unit.parts))
            while self._departed:
                entry = self._departed.popleft()
                identity = entry.watch.identity
                known = self._known.get(identity)
                back = known is not None and known.watch is not entry.watch and known.memory() is not None
                if entry.watch() is not None and not back:
                    self._left[identity] = entry
            while self._gone:
                watch = self._gone.popleft()
                for entries in (self._known, self._left):
                    found = entries.get(watch.identity)
                    if found is not None and found.watch is watch:
                        del entries[watch.identity]
        return unused

    @property
    def lingering_nbytes(self) -> int:
        """Bytes of memory that lingers. Usually there is none."""
        if not self._left:
            return 0
        with self._lock:
            return sum(
                watch.identity.nbytes for watch in (entry.watch for entry in self._left.values()) if watch() is not None
            )

    def places(self) -> dict[AllocationId, Unit]:
        """Return where units are on the device. O(n)."""
        with self._lock:
            return {identity: entry.unit for identity, entry in self._known.items() if entry.memory() is not None}

    def vacated(self, since: int) -> list[AllocationId]:
        """Return the last places that units have left since so many departures."""
        count = min(self.departures - since, len(self._vacated))
        return list(self._vacated)[len(self._vacated) - count :]

    def identified(self, memory: DeviceMemory | DeviceObject) -> bool:
        """Whether the allocation of a unit on the device is known as that unit's. For tests."""
        with self._lock:
            if isinstance(memory, DeviceObject) and memory.composite is not None:
                return memory.composite.unit is memory.unit
            if isinstance(memory, DeviceObject):
                return self._objects.get(id(memory.value)) is memory
            entry = self._known.get(memory.identity)
            return (
                entry is not None
                and entry.unit is memory.unit
                and any(entry.watch() is known for known in (memory.token, memory))
            )
