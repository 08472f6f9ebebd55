"""Runs of state machines for a given number of steps: by Hypothesis, or by plain chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

__all__ = ["Steps", "pick", "run_steps", "walk"]

T = TypeVar("T")
Start = TypeVar("Start")
Event = TypeVar("Event")


class Steps:
    """How many steps were done.

    Attributes
    ----------
    done
        Steps so far, over all examples.
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
        Makes a machine that adds to the given count with each step.
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


def walk(
    draw: Callable[[random.Random], tuple[Start, list[Event]]],
    run: Callable[[Start, list[Event]], None],
    steps: int,
    *,
    seed: int,
) -> Steps:
    """Run random events, faster than Hypothesis; failures are shortened as well.

    Parameters
    ----------
    draw
        Draws how to begin, and some events.
    run
        Does them, raising what goes wrong.
    steps
        At least so many events.
    seed
        The same seed does the same.

    Returns
    -------
    Steps
        With the number done.

    Raises
    ------
    Exception
        What went wrong, with a short list of events that lead there as a note.
    """
    count = Steps()
    while count.done < steps:
        start, events = draw(random.Random(f"{seed} {count.done}"))
        error = _failure(run, start, events)
        if error is not None:
            error, events = _shorten(run, start, events, error)
            error.add_note(f"seed {seed}, begins with {start}; then\n" + "\n".join(map(str, events)))
            raise error
        count.done += len(events)
    return count


def _failure(run: Callable[[Start, list[Event]], None], start: Start, events: list[Event]) -> Exception | None:
    try:
        run(start, events)
    except Exception as error:
        return error
    return None


def _shorten(
    run: Callable[[Start, list[Event]], None], start: Start, events: list[Event], error: Exception
) -> tuple[Exception, list[Event]]:
    """Leave out events, many at once and then one by one, as long as it fails in the same way."""
    size = len(events) // 2
    while size:
        for fewer in _without(events, size):
            failed = _failure(run, start, fewer)
            if type(failed) is type(error) and failed is not None:
                events, error = fewer, failed
                break
        else:
            size //= 2
    return error, events


def _without(events: list[Event], size: int) -> Iterator[list[Event]]:
    for at in range(0, len(events), size):
        yield events[:at] + events[at + size :]
