"""The values that may be evicted now: an eviction policy's, and the small ones after them.

A spilled small value takes a block of the disk and a few hundred bytes of memory, and its write
takes as long as that of one a hundred times its size. So small values go last, least recently used
first, whatever the policy. Where the limit is so low that small values may be all there is, none
counts as small.

A victim that was written and stays after all, because room came otherwise, keeps its turn if its
record is kept and it was not used meanwhile: it goes first, without another write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from gpuspill.core.policy import MakePolicy, NextUsePolicy, Order
from gpuspill.core.policy_guard import GuardedPolicy
from gpuspill.core.recency import HasTurns, Recent

__all__ = ["SMALL_NBYTES", "EvictionQueue", "small_below"]

#: A record takes no less on disk.
SMALL_NBYTES = 4096
#: Small values matter where so many of them would fill the memory.
_MANY = 10_000


def small_below(limit: int | None) -> int:
    """Below how many bytes a value is small, where values may take `limit` bytes in memory."""
    return SMALL_NBYTES if limit is not None and limit >= _MANY * SMALL_NBYTES else 0


class EvictionQueue:
    """The values that may be evicted, in the order in which they would be.

    Parameters
    ----------
    entries
        The table of values; see :class:`~gpuspill.core.recency.Recent`.
    policy
        Makes another order of those that are not small.
    failed
        Called once, with what that order has done wrong.

    Attributes
    ----------
    policy
        Decides the order of those that are not small.
    small_nbytes
        Bytes of the small ones.

    Notes
    -----
    As fast as the policy. Not thread-safe.
    """

    def __init__(
        self,
        entries: Mapping[int, HasTurns],
        policy: MakePolicy | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.policy: NextUsePolicy | GuardedPolicy
        if policy is None:
            self.policy = NextUsePolicy(entries)
        else:
            self.policy = GuardedPolicy(policy(MappingProxyType(entries)), failed)
        self._entries = entries
        self._small = Recent(entries)
        self.small_nbytes = 0
        self._chosen: set[int] = set()

    def __len__(self) -> int:
        return len(self.policy) + len(self._small)

    @property
    def large(self) -> int:
        """Number of those that are not small."""
        return len(self.policy)

    def __contains__(self, vid: int) -> bool:
        entry = self._entries.get(vid)
        return vid in self._small if entry is not None and entry.small else vid in self.policy

    def __iter__(self) -> Iterator[int]:
        """Iterate over the values."""
        yield from self.policy
        yield from self._small

    def add(
        self,
        vid: int,
        order: Order | None = None,
        *,
        dead: bool = False,
        clean: bool = False,
        first: bool = False,
        small: bool = False,
    ) -> None:
        """Add a value, or move it to where it belongs now.

        Parameters
        ----------
        vid, order, dead, clean, first
            See :meth:`EvictionPolicy.insert <gpuspill.core.policy.EvictionPolicy.insert>`. Say with
            :meth:`dirty` when the copy below is given up.
        small
            It goes last, whatever else is known of it. Its size must not change while it is in.
        """
        self.discard(vid)
        entry = self._entries[vid]
        if entry.small != small:
            # Both lines count places in the same attribute of the value.
            if small:
                self.policy.forget(vid)
            else:
                self._small.forget(vid)
            entry.small = small
        if small:
            self._small.add(vid, first=first)
            self.small_nbytes += entry.nbytes
        else:
            self.policy.insert(vid, order, dead=dead, clean=clean, first=first)

    def choose(self, vid: int) -> None:
        """Take out a victim, and note from now on whether it is used."""
        self.discard(vid)
        self._chosen.add(vid)

    def take_out(self, vid: int) -> bool:
        """Take a value out for a moment; whether it was in. Notes of a victim stay."""
        if vid not in self:
            return False
        self.discard(vid)
        return True

    def untouched(self, vid: int) -> bool:
        """Whether `vid` was chosen, and not used, added or discarded since. Ends the noting."""
        untouched = vid in self._chosen
        self._chosen.discard(vid)
        return untouched

    def discard(self, vid: int) -> None:
        """Take a value out, if it is in."""
        entry = self._entries.get(vid)
        if entry is not None and entry.small:
            if self._small.discard(vid):
                self.small_nbytes -= entry.nbytes
            else:
                self._chosen.discard(vid)
        elif not self.policy.discard(vid):
            self._chosen.discard(vid)

    def dirty(self, vid: int) -> None:
        """Note that the tier below has no copy of `vid` any more, if it is in."""
        if vid in self.policy:
            self.policy.dirty(vid)

    def touch(self, vid: int) -> None:
        """Note a use of `vid`."""
        if vid not in self:
            self._chosen.discard(vid)
        elif self._entries[vid].small:
            self._small.add(vid)
        else:
            self.policy.touch(vid)

    def peek(self, *, small: bool = True) -> int | None:
        """Return the next victim without taking it out; one that is `small` only if asked for."""
        vid = self.policy.first()
        return self._small.peek() if vid is None and small else vid

    def validate(
        self, clean: Callable[[int], bool] | None = None, order: Callable[[int], Order | None] | None = None
    ) -> None:
        """Raise AssertionError if the indices contradict each other or the policy."""
        self.policy.validate(clean, order)
        self._small.validate()
        large, small = set(self.policy), set(self._small)
        assert len(large | small) == len(self)
        assert all(self._entries[vid].small for vid in small)
        assert not any(self._entries[vid].small for vid in large)
        assert self.small_nbytes == sum(self._entries[vid].nbytes for vid in small), self.small_nbytes
        assert not any(vid in self for vid in self._chosen)
