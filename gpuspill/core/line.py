"""The line of those who wait for room: the most urgent first, now and then the oldest.

Priorities alone would let one asker wait for ever behind a stream of more urgent ones. So every
:data:`AGEING`-th turn is that of the one who has waited longest. An asker with `n` others before it
in age is served within ``AGEING * (n + 1)`` turns, whatever comes later, and the most urgent one
waits for one turn more at most.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from dataclasses import dataclass

from gpuspill.core.policy import Order

__all__ = ["AGEING", "LAST", "Kind", "Line", "Reservation"]

#: One turn of so many is that of the asker who has waited longest.
AGEING = 8
#: Less urgent than anything else.
LAST: Order = (float("inf"),)


class Kind(enum.IntEnum):
    """What room is asked for. A lower number goes first among equally urgent ones."""

    TASK = 0
    TRANSFER = 1
    #: Reads ahead, for which no one waits. Has no turns by age: it could take the room of those who
    #: do wait.
    AHEAD = 2


@dataclass(slots=True, eq=False)
class Reservation:
    """Bytes promised to one asker.

    Attributes
    ----------
    nbytes
        Bytes still promised; shrinks as the promised bytes arrive and are charged as used.
    order
        How urgent it is; smaller goes first. The empty one, the default, goes before all others.
    granted
        Whether the asker may go on.
    overrun
        Granted although it did not fit, because nothing could be freed any more.
    detached
        Whether the asker may itself be waiting for others who wait for room. Then it is not waited
        for.
    """

    kind: Kind
    nbytes: int
    order: Order = ()
    granted: bool = False
    overrun: bool = False
    detached: bool = False
    released: bool = False


class Line:
    """Those who wait for room, in the order in which they are served.

    Attributes
    ----------
    waiting
        All of them, the one who has waited longest first. To be read only.
    tasks_nbytes
        Bytes that the tasks among them need.
    turns
        How many have been served.

    Notes
    -----
    Not thread-safe. O(log n) amortised: items of the heap whose reservation left the line, or
    became more urgent, are skipped when they surface, and the heap is made anew when they are more
    than half of it.
    """

    def __init__(self) -> None:
        self.waiting: OrderedDict[Reservation, None] = OrderedDict()
        self.tasks_nbytes = 0
        self.turns = 0
        self._by_age: OrderedDict[Reservation, None] = OrderedDict()
        self._heap: list[tuple[Order, Kind, int, Reservation]] = []
        self._joined = 0

    def join(self, reservation: Reservation) -> None:
        """Put a reservation in line."""
        self.waiting[reservation] = None
        if reservation.kind is not Kind.AHEAD:
            self._by_age[reservation] = None
        if reservation.kind is Kind.TASK:
            self.tasks_nbytes += reservation.nbytes
        self._push(reservation)

    def _push(self, reservation: Reservation) -> None:
        self._joined += 1
        heapq.heappush(self._heap, (reservation.order, reservation.kind, self._joined, reservation))

    def leave(self, reservation: Reservation) -> None:
        """Take a reservation out of line, if it is in it."""
        if reservation not in self.waiting:
            return
        del self.waiting[reservation]
        self._by_age.pop(reservation, None)
        if reservation.kind is Kind.TASK:
            self.tasks_nbytes -= reservation.nbytes
        if len(self._heap) > 2 * len(self.waiting) + 16:
            self._heap = [item for item in self._heap if self._counts(item)]
            heapq.heapify(self._heap)

    def serve(self, reservation: Reservation) -> None:
        """Take a reservation out of line because it had its turn."""
        self.leave(reservation)
        self.turns += 1

    def improve(self, reservation: Reservation, order: Order) -> bool:
        """A reservation has become as urgent as `order`. Returns whether it is more urgent now."""
        if reservation not in self.waiting or order >= reservation.order:
            return False
        reservation.order = order
        self._push(reservation)
        return True

    def first(self) -> Reservation | None:
        """Return whose turn it is; None if no one waits."""
        if not self.waiting:
            return None
        return next(iter(self._by_age)) if self._turn_of_age() else self._most_urgent()

    def goes_first(self, order: Order, kind: Kind) -> bool:
        """Whether the turn would be that of an asker who came now."""
        if not self.waiting:
            return True
        if self._turn_of_age():
            return False
        first = self._most_urgent()
        return (order, kind) < (first.order, first.kind)

    def _turn_of_age(self) -> bool:
        return self.turns % AGEING == AGEING - 1 and bool(self._by_age)

    def _most_urgent(self) -> Reservation:
        heap = self._heap
        while not self._counts(heap[0]):
            heapq.heappop(heap)
        return heap[0][-1]

    def _counts(self, item: tuple[Order, Kind, int, Reservation]) -> bool:
        """Whether an item of the heap is the one of a reservation in line."""
        reservation = item[-1]
        return reservation in self.waiting and item[0] == reservation.order

    def validate(self) -> None:
        """Raise AssertionError if the indices contradict each other. O(n)."""
        assert list(self._by_age) == [r for r in self.waiting if r.kind is not Kind.AHEAD]
        assert self.tasks_nbytes == sum(r.nbytes for r in self.waiting if r.kind is Kind.TASK)
        assert {item[-1] for item in self._heap if self._counts(item)} == self.waiting.keys()
        for reservation in self.waiting:
            assert not reservation.granted
            assert not reservation.released
