"""State machines for Hypothesis, and how to run them for a given number of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State
from gpuspill.errors import InvalidTransition
from gpuspill.testing.model import ModelValue
from gpuspill.testing.oracle import Oracle

__all__ = ["SpillStateMachine", "Steps", "run_steps"]

T = TypeVar("T")

#: Which one of those there are at that moment.
which = st.integers(0, 999)
keys = st.sampled_from("abcdefgh")
sizes = st.one_of(st.integers(0, 60), st.sampled_from([0, 1, 30, 100, 500]))
limits = st.sampled_from([None, 0, 1, 50, 100, 100, 200])
orders = st.integers(0, 5).map(lambda n: (float(n),))


class Steps:
    """How many steps were done.

    Attributes
    ----------
    done
        Steps that did something, over all examples.
    """

    def __init__(self) -> None:
        self.done = 0


def run_steps(
    machine: Callable[[Steps], RuleBasedStateMachine], steps: int, *, seed: int = 0, per_example: int = 50
) -> Steps:
    """Run a state machine until it has done so many steps.

    Parameters
    ----------
    machine
        Makes a machine that adds to the given count whenever a rule does something.
    steps
        At least so many.
    seed
        The same seed does the same steps.
    per_example
        Steps before a fresh machine starts.

    Returns
    -------
    Steps
        With the number done.
    """
    count = Steps()
    while count.done < steps:
        before = count.done
        settings = hypothesis.settings(
            max_examples=max(1, min(1000, (steps - count.done) // per_example)),
            stateful_step_count=per_example,
            deadline=None,
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(hypothesis.seed(seed)(_factory(machine, count)), settings=settings)
        assert count.done > before, "the machine does nothing"
        seed += 1
    return count


def _factory(machine: Callable[[Steps], RuleBasedStateMachine], count: Steps) -> Any:
    def factory() -> RuleBasedStateMachine:
        return machine(count)

    return factory


def pick(items: Sequence[T], index: int) -> T:
    """Return the item that `index` stands for, whatever the number of items."""
    return items[index % len(items)]


def _some(wanted: Callable[[Oracle], Sequence[object]]) -> Callable[[Any], bool]:
    """Precondition: there is one of those."""
    return lambda machine: machine.oracle is not None and bool(wanted(machine.oracle))


def _known(oracle: Oracle) -> list[int]:
    return list(oracle.values)


def _held_keys(oracle: Oracle) -> list[Any]:
    return list(oracle.keys)


def _in(*states: State) -> Callable[[Oracle], list[int]]:
    return lambda oracle: oracle.where(lambda value: value.state in states)


def _not_in(*states: State) -> Callable[[Oracle], list[int]]:
    return lambda oracle: oracle.where(lambda value: value.state not in states)


def _pinned(oracle: Oracle) -> list[int]:
    return oracle.where(lambda value: value.pins > 0)


_spilling, _restoring, _spilled = _in(State.SPILLING), _in(State.RESTORING), _in(State.SPILLED)
_in_memory = _in(State.RESIDENT, State.CLEAN, State.SPILLING)


class SpillStateMachine(RuleBasedStateMachine):
    """Any order of any events for a :class:`~gpuspill.core.state.SpillState`, each judged by the oracle.

    Parameters
    ----------
    steps
        Where to count.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.oracle: Oracle = None  # type: ignore[assignment]
        self.reservations: list[Any] = []

    @initialize(limit=limits, disk_limit=limits, keep_clean=st.sampled_from([True, True, False]))
    def start(self, limit: int | None, disk_limit: int | None, keep_clean: bool) -> None:
        """Begin with an empty state."""
        self.oracle = Oracle(limit=limit, disk_limit=disk_limit, keep_clean=keep_clean)

    # -- ownership -----------------------------------------------------------------------------------

    @rule(key=keys, nbytes=sizes)
    def insert(self, key: str, nbytes: int) -> None:
        """Store a new value, under a new key or over an old one."""
        self.steps.done += 1
        self.oracle.insert(key, nbytes)

    @rule(key=keys, nbytes=sizes, record=sizes)
    def insert_below(self, key: str, nbytes: int, record: int) -> None:
        """A value enters that is on disk already."""
        self.steps.done += 1
        self.oracle.insert_below(key, nbytes, record)

    @precondition(_some(_known))
    @rule(key=keys, i=which)
    def alias(self, key: str, i: int) -> None:
        """Store a known value under another key."""
        self.steps.done += 1
        self.oracle.alias(key, pick(_known(self.oracle), i))

    @precondition(_some(_held_keys))
    @rule(i=which)
    def remove(self, i: int) -> None:
        """Delete a key."""
        self.steps.done += 1
        self.oracle.remove(pick(_held_keys(self.oracle), i))

    # -- use -----------------------------------------------------------------------------------------

    @precondition(_some(_known))
    @rule(i=which)
    def touch(self, i: int) -> None:
        """Use a value."""
        self.steps.done += 1
        self.oracle.touch(pick(_known(self.oracle), i))

    @precondition(_some(_known))
    @rule(i=which)
    def pin(self, i: int) -> None:
        """Pin a value, perhaps once more."""
        self.steps.done += 1
        self.oracle.pin(pick(_known(self.oracle), i))

    @precondition(_some(_pinned))
    @rule(i=which)
    def unpin(self, i: int) -> None:
        """Undo a pin."""
        self.steps.done += 1
        self.oracle.unpin(pick(_pinned(self.oracle), i))

    @precondition(_some(_known))
    @rule(i=which)
    def hold(self, i: int) -> None:
        """Somebody outside takes or gives up a reference."""
        self.steps.done += 1
        pid = pick(_known(self.oracle), i)
        if pid in self.oracle.held:
            self.oracle.let_go(pid)
        else:
            self.oracle.hold(pid)

    @rule(key=keys, user=st.integers(0, 3), order=orders)
    def expect_use(self, key: str, user: int, order: tuple[float, ...]) -> None:
        """A task is going to read a key, which may not exist yet."""
        self.steps.done += 1
        self.oracle.expect_use(key, user, order)

    @rule(key=keys, user=st.integers(0, 3))
    def drop_use(self, key: str, user: int) -> None:
        """A task has read a key, or never will."""
        self.steps.done += 1
        self.oracle.drop_use(key, user)

    # -- spilling ------------------------------------------------------------------------------------

    @rule()
    def next_spill(self) -> None:
        """A spill thread looks for work."""
        self.steps.done += 1
        self.oracle.next_spill()

    @precondition(_some(_spilling))
    @rule(i=which, nbytes=sizes)
    def reserve_record(self, i: int, nbytes: int) -> None:
        """The value is serialised, its size is known now."""
        self.steps.done += 1
        pid = pick(_spilling(self.oracle), i)
        if not self.oracle.values[pid].record and not self.oracle.reserve_record(pid, nbytes):
            self.oracle.fail_spill(pid, forever=False)

    @precondition(_some(_spilling))
    @rule(i=which, more=st.sampled_from([0, 0, -5, 3, 40]))
    def complete_spill(self, i: int, more: int) -> None:
        """The record is written; it is smaller or larger than it was said to be."""
        self.steps.done += 1
        pid = pick(_spilling(self.oracle), i)
        self.oracle.complete_spill(pid, max(0, self.oracle.values[pid].record + more))

    @precondition(_some(_spilling))
    @rule(i=which, forever=st.sampled_from([False, False, True]))
    def fail_spill(self, i: int, forever: bool) -> None:
        """It could not be written, now or ever."""
        self.steps.done += 1
        self.oracle.fail_spill(pick(_spilling(self.oracle), i), forever=forever)

    @precondition(_some(_known))
    @rule(i=which, nbytes=sizes)
    def correct_size(self, i: int, nbytes: int) -> None:
        """Serialising taught something about a size."""
        self.steps.done += 1
        self.oracle.correct_size(pick(_known(self.oracle), i), nbytes)

    @rule()
    def retry(self) -> None:
        """Time has passed."""
        self.steps.done += 1
        self.oracle.retry()

    # -- restoring -----------------------------------------------------------------------------------

    @precondition(_some(_spilled))
    @rule(i=which, j=which, reserved=st.booleans())
    def begin_restore(self, i: int, j: int, reserved: bool) -> None:
        """Somebody wants a value that is on disk, with a reservation (of any state) or without."""
        self.steps.done += 1
        reservation = pick(self.reservations, j) if reserved and self.reservations else None
        self.oracle.begin_restore(pick(_spilled(self.oracle), i), reservation)

    @precondition(_some(_known))
    @rule(i=which, order=orders)
    def begin_prefetch(self, i: int, order: tuple[float, ...]) -> None:
        """Somebody is going to want a value."""
        self.steps.done += 1
        self.oracle.begin_prefetch(pick(_known(self.oracle), i), order)

    @precondition(_some(_restoring))
    @rule(i=which)
    def complete_restore(self, i: int) -> None:
        """A value was read."""
        self.steps.done += 1
        self.oracle.complete_restore(pick(_restoring(self.oracle), i))

    @precondition(_some(_restoring))
    @rule(i=which, lost=st.booleans())
    def fail_restore(self, i: int, lost: bool) -> None:
        """A value could not be read, now or ever."""
        self.steps.done += 1
        self.oracle.fail_restore(pick(_restoring(self.oracle), i), lost=lost)

    # -- admission -----------------------------------------------------------------------------------

    @rule(nbytes=sizes, kind=st.sampled_from(Kind))
    def reserve(self, nbytes: int, kind: Kind) -> None:
        """Somebody is about to add bytes."""
        self.steps.done += 1
        self.reservations.append(self.oracle.reserve(nbytes, kind))

    @precondition(lambda machine: bool(machine.reservations))
    @rule(i=which, again=st.booleans())
    def release(self, i: int, again: bool) -> None:
        """Somebody is done, or gives up waiting; perhaps says so twice."""
        self.steps.done += 1
        reservation = pick(self.reservations, i)
        if not again:
            self.reservations.remove(reservation)
        self.oracle.release(reservation)

    @precondition(lambda machine: bool(machine.reservations))
    @rule(i=which, nbytes=sizes)
    def shrink(self, i: int, nbytes: int) -> None:
        """Less is needed than was asked for."""
        self.steps.done += 1
        self.oracle.shrink(pick(self.reservations, i), nbytes)

    @precondition(lambda machine: bool(machine.reservations))
    @rule(i=which, key=keys, nbytes=sizes)
    def settle(self, i: int, key: str, nbytes: int) -> None:
        """What was promised arrives."""
        self.steps.done += 1
        self.oracle.settle(pick(self.reservations, i), nbytes)
        self.oracle.insert(key, nbytes)

    # -- limits --------------------------------------------------------------------------------------

    @rule(nbytes=st.sampled_from([0, 0, 20, 90, -30]))
    def set_offset(self, nbytes: int) -> None:
        """The process grows or shrinks."""
        self.steps.done += 1
        self.oracle.set_offset(nbytes)

    @rule(limit=limits, disk_limit=limits)
    def set_limits(self, limit: int | None, disk_limit: int | None) -> None:
        """The limits change."""
        self.steps.done += 1
        self.oracle.set_limits(limit, disk_limit)

    # -- to the end ----------------------------------------------------------------------------------

    @rule(outcomes=st.lists(st.sampled_from(["written", "too large", "failed", "never"]), min_size=1, max_size=4))
    def settle_down(self, outcomes: list[str]) -> None:
        """Spill threads work until there is nothing left to do: then nobody waits."""
        self.steps.done += 1
        self._work(outcomes)
        assert not self.oracle.waiting, "waits for ever"

    @rule()
    def relieve(self) -> None:
        """The same, with nothing in the way: memory is within its limit unless all that is left is in use."""
        self.steps.done += 1
        oracle = self.oracle
        for pid in list(oracle.held):
            oracle.let_go(pid)
        oracle.set_limits(oracle.limit, None)
        self._work(["written"])
        excess = oracle.excess()
        stays = oracle.where(lambda value: value.charged > 0 and (value.movable or not value.memory))
        assert excess is None or excess <= 0 or not stays or not any(oracle.values[pid].memory for pid in stays)

    def _work(self, outcomes: list[str]) -> None:
        oracle = self.oracle
        for turn in range(4 * len(oracle.values) + 4):
            moving = _spilling(oracle)
            pid = moving[0] if moving else oracle.next_spill()
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

    # -- what is refused -----------------------------------------------------------------------------

    @precondition(_some(_known))
    @rule(i=which, nbytes=sizes)
    def refused(self, i: int, nbytes: int) -> None:
        """Whatever does not fit the state of a value is refused and changes nothing."""
        self.steps.done += 1
        oracle, state = self.oracle, self.oracle.state
        pid = pick(_known(oracle), i)
        value: ModelValue = oracle.values[pid]
        if value.state is not State.SPILLING:
            oracle.refused(InvalidTransition, lambda: state.complete_spill(pid, nbytes))
            oracle.refused(InvalidTransition, lambda: state.fail_spill(pid, forever=True))
            oracle.refused(InvalidTransition, lambda: state.reserve_record(pid, nbytes))
        if value.state is not State.RESTORING:
            oracle.refused(InvalidTransition, lambda: state.complete_restore(pid))
            oracle.refused(InvalidTransition, lambda: state.fail_restore(pid, lost=True))
        if value.state is not State.SPILLED:
            oracle.refused(InvalidTransition, lambda: state.begin_restore(pid))
        if not value.pins:
            oracle.refused(InvalidTransition, lambda: state.unpin(pid))
        oracle.refused(ValueError, lambda: state.insert("a", -1 - nbytes))
        oracle.refused(KeyError, lambda: state.remove("no such key"))
        oracle.refused(KeyError, lambda: state.pin(-1))
        oracle.refused(KeyError, lambda: state.alias("a", -1))
        oracle.refused(TypeError, lambda: state.insert([], nbytes))  # type: ignore[arg-type]
        oracle.refused(TypeError, lambda: state.insert_below([], nbytes, nbytes))  # type: ignore[arg-type]
        oracle.refused(TypeError, lambda: state.alias([], pid))  # type: ignore[arg-type]
