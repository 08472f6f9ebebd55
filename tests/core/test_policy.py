"""The eviction order against a sorted list, Bélády's rule against a simulation, and how much work it all is."""

import math
import random
from collections import defaultdict
from functools import partial
from sys import getsizeof

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.core.eviction_queue import EvictionQueue
from gpuspill.core.policy import Order
from gpuspill.core.state import SpillState
from gpuspill.core.uses import NextUse

from .counting import Comparisons, count_lines

orders = st.lists(st.integers(0, 3).map(float), min_size=1, max_size=3).map(tuple)


class Turns:
    turns = 0
    small = False
    nbytes = 3


class Entries(defaultdict[int, Turns]):
    """Has one for each proxy that is asked for."""

    def __init__(self) -> None:
        super().__init__(Turns)

    def get(self, pid: int) -> Turns:
        return self[pid]


class SortedList:
    """The same order, found by sorting everything each time."""

    def __init__(self, grace: int) -> None:
        self.entries: dict[int, tuple[str, Order]] = {}
        self.chosen: set[int] = set()
        self.now = 0.0
        self.grace = grace

    def add(self, pid: int, order: Order | None, dead: bool, clean: bool, first: bool, small: bool) -> None:
        self.now += 1
        self.chosen.discard(pid)
        when = (-self.now if first else self.now,)
        if small:
            self.entries[pid] = "small", when
        elif order is not None:
            self.entries[pid] = "planned", order
        elif dead:
            self.entries[pid] = "dead clean" if clean else "dead", when
        else:
            self.entries[pid] = "recent", when

    def choose(self, pid: int) -> None:
        del self.entries[pid]
        self.chosen.add(pid)

    def discard(self, pid: int) -> None:
        self.entries.pop(pid, None)
        self.chosen.discard(pid)

    def dirty(self, pid: int) -> None:
        self.now += 1
        if pid in self.entries and self.entries[pid][0] == "dead clean":
            self.entries[pid] = "dead", (self.now,)

    def touch(self, pid: int) -> None:
        self.now += 1
        self.chosen.discard(pid)
        if pid in self.entries and self.entries[pid][0] != "planned":
            self.entries[pid] = "small" if self.entries[pid][0] == "small" else "recent", (self.now,)

    def first(self) -> set[int]:
        """Return all who may be next: those with the same furthest use are equal."""
        spared = self.grace
        for kind, choose in (
            ("dead clean", min),
            ("dead", min),
            ("recent", min),
            ("dead", min),
            ("planned", max),
            ("small", min),
        ):
            order = {pid: order for pid, (of, order) in self.entries.items() if of == kind}
            if kind == "dead" and len(order) <= spared:
                spared = 0  # those, too, the second time
            elif order:
                best = choose(order.values())
                return {pid for pid in order if order[pid] == best}
        return set()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 8), st.none() | orders, *[st.booleans()] * 4),
        st.tuples(st.sampled_from(["discard", "touch", "dirty", "untouched"]), st.integers(0, 8)),
        st.sampled_from([("pop",), ("choose",)]),
    ),
    max_size=150,
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(operations, st.integers(0, 3))
def test_eviction_order_against_a_sorted_list(operations, grace):
    queue, model = EvictionQueue(Entries()), SortedList(grace)
    queue.policy.grace = grace
    for operation, *arguments in operations:
        if operation == "add":
            pid, order, dead, clean, first, small = arguments
            queue.add(pid, order, dead=dead, clean=clean, first=first, small=small)
            model.add(pid, order, dead, clean, first, small)
        elif operation == "discard":
            queue.discard(*arguments)
            model.discard(*arguments)
        elif operation == "touch":
            queue.touch(*arguments)
            model.touch(*arguments)
        elif operation == "dirty":
            queue.dirty(*arguments)
            model.dirty(*arguments)
        elif operation == "untouched":
            (pid,) = arguments
            assert queue.untouched(pid) == (pid in model.chosen)
            model.chosen.discard(pid)
        elif (pid := queue.peek()) is not None:
            assert pid in model.first()
            if operation == "choose":
                queue.choose(pid)
                model.choose(pid)
            else:
                queue.discard(pid)
                model.discard(pid)
        queue.validate(order=lambda pid: model.entries[pid][1] if model.entries[pid][0] == "planned" else None)
        assert len(queue) == len(model.entries)
        smalls = {pid for pid, (kind, _) in model.entries.items() if kind == "small"}
        assert (queue.large, queue.small_nbytes) == (len(queue) - len(smalls), 3 * len(smalls))
        assert queue.peek(small=False) == (None if smalls == model.entries.keys() else queue.peek())
        assert set(queue) == model.entries.keys()
        assert all((pid in queue) == (pid in model.entries) for pid in range(9))
        assert queue.peek() in (model.first() or {None})


uses = st.lists(
    st.one_of(
        st.tuples(st.just("expect"), st.sampled_from("ab"), st.integers(0, 4), orders),
        st.tuples(st.just("drop"), st.sampled_from("ab"), st.integers(0, 4)),
    ),
    max_size=100,
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(uses)
def test_next_use_against_a_dictionary(uses):
    queue = NextUse()
    model: defaultdict[str, dict[int, Order]] = defaultdict(dict)
    for operation, key, user, *order in uses:
        if operation == "expect":
            queue.expect(key, user, *order)
            model[key][user] = order[0]
        else:
            assert queue.drop(key, user) == (user in model[key])
            model[key].pop(user, None)
        for name in "abc":
            assert queue.next(name) == min(model[name].values(), default=None)
        assert len(queue) == sum(bool(users) for users in model.values())


def _written_for_nothing(state: SpillState, meanwhile) -> str:
    """Write the first of three values although there is room, and return which one goes when there is none."""
    for key in "abc":
        state.insert(key, 10)
    pid = state.spills.next(force=True)
    assert pid == state.find("a").pid
    meanwhile(pid)
    state.spills.complete(pid, 10)
    assert state.find("a").resident
    state.validate()
    state.insert("d", 10)
    chosen = state.spills.next()
    gone = [key for key in "abc" if not state.find(key).resident or state.find(key).pid == chosen]
    (victim,) = gone
    return victim


def _use(state: SpillState, pid: int) -> None:
    state.pin(pid)
    state.unpin(pid)


@pytest.mark.parametrize(
    ("meanwhile", "victim"),
    [
        (lambda state, pid: None, "a"),
        (lambda state, pid: state.touch(state.find("b").pid), "a"),
        (SpillState.touch, "b"),
        (_use, "b"),
        (lambda state, pid: state.alias("other name", pid), "b"),
        (lambda state, pid: state.invalidate(pid), "b"),
        (lambda state, pid: state.candidates.expect("a", "task", (1.0,)), "b"),
    ],
    ids=["nothing", "another is read", "read", "in use", "stored again", "stored anew", "needed"],
)
def test_what_was_written_and_stays_keeps_its_turn_unless_it_is_used_meanwhile(meanwhile, victim):
    state = SpillState(limit=30)
    assert _written_for_nothing(state, partial(meanwhile, state)) == victim
    assert state.counters.clean_drops == (victim == "a")


def test_a_victim_whose_record_is_not_kept_does_not_keep_its_turn():
    """Writing it again would be as much in vain if room comes otherwise again, and it may be the largest of all."""
    state = SpillState(limit=30, keep_clean=False)
    assert _written_for_nothing(state, lambda pid: None) == "b"


def test_values_with_a_copy_below_go_first_once_they_are_used_up():
    state = SpillState(limit=30)
    for key in "abc":
        state.insert(key, 10)
    pid = state.spills.next(force=True)
    state.spills.complete(pid, 10)  # "a": the room is not needed any more, the record stays
    for key in "bac":
        state.candidates.expect(key, "task", (1.0,))
        state.candidates.unexpect(key, "task")
    state.insert("d", 10)
    assert [key for key in "abcd" if not state.find(key).resident] == ["a"]
    state.candidates.expect("d", "another", (1.0,))
    assert state.spills.next(force=True) == state.find("b").pid, "used up before c, and before d is used"
    state.validate()


def test_users_that_cannot_be_compared():
    queue = NextUse()
    queue.expect("key", object(), (1.0,))
    queue.expect("key", "text", (1.0,))
    queue.expect("key", 1, (1.0,))
    assert queue.next("key") == (1.0,)


# -- Bélády --------------------------------------------------------------------------------------------

NBYTES = 10


def run_state(accesses: list[int], blocks: int, capacity: int, *, known: bool) -> tuple[int, set[int]]:
    """Return the number of misses and what was in memory at first, for a store that has room for so many blocks."""
    state = SpillState(limit=capacity * NBYTES)
    pids = [state.insert(block, NBYTES) for block in range(blocks)]
    if known:
        for time, block in enumerate(accesses):
            state.candidates.expect(block, time, (float(time),))
    spill(state)
    at_first = {block for block in range(blocks) if state.find(block).resident}
    misses = 0
    for time, block in enumerate(accesses):
        pid = pids[block]
        if not state.find(block).resident:
            misses += 1
            state.restores.begin(pid)
            spill(state)
            state.restores.complete(pid)
        state.touch(pid)
        state.candidates.unexpect(block, time)
        assert state.memory.used <= capacity * NBYTES
    state.validate()
    return misses, at_first


def spill(state: SpillState) -> None:
    while (pid := state.spills.next()) is not None:
        assert state.spills.reserve_record(pid, NBYTES)
        state.spills.complete(pid, NBYTES)


def belady(accesses: list[int], at_first: set[int], capacity: int) -> int:
    """Return the least number of misses there can be, by looking ahead at every one."""
    cache, misses = set(at_first), 0
    for time, block in enumerate(accesses):
        if block in cache:
            continue
        misses += 1
        if len(cache) == capacity:
            ahead = accesses[time:]
            cache.remove(max(cache, key=lambda other: ahead.index(other) if other in ahead else math.inf))
        cache.add(block)
    return misses


@pytest.mark.parametrize(("blocks", "capacity"), [(5, 4), (10, 3), (10, 9), (30, 10), (20, 1)])
def test_a_cyclic_scan_with_known_uses_misses_as_little_as_can_be(blocks, capacity):
    accesses = list(range(blocks)) * 6
    misses, at_first = run_state(accesses, blocks, capacity, known=True)
    assert misses == belady(accesses, at_first, capacity)
    if capacity > 1:
        assert misses < 0.9 * len(accesses)
    lru, _ = run_state(accesses, blocks, capacity, known=False)
    assert lru == len(accesses), "plain recency misses every time, which is what makes this scan the worst case"


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.integers(1, 6), st.lists(st.integers(0, 7), min_size=1, max_size=60))
def test_any_accesses_with_known_uses_miss_as_little_as_can_be(capacity, accesses):
    misses, at_first = run_state(accesses, 8, capacity, known=True)
    assert misses == belady(accesses, at_first, capacity)


def test_what_is_used_up_goes_before_what_was_never_announced():
    state = SpillState(limit=30)
    used_up, old, new = (state.insert(key, 10) for key in ("used up", "old", "new"))
    state.candidates.expect("used up", "task", (1.0,))
    state.candidates.unexpect("used up", "task")
    state.touch(old)
    state.insert("more", 20)
    assert [state.spills.next(), state.spills.next()] == [used_up, new]


# -- how much work ---------------------------------------------------------------------------------------

MANY = 100_000


def test_recency_compares_nothing():
    queue, comparisons = EvictionQueue(Entries()), Comparisons()
    queue.add(-1, (comparisons.number(1.0),))
    for pid in range(1000):
        queue.add(pid)
    before = comparisons.count
    for pid in range(1000):
        queue.touch(pid)
        queue.discard(queue.peek())
    assert comparisons.count == before


@pytest.mark.parametrize(("pattern", "count"), [("rising", MANY), ("falling", 5000), ("random", 5000), ("equal", 5000)])
def test_known_uses_cost_log_n_comparisons(pattern, count):
    queue, comparisons = EvictionQueue(Entries()), Comparisons()
    make = {
        "rising": lambda i: i,
        "falling": lambda i: -i,
        "random": lambda i: random.Random(i).random(),
        "equal": lambda i: 0,
    }[pattern]
    for pid in range(count):
        queue.add(pid, (comparisons.number(make(pid)),))
    for pid in range(0, count, 10):  # some of them change, half of these leave
        queue.add(pid, (comparisons.number(make(pid + 7)),))
        if pid % 20 == 0:
            queue.discard(pid)
    while (pid := queue.peek()) is not None:
        queue.discard(pid)
    operations = 2 * count
    # A tuple is compared by looking for the first difference, then at it: two or three comparisons each time.
    assert comparisons.count < 3 * operations * math.log2(count)
    assert len(queue) == 0


def test_a_use_that_keeps_changing_does_not_pile_up():
    queue = EvictionQueue(Entries())
    for pid in range(100):
        queue.add(pid, (float(pid),))
    for time in range(10_000):
        queue.add(5, (float(time),))
    assert len(queue.policy._heap) < 1000


@pytest.mark.parametrize("late", [True, False])
def test_users_that_come_and_go_do_not_pile_up(late):
    """One task waits for ever, thousands of others use the same key meanwhile, sooner or later than it would."""
    uses = NextUse()
    uses.expect("key", "waits", (0.0 if late else 1e9,))
    for time in range(10_000):
        uses.expect("key", time, (float(time),))
        uses.drop("key", time)
    assert len(uses._heaps["key"]) < 1000
    assert uses.next("key") == (0.0 if late else 1e9,)


def test_finding_the_next_use_is_log_n_comparisons():
    uses, comparisons = NextUse(), Comparisons()
    count = 10_000
    for user in range(count):
        uses.expect("key", user, (comparisons.number(random.Random(user).random()),))
    for user in range(count):
        uses.next("key")
        uses.drop("key", user)
    assert comparisons.count < 3 * 2 * 2 * count * math.log2(count)


@pytest.fixture(scope="module")
def states():
    """States of very different size, over their limit by a little, half on disk, with known uses."""

    def make(count: int) -> SpillState:
        state = SpillState(limit=None, disk_limit=count * NBYTES)
        for key in range(count):
            state.insert(key, NBYTES)
            if key % 3 == 0:
                state.candidates.expect(key, 0, (float(key),))
        state.memory.limit = count // 2 * NBYTES
        spill(state)
        return state

    return {count: make(count) for count in (100, 10_000, MANY)}


def test_no_event_costs_more_with_more_values(states):
    """An event on one value is no more lines of code with a thousand times the values."""

    def round_of_events(state: SpillState, start: int) -> None:
        for key in range(start, start + 20):
            entry = state.find(key)
            pid = entry.pid
            state.pin(pid)
            state.candidates.expect(key, 1, (float(key % 7),))
            if not entry.resident:
                reservation = state.room.reserve(NBYTES, 0)
                state.restores.begin(pid, reservation)
                state.restores.complete(pid)
                state.room.release(reservation)
            state.touch(pid)
            state.candidates.unexpect(key, 1)
            state.unpin(pid)
            state.alias("alias", pid)
            state.insert("new", NBYTES)
            spill(state)
            state.remove("alias")
            state.remove("new")
            state.remove(key)
            state.insert(key, NBYTES)
            spill(state)
            state.effects.take()

    lines = {count: count_lines(partial(round_of_events, state, 7)) for count, state in states.items()}
    assert lines[MANY] < 2 * lines[100], lines
    for state in states.values():
        state.validate()


def test_a_key_more_costs_the_same_for_a_value_with_thousands_of_them():
    """Thousands of tasks return the same object: None, for example."""
    lines = {}
    for count in 100, 10_000:
        state = SpillState(limit=NBYTES)
        pid = state.insert(0, NBYTES)
        for key in range(1, count):
            state.alias(key, pid)
        state.candidates.expect(count // 2, "task", (1.0,))

        def one_more(state: SpillState = state, pid: int = pid) -> None:
            state.alias("new", pid)
            state.candidates.expect("new", "task", (2.0,))
            state.candidates.unexpect("new", "task")
            state.remove("new")

        lines[count] = count_lines(one_more)
        state.validate()
    assert lines[100] == lines[10_000], lines


def test_of_thousands_of_keys_that_have_gone_nothing_is_left_to_look_through():
    """A dictionary would keep their places, and finding the one key that is left takes a look at each."""
    state = SpillState(limit=None)
    pid = state.insert(0, NBYTES)
    for key in range(1, 10_000):
        state.alias(key, pid)
    for key in range(9_000):
        state.remove(key)
    for key in range(9_000, 9_999, 2):
        state.insert(key, NBYTES)  # takes another value
    for key in range(9_001, 9_999, 2):
        state.remove(key)
    entry = state.find(9_999)
    assert list(entry.keys) == [9_999]
    assert getsizeof(entry.keys) < 5000
    state.validate()


def test_what_was_used_up_last_is_spared_while_there_are_others_that_no_task_needs():
    """Word to delete it is often on its way. Not if it has a copy: dropping that costs nothing."""
    state = SpillState(limit=None)
    state.set_grace(2)
    pids = {key: state.insert(key, NBYTES) for key in ("needed", "unknown", "a", "b", "c", "copied")}
    for key in ("a", "b", "c", "copied"):
        state.candidates.expect(key, "task", (1.0,))
    state.candidates.expect("needed", "later", (2.0,))
    state.spills.complete(take(state, pids["copied"]), NBYTES)
    for key in ("a", "b", "c", "copied"):
        state.candidates.unexpect(key, "task")
    assert state.spills.next(force=True) is None, "what has a copy is dropped, and that will do"
    assert not state.ledger.entries[pids["copied"]].resident
    expected = ["a", "unknown", "b", "c", "needed"]
    assert [state.spills.next(force=True) for _ in expected] == [pids[key] for key in expected]


def take(state: SpillState, pid: int) -> int:
    """Begin to write one value, whatever its turn; the others are pinned meanwhile."""
    others = [other for other in state.ledger.entries if other != pid]
    for other in others:
        state.pin(other)
    assert state.spills.next(force=True) == pid
    for other in others:
        state.unpin(other)
    return pid


@pytest.mark.parametrize("count", [2, 100])
def test_a_value_with_very_many_keys_goes_by_recency(count):
    state = SpillState(limit=None)
    pids = {name: state.insert((name, 0), NBYTES) for name in ("shared", "alone", "used up")}
    for key in range(1, count):
        state.alias(("shared", key), pids["shared"])
    for name in "used up", "shared":
        state.candidates.expect((name, 0), "task", (1.0,))
        state.candidates.unexpect((name, 0), "task")
    # With a few keys it is the last that was used up; with many it is one of those of which nothing is known.
    expected = ["used up", "shared", "alone"] if count == 2 else ["used up", "alone", "shared"]
    assert [state.spills.next(force=True) for _ in expected] == [pids[name] for name in expected]


def test_one_deletion_does_not_reconsider_all_that_the_disk_refused():
    """With the quota used up, thousands of values wait for room on disk; a little room is for a few of them."""
    lines = {}
    for count in 100, 10_000:
        state = SpillState(limit=0, disk_limit=NBYTES)
        state.insert("on disk", NBYTES)
        spill(state)
        for key in range(count):
            state.insert(key, NBYTES)
        while (pid := state.spills.next()) is not None:
            assert not state.spills.reserve_record(pid, NBYTES)
            state.spills.fail(pid, forever=False)
        assert state.candidates.set_aside == count
        lines[count] = count_lines(lambda state=state: state.remove("on disk"))
        assert 0 < len(state.queue) < 50
        spill(state)
        assert state.spilled == 1
        state.validate()
    assert lines[10_000] < 2 * lines[100], lines
