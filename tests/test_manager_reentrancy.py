"""The garbage collector may run anybody's finaliser between any two lines, also while the manager holds its lock.

Every event is interrupted at every line that it runs under the lock, by somebody who uses the manager there and then.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from types import FunctionType
from typing import Any

import pytest

from gpuspill.core.budget import Kind
from gpuspill.core.ledger import Entry
from gpuspill.core.residency import Tier
from gpuspill.errors import ManagerClosed
from gpuspill.manager.ports import Encoded, PickleSerializer
from gpuspill.manager.transaction import Policy, at_once, policy_of
from gpuspill.testing.managers import ManagerKit, bench
from gpuspill.testing.values import Plain
from tests.tracing import interrupted


def make() -> ManagerKit:
    """Return a manager with values in each state, over its limit by a little."""
    kit = ManagerKit()
    for key in "abcdef":
        kit.manager.store(key, Plain(key), 100)
    kit.spill("a", "b", "c")
    kit.manager.get("b")
    kit.manager.get("c")
    kit.manager.limits.set_limit(350, None)
    kit.manager.uses.expect("d", (2.0,), "other")
    kit.admission = kit.manager.admission.admit("out", ["b", "d"], 10)  # type: ignore[attr-defined]
    kit.waiting = kit.manager.admission.admit(None, ["a"])  # type: ignore[attr-defined]
    return kit


EVENTS: dict[str, Callable[[ManagerKit], Any]] = {
    "store": lambda kit: kit.manager.store("new", Plain("new"), 100),
    "overwrite what is on disk": lambda kit: kit.manager.store("a", Plain("new"), 100),
    "overwrite what is in memory": lambda kit: kit.manager.store("c", Plain("new"), 100),
    "discard": lambda kit: kit.manager.discard("c"),
    "get": lambda kit: kit.manager.get("a"),
    "admit": lambda kit: kit.manager.admission.admit("new", ["a", "c"], 100).release(),
    "release": lambda kit: kit.admission.release(),
    "spill": lambda kit: (kit.manager.limits.set_limit(0, None), kit.engine.spill_all()),
    "prefetch": lambda kit: (kit.manager.limits.set_limit(450, None), kit.manager.uses.prefetch(["a"])),
}


def adopt(kit: ManagerKit) -> None:
    kit.manager.adopt("late", 100, kit.store.write(*PickleSerializer().dumps(Plain("late"))))


def store_encoded(kit: ManagerKit) -> None:
    kit.manager.store_encoded("late", Encoded(*PickleSerializer().dumps(Plain("late")), 100))


def set_limit(kit: ManagerKit, limit: int) -> None:
    kit.manager.limits.set_limit(limit, None)


#: A call of each public method of the manager and of its parts.
CALLS: dict[str, Callable[[ManagerKit], Any]] = {
    # the manager's
    "store": lambda kit: kit.manager.store("c", Plain("late"), 100),
    "invalidate": lambda kit: kit.manager.invalidate(["b"]),
    "store_encoded": store_encoded,
    "store_encoded_together": lambda kit: kit.manager.store_encoded_together(
        {"late": Encoded(*PickleSerializer().dumps(Plain("late")), 100)}
    ),
    "adopt": adopt,
    "store_on_disk": lambda kit: kit.manager.store_on_disk("late", *PickleSerializer().dumps(Plain("late")), 100),
    "discard": lambda kit: [kit.manager.discard(key) for key in "acf" if key in kit.manager],
    "discard_together": lambda kit: kit.manager.discard_together(["a", "unknown"]),
    "keys": lambda kit: kit.manager.keys(),
    "keys_in": lambda kit: kit.manager.keys_in(Tier.DISK),
    "is_resident": lambda kit: kit.manager.is_resident("e"),
    "is_lost": lambda kit: kit.manager.is_lost("e"),
    "tier_of": lambda kit: kit.manager.tier_of("e"),
    "nbytes": lambda kit: kit.manager.nbytes("e"),
    "arriving_nbytes": lambda kit: kit.manager.arriving_nbytes("e"),
    "peek": lambda kit: [kit.manager.peek(key) for key in "bcef"],
    "look": lambda kit: [kit.manager.look(key) for key in "bcef"],
    "look_together": lambda kit: kit.manager.look_together(["a", "e", "unknown"]),
    "get": lambda kit: [kit.manager.get(key).content for key in "ea"],
    "get_ready": lambda kit: [kit.manager.get_ready(key) for key in "ea"],
    "proxy": lambda kit: (kit.manager.proxy("e").nbytes, kit.manager.proxy("e").resolve()),
    "proxies": lambda kit: kit.manager.proxies({"e": 0}),
    "relent": lambda kit: kit.manager.stalls.relent(),
    "notice": lambda kit: kit.manager.stalls.notice(),
    "disperse_by": lambda kit: kit.manager.disperse_by(lambda key, value, nbytes: None),
    "memory_total": lambda kit: kit.manager.memory_total(),
    "accounted_total": lambda kit: kit.manager.accounted_total(),
    "story": lambda kit: kit.manager.story("a"),
    "statistics": lambda kit: (len(kit.manager), list(kit.manager), "c" in kit.manager, kit.manager.statistics()),
    "validate": lambda kit: None,  # what is in the middle of a change is not valid
    "close": lambda kit: kit.manager.close(),
    # of admissions
    "admit": lambda kit: kit.manager.admission.admit("late", ["c", "f"], 100).release(),
    "admit_in_pieces": lambda kit: at_once(kit.manager.admission.admit_in_pieces("late", ["c", "f"], 100)).release(),
    "pin": lambda kit: kit.manager.admission.pin(["c", "f"]).release(),
    "pin_in_pieces": lambda kit: at_once(kit.manager.admission.pin_in_pieces(["c", "f"])).release(),
    "reserve": lambda kit: kit.manager.admission.reserve(10).release(),
    "reserve_now": lambda kit: kit.manager.admission.reserve_now(0, Kind.TRANSFER),
    "wait_for_room": lambda kit: kit.manager.admission.wait_for_room() if kit.manager._metadata._depth else None,
    "improve": lambda kit: kit.manager.admission.improve(kit.admission, (-1.0,)),
    "detach": lambda kit: kit.manager.admission.detach(kit.admission),
    "missing_nbytes": lambda kit: kit.manager.admission.missing_nbytes("ae"),
    "release": lambda kit: kit.admission.release(),
    "settle": lambda kit: kit.manager.admission.settle("out"),
    "settle_inputs": lambda kit: kit.manager.admission.settle_inputs(kit.waiting),
    "give_back_output": lambda kit: kit.manager.admission.give_back_output(kit.admission),
    # of several values
    "get_many": lambda kit: kit.manager.batch.get_many(["e", "unknown"], missing="omit"),
    "materialize": lambda kit: kit.manager.batch.materialize(kit.admission),
    "materialize_later": lambda kit: kit.manager.batch.materialize_later(kit.admission),
    "export": lambda kit: kit.manager.batch.export(kit.admission),
    "fetch": lambda kit: kit.manager.batch.fetch("e"),
    "decode": lambda kit: kit.manager.batch.decode(Encoded(*PickleSerializer().dumps(Plain("late")), 100)),
    # of uses
    "expect": lambda kit: kit.manager.uses.expect("cf", (1.0,), "task"),
    "drop": lambda kit: kit.manager.uses.drop("d", "other"),
    "next": lambda kit: kit.manager.uses.next("d"),
    "worth_making_room": lambda kit: kit.manager.uses.worth_making_room("d", 100),
    "prefetch": lambda kit: kit.manager.uses.prefetch(["a"]),
    # of limits
    "set_limit": lambda kit: set_limit(kit, 340),
    "set_grace": lambda kit: kit.manager.limits.set_grace(2),
    "set_offset": lambda kit: kit.manager.limits.set_offset(40),
    "evict_all": lambda kit: kit.manager.limits.evict_all() if kit.manager._metadata._depth else None,
    "make_room": lambda kit: kit.manager.limits.make_room(1),
    "evict": lambda kit: kit.manager.limits.evict(["unknown"]),
    "may_leave": lambda kit: sorted(kit.manager.limits.may_leave("abcdef")),
}

#: What the manager's own spills call.
INTERNAL = {"begin", "serialised", "end", "let_in"}


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods of the manager and of the parts that it shows."""
    with bench() as kit:
        parts = [part for name, part in vars(kit.manager).items() if name[0] != "_" and hasattr(part, "_metadata")]
    for part in (kit.manager, *parts):
        for name, member in vars(type(part)).items():
            if isinstance(member, FunctionType) and not name.startswith("_") and name not in INTERNAL:
                yield name, member


#: Their names, by what becomes of a call in the middle of a change.
POLICIES = {
    policy: sorted(name for name, method in methods() if policy_of(method) is policy) for policy in (*Policy, None)
}


def test_each_public_method_says_what_becomes_of_it_in_the_middle_of_a_change():
    assert {name for name, _ in methods()} == set(CALLS)
    assert not POLICIES[None]
    assert all(map(POLICIES.get, Policy))


def frozen(thing: object, seen: frozenset[int] = frozenset()) -> object:
    """Return what the core knows, to be compared later; whatever is not the core's counts by its identity."""
    if id(thing) in seen:
        return None
    seen |= {id(thing)}
    if isinstance(thing, dict):
        return [(frozen(key, seen), frozen(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return [frozen(each, seen) for each in thing]
    if isinstance(thing, Entry) or type(thing).__module__.startswith("gpuspill.core."):
        names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
        return [(name, frozen(getattr(thing, name, None), seen)) for name in (*names, *getattr(thing, "__dict__", ()))]
    return thing if isinstance(thing, (int, float, str, Enum)) else id(thing)


def call_in_the_middle(kit: ManagerKit, name: str) -> object:
    """Do a call in the middle of a change, in which it changes nothing; return what it returns."""
    with kit.manager._metadata as state:
        before = frozen(state)
        try:
            return CALLS[name](kit)
        finally:
            assert frozen(state) == before, f"{name} changed something"


@pytest.mark.parametrize("name", POLICIES[Policy.DEFERRED])
def test_what_is_put_off_is_done_when_the_change_is_complete(name):
    kit, twin = make(), make()
    call_in_the_middle(kit, name)
    state = kit.manager._metadata.state
    CALLS[name](twin)
    after, directly = statistics(kit), statistics(twin)
    assert after == directly
    assert not kit.manager._metadata._deferred
    assert frozen(state) != frozen(make().manager._metadata.state)
    kit.manager.validate()


def statistics(kit: ManagerKit) -> Any:
    return kit.manager.statistics(), sorted(kit.manager), kit.manager.limits.limit, kit.manager.limits.offset


@pytest.mark.parametrize("name", POLICIES[Policy.REFUSED])
def test_what_is_refused_raises_in_the_middle_of_a_change(name):
    kit = make()
    with pytest.raises(RuntimeError, match="in the middle of a change of the store cannot"):
        call_in_the_middle(kit, name)
    kit.manager.validate()


@pytest.mark.parametrize("name", [*POLICIES[Policy.READ], *POLICIES[Policy.SKIPPED]])
def test_what_reads_or_is_skipped_changes_nothing_in_the_middle_of_a_change(name):
    kit = make()
    call_in_the_middle(kit, name)
    kit.manager.validate()


def test_unknown_keys_are_unknown_at_once_in_the_middle_of_a_change():
    kit = make()
    with kit.manager._metadata, pytest.raises(KeyError):
        kit.manager.discard("unknown")


def test_closing_what_is_closed_is_nothing_in_the_middle_of_a_change():
    kit = make()
    kit.manager.close()
    with kit.manager._metadata:
        kit.manager.close()
        kit.manager.limits.evict_all()


def interrupt(
    kit: ManagerKit, event: Callable[[ManagerKit], Any], nth: int, action: Callable[[ManagerKit], Any]
) -> bool:
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
@pytest.mark.parametrize("first", [0, 20, 40])
@pytest.mark.parametrize("event", EVENTS)
def test_interrupted_at_any_line(event, first):
    """Each line by one of the calls; `first` says with which one it begins."""
    # Where the block begins or ends nothing is in the middle, and closing would close.
    actions = itertools.islice(itertools.cycle([name for name in CALLS if name != "close"]), first, None)
    for nth in itertools.count(1):
        action = next(actions)
        kit = make()
        what = f"{action} before line {nth} of {event}"
        if not interrupt(kit, EVENTS[event], nth, CALLS[action]):
            break
        try:
            kit.manager.validate()
            kit.manager.limits.set_limit(100, None)
            kit.idle()
            kit.manager.validate()
            kit.admission.release()
            kit.waiting.release()
            for key in list(kit.manager):
                try:
                    assert kit.manager.get(key).content in (key, "new", "late")
                except ManagerClosed:
                    assert action == "close", "it was on disk"
                kit.manager.discard(key)
            kit.idle()
            assert kit.manager.memory_total() == kit.records() == 0
            kit.close()
        except Exception as error:
            error.add_note(what)
            raise
    assert nth > 20, "nothing was interrupted"


def test_a_deserialiser_that_reads_what_it_is_rebuilding():
    kit = ManagerKit()
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
