"""The spilling decisions of one store: events in, decisions out, no side effects.

This module covers:

- which proxy is spilled, dropped or kept, and when (background eviction, clean copies, the disk
quota);
- who may add bytes now and who waits (reservations, admission without deadlock);
- what becomes of a value when keys are deleted or overwritten, and moves complete or fail, in any
order.

It does *not* cover:

- values, bytes, files, threads: :mod:`gpuspill.manager` acts on the decisions;
- what a key means, tasks and their inputs: :mod:`gpuspill.distributed`.

What must happen outside after an event is collected in :class:`Effects`; the caller takes them with
:meth:`SpillState.take_effects` before it lets go of its lock, and performs them after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from gpuspill.core.budget import Budget, Kind, Reservation
from gpuspill.core.ledger import Entry, Ledger
from gpuspill.core.policy import EvictionQueue, NextUse, Order
from gpuspill.core.readahead import ReadAhead
from gpuspill.core.residency import State, Tier
from gpuspill.errors import InvalidTransition

__all__ = ["Counters", "Effects", "SpillState"]


@dataclass(slots=True)
class Effects:
    """What the caller has to do after an event, outside its lock.

    Attributes
    ----------
    dropped
        Proxies whose value in memory is to be let go.
    deleted
        Proxies whose record is to be deleted.
    granted
        Reservations that were granted while they waited.
    forgotten
        Proxies that no longer exist.
    loosened
        Proxies of memory that no value has any more once what is dropped is gone; then :meth:`SpillState.loosen`.
    """

    dropped: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    granted: list[Reservation] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    loosened: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.dropped or self.deleted or self.granted or self.forgotten or self.loosened)


@dataclass(slots=True)
class Counters:
    """Ever-increasing counts of decisions; bytes are bytes in memory unless said otherwise."""

    spills: int = 0
    spilled_nbytes: int = 0
    spill_failures: int = 0
    clean_drops: int = 0
    clean_dropped_nbytes: int = 0
    restores: int = 0
    restored_nbytes: int = 0
    restore_failures: int = 0
    prefetches: int = 0
    overruns: int = 0
    waits: int = 0
    lost: int = 0
    records_reclaimed: int = 0


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
        ``held(pid)`` tells whether somebody outside holds on to a value in memory, so that evicting
        it would free nothing. Called during decisions; must be fast and must not call back.
    keep_clean
        Keep the record of a restored value, so that evicting it again is not a write.

    Notes
    -----
    Not thread-safe; the owner calls every method under one lock. Every method is O(log n) or better
    in the number of values, amortised, except :meth:`validate`.

    A proxy is a *candidate* for eviction when its value is in memory, nobody pins it, nothing
    moves, and it is neither unspillable nor set aside. Two kinds are set aside until :meth:`retry`:
    **held** ones and **blocked** ones, whose last spill failed for a reason that may pass (disk
    full, quota, I/O error). Setting them aside is what keeps one bad value from stopping the
    others. A blocked one stays so when it is used meanwhile: that makes no room on disk.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        disk_limit: int | None = None,
        held: Callable[[int], bool] = _never,
        keep_clean: bool = True,
    ) -> None:
        self.memory = Budget(limit)
        self.disk = Budget(disk_limit)
        self.ledger = Ledger()
        self.queue = EvictionQueue()
        self.uses = NextUse()
        self.read_ahead = ReadAhead()
        self.counters = Counters()
        self.keep_clean = keep_clean
        self._is_held = held
        self._held: dict[int, None] = {}
        self._blocked: dict[int, None] = {}
        self._clean: dict[int, None] = {}  # in memory with a record, which could be reclaimed
        self._redundant_nbytes = 0  # bytes of these records
        self._freed = 0  # bytes of records that went since values are blocked, and for which none was tried again
        #: How often records went and left room on disk.
        self.relieved = 0
        self._spilling = 0
        self._loose = 0
        self._effects = Effects()
        #: Kept up to date so that statistics need no scan.
        self.pinned_nbytes = 0
        self.unspillable = 0
        self.spilled = 0  # values that are on disk only and not on their way back
        self.spilled_nbytes = 0
        self.away = 0  # values that are not in memory: spilled, on their way back, or lost

    # -- ownership ---------------------------------------------------------------------------------

    def insert_part(self, nbytes: int) -> int:
        """Memory enters that values keep alive. Returns its proxy, which :meth:`insert` must name at once."""
        self.memory.used += nbytes
        return self.ledger.create(nbytes).pid

    def insert(
        self, key: Hashable, nbytes: int, *, spillable: bool = True, parts: tuple[int, ...] = (), apart_nbytes: int = 0
    ) -> int:
        """A new value enters memory under `key`, replacing what the key held.

        Parameters
        ----------
        key
            Any hashable.
        nbytes
            Bytes to charge to it.
        spillable
            Whether it may leave memory.
        parts
            Proxies in memory of what it keeps alive, each once. They are no victims while it is in memory.
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
            entry.parts, entry.apart_nbytes = parts, apart_nbytes
            for pid in parts:
                self.ledger.entries[pid].owners += 1
                self._unlist(pid)
        entry.unspillable = not spillable
        self.unspillable += entry.unspillable
        self.memory.used += nbytes
        before = self.ledger.bind(key, entry)
        if before is not None:
            self._release_if_unused(before)
        self._classify(entry)
        self._balance()
        return entry.pid

    def insert_below(self, key: Hashable, nbytes: int, disk_nbytes: int) -> int:
        """A value that is on disk already enters under `key`. Returns its proxy."""
        hash(key)  # raises before anything is charged
        entry = self.ledger.create(nbytes)
        entry.residency.settle_below(Tier.DISK)
        entry.disk_nbytes = disk_nbytes
        self.disk.used += disk_nbytes
        self._count_spilled(entry, 1)
        self.away += 1
        before = self.ledger.bind(key, entry)
        if before is not None:
            self._release_if_unused(before)
            self._balance()
        self._reclaim()
        return entry.pid

    def reserve_below(self, nbytes: int) -> Reservation | None:
        """A record is going to be written of a value that never is in memory.

        Returns None if the quota forbids it, or while values are blocked: a disk that refuses is not asked again by
        each one that comes. Ends in :meth:`settle_below` or :meth:`release_below`. Redundant records are given up
        first, if that is enough.
        """
        if self._blocked or self._over_quota(nbytes):
            return None
        self._reclaim(nbytes)
        reservation = Reservation(Kind.TRANSFER, nbytes)
        self.disk.grant(reservation)
        return reservation

    def settle_below(self, reservation: Reservation, key: Hashable, nbytes: int, disk_nbytes: int) -> int | None:
        """That record is written: the value enters, as by :meth:`insert_below`.

        Returns None, and nothing enters, if the record is so much larger than was reserved that it is over the quota.
        """
        self.disk.release(reservation)
        if self._over_quota(disk_nbytes):
            return None
        pid = self.insert_below(key, nbytes, disk_nbytes)
        self.counters.spills += 1
        self.counters.spilled_nbytes += nbytes
        return pid

    def release_below(self, reservation: Reservation) -> None:
        """That record was not written. Idempotent."""
        self.disk.release(reservation)

    def alias(self, key: Hashable, pid: int) -> None:
        """`key` holds the value of an existing proxy too."""
        entry = self.ledger.entries[pid]
        before = self.ledger.bind(key, entry)
        if before is not None:
            self._release_if_unused(before)
        self._classify(entry)
        self._balance()

    def renew(self, pid: int) -> None:
        """The value was stored anew under its key, perhaps changed: what is below no longer counts.

        It must be in memory, or on its way there from the very object that was stored.
        """
        entry = self.ledger.entries[pid]
        if entry.residency.moving:
            entry.renewed = True  # when it has ended
        elif entry.residency.resident and entry.residency.has(Tier.DISK):
            self._delete_record(entry)
            self._classify(entry)
            self._balance()

    def remove(self, key: Hashable) -> None:
        """Forget `key`. KeyError if unknown. Its value goes when no other key, pin or move needs it."""
        self._release_if_unused(self.ledger.unbind(key))
        self._balance()

    def loosen(self, pids: Iterable[int]) -> None:
        """The values that had these parts are gone from memory: they count as any others, the first to go."""
        for pid in pids:
            entry = self.ledger.entries.get(pid)
            if entry is None or not entry.loose:
                continue
            entry.loose = False
            self._loose -= 1
            if not entry.owners:
                self._release_if_unused(entry)
        self._balance()

    def divide(self, pid: int, nbytes: int, parts: tuple[int, ...]) -> None:
        """A value that came back into memory turned out to keep memory alive that others may keep alive as well.

        Parameters
        ----------
        pid
            The proxy, in memory, without parts.
        nbytes
            Bytes to charge to it from now on.
        parts
            As for :meth:`insert`.
        """
        entry = self.ledger.entries[pid]
        apart_nbytes = entry.nbytes
        self._resize(entry, nbytes)
        entry.parts, entry.apart_nbytes = parts, apart_nbytes
        for part in parts:
            self.ledger.entries[part].owners += 1
            self._unlist(part)
            for _ in range(entry.residency.pins):
                self.pin(part)
        self._balance()

    def find(self, key: Hashable) -> Entry:
        """Return the entry that `key` holds; KeyError if unknown."""
        return self.ledger.keys[key]

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, pid: int) -> None:
        """Note a use."""
        self.queue.touch(pid)
        self.read_ahead.used(pid)

    def pin(self, pid: int) -> None:
        """The value is in use: it is no victim until every pin is undone, and survives the deletion of its keys."""
        entry = self.ledger.entries[pid]
        for part in entry.parts:
            self.pin(part)
        entry.residency.pin()
        self.read_ahead.used(pid)
        if entry.residency.pins == 1:
            if self._charged(entry):
                self.pinned_nbytes += entry.nbytes
            self._unlist(pid)
            if self.memory.first() is not None:
                self._grant_waiting()  # it may have been the last thing that could make room

    def unpin(self, pid: int) -> None:
        """Undo one pin."""
        entry = self.ledger.entries[pid]
        entry.residency.unpin()
        for part in entry.parts:
            self.unpin(part)
        if not entry.residency.pins:
            if self._charged(entry):
                self.pinned_nbytes -= entry.nbytes
            if not entry.keys:
                self._release_if_unused(entry)
            else:
                self._classify(entry)
            self._balance()

    def expect_use(self, key: Hashable, user: Hashable, order: Order) -> None:
        """`user` is going to read `key`; a smaller `order` is sooner. The key need not exist yet."""
        self.uses.expect(key, user, order)
        entry = self.ledger.keys.get(key)
        if entry is not None:
            entry.had_use = True
            if entry.pid in self.queue:
                self._classify(entry)

    def drop_use(self, key: Hashable, user: Hashable) -> None:
        """`user` has read `key` or never will."""
        if self.uses.drop(key, user):
            entry = self.ledger.keys.get(key)
            if entry is not None:
                entry.had_use = True
                if entry.pid in self.queue:
                    self._classify(entry)

    # -- spilling ----------------------------------------------------------------------------------

    def next_spill(self, *, force: bool = False) -> int | None:
        """Choose what to write to disk next, if anything has to be, and begin that move.

        Clean values that come first in the order are dropped on the way (a state change, not a
        write).

        Parameters
        ----------
        force
            Whether one value has to go even if the limit does not ask for it. A clean one that is dropped
            will do.

        Returns
        -------
        int or None
            The proxy whose value the caller must now serialise and write, ending with
            :meth:`complete_spill` or :meth:`fail_spill`.
        """
        self._balance()
        while force or self.memory.excess() > 0:
            pid = self.queue.peek()
            if pid is None:
                break
            entry = self.ledger.entries[pid]
            if self._set_aside_if_held(pid):
                continue
            if entry.residency.has(Tier.DISK):
                self._drop(entry)
                force = False
                continue
            self._unlist(pid)
            entry.residency.begin(Tier.HOST, Tier.DISK)
            entry.leaving = entry.nbytes + sum(self._alone_nbytes(part) for part in entry.parts)
            self.memory.leaving += entry.leaving
            self._spilling += 1
            return pid
        self._grant_waiting()
        return None

    def reserve_record(self, pid: int, nbytes: int) -> bool:
        """The record of a spill in flight will take `nbytes` on disk. Returns False if the quota forbids it.

        Records of values that are in memory as well are redundant and are given up first, if that is enough.
        """
        entry = self._spilling_entry(pid)
        entry.need = nbytes
        more = nbytes - entry.disk_nbytes
        if self._over_quota(more):
            return False
        self._reclaim(more)
        self.disk.used += more
        entry.disk_nbytes = nbytes
        return True

    def complete_spill(self, pid: int, disk_nbytes: int, *, force: bool = False) -> None:
        """The record is written and verified.

        The value in memory is let go if its room is still needed and nobody took it up meanwhile;
        else the record stays behind as a clean copy, if such are kept. A record that turns out so much larger
        than was reserved that it is over the quota is given up: the value stays in memory, as if the write had failed.

        Parameters
        ----------
        pid
            The proxy.
        disk_nbytes
            Size of the record in bytes.
        force
            Whether the value is to go even if the limit does not ask for it.
        """
        entry = self._spilling_entry(pid)
        self.disk.used += disk_nbytes - entry.disk_nbytes
        entry.disk_nbytes = disk_nbytes
        wanted = force or self.memory.over()  # before its bytes stop counting as leaving
        self._end_spill(entry)
        entry.residency.complete()
        self.counters.spills += 1
        self.counters.spilled_nbytes += entry.nbytes
        refusals, entry.refusals = entry.refusals, 0
        if not self._in_use(entry):
            self._release_if_unused(entry)
        elif entry.renewed:
            entry.renewed = False
            self._keep_record(entry)
            self._delete_record(entry)
            self._classify(entry)
        else:
            self._keep_record(entry)
            if self._over_quota(disk_nbytes):
                entry.need, entry.refused, entry.refusals = disk_nbytes, True, refusals + 1
                self._delete_record(entry)
                self._classify(entry)
            else:
                self._classify(entry)
                if wanted and pid in self.queue and not self._set_aside_if_held(pid):
                    self._drop(entry, clean=False)
                elif not self.keep_clean:
                    self._delete_record(entry)
            self._reclaim()
        self._balance()

    def fail_spill(self, pid: int, *, forever: bool) -> None:
        """The spill came to nothing; the value stays where it was.

        Parameters
        ----------
        pid
            The proxy.
        forever
            It can never be spilled (not serialisable); otherwise it is tried again after
            :meth:`retry`.
        """
        entry = self._spilling_entry(pid)
        self.disk.used -= entry.disk_nbytes
        entry.disk_nbytes = 0
        self._end_spill(entry)
        entry.residency.fail()
        entry.renewed = False
        self.counters.spill_failures += 1
        if forever:
            entry.unspillable = True
            self.unspillable += 1
        else:
            entry.refused = True
            entry.refusals += 1
        if not entry.keys and not entry.residency.pins:
            self._release_if_unused(entry)
        else:
            self._classify(entry)
        self._balance()

    def correct_size(self, pid: int, nbytes: int) -> None:
        """The value turned out to take `nbytes` in memory."""
        entry = self.ledger.entries[pid]
        if entry.parts:
            entry.apart_nbytes = nbytes
            return
        self._resize(entry, nbytes)
        self._balance()

    def _resize(self, entry: Entry, nbytes: int) -> None:
        residency = entry.residency
        more = nbytes - entry.nbytes
        if self._charged(entry):
            self.memory.used += more
            if residency.pins:
                self.pinned_nbytes += more
        elif residency.has(Tier.DISK):
            self.spilled_nbytes += more
        if residency.target == Tier.DISK:
            self.memory.leaving += more
            entry.leaving += more
        entry.nbytes = nbytes

    def retry(self, held: int = 1000, blocked: int = 1000) -> None:
        """Consider again what was set aside: the outside world may have let go of it, or the disk may have room.

        Parameters
        ----------
        held, blocked
            How many at most of those that somebody held, and of those that could not be written, longest
            set aside first, so that a call stays short with any number of values.
        """
        for pid in list(itertools.islice(self._held, held)):
            del self._held[pid]
            self._classify(self.ledger.entries[pid])
        for pid in list(itertools.islice(self._blocked, blocked)):
            self._unblock(pid)
        # Once: between the two, those who wait would be let go although there are candidates again.
        self._balance()

    @property
    def held(self) -> int:
        """Number of values that are set aside because somebody held them."""
        return len(self._held)

    @property
    def blocked(self) -> int:
        """Number of values that are set aside because they could not be written."""
        return len(self._blocked)

    @property
    def set_aside(self) -> int:
        """Number of values that :meth:`retry` would consider again."""
        return self.held + self.blocked

    # -- restoring ---------------------------------------------------------------------------------

    def begin_restore(self, pid: int, reservation: Reservation | None = None) -> None:
        """The caller is going to read the record of a spilled value; its bytes are charged from now on.

        With a reservation the bytes come out of that promise.
        """
        entry = self.ledger.entries[pid]
        entry.residency.begin(Tier.DISK, Tier.HOST)
        self.read_ahead.missed()
        self._charge_restore(entry, 1)
        if reservation is not None:
            self.memory.settle(reservation, entry.nbytes)
        self._balance()

    def begin_prefetch(self, pid: int, order: Order) -> bool:
        """Begin a restore ahead of its use, if there is room for it.

        Room is what is free, plus clean values that are needed later than `order` or not at all: a
        prefetch never causes a write and never takes what others wait for. What was read ahead and
        not used yet may take a share of the limit that depends on how that went before.
        """
        entry = self.ledger.entries[pid]
        if entry.residency.state is not State.SPILLED:
            return False
        budget = self.memory
        if not self.read_ahead.allows(entry.nbytes, None if budget.limit is None else budget.limit - budget.offset):
            return False
        room = self._make_room_ahead(entry.nbytes, order)
        if room:
            self.read_ahead.begin(pid, entry.nbytes)
            entry.residency.begin(Tier.DISK, Tier.HOST)
            self._charge_restore(entry, 1)
            self.counters.prefetches += 1
        self._grant_waiting()  # what was looked at may have been the last thing that could make room
        return room

    def _make_room_ahead(self, nbytes: int, order: Order) -> bool:
        budget = self.memory
        while budget.limit is not None and budget.committed + budget.demand - budget.leaving + nbytes > budget.limit:
            victim = self.queue.peek()
            if victim is None:
                return False
            if self._set_aside_if_held(victim):
                continue
            other = self.ledger.entries[victim]
            use = self.queue.next_use(victim)
            if not other.residency.has(Tier.DISK) or (use is not None and use <= order):
                return False
            self._drop(other)
        return True

    def complete_restore(self, pid: int) -> None:
        """The value is in memory again, read and verified."""
        entry = self._restoring_entry(pid)
        entry.residency.complete()
        renewed, entry.renewed = entry.renewed, False
        self.away -= 1
        self.counters.restores += 1
        self.counters.restored_nbytes += entry.nbytes
        if not entry.keys and not entry.residency.pins:
            self._release_if_unused(entry)
        else:
            self._keep_record(entry)
            if self.keep_clean and not renewed:
                self._reclaim()
            else:
                self._delete_record(entry)
        if pid in self.ledger.entries:
            self._classify(entry)
        self._balance()

    def fail_restore(self, pid: int, *, lost: bool) -> None:
        """The value could not be brought back.

        Parameters
        ----------
        pid
            The proxy.
        lost
            The record itself is gone or damaged; there is no copy left. Otherwise reading may be
            tried again.
        """
        entry = self._restoring_entry(pid)
        entry.residency.fail()
        entry.renewed = False
        self.read_ahead.gone(pid)
        self._charge_restore(entry, -1)
        self.counters.restore_failures += 1
        if lost:
            entry.residency.lose(Tier.DISK)
            self._count_spilled(entry, -1)
            self.disk.used -= entry.disk_nbytes
            entry.disk_nbytes = 0
            self._effects.deleted.append(pid)
            self.counters.lost += 1
        if not entry.keys and not entry.residency.pins:
            self._release_if_unused(entry)
        self._balance()

    # -- admission ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int, kind: Kind) -> Reservation:
        """Ask for room. The reservation is granted now, or appears in :attr:`Effects.granted` later.

        It waits only while something can still make room: a spill in flight, or a candidate that
        was not tried yet. When neither is left it is granted all the same and counted as an
        overrun, so admission alone never stops a worker.
        """
        granted = self.reserve_now(nbytes, kind)
        if granted is not None:
            return granted
        reservation = Reservation(kind, max(0, nbytes))
        self.memory.queue(reservation)
        self._grant_waiting()
        if reservation.granted:
            self._effects.granted.remove(reservation)
        else:
            self.counters.waits += 1
        return reservation

    def reserve_now(self, nbytes: int, kind: Kind) -> Reservation | None:
        """Ask for room that is there, or where there are clean values. None if it would have to be waited for."""
        if self.memory.first() is not None and (kind is not Kind.TASK or self.memory.tasks):
            return None
        if not self.memory.fits(nbytes):
            self._balance(nbytes)
        if not self.memory.fits(nbytes):
            return None
        reservation = Reservation(kind, max(0, nbytes))
        self.memory.grant(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give back what is left of a reservation, or stop waiting for it. Idempotent."""
        self.memory.release(reservation)
        self._grant_waiting()

    def settle(self, reservation: Reservation, nbytes: int) -> None:
        """`nbytes` of a granted reservation are about to be charged by the event that follows.

        Grants nothing to others; the following event does.
        """
        self.memory.settle(reservation, nbytes)

    def shrink(self, reservation: Reservation, nbytes: int) -> None:
        """Keep at most `nbytes` of a granted reservation: the rest turned out not to be needed."""
        if reservation.granted and reservation.nbytes > nbytes:
            self.memory.settle(reservation, reservation.nbytes - nbytes)
            self._grant_waiting()

    def set_limits(self, limit: int | None, disk_limit: int | None) -> None:
        """Change the limits, in bytes; None for no limit.

        Under a lower disk limit redundant records are given up. Those that hold the only copy stay.
        """
        self.memory.limit = limit
        self.disk.limit = disk_limit
        self._reclaim()
        self.retry()

    def set_offset(self, nbytes: int) -> None:
        """Set the bytes of process memory that nobody accounts for (may be negative)."""
        self.memory.offset = nbytes
        self._balance()

    # -- for the caller ----------------------------------------------------------------------------

    @property
    def pressure(self) -> bool:
        """Whether :meth:`next_spill` may find something to do, now or after :meth:`retry`."""
        if self.memory.first() is not None:
            return True
        return self.memory.excess() > 0 and bool(self.queue or self._held or self._blocked)

    @property
    def loose(self) -> int:
        """Number of parts that :meth:`loosen` has to be called for."""
        return self._loose

    @property
    def spilling(self) -> int:
        """Number of spills in flight."""
        return self._spilling

    def take_effects(self) -> Effects:
        """Return what has to be done outside, once."""
        effects = self._effects
        if effects:
            self._effects = Effects()
        return effects

    def validate(self) -> None:
        """Raise AssertionError if any two indices contradict each other. O(n)."""
        self.memory.validate()
        self.disk.validate()
        self.queue.validate(self._clean)
        self.read_ahead.validate(lambda pid: self._charged(self.ledger.entries[pid]))
        self.ledger.validate(self.memory.used, self.disk.used)
        leaving = spilling = pinned = unspillable = spilled = spilled_nbytes = 0
        owners: dict[int, int] = {}
        for pid, entry in self.ledger.entries.items():
            residency = entry.residency
            assert entry.keys or residency.pins or residency.moving or entry.owners or entry.loose, (
                f"unused proxy {entry}"
            )
            assert not entry.parts or residency.resident, f"{entry} keeps memory alive and is not there"
            for part in entry.parts:
                owners[part] = owners.get(part, 0) + 1
                assert self.ledger.entries[part].residency.resident, f"{entry} has a part that is not there"
            listed = [pid in self.queue, pid in self._held, pid in self._blocked]
            assert sum(listed) == int(self._eligible(entry)), (entry, listed)
            assert pid not in self.queue or not entry.refused, entry
            assert not entry.refused or not residency.has(Tier.DISK), entry
            assert (pid in self._clean) == (residency.resident and residency.has(Tier.DISK)), entry
            if residency.pins and self._charged(entry):
                pinned += entry.nbytes
            unspillable += entry.unspillable
            if residency.state is State.SPILLED:
                spilled += 1
                spilled_nbytes += entry.nbytes
            if residency.target == Tier.DISK:
                spilling += 1
            leaving += entry.leaving
            if pid in self.queue and entry.keys:
                assert self.queue.next_use(pid) == self._next_use(entry), entry
        entries = self.ledger.entries.values()
        assert owners == {entry.pid: entry.owners for entry in entries if entry.owners}
        assert self._loose == sum(entry.loose for entry in entries)
        assert leaving == self.memory.leaving, (leaving, self.memory.leaving)
        assert spilling == self._spilling
        assert pinned == self.pinned_nbytes, (pinned, self.pinned_nbytes)
        assert unspillable == self.unspillable
        assert (spilled, spilled_nbytes) == (self.spilled, self.spilled_nbytes)
        assert self.away == sum(not entry.residency.resident for entry in entries)
        for aside in (self._held, self._blocked, self._clean):
            assert aside.keys() <= self.ledger.entries.keys()
        assert set(self.queue) <= self.ledger.entries.keys()
        redundant = sum(self.ledger.entries[pid].disk_nbytes for pid in self._clean)
        assert redundant == self._redundant_nbytes, (redundant, self._redundant_nbytes)
        if self.disk.limit is not None:
            # More than that only after the limit was lowered, or when records came from elsewhere.
            assert self.disk.committed <= self.disk.limit or not self._clean
        first = self.memory.first()
        if first is not None:
            assert self._can_free(), "a reservation waits although nothing can make room"

    # -- internals ---------------------------------------------------------------------------------

    def _eligible(self, entry: Entry) -> bool:
        """Whether eviction may consider the entry, now or after a retry."""
        residency = entry.residency
        return (
            residency.resident
            and not residency.pins
            and not residency.moving
            and not entry.owners
            and not entry.loose
            and (not entry.unspillable or residency.has(Tier.DISK))
        )

    def _next_use(self, entry: Entry) -> Order | None:
        if len(entry.keys) == 1:
            (key,) = entry.keys
            return self.uses.next(key)
        return min((use for key in entry.keys if (use := self.uses.next(key)) is not None), default=None)

    def _classify(self, entry: Entry) -> None:
        """Put the entry where it belongs in the eviction order, as used just now."""
        pid = entry.pid
        if not self._eligible(entry):
            self._unlist(pid)
            return
        if pid in self._held or pid in self._blocked:
            return
        if entry.refused:
            self._blocked[pid] = None
            return
        order = self._next_use(entry)
        if order is not None:
            entry.had_use = True
        self.queue.add(pid, order, spent=entry.had_use, clean=pid in self._clean)

    def _unlist(self, pid: int) -> None:
        self.queue.discard(pid)
        self._held.pop(pid, None)
        self._blocked.pop(pid, None)

    def _set_aside_if_held(self, pid: int) -> bool:
        if not self._is_held(pid):
            return False
        self.queue.discard(pid)
        self._held[pid] = None
        return True

    def _balance(self, extra: int = 0) -> None:
        """Drop clean values that come first in the order while room is needed, then serve those who wait.

        Values that need a write are left to :meth:`next_spill`.
        """
        budget = self.memory
        if budget.limit is not None:
            while budget.excess() + extra > 0:
                pid = self.queue.peek()
                if pid is None:
                    break
                if self._set_aside_if_held(pid):
                    continue
                entry = self.ledger.entries[pid]
                if not entry.residency.has(Tier.DISK):
                    break
                self._drop(entry)
        if budget.first() is not None:
            self._grant_waiting()

    def _can_free(self) -> bool:
        return self._spilling > 0 or len(self.queue) > 0 or self._loose > 0

    def _grant_waiting(self) -> None:
        budget = self.memory
        while (first := budget.first()) is not None:
            if budget.fits(first.nbytes):
                budget.grant(first)
            elif self._can_free():
                return
            else:
                budget.grant(first, overrun=True)
                self.counters.overruns += 1
            self._effects.granted.append(first)

    def _drop(self, entry: Entry, *, clean: bool = True) -> None:
        """Let go of a value in memory of which a record exists."""
        self.read_ahead.evicted(entry.pid)
        self._unlist(entry.pid)
        entry.residency.drop(Tier.HOST)
        self._forget_record(entry)
        self.memory.used -= entry.nbytes
        self._effects.dropped.append(entry.pid)
        if clean:
            self.counters.clean_drops += 1
            self.counters.clean_dropped_nbytes += entry.nbytes
        if entry.parts:
            self._let_go_of_parts(entry)
            entry.nbytes = entry.apart_nbytes
        self.away += 1
        self._count_spilled(entry, 1)

    def _let_go_of_parts(self, entry: Entry) -> None:
        """The value is on its way out of memory, and with it what keeps its parts there."""
        parts, entry.parts = entry.parts, ()
        for pid in parts:
            part = self.ledger.entries[pid]
            part.owners -= 1
            if not self._in_use(part):
                self._release_if_unused(part)
            elif not part.owners and not part.loose:
                part.loose = True
                self._loose += 1
                self._effects.loosened.append(pid)

    def _keep_record(self, entry: Entry) -> None:
        """Note that the record of an entry is redundant from now on."""
        self._clean[entry.pid] = None
        self._redundant_nbytes += entry.disk_nbytes

    def _forget_record(self, entry: Entry) -> None:
        """Undo that, before the record or the value in memory goes."""
        if entry.pid in self._clean:
            del self._clean[entry.pid]
            self._redundant_nbytes -= entry.disk_nbytes

    def _over_quota(self, more: int) -> bool:
        """Whether `more` bytes do not fit on disk, even if all redundant records are given up."""
        return self.disk.limit is not None and self.disk.committed - self._redundant_nbytes + more > self.disk.limit

    def _reclaim(self, more: int = 0) -> None:
        """Give up redundant records, the oldest first, until `more` bytes fit on disk."""
        limit = self.disk.limit
        while limit is not None and self._clean and self.disk.committed + more > limit:
            self._delete_record(self.ledger.entries[next(iter(self._clean))])
            self.counters.records_reclaimed += 1

    def _delete_record(self, entry: Entry) -> None:
        """Give up the record of a value that is in memory as well."""
        entry.residency.drop(Tier.DISK)
        self._forget_record(entry)
        self.disk.used -= entry.disk_nbytes
        entry.disk_nbytes = 0
        self._effects.deleted.append(entry.pid)
        self.queue.dirty(entry.pid)
        if not self._eligible(entry):
            self._unlist(entry.pid)

    def _release_if_unused(self, entry: Entry) -> None:
        """Forget an entry that no key, pin or move needs."""
        residency = entry.residency
        if entry.keys:
            self._classify(entry)
            return
        if self._in_use(entry):
            return
        self._unlist(entry.pid)
        self._forget_record(entry)
        if residency.resident:
            self.memory.used -= entry.nbytes
            self._effects.dropped.append(entry.pid)
        if residency.has(Tier.DISK):
            if not residency.resident:
                self._count_spilled(entry, -1)
            freed, entry.disk_nbytes = entry.disk_nbytes, 0
            self.disk.used -= freed
            self._effects.deleted.append(entry.pid)
            self._relieve(freed)
        self.unspillable -= entry.unspillable
        self.away -= not residency.resident
        self._let_go_of_parts(entry)
        self.read_ahead.gone(entry.pid)
        self.ledger.forget(entry)
        self._effects.forgotten.append(entry.pid)

    @staticmethod
    def _in_use(entry: Entry) -> bool:
        """Whether a key, a pin, a move or another value needs the entry."""
        residency = entry.residency
        return bool(entry.keys or residency.pins or residency.moving or entry.owners or entry.loose)

    def _relieve(self, nbytes: int) -> None:
        """The disk has room for `nbytes` more: what failed for lack of it, and may fit now, is tried again.

        Only so many, longest set aside first, and only for so many bytes as became free: trying one means to serialise
        it, and perhaps to write most of it in vain.
        """
        self.relieved += 1
        self._freed += nbytes
        while self._blocked:
            pid = next(iter(self._blocked))
            entry = self.ledger.entries[pid]
            need = max(1, entry.need or entry.nbytes)
            if need > self._freed:
                return
            self._freed -= need
            self._unblock(pid)
        self._freed = 0

    def _unblock(self, pid: int) -> None:
        entry = self.ledger.entries[pid]
        del self._blocked[pid]
        entry.refused = False
        self._classify(entry)

    @staticmethod
    def _charged(entry: Entry) -> bool:
        """Whether the entry's bytes count as used: it is in memory or on its way there."""
        residency = entry.residency
        return residency.resident or residency.target == residency.origin

    def _charge_restore(self, entry: Entry, sign: int) -> None:
        """The entry is on its way to memory, or no longer."""
        self._count_spilled(entry, -sign)
        self.memory.used += sign * entry.nbytes
        if entry.residency.pins:
            self.pinned_nbytes += sign * entry.nbytes

    def _count_spilled(self, entry: Entry, sign: int) -> None:
        self.spilled += sign
        self.spilled_nbytes += sign * entry.nbytes

    def _end_spill(self, entry: Entry) -> None:
        self.memory.leaving -= entry.leaving
        entry.leaving = 0
        self._spilling -= 1

    def _alone_nbytes(self, pid: int) -> int:
        """Bytes of a part that goes with the one value that has it."""
        part = self.ledger.entries[pid]
        return part.nbytes if part.owners == 1 and not part.keys and not part.residency.pins else 0

    def _spilling_entry(self, pid: int) -> Entry:
        entry = self.ledger.entries[pid]
        if entry.residency.target != Tier.DISK:
            raise InvalidTransition(f"proxy {pid} is not being spilled")
        return entry

    def _restoring_entry(self, pid: int) -> Entry:
        entry = self.ledger.entries[pid]
        if entry.residency.target != Tier.HOST:
            raise InvalidTransition(f"proxy {pid} is not being restored")
        return entry
