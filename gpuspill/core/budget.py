"""Limits of one tier, bytes promised before they move, and the queue of those who wait for room.

Admission is the back-pressure that synchronous spilling had by accident (it stopped the worker) and
that the first asynchronous attempt lacked (dask/distributed#7742): a caller about to add bytes
reserves them first and waits, without holding the event loop, while something can still make room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuspill.core.line import Kind, Line, Reservation
from gpuspill.errors import InvalidTransition

__all__ = ["Budget", "Kind", "Reservation"]


@dataclass(slots=True)
class Budget:
    """The bytes of one tier.

    Parameters
    ----------
    limit
        Bytes; ``None`` for no limit.

    Attributes
    ----------
    used
        Bytes of copies in this tier, those that are arriving included.
    reserved
        Bytes promised to granted reservations and not arrived yet.
    offset
        Bytes to add when comparing with the limit: unmanaged process memory. May be
        negative.
    leaving
        Bytes of copies whose move down is in flight: they count as used until they are gone, but
        need no further victim.
    beyond
        Number of those who were let in beyond the limit, have not ended, and do not wait for
        others.
    line
        Those who wait for room.
    """

    limit: int | None
    used: int = 0
    reserved: int = 0
    offset: int = 0
    leaving: int = 0
    beyond: int = 0
    line: Line = field(default_factory=Line)

    @property
    def committed(self) -> int:
        """Bytes used, promised and unmanaged."""
        return self.used + self.reserved + self.offset

    @property
    def demand(self) -> int:
        """Bytes for which room must still be made on behalf of those who wait.

        All waiting tasks (there are at most as many as the worker has threads), but a transfer only
        when it is its turn: making room for the whole line would spill far more than is needed
        next.
        """
        first = self.line.first()
        if first is None:
            return 0
        nbytes = self.line.tasks_nbytes
        return nbytes if first.kind is Kind.TASK else nbytes + first.nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more stay within the limit now."""
        return self.limit is None or self.committed + nbytes <= self.limit

    def missing(self, nbytes: int) -> int:
        """By how many bytes `nbytes` more would exceed the limit, which there is."""
        return 0 if self.limit is None else self.committed + nbytes - self.limit

    def excess(self) -> int:
        """Bytes that still have to be chosen for eviction; zero or less if there are none."""
        # Written out: this is asked in every event.
        if self.limit is None:
            return 0
        excess = self.used + self.reserved + self.offset - self.leaving - self.limit
        return excess + self.demand if self.line.waiting else excess

    def over(self) -> bool:
        """Whether copies with a copy below have to go, for the limit or for those who wait."""
        return self.limit is not None and self.committed + self.demand > self.limit

    def grant(self, reservation: Reservation, *, overrun: bool = False) -> None:
        """Promise the bytes. If the reservation is in line, it has its turn."""
        if reservation.granted or reservation.released:
            raise InvalidTransition("reservation granted twice or after its release")
        if reservation in self.line.waiting:
            self.line.serve(reservation)
        reservation.granted = True
        reservation.overrun = overrun
        self.reserved += reservation.nbytes
        self.beyond += self._is_beyond(reservation)

    def _is_beyond(self, reservation: Reservation) -> bool:
        return reservation.overrun and not reservation.detached and not reservation.released

    def detach(self, reservation: Reservation) -> None:
        """The asker may itself wait for others in line: those do not wait for it. Idempotent."""
        self.beyond -= self._is_beyond(reservation)
        reservation.detached = True

    def settle(self, reservation: Reservation, nbytes: int) -> None:
        """`nbytes` of what was promised have become used (at most what is left of the promise)."""
        if reservation.granted and not reservation.released:
            nbytes = min(nbytes, reservation.nbytes)
            reservation.nbytes -= nbytes
            self.reserved -= nbytes

    def release(self, reservation: Reservation) -> None:
        """Give back what is left of the promise, or leave the line. Idempotent."""
        if reservation.released:
            return
        self.beyond -= self._is_beyond(reservation)
        reservation.released = True
        if reservation.granted:
            self.reserved -= reservation.nbytes
        else:
            self.line.leave(reservation)
        reservation.nbytes = 0

    def validate(self) -> None:
        """Raise AssertionError if the counters contradict each other."""
        assert self.used >= 0, self.used
        assert self.reserved >= 0, self.reserved
        assert 0 <= self.leaving <= self.used, (self.leaving, self.used)
        assert self.beyond >= 0, self.beyond
        self.line.validate()
