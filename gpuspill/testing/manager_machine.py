"""Any order of any events for a whole manager, with real bytes and nested events."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpuspill.testing.manager_events import ManagerEvents, What
from gpuspill.testing.manager_model import KEYS
from gpuspill.testing.values import KINDS
from gpuspill.testing.walks import Steps, walk

__all__ = ["ManagerEvents", "ManagerMachine", "What", "walk_manager"]

LIMITS = [1000, 300, 3000, 0, None]
DISK_LIMITS = [None, None, 3000, 500]


class ManagerMachine(RuleBasedStateMachine):
    """:class:`ManagerEvents` in any order.

    Parameters
    ----------
    steps
        Where to count.
    """

    _names = tuple(name for name, weight in ManagerEvents.WEIGHTS.items() for _ in range(weight))

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.events: ManagerEvents | None = None
        self.failed = False

    @initialize(
        limit=st.sampled_from(LIMITS),
        disk_limit=st.sampled_from(DISK_LIMITS),
        keep_clean=st.sampled_from([True, False]),
    )
    def start(self, limit: int | None, disk_limit: int | None, keep_clean: bool) -> None:
        """Begin with an empty manager."""
        self.events = ManagerEvents(limit=limit, disk_limit=disk_limit, keep_clean=keep_clean)

    @rule(
        event=st.sampled_from(_names),
        what=st.builds(
            What,
            i=st.integers(0, 30),
            j=st.integers(0, 30),
            key=st.sampled_from(KEYS),
            other=st.sampled_from(KEYS),
            kind=st.sampled_from(sorted(KINDS)),
            flag=st.booleans(),
        ),
    )
    def step(self, event: str, what: What) -> None:
        """Do one of the events."""
        assert self.events is not None
        self.steps.done += 1
        try:
            self.events.do(event, what)
        except BaseException:
            self.failed = True
            raise

    def teardown(self) -> None:
        """Let everything end."""
        if self.events is not None and not self.failed:
            self.events.finish()


_Start = tuple[int | None, int | None, bool]


def _draw(chance: random.Random) -> tuple[_Start, list[tuple[str, What]]]:
    names, weights = zip(*ManagerEvents.WEIGHTS.items(), strict=True)
    start = chance.choice(LIMITS), chance.choice(DISK_LIMITS), chance.random() < 0.7
    events = []
    for event in chance.choices(names, weights, k=150):
        keys = chance.choice(KEYS), chance.choice(KEYS)
        kind, flag = chance.choice(sorted(KINDS)), chance.random() < 0.5
        events.append((event, What(chance.randrange(31), chance.randrange(31), *keys, kind, flag)))
    return start, events


def _run(start: _Start, events: list[tuple[str, What]]) -> None:
    machine = ManagerEvents(limit=start[0], disk_limit=start[1], keep_clean=start[2])
    for event, what in events:
        machine.do(event, what)
    machine.finish()


def walk_manager(steps: int, *, seed: int) -> Steps:
    """Do so many random events of managers; see :func:`~gpuspill.testing.walks.walk`."""
    return walk(_draw, _run, steps, seed=seed)
