"""Who is evicted next.

Order of victims:

1. values whose last known use is over: those that the tier below has a copy of before the others, and among
   equals the one used up first. The few that were used up last and have no copy are spared;
2. values without a known use, least recently used first;
3. those that were spared;
4. values with a known next use, furthest first (Bélády's rule, as far as the future is known);
5. small ones, whatever is known of them, least recently used first.

The future is what the worker's own tasks tell: every task that waits for or is ready to run names
its inputs and has a priority. Rule 1 before rule 2 is what keeps a cyclic scan, the worst case of
plain recency, from thrashing: a block that was just consumed goes before the blocks that wait their
turn. Copies first within rule 1: nothing tells those values apart, and dropping what has a copy costs
nothing, while the others have to be written; in a scan they then stay where they are, and are never
written at all. Some are spared because word to delete what has just been used up is often on its way:
writing it would be for nothing.

A spilled small value takes a block of the disk and a few hundred bytes of memory, and a write as long as that
of one a hundred times its size. Where the limit is so low that small values may be all there is, none counts as small.

A victim that was written and stays after all, because room came otherwise, keeps its turn if its record is kept and
nobody used it meanwhile: it goes first, without another write.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Protocol

__all__ = ["SMALL_NBYTES", "EvictionQueue", "NextUse", "Order", "small_below"]

#: A record takes no less on disk.
SMALL_NBYTES = 4096
#: Small values matter where so many of them would fill the memory.
_MANY = 10_000


def small_below(limit: int | None) -> int:
    """Below how many bytes a value is small, where values may take `limit` bytes in memory."""
    return SMALL_NBYTES if limit is not None and limit >= _MANY * SMALL_NBYTES else 0


# : Position in time of a use; smaller is sooner. Compared element by element, as task priorities
# are.
Order = tuple[float, ...]


class _Furthest:
    """Heap item that sorts the furthest order first. Plain negation would mis-sort tuples of unequal length."""

    __slots__ = ("order", "pid")

    def __init__(self, order: Order, pid: int) -> None:
        self.order = order
        self.pid = pid

    def __lt__(self, other: _Furthest) -> bool:
        return self.order > other.order


class HasTurns(Protocol):
    """A value, as far as it concerns the queue, to which `turns` and `small` belong."""

    turns: int
    small: bool
    nbytes: int


class Recent:
    """Proxies, those first that were put there longest ago.

    Parameters
    ----------
    entries
        Has one for each proxy that is in, and may lose it when the proxy is taken out.

    Notes
    -----
    All values of which nothing is known wait here, so that a place takes eight bytes, and not the hundred of an ordered
    dictionary. A proxy that is put in once more, or taken out, leaves its places behind, and only the last one of them
    counts. How many it has is noted in its entry, as a negative number while it is not in. Amortised O(1).
    """

    def __init__(self, entries: Mapping[int, HasTurns]) -> None:
        self._entries = entries
        self._places: deque[int] = deque()
        self._first: OrderedDict[int, None] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self._first)

    def __contains__(self, pid: int) -> bool:
        entry = self._entries.get(pid)
        return entry is not None and (entry.turns > 0 or pid in self._first)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the proxies in their order. O(n) to begin with."""
        yield from self._first
        entries = self._entries
        live = (pid for pid in reversed(self._places) if (entry := entries.get(pid)) is not None and entry.turns > 0)
        yield from reversed(dict.fromkeys(live))

    def add(self, pid: int, *, first: bool = False) -> None:
        """Put `pid` last, or `first`, whether it is in or not."""
        entry = self._entries[pid]
        if first:
            self.discard(pid)
            self._first[pid] = None
            self._first.move_to_end(pid, last=False)
            return
        turns = entry.turns
        if turns <= 0:
            self._first.pop(pid, None)
            self._count += 1
        entry.turns = abs(turns) + 1
        self._places.append(pid)
        if len(self._places) > 64 and len(self._places) > 2 * self._count:
            self._tidy()

    def discard(self, pid: int) -> bool:
        """Take `pid` out; return whether it was in."""
        entry = self._entries.get(pid)
        if entry is None:
            return False
        if entry.turns > 0:
            self._count -= 1
            if entry.turns == 1 and self._places[0] == pid:
                self._places.popleft()
                entry.turns = 0
            else:
                entry.turns = -entry.turns
            return True
        return self._first.pop(pid, self) is None

    def peek(self) -> int | None:
        """Return the first one."""
        if self._first:
            return next(iter(self._first))
        places = self._places
        while places:
            pid = places[0]
            entry = self._entries.get(pid)
            if entry is not None:
                if entry.turns == 1:
                    return pid
                entry.turns += 1 if entry.turns < 0 else -1
            places.popleft()
        return None

    def forget(self, pid: int) -> None:
        """Take `pid` out without leaving anything behind. O(n) if it would."""
        self.discard(pid)
        if self._entries[pid].turns:
            self._tidy()

    def _tidy(self) -> None:
        kept: deque[int] = deque()
        for pid in reversed(self._places):
            entry = self._entries.get(pid)
            if entry is not None:
                if entry.turns > 0:
                    kept.appendleft(pid)
                entry.turns = 0
        for pid in kept:
            self._entries[pid].turns = 1
        self._places = kept

    def validate(self) -> None:
        """Raise AssertionError if what is noted in the entries is wrong. O(n)."""
        places: dict[int, int] = {}
        for pid in self._places:
            places[pid] = places.get(pid, 0) + 1
        known = {pid: self._entries[pid] for pid in places if pid in self._entries}
        assert {pid: abs(entry.turns) for pid, entry in known.items()} == {pid: places[pid] for pid in known}
        assert self._count == sum(entry.turns > 0 for entry in known.values())
        assert not any(self._entries[pid].turns > 0 for pid in self._first)


class EvictionQueue:
    """The proxies that may be evicted, in the order in which they would be.

    Parameters
    ----------
    entries
        See :class:`Recent`.

    Attributes
    ----------
    patience
        How many are spared of those that were used up last and of which the tier below has no copy.
    small_nbytes
        Bytes of the small ones.

    Notes
    -----
    `add`, `discard`, `touch` are O(1) without a known use and O(log n) with one; `pop` is O(log n)
    amortised: heap items of proxies that left or changed are skipped when they surface, and the
    heap is rebuilt when most of it is such items. Not thread-safe.
    """

    def __init__(self, entries: Mapping[int, HasTurns]) -> None:
        self._spent_clean: OrderedDict[int, None] = OrderedDict()
        self._spent: OrderedDict[int, None] = OrderedDict()
        self._entries = entries
        self._recent = Recent(entries)
        self._small = Recent(entries)
        self.small_nbytes = 0
        self._planned: dict[int, Order] = {}
        self._heap: list[_Furthest] = []
        self._chosen: set[int] = set()
        self.patience = 0

    def __len__(self) -> int:
        return self.large + len(self._small)

    @property
    def large(self) -> int:
        """Number of those that are not small."""
        return len(self._spent_clean) + len(self._spent) + len(self._recent) + len(self._planned)

    def __contains__(self, pid: int) -> bool:
        return pid in self._line(pid) or pid in self._planned or pid in self._spent or pid in self._spent_clean

    def _line(self, pid: int) -> Recent:
        """Return where a proxy is by recency, if it is."""
        entry = self._entries.get(pid)
        return self._small if entry is not None and entry.small else self._recent

    def __iter__(self) -> Iterator[int]:
        """Iterate over the proxies, those of which the same is known in their order."""
        yield from self._spent_clean
        yield from self._spent
        yield from self._recent
        yield from self._planned
        yield from self._small

    def add(
        self,
        pid: int,
        order: Order | None = None,
        *,
        spent: bool = False,
        clean: bool = False,
        first: bool = False,
        small: bool = False,
    ) -> None:
        """Add a proxy, or move it to where it belongs now.

        Parameters
        ----------
        pid
            The proxy.
        order
            Its next known use, if any.
        spent
            It has no next use but had one: it goes before those of which nothing is known.
        clean
            The tier below has a copy. Say so with :meth:`dirty` when that is given up.
        first
            It goes before those to which the same applies, not after them. Makes no difference with a known use.
        small
            It goes last, whatever else is known of it. Its size must not change while it is in.
        """
        self.discard(pid)
        entry = self._entries[pid]
        if entry.small != small:
            self._line(pid).forget(pid)
            entry.small = small
        if small:
            self._small.add(pid, first=first)
            self.small_nbytes += entry.nbytes
            return
        if order is not None:
            self._planned[pid] = order
            heapq.heappush(self._heap, _Furthest(order, pid))
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._planned):
                self._heap = [_Furthest(o, p) for p, o in self._planned.items()]
                heapq.heapify(self._heap)
            return
        if not spent:
            self._recent.add(pid, first=first)
            return
        listed = self._spent_clean if clean else self._spent
        listed[pid] = None
        if first:
            listed.move_to_end(pid, last=False)

    def choose(self, pid: int) -> None:
        """Take out a victim, and note from now on whether it is used."""
        self.discard(pid)
        self._chosen.add(pid)

    def take_out(self, pid: int) -> bool:
        """Take a proxy out for a moment; return whether it was in. What was noted of a victim stays."""
        if pid not in self:
            return False
        self.discard(pid)
        return True

    def untouched(self, pid: int) -> bool:
        """Whether `pid` was chosen and has been neither used nor added nor discarded since. Ends the noting."""
        untouched = pid in self._chosen
        self._chosen.discard(pid)
        return untouched

    def discard(self, pid: int) -> None:
        """Take a proxy out, if it is in."""
        entry = self._entries.get(pid)
        if entry is not None and entry.small:
            if self._small.discard(pid):
                self.small_nbytes -= entry.nbytes
            else:
                self._chosen.discard(pid)
            return
        if self._recent.discard(pid):
            return
        if pid in self._spent_clean:
            del self._spent_clean[pid]
        elif pid in self._spent:
            del self._spent[pid]
        else:
            self._planned.pop(pid, None)
            self._chosen.discard(pid)

    def dirty(self, pid: int) -> None:
        """Note that the tier below has no copy of `pid` any more, if it is in."""
        if pid in self._spent_clean:
            del self._spent_clean[pid]
            self._spent[pid] = None

    def touch(self, pid: int) -> None:
        """Note a use of `pid`. A known next use stays what it is."""
        line = self._line(pid)
        if pid in line:
            line.add(pid)
        elif pid in self._spent_clean or pid in self._spent:
            # Somebody wanted it although no known task did: its future is unknown again.
            self.discard(pid)
            self._recent.add(pid)
        else:
            self._chosen.discard(pid)

    def peek(self, *, small: bool = True) -> int | None:
        """Return the next victim without taking it out; one that is `small` only if asked for."""
        spent = self._spent if len(self._spent) > self.patience else ()
        for listed in (self._spent_clean, spent):
            if listed:
                return next(iter(listed))
        recent = self._recent.peek()
        if recent is not None:
            return recent
        if self._spent:
            return next(iter(self._spent))
        while self._heap:
            item = self._heap[0]
            if self._planned.get(item.pid) == item.order:
                return item.pid
            heapq.heappop(self._heap)
        return self._small.peek() if small else None

    def next_use(self, pid: int) -> Order | None:
        """Return the next known use of a proxy in the queue."""
        return self._planned.get(pid)

    def validate(self, clean: Collection[int] | None = None) -> None:
        """Raise AssertionError if the indices contradict each other, or what is known of copies below."""
        self._recent.validate()
        self._small.validate()
        listed = (self._spent_clean, self._spent, list(self._recent), list(self._small), self._planned)
        assert len(set().union(*listed)) == len(self)
        assert all(self._entries[pid].small for pid in self._small)
        assert not any(self._entries[pid].small for pid in listed[2])
        assert self.small_nbytes == sum(self._entries[pid].nbytes for pid in self._small), self.small_nbytes
        assert not any(pid in self for pid in self._chosen)
        in_heap = {(item.pid, item.order) for item in self._heap}
        assert set(self._planned.items()) <= in_heap
        if clean is not None:
            assert all(pid in clean for pid in self._spent_clean)
            assert not any(pid in clean for pid in self._spent)


class NextUse:
    """For every key, the users (tasks) that are going to read it and when.

    Attributes
    ----------
    users
        When each user reads a key, by key; only keys that somebody is going to read. To be read only.

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
