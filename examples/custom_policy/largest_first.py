"""An eviction policy: the largest value leaves first.

Fewer writes make the same room. The price: a large value that is used often is read again
and again.
"""

import heapq
from collections.abc import Iterator, Mapping

from gpuspill.core.policy import EvictionPolicy, HasSize, Order


class LargestFirst(EvictionPolicy):
    """Evicts by size alone.

    Parameters
    ----------
    values
        All values of the tier by number. They have a size in bytes.
    """

    def __init__(self, values: Mapping[int, HasSize]) -> None:
        self._values = values
        self._inside: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int]] = []  # also of values that are no longer inside

    def insert(
        self,
        vid: int,
        order: Order | None = None,
        *,
        dead: bool = False,
        clean: bool = False,
        first: bool = False,
    ) -> None:
        """Add a value. Its next use and its copies make no difference here."""
        item = self._inside[vid] = (-self._values[vid].nbytes, vid)
        if len(self._heap) > 2 * len(self._inside) + 64:
            self._heap = list(self._inside.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, item)

    def discard(self, vid: int) -> bool:
        """Take a value out; return whether it was in."""
        return self._inside.pop(vid, None) is not None

    def touch(self, vid: int) -> None:
        """Note a use, which makes no difference here."""

    def first(self) -> int | None:
        """Return the largest value."""
        while self._heap:
            item = self._heap[0]
            if self._inside.get(item[1]) == item:
                return item[1]
            heapq.heappop(self._heap)
        return None

    def __contains__(self, vid: object) -> bool:
        return vid in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self) -> Iterator[int]:
        return iter(self._inside)
