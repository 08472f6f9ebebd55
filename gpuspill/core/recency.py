"""Values in the order in which they were used last."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Protocol

__all__ = ["HasTurns", "Recent"]


class HasTurns(Protocol):
    """A value in the table of :class:`Recent`. `small` belongs to the eviction queue."""

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
    All values without a known use wait here, so that a place takes eight bytes, and not the
    hundred of an ordered dictionary. A proxy that is put in once more, or taken out, leaves its
    places behind, and only the last one of them counts. How many it has is noted in its entry, as a
    negative number while it is not in. Amortised O(1).
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
