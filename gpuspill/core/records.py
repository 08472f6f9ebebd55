"""The room that records take on disk, and which of them are given up when it is short.

The record of a value that is in memory as well is *redundant*: it saves a write when the value is
evicted again, and is given up, the oldest first, for a record that holds the only copy of
something.
"""

from __future__ import annotations

from collections import OrderedDict

from gpuspill.core.budget import Budget, Kind, Reservation
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters, Effects
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.residency import Tier

__all__ = ["Records"]


class Records:
    """The quota of the disk, and the redundant records.

    Parameters
    ----------
    limit
        Bytes of records to keep on disk; None for no limit.
    keep_clean
        Keep the record of a restored value.
    candidates
        Told when a record is given up, and when there is room for what was refused.
    block_nbytes
        Size of a block of the file system, in bytes. A record takes whole blocks.

    Attributes
    ----------
    disk
        What records take and may take, in whole blocks. No one waits for room on disk: a record
        that does not fit is refused.

    Notes
    -----
    Not thread-safe. O(1) for each record that comes or goes, but for :meth:`validate`.
    """

    def __init__(
        self,
        limit: int | None,
        keep_clean: bool,
        ledger: Ledger,
        candidates: Candidates,
        effects: Effects,
        counters: Counters,
        block_nbytes: int = 1,
    ) -> None:
        self.disk = Budget(limit)
        self._block_nbytes = block_nbytes
        self.keep_clean = keep_clean
        self._entries = ledger.entries
        self._candidates = candidates
        self._effects = effects
        self._counters = counters
        # Oldest first. To find the first of a plain dictionary takes a look at each one before it
        # that has gone.
        self._redundant: OrderedDict[int, None] = OrderedDict()
        self._redundant_nbytes = 0

    # -- a record is going to be written -----------------------------------------------------------

    def reserve(self, entry: Entry, nbytes: int) -> bool:
        """Charge `nbytes` for the record of a value in spilling. False if the quota forbids it.

        Redundant records are given up first, if that is enough.
        """
        nbytes = self._in_blocks(nbytes)
        more = nbytes - entry.disk_nbytes
        if self.exceeded(more):
            entry.need = nbytes
            return False
        self.reclaim(more)
        self._charge(entry, nbytes)
        return True

    def promise(self, nbytes: int) -> Reservation | None:
        """Promise `nbytes` to the record of a value that is never in memory; release it later.

        Returns None if the quota forbids it, or while values are blocked: a disk that refuses is
        not asked again by each one that comes. Redundant records are given up first, if that is
        enough.
        """
        nbytes = self._in_blocks(nbytes)
        if self._candidates.blocked or self.exceeded(nbytes):
            return None
        self.reclaim(nbytes)
        reservation = Reservation(Kind.TRANSFER, nbytes)
        self.disk.grant(reservation)
        return reservation

    def exceeded(self, more: int) -> bool:
        """Whether `more` bytes do not fit on disk, even if all redundant records are given up."""
        more = self._in_blocks(more)
        return self.disk.limit is not None and self.disk.committed - self._redundant_nbytes + more > self.disk.limit

    def reclaim(self, more: int = 0) -> None:
        """Give up redundant records, the oldest first, until `more` bytes fit on disk."""
        limit = self.disk.limit
        while limit is not None and self._redundant and self.disk.committed + more > limit:
            self.give_up(self._entries[next(iter(self._redundant))])
            self._counters.records_reclaimed += 1

    # -- a record is there -------------------------------------------------------------------------

    def enter(self, entry: Entry, nbytes: int) -> None:
        """A new value is on disk, in a record of `nbytes`."""
        entry.settle_below(Tier.DISK)
        self._charge(entry, nbytes)

    def written(self, entry: Entry, nbytes: int) -> None:
        """The record of a value that is being spilled takes `nbytes`, whatever was reserved."""
        self._charge(entry, nbytes)

    def keep(self, entry: Entry) -> None:
        """Note that the record is redundant from now on, because the value is in memory as well."""
        self._redundant[entry.pid] = None
        self._redundant_nbytes += entry.disk_nbytes

    def need(self, entry: Entry) -> None:
        """Undo that, before the value leaves memory or its record goes. No-op if it was not."""
        if entry.pid in self._redundant:
            del self._redundant[entry.pid]
            self._redundant_nbytes -= entry.disk_nbytes

    # -- a record goes -----------------------------------------------------------------------------

    def unwritten(self, entry: Entry) -> None:
        """The record of a value that was being spilled did not come to be."""
        if entry.disk_nbytes:
            entry.need = entry.disk_nbytes
        self._charge(entry, 0)

    def give_up(self, entry: Entry) -> None:
        """Delete a redundant record."""
        entry.drop(Tier.DISK)
        self.need(entry)
        self._delete(entry)
        self._candidates.dirtied(entry)

    def lose(self, entry: Entry) -> None:
        """The record turned out to be gone or damaged. What is left of it is to be deleted."""
        entry.lose(Tier.DISK)
        self._delete(entry)

    def forget(self, entry: Entry) -> None:
        """Neither value nor record is needed any more. Others may find room on disk now."""
        self.need(entry)
        freed = entry.disk_nbytes
        self._delete(entry)
        self._candidates.relieve(freed)

    def _delete(self, entry: Entry) -> None:
        self._charge(entry, 0)
        self._effects.deleted.append(entry.pid)

    def _charge(self, entry: Entry, nbytes: int) -> None:
        nbytes = self._in_blocks(nbytes)
        self.disk.used += nbytes - entry.disk_nbytes
        entry.disk_nbytes = nbytes

    def _in_blocks(self, nbytes: int) -> int:
        return -(-nbytes // self._block_nbytes) * self._block_nbytes

    def validate(self) -> None:
        """Raise AssertionError unless redundant records are those of values in memory. O(n)."""
        self.disk.validate()
        for pid, entry in self._entries.items():
            assert (pid in self._redundant) == (entry.resident and entry.has(Tier.DISK)), entry
        assert self._redundant.keys() <= self._entries.keys()
        redundant = sum(self._entries[pid].disk_nbytes for pid in self._redundant)
        assert redundant == self._redundant_nbytes, (redundant, self._redundant_nbytes)
        if self.disk.limit is not None:
            # More than that only after the limit was lowered, or when records came from elsewhere.
            assert self.disk.committed <= self.disk.limit or not self._redundant
