"""The metadata lock is held for a bounded number of keys, however many one call names."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from gpuspill.errors import ManagerClosed
from gpuspill.manager.ports import Encoded
from gpuspill.manager.transaction import BATCH, at_once
from gpuspill.testing.managers import ManagerKit


class WatchedLock:
    """Counts, for each hold of a lock, the calls that are made during it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._calls = 0
        self._depth = 0
        self.holds = 0
        self.most = 0

    def acquire(self, *args: Any) -> bool:
        taken: bool = self._lock.acquire(*args)
        self._depth += 1
        if self._depth == 1:
            self._calls = 0
            self.holds += 1
        return taken

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.most = max(self.most, self._calls)
        self._lock.release()

    def count(self, _frame: object, event: str, _argument: object) -> None:
        self._calls += self._depth > 0 and event in ("call", "c_call")


Action = Callable[[ManagerKit, list[str]], object]


def _pinned(then: Action) -> Action:
    """Do something with the inputs of an admission."""

    def act(kit: ManagerKit, keys: list[str]) -> None:
        with kit.manager.admission.admit(None, keys) as admission:
            then(kit, admission)  # type: ignore[arg-type]

    return act


ACTIONS: dict[str, Action] = {
    "admit and release": lambda kit, keys: kit.manager.admission.admit("out", keys, 10).release(),
    "release in pieces": lambda kit, keys: at_once(kit.manager.admission.admit(None, keys).release_in_pieces()),
    "pin": lambda kit, keys: kit.manager.admission.pin(keys).release(),
    "missing_nbytes": lambda kit, keys: kit.manager.admission.missing_nbytes(keys),
    "get_many": lambda kit, keys: kit.manager.batch.get_many(keys).result(),
    "materialize": _pinned(lambda kit, admission: kit.manager.batch.materialize(admission)),
    "export": _pinned(lambda kit, admission: (kit.manager.batch.export(admission), kit.idle())),
    "expect": lambda kit, keys: kit.manager.uses.expect(keys, (1,), "task"),
    "drop": lambda kit, keys: kit.manager.uses.drop(keys, "task"),
    "prefetch": lambda kit, keys: kit.manager.uses.prefetch(keys),
    "invalidate": lambda kit, keys: kit.manager.invalidate(keys),
    "look_together": lambda kit, keys: kit.manager.look_together(keys),
    "discard_together": lambda kit, keys: kit.manager.discard_together(keys),
    "store_encoded_together": lambda kit, keys: kit.manager.store_encoded_together(
        {f"encoded-{key}": Encoded(b"", [b""], 1) for key in keys}
    ),
}


def most_calls(action: Action, count: int) -> int:
    kit = ManagerKit()
    keys = [f"key-{number}" for number in range(count)]
    for key in keys:
        kit.manager.store(key, key.encode(), 100)
    metadata = kit.manager._metadata
    lock = metadata._lock = WatchedLock(metadata._lock)  # type: ignore[assignment]
    before = sys.getprofile()
    sys.setprofile(lock.count)
    try:
        action(kit, keys)
    finally:
        sys.setprofile(before)
    kit.manager.validate()
    kit.close()
    return lock.most


@pytest.mark.parametrize("name", ACTIONS)
def test_a_hold_of_the_lock_does_not_grow_with_the_number_of_keys(name):
    """What is decided when all are there, such as about the next in line, is a little more than for a batch alone."""
    few, many = most_calls(ACTIONS[name], 2 * BATCH), most_calls(ACTIONS[name], 20 * BATCH)
    assert many <= few + BATCH, "calls during the longest hold"
    assert most_calls(ACTIONS[name], BATCH // 4) < few or few < BATCH, "it counts something"


def test_few_inputs_take_one_hold_of_the_lock_to_be_pinned_and_one_to_be_let_go():
    kit = ManagerKit()
    kit.manager.store("a", [1], 100)
    metadata = kit.manager._metadata
    lock = metadata._lock = WatchedLock(metadata._lock)  # type: ignore[assignment]
    admission = kit.manager.admission.admit("out", ["a"], 10)
    assert lock.holds == 1
    admission.release()
    assert lock.holds == 2
    kit.manager.admission.pin(["a"]).release()
    assert lock.holds == 4
    kit.close()


BEGIN: dict[str, Callable[[ManagerKit, Any], Any]] = {
    "export": lambda kit, admission: kit.manager.batch.export(admission),
    "materialize_later": lambda kit, admission: kit.manager.batch.materialize_later(admission),
    "get_many": lambda kit, admission: kit.manager.batch.get_many(admission.pids),
}


def on_disk(count: int) -> tuple[ManagerKit, Any]:
    """Return a bench with so many values on disk, and an admission of all of them."""
    kit = ManagerKit()
    for number in range(count):
        kit.manager.store(number, [number], 100)
    kit.spill()
    return kit, kit.manager.admission.admit(None, range(count))


@pytest.mark.parametrize("name", BEGIN)
def test_reads_of_many_values_are_begun_on_another_thread_than_the_event_loops(name):
    kit, admission = on_disk(2 * BATCH)
    future = BEGIN[name](kit, admission)
    assert len(kit.engine.restores) == 1, "one piece of work begins all of them"
    assert kit.store.statistics().reads == 0
    kit.idle()
    found = future.result(0)
    assert found.keys() == set(range(2 * BATCH))
    if name != "export":
        assert found[7] == [7]
    del found, future
    admission.release()
    kit.idle()
    assert kit.manager.statistics().pinned_nbytes == 0
    kit.close()


@pytest.mark.parametrize("name", BEGIN)
def test_reads_of_few_values_are_begun_at_once(name):
    kit, admission = on_disk(BATCH)
    BEGIN[name](kit, admission)
    assert len(kit.engine.restores) == BATCH
    kit.idle()
    admission.release()
    kit.close()


@pytest.mark.parametrize("name", BEGIN)
@pytest.mark.parametrize("end", ["cancelled", "closed"])
def test_reads_of_many_values_that_have_not_been_begun(name, end):
    """If they are given up nothing is read; if the store is closed meanwhile, the waiting caller is told."""
    kit, admission = on_disk(2 * BATCH)
    future = BEGIN[name](kit, admission)
    if end == "cancelled":
        assert future.cancel()
        admission.release()
        kit.idle()
        assert kit.store.statistics().reads == 0
        assert kit.manager.statistics().pinned_nbytes == 0
    kit.close()
    if end == "closed":
        with pytest.raises(ManagerClosed):
            future.result(0)


def test_nothing_stays_pinned_if_an_input_is_unknown():
    kit = ManagerKit()
    for number in range(3 * BATCH):
        kit.manager.store(number, [number], 100)
    with pytest.raises(KeyError, match="unknown"):
        kit.manager.admission.admit(None, [*range(2 * BATCH + 1), "unknown"])
    assert kit.manager.statistics().pinned_nbytes == 0
    kit.close()


@pytest.mark.parametrize("turns", range(1, 4))
def test_pieces_that_are_given_up_leave_no_pins(turns):
    kit = ManagerKit()
    for number in range(4 * BATCH):
        kit.manager.store(number, [number], 100)
    pieces = kit.manager.admission.admit_in_pieces("out", range(4 * BATCH), 100)
    for _ in range(turns):
        next(pieces)
    assert kit.manager.statistics().pinned_nbytes == turns * BATCH * 100
    pieces.close()
    assert kit.manager.statistics().pinned_nbytes == 0
    admission = kit.manager.admission.admit("out", range(4 * BATCH), 100)
    pieces = admission.release_in_pieces()
    next(pieces)
    assert 0 < kit.manager.statistics().pinned_nbytes < 4 * BATCH * 100
    pieces.close()
    admission.release()
    assert kit.manager.statistics().pinned_nbytes == 0
    assert kit.manager.accounted_total() == 4 * BATCH * 100
    kit.manager.validate()
    kit.close()


def test_inputs_that_are_let_go_make_room_before_another_one_is_let_in_beyond_the_limit():
    """Who waits for the end of an overcommit finds what was pinned by it."""
    kit = ManagerKit(limit=100)
    kit.manager.store("input", [1], 100)
    holder = kit.manager.admission.admit(None, ["input"], 50)
    waiting = kit.manager.admission.admit(None, (), 50)
    assert (holder.overrun, waiting.granted) == (True, False)
    holder.release()
    assert not waiting.granted, "the input can be written now"
    kit.engine.spill_all()
    assert (waiting.granted, waiting.overrun) == (True, False)
    waiting.release()
    kit.close()
