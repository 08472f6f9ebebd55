"""The model behind :class:`gpuspill.testing.oracle.Oracle`: known facts, allowed moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass

from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.policy import Order
from gpuspill.core.residency import State
from gpuspill.core.state import SpillState

__all__ = ["Model", "ModelPromise", "ModelValue"]


@dataclass(slots=True, eq=False)
class ModelValue:
    """What the model knows of one value; sizes in bytes."""

    nbytes: int
    memory: bool = True
    disk: bool = False
    move: str = ""  # "down", "up" or nothing
    pins: int = 0
    record: int = 0
    unspillable: bool = False
    lost: bool = False
    blocked: bool = False  # a spill failed since the last retry: a reason not to try again
    barred: bool = False  # and nothing happened since that would be a reason to try again
    suspect: bool = False  # it was held at some time since the last retry
    invalidated: bool = False  # it was stored anew while it moved
    small: bool = False  # it was when its spill began
    stalled: bool = False  # its spill takes too long
    taken: bool = False  # it was used while it was written, and not compared since

    @property
    def charged(self) -> int:
        """Bytes it takes in memory now."""
        return self.nbytes if self.memory or self.move == "up" else 0

    @property
    def movable(self) -> bool:
        """Whether evicting it could be considered, held or not."""
        return self.memory and not self.move and not self.pins and (self.disk or not self.unspillable)

    @property
    def candidate(self) -> bool:
        """Whether the state has no excuse not to evict it."""
        return self.movable and not self.blocked and not self.suspect

    @property
    def state(self) -> State:
        """The name that the contract gives to its copies and move."""
        if self.lost:
            return State.LOST
        if self.memory:
            return State.SPILLING if self.move else State.CLEAN if self.disk else State.RESIDENT
        return State.RESTORING if self.move else State.SPILLED


@dataclass(slots=True, eq=False)
class ModelPromise:
    """What the model knows of one reservation; bytes."""

    kind: Kind
    nbytes: int
    order: Order = ()
    number: int = 0  # counts up, each time that one joins the line or becomes more urgent
    granted: bool = False
    detached: bool = False
    beyond: bool = False  # let in although it did not fit, and has not ended
    served_by: int = 0  # turns after which it must have had its own


def _small_below(limit: int | None) -> int:
    return 25 if limit is not None and limit >= 80 else 0


class Model:
    """Values as flags, keys as a dictionary, sums from scratch; judges the state.

    Parameters
    ----------
    limit, disk_limit, keep_clean
        See :class:`~gpuspill.core.state.SpillState`.
    """

    def __init__(self, *, limit: int | None, disk_limit: int | None = None, keep_clean: bool = True) -> None:
        self.held: set[int] = set()
        self.state = SpillState(
            limit=limit,
            disk_limit=disk_limit,
            held=self.held.__contains__,
            keep_clean=keep_clean,
            small_below=_small_below,
        )
        self.values: dict[int, ModelValue] = {}
        self.keys: dict[Hashable, int] = {}
        self.uses: dict[Hashable, dict[Hashable, Order]] = {}
        self.promises: dict[Reservation, ModelPromise] = {}
        self.waiting: list[Reservation] = []
        self.turns = 0
        self.arriving: dict[Reservation, int] = {}  # records of values that never were in memory, in the making
        self.offset = 0
        self.limit = limit
        self.disk_limit = disk_limit
        self.keep_clean = keep_clean
        self.counts = Counter[str]()
        self.events = 0
        self._asked = 0
        self.stuck = False
        self._seen: set[int] = set()

    # -- sums, each time from scratch --------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of values in memory, arriving ones included."""
        return sum(value.charged for value in self.values.values())

    @property
    def leaving(self) -> int:
        """Bytes of values that are being written, in good time."""
        return sum(value.nbytes for value in self.values.values() if value.move == "down" and not value.stalled)

    @property
    def reserved(self) -> int:
        """Bytes promised and not arrived."""
        return sum(promise.nbytes for promise in self.promises.values() if promise.granted)

    @property
    def disk_used(self) -> int:
        """Bytes of records."""
        return sum(value.record for value in self.values.values())

    @property
    def disk_free(self) -> int | None:
        """Bytes that a record may take if redundant ones are given up; None for no limit."""
        needed = sum(value.record for value in self.values.values() if not (value.memory and value.disk))
        return None if self.disk_limit is None else self.disk_limit - needed - sum(self.arriving.values())

    def first(self) -> Reservation | None:
        """Return whose turn it is: by age each eighth time, else by priority."""
        if self._age_decides():
            return next(r for r in self.waiting if r.kind is not Kind.AHEAD)
        promises = self.promises
        return min(self.waiting, key=lambda r: (promises[r].order, promises[r].kind, promises[r].number), default=None)

    def _age_decides(self) -> bool:
        return self.turns % 8 == 7 and any(r.kind is not Kind.AHEAD for r in self.waiting)

    def needed(self) -> list[Reservation]:
        """Return those for whom room is made: waiting tasks, and the first if it is none."""
        first = self.first()
        return [r for r in self.waiting if r.kind is Kind.TASK or r is first]

    def beyond(self) -> list[Reservation]:
        """Return those who were let in beyond the limit and whose end others wait for."""
        return [r for r, promise in self.promises.items() if promise.beyond and not promise.detached]

    def demand(self) -> int:
        """Bytes that they need."""
        return sum(self.promises[reservation].nbytes for reservation in self.needed())

    def excess(self) -> int | None:
        """Bytes still to be chosen for eviction; None without a limit."""
        if self.limit is None:
            return None
        return self.used + self.reserved + self.offset + self.demand() - self.leaving - self.limit

    def next_use(self, pid: int) -> Order | None:
        """When a value is used next, by any of its keys. Not known of a value with very many."""
        keys = self.keys_of(pid)
        if len(keys) > 32:
            return None
        orders = [order for key in keys for order in self.uses.get(key, {}).values()]
        return min(orders, default=None)

    def keys_of(self, pid: int) -> list[Hashable]:
        """Return the keys that hold a value."""
        return [key for key, holds in self.keys.items() if holds == pid]

    def small(self, value: ModelValue) -> bool:
        """Whether a value goes only if no other can."""
        return value.nbytes < _small_below(self.limit)

    def enough(self, values: Iterable[ModelValue], missing: int) -> bool:
        """Whether evicting these may free so many bytes; small ones have to be enough."""
        values = list(values)
        if any(not self.small(value) for value in values):
            return True
        if any(value.move == "down" and not (value.small or value.stalled) for value in self.values.values()):
            return True
        return sum(value.nbytes for value in values) + self.leaving >= max(1 + self.leaving, missing)

    def where(self, wanted: Callable[[ModelValue], bool]) -> list[int]:
        """Return the proxies of some values, oldest first."""
        return [pid for pid, value in self.values.items() if wanted(value)]

    # -- judgement ---------------------------------------------------------------------------------

    def _judge(
        self,
        *,
        asked: Reservation | None = None,
        chosen: int | None = None,
        written: int | None = None,
        more: int = 0,
        forced: bool = False,
        relented: bool = False,
    ) -> list[int]:
        """Take the effects, apply them as far as allowed, and compare everything.

        Parameters
        ----------
        asked
            The reservation that the event made.
        chosen, written
            The proxy whose spill the event began or completed.
        more
            Bytes for which the event made room although it did not need them in the end.
        forced
            One value had to go, needed or not.
        relented
            One may have been let in although another one was there that does not fit either.

        Returns
        -------
        list of int
            The proxies that were evicted.
        """
        self.events += 1
        self.state.validate()
        effects = self.state.effects.take()
        values = self.values
        forgotten = set(effects.forgotten)
        assert len(forgotten) == len(effects.forgotten), "forgotten twice"
        evicted: list[int] = []
        for pid in effects.dropped:
            value = values[pid]
            assert value.memory, f"dropped {pid}, which is not in memory: {value}"
            assert not value.move, f"dropped {pid} in the middle of a move: {value}"
            assert not value.pins, f"dropped {pid}, which is in use: {value}"
            value.memory = False
            if pid not in forgotten:
                assert value.disk, f"dropped the only copy of {pid}"
                assert pid not in self.held, f"dropped {pid}, which is held: nothing was freed"
                evicted.append(pid)
                if pid != written:
                    self.counts["clean_drops"] += 1
        for pid in effects.deleted:
            value = values[pid]
            assert value.disk, f"deleted a record that does not exist: {pid} {value}"
            assert value.memory or value.lost or pid in forgotten, f"deleted the only copy of {pid}"
            value.disk, value.record = False, 0
            # If it is as it was, it took more room on disk than there is.
            value.blocked |= pid == written and not (value.invalidated or value.taken)
        for pid in forgotten:
            value = values.pop(pid)
            assert pid not in self.keys.values(), f"forgot {pid}, which has keys"
            assert not value.pins, f"forgot {pid}, which is in use"
            assert not value.move, f"forgot {pid} in the middle of a move"
            assert not value.memory, f"forgot {pid}, but its value is not let go"
            assert not value.disk, f"forgot {pid}, but its record is not deleted"
            self.held.discard(pid)
        if forgotten.intersection(effects.deleted):
            for value in values.values():
                value.barred = False  # there is more room on disk than before
        for pid, value in values.items():
            assert pid in self.keys.values() or value.pins or value.move, f"{pid} is not needed: {value}"
            assert value.memory or value.disk or value.lost, f"no copy left of {pid}: {value}"
        self._judge_grants(effects.granted, asked, relented)
        self._judge_need(evicted, chosen, written, more, forced)
        self._compare()
        return evicted

    def _judge_grants(self, told: list[Reservation], asked: Reservation | None, relented: bool) -> None:
        granted = set(told)
        assert len(granted) == len(told), "told twice"
        assert asked not in granted, "told of what the caller sees anyway"
        if asked is not None and asked.granted:
            granted.add(asked)
        order = []
        committed = self.used + self.reserved + self.offset
        while granted:
            reservation = self.first()
            assert reservation in granted, "granted out of turn"
            assert reservation is not None
            granted.remove(reservation)
            self.waiting.remove(reservation)
            # One who asks when no one waits, and for whom there is room, is in no line.
            self.turns += reservation is not asked or reservation.overrun or bool(self.waiting)
            order.append(reservation)
            promise = self.promises[reservation]
            if reservation.overrun:
                self.counts["overruns"] += 1
                self._judge_overrun(promise, committed, relented)
                relented = False
            promise.granted = True
            committed += promise.nbytes
            assert reservation.overrun or self.limit is None or committed <= self.limit, (
                f"granted {committed} of {self.limit} bytes"
            )
        assert [r for r in order if r is not asked] == told, "told in another order than granted"
        if asked is not None and not asked.granted:
            self.counts["waits"] += 1
        self._judge_waiting(committed)

    def _judge_overrun(self, promise: ModelPromise, committed: int, relented: bool) -> None:
        """One is let in without room: none can be made, and no other such one is in."""
        assert self.limit is not None
        assert committed + promise.nbytes > self.limit, "counted as an overrun, but it fits"
        left = [value for value in self.values.values() if value.candidate and not self.stuck]
        missing = committed + promise.nbytes - self.limit
        assert not self.enough(left, missing), f"an overrun, although {left} could go"
        tiny = self._is_tiny(promise)
        others = self.beyond() if not tiny and committed > self.limit else []
        assert relented or not others, f"an overrun of {committed - self.limit} bytes, and {others} is one already"
        promise.beyond = not tiny

    def _is_tiny(self, promise: ModelPromise) -> bool:
        """Whether several of its size may be let in beyond the limit at a time."""
        return promise.nbytes < max(1, _small_below(self.limit))

    def _judge_waiting(self, committed: int) -> None:
        """No one waits without a reason that goes away, nor for ever."""
        first = self.first()
        if first is None:
            return
        assert self.limit is not None, "waits without a limit"
        need = self.promises[first].nbytes
        assert committed + need > self.limit, "waits, although there is room"
        runs = not self._is_tiny(self.promises[first]) and committed > self.limit and self.beyond()
        left = [value for value in self.values.values() if value.movable and not self.stuck]
        assert runs or self.enough(left, committed + need - self.limit), "waits for nothing"
        for reservation in self.waiting:
            late = self.turns - self.promises[reservation].served_by
            assert late < 0 or reservation.kind is Kind.AHEAD, f"{reservation} was passed over too often"

    def _judge_need(self, evicted: list[int], chosen: int | None, written: int | None, more: int, forced: bool) -> None:
        """Without the last victim it would not have been enough."""
        excess = self.excess()
        if forced:
            if chosen is not None:
                return  # that one had to go
            evicted = evicted[:-1] if written is None else [pid for pid in evicted if pid != written]
        if chosen is not None:
            assert excess is not None, f"spills {chosen} without a limit"
            excess += self.values[chosen].nbytes
            assert excess > 0, f"spills {chosen} although that is not needed"
        if evicted:
            assert excess is not None, f"evicted {evicted} without a limit"
            last = evicted[-1]
            if last == written:
                excess += self.leaving  # it is gone for sure, other spills in flight may fail
            assert excess + self.values[last].nbytes + more > 0, f"evicted {evicted} although that was not needed"

    def _compare(self) -> None:
        state, values = self.state, self.values.values()
        ledger = state.ledger
        assert {key: entry.pid for key, entry in ledger.keys.items()} == self.keys
        assert ledger.entries.keys() == self.values.keys()
        for pid, value in self.values.items():
            entry = ledger.entries[pid]
            assert entry.state is value.state, (entry, value)
            assert entry.pins == value.pins, (entry, value)
            assert (entry.nbytes, entry.disk_nbytes) == (value.nbytes, value.record), (entry, value)
            assert entry.unspillable == value.unspillable, (entry, value)
            assert set(entry.keys) == set(self.keys_of(pid)), (entry, value)
        assert state.memory.used == self.used
        assert state.memory.leaving == self.leaving
        assert state.memory.reserved == self.reserved
        assert state.memory.demand == self.demand()
        assert state.memory.offset == self.offset
        assert state.disk.used == self.disk_used
        assert state.disk.reserved == sum(self.arriving.values())
        assert state.charges.pinned_nbytes == sum(value.charged for value in values if value.pins)
        spilled = [value.nbytes for value in values if value.state is State.SPILLED]
        assert (state.charges.spilled, state.charges.spilled_nbytes) == (len(spilled), sum(spilled))
        assert state.charges.unspillable == sum(value.unspillable for value in values)
        counters = asdict(state.counters)
        del counters["records_reclaimed"]  # which of several, and so how many, is the state's choice
        assert counters == {name: self.counts[name] for name in counters}
        assert list(state.memory.line.waiting) == self.waiting
        assert state.memory.line.first() is self.first()
        assert state.memory.beyond == len(self.beyond())
        for reservation, promise in self.promises.items():
            assert (reservation.granted, reservation.nbytes) == (promise.granted, promise.nbytes)
        if not self.keep_clean:
            assert not self.where(lambda value: value.state is State.CLEAN), "a needless record was kept"
        if self.disk_limit is not None:
            redundant = any(value.memory and value.disk for value in values)
            disk = self.disk_used + sum(self.arriving.values())
            assert disk <= self.disk_limit or not redundant, "over the quota, but a record is redundant"
