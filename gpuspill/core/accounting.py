"""What values are charged in memory, and the sums over all of them that statistics show."""

from __future__ import annotations

from collections.abc import Iterable

from gpuspill.core.budget import Budget
from gpuspill.core.ledger import Entry
from gpuspill.core.residency import State, Tier

__all__ = ["Charges"]


class Charges:
    """Told where each value is, its size and its pins. Decides nothing. Not thread-safe; O(1).

    A value counts as used in memory while it is there or on its way back. A method that is named
    after a change of the residency is to be called after it.

    Parameters
    ----------
    memory
        To which the bytes are charged.

    Attributes
    ----------
    pinned_nbytes
        The part of what is used that is pinned.
    unspillable
        Number of values that cannot be serialised.
    spilled, spilled_nbytes
        Number of values that are on disk only and not on their way back; the bytes that they would
        take in memory.
    away
        Number of values that are not in memory: spilled, on their way back, or lost.
    spilling, spilling_small
        Number of spills in flight, without those that are stalled, and of those that are of small
        values.
    stuck
        Whether all who write are in the middle of stalled spills, so that no other spill can begin.
    """

    def __init__(self, memory: Budget) -> None:
        self.memory = memory
        self.pinned_nbytes = 0
        self.unspillable = 0
        self.spilled = 0
        self.spilled_nbytes = 0
        self.away = 0
        self.spilling = 0
        self.spilling_small = 0
        self.stuck = False

    def enter(self, entry: Entry) -> None:
        """A new value is in memory."""
        self.memory.used += entry.nbytes
        self.unspillable += entry.unspillable

    def keep(self, entry: Entry) -> None:
        """It cannot be spilled, from now on. Idempotent."""
        self.unspillable += not entry.unspillable
        entry.unspillable = True

    def enter_below(self, entry: Entry) -> None:
        """A new value is on disk."""
        self.away += 1
        self._count_spilled(entry, 1)

    def pin(self, entry: Entry) -> None:
        """It is pinned for the first time."""
        if entry.charged:
            self.pinned_nbytes += entry.nbytes

    def unpin(self, entry: Entry) -> None:
        """It is not pinned any more."""
        if entry.charged:
            self.pinned_nbytes -= entry.nbytes

    def resize(self, entry: Entry, nbytes: int) -> None:
        """It takes `nbytes` in memory, or will when it is back."""
        more = nbytes - entry.nbytes
        if entry.charged:
            self.memory.used += more
            if entry.pins:
                self.pinned_nbytes += more
        elif entry.has(Tier.DISK):
            self.spilled_nbytes += more
        if entry.target == Tier.DISK and not entry.stalled:
            self.memory.leaving += more
        entry.nbytes = nbytes

    def begin_spill(self, entry: Entry, nbytes: int) -> None:
        """A spill is in flight that is going to free `nbytes`."""
        if nbytes != entry.nbytes:
            entry.leaving = nbytes - entry.nbytes
        self.memory.leaving += nbytes
        self.spilling += 1
        self.spilling_small += entry.small

    def stall_spill(self, entry: Entry) -> None:
        """A spill takes too long: stop counting on its memory. Idempotent."""
        if not entry.stalled:
            self.end_spill(entry)
            entry.stalled = True

    def end_spill(self, entry: Entry) -> None:
        """It came to its end, whichever."""
        nbytes = entry.nbytes
        if entry.rare is not None:
            if entry.stalled:
                entry.stalled = False
                return
            nbytes += entry.leaving
            entry.leaving = 0
        self.memory.leaving -= nbytes
        self.spilling -= 1
        self.spilling_small -= entry.small

    def begin_restore(self, entry: Entry) -> None:
        """It is on its way back."""
        self._charge_restore(entry, 1)

    def complete_restore(self) -> None:
        """One is in memory again."""
        self.away -= 1

    def fail_restore(self, entry: Entry) -> None:
        """It stays on disk."""
        self._charge_restore(entry, -1)

    def lose(self, entry: Entry) -> None:
        """Nor is it on disk."""
        self._count_spilled(entry, -1)

    def drop(self, entry: Entry) -> None:
        """It left memory and is on disk only. Coming back it takes what it shared, too."""
        self.memory.used -= entry.nbytes
        if entry.rare is not None and entry.parts:
            entry.nbytes = entry.apart_nbytes
        self.away += 1
        self._count_spilled(entry, 1)

    def forget(self, entry: Entry) -> None:
        """It is not known any more."""
        self.unspillable -= entry.unspillable
        if entry.resident:
            self.memory.used -= entry.nbytes
            return
        self.away -= 1
        if entry.has(Tier.DISK):
            self._count_spilled(entry, -1)

    def _charge_restore(self, entry: Entry, sign: int) -> None:
        self._count_spilled(entry, -sign)
        self.memory.used += sign * entry.nbytes
        if entry.pins:
            self.pinned_nbytes += sign * entry.nbytes

    def _count_spilled(self, entry: Entry, sign: int) -> None:
        self.spilled += sign
        self.spilled_nbytes += sign * entry.nbytes

    def validate(self, entries: Iterable[Entry]) -> None:
        """Raise AssertionError unless the sums are those over `entries`. O(n)."""
        self.memory.validate()
        pinned = unspillable = spilled = spilled_nbytes = away = spilling = leaving = 0
        for entry in entries:
            if entry.pins and entry.charged:
                pinned += entry.nbytes
            unspillable += entry.unspillable
            if entry.state is State.SPILLED:
                spilled += 1
                spilled_nbytes += entry.nbytes
            away += not entry.resident
            spilling += entry.target == Tier.DISK and not entry.stalled
            assert not entry.stalled or entry.target == Tier.DISK, entry
            if entry.target == Tier.DISK and not entry.stalled:
                leaving += entry.nbytes + entry.leaving
            else:
                assert not entry.leaving, entry
        assert leaving == self.memory.leaving, (leaving, self.memory.leaving)
        assert spilling == self.spilling
        assert 0 <= self.spilling_small <= spilling
        assert pinned == self.pinned_nbytes, (pinned, self.pinned_nbytes)
        assert unspillable == self.unspillable
        assert (spilled, spilled_nbytes) == (self.spilled, self.spilled_nbytes)
        assert away == self.away
