"""The garbage collector may run anybody's finaliser between any two lines, also while the manager holds its lock.

Every event is interrupted at every line that it runs under the lock, by somebody who uses the manager there and then.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from gpuspill.testing.managers import Bench
from gpuspill.testing.values import Plain
from tests.tracing import interrupted


def make() -> Bench:
    """Return a manager with values in each state, over its limit by a little."""
    kit = Bench()
    for key in "abcdef":
        kit.manager.store(key, Plain(key), 100)
    kit.spill("a", "b", "c")
    kit.manager.get("b")
    kit.manager.get("c")
    kit.manager.set_limit(350, None)
    kit.admission = kit.manager.admit("out", ["b", "d"], 10)  # type: ignore[attr-defined]
    return kit


EVENTS: dict[str, Callable[[Bench], Any]] = {
    "store": lambda kit: kit.manager.store("new", Plain("new"), 100),
    "overwrite what is on disk": lambda kit: kit.manager.store("a", Plain("new"), 100),
    "overwrite what is in memory": lambda kit: kit.manager.store("c", Plain("new"), 100),
    "discard": lambda kit: kit.manager.discard("c"),
    "get": lambda kit: kit.manager.get("a"),
    "admit": lambda kit: kit.manager.admit("new", ["a", "c"], 100).release(),
    "release": lambda kit: kit.admission.release(),
    "spill": lambda kit: (kit.manager.set_limit(0, None), kit.engine.spill_all()),
    "prefetch": lambda kit: (kit.manager.set_limit(450, None), kit.manager.prefetch(["a"])),
}


def read_many(kit: Bench) -> None:
    future: Future[Any] = kit.manager.get_many(["e", "unknown"], missing="omit")
    assert not future.done() or future.result()["e"].content == "e"


ACTIONS: dict[str, Callable[[Bench], Any]] = {
    "peek": lambda kit: [kit.manager.peek(key) for key in "bcef"],
    "get": lambda kit: kit.manager.get("e").content,
    "get what is on disk": lambda kit: kit.manager.get("a"),
    "get_many": read_many,
    "look around": lambda kit: (len(kit.manager), list(kit.manager), "c" in kit.manager, kit.manager.statistics()),
    "store": lambda kit: kit.manager.store("late", Plain("late"), 100),
    "overwrite": lambda kit: kit.manager.store("c", Plain("late"), 100),
    "discard": lambda kit: [kit.manager.discard(key) for key in "acf" if key in kit.manager],
    "release": lambda kit: kit.admission.release(),
    "improve": lambda kit: kit.manager.improve(kit.admission, (-1.0,)),
    "detach": lambda kit: kit.manager.detach(kit.admission),
    "pin": lambda kit: kit.manager.pin(["c", "f"]).release(),
    "offset": lambda kit: kit.manager.set_offset(40),
    "uses": lambda kit: kit.manager.expect_uses("cf", (1.0,), "task"),
}


def interrupt(kit: Bench, event: Callable[[Bench], Any], nth: int, action: Callable[[Bench], Any]) -> bool:
    """Run `event`, and `action` before the n-th line it runs under the lock; return whether there is such a line."""
    lock = kit.manager._metadata._lock

    def do_event() -> None:
        with suppress(KeyError):  # the action deleted what it is about, before it began or after it was put off
            event(kit)

    def do_action() -> None:
        with suppress(KeyError, RuntimeError):  # forgotten by then, or forbidden there
            action(kit)

    return interrupted(do_event, nth, do_action, counts=lock._is_owned)  # type: ignore[attr-defined]


@pytest.mark.fault(
    "a finaliser in between", on=("host→disk", "disk→host", "release"), outcome="as if it came before or after"
)
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("event", EVENTS)
def test_interrupted_at_any_line(event, first):
    """Each line by one of the actions; `first` says with which one it begins."""
    actions = itertools.islice(itertools.cycle(ACTIONS), first, None)
    for nth in itertools.count(1):
        action = next(actions)
        kit = make()
        what = f"{action} before line {nth} of {event}"
        if not interrupt(kit, EVENTS[event], nth, ACTIONS[action]):
            break
        try:
            kit.manager.validate()
            kit.manager.set_limit(100, None)
            kit.idle()
            kit.manager.validate()
            kit.admission.release()
            for key in list(kit.manager):
                assert kit.manager.get(key).content in (key, "new", "late")
                kit.manager.discard(key)
            kit.idle()
            assert kit.manager.memory_total() == kit.records() == 0
            kit.close()
        except Exception as error:
            error.add_note(what)
            raise
    assert nth > 20, "nothing was interrupted"


def test_a_deserialiser_that_reads_what_it_is_rebuilding():
    kit = Bench()
    kit.manager.store("a", Plain("a"), 100)
    kit.spill("a")
    inner = []

    def hook(operation: str, when: str) -> None:
        kit.store.hook = lambda operation, when: None
        inner.append(kit.manager.get("a"))

    kit.store.hook = hook
    value = kit.manager.get("a")
    assert value.content == inner[0].content == "a"
    assert kit.manager.get("a") is value
    kit.close()
