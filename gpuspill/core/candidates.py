"""Which values may be evicted, in which order, and which are left alone for a while.

A value is a *candidate* when it is in memory, not pinned, nothing moves, no other value keeps
it alive, and it is not unspillable. Two kinds of candidates are set aside until they are tried
again:

- **held** ones: something outside refers to the value, so evicting it would free nothing;
- **blocked** ones: the last spill failed for a reason that may pass (disk full, quota, I/O error).

Setting them aside is what keeps one bad value from stopping the others. A blocked one stays so when
it is used meanwhile: that makes no room on disk.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable

from gpuspill.core.eviction_queue import EvictionQueue
from gpuspill.core.ledger import FEW_KEYS, Entry, Ledger
from gpuspill.core.policy import MakePolicy, Order
from gpuspill.core.residency import Tier
from gpuspill.core.uses import NextUse

__all__ = ["Candidates"]


class Candidates:
    """Every candidate, in exactly one of three places: the queue, held, or blocked.

    Parameters
    ----------
    held
        ``held(pid)`` tells whether anything outside refers to a value in memory. Must be fast and
        must not call back.
    small_below
        ``small_below(limit)`` tells below how many bytes a value is small.
    policy
        Makes the eviction policy from the table of values; None:
        :class:`~gpuspill.core.policy.NextUsePolicy`.
    failed
        Called once, with what such a policy has done wrong.

    Attributes
    ----------
    queue
        Those that may go now.
    uses
        Which keys are going to be read, and when.
    relieved
        How often records went and left room on disk.

    Notes
    -----
    Not thread-safe. O(log n) or better, amortised, but for :meth:`validate`.
    """

    def __init__(
        self,
        ledger: Ledger,
        held: Callable[[int], bool],
        small_below: Callable[[int | None], int] = lambda _: 0,
        policy: MakePolicy | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._small_below = small_below
        self._small = 0
        self.queue = EvictionQueue(ledger.entries, policy, failed)
        self.uses = NextUse()
        self.relieved = 0
        self._keys = ledger.keys
        self._entries = ledger.entries
        self._is_held = held
        # To find the first of a plain dictionary takes a look at each one before it that has gone.
        self._held: OrderedDict[int, None] = OrderedDict()
        self._blocked: OrderedDict[int, None] = OrderedDict()
        self._freed = 0  # bytes of records that went since values are blocked, and for which none was tried again

    @property
    def held(self) -> int:
        """Number of values that are set aside because they were held."""
        return len(self._held)

    @property
    def blocked(self) -> int:
        """Number of values that are set aside because they could not be written."""
        return len(self._blocked)

    @property
    def set_aside(self) -> int:
        """Number of values that :meth:`retry` would consider again."""
        return len(self._held) + len(self._blocked)

    def __bool__(self) -> bool:
        """Whether there are any, set aside or not."""
        return bool(self.queue or self._held or self._blocked)

    # -- where a value belongs ---------------------------------------------------------------------

    @property
    def small_below(self) -> int:
        """Below how many bytes a value is small now, so that it goes only if no other can."""
        return self._small

    def classify(self, entry: Entry, *, first: bool = False) -> None:
        """The value changed: put it where it belongs, as used just now, or as the `first` to go."""
        pid = entry.pid
        if not entry.evictable:
            self.unlist(pid)
            return
        if pid in self._held or pid in self._blocked:
            return
        if entry.rare is not None and entry.refused:
            self._blocked[pid] = None
            return
        # What goes with a value that keeps others alive is more than what it is charged itself.
        small = entry.nbytes < self._small and not entry.parts
        order = self.next_use(entry) if self.uses.users else None
        if order is not None:
            entry.had_use = True
        dead = entry.had_use and len(entry.keys) <= FEW_KEYS
        self.queue.add(pid, order, dead=dead, clean=entry.has(Tier.DISK), first=first, small=small)

    def limited(self, limit: int | None) -> None:
        """The limit of memory is another one. O(n) if with it what counts as small has changed."""
        small = self._small_below(limit)
        if small != self._small:
            self._small = small
            for pid in list(self.queue):
                self.classify(self._entries[pid])

    def unlist(self, pid: int) -> None:
        """It is no candidate any more."""
        if pid in self._held:
            del self._held[pid]
        elif pid in self._blocked:
            del self._blocked[pid]
        else:
            self.queue.discard(pid)

    def dirtied(self, entry: Entry) -> None:
        """Its record was given up: it keeps its place, but evicting it would be a write."""
        self.queue.dirty(entry.pid)
        if not entry.evictable:
            self.unlist(entry.pid)

    def expect(self, key: Hashable, user: Hashable, order: Order) -> None:
        """`user` is going to read `key`, which need not exist yet."""
        self.uses.expect(key, user, order)
        self._use_changed(key)

    def unexpect(self, key: Hashable, user: Hashable) -> None:
        """`user` has read `key` or never will."""
        if self.uses.drop(key, user):
            self._use_changed(key)

    def _use_changed(self, key: Hashable) -> None:
        entry = self._keys.get(key)
        if entry is not None:
            entry.had_use = True
            if entry.pid in self.queue:
                self.classify(entry)

    def next_use(self, entry: Entry) -> Order | None:
        """When a value is needed next, as far as that is known."""
        keys = entry.keys
        if len(keys) == 1:
            return self.uses.next(entry.key)
        if len(keys) > FEW_KEYS:
            return None  # it goes by recency alone
        return min((use for key in keys if (use := self.uses.next(key)) is not None), default=None)

    # -- choosing ----------------------------------------------------------------------------------

    def can_free(self, nbytes: int) -> bool:
        """Whether trying may free so many bytes; values that are not small may be larger."""
        return self.queue.large > 0 or self.queue.small_nbytes >= nbytes

    def next(self, *, small: bool = True) -> Entry | None:
        """Return the next victim, without taking it out. Held ones before it are set aside."""
        while (pid := self.queue.peek(small=small)) is not None:
            if not self._set_aside_if_held(pid):
                return self._entries[pid]
        return None

    def ready(self, pid: int) -> bool:
        """Whether a value may go now, whatever its place in the order."""
        return pid in self.queue and not self._is_held(pid)

    def written(self, entry: Entry, *, wanted: bool, first: bool) -> bool:
        """Say whether a value that is in none of the places, with a record now, may go at once.

        Else it is put where it belongs.

        Parameters
        ----------
        wanted
            Whether it should go. If it is held, it stays and is set aside.
        """
        wanted = wanted and entry.evictable and not entry.refused
        held = wanted and self._is_held(entry.pid)
        if wanted and not held:
            return True
        self.classify(entry, first=first)
        if held:
            self.spare(entry.pid)
        return False

    def spare(self, pid: int) -> None:
        """Leave a candidate alone for a while, as one that is held. Nothing if it is none."""
        if pid in self.queue:
            self.queue.discard(pid)
            self._held[pid] = None

    def _set_aside_if_held(self, pid: int) -> bool:
        if not self._is_held(pid):
            return False
        self.spare(pid)
        return True

    # -- trying again ------------------------------------------------------------------------------

    def retry(self, held: int, blocked: int) -> None:
        """Make candidates of at most so many of each kind that was set aside, oldest first."""
        for pid in list(itertools.islice(self._held, held)):
            del self._held[pid]
            self.classify(self._entries[pid])
        for pid in list(itertools.islice(self._blocked, blocked)):
            self._unblock(pid)

    def relieve(self, nbytes: int) -> None:
        """The disk has room for `nbytes` more: try again what failed and may fit now.

        Only so many, longest set aside first, and only for so many bytes as became free: trying one
        means to serialise it, and perhaps to write most of it in vain.
        """
        self.relieved += 1
        self._freed += nbytes
        while self._blocked:
            pid = next(iter(self._blocked))
            entry = self._entries[pid]
            need = max(1, entry.need or entry.nbytes)
            if need > self._freed:
                return
            self._freed -= need
            self._unblock(pid)
        self._freed = 0

    def _unblock(self, pid: int) -> None:
        entry = self._entries[pid]
        del self._blocked[pid]
        entry.refused = False
        self.classify(entry)

    def validate(self) -> None:
        """Raise AssertionError unless every candidate is in one place, the right one. O(n)."""
        entries = self._entries
        self.queue.validate(
            clean=lambda pid: entries[pid].has(Tier.DISK), order=lambda pid: self.next_use(entries[pid])
        )
        for pid, entry in entries.items():
            listed = [pid in self.queue, pid in self._held, pid in self._blocked]
            assert sum(listed) == int(entry.evictable), (entry, listed)
            assert pid not in self.queue or not entry.refused, entry
            assert not entry.refused or not entry.has(Tier.DISK), entry
            if pid in self.queue:
                assert entry.small == (entry.nbytes < self._small and not entry.parts), entry
        for listing in (self._held, self._blocked):
            assert listing.keys() <= entries.keys()
        assert set(self.queue) <= entries.keys()
