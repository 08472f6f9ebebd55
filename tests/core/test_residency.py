"""Every state with every event: what the contract allows leads to the named state, all else changes nothing."""

import itertools
import re
from pathlib import Path

import pytest

from gpuspill.core.residency import Residency, State, Tier
from gpuspill.errors import InvalidTransition

UP, DOWN = Tier.HOST, Tier.DISK

#: Ways into each state, from a value that was just stored.
PATHS: dict[State, list[tuple[str, tuple[object, ...]]]] = {
    State.RESIDENT: [],
    State.SPILLING: [("begin", (UP, DOWN))],
    State.CLEAN: [("begin", (UP, DOWN)), ("complete", ())],
    State.SPILLED: [("settle_below", (DOWN,))],
    State.RESTORING: [("settle_below", (DOWN,)), ("begin", (DOWN, UP))],
    State.LOST: [("lose", (UP,))],
}

EVENTS: list[tuple[str, tuple[object, ...]]] = [
    *(("begin", pair) for pair in itertools.product(Tier, repeat=2)),
    ("complete", ()),
    ("fail", ()),
    *(("drop", (tier,)) for tier in Tier),
    *(("lose", (tier,)) for tier in Tier),
    *(("settle_below", (tier,)) for tier in Tier),
    ("pin", ()),
    ("unpin", ()),
]

#: What is allowed without a third tier, for a value that nobody pins; everything else is not.
ALLOWED: dict[tuple[State, str, tuple[object, ...]], State] = {
    (State.RESIDENT, "begin", (UP, DOWN)): State.SPILLING,
    (State.RESIDENT, "settle_below", (DOWN,)): State.SPILLED,
    (State.RESIDENT, "lose", (UP,)): State.LOST,
    (State.SPILLING, "complete", ()): State.CLEAN,
    (State.SPILLING, "fail", ()): State.RESIDENT,
    (State.CLEAN, "drop", (UP,)): State.SPILLED,
    (State.CLEAN, "drop", (DOWN,)): State.RESIDENT,
    (State.CLEAN, "lose", (UP,)): State.SPILLED,
    (State.CLEAN, "lose", (DOWN,)): State.RESIDENT,
    (State.SPILLED, "begin", (DOWN, UP)): State.RESTORING,
    (State.SPILLED, "lose", (DOWN,)): State.LOST,
    (State.RESTORING, "complete", ()): State.CLEAN,
    (State.RESTORING, "fail", ()): State.SPILLED,
    **{(state, "pin", ()): state for state in State},
}

#: What a pin changes.
ALLOWED_PINNED = {
    **{key: state for key, state in ALLOWED.items() if key[1:] != ("drop", (UP,)) and key[1] != "settle_below"},
    **{(state, "unpin", ()): state for state in State},
}


def snapshot(residency: Residency) -> tuple[object, ...]:
    return residency.copies, residency.source, residency.target, residency.pins, residency.state


def make(state: State, pins: int) -> Residency:
    residency = Residency()
    for event, arguments in PATHS[state]:
        getattr(residency, event)(*arguments)
    for _ in range(pins):
        residency.pin()
    assert residency.state is state
    return residency


@pytest.mark.parametrize("pins", [0, 1, 2])
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state(state: State, pins: int) -> None:
    for event, arguments in EVENTS:
        residency = make(state, pins)
        before = snapshot(residency)
        what = f"{event}{arguments} of {residency}"
        becomes = (ALLOWED_PINNED if pins else ALLOWED).get((state, event, arguments))
        if (
            event == "begin"
            and arguments[1] is Tier.DEVICE
            and residency.has(Tier(arguments[0]))
            and not residency.moving
        ):
            continue  # a third tier, which is there for whoever wants it
        if becomes is None:
            with pytest.raises(InvalidTransition):
                getattr(residency, event)(*arguments)
            assert snapshot(residency) == before, what
            continue
        getattr(residency, event)(*arguments)
        assert residency.state is becomes, what
        assert residency.pins == pins + {"pin": 1, "unpin": -1}.get(event, 0), what
        if event == "begin":
            assert (residency.source, residency.target) == arguments, what
        elif event not in ("pin", "unpin"):
            assert (residency.source, residency.target) == (None, None), what


@pytest.mark.parametrize(
    ("copies", "move", "state"),
    [
        ({Tier.DEVICE}, None, State.RESIDENT),
        ({Tier.DEVICE, Tier.HOST}, None, State.CLEAN),
        ({Tier.DEVICE, Tier.HOST, Tier.DISK}, None, State.CLEAN),
        ({Tier.HOST}, None, State.SPILLED),
        ({Tier.HOST, Tier.DISK}, None, State.SPILLED),
        ({Tier.HOST}, (Tier.HOST, Tier.DEVICE), State.RESTORING),
        ({Tier.HOST, Tier.DISK}, (Tier.HOST, Tier.DEVICE), State.RESTORING),
        ({Tier.DEVICE}, (Tier.DEVICE, Tier.DISK), State.SPILLING),
    ],
)
def test_three_tiers(copies: set[Tier], move: tuple[Tier, Tier] | None, state: State) -> None:
    residency = Residency(origin=Tier.DEVICE)
    for tier in sorted(copies - {Tier.DEVICE}):
        residency.begin(Tier.DEVICE, tier)
        residency.complete()
    if Tier.DEVICE not in copies:
        residency.drop(Tier.DEVICE)
    if move:
        residency.begin(*move)
    assert residency.copies == copies
    assert residency.state is state
    assert residency.resident == (Tier.DEVICE in copies)


def test_a_source_stays_while_it_is_read() -> None:
    residency = Residency(origin=Tier.DEVICE)
    residency.begin(Tier.DEVICE, Tier.HOST)
    residency.complete()
    residency.begin(Tier.HOST, Tier.DISK)
    before = snapshot(residency)
    for event in residency.drop, residency.lose:
        with pytest.raises(InvalidTransition):
            event(Tier.HOST)
        assert snapshot(residency) == before
    residency.drop(Tier.DEVICE)  # not the source, and not the only copy
    assert residency.copies == {Tier.HOST}


# -- the page ----------------------------------------------------------------------------------------

CONTRACT = Path(__file__).parents[2] / "docs" / "design" / "contract.md"


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table whose first column has that title."""
    lines = CONTRACT.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"\| *{title} *\|", line))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_contract_names_every_state() -> None:
    tiers = {"memory": Tier.HOST, "disk": Tier.DISK}
    listed = {}
    for name, copies, move in rows("state"):
        named = frozenset(tiers[word.strip()] for word in copies.split(",") if word.strip() != "none")
        moves = tuple(tiers[word.strip()] for word in move.split("→")) if "→" in move else (None, None)
        listed[name.strip("`")] = named, moves
    assert listed == {
        state.value: (make(state, 0).copies, (make(state, 0).source, make(state, 0).target)) for state in State
    }


def test_the_contracts_transitions_are_the_allowed_ones() -> None:
    """Each step in the page is a step, or two, of this module; and none of this module is missing there."""
    steps = {(before, after) for (before, event, _), after in ALLOWED.items() if event != "pin"}
    two = {(a, d) for a, b in steps for c, d in steps if b is c}
    told = set()
    for _, before, after, _ in rows("event"):
        befores, afters = (re.findall(r"`(\w+)`", cell) for cell in (before, after))
        for name in befores:
            for end in afters:
                told.add((State(name), State(end)))
    assert told <= steps | two
    # Memory does not lose values, and what a value enters as is no transition of it.
    silent = {(State.RESIDENT, State.LOST), (State.SPILLED, State.LOST), (State.RESIDENT, State.SPILLED)}
    assert steps - two - silent <= told
