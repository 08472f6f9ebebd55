"""What happens to a value in the middle of its move, and between any two steps of a call."""

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from gpuspill.core.residency import State
from gpuspill.errors import DataLostError, ManagerClosed, RecordCorrupt, StorageError, StorageFull
from gpuspill.testing.managers import ManagerKit
from tests.things import Thing, squeeze


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


@pytest.mark.fault("deleted meanwhile", on="host→disk", outcome="nothing left")
def test_deleted_while_it_is_written(kit):
    kit.manager.store("a", Thing())
    for when in ("before", "after"):
        kit.store.hook = lambda operation, at, when=when: kit.manager.discard("a") if at == when else None
        squeeze(kit)
        kit.store.hook = lambda operation, at: None
        assert "a" not in kit.manager
        assert kit.records() == kit.manager.memory_total() == 0
        kit.manager.store("a", Thing())


@pytest.mark.fault("overwritten meanwhile", on="host→disk", outcome="the new one is there")
def test_overwritten_while_it_is_written(kit):
    def hook(operation, when):
        kit.store.hook = lambda operation, when: None
        kit.manager.store("a", Thing("new"))

    kit.manager.store("a", Thing("old"))
    kit.store.hook = hook
    squeeze(kit)
    assert kit.manager.get("a") == Thing("new")
    kit.manager.discard("a")
    assert kit.records() == 0


@pytest.mark.fault("deleted meanwhile", on="disk→host", outcome="delivered; nothing left")
def test_deleted_while_it_is_read_is_delivered_and_leaves_nothing(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = lambda operation, when: kit.manager.discard("a") if when == "before" else None
    assert kit.manager.get("a") == Thing("a")
    assert "a" not in kit.manager
    assert kit.records() == kit.manager.memory_total() == 0


@pytest.mark.fault("overwritten meanwhile", on="disk→host", outcome="the new one is there")
def test_overwritten_while_it_is_read(kit):
    """The reader asked for the value that the key held then; the key holds the new one."""
    kit.manager.store("a", Thing("old"))
    kit.spill("a")
    kit.store.hook = lambda operation, when: kit.manager.store("a", Thing("new")) if when == "before" else None
    assert kit.manager.get("a") == Thing("old")
    assert kit.manager.get("a") == Thing("new")
    assert kit.records() == 0
    assert kit.manager.memory_total() == 100


def test_deleted_while_its_read_fails(kit):
    def hook(operation, when):
        if "a" in kit.manager:
            kit.manager.discard("a")
        raise StorageError(5, "broken")

    kit.manager.store("a", Thing())
    kit.spill("a")
    kit.store.hook = hook
    with pytest.raises(StorageError):
        kit.manager.get("a")
    assert kit.records() == kit.manager.memory_total() == 0


def test_lost_and_overwritten_meanwhile(kit):
    def hook(operation, when):
        kit.manager.store("a", Thing("new"))
        raise RecordCorrupt("damaged")

    kit.manager.store("a", Thing("old"))
    kit.spill("a")
    kit.store.hook = hook
    with pytest.raises(DataLostError):
        kit.manager.get("a")
    assert kit.manager.get("a") == Thing("new")


@pytest.mark.fault("used meanwhile", on="host→disk", outcome="stays")
def test_pinned_while_it_is_written_stays(kit):
    pins = []
    kit.manager.store("a", Thing("a"))
    kit.store.hook = lambda operation, when: pins.append(kit.manager.admission.pin(["a"]))
    squeeze(kit)
    assert kit.state("a") is State.CLEAN
    for pin in pins:
        pin.release()
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED


def test_pinned_while_its_write_fails(kit):
    pins = []

    def hook(operation, when):
        pins.append(kit.manager.admission.pin(["a"]))
        raise StorageFull(28, "full")

    kit.manager.store("a", Thing("a"))
    kit.store.hook = hook
    squeeze(kit)
    kit.manager.validate()
    assert kit.state("a") is State.RESIDENT
    kit.store.hook = lambda operation, when: None
    pins.pop().release()
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED


@pytest.mark.fault("closed meanwhile", on="host→disk", outcome="stays readable; nothing left on disk")
@pytest.mark.parametrize("raises", [False, True])
def test_closed_while_it_is_written(kit, caplog, raises):
    def hook(operation, when):
        kit.manager.close()
        if raises:
            raise StorageError(errno.EBADF, "closed")

    kit.manager.store("a", Thing("a"))
    kit.store.hook = hook
    squeeze(kit)
    assert kit.manager.get("a") == Thing("a")
    assert kit.records() == 0
    assert not caplog.records, "it said that it would be tried again"


@pytest.mark.fault("closed meanwhile", on="disk→host", outcome="whole, or an error")
def test_closed_while_it_is_read(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    kit.store.hook = lambda operation, when: kit.manager.close() if when == "before" else None
    with pytest.raises(ManagerClosed):
        kit.manager.get("a")
    kit.manager.validate()


class Interposer:
    """Stands in for the metadata lock; does something once, right after its n-th release."""

    def __init__(self, lock: Any, nth: int, action: Any) -> None:
        self.lock, self.left, self.action = lock, nth, action
        self.depth = 0

    def acquire(self) -> None:
        self.lock.acquire()
        self.depth += 1

    def release(self) -> None:
        self.depth -= 1
        self.lock.release()
        if self.depth == 0:
            self.left -= 1
            if self.left == 0:
                self.action()

    def _is_owned(self) -> bool:
        return self.lock._is_owned()


ACTIONS = {
    "discard": lambda kit: kit.manager.discard("a"),
    "overwrite": lambda kit: kit.manager.store("a", Thing("new")),
    "alias": lambda kit: kit.manager.store("b", kit.manager.get("a")),
    "get": lambda kit: kit.manager.get("a"),
    "get_many": lambda kit: kit.manager.batch.get_many(["a"]),
    "peek": lambda kit: kit.manager.peek("a"),
    "prefetch": lambda kit: kit.manager.uses.prefetch(["a"]),
    "spill": lambda kit: kit.engine.spill(),
    "pin": lambda kit: kit.pins.append(kit.manager.admission.pin(["a"])),
    "materialize": lambda kit: materialize(kit),
    "export": lambda kit: kit.futures.append(kit.manager.batch.export(kit.manager.admission.pin(["a"]))),
    "limit": lambda kit: kit.manager.limits.set_limit(None, None),
    "close": lambda kit: kit.manager.close(),
}

#: These wait for a restore in flight, which in one thread would be for ever.
BLOCKING = {"get", "materialize", "alias"}


def materialize(kit: ManagerKit) -> Any:
    with kit.manager.admission.admit(None, ["a"]) as admission:
        return kit.manager.batch.materialize(admission)


@pytest.mark.parametrize("start", ["in memory", "on disk", "clean"])
@pytest.mark.parametrize("first", sorted(ACTIONS))
def test_anything_between_any_two_steps_of_anything(first, start):
    """One call is cut at each place where it lets go of the lock, and another one is put in."""
    for second in sorted(ACTIONS):
        for nth in range(1, 12):
            kit = ManagerKit()
            kit.pins, kit.futures = [], []
            manager = kit.manager
            manager.store("a", Thing("old"))
            manager.store("other", Thing("other"))
            if start != "in memory":
                kit.spill("a")
            if start == "clean":
                manager.get("a")
            manager.limits.set_limit(100, None)
            happened = []

            def act(second=second, kit=kit, happened=happened):
                entry = kit.manager._ledger.keys.get("a")
                moving = entry is not None and entry.state is State.RESTORING
                if second in BLOCKING and moving:
                    happened.append("not this one")
                    return
                happened.append(second)
                try:
                    ACTIONS[second](kit)
                except (KeyError, ManagerClosed) as error:
                    happened.append(type(error))

            interposer = Interposer(manager._metadata._lock, nth, act)
            manager._metadata._lock = interposer
            what = f"{second} after {nth} steps of {first}, {start}"
            try:
                result = ACTIONS[first](kit)
            except KeyError:
                assert second == "discard" or KeyError in happened, what
            except ManagerClosed:
                assert "close" in (first, second), what
            else:
                if first == "get":
                    assert result.content in ("old", "new"), what
            if not happened:
                break  # there are no more steps
            manager._metadata._lock = interposer.lock
            manager.validate()
            while kit.engine.restore():
                manager.validate()
            kit.engine.spill_all()
            manager.validate()
            for pin in kit.pins:
                pin.release()
            for future in kit.futures:
                assert future.done(), what
            manager.validate()
            for key in list(manager):
                while kit.engine.restore():
                    pass
                try:
                    assert manager.get(key).content in ("old", "new", "other"), what
                except ManagerClosed:
                    assert "close" in (first, second), what
                manager.discard(key)
            kit.futures.clear()
            if first != "export" and second != "export":
                assert manager.memory_total() == 0, what
                assert kit.records() == 0, what
            kit.close()
