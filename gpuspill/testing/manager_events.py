"""The events of a whole manager, with real bytes, and with events inside moves."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State
from gpuspill.device.shared_memory import shared_memory
from gpuspill.errors import StorageError, StorageFull
from gpuspill.manager.ports import Encoded, PickleSerializer
from gpuspill.storage.base import in_memory
from gpuspill.testing.interruptions import Interruptions
from gpuspill.testing.manager_model import KEYS, ManagerModel
from gpuspill.testing.managers import ManagerKit
from gpuspill.testing.values import CHANGES, KINDS, Made
from gpuspill.testing.walks import pick

__all__ = ["ManagerEvents", "What"]

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


class What(NamedTuple):
    """What an event may need to know."""

    i: int = 0
    j: int = 0
    key: str = "a"
    other: str = "b"
    kind: str = "array"
    flag: bool = False


@dataclass(eq=False)
class _Admitted:
    admission: Any
    expected: dict[str, Made]
    label: str | None = None


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
        "begin_task": 3,
        "end_task": 4,
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
        "improve": 1,
        "detach": 1,
        "secede": 2,
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
        self.kit = ManagerKit(
            limit,
            disk_limit=disk_limit,
            keep_clean=keep_clean,
            sizeof=lambda value: getattr(value, "nbytes", 100),
            shared=lambda value: shared_memory(value, 100),
        )
        self.interruptions = Interruptions()
        self.kit.store.hook = self.interruptions.hook
        self.limits = limit, disk_limit
        self.model = ManagerModel(self.kit, self.interruptions)
        self.held: list[tuple[Made, Any]] = []
        self.admitted: list[_Admitted] = []
        self.made = 0

    def do(self, event: str, what: What) -> None:
        """Do one event, then check everything."""
        getattr(self, event)(what)
        self.model.check()

    # -- values ------------------------------------------------------------------------------------

    def _make(self, kind: str) -> Made:
        self.made += 1
        return Made(kind, self.made)

    def store(self, what: What) -> None:
        """Store a new value, whose size may be a lie."""
        made = self._make(what.kind)
        sizes = [None, None, 0, 1, 100_000]
        value = KINDS[made.kind](made.number)
        shared = self.model.find(value)
        self.kit.manager.store(what.key, value, pick(sizes, what.i))
        self.model.values[what.key] = shared or made

    def store_encoded(self, what: What) -> None:
        """Store a value that comes as bytes."""
        kind = what.kind if what.kind != "unpicklable" else "plain"
        made = self._make(kind)
        header, frames = PickleSerializer().dumps(KINDS[kind](made.number))
        self.kit.manager.store_encoded(
            what.key, Encoded(header, [memoryview(bytearray(in_memory(frame))) for frame in frames], 100)
        )
        self.model.values[what.key] = made

    def store_again(self, what: What) -> None:
        """Store an object that is held, under the same key or another one."""
        if self.held:
            made, value = pick(self.held, what.i)
            self.kit.manager.store(what.key, value)
            self.model.values[what.key] = made
            made.lost = False
            assert self.kit.manager.peek(what.key) is value or self.model.returning(what.key)

    def discard(self, what: What) -> None:
        """Delete a key, or one that does not exist."""
        if (key := self.model.known(what.i)) is not None:
            self.kit.manager.discard(key)
            del self.model.values[key]
        missing = next(key for key in (*KEYS, "z") if key not in self.model.values)
        for method in (self.kit.manager.discard, self.kit.manager.get, self.kit.manager.proxy):
            try:
                method(missing)
            except KeyError:
                continue
            raise AssertionError(f"{missing} does not exist")

    def get(self, what: What) -> None:
        """Read a key; keys of one value give one object."""
        if (key := self.model.known(what.i)) is not None:
            value = self.model.get(key)
            for other, made in list(self.model.values.items()):
                if (
                    self.model.values.get(key) is made
                    and value is not None
                    and self.kit.manager.peek(other) is not None
                ):
                    assert self.kit.manager.peek(other) is self.kit.manager.peek(key)

    def peek(self, what: What) -> None:
        """Look at what is in memory."""
        if (key := self.model.known(what.i)) is not None:
            marker = object()
            value = self.kit.manager.peek(key, marker)
            if value is not marker:
                self.model.compare(self.model.values[key], value)

    def hold(self, what: What) -> None:
        """The outside keeps a value: it stays the same object from now on."""
        if (key := self.model.known(what.i)) is not None and (made := self.model.values[key]) is not None:
            value = self.model.get(key)
            if value is not None and self.model.values.get(key) is made:
                for other, known in self.held:
                    assert other is not made or known is value, f"{made} is two objects"
                self.held.append((made, value))

    def let_go(self, what: What) -> None:
        """The outside lets go of a value."""
        if self.held:
            self.held.remove(pick(self.held, what.i))

    def begin_task(self, what: What) -> None:
        """A task is given a value, and begins to change it in place."""
        key = self.model.known(what.i)
        made = None if key is None else self.model.values[key]
        if key is None or made is None or made.kind not in CHANGES or made.changing or made.lost:
            return
        value = self.model.get(key)
        if value is not None and self.model.values.get(key) is made:
            self.made += 1
            made.begin_change(self.made, recorded=self.model.state(key) is State.CLEAN)
            self.model.tasks.append((made, value))
            CHANGES[made.kind][0](value, made.number)

    def end_task(self, what: What) -> None:
        """A task has changed its value."""
        if self.model.tasks:
            made, value = pick(self.model.tasks, what.i)
            CHANGES[made.kind][1](value, made.number)
            made.changing = False
            self.model.tasks.remove((made, value))

    # -- several at once, later --------------------------------------------------------------------

    def get_many(self, what: What) -> None:
        """Ask for several keys."""
        expected = self.model.expected(what.key, what.other)
        missing = {what.key, what.other} - expected.keys()
        try:
            future = self.kit.manager.batch.get_many(
                [what.key, what.other, what.key], missing="omit" if what.flag else "raise"
            )
        except KeyError as error:
            absent = error.args[0]
        else:
            assert what.flag or not missing
            self.model.ask(future, expected)
            return
        assert not what.flag
        assert absent in missing

    def export(self, what: What) -> None:
        """Ask for what to send."""
        expected = self.model.expected(what.key, what.other)
        pins = self.kit.manager.admission.pin([what.key, what.other])
        future = self.kit.manager.batch.export(pins)
        future.add_done_callback(lambda _: pins.release())
        self.model.ask(future, expected)

    def cancel(self, what: What) -> None:
        """Give up what was asked for."""
        self.model.cancel(what.i)

    def restore(self, what: What) -> None:
        """A restore thread does one thing."""
        self.kit.engine.restore()

    def reap(self, what: What) -> None:
        """The reaper works."""
        self.kit.engine.reap_all()

    def prefetch(self, what: What) -> None:
        """Read ahead."""
        self.kit.manager.uses.prefetch([what.key, what.other])

    def use(self, what: What) -> None:
        """A task is going to use something, or has."""
        if what.flag:
            self.kit.manager.uses.expect([what.key], (float(what.i),), what.j % 3)
        else:
            self.kit.manager.uses.drop([what.key], what.j % 3)

    # -- admission ---------------------------------------------------------------------------------

    def admit(self, what: What) -> None:
        """A task asks for room."""
        expected = self.model.expected(what.key, what.other)
        admission = self.kit.manager.admission.admit(
            what.key,
            list(expected),
            what.i * 10,
            kind=Kind.TASK if what.flag else Kind.TRANSFER,
            order=(float(what.j % 4),),
        )
        self.admitted.append(_Admitted(admission, expected, what.key))

    def pin(self, what: What) -> None:
        """A caller looks at values where they are."""
        admission = self.kit.manager.admission.pin([what.key, what.other])
        self.admitted.append(_Admitted(admission, self.model.expected(what.key, what.other)))

    def materialize(self, what: What) -> None:
        """A task gets its inputs."""
        granted = [admitted for admitted in self.admitted if admitted.admission.granted]
        if granted:
            admitted = pick(granted, what.i)
            future = self.kit.manager.batch.materialize_later(admitted.admission)
            self.model.ask(future, admitted.expected)

    def release(self, what: What) -> None:
        """A task ends, or gives up waiting."""
        if self.admitted:
            admitted = pick(self.admitted, what.i)
            self.admitted.remove(admitted)
            admitted.admission.release()
            admitted.admission.release()

    def improve(self, what: What) -> None:
        """A more urgent task needs what is waited for."""
        if self.admitted:
            self.kit.manager.admission.improve(pick(self.admitted, what.i).admission, (float(what.j % 4),))

    def detach(self, what: What) -> None:
        """A task turns out to wait for others."""
        if self.admitted:
            self.kit.manager.admission.detach(pick(self.admitted, what.i).admission)

    def secede(self, what: What) -> None:
        """A task leaves its thread and its promise to others; at its end it asks again."""
        running = [a for a in self.admitted if a.label is not None and a.admission.granted]
        if not running:
            return
        admitted, manager = pick(running, what.i), self.kit.manager
        reservation, output_nbytes = admitted.admission.reservation, admitted.admission.output_nbytes
        before = reservation.nbytes
        manager.admission.detach(admitted.admission)
        manager.admission.give_back_output(admitted.admission)
        assert reservation.nbytes == max(0, before - output_nbytes)
        if what.flag:
            again = manager.admission.reserve(10 * what.j, Kind.TASK, outputs={admitted.label: 10 * what.j})
            self.admitted.append(_Admitted(again, {}, admitted.label))

    # -- spilling ----------------------------------------------------------------------------------

    def spill(self, what: What) -> None:
        """A spill thread does one thing."""
        self.kit.engine.spill()

    def squeeze(self, what: What) -> None:
        """Memory gets tight."""
        self.kit.manager.limits.set_limit(pick([0, -1, 300], what.i), self.limits[1])

    def relax(self, what: What) -> None:
        """Memory is as it was."""
        self.kit.manager.limits.set_limit(*self.limits)

    def offset(self, what: What) -> None:
        """The process grows or shrinks."""
        self.kit.manager.limits.set_offset(pick([0, 500, -200], what.i))

    def advance(self, what: What) -> None:
        """Time passes, and spill threads look again."""
        self.kit.clock.advance(1)
        if self.interruptions.depth == 0:
            self.kit.engine.spill_all()

    # -- the store ---------------------------------------------------------------------------------

    def lose(self, what: What) -> None:
        """The record of a value that is nowhere else disappears or is damaged."""
        key = self.model.known(what.i)
        if key is None or self.model.state(key) is not State.SPILLED:
            return
        slot = self.kit.manager._metadata.slots[self.kit.manager.proxy(key).pid]
        assert slot.receipt is not None
        if what.flag:
            self.kit.store.damaged.add(slot.receipt)
        else:
            self.kit.store.store.delete(slot.receipt)
        self.model.values[key].lost = True

    def fail_next(self, what: What) -> None:
        """The next write or read fails."""
        # The last would end a thread: what waits for it must be answered even so.
        errors: list[BaseException] = [StorageFull(28, "full"), StorageError(5, "broken"), CancelledError("deadly")]
        self.interruptions.fail(pick(errors, what.i))

    def during_next(self, what: What) -> None:
        """Something happens in the middle of the next write or read."""
        events = [name for name in self.WEIGHTS if name not in ("during_next", "fail_next")]
        self.interruptions.add(partial(self.do, pick(events, what.i + 7 * what.j), what))

    # -- the end -----------------------------------------------------------------------------------

    def _let_all_in(self) -> None:
        """Though no task ends, no one waits for ever: in each second one at least is let in."""
        kit = self.kit
        kit.idle()
        for left in range(kit.manager.statistics().waiting, 0, -1):
            assert kit.manager.statistics().waiting <= left, "a task waits for ever"
            kit.clock.advance(1)
            kit.idle()
        self.model.check()
        assert not kit.manager.statistics().waiting, "a task waits for ever"

    def finish(self) -> None:
        """Let everything end, delete everything: nothing is left of it."""
        kit = self.kit
        self.interruptions.clear()
        while self.model.tasks:
            self.end_task(What())
        self.held.clear()
        self._let_all_in()
        kit.manager.limits.set_limit(None, None)
        kit.manager.limits.set_offset(0)
        self.model.check()
        for admitted in self.admitted:
            admitted.admission.release()
        kit.idle()
        self.model.check()
        assert not self.model.waiting, "a task waits for ever"
        for key in list(self.model.values):
            self.model.get(key)
        for key in list(self.model.values):
            kit.manager.discard(key)
        self.model.values.clear()
        kit.idle()
        self.model.check()
        stats = kit.manager.statistics()
        for name in _ZERO:
            assert getattr(stats, name) == 0, name
        assert kit.records() == 0
        kit.close()
