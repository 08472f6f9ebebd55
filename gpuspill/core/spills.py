"""Spills: the choice of the next value, and what becomes of it when the write has ended.

Until the record is written, the value in memory is the copy that counts, and may be used. Then the
value is let go, if that is still wanted and no task took it up meanwhile.
"""

from __future__ import annotations

from gpuspill.core.accounting import Charges
from gpuspill.core.admission import Room
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.lifetimes import Lifetimes
from gpuspill.core.records import Records
from gpuspill.core.residency import Tier
from gpuspill.errors import InvalidTransition

__all__ = ["Spills"]


class Spills:
    """Moves from memory to disk.

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
        counters: Counters,
    ) -> None:
        self._entries = ledger.entries
        self._memory = charges.memory
        self._charges = charges
        self._candidates = candidates
        self._records = records
        self._lifetimes = lifetimes
        self._room = room
        self._counters = counters

    def next(self, *, force: bool = False) -> int | None:
        """Choose what to write to disk next, if anything has to be, and begin that move.

        Clean values that come first in the order are dropped on the way (a state change, not a
        write).

        Parameters
        ----------
        force
            Whether one value has to go even if the limit does not ask for it. A clean one that is
            dropped will do.

        Returns
        -------
        int or None
            The proxy whose value the caller must now serialise and write, ending with
            :meth:`complete` or :meth:`fail`.
        """
        self._room.balance()
        while force or self._memory.excess() > 0:
            entry = self._candidates.next()
            if entry is None:
                break
            if entry.has(Tier.DISK):
                self._lifetimes.drop(entry)
                force = False
                continue
            self._begin(entry)
            if entry.small:
                self._room.grant_waiting()  # others may have been found held: what is left is perhaps not enough
            return entry.pid
        self._room.grant_waiting()
        return None

    def begin(self, pid: int) -> bool:
        """Begin to spill one value, whatever the limit; as :meth:`next` with `force`.

        False if it may not leave now, or would cost no write.
        """
        entry = self._entries.get(pid)
        if entry is None or entry.has(Tier.DISK) or not self._candidates.ready(pid):
            return False
        self._begin(entry)
        return True

    def _begin(self, entry: Entry) -> None:
        self._candidates.queue.choose(entry.pid)
        entry.begin(Tier.HOST, Tier.DISK)
        self._charges.begin_spill(entry, self._lifetimes.leaving_nbytes(entry))

    def reserve_record(self, pid: int, nbytes: int) -> bool:
        """A record in flight will take `nbytes` on disk. Returns False if the quota forbids it."""
        return self._records.reserve(self._entry(pid), nbytes)

    def in_doubt(self, pid: int) -> bool:
        """Whether the value was used since its spill began, or since this was last asked.

        Who used it may have changed it in place. The caller has to compare what it writes with the
        value as it is from now on, and call :meth:`doubt` if they are not the same.
        """
        entry = self._entry(pid)
        if entry.rare is None:
            return False
        taken, entry.taken = entry.taken, False
        return taken

    def doubt(self, pid: int) -> None:
        """What is written of a value is perhaps not what it is: the record will not count."""
        self._entry(pid).taken = True

    def complete(self, pid: int, disk_nbytes: int, *, force: bool = False) -> None:
        """The record is written and verified.

        The value in memory is let go if its room is still needed and no task took it up meanwhile.
        Otherwise the record stays as a clean copy, if clean copies are kept. The value then keeps
        its turn unless it was used meanwhile. A record that turns out so much larger than was
        reserved that it is over the quota is given up: the value stays in memory, as if the write
        had failed. So is one that is still :meth:`in_doubt`, and the value is left alone for a
        while, like one that is held.

        Parameters
        ----------
        disk_nbytes
            Size of the record in bytes.
        force
            Whether the value is to go even if the limit does not ask for it.
        """
        entry = self._entry(pid)
        untouched = self._candidates.queue.untouched(pid)
        records = self._records
        records.written(entry, disk_nbytes)
        wanted = force or self._memory.over()  # before its bytes stop counting as leaving
        self._charges.end_spill(entry)
        entry.complete()
        self._counters.spills += 1
        self._counters.spilled_nbytes += entry.whole_nbytes
        refusals, invalidated, taken = 0, False, False
        if entry.rare is not None:
            refusals, invalidated, taken = entry.refusals, entry.invalidated, entry.taken
            entry.refusals, entry.need, entry.invalidated, entry.taken = 0, 0, False, False
        if not (entry.keys or entry.pins):
            self._lifetimes.release(entry)
        elif invalidated or taken:
            records.keep(entry)
            records.give_up(entry)
            self._candidates.classify(entry)
            if taken:
                self._candidates.spare(pid)
        else:
            records.keep(entry)
            if records.exceeded(disk_nbytes):
                entry.need, entry.refused, entry.refusals = disk_nbytes, True, refusals + 1
                records.give_up(entry)
                self._candidates.classify(entry)
            # Without its record it would be written again, and perhaps once more for nothing.
            elif self._candidates.written(entry, wanted=wanted, first=untouched and records.keep_clean):
                self._lifetimes.let_go(entry)
            elif not records.keep_clean:
                records.give_up(entry)
            records.reclaim()
        self._room.balance()

    def fail(self, pid: int, *, forever: bool) -> None:
        """The spill came to nothing; the value stays where it was.

        Parameters
        ----------
        forever
            It can never be spilled (not serialisable); otherwise it is blocked until it is tried
            again.
        """
        entry = self._entry(pid)
        self._candidates.unlist(pid)  # whether it was used meanwhile does not matter any more
        self._records.unwritten(entry)
        self._charges.end_spill(entry)
        entry.fail()
        entry.invalidated = entry.taken = False
        self._counters.spill_failures += 1
        if forever:
            self._charges.keep(entry)
        else:
            entry.refused = True
            entry.refusals += 1
        self._lifetimes.release(entry)
        self._room.balance()

    def _entry(self, pid: int) -> Entry:
        entry = self._entries[pid]
        if entry.target != Tier.DISK:
            raise InvalidTransition(f"proxy {pid} is not being spilled")
        return entry
