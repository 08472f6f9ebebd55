"""Who may add bytes to memory now and who waits, and the room that can be made without a write.

Whoever waits does so only while something can still make room: a spill in flight, a candidate that was not tried yet,
or memory that is about to be let go. When none is left it is let in all the same and counted as an *overrun*, so
admission alone never stops a worker.
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
    effects, counters
        Where to note what was decided.

    Notes
    -----
    Has no state of its own: who waits stands in the budget of memory. Not thread-safe. Every method is O(log n) for
    each value that is evicted or found held, amortised.
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

    # -- eviction without a write --------------------------------------------------------------------

    def balance(self) -> None:
        """Drop clean values that come first in the order while room is needed, then serve those who wait.

        Values that need a write are left to :meth:`Spills.next <gpuspill.core.spills.Spills.next>`.
        """
        memory = self._memory
        if memory.excess() > 0:
            self._drop_clean(0)
        if memory.tasks or memory.transfers:
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
        if self._memory.tasks or self._memory.transfers:
            self.grant_waiting()

    def make_ahead(self, nbytes: int, order: Order) -> bool:
        """Make room for a value that is used next at `order`, of clean ones needed later or not at all.

        Takes nothing from those who wait. Returns whether there is room; who calls this lets in those who wait
        afterwards, as what was looked at may have been the last thing that could make room for them.
        """
        memory = self._memory
        while memory.limit is not None and memory.committed + memory.demand - memory.leaving + nbytes > memory.limit:
            victim = self._candidates.next(small=False)
            if victim is None:
                return False
            use = self._candidates.queue.next_use(victim.pid)
            if not victim.has(Tier.DISK) or (use is not None and use <= order):
                return False
            self._lifetimes.drop(victim)
        return True

    # -- admission -----------------------------------------------------------------------------------

    def reserve(self, nbytes: int, kind: Kind) -> Reservation:
        """Ask for room. The reservation is granted now, or appears in :attr:`Effects.granted` later."""
        granted = self._grant_now(nbytes, kind)
        if granted is not None:
            self._serve()
            return granted
        reservation = Reservation(kind, max(0, nbytes))
        self._memory.queue(reservation)
        self.grant_waiting()
        if reservation.granted:
            self._effects.granted.remove(reservation)
        else:
            self._counters.waits += 1
        return reservation

    def reserve_now(self, nbytes: int, kind: Kind) -> Reservation | None:
        """Ask for room that is there, or where there are clean values. None if it would have to be waited for."""
        granted = self._grant_now(nbytes, kind)
        self._serve()
        return granted

    def _grant_now(self, nbytes: int, kind: Kind) -> Reservation | None:
        # Who waits is served afterwards: what is dropped here makes room for a task before it does for transfers, which
        # come behind it in line.
        memory = self._memory
        if memory.tasks or (memory.transfers and kind is not Kind.TASK):
            return None
        if not memory.fits(nbytes):
            self._drop_clean(nbytes)
            if not memory.fits(nbytes):
                return None
        reservation = Reservation(kind, max(0, nbytes))
        memory.grant(reservation)
        return reservation

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
        """Let in those for whom there is room, in their order, and those for whom nothing can make any."""
        memory = self._memory
        while (first := memory.first()) is not None:
            if memory.fits(first.nbytes):
                memory.grant(first)
            elif self._can_free(memory.missing(first.nbytes)):
                return
            else:
                memory.grant(first, overrun=True)
                self._counters.overruns += 1
            self._effects.granted.append(first)

    def _can_free(self, nbytes: int) -> bool:
        """Whether something may still make room for so many bytes that do not fit. Small values have to be enough."""
        charges, leaving = self._charges, self._memory.leaving
        return (
            charges.spilling > charges.spilling_small
            or self._lifetimes.loose > 0
            or self._candidates.can_free(max(1, nbytes - leaving))
        )

    def validate(self) -> None:
        """Raise AssertionError if somebody waits although nothing can make room."""
        first = self._memory.first()
        waits = first is not None and not self._can_free(self._memory.missing(first.nbytes))
        assert not waits, "a reservation waits although nothing can make room"
