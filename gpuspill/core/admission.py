"""Who may add bytes to memory now and who waits, and the room that can be made without a write.

Those who wait do so in one line, by priority and age (:mod:`gpuspill.core.line`). The first of them
waits while something can still make room: a spill in flight that has not stalled, a candidate that
was not tried yet and that a thread is left to write, or memory that is about to be let go. When
none is left it is let in even so and counted as an *overrun*, so admission alone never stops a
worker.

Overruns are let in one at a time. While one has not ended and memory is over its limit, the next
one waits for its end. It does not if the one before may itself wait for others in line
(:meth:`Room.detach`), nor if either is as small as values that are spilled last.
:meth:`Room.relent` ends that wait after a time, as no one can know for sure what a task waits for.
"""

from __future__ import annotations

from gpuspill.core.accounting import Charges
from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters, Effects
from gpuspill.core.lifetimes import Lifetimes
from gpuspill.core.policy import Order
from gpuspill.core.residency import Tier

__all__ = ["Room"]


class Room:
    """Admission to memory, and the eviction of what has a record already.

    Parameters
    ----------
    charges
        What is used of memory, and what is leaving.
    candidates
        What may be evicted.
    lifetimes
        How it is.

    Notes
    -----
    Has no state of its own: who waits stands in the budget of memory. Not thread-safe. Every method
    is O(log n) for each value that is evicted or found held, amortised.
    """

    def __init__(
        self, charges: Charges, candidates: Candidates, lifetimes: Lifetimes, effects: Effects, counters: Counters
    ) -> None:
        self._memory = charges.memory
        self._charges = charges
        self._candidates = candidates
        self._lifetimes = lifetimes
        self._effects = effects
        self._counters = counters

    # -- eviction without a write ------------------------------------------------------------------

    def balance(self) -> None:
        """Drop clean values, the first in the order, while room is needed; then serve the line.

        Values that need a write are left to :meth:`Spills.next <gpuspill.core.spills.Spills.next>`.
        """
        memory = self._memory
        if memory.excess() > 0:
            self._drop_clean(0)
        if memory.line.waiting:
            self.grant_waiting()

    def _drop_clean(self, extra: int) -> None:
        """Drop clean values for those who wait, and for `extra` bytes more."""
        memory = self._memory
        if memory.limit is None:
            return
        while memory.excess() + extra > 0:
            entry = self._candidates.next()
            if entry is None or not entry.has(Tier.DISK):
                break
            self._lifetimes.drop(entry)

    def _serve(self) -> None:
        if self._memory.line.waiting:
            self.grant_waiting()

    def make_ahead(self, nbytes: int, order: Order) -> bool:
        """Make room for a value used next at `order`, of clean ones needed later or not at all.

        Takes nothing from those who wait. Returns whether there is room; who calls this lets in
        those who wait afterwards, as what was looked at may have been the last thing that could
        make room for them.
        """
        memory = self._memory
        while memory.limit is not None and memory.committed + memory.demand - memory.leaving + nbytes > memory.limit:
            victim = self._candidates.next(small=False)
            if victim is None:
                return False
            use = self._candidates.next_use(victim)
            if not victim.has(Tier.DISK) or (use is not None and use <= order):
                return False
            self._lifetimes.drop(victim)
        return True

    # -- admission ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int, kind: Kind, order: Order = ()) -> Reservation:
        """Ask for room. It is granted now, or appears in :attr:`Effects.granted` later.

        A smaller `order` is more urgent.
        """
        reservation = Reservation(kind, max(0, nbytes), order)
        if self._grant_now(reservation):
            self._serve()
            return reservation
        self._memory.line.join(reservation)
        self.grant_waiting()
        if reservation.granted:
            self._effects.granted.remove(reservation)
        else:
            self._counters.waits += 1
        return reservation

    def reserve_now(self, nbytes: int, kind: Kind, order: Order = ()) -> Reservation | None:
        """Ask for room that is free or held by clean values. None if it would have to wait."""
        reservation = Reservation(kind, max(0, nbytes), order)
        granted = self._grant_now(reservation)
        self._serve()
        return reservation if granted else None

    def _grant_now(self, reservation: Reservation) -> bool:
        # Who waits is served afterwards: what is dropped here makes room for one that goes first.
        memory = self._memory
        if not memory.line.goes_first(reservation.order, reservation.kind):
            return False
        if not memory.fits(reservation.nbytes):
            self._drop_clean(reservation.nbytes)
            if not memory.fits(reservation.nbytes):
                return False
        if memory.line.waiting:
            memory.line.join(reservation)  # it is one of the turns
        memory.grant(reservation)
        return True

    def improve(self, reservation: Reservation, order: Order) -> None:
        """One who waits has become as urgent as `order`, if that is more urgent than before."""
        if self._memory.line.improve(reservation, order):
            self.balance()

    def detach(self, reservation: Reservation) -> None:
        """The asker may itself wait for others in line, so those do not wait for it. Idempotent."""
        self._memory.detach(reservation)
        self._serve()

    def relent(self) -> None:
        """Nothing has changed for long: let in the first in line if nothing can make room."""
        first = self._memory.line.first()
        if first is not None and not self._can_make_room(first):
            self._let_in(first)
            self.grant_waiting()

    def release(self, reservation: Reservation) -> None:
        """Give back what is left of a reservation, or stop waiting for it. Idempotent."""
        memory = self._memory
        memory.release(reservation)
        self._serve()

    def shrink(self, reservation: Reservation, nbytes: int) -> None:
        """Keep at most `nbytes` of a granted reservation: the rest turned out not to be needed."""
        if reservation.granted and reservation.nbytes > nbytes:
            self._memory.settle(reservation, reservation.nbytes - nbytes)
            self.grant_waiting()

    def grant_waiting(self) -> None:
        """Let in those for whom there is room, and one at a time for whom none can be made."""
        memory = self._memory
        while (first := memory.line.first()) is not None:
            if not memory.fits(first.nbytes) and (self._can_make_room(first) or self._has_to_wait(first)):
                return
            self._let_in(first)

    def _let_in(self, reservation: Reservation) -> None:
        overrun = not self._memory.fits(reservation.nbytes)
        reservation.detached |= self._is_tiny(reservation)
        self._memory.grant(reservation, overrun=overrun)
        self._counters.overruns += overrun
        self._effects.granted.append(reservation)

    def _has_to_wait(self, reservation: Reservation) -> bool:
        """Whether one that overruns the limit has to wait for the end of another overrun."""
        memory = self._memory
        return memory.beyond > 0 and not self._is_tiny(reservation) and not memory.fits(0)

    def _is_tiny(self, reservation: Reservation) -> bool:
        """Whether it adds so little that it and others need not wait for each other's end."""
        return not reservation.nbytes or reservation.nbytes < self._candidates.small_below

    def _can_make_room(self, reservation: Reservation) -> bool:
        """Whether something may still make the missing room. Small values have to be enough."""
        nbytes = self._memory.missing(reservation.nbytes)
        charges, leaving = self._charges, self._memory.leaving
        return (
            charges.spilling > charges.spilling_small
            or self._lifetimes.loose > 0
            or (not charges.stuck and self._candidates.can_free(max(1, nbytes - leaving)))
        )

    @property
    def stalled(self) -> int | None:
        """How many turns there were, if the first in line waits for another's end; else None.

        As long as it stays the same, nothing has changed: see :meth:`relent`.
        """
        line = self._memory.line
        first = line.first()
        return None if first is None or self._can_make_room(first) else line.turns

    def validate(self) -> None:
        """Raise AssertionError if one waits although nothing can make room and none will end."""
        first = self._memory.line.first()
        waits = first is not None and not self._can_make_room(first) and not self._has_to_wait(first)
        assert not waits, "a reservation waits although nothing can make room"
