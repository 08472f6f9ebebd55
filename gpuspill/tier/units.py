"""What stands for values and for memory.

A *unit* is one allocation, wherever its bytes are; it is what the device's manager moves, once,
however many arrays look at it. A *skeleton* is a value in which every array on the device is
replaced by a *leaf*: the unit, and how to build the array on it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from gpuspill.device.arrays import Recipe
from gpuspill.device.port import Allocation, AllocationId
from gpuspill.ending import Ending

__all__ = ["AllocationRef", "Dead", "DeviceMemory", "Internal", "Leaf", "Prepared", "Skeleton", "Unit"]

#: Whether a skeleton died, and units to be counted down by the next caller.
Dead: TypeAlias = "deque[tuple[bool, tuple[Unit, ...]]]"


class Internal:
    """A manager's key of gpuspill's own, hidden from listings. Compares by identity.

    Attributes
    ----------
    called
        What messages call it, before its number: they are read by people who do not know its class.
    """

    __slots__ = ("__weakref__", "number")
    called = "internal value"

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<{self.called} {self.number}>"

    def __reduce__(self) -> Any:
        # Errors name keys, and travel.
        return str, (repr(self),)


class Unit(Internal):
    """One allocation, wherever its bytes are: a key of the device's manager.

    Attributes
    ----------
    nbytes
        Size in bytes.
    estimated
        Whether the size is what an unknown object claims.
    references
        How many skeletons have it. Once none has, it is gone for good.
    arrays
        The arrays on it that are somewhere in use, by what builds them: recipes, and composites.
    users
        The keys whose next use the device's manager knows.
    offered
        What keeps its memory although it has left, while a value on that is being stored.
    streams
        Streams on which it is used that may not be in order with the default one: what keeps each,
        or an event after which its memory is filled, or None if there is neither.
    parts
        The units that took its place: it was a composite, which was taken apart when it had to
        leave.
    """

    __slots__ = ("arrays", "estimated", "nbytes", "offered", "parts", "references", "streams", "users")
    called = "device allocation"

    def __init__(self, number: int, nbytes: int, *, estimated: bool = False) -> None:
        super().__init__(number)
        self.nbytes = nbytes
        self.estimated = estimated
        self.references = 0
        self.users: set[Any] = set()
        self.offered: Any = None
        self.streams: dict[int, Any] = {}
        self.parts: tuple[Unit, ...] = ()
        self.arrays: dict[Any, weakref.ref[Any]] = {}

    @property
    def in_use(self) -> bool:
        """Whether an array on it is referenced. Takes no lock."""
        if self.arrays:
            for ref in list(self.arrays.values()):
                if ref() is not None:
                    return True
        return False


class AllocationRef(weakref.ref[Any]):
    """A weak reference to what lives as long as an allocation, which knows the allocation.

    Attributes
    ----------
    identity
        The allocation.
    keeps
        Whether to refer to it keeps the allocation.
    """

    __slots__ = ("identity", "keeps")

    identity: AllocationId
    keeps: bool

    def __new__(
        cls, token: Any, callback: Callable[[Any], object], identity: AllocationId, *, keeps: bool
    ) -> AllocationRef:
        """Make one; TypeError if `token` cannot be weakly referenced."""
        return super().__new__(cls, token, callback)

    def __init__(self, token: Any, callback: Callable[[Any], object], identity: AllocationId, *, keeps: bool) -> None:
        super().__init__(token, callback)  # type: ignore[call-arg]
        self.identity = identity
        self.keeps = keeps


class DeviceMemory:
    """The bytes of a unit while they are on the device: a value of the device's manager.

    Nothing but the manager refers to it for long. Arrays refer to what keeps the allocation alive,
    not to this.

    Parameters
    ----------
    unit
        Whose bytes.
    allocation
        Where they are.
    keeper
        What keeps the allocation alive.
    token
        What lives exactly as long as the allocation; default: the keeper.
    """

    __slots__ = ("__weakref__", "_ending", "_held", "identity", "unit", "watch")

    def __init__(self, unit: Unit, allocation: Allocation, keeper: object, token: object = None) -> None:
        self.unit = unit
        self.identity = allocation.identity
        self.watch: AllocationRef | None = None
        # With the last reference to what keeps it the memory is freed.
        self._held: list[Any] = [allocation, keeper, keeper if token is None else token]
        self._ending = Ending(partial(allocation.device.let_go, self._held))

    @property
    def allocation(self) -> Allocation:
        """Where they are."""
        allocation: Allocation = self._held[0]
        return allocation

    @property
    def keeper(self) -> Any:
        """What keeps the allocation alive."""
        return self._held[1]

    @property
    def token(self) -> Any:
        """What lives exactly as long as the allocation."""
        return self._held[2]


class Leaf:
    """Stands for an array in a skeleton, or, without a recipe, for an opaque object.

    No dataclass: a walk would look into it.
    """

    __slots__ = ("recipe", "unit")

    def __init__(self, unit: Unit, recipe: Recipe | None) -> None:
        self.unit = unit
        self.recipe = recipe


class Skeleton:
    """A value without its arrays.

    Parameters
    ----------
    tree
        The value, with leaves in the places of arrays.
    units
        The units of these leaves, each once; the skeleton counts as one reference to each.
    dead
        Where they go when it dies.
    """

    __slots__ = ("__weakref__", "_ending", "_units", "tree")

    def __init__(self, tree: Any, units: tuple[Unit, ...], dead: Dead) -> None:
        self.tree = tree
        self._units = units
        self._ending = Ending(partial(dead.append, (True, units)))

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that it needs now: those that took the place of one are among them."""
        parts = [part for unit in self._units if unit.parts for part in unit.parts]
        return tuple(dict.fromkeys([*self._units, *parts])) if parts else self._units

    @property
    def device_nbytes(self) -> int:
        """Bytes of its units."""
        return sum(unit.nbytes for unit in self.units)

    def __reduce__(self) -> Any:
        raise TypeError("what stands for a value on the device cannot be pickled; resolve it first")


class Prepared:
    """A value that was taken apart before it is stored, by a thread that has time for that.

    Parameters
    ----------
    found
        Its skeleton; the value itself if it has nothing on the device.
    new_nbytes
        Bytes of its memory on the device that were not known before, each allocation once.
    """

    __slots__ = ("found", "new_nbytes", "value")

    def __init__(self, value: Any, found: Any, new_nbytes: int) -> None:
        self.value = value
        self.found = found
        self.new_nbytes = new_nbytes
