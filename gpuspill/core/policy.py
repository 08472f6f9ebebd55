"""Eviction policies: in which order values leave memory.

:class:`EvictionPolicy` is the port. :class:`NextUsePolicy` is what is used if nothing else is
configured. Its order of victims:

1. dead values, whose last known use is over: those that the tier below has a copy of before the
   others, and among equals the one that died first. The few that died last and have no copy are
   spared;
2. values without a known use, least recently used first;
3. those that were spared;
4. values with a known next use, furthest first (Bélády's rule, as far as the future is known).

The worker's own tasks tell the future: each task that waits for its inputs or is ready to run names
them and has a priority. Rule 1 before rule 2 keeps a cyclic scan, the worst case of plain recency,
from thrashing: a block that was just consumed goes before the blocks that wait their turn. Copies
go first within rule 1: nothing else tells those values apart, dropping a copied value costs
nothing, and the others have to be written. In a scan the others then stay where they are, and are
never written. Some dead values are spared because they are often deleted a moment later.

Small values are no business of a policy: they go after all others
(:mod:`gpuspill.core.eviction_queue`).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias

from gpuspill.core.recency import HasTurns, Recent

__all__ = ["EvictionPolicy", "HasSize", "MakePolicy", "NextUsePolicy", "Order"]

#: Position in time of a use; smaller is sooner. Compared element by element, as task priorities
#: are.
Order: TypeAlias = tuple[float, ...]


class HasSize(Protocol):
    """A value, as far as a policy may look at it."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""


class EvictionPolicy(ABC):
    """The order in which the values leave that may leave now.

    A policy holds the numbers of values (`vid`). A number is never used again.

    Attributes
    ----------
    grace
        How many dead values without a copy below should stay for a while, because they may be
        deleted at once. Set by the worker from its number of threads. A policy may ignore it.

    Notes
    -----
    All methods are called under the lock of the store. They must be fast, O(log n) or better
    amortised, must not block and must not raise. They need no lock of their own. A policy that
    raises, or names no value although there are some, is not asked again: values leave in the order
    of their last use, and an error is logged.

    :class:`gpuspill.testing.policy_tests.PolicyTests` checks a policy.
    """

    grace: int = 0

    @abstractmethod
    def insert(
        self, vid: int, order: Order | None = None, *, dead: bool = False, clean: bool = False, first: bool = False
    ) -> None:
        """Add a value, which is not in.

        Parameters
        ----------
        vid
            Its number.
        order
            When it is used next, if that is known.
        dead
            Uses of it were known, and none is left.
        clean
            The tier below has a copy, so that evicting it costs nothing.
        first
            It was a victim before and has not been used since. It should go before those about
            which the same is known.
        """

    @abstractmethod
    def discard(self, vid: int) -> bool:
        """Take a value out; return whether it was in."""

    @abstractmethod
    def touch(self, vid: int) -> None:
        """A value that is in was used just now."""

    @abstractmethod
    def first(self) -> int | None:
        """Return the value that goes next, without taking it out; None if there is none."""

    @abstractmethod
    def __contains__(self, vid: object) -> bool:
        """Whether a value is in."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many are in. O(1)."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Iterate over those that are in, in any order."""

    def dirty(self, vid: int) -> None:  # noqa: B027 - optional
        """The tier below has no copy any more of a value that is in. Nothing, by default."""

    def forget(self, vid: int) -> None:
        """Take a value out for good, with all that refers to it, if it is in."""
        self.discard(vid)

    def validate(
        self, clean: Callable[[int], bool] | None = None, order: Callable[[int], Order | None] | None = None
    ) -> None:
        """Raise AssertionError if the policy contradicts itself, or what it should know. For tests.

        Parameters
        ----------
        clean
            Whether the tier below has a copy of a value; None if that is not known.
        order
            When a value is used next; None if that is not known of any.
        """
        listed = list(self)
        assert len(set(listed)) == len(listed) == len(self), (listed, len(self))
        assert all(vid in self for vid in listed), listed
        assert (self.first() is None) == (not listed), (self.first(), listed)


#: Makes the policy of one tier of memory. It gets the table of all values by number, to be read
#: only.
MakePolicy: TypeAlias = Callable[[Mapping[int, HasSize]], EvictionPolicy]


class _Furthest:
    """Heap item that sorts the furthest order first; negating tuples would mis-sort them."""

    __slots__ = ("order", "vid")

    def __init__(self, order: Order, vid: int) -> None:
        self.order = order
        self.vid = vid

    def __lt__(self, other: _Furthest) -> bool:
        return self.order > other.order


class NextUsePolicy(EvictionPolicy):
    """The order at the head of this module.

    Parameters
    ----------
    entries
        See :class:`~gpuspill.core.recency.Recent`.

    Notes
    -----
    `insert`, `discard`, `touch` are O(1) without a known use and O(log n) with one; `first` is
    O(log n) amortised: heap items of values that left or changed are skipped when they surface, and
    the heap is rebuilt when most of it is such items.
    """

    def __init__(self, entries: Mapping[int, HasTurns]) -> None:
        self._dead_clean: OrderedDict[int, None] = OrderedDict()
        self._dead: OrderedDict[int, None] = OrderedDict()
        self._recent = Recent(entries)
        self._planned: dict[int, Order] = {}
        self._heap: list[_Furthest] = []

    def __len__(self) -> int:
        return len(self._dead_clean) + len(self._dead) + len(self._recent) + len(self._planned)

    def __contains__(self, vid: object) -> bool:
        return isinstance(vid, int) and (
            vid in self._recent or vid in self._planned or vid in self._dead or vid in self._dead_clean
        )

    def __iter__(self) -> Iterator[int]:
        """Iterate over the values; those with the same known use come in their order."""
        yield from self._dead_clean
        yield from self._dead
        yield from self._recent
        yield from self._planned

    def insert(
        self, vid: int, order: Order | None = None, *, dead: bool = False, clean: bool = False, first: bool = False
    ) -> None:
        """Add a value; see :meth:`EvictionPolicy.insert`. A known use overrules `first`."""
        if order is not None:
            self._planned[vid] = order
            heapq.heappush(self._heap, _Furthest(order, vid))
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._planned):
                self._heap = [_Furthest(o, v) for v, o in self._planned.items()]
                heapq.heapify(self._heap)
            return
        if not dead:
            self._recent.add(vid, first=first)
            return
        listed = self._dead_clean if clean else self._dead
        listed[vid] = None
        if first:
            listed.move_to_end(vid, last=False)

    def discard(self, vid: int) -> bool:
        """Take a value out; return whether it was in."""
        if self._recent.discard(vid):
            return True
        for listed in (self._planned, self._dead_clean, self._dead):
            if vid in listed:
                del listed[vid]
                return True
        return False

    def forget(self, vid: int) -> None:
        """Take a value out, with its stale places in the line of the recent ones."""
        self.discard(vid)
        self._recent.forget(vid)

    def dirty(self, vid: int) -> None:
        """Note that the tier below has no copy of a value any more."""
        if vid in self._dead_clean:
            del self._dead_clean[vid]
            self._dead[vid] = None

    def touch(self, vid: int) -> None:
        """Note a use. A known next use stays what it is."""
        if vid in self._planned:
            return
        # A dead value that is used has an unknown future again.
        self._dead_clean.pop(vid, None)
        self._dead.pop(vid, None)
        self._recent.add(vid)

    def first(self) -> int | None:
        """Return the value that goes next."""
        dead = self._dead if len(self._dead) > self.grace else ()
        for listed in (self._dead_clean, dead):
            if listed:
                return next(iter(listed))
        recent = self._recent.peek()
        if recent is not None:
            return recent
        if self._dead:
            return next(iter(self._dead))
        while self._heap:
            item = self._heap[0]
            if self._planned.get(item.vid) == item.order:
                return item.vid
            heapq.heappop(self._heap)
        return None

    def validate(
        self, clean: Callable[[int], bool] | None = None, order: Callable[[int], Order | None] | None = None
    ) -> None:
        """Raise AssertionError if the indices contradict each other or the known uses."""
        super().validate(clean, order)
        self._recent.validate()
        in_heap = {(item.vid, item.order) for item in self._heap}
        assert set(self._planned.items()) <= in_heap
        if clean is not None:
            assert all(map(clean, self._dead_clean))
            assert not any(map(clean, self._dead))
        if order is not None:
            assert all(self._planned.get(vid) == order(vid) for vid in self)
