"""Limits of one tier, bytes promised before they move, and the queue of those who wait for room.

Admission is the back-pressure that synchronous spilling had by accident (it stopped the worker) and
that the first asynchronous attempt lacked (dask/distributed#7742): whoever is about to add bytes
reserves them first and waits, without holding the event loop, while something can still make room.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuspill.errors import InvalidTransition

__all__ = ["Budget", "Kind", "Reservation"]


class Kind(enum.IntEnum):
    """Who asks for room. A lower number is served first."""

    TASK = 0
    TRANSFER = 1


@dataclass(slots=True, eq=False)
class Reservation:
    """Bytes promised to one asker.

    Attributes
    ----------
    nbytes
        Bytes still promised; shrinks as the promised bytes arrive and are charged as used.
    granted
        Whether the asker may go on.
    overrun
        Granted although it did not fit, because nothing could be freed any more.
    """

    kind: Kind
    nbytes: int
    granted: bool = False
    overrun: bool = False
    released: bool = False


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
        Bytes to add when comparing with the limit: process memory that nobody accounts for. May be
        negative.
    leaving
        Bytes of copies whose move down is in flight: they count as used until they are gone, but
        need no further victim.
    """

    limit: int | None
    used: int = 0
    reserved: int = 0
    offset: int = 0
    leaving: int = 0
    tasks: deque[Reservation] = field(default_factory=deque)
    transfers: deque[Reservation] = field(default_factory=deque)

    @property
    def committed(self) -> int:
        """Bytes used, promised and unmanaged."""
        return self.used + self.reserved + self.offset

    @property
    def demand(self) -> int:
        """Bytes for which room must still be made on behalf of those who wait.

        All waiting tasks (there are at most as many as the worker has threads), but only the first
        transfer: transfers wait in line, and making room for the whole line would spill far more
        than is needed next.
        """
        if not self.tasks and not self.transfers:
            return 0
        nbytes = sum(reservation.nbytes for reservation in self.tasks)
        return nbytes + (self.transfers[0].nbytes if self.transfers else 0)

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more stay within the limit now."""
        return self.limit is None or self.committed + nbytes <= self.limit

    def missing(self, nbytes: int) -> int:
        """By how many bytes `nbytes` more would exceed the limit, which there is."""
        return 0 if self.limit is None else self.committed + nbytes - self.limit

    def excess(self) -> int:
        """Bytes that still have to be chosen for eviction; zero or less when nothing has to be done."""
        # Written out: this is asked in every event.
        if self.limit is None:
            return 0
        excess = self.used + self.reserved + self.offset - self.leaving - self.limit
        return excess + self.demand if self.tasks or self.transfers else excess

    def over(self) -> bool:
        """Whether copies that already have a copy below have to go, for the limit or for those who wait."""
        return self.limit is not None and self.committed + self.demand > self.limit

    def line(self, kind: Kind) -> deque[Reservation]:
        """Those of one kind who wait, first come first."""
        return self.tasks if kind is Kind.TASK else self.transfers

    def queue(self, reservation: Reservation) -> None:
        """Put `reservation` in line."""
        self.line(reservation.kind).append(reservation)

    def first(self) -> Reservation | None:
        """Return whoever is next: tasks before transfers, first come first served within a kind."""
        if self.tasks:
            return self.tasks[0]
        return self.transfers[0] if self.transfers else None

    def grant(self, reservation: Reservation, *, overrun: bool = False) -> None:
        """Promise the bytes. Takes the reservation out of line if it waited."""
        if reservation.granted or reservation.released:
            raise InvalidTransition("reservation granted twice or after its release")
        line = self.line(reservation.kind)
        if reservation in line:
            line.remove(reservation)
        reservation.granted = True
        reservation.overrun = overrun
        self.reserved += reservation.nbytes

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
        reservation.released = True
        if reservation.granted:
            self.reserved -= reservation.nbytes
        else:
            line = self.line(reservation.kind)
            if reservation in line:
                line.remove(reservation)
        reservation.nbytes = 0

    def waiters(self) -> Iterator[Reservation]:
        """All who wait, in the order in which they are served."""
        yield from self.tasks
        yield from self.transfers

    def validate(self) -> None:
        """Raise AssertionError if the counters contradict each other."""
        assert self.used >= 0, self.used
        assert self.reserved >= 0, self.reserved
        assert 0 <= self.leaving <= self.used, (self.leaving, self.used)
        for reservation in self.waiters():
            assert not reservation.granted
            assert not reservation.released
