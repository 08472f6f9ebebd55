"""Restores: reading a value back, on demand or ahead of its use where there is room."""

from __future__ import annotations

from gpuspill.core.accounting import Charges
from gpuspill.core.admission import Room
from gpuspill.core.budget import Reservation
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.lifetimes import Lifetimes
from gpuspill.core.policy import Order
from gpuspill.core.readahead import ReadAhead
from gpuspill.core.records import Records
from gpuspill.core.residency import State, Tier
from gpuspill.errors import InvalidTransition

__all__ = ["Restores"]


class Restores:
    """Moves from disk to memory. The record stays behind, unless clean copies are not kept.

    Notes
    -----
    Has no state of its own: what is in flight stands in the residency of each value. Not
    thread-safe. O(log n) for each value that is evicted or found held, amortised.
    """

    def __init__(
        self,
        ledger: Ledger,
        charges: Charges,
        candidates: Candidates,
        records: Records,
        lifetimes: Lifetimes,
        room: Room,
        read_ahead: ReadAhead,
        counters: Counters,
    ) -> None:
        self._entries = ledger.entries
        self._memory = charges.memory
        self._charges = charges
        self._candidates = candidates
        self._records = records
        self._lifetimes = lifetimes
        self._room = room
        self._read_ahead = read_ahead
        self._counters = counters

    def begin(self, pid: int, reservation: Reservation | None = None) -> None:
        """The caller reads the record of a spilled value; its bytes are charged from now on.

        With a reservation the bytes come out of that promise.
        """
        entry = self._entries[pid]
        entry.begin(Tier.DISK, Tier.HOST)
        self._read_ahead.missed()
        self._charges.begin_restore(entry)
        if reservation is not None:
            self._memory.settle(reservation, entry.nbytes)
        self._room.balance()

    def begin_ahead(self, pid: int, order: Order) -> bool:
        """Begin a restore ahead of its use, if there is room for it.

        Room is what is free, plus clean values that are needed later than `order` or not at all: a
        prefetch never causes a write and never takes what others wait for. What was read ahead and
        not used yet may take a share of the limit that depends on how that went before.
        """
        entry = self._entries[pid]
        if entry.state is not State.SPILLED:
            return False
        memory = self._memory
        if not self._read_ahead.allows(entry.nbytes, None if memory.limit is None else memory.limit - memory.offset):
            return False
        room = self._room.make_ahead(entry.nbytes, order)
        if room:
            self._read_ahead.begin(pid, entry.nbytes)
            entry.begin(Tier.DISK, Tier.HOST)
            self._charges.begin_restore(entry)
            self._counters.prefetches += 1
        self._room.grant_waiting()
        return room

    def complete(self, pid: int) -> None:
        """The value is in memory again, read and verified."""
        entry = self._entry(pid)
        entry.complete()
        invalidated = entry.rare is not None and entry.invalidated
        if invalidated:
            entry.invalidated = False
        self._charges.complete_restore()
        self._counters.restores += 1
        self._counters.restored_nbytes += entry.nbytes
        self._records.keep(entry)
        if not (entry.keys or entry.pins):
            self._lifetimes.release(entry)
        else:
            if self._records.keep_clean and not invalidated:
                self._records.reclaim()
            else:
                self._records.give_up(entry)
            self._candidates.classify(entry)
        self._room.balance()

    def fail(self, pid: int, *, lost: bool) -> None:
        """The value could not be brought back.

        Parameters
        ----------
        lost
            The record itself is gone or damaged; there is no copy left. Otherwise reading may be
            tried again.
        """
        entry = self._entry(pid)
        entry.fail()
        entry.invalidated = False
        self._read_ahead.gone(pid)
        self._charges.fail_restore(entry)
        self._counters.restore_failures += 1
        if lost:
            self._records.lose(entry)
            self._charges.lose(entry)
            self._counters.lost += 1
        self._lifetimes.release(entry)
        self._room.balance()

    def _entry(self, pid: int) -> Entry:
        entry = self._entries[pid]
        if entry.target != Tier.HOST:
            raise InvalidTransition(f"proxy {pid} is not being restored")
        return entry
