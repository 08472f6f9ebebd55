"""Any order of any events for a whole manager, with real bytes, and with more events in the middle of each move."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State
from gpuspill.device.shared_memory import shared_memory
from gpuspill.errors import DataLostError, StorageError, StorageFull
from gpuspill.serialization import Encoded, PickleSerializer
from gpuspill.storage.base import in_memory
from gpuspill.testing.managers import Bench
from gpuspill.testing.values import KINDS, Made
from gpuspill.testing.walks import Steps, pick, walk

__all__ = ["ManagerEvents", "ManagerMachine", "What", "walk_manager"]

KEYS = "abcdef"
LIMITS = [1000, 300, 3000, 0, None]
DISK_LIMITS = [None, None, 3000, 500]

#: What is zero when nothing is left.
_ZERO = (
    "disk_nbytes",
    "host_nbytes",
    "pinned_nbytes",
    "reserved_nbytes",
    "set_aside",
    "spilled_nbytes",
    "unspillable",
    "values",
    "waiting",
)


def _decoded(value: Any) -> Any:
    if isinstance(value, Encoded):
        return PickleSerializer().loads(value.header, [memoryview(bytearray(frame)) for frame in value.frames])
    return value


class What(NamedTuple):
    """What an event may need to know."""

    i: int = 0
    j: int = 0
    key: str = "a"
    other: str = "b"
    kind: str = "array"
    flag: bool = False


@dataclass(eq=False)
class _Asked:
    future: Future[Any]
    expected: dict[str, Made]
    may_fail: bool = False


@dataclass(eq=False)
class _Admitted:
    admission: Any
    expected: dict[str, Made]
    label: str | None = None


@dataclass
class _Plan:
    """Events to do in the middle of the next operation of the store, and how that is to end."""

    during: list[tuple[str, What]] = field(default_factory=list)
    error: Exception | None = None


class ManagerEvents:
    """The events of a manager, checked against a dictionary.

    Parameters
    ----------
    limit, disk_limit, keep_clean
        Of the manager.
    """

    #: How often each event comes.
    WEIGHTS: ClassVar[Mapping[str, int]] = {
        "store": 8,
        "store_encoded": 2,
        "store_again": 4,
        "discard": 3,
        "get": 6,
        "peek": 1,
        "hold": 3,
        "let_go": 3,
        "get_many": 4,
        "cancel": 1,
        "restore": 6,
        "reap": 2,
        "spill": 8,
        "squeeze": 3,
        "relax": 2,
        "advance": 3,
        "admit": 3,
        "materialize": 2,
        "release": 3,
        "pin": 2,
        "export": 2,
        "prefetch": 2,
        "use": 2,
        "lose": 1,
        "fail_next": 2,
        "during_next": 6,
        "offset": 1,
    }

    def __init__(self, *, limit: int | None, disk_limit: int | None, keep_clean: bool) -> None:
        self.kit = Bench(
            limit,
            disk_limit=disk_limit,
            keep_clean=keep_clean,
            sizeof=lambda value: getattr(value, "nbytes", 100),
            shared=lambda value: shared_memory(value, 100),
        )
        self.kit.store.hook = self._hook
        self.limits = limit, disk_limit
        self.model: dict[str, Made] = {}
        self.held: list[tuple[Made, Any]] = []
        self.asked: list[_Asked] = []
        self.admitted: list[_Admitted] = []
        self.plan = _Plan()
        self.failing = 0
        self.depth = 0
        self.made = 0

    def do(self, event: str, what: What) -> None:
        """Do one event, then check everything."""
        getattr(self, event)(what)
        self._check()

    # -- checks --------------------------------------------------------------------------------------

    def _check(self) -> None:
        manager = self.kit.manager
        manager.validate()
        assert set(manager) == self.model.keys()
        assert len(manager) == len(self.model)
        for key in KEYS:
            assert (key in manager) == (key in self.model)
        for asked in [asked for asked in self.asked if asked.future.done()]:
            self.asked.remove(asked)
            self._deliver(asked)

    def _deliver(self, asked: _Asked) -> None:
        try:
            values = {key: _decoded(value) for key, value in asked.future.result(0).items()}
        except CancelledError:
            return
        except (StorageError, DataLostError, ZeroDivisionError) as error:
            self._explain(error, asked.expected)
            return
        assert values.keys() == asked.expected.keys()
        for key, value in values.items():
            self._compare(asked.expected[key], value)

    def _compare(self, made: Made, value: Any) -> None:
        assert made.fits(value), f"{made} came back as {value!r}"

    def _explain(self, error: Exception, expected: Mapping[str, Made]) -> None:
        """Some of what was asked for must account for the error."""
        if isinstance(error, DataLostError):
            key = error.key
            assert isinstance(key, str)
            assert repr(key) in str(error)
            assert expected[key].lost, f"nothing was done to {key}: {error}"
        elif isinstance(error, ZeroDivisionError):
            assert any(made.kind == "unloadable" for made in expected.values())
        else:
            assert self.failing, f"the disk did not fail: {error}"

    def _known(self, i: int) -> str | None:
        return pick(sorted(self.model), i) if self.model else None

    def _state(self, key: str) -> State:
        return self.kit.state(key)

    def _blocks(self, key: str) -> bool:
        """Whether reading a key here would wait for what this same thread is doing, or has to do."""
        pid = self.kit.manager.proxy(key).pid
        return self.kit.manager._metadata.slots[pid].restoring is not None

    def _hook(self, operation: str, when: str) -> None:
        """Do something in the middle of a move."""
        if when == "after" and operation == "read":
            return
        plan, self.plan = self.plan, _Plan()
        if self.depth < 3:
            self.depth += 1
            try:
                for event, what in plan.during:
                    self.do(event, what)
            finally:
                self.depth -= 1
        if plan.error is not None:
            self.failing += 1
            raise plan.error

    # -- values --------------------------------------------------------------------------------------

    def _make(self, kind: str) -> Made:
        self.made += 1
        return Made(kind, self.made)

    def store(self, what: What) -> None:
        """Store a new value, whose size may be a lie."""
        made = self._make(what.kind)
        sizes = [None, None, 0, 1, 100_000]
        value = KINDS[made.kind](made.number)
        shared = self._of(value)
        self.kit.manager.store(what.key, value, pick(sizes, what.i))
        self.model[what.key] = shared or made

    def _of(self, value: Any) -> Made | None:
        """Return the model's value for one of the objects of which there is only one."""
        slots = self.kit.manager._metadata.slots
        pid = slots.find(value)
        if pid is None:
            return None
        for key, made in self.model.items():
            if self.kit.manager.proxy(key).pid == pid:
                return made
        return None

    def store_encoded(self, what: What) -> None:
        """Store a value that comes as bytes."""
        kind = what.kind if what.kind != "unpicklable" else "plain"
        made = self._make(kind)
        header, frames = PickleSerializer().dumps(KINDS[kind](made.number))
        self.kit.manager.store_encoded(
            what.key, Encoded(header, [memoryview(bytearray(in_memory(frame))) for frame in frames], 100)
        )
        self.model[what.key] = made

    def store_again(self, what: What) -> None:
        """Store an object that somebody holds, under the same key or another one."""
        if self.held:
            made, value = pick(self.held, what.i)
            self.kit.manager.store(what.key, value)
            self.model[what.key] = made
            made.lost = False
            assert self.kit.manager.peek(what.key) is value or self._blocks(what.key)

    def discard(self, what: What) -> None:
        """Delete a key, or one that does not exist."""
        if (key := self._known(what.i)) is not None:
            self.kit.manager.discard(key)
            del self.model[key]
        missing = next(key for key in (*KEYS, "z") if key not in self.model)
        for method in (self.kit.manager.discard, self.kit.manager.get, self.kit.manager.proxy):
            try:
                method(missing)
            except KeyError:
                continue
            raise AssertionError(f"{missing} does not exist")

    def _get(self, key: str) -> Any:
        """Return the value of a key, or None if it could not be had for a reason that is known."""
        made = self.model[key]
        if self._blocks(key):
            return None
        try:
            value = self.kit.manager.get(key)
        except (StorageError, DataLostError, ZeroDivisionError) as error:
            self._explain(error, {key: made})
            return None
        self._compare(made, value)
        return value

    def get(self, what: What) -> None:
        """Read a key; keys of one value give one object."""
        if (key := self._known(what.i)) is not None:
            value = self._get(key)
            for other, made in list(self.model.items()):
                if self.model.get(key) is made and value is not None and self.kit.manager.peek(other) is not None:
                    assert self.kit.manager.peek(other) is self.kit.manager.peek(key)

    def peek(self, what: What) -> None:
        """Look at what is in memory."""
        if (key := self._known(what.i)) is not None:
            marker = object()
            value = self.kit.manager.peek(key, marker)
            if value is not marker:
                self._compare(self.model[key], value)

    def hold(self, what: What) -> None:
        """Somebody outside keeps a value: it stays the same object from now on."""
        if (key := self._known(what.i)) is not None and (made := self.model[key]) is not None:
            value = self._get(key)
            if value is not None and self.model.get(key) is made:
                for other, known in self.held:
                    assert other is not made or known is value, f"{made} is two objects"
                self.held.append((made, value))

    def let_go(self, what: What) -> None:
        """Somebody outside lets go of a value."""
        if self.held:
            self.held.remove(pick(self.held, what.i))

    # -- several at once, later ----------------------------------------------------------------------

    def _expected(self, *keys: str) -> dict[str, Made]:
        return {key: self.model[key] for key in keys if key in self.model}

    def get_many(self, what: What) -> None:
        """Ask for several keys."""
        expected = self._expected(what.key, what.other)
        missing = {what.key, what.other} - expected.keys()
        try:
            future = self.kit.manager.get_many(
                [what.key, what.other, what.key], missing="omit" if what.flag else "raise"
            )
        except KeyError as error:
            absent = error.args[0]
        else:
            assert what.flag or not missing
            self.asked.append(_Asked(future, expected))
            return
        assert not what.flag
        assert absent in missing

    def export(self, what: What) -> None:
        """Ask for what to send."""
        expected = self._expected(what.key, what.other)
        pins = self.kit.manager.pin([what.key, what.other])
        future = self.kit.manager.export(pins)
        future.add_done_callback(lambda _: pins.release())
        self.asked.append(_Asked(future, expected))

    def cancel(self, what: What) -> None:
        """Give up what was asked for."""
        if self.asked:
            pick(self.asked, what.i).future.cancel()

    def restore(self, what: What) -> None:
        """A restore thread does one thing."""
        self.kit.engine.restore()

    def reap(self, what: What) -> None:
        """The reaper works."""
        self.kit.engine.reap_all()

    def prefetch(self, what: What) -> None:
        """Read ahead."""
        self.kit.manager.prefetch([what.key, what.other])

    def use(self, what: What) -> None:
        """A task is going to use something, or has."""
        if what.flag:
            self.kit.manager.expect_uses([what.key], (float(what.i),), what.j % 3)
        else:
            self.kit.manager.drop_uses([what.key], what.j % 3)

    # -- admission -----------------------------------------------------------------------------------

    def admit(self, what: What) -> None:
        """A task asks for room."""
        expected = self._expected(what.key, what.other)
        admission = self.kit.manager.admit(
            what.key, list(expected), what.i * 10, kind=Kind.TASK if what.flag else Kind.TRANSFER
        )
        self.admitted.append(_Admitted(admission, expected, what.key))

    def pin(self, what: What) -> None:
        """Somebody looks at values where they are."""
        admission = self.kit.manager.pin([what.key, what.other])
        self.admitted.append(_Admitted(admission, self._expected(what.key, what.other)))

    def materialize(self, what: What) -> None:
        """A task gets its inputs."""
        granted = [admitted for admitted in self.admitted if admitted.admission.granted]
        if granted:
            admitted = pick(granted, what.i)
            future = self.kit.manager.materialize_later(admitted.admission)
            self.asked.append(_Asked(future, admitted.expected))

    def release(self, what: What) -> None:
        """A task ends, or gives up waiting."""
        if self.admitted:
            admitted = pick(self.admitted, what.i)
            self.admitted.remove(admitted)
            admitted.admission.release()
            admitted.admission.release()

    # -- spilling ------------------------------------------------------------------------------------

    def spill(self, what: What) -> None:
        """A spill thread does one thing."""
        self.kit.engine.spill()

    def squeeze(self, what: What) -> None:
        """Memory gets tight."""
        self.kit.manager.set_limit(pick([0, -1, 300], what.i), self.limits[1])

    def relax(self, what: What) -> None:
        """Memory is as it was."""
        self.kit.manager.set_limit(*self.limits)

    def offset(self, what: What) -> None:
        """The process grows or shrinks."""
        self.kit.manager.set_offset(pick([0, 500, -200], what.i))

    def advance(self, what: What) -> None:
        """Time passes, and spill threads look again."""
        self.kit.clock.advance(1)
        if self.depth == 0:
            self.kit.engine.spill_all()

    # -- the store -----------------------------------------------------------------------------------

    def lose(self, what: What) -> None:
        """The record of a value that is nowhere else disappears or is damaged."""
        key = self._known(what.i)
        if key is None or self._state(key) is not State.SPILLED:
            return
        slot = self.kit.manager._metadata.slots[self.kit.manager.proxy(key).pid]
        assert slot.receipt is not None
        if what.flag:
            self.kit.store.damaged.add(slot.receipt)
        else:
            self.kit.store.store.delete(slot.receipt)
        self.model[key].lost = True

    def fail_next(self, what: What) -> None:
        """The next write or read fails."""
        errors: list[Exception] = [StorageFull(28, "full"), StorageError(5, "broken"), OSError(4, "interrupted")]
        self.plan.error = pick(errors[:2], what.i)

    def during_next(self, what: What) -> None:
        """Something happens in the middle of the next write or read."""
        events = [name for name in self.WEIGHTS if name not in ("during_next", "fail_next")]
        self.plan.during.append((pick(events, what.i + 7 * what.j), what))

    # -- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let everything end, delete everything: nothing is left of it."""
        kit = self.kit
        self.plan = _Plan()
        self.held.clear()
        kit.manager.set_limit(None, None)
        kit.manager.set_offset(0)
        self._check()
        for admitted in self.admitted:
            admitted.admission.release()
        kit.idle()
        self._check()
        assert not self.asked, "somebody waits for ever"
        for key in list(self.model):
            self._get(key)
        for key in list(self.model):
            kit.manager.discard(key)
        self.model.clear()
        kit.idle()
        self._check()
        stats = kit.manager.statistics()
        for name in _ZERO:
            assert getattr(stats, name) == 0, name
        assert kit.records() == 0
        kit.close()


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
