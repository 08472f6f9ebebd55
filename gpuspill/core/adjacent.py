"""Which pieces of memory to free so that an allocation fits: those that lie side by side.

An allocator whose free memory is in many small pieces has no room for a large one, however much is
free. To free values in the order of their use does not change that soon: they lie anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["Piece", "cheapest_run"]

T = TypeVar("T")

#: Allocators round sizes up to a multiple of this many bytes, at most: so much between two pieces
#: is no one's.
_GAP: Final = 512


class Piece(NamedTuple, Generic[T]):
    """Memory that is free or may be: address, bytes, and what has to leave for it (or None)."""

    address: int
    nbytes: int
    occupant: T | None


def cheapest_run(pieces: Iterable[Piece[T]], nbytes: int) -> list[T]:
    """Return what has to leave so that `nbytes` are free side by side: the fewest bytes.

    Nothing if no pieces that lie side by side are enough. O(n log n).
    """
    run: list[Piece[T]] = []
    first = cost = 0
    best: tuple[int, list[Piece[T]]] | None = None
    for piece in sorted(pieces, key=lambda each: each.address):
        if run and piece.address - (run[-1].address + run[-1].nbytes) >= _GAP:
            run, first, cost = [], 0, 0
        run.append(piece)
        end = piece.address + piece.nbytes
        cost += 0 if piece.occupant is None else piece.nbytes
        while end - run[first].address >= nbytes:
            if best is None or cost < best[0]:
                best = cost, run[first:]
            cost -= 0 if run[first].occupant is None else run[first].nbytes
            first += 1
            if first == len(run):
                run, first = [], 0
                break
    return [] if best is None else [piece.occupant for piece in best[1] if piece.occupant is not None]
