"""Which references to a value come from inside the value.

The parent of a tree node, or a list that contains itself, is referred to by what it refers to.
Counting references alone takes such a value for held for ever. So what it refers to is followed, as
Python's garbage collector does: an object that has more references than come from inside is held
from outside, and so is all that it leads to.
"""

from __future__ import annotations

import gc
import sys
from sys import getrefcount
from types import CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, Final, NamedTuple

__all__ = ["Knots", "knots"]

#: How many objects of one value are looked at.
_MANY: Final = 50_000


class Knots(NamedTuple):
    """What was found of a value.

    Attributes
    ----------
    references
        References to the value from inside it. 0 if something that leads to it is held from
        outside.
    sure
        Whether everything in it was looked at. If not, there may be more.
    """

    references: int
    sure: bool


def knots(value: object, many: int = _MANY) -> Knots:
    """Look for references to a value from inside it. Runs none of its code; changes nothing.

    Takes about a microsecond for each object, without a lock: other threads may change the value
    meanwhile, for which they have to hold it.
    """
    found, referents, sure = _inside(value, many)
    counts = dict.fromkeys(found, 0)
    for targets in referents.values():
        for target in targets:
            if target in counts:
                counts[target] += 1
    root = id(value)
    held = [ident for ident in _held(found, counts) if ident != root]
    seen = set(held)
    while held:
        ident = held.pop()
        for target in referents[ident]:
            if target == root:
                return Knots(0, sure)
            if target in referents and target not in seen:
                seen.add(target)
                held.append(target)
    return Knots(counts[root], sure)


def _held(found: dict[int, Any], counts: dict[int, int]) -> list[int]:
    """Return the objects with more references than `found` and this function account for."""
    alone = {0: object()}
    ((_, unheld),) = [(ident, getrefcount(item)) for ident, item in alone.items()]
    return [ident for ident, item in found.items() if getrefcount(item) > unheld + counts[ident]]


def _inside(value: object, many: int) -> tuple[dict[int, Any], dict[int, list[int]], bool]:
    """Return the objects inside a value and what each refers to, and whether that is all."""
    found: dict[int, Any] = {id(value): value}
    referents: dict[int, list[int]] = {}
    sure = True
    left = [value]
    while left:
        item = left.pop()
        parts, known = _parts(item)
        sure = sure and known
        referents[id(item)] = list(map(id, parts))
        for part in parts:
            if id(part) in found or issubclass(type(part), type | ModuleType):
                continue
            if not (gc.is_tracked(part) or _array_of_objects(part)):
                continue
            if len(found) >= many:
                return found, referents | {ident: [] for ident in found.keys() - referents.keys()}, False
            found[id(part)] = part
            left.append(part)
    return found, referents, sure


def _array_of_objects(item: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(item) is getattr(numpy, "ndarray", None) and bool(item.dtype.hasobject)


def _parts(item: Any) -> tuple[list[Any], bool]:
    """Return what an object refers to, and whether that is all that may lead on."""
    cls = type(item)
    if cls is FunctionType:
        # Not its module's variables, which lead to everything.
        return [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__], True
    if cls is FrameType or cls is GeneratorType or cls is CoroutineType:
        return [], False  # nor those of a function that runs
    if _array_of_objects(item):
        # The collector is not told what is in it. What a record of an array has cannot be had
        # without copies.
        return (list(item.flat), True) if item.dtype.kind == "O" else ([], False)
    return gc.get_referents(item), True
