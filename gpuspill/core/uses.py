"""When each key is going to be read, as far as that is known."""

from __future__ import annotations

import heapq
from collections.abc import Hashable

from gpuspill.core.policy import Order

__all__ = ["NextUse"]


class NextUse:
    """For every key, the users (tasks) that are going to read it and when.

    Attributes
    ----------
    users
        When each user reads a key, by key; only keys that a task is going to read. To be read only.

    Notes
    -----
    A key is known here before its value is, and after. O(log n) amortised in the number of users of
    a key: a user that is done is dropped from the set at once, from the heap when it surfaces or
    when most of the heap is such items. Not thread-safe.
    """

    def __init__(self) -> None:
        self.users: dict[Hashable, dict[Hashable, Order]] = {}
        self._heaps: dict[Hashable, list[tuple[Order, int, Hashable]]] = {}
        self._counter = 0  # breaks ties: users may not be comparable with each other

    def __len__(self) -> int:
        return len(self.users)

    def expect(self, key: Hashable, user: Hashable, order: Order) -> None:
        """`user` is going to read `key` at `order`. Replaces what was said before of the two."""
        users = self.users.setdefault(key, {})
        if users.get(user) == order:
            return
        users[user] = order
        heap = self._heaps.setdefault(key, [])
        if len(heap) > 64 and len(heap) > 2 * len(users):
            # Most are of users that are done, behind one that takes its time.
            heap[:] = [(other, self._count(), name) for name, other in users.items()]
            heapq.heapify(heap)
        else:
            heapq.heappush(heap, (order, self._count(), user))

    def _count(self) -> int:
        self._counter += 1
        return self._counter

    def drop(self, key: Hashable, user: Hashable) -> bool:
        """`user` has read `key`, or never will. Returns whether that was expected."""
        users = self.users.get(key)
        if users is None or user not in users:
            return False
        del users[user]
        if not users:
            del self.users[key]
            del self._heaps[key]
        return True

    def next(self, key: Hashable) -> Order | None:
        """When `key` is read next, or ``None`` if nothing is known."""
        users = self.users.get(key)
        if not users:
            return None
        heap = self._heaps[key]
        while True:
            order, _, user = heap[0]
            if users.get(user) == order:
                return order
            heapq.heappop(heap)
