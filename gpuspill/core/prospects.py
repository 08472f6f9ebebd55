"""Which kinds of values have been asked for so far, and which were only ever stored.

Of a value that no task is known to need, what became of others like it is all there is to go by. A graph has blocks
that are read once and deleted, and results that stay until somebody fetches them. Memory fills up with the results; and
a block that waits for the scheduler to hand out the task that reads it is the older one as often as not.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Prospects"]

#: Values of a kind that must have come before anything is concluded from what became of them.
LEAST = 8
#: A kind of which fewer than one in so many were asked for is not expected to be.
ONE_IN = 8
#: When so many of a kind have come, all but the newer half of what is known of it is forgotten, bit by bit.
MOST = 1024


class Prospects:
    """Counts, for each category, how many values came and how many of them somebody has asked for.

    Parameters
    ----------
    capacity
        How many categories to remember. Beyond it everything is forgotten: so many are made up names that never come
        back.

    Notes
    -----
    Not thread-safe; everything is O(1). The category None is none: of values in it nothing is counted or concluded.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._counts: dict[Hashable, list[int]] = {}

    def entered(self, category: Hashable) -> None:
        """A value of this category came."""
        if category is None:
            return
        counts = self._counts.get(category)
        if counts is None:
            if len(self._counts) >= self._capacity:
                self._counts.clear()
            counts = self._counts[category] = [0, 0]
        counts[0] += 1
        if counts[0] >= MOST:
            counts[:] = counts[0] // 2, counts[1] // 2

    def wanted(self, category: Hashable) -> None:
        """Somebody asked for a value of this category for the first time."""
        counts = self._counts.get(category)
        if counts is not None:
            counts[1] += 1

    def poor(self, category: Hashable) -> bool:
        """Whether many values of this category came, and next to none was asked for."""
        counts = self._counts.get(category)
        return counts is not None and counts[0] >= LEAST and counts[1] * ONE_IN < counts[0]
