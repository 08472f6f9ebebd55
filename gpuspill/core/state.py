"""The spilling decisions of one store: events in, decisions out, no side effects.

This module covers:

- what becomes of a value when keys are stored, shared, overwritten and deleted, in any order, and
  while it is used;
- how the parts of the core are put together: every event enters here.

The decisions are made by the parts:

- what may be evicted, and in which order: :mod:`gpuspill.core.candidates`;
- the quota of the disk and the records that are given up for it: :mod:`gpuspill.core.records`;
- how values leave memory and are forgotten: :mod:`gpuspill.core.lifetimes`;
- who may add bytes now and who waits (reservations, admission without deadlock):
  :mod:`gpuspill.core.admission`;
- moves down and up, and how they end: :mod:`gpuspill.core.spills`, :mod:`gpuspill.core.restores`.

It does *not* cover:

- values, bytes, files, threads: :mod:`gpuspill.manager` acts on the decisions;
- what a key means, tasks and their inputs: :mod:`gpuspill.distributed`.

What must happen outside after an event is collected in :class:`~gpuspill.core.effects.Effects`; the
caller takes them with :meth:`Effects.take <gpuspill.core.effects.Effects.take>` before it lets go
of its lock, and performs them after.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, MutableMapping
from typing import Any

from gpuspill.core.accounting import Charges
from gpuspill.core.admission import Room
from gpuspill.core.budget import Budget, Reservation
from gpuspill.core.candidates import Candidates
from gpuspill.core.effects import Counters, Effects
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.lifetimes import Lifetimes
from gpuspill.core.policy import MakePolicy
from gpuspill.core.readahead import ReadAhead
from gpuspill.core.records import Records
from gpuspill.core.residency import Tier
from gpuspill.core.restores import Restores
from gpuspill.core.spills import Spills
from gpuspill.errors import InvalidTransition

__all__ = ["SpillState"]


def _never(pid: int) -> bool:
    return False


class SpillState:
    """Everything gpuspill knows about the values of one store, and what it decides.

    Parameters
    ----------
    limit
        Bytes of values to keep in memory; None for no limit.
    disk_limit
        Bytes of records to keep on disk; None for no limit.
    held
        ``held(pid)`` tells whether anything outside refers to a value in memory, so that evicting
        it would free nothing. Called during decisions; must be fast and must not call back.
    keep_clean
        Keep the record of a restored value, so that evicting it again is not a write.
    small_below
        ``small_below(limit)`` tells below how many bytes a value is small, and so a victim only if
        no other can go; see :func:`gpuspill.core.eviction_queue.small_below`.
    policy
        Makes the eviction policy from the table of values; None:
        :class:`~gpuspill.core.policy.NextUsePolicy`.
    block_nbytes
        Block size in bytes: a record takes whole blocks on disk.
    make_entry, entries
        See :class:`~gpuspill.core.ledger.Ledger`.

    Attributes
    ----------
    memory, disk
        What is used and promised of either.
    candidates, spills, restores, room
        The parts that take events of their own: what is needed when, moves, and promises of room.
    ledger, charges, queue, uses, read_ahead, counters
        The other parts, to be read only.
    effects
        What has to be done outside; true if there is something.

    Notes
    -----
    Not thread-safe; the owner calls every method under one lock. Every method is O(log n) or better
    in the number of values, amortised, except :meth:`validate`.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        disk_limit: int | None = None,
        held: Callable[[int], bool] = _never,
        keep_clean: bool = True,
        small_below: Callable[[int | None], int] = lambda _: 0,
        policy: MakePolicy | None = None,
        block_nbytes: int = 1,
        make_entry: Callable[[int, int], Entry] = Entry,
        entries: MutableMapping[int, Any] | None = None,
    ) -> None:
        effects = self.effects = Effects()
        counters = self.counters = Counters()
        memory = self.memory = Budget(limit)
        ledger = self.ledger = Ledger(make_entry, entries)
        read_ahead = self.read_ahead = ReadAhead()
        charges = self.charges = Charges(memory)
        candidates = self.candidates = Candidates(
            ledger, held, small_below, policy, lambda error: effects.failures.append(error)
        )
        records = self._records = Records(disk_limit, keep_clean, ledger, candidates, effects, counters, block_nbytes)
        lifetimes = self._lifetimes = Lifetimes(ledger, charges, candidates, records, read_ahead, effects, counters)
        room = self.room = Room(charges, candidates, lifetimes, effects, counters)
        self.spills = Spills(ledger, charges, candidates, records, lifetimes, room, counters)
        self.restores = Restores(ledger, charges, candidates, records, lifetimes, room, read_ahead, counters)
        self.disk = records.disk
        self.queue = candidates.queue
        self.uses = candidates.uses
        candidates.limited(limit)

    # -- ownership ---------------------------------------------------------------------------------

    def insert_part(self, nbytes: int) -> int:
        """Memory enters that values keep alive. :meth:`insert` must name its proxy at once."""
        entry = self.ledger.create(nbytes)
        self.charges.enter(entry)
        return entry.pid

    def insert(
        self, key: Hashable, nbytes: int, *, spillable: bool = True, parts: tuple[int, ...] = (), apart_nbytes: int = 0
    ) -> int:
        """A new value enters memory under `key`, replacing what the key held.

        Parameters
        ----------
        nbytes
            Bytes to charge to it.
        spillable
            Whether it may leave memory.
        parts
            Proxies in memory of what it keeps alive, each once. They are no victims while it is in
            memory.
        apart_nbytes
            Bytes it takes when it comes back, which it does without them.

        Returns
        -------
        int
            Its proxy.
        """
        hash(key)  # raises before anything is charged
        entry = self.ledger.create(nbytes)
        if parts:
            self._lifetimes.take_parts(entry, parts, apart_nbytes)
        entry.unspillable = not spillable
        self.charges.enter(entry)
        self._bind(key, entry)
        self.candidates.classify(entry)
        self.room.balance()
        return entry.pid

    def insert_below(self, key: Hashable, nbytes: int, disk_nbytes: int) -> int:
        """A value that is on disk already enters under `key`. Returns its proxy."""
        hash(key)  # raises before anything is charged
        entry = self.ledger.create(nbytes)
        self._records.enter(entry, disk_nbytes)
        self.charges.enter_below(entry)
        if self._bind(key, entry):
            self.room.balance()
        self._records.reclaim()
        return entry.pid

    def reserve_below(self, nbytes: int) -> Reservation | None:
        """A record is going to be written of a value that never is in memory.

        Returns None if there is no room for it, see :meth:`Records.promise
        <gpuspill.core.records.Records.promise>`. Ends in :meth:`settle_below`, or, if it was not
        written, in ``disk.release``, which is idempotent.
        """
        return self._records.promise(nbytes)

    def settle_below(self, reservation: Reservation, key: Hashable, nbytes: int, disk_nbytes: int) -> int | None:
        """That record is written: the value enters, as by :meth:`insert_below`.

        Returns None, and nothing enters, if the record is so much larger than was reserved that it
        is over the quota.
        """
        self.disk.release(reservation)
        if self._records.exceeded(disk_nbytes):
            return None
        pid = self.insert_below(key, nbytes, disk_nbytes)
        self.counters.spills += 1
        self.counters.spilled_nbytes += nbytes
        return pid

    def alias(self, key: Hashable, pid: int) -> None:
        """`key` holds the value of an existing proxy too."""
        entry = self.ledger.entries[pid]
        self._bind(key, entry)
        self.candidates.classify(entry)
        self.room.balance()

    def invalidate(self, pid: int) -> None:
        """The value was stored anew under its key, perhaps changed: what is below no longer counts.

        It must be in memory, or on its way there from the very object that was stored.
        """
        entry = self.ledger.entries[pid]
        if entry.moving:
            entry.invalidated = True  # when it has ended
        elif entry.resident and entry.has(Tier.DISK):
            self._records.give_up(entry)
            self.candidates.classify(entry)
            self.room.balance()

    def remove(self, key: Hashable) -> None:
        """Forget `key`. KeyError if unknown. Its value goes unless a key, pin or move needs it."""
        self._lifetimes.release(self.ledger.unbind(key))
        self.room.balance()

    def release_parts(self, pids: Iterable[int]) -> None:
        """The values that had these parts left memory: the parts count as others, and go first."""
        self._lifetimes.release_parts(pids)
        self.room.balance()

    def split_parts(self, pid: int, nbytes: int, parts: tuple[int, ...]) -> None:
        """A restored value turned out to keep memory alive that others may keep alive as well.

        Parameters
        ----------
        pid
            The proxy, in memory, without parts.
        nbytes
            Bytes to charge to it from now on.
        """
        entry = self.ledger.entries[pid]
        apart_nbytes = entry.nbytes
        listed = self.queue.take_out(pid)
        self.charges.resize(entry, nbytes)
        self._lifetimes.take_parts(entry, parts, apart_nbytes)
        if listed:
            self.candidates.classify(entry)
        for part in parts:
            for _ in range(entry.pins):
                self.pin(part)
        self.room.balance()

    def correct_size(self, pid: int, nbytes: int) -> None:
        """The value turned out to take `nbytes` in memory."""
        entry = self.ledger.entries[pid]
        if entry.parts:
            entry.apart_nbytes = nbytes
            return
        listed = self.queue.take_out(pid)
        self.charges.resize(entry, nbytes)
        if listed:
            self.candidates.classify(entry)
        self.room.balance()

    def shrink_value(self, pid: int, nbytes: int) -> None:
        """Most of a value in memory went elsewhere: `nbytes` are left and never leave.

        A record of the whole no longer counts, nor does one that is being written.
        """
        entry = self.ledger.entries[pid]
        self.queue.take_out(pid)
        self.charges.resize(entry, nbytes)
        self.charges.keep(entry)
        self.invalidate(pid)
        self.candidates.classify(entry)
        self.room.balance()

    def find(self, key: Hashable) -> Entry:
        """Return the entry that `key` holds; KeyError if unknown."""
        return self.ledger.keys[key]

    def _bind(self, key: Hashable, entry: Entry) -> bool:
        """Let `key` hold the entry. Returns whether it held another one, which was released."""
        before = self.ledger.bind(key, entry)
        if before is None:
            return False
        self._lifetimes.release(before)
        return True

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, pid: int) -> None:
        """Note a use. A record in writing does not count then, see :meth:`.Spills.in_doubt`."""
        entry = self.ledger.entries[pid]
        if entry.target == Tier.DISK:
            entry.taken = True
        self.queue.touch(pid)
        self.read_ahead.used(pid)

    def pin(self, pid: int) -> None:
        """The value is in use: no victim, and kept without a key, until every pin is undone."""
        entry = self.ledger.entries[pid]
        if entry.rare is not None:
            for part in entry.parts:
                self.pin(part)
        entry.pin()
        self.read_ahead.used(pid)
        if entry.pins == 1:
            self.charges.pin(entry)
            self.candidates.unlist(pid)
            if self.memory.line.waiting:
                self.room.grant_waiting()  # it may have been the last thing that could make room

    def unpin(self, pid: int) -> None:
        """Undo one pin."""
        entry = self.ledger.entries[pid]
        entry.unpin()
        if entry.rare is not None:
            for part in entry.parts:
                self.unpin(part)
        if not entry.pins:
            self.charges.unpin(entry)
            self._lifetimes.release(entry)
            self.room.balance()

    def settle(self, reservation: Reservation, nbytes: int) -> None:
        """`nbytes` of a granted reservation are about to be charged by the event that follows.

        Grants nothing to others; the following event does.
        """
        self.memory.settle(reservation, nbytes)

    # -- limits ------------------------------------------------------------------------------------

    def set_limits(self, limit: int | None, disk_limit: int | None) -> None:
        """Change the limits, in bytes; None for no limit.

        Under a lower disk limit redundant records are given up. Those that hold the only copy stay.
        """
        self.memory.limit = limit
        self.disk.limit = disk_limit
        self.candidates.limited(limit)
        self._records.reclaim()
        self.retry()

    def set_grace(self, count: int) -> None:
        """Set how many of the values used up last are spared; see :mod:`gpuspill.core.policy`."""
        self.queue.policy.grace = count

    def set_offset(self, nbytes: int) -> None:
        """Set the bytes of unmanaged process memory (may be negative)."""
        self.memory.offset = nbytes
        self.room.balance()

    def retry(self, held: int = 1000, blocked: int = 1000) -> None:
        """Consider again what was set aside: it may be free now, or the disk have room.

        Parameters
        ----------
        held, blocked
            How many at most of those that were held, and of those that could not be written,
            longest set aside first, so that a call stays short with any number of values.
        """
        self.candidates.retry(held, blocked)
        # Once: between the two, those who wait would be let go although there are candidates again.
        self.room.balance()

    # -- moves that take too long ------------------------------------------------------------------

    def stall_spill(self, pid: int) -> None:
        """A spill takes too long: waits for it end, and other values go instead. Idempotent.

        It may still end, in any way.
        """
        entry = self.ledger.entries[pid]
        if entry.target != Tier.DISK:
            raise InvalidTransition(f"proxy {pid} is not being spilled")
        self.charges.stall_spill(entry)
        self.room.balance()

    def set_stuck(self, stuck: bool) -> None:
        """Tell whether all spill threads are stuck in stalled spills, so none can make room."""
        self.charges.stuck = stuck
        self.room.balance()

    # -- for the caller ----------------------------------------------------------------------------

    @property
    def pressure(self) -> bool:
        """Whether :meth:`.Spills.next` may find something to do, now or after :meth:`retry`."""
        memory = self.memory
        if memory.line.waiting:
            return True
        return memory.excess() > 0 and bool(self.candidates)

    @property
    def stalled(self) -> int | None:
        """See :attr:`Room.stalled <gpuspill.core.admission.Room.stalled>`."""
        return self.room.stalled

    @property
    def loose(self) -> int:
        """Number of parts that :meth:`release_parts` has to be called for."""
        return self._lifetimes.loose

    @property
    def spilling(self) -> int:
        """Number of spills in flight."""
        return self.charges.spilling

    @property
    def spilled(self) -> int:
        """Number of values that are on disk only and not on their way back."""
        return self.charges.spilled

    @property
    def spilled_nbytes(self) -> int:
        """Bytes that those would take in memory."""
        return self.charges.spilled_nbytes

    def validate(self) -> None:
        """Raise AssertionError if any two indices contradict each other. O(n)."""
        entries = self.ledger.entries
        self.ledger.validate(self.memory.used, self.disk.used)
        self.charges.validate(entries.values())
        self.candidates.validate()
        self._records.validate()
        self._lifetimes.validate()
        self.read_ahead.validate(lambda pid: entries[pid].charged)
        self.room.validate()
