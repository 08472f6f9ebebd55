"""An independent model of what :class:`~gpuspill.core.state.SpillState` has to guarantee.

:class:`Oracle` stands in front of a state and has its methods. Each call goes to the state; what
the state decided is then judged by the model, which shares no code with it: keys are a dictionary,
a value is a few flags, every total is summed up again after each event. The model does not predict
*which* decision is made where several are allowed; it knows which are allowed:

===================  ================================================================================================
guarantee            how it is judged
===================  ================================================================================================
never-lost           a copy is dropped only if another one exists or the value is not needed
counted once         every counter of the state equals the sum over the model's values
pins                 a value in use is never dropped, whatever becomes of its keys
admission            granted by priority, each eighth turn by age; beyond the limit only when
                     nothing can make room, one at a time, counted as an overrun
no deadlock          a wait is for a value that can leave, or for the end of an overrun that
                     does not wait itself; driven to the end, no one waits at all
no starvation        with n others before it in age, one who waits is served within 8 (n + 1) turns
no more than needed  without its last victim, what was evicted would not have been enough
order                a value with a known use is a victim only if none is needed later, or never;
                     a small one only if no other could go; none is waited for unless all of them
                     are enough
disk quota           records never take more than is allowed
stalled              no task waits for a spill that takes too long, nor for writers that are all stuck
in use               what was used while it was written, and not compared since, keeps no record of it
one bad key          what is held, blocked or unspillable never keeps another value from being spilled
===================  ================================================================================================

Events that the state must refuse go through :meth:`Oracle.refused`, which checks that nothing
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.policy import Order
from gpuspill.core.residency import State
from gpuspill.testing.model import Model, ModelPromise, ModelValue

__all__ = ["Oracle"]


class Oracle(Model):
    """A state and the model that judges it.

    Parameters
    ----------
    limit, disk_limit, keep_clean
        See :class:`~gpuspill.core.state.SpillState`.

    Attributes
    ----------
    state
        The state. Read it as you like, but change it through the oracle only.
    values
        The model's values by proxy.
    keys
        The proxies by key.
    promises
        The model's reservations, released ones excluded.
    held
        Proxies that are held from outside; see :meth:`hold`.
    events
        How many events were judged.
    """

    # -- ownership ---------------------------------------------------------------------------------

    def insert(self, key: Hashable, nbytes: int, *, spillable: bool = True) -> int:
        """See :meth:`SpillState.insert`."""
        pid = self.state.insert(key, nbytes, spillable=spillable)
        self._enter(key, pid, ModelValue(nbytes, unspillable=not spillable))
        self._judge()
        assert self.values[pid].memory, "a value that was just stored is not in memory"
        return pid

    def insert_below(self, key: Hashable, nbytes: int, record: int) -> int:
        """See :meth:`SpillState.insert_below`."""
        pid = self.state.insert_below(key, nbytes, record)
        self._enter(key, pid, ModelValue(nbytes, memory=False, disk=True, record=record))
        self._judge()
        return pid

    def reserve_below(self, nbytes: int) -> Reservation | None:
        """See :meth:`SpillState.reserve_below`."""
        before, free, blocked = self.disk_used, self.disk_free, self.state.candidates.blocked > 0
        reservation = self.state.reserve_below(nbytes)
        if reservation is not None:
            self.arriving[reservation] = nbytes
        self._judge()
        if reservation is None:
            assert self.disk_used == before, "records were given up for one that is not going to be written"
        refused = blocked or (free is not None and nbytes > free)
        assert (reservation is None) == refused, f"{nbytes} bytes, {free} free on disk, {blocked=}"
        return reservation

    def settle_below(self, reservation: Reservation, key: Hashable, nbytes: int, record: int) -> int | None:
        """See :meth:`SpillState.settle_below`."""
        pid = self.state.settle_below(reservation, key, nbytes, record)
        del self.arriving[reservation]
        free = self.disk_free
        if pid is not None:
            self._enter(key, pid, ModelValue(nbytes, memory=False, disk=True, record=record))
            self.counts["spills"] += 1
            self.counts["spilled_nbytes"] += nbytes
        self._judge()
        assert (pid is None) == (free is not None and record > free), f"{record} bytes, {free} free on disk"
        return pid

    def release_below(self, reservation: Reservation) -> None:
        """See :meth:`Budget.release`."""
        self.arriving.pop(reservation, None)
        self.state.disk.release(reservation)
        self._judge()

    def _enter(self, key: Hashable, pid: int, value: ModelValue) -> None:
        assert pid not in self._seen, "the number of a proxy was used again"
        self._seen.add(pid)
        self.values[pid] = value
        self.keys[key] = pid

    def alias(self, key: Hashable, pid: int) -> None:
        """See :meth:`SpillState.alias`."""
        self.state.alias(key, pid)
        self.keys[key] = pid
        self._judge()

    def invalidate(self, pid: int) -> None:
        """See :meth:`SpillState.invalidate`."""
        value = self.values[pid]
        value.invalidated = bool(value.move)
        self.state.invalidate(pid)
        self._judge()
        assert value.move or not value.disk, f"{value} was stored anew, and what it was before is kept"

    def shrink_value(self, pid: int, nbytes: int) -> None:
        """See :meth:`SpillState.shrink_value`."""
        value = self.values[pid]
        value.nbytes, value.unspillable, value.invalidated = nbytes, True, bool(value.move)
        self.state.shrink_value(pid, nbytes)
        self._judge()
        assert value.memory, "what is left of a value must not leave memory"
        assert value.move or not value.disk, f"most of {value} is elsewhere, and a record of all of it is kept"

    def remove(self, key: Hashable) -> None:
        """See :meth:`SpillState.remove`."""
        self.state.remove(key)
        del self.keys[key]
        self._judge()

    # -- use ---------------------------------------------------------------------------------------

    def hold(self, pid: int) -> None:
        """The outside refers to a value from now on."""
        self.held.add(pid)
        self.values[pid].suspect = True

    def let_go(self, pid: int) -> None:
        """The outside refers to a value no more. The state learns of it by a retry."""
        self.held.discard(pid)

    def touch(self, pid: int) -> None:
        """See :meth:`SpillState.touch`."""
        self.state.touch(pid)
        value = self.values[pid]
        value.taken = value.move == "down"
        self._judge()

    def pin(self, pid: int) -> None:
        """See :meth:`SpillState.pin`."""
        self.state.pin(pid)
        self.values[pid].pins += 1
        self._judge()

    def unpin(self, pid: int) -> None:
        """See :meth:`SpillState.unpin`."""
        self.state.unpin(pid)
        self.values[pid].pins -= 1
        self._judge()

    def expect_use(self, key: Hashable, user: Hashable, order: Order) -> None:
        """See :meth:`Candidates.expect`."""
        self.state.candidates.expect(key, user, order)
        self.uses.setdefault(key, {})[user] = order
        self._judge()

    def drop_use(self, key: Hashable, user: Hashable) -> None:
        """See :meth:`Candidates.unexpect`."""
        self.state.candidates.unexpect(key, user)
        self.uses.get(key, {}).pop(user, None)
        self._judge()

    # -- spilling ----------------------------------------------------------------------------------

    def next_spill(self, *, force: bool = False) -> int | None:
        """See :meth:`Spills.next`."""
        candidates = self.where(lambda value: value.candidate)
        pid = self.state.spills.next(force=force)
        if pid is None:
            evicted = self._judge(forced=force)
            assert evicted or not (force and candidates), f"nothing had to go, but {candidates} could have"
            excess = self.excess()
            if excess is not None and excess > 0:
                left = self.where(lambda value: value.candidate)
                assert not left, f"{excess} bytes over, but {left} could be spilled"
            return None
        victim = self.values[pid]
        assert victim.movable, f"{victim} is no candidate"
        assert not victim.barred, f"{victim} was to be left alone until the next retry"
        assert pid not in self.held, f"{victim} is held, spilling it frees nothing"
        assert not victim.disk, f"{victim} has a record, writing it again is a waste"
        victim.move, victim.small = "down", self.small(victim)
        self._judge(chosen=pid, forced=force)
        use = self.next_use(pid)
        large = self.where(lambda value: value.candidate and not self.small(value))
        assert not (victim.small and large), f"{pid} is small, {large} are not"
        if use is not None and not victim.small:
            for other in large:
                others = self.next_use(other)
                assert others is not None, f"{pid} is used at {use}, {other} never"
                assert others <= use, f"{pid} is used at {use}, {other} only at {others}"
        return pid

    def begin_spill(self, pid: int) -> bool:
        """See :meth:`Spills.begin`."""
        value = self.values[pid]
        may = value.movable and not value.barred and not value.disk and pid not in self.held
        begun = self.state.spills.begin(pid)
        assert begun or not (may and value.candidate), f"{value} could have left"
        if begun:
            assert may, f"{value} must not leave now"
            value.move, value.small = "down", self.small(value)
        self._judge(chosen=pid if begun else None, forced=True)
        return begun

    def reserve_record(self, pid: int, nbytes: int) -> bool:
        """See :meth:`Spills.reserve_record`."""
        before = self.disk_used
        allowed = self.state.spills.reserve_record(pid, nbytes)
        if allowed:
            self.values[pid].record = nbytes
        self._judge()
        if not allowed:
            assert self.disk_free is not None
            assert self.disk_used == before, "records were given up for one that is not going to be written"
            assert nbytes - self.values[pid].record > self.disk_free, "refused, although there is room on disk"
        return allowed

    def in_doubt(self, pid: int) -> bool:
        """See :meth:`Spills.in_doubt`."""
        doubtful = self.state.spills.in_doubt(pid)
        value = self.values[pid]
        assert doubtful == value.taken, f"{value} was used or not, but the state says {doubtful}"
        value.taken = False
        self._judge()
        return doubtful

    def doubt(self, pid: int) -> None:
        """See :meth:`Spills.doubt`."""
        self.state.spills.doubt(pid)
        self.values[pid].taken = True
        self._judge()

    def complete_spill(self, pid: int, nbytes: int, *, force: bool = False) -> None:
        """See :meth:`Spills.complete`."""
        self.state.spills.complete(pid, nbytes, force=force)
        value = self.values[pid]
        value.suspect |= value.taken  # a reason to look at others first
        value.stalled = False
        value.move, value.disk, value.record = "", True, nbytes
        self.counts["spills"] += 1
        self.counts["spilled_nbytes"] += value.nbytes
        self._judge(written=pid, forced=force)
        self._old_is_gone(value)

    def _old_is_gone(self, value: ModelValue) -> None:
        """What was on disk or on its way is not kept if the value was stored anew."""
        assert not (value.invalidated and value.disk), f"{value} was stored anew, and what it was before is kept"
        assert not (value.taken and value.disk), f"{value} may have been changed, and what was written of it is kept"
        value.invalidated = value.taken = False

    def fail_spill(self, pid: int, *, forever: bool) -> None:
        """See :meth:`Spills.fail`."""
        self.state.spills.fail(pid, forever=forever)
        value = self.values[pid]
        value.move, value.record, value.invalidated, value.taken, value.stalled = "", 0, False, False, False
        value.unspillable |= forever
        self.counts["spill_failures"] += 1
        value.blocked = value.barred = not forever
        self._judge()

    def stall_spill(self, pid: int) -> None:
        """See :meth:`SpillState.stall_spill`."""
        self.values[pid].stalled = True
        self.state.stall_spill(pid)
        self._judge()

    def set_stuck(self, stuck: bool) -> None:
        """See :meth:`SpillState.set_stuck`."""
        self.stuck = stuck
        self.state.set_stuck(stuck)
        self._judge()

    def correct_size(self, pid: int, nbytes: int) -> None:
        """See :meth:`SpillState.correct_size`."""
        self.state.correct_size(pid, nbytes)
        self.values[pid].nbytes = nbytes
        self._judge()

    def retry(self) -> None:
        """See :meth:`SpillState.retry`."""
        self._excuse_nobody()
        self.state.retry()
        self._judge()

    def _excuse_nobody(self) -> None:
        for pid, value in self.values.items():
            if not value.pins:  # one in use that failed is to be left alone until a retry that finds it unused
                value.blocked = value.barred = False
            value.suspect = pid in self.held

    # -- restoring ---------------------------------------------------------------------------------

    def begin_restore(self, pid: int, reservation: Reservation | None = None) -> None:
        """See :meth:`Restores.begin`."""
        value = self.values[pid]
        self.state.restores.begin(pid, reservation)
        assert value.state is State.SPILLED, value
        value.move = "up"
        promise = None if reservation is None else self.promises.get(reservation)
        if promise is not None and promise.granted:
            promise.nbytes -= min(promise.nbytes, value.nbytes)
        self._judge()

    def begin_prefetch(self, pid: int, order: Order) -> bool:
        """See :meth:`Restores.begin_ahead`."""
        value = self.values[pid]
        uses = {other: self.next_use(other) for other in self.values}
        clean = {other for other in self.values if self.values[other].state is State.CLEAN}
        others = self.needed()
        begun = self.state.restores.begin_ahead(pid, order)
        if begun:
            assert value.state is State.SPILLED, value
            value.move = "up"
            self.counts["prefetches"] += 1
        for other in self._judge(more=0 if begun else value.nbytes):
            use = uses[other]
            assert other in clean
            assert not self.small(self.values[other]), f"{other} is small"
            assert use is None or use > order, f"{other}, which is used at {use}, went for one used at {order}"
        if begun and self.limit is not None:
            needed = sum(self.promises[r].nbytes for r in others if not r.granted)
            taken = self.used + self.reserved + self.offset - self.leaving
            assert taken + needed <= self.limit, "a prefetch took room that others need"
        return begun

    def complete_restore(self, pid: int) -> None:
        """See :meth:`Restores.complete`."""
        self.state.restores.complete(pid)
        value = self.values[pid]
        value.move, value.memory = "", True
        self.counts["restores"] += 1
        self.counts["restored_nbytes"] += value.nbytes
        self._judge()
        self._old_is_gone(value)

    def fail_restore(self, pid: int, *, lost: bool) -> None:
        """See :meth:`Restores.fail`."""
        self.state.restores.fail(pid, lost=lost)
        value = self.values[pid]
        value.move, value.lost, value.invalidated = "", lost, False
        self.counts["restore_failures"] += 1
        self.counts["lost"] += lost
        self._judge()
        if pid in self.values and lost:
            assert not value.disk
            assert not value.record

    # -- admission ---------------------------------------------------------------------------------

    def reserve(self, nbytes: int, kind: Kind, order: Order = ()) -> Reservation:
        """See :meth:`Room.reserve`."""
        reservation = self.state.room.reserve(nbytes, kind, order)
        self._ask(reservation, nbytes, kind, order)
        self._judge(asked=reservation)
        return reservation

    def _ask(self, reservation: Reservation, nbytes: int, kind: Kind, order: Order) -> None:
        older = sum(other.kind is not Kind.AHEAD for other in self.waiting)
        self._asked += 1
        self.promises[reservation] = ModelPromise(
            kind, nbytes, order, self._asked, served_by=self.turns + 8 * (older + 1)
        )
        self.waiting.append(reservation)

    def reserve_now(self, nbytes: int, kind: Kind, order: Order = ()) -> Reservation | None:
        """See :meth:`Room.reserve_now`."""
        first = self.first()
        ahead = first is not None and (self._age_decides() or (first.order, first.kind) <= (order, kind))
        reservation = self.state.room.reserve_now(nbytes, kind, order)
        if reservation is not None:
            assert not ahead, f"{first} came first"
            assert reservation.granted
            assert not reservation.overrun, "one would have to wait, and it does not fit"
            self._ask(reservation, nbytes, kind, order)
            self._judge(asked=reservation)
        else:
            self._judge(more=nbytes)
            committed = self.used + self.reserved + self.offset
            assert ahead or (self.limit is not None and committed + nbytes > self.limit), "refused, but there is room"
        return reservation

    def improve(self, reservation: Reservation, order: Order) -> None:
        """See :meth:`Room.improve`."""
        promise = self.promises.get(reservation)
        if promise is not None and not promise.granted and order < promise.order:
            self._asked += 1
            promise.order, promise.number = order, self._asked
        self.state.room.improve(reservation, order)
        self._judge()

    def detach(self, reservation: Reservation) -> None:
        """See :meth:`Room.detach`."""
        if reservation in self.promises:
            self.promises[reservation].detached = True
        self.state.room.detach(reservation)
        self._judge()

    def relent(self) -> None:
        """See :meth:`Room.relent`."""
        waited = len(self.waiting)
        stalled = self.state.stalled is not None
        self.state.room.relent()
        self._judge(relented=True)
        assert not stalled or len(self.waiting) < waited, "no one was let in, although nothing can make room"

    def release(self, reservation: Reservation) -> None:
        """See :meth:`Room.release`."""
        self.promises.pop(reservation, None)
        if reservation in self.waiting:
            self.waiting.remove(reservation)
        self.state.room.release(reservation)
        self._judge()

    def shrink(self, reservation: Reservation, nbytes: int) -> None:
        """See :meth:`Room.shrink`."""
        promise = self.promises.get(reservation)
        if promise is not None and promise.granted:
            promise.nbytes = min(promise.nbytes, nbytes)
        self.state.room.shrink(reservation, nbytes)
        self._judge()

    def settle(self, reservation: Reservation, nbytes: int) -> None:
        """See :meth:`SpillState.settle`."""
        promise = self.promises.get(reservation)
        if promise is not None and promise.granted:
            promise.nbytes -= min(promise.nbytes, nbytes)
        self.state.settle(reservation, nbytes)

    def set_offset(self, nbytes: int) -> None:
        """See :meth:`SpillState.set_offset`."""
        self.offset = nbytes
        self.state.set_offset(nbytes)
        self._judge()

    def set_limits(self, limit: int | None, disk_limit: int | None) -> None:
        """See :meth:`SpillState.set_limits`."""
        self.limit, self.disk_limit = limit, disk_limit
        self._excuse_nobody()
        self.state.set_limits(limit, disk_limit)
        self._judge()

    # -- what must be refused ----------------------------------------------------------------------

    def refused(self, error: type[Exception], event: Callable[[], object]) -> None:
        """The event, a call of a method of the *state*, raises `error` and changes nothing."""
        with pytest.raises(error):
            event()
        assert not self.state.effects.take(), "refused, but something has to be done"
        self._judge()
