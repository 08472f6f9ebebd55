"""How values leave memory, how they are forgotten, and what they kept alive.

A value is needed by its keys, its pins, its move in flight, and by other values that have it as a
*part*: memory that they keep alive. A value that none of these need is forgotten everywhere at
once. A part that was let go by the last value that had it is *loose* until the caller has destroyed
that value (:meth:`Lifetimes.release_parts`): before, evicting it would free nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuspill.core.accounting import Charges
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters, Effects
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.readahead import ReadAhead
from gpuspill.core.records import Records
from gpuspill.core.residency import Tier

__all__ = ["Lifetimes"]


class Lifetimes:
    """The ways out of memory and out of the books, the same ones for whatever event leads there.

    Attributes
    ----------
    loose
        Number of parts that :meth:`release_parts` has to be called for.

    Notes
    -----
    Not thread-safe. O(log n) for each value that goes, amortised, but for :meth:`validate`.
    """

    def __init__(
        self,
        ledger: Ledger,
        charges: Charges,
        candidates: Candidates,
        records: Records,
        read_ahead: ReadAhead,
        effects: Effects,
        counters: Counters,
    ) -> None:
        self.loose = 0
        self._ledger = ledger
        self._charges = charges
        self._candidates = candidates
        self._records = records
        self._read_ahead = read_ahead
        self._effects = effects
        self._counters = counters

    def drop(self, entry: Entry) -> None:
        """Evict a candidate that has a record already, so that nothing is written."""
        self._candidates.unlist(entry.pid)
        self._counters.clean_drops += 1
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """Let go of a value in memory that has a record, and is no candidate."""
        self._read_ahead.evicted(entry.pid)
        entry.drop(Tier.HOST)
        self._records.need(entry)
        self._effects.dropped.append(entry.pid)
        self._charges.drop(entry)
        if entry.rare is not None:
            self._let_go_of_parts(entry)

    def release(self, entry: Entry) -> None:
        """One key, pin, move or other value less needs the entry: forget it if that was the last.

        What only other values need, as memory that they keep alive, needs no record.
        """
        if entry.keys:
            self._candidates.classify(entry)
        elif not entry.needed:
            self._forget(entry)
        elif entry.has(Tier.DISK) and not (entry.pins or entry.moving):
            freed = entry.disk_nbytes
            self._records.give_up(entry)
            self._candidates.relieve(freed)

    def _forget(self, entry: Entry) -> None:
        pid = entry.pid
        self._candidates.unlist(pid)
        if entry.resident:
            self._effects.dropped.append(pid)
        if entry.has(Tier.DISK):
            self._records.forget(entry)
        self._charges.forget(entry)
        if entry.rare is not None:
            self._let_go_of_parts(entry)
        self._read_ahead.gone(pid)
        self._ledger.forget(entry)
        self._effects.forgotten[pid] = entry

    # -- parts -------------------------------------------------------------------------------------

    def take_parts(self, entry: Entry, parts: tuple[int, ...], apart_nbytes: int) -> None:
        """The value keeps these alive while it is in memory: they are no candidates then.

        Parameters
        ----------
        parts
            Proxies in memory, each once.
        apart_nbytes
            Bytes it takes when it comes back, which it does without them.
        """
        entry.parts, entry.apart_nbytes = parts, apart_nbytes
        for pid in parts:
            self._ledger.entries[pid].owners += 1
            self._candidates.unlist(pid)

    def _let_go_of_parts(self, entry: Entry) -> None:
        """The value is on its way out of memory, and with it what keeps its parts there."""
        parts, entry.parts = entry.parts, ()
        for pid in parts:
            part = self._ledger.entries[pid]
            part.owners -= 1
            if not part.needed:
                self._forget(part)
            elif not part.owners and not part.loose:
                part.loose = True
                self.loose += 1
                self._effects.released_parts.append(pid)

    def release_parts(self, pids: Iterable[int]) -> None:
        """The values that had these parts left memory: the parts count as others, and go first."""
        for pid in pids:
            entry = self._ledger.entries.get(pid)
            if entry is None or not entry.loose:
                continue
            entry.loose = False
            self.loose -= 1
            if not entry.owners:
                self.release(entry)

    def leaving_nbytes(self, entry: Entry) -> int:
        """Bytes that go with the value: its own, and those of parts that nothing else needs."""
        if entry.rare is None:
            return entry.nbytes
        return entry.nbytes + sum(self._alone_nbytes(pid) for pid in entry.parts)

    def _alone_nbytes(self, pid: int) -> int:
        part = self._ledger.entries[pid]
        return 0 if part.owners > 1 or part.keys or part.pins or part.moving else part.nbytes

    def validate(self) -> None:
        """Raise AssertionError unless all values are needed, and owners match parts. O(n)."""
        entries = self._ledger.entries
        owners: dict[int, int] = {}
        for entry in entries.values():
            assert entry.needed, f"unused proxy {entry}"
            assert not entry.parts or entry.resident, f"{entry} keeps memory alive and is not there"
            for pid in entry.parts:
                owners[pid] = owners.get(pid, 0) + 1
                assert entries[pid].resident, f"{entry} has a part that is not there"
        assert owners == {entry.pid: entry.owners for entry in entries.values() if entry.owners}
        assert self.loose == sum(entry.loose for entry in entries.values())
