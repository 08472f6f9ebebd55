"""Arrays of one value that look at the same bytes: they share memory where it is sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from gpuspill.device.arrays import ArrayDescription, ArrayRegistry, Recipe
from gpuspill.device.port import AllocationId, Device, Layout
from gpuspill.tier.finding import Finder
from gpuspill.walk import replace

__all__ = ["overlapping", "reductions"]

H = TypeVar("H", bound=Hashable)


def overlapping(arrays: Iterable[tuple[H, Layout]]) -> list[tuple[int, int, list[H]]]:
    """Return which arrays of an allocation overlap, with the first byte and the end of all.

    Left out: arrays that reach into no other; and those that have less than half of the bytes that
    they reach over, such as two columns of a wide matrix. To send these bytes would take more than
    twice what the arrays take.
    """
    found: list[tuple[int, int, int, list[H]]] = []
    for array, layout in sorted(arrays, key=lambda each: each[1].span):
        low, high = layout.span
        nbytes = min(layout.nbytes, high - low)
        if found and low < found[-1][1]:
            start, end, total, members = found.pop()
            found.append((start, max(end, high), total + nbytes, [*members, array]))
        elif nbytes:
            found.append((low, high, nbytes, [array]))
    return [
        (low, high, members) for low, high, nbytes, members in found if len(members) > 1 and high - low <= 2 * nbytes
    ]


def reductions(value: Any, finder: Finder, registry: ArrayRegistry, device: Device) -> dict[int, Any]:
    """Return what to pickle for arrays of a value that share bytes, by their identity.

    Each is made from an array of bytes, which those that belong together have in common. The value
    must stay while this is used. Arrays whose library has no way for this are left out.
    """
    boring = finder.boring(value)
    if boring is None:
        return {}
    arrays: dict[int, tuple[Any, ArrayDescription]] = {}

    def look(item: Any) -> Any:
        found = finder.find(item)
        if isinstance(found, ArrayDescription) and found.recipe is not None:
            arrays[id(item)] = item, found
        return item

    replace(value, look, boring)
    groups: dict[tuple[AllocationId, str], list[tuple[int, Layout]]] = {}
    for ident, (_, found) in arrays.items():
        assert found.recipe is not None
        groups.setdefault((found.identity, found.recipe.adapter), []).append((ident, found.layout))
    made: dict[int, Any] = {}
    for (_, adapter), members in groups.items():
        for low, high, idents in overlapping(members) if len(members) > 1 else ():
            first = arrays[idents[0]][1]
            memory = device.borrow(first.identity, first.owner, first.token)
            whole = registry.rebuild(Recipe(adapter, Layout(low, (high - low,), (1,), "|u1", 1)), memory)
            for ident in idents:
                way = registry.reduce_view(whole, arrays[ident][1], low)
                if way is not None:
                    made[ident] = way
    return made
