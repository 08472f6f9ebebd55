"""Any order of any events of the core."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpuspill.core.budget import Kind
from gpuspill.core.policy import Order
from gpuspill.core.residency import State
from gpuspill.errors import InvalidTransition
from gpuspill.testing.oracle import Oracle
from gpuspill.testing.walks import Steps, pick, walk

__all__ = ["Choices", "SpillEvents", "SpillStateMachine", "walk_core"]

KEYS = "abcde"
SIZES = [30, 50, 40, 20, 10, 1, 0, 100]
LIMITS = [100, 50, 80, 30, 0, 1, 200, None]
KINDS = [*Kind, Kind.TASK]
OFFSETS = [0, 20, 90, -30]


class Choices(NamedTuple):
    """What an event may need to know, so that one strategy does for all events."""

    i: int = 0  # which one of those there are
    j: int = 0
    size: int = 30
    other: int = 30
    key: str = "a"
    flag: bool = False

    @property
    def order(self) -> Order:
        """When something is used."""
        return (float(self.j % 6),)


class SpillEvents:
    """The events of a :class:`~gpuspill.core.state.SpillState`, each judged by the oracle.

    An event for which there is no value in the right state brings one nearer to it instead, so that
    few steps do nothing.

    Parameters
    ----------
    limit, disk_limit, keep_clean
        Of the state.
    """

    #: How often each event comes: often what leads far, seldom what puts everything back.
    WEIGHTS: ClassVar[Mapping[str, int]] = {
        "insert": 8,
        "insert_below": 2,
        "reserve_below": 2,
        "settle_below": 2,
        "release_below": 1,
        "alias": 4,
        "invalidate": 2,
        "remove": 4,
        "touch": 2,
        "pin": 5,
        "unpin": 4,
        "hold": 3,
        "expect_use": 4,
        "drop_use": 2,
        "next_spill": 5,
        "force_spill": 2,
        "begin_spill": 2,
        "reserve_record": 3,
        "take_up": 2,
        "in_doubt": 2,
        "complete_spill": 5,
        "fail_spill": 4,
        "stall_spill": 2,
        "set_stuck": 2,
        "correct_size": 3,
        "shrink_value": 1,
        "retry": 2,
        "begin_restore": 5,
        "begin_prefetch": 4,
        "complete_restore": 5,
        "fail_restore": 3,
        "reserve": 6,
        "reserve_now": 3,
        "release": 4,
        "shrink": 2,
        "settle": 2,
        "improve": 2,
        "detach": 2,
        "relent": 1,
        "set_offset": 2,
        "set_limits": 1,
        "settle_down": 2,
        "relieve": 1,
        "refused": 1,
    }

    def __init__(self, *, limit: int | None, disk_limit: int | None, keep_clean: bool) -> None:
        self.oracle = Oracle(limit=limit, disk_limit=disk_limit, keep_clean=keep_clean)
        self.reservations: list[Any] = []
        self.arriving: list[Any] = []  # records in the making

    def do(self, event: str, choices: Choices) -> None:
        """Do one event."""
        getattr(self, event)(choices)

    # -- what there is; if there is none, something is done towards it -----------------------------

    def _known(self, c: Choices) -> int | None:
        if not self.oracle.values:
            self.insert(c)
        return pick(list(self.oracle.values), c.i)

    def _in(self, state: State, i: int) -> int | None:
        pids = self.oracle.where(lambda value: value.state is state)
        return pick(pids, i) if pids else None

    def _spilling(self, c: Choices) -> int | None:
        pid = self._in(State.SPILLING, c.i)
        if pid is None and (pid := self.oracle.next_spill()) is None:
            self.insert(c)
        return pid

    def _spilled(self, c: Choices) -> int | None:
        pid = self._in(State.SPILLED, c.i)
        if pid is None and c.flag:
            return self.oracle.insert_below(c.key, c.size, c.other)
        if pid is None and (spilling := self._spilling(c)) is not None:
            self.oracle.complete_spill(spilling, self.oracle.values[spilling].record)
        return pid

    def _restoring(self, c: Choices) -> int | None:
        pid = self._in(State.RESTORING, c.i)
        if pid is None and (spilled := self._spilled(c)) is not None:
            self.oracle.begin_restore(spilled)
            return spilled
        return pid

    # -- ownership ---------------------------------------------------------------------------------

    def insert(self, c: Choices) -> None:
        """Store a new value, under a new key or over an old one."""
        self.oracle.insert(c.key, c.size, spillable=c.j % 8 != 7)

    def insert_below(self, c: Choices) -> None:
        """A value enters that is on disk already."""
        self.oracle.insert_below(c.key, c.size, c.other)

    def reserve_below(self, c: Choices) -> None:
        """A value is going to be written that never is in memory."""
        if (reservation := self.oracle.reserve_below(c.other)) is not None:
            self.arriving.append(reservation)

    def settle_below(self, c: Choices) -> None:
        """It is written; its record is smaller or larger than it was said to be."""
        if self.arriving:
            reservation = pick(self.arriving, c.i)
            self.arriving.remove(reservation)
            record = max(0, reservation.nbytes + pick([0, 30, -5, 3], c.j))
            self.oracle.settle_below(reservation, c.key, c.size, record)

    def release_below(self, c: Choices) -> None:
        """It could not be written; perhaps that is said twice."""
        if self.arriving:
            reservation = pick(self.arriving, c.i)
            self.oracle.release_below(reservation)
            self.oracle.release_below(reservation)
            self.arriving.remove(reservation)

    def alias(self, c: Choices) -> None:
        """Store a known value under another key."""
        if (pid := self._known(c)) is not None:
            self.oracle.alias(c.key, pid)

    def invalidate(self, c: Choices) -> None:
        """Store a value again under its key, perhaps changed."""
        pids = self.oracle.where(lambda value: value.memory or value.move == "up")
        if pids:
            self.oracle.invalidate(pick(pids, c.i))

    def remove(self, c: Choices) -> None:
        """Delete a key."""
        if self.oracle.keys:
            self.oracle.remove(pick(list(self.oracle.keys), c.i))

    # -- use ---------------------------------------------------------------------------------------

    def touch(self, c: Choices) -> None:
        """Use a value."""
        if (pid := self._known(c)) is not None:
            self.oracle.touch(pid)

    def pin(self, c: Choices) -> None:
        """Pin a value, perhaps once more."""
        if (pid := self._known(c)) is not None:
            self.oracle.pin(pid)

    def unpin(self, c: Choices) -> None:
        """Undo a pin."""
        if pids := self.oracle.where(lambda value: value.pins > 0):
            self.oracle.unpin(pick(pids, c.i))

    def hold(self, c: Choices) -> None:
        """The outside takes or gives up a reference."""
        pid = self._known(c)
        if pid in self.oracle.held:
            self.oracle.let_go(pid)
        elif pid is not None:
            self.oracle.hold(pid)

    def expect_use(self, c: Choices) -> None:
        """A task is going to read a key, which may not exist yet."""
        self.oracle.expect_use(c.key, c.i % 3, c.order)

    def drop_use(self, c: Choices) -> None:
        """A task has read a key, or never will."""
        self.oracle.drop_use(c.key, c.i % 3)

    # -- spilling ----------------------------------------------------------------------------------

    def next_spill(self, c: Choices) -> None:
        """A spill thread looks for work."""
        self.oracle.next_spill()

    def force_spill(self, c: Choices) -> None:
        """Memory is needed at once: a value goes whether the limit asks for it or not."""
        pid = self.oracle.next_spill(force=True)
        if pid is not None and c.flag and self.oracle.reserve_record(pid, c.other):
            self.oracle.complete_spill(pid, c.other, force=True)
            if pid in self.oracle.values and self.oracle.values[pid].disk and pid not in self.oracle.held:
                assert self.oracle.values[pid].state in (State.SPILLED, State.CLEAN)

    def begin_spill(self, c: Choices) -> None:
        """A value is to leave for where it is, and not for its place in the order."""
        pids = self.oracle.where(lambda value: value.memory or value.disk)
        if pids:
            self.oracle.begin_spill(pick(pids, c.i))

    def reserve_record(self, c: Choices) -> None:
        """A value that is being spilled is serialised, its size is known now."""
        pid = self._spilling(c)
        if pid is not None and not self.oracle.values[pid].record and not self.oracle.reserve_record(pid, c.other):
            self.oracle.fail_spill(pid, forever=False)

    def take_up(self, c: Choices) -> None:
        """A user uses a value that is being written, or is found to have changed it."""
        if (pid := self._spilling(c)) is not None:
            if c.flag:
                self.oracle.touch(pid)
            else:
                self.oracle.doubt(pid)

    def in_doubt(self, c: Choices) -> None:
        """What is written of a value is compared with it, if it was used."""
        if (pid := self._spilling(c)) is not None:
            self.oracle.in_doubt(pid)

    def complete_spill(self, c: Choices) -> None:
        """The record is written; it is smaller or larger than it was said to be."""
        pid = self._spilling(c)
        if pid is not None:
            self.oracle.complete_spill(pid, max(0, self.oracle.values[pid].record + pick([0, 30, -5, 3], c.j)))

    def fail_spill(self, c: Choices) -> None:
        """It could not be written, now or ever."""
        if (pid := self._spilling(c)) is not None:
            self.oracle.fail_spill(pid, forever=c.j % 3 == 0)

    def stall_spill(self, c: Choices) -> None:
        """A spill takes too long, as may have been said before."""
        if (pid := self._spilling(c)) is not None:
            self.oracle.stall_spill(pid)

    def set_stuck(self, c: Choices) -> None:
        """No thread is left to write, or one is again."""
        self.oracle.set_stuck(c.j % 3 == 0)

    def correct_size(self, c: Choices) -> None:
        """Serialising taught something about a size."""
        if (pid := self._known(c)) is not None:
            self.oracle.correct_size(pid, c.size)

    def shrink_value(self, c: Choices) -> None:
        """Most of what a value has is somewhere else now."""
        if pids := self.oracle.where(lambda value: value.memory):
            self.oracle.shrink_value(pick(pids, c.i), c.size)

    def retry(self, c: Choices) -> None:
        """Time has passed."""
        self.oracle.retry()

    # -- restoring ---------------------------------------------------------------------------------

    def begin_restore(self, c: Choices) -> None:
        """A task wants a value that is on disk, with a reservation (of any state) or without."""
        reservation = pick(self.reservations, c.j) if c.flag and self.reservations else None
        if (pid := self._spilled(c)) is not None:
            self.oracle.begin_restore(pid, reservation)

    def begin_prefetch(self, c: Choices) -> None:
        """A task is going to want a value."""
        if (pid := self._spilled(c)) is not None:
            self.oracle.begin_prefetch(pid, c.order)

    def complete_restore(self, c: Choices) -> None:
        """A value was read."""
        if (pid := self._restoring(c)) is not None:
            self.oracle.complete_restore(pid)

    def fail_restore(self, c: Choices) -> None:
        """A value could not be read, now or ever."""
        if (pid := self._restoring(c)) is not None:
            self.oracle.fail_restore(pid, lost=c.flag)

    # -- admission ---------------------------------------------------------------------------------

    def reserve(self, c: Choices) -> None:
        """A task is about to add bytes."""
        self.reservations.append(self.oracle.reserve(c.size, pick(KINDS, c.i), self._urgency(c)))

    def reserve_now(self, c: Choices) -> None:
        """A task is about to add bytes, or goes elsewhere if there is no room."""
        reservation = self.oracle.reserve_now(c.size, pick(KINDS, c.i), self._urgency(c))
        if reservation is not None:
            self.reservations.append(reservation)

    def _urgency(self, c: Choices) -> Order:
        # One without a known order goes before all others, and would often do so if it were not
        # rare.
        return c.order if c.j % 8 else ()

    def improve(self, c: Choices) -> None:
        """What a task waits for has become more urgent, or is as urgent as it was."""
        if self.reservations:
            self.oracle.improve(pick(self.reservations, c.i), c.order)

    def detach(self, c: Choices) -> None:
        """A task, waiting or not, turns out to wait for others; perhaps says so twice."""
        if self.reservations:
            reservation = pick(self.reservations, c.i)
            self.oracle.detach(reservation)
            if c.flag:
                self.oracle.detach(reservation)

    def relent(self, c: Choices) -> None:
        """Those who wait have done so for long."""
        self.oracle.relent()

    def release(self, c: Choices) -> None:
        """A task is done, or gives up waiting; perhaps says so twice."""
        if self.reservations:
            reservation = pick(self.reservations, c.i)
            self.oracle.release(reservation)
            if c.j % 4:
                self.reservations.remove(reservation)

    def shrink(self, c: Choices) -> None:
        """Less is needed than was asked for."""
        if self.reservations:
            self.oracle.shrink(pick(self.reservations, c.i), c.size)

    def settle(self, c: Choices) -> None:
        """What was promised arrives."""
        if self.reservations:
            self.oracle.settle(pick(self.reservations, c.i), c.size)
        self.oracle.insert(c.key, c.size)

    # -- limits ------------------------------------------------------------------------------------

    def set_offset(self, c: Choices) -> None:
        """The process grows or shrinks."""
        self.oracle.set_offset(pick(OFFSETS, c.i))

    def set_limits(self, c: Choices) -> None:
        """The limits change."""
        self.oracle.set_limits(pick(LIMITS, c.i), pick(LIMITS, c.j))

    # -- to the end --------------------------------------------------------------------------------

    def settle_down(self, c: Choices) -> None:
        """Spill threads work until there is nothing left to do: then one after the other is let in.

        Each goes on when the one that was let in before it ends, or when it has waited for long.
        """
        oracle = self.oracle
        outcomes = ["written", "written", "too large", "failed", "never"]
        self._work(outcomes, c.i)
        while oracle.waiting:
            waited, beyond = len(oracle.waiting), oracle.beyond()
            assert beyond, "waits for ever"
            if c.flag:
                self.reservations.remove(beyond[0])
                oracle.release(beyond[0])
            else:
                oracle.relent()
            self._work(outcomes, c.i)
            # Those who end one after the other may leave others who do not fit, either.
            assert len(oracle.waiting) + len(oracle.beyond()) < waited + len(beyond) or not c.flag, "waits for ever"
            assert len(oracle.waiting) < waited or c.flag, "waits for ever"

    def relieve(self, c: Choices) -> None:
        """The same, with nothing in the way: memory fits unless all that is left is in use."""
        oracle = self.oracle
        for pid in list(oracle.held):
            oracle.let_go(pid)
        limits = oracle.limit, oracle.disk_limit
        oracle.set_limits(oracle.limit, None)
        for pid in oracle.where(lambda value: value.state is State.SPILLING):
            oracle.in_doubt(pid)
        self._work(["written"], 0)
        excess = oracle.excess()
        stays = oracle.where(lambda value: value.movable)
        assert excess is None or excess <= 0 or not stays, f"{excess} bytes over, but {stays} could have gone"
        oracle.set_limits(*limits)

    def _work(self, outcomes: list[str], first: int) -> None:
        oracle = self.oracle
        for turn in range(first, first + 4 * len(oracle.values) + 4):
            pid = self._in(State.SPILLING, 0) or oracle.next_spill()
            if pid is None:
                return
            outcome = pick(outcomes, turn)
            record = oracle.values[pid].nbytes * (10 if outcome == "too large" else 1)
            if outcome in ("failed", "never"):
                oracle.fail_spill(pid, forever=outcome == "never")
            elif oracle.values[pid].record or oracle.reserve_record(pid, record):
                oracle.complete_spill(pid, oracle.values[pid].record)
            else:
                oracle.fail_spill(pid, forever=False)
        raise AssertionError("the spill threads find no end")

    # -- what is refused ---------------------------------------------------------------------------

    def refused(self, c: Choices) -> None:
        """Whatever does not fit the state of a value is refused and changes nothing."""
        oracle, state = self.oracle, self.oracle.state
        if (pid := self._known(c)) is None:
            return
        value = oracle.values[pid]
        if value.state is not State.SPILLING:
            oracle.refused(InvalidTransition, lambda: state.spills.complete(pid, c.size))
            oracle.refused(InvalidTransition, lambda: state.spills.fail(pid, forever=c.flag))
            oracle.refused(InvalidTransition, lambda: state.spills.reserve_record(pid, c.size))
            oracle.refused(InvalidTransition, lambda: state.spills.in_doubt(pid))
            oracle.refused(InvalidTransition, lambda: state.spills.doubt(pid))
        if value.state is not State.RESTORING:
            oracle.refused(InvalidTransition, lambda: state.restores.complete(pid))
            oracle.refused(InvalidTransition, lambda: state.restores.fail(pid, lost=c.flag))
        if value.state is not State.SPILLED:
            oracle.refused(InvalidTransition, lambda: state.restores.begin(pid))
        if not value.pins:
            oracle.refused(InvalidTransition, lambda: state.unpin(pid))
        oracle.refused(ValueError, lambda: state.insert("a", -1 - c.size))
        oracle.refused(KeyError, lambda: state.remove("no such key"))
        oracle.refused(KeyError, lambda: state.pin(-1))
        oracle.refused(KeyError, lambda: state.alias("a", -1))
        oracle.refused(TypeError, lambda: state.insert([], c.size))  # type: ignore[arg-type]
        oracle.refused(TypeError, lambda: state.insert_below([], c.size, c.size))  # type: ignore[arg-type]
        oracle.refused(TypeError, lambda: state.alias([], pid))  # type: ignore[arg-type]


_Start = tuple[int | None, int | None, bool]


def _draw(chance: random.Random) -> tuple[_Start, list[tuple[str, Choices]]]:
    names, weights = zip(*SpillEvents.WEIGHTS.items(), strict=True)
    start = chance.choice(LIMITS), chance.choice([None, *LIMITS]), chance.random() < 0.7
    events = []
    for event in chance.choices(names, weights, k=200):
        i, j = chance.randrange(64), chance.randrange(64)
        sizes = chance.choice(SIZES), chance.choice(SIZES)
        events.append((event, Choices(i, j, *sizes, chance.choice(KEYS), chance.random() < 0.5)))
    return start, events


def _run(start: _Start, events: list[tuple[str, Choices]]) -> None:
    machine = SpillEvents(limit=start[0], disk_limit=start[1], keep_clean=start[2])
    for event, choices in events:
        machine.do(event, choices)


def walk_core(steps: int, *, seed: int) -> Steps:
    """Do so many random events of the core; see :func:`~gpuspill.testing.walks.walk`."""
    return walk(_draw, _run, steps, seed=seed)


class SpillStateMachine(RuleBasedStateMachine):
    """:class:`SpillEvents` in any order.

    Parameters
    ----------
    steps
        Where to count.
    """

    # One rule for all events: of many rules Hypothesis leaves most out in each example, and a move
    # that is begun is then seldom completed.
    _names = tuple(name for name, weight in SpillEvents.WEIGHTS.items() for _ in range(weight))

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.events: SpillEvents

    @initialize(
        limit=st.sampled_from(LIMITS),
        disk_limit=st.sampled_from([None, *LIMITS]),
        keep_clean=st.sampled_from([True, True, False]),
    )
    def start(self, limit: int | None, disk_limit: int | None, keep_clean: bool) -> None:
        """Begin with an empty state."""
        self.events = SpillEvents(limit=limit, disk_limit=disk_limit, keep_clean=keep_clean)

    @rule(
        event=st.sampled_from(_names),
        choices=st.builds(
            Choices,
            i=st.integers(0, 63),
            j=st.integers(0, 63),
            size=st.sampled_from(SIZES),
            other=st.sampled_from(SIZES),
            key=st.sampled_from(KEYS),
            flag=st.booleans(),
        ),
    )
    def step(self, event: str, choices: Choices) -> None:
        """Do one of the events."""
        self.steps.done += 1
        self.events.do(event, choices)
