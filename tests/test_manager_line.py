"""Who is let in next, and how many beyond the limit: decided by the core, told in time by the manager."""

from __future__ import annotations

import pytest

from gpuspill.core.budget import Kind
from gpuspill.core.line import AGEING
from gpuspill.testing.managers import ManagerKit, bench

MB = 10**6


class Thing:
    """Something with a size."""


def full(kit: ManagerKit, *, pinned: bool = True) -> None:
    """Fill memory with one value, which a task uses."""
    kit.manager.store("x", Thing(), kit.manager.limits.limit)
    if pinned:
        kit.running = kit.manager.admission.admit("running", ["x"])  # type: ignore[attr-defined]


def promised(kit: ManagerKit) -> int:
    """Bytes that are in memory, or are promised to be."""
    kit.manager.validate()
    return kit.manager.accounted_total()


@pytest.fixture
def kit():
    with bench(100 * MB) as kit:
        yield kit


def test_one_at_a_time_beyond_the_limit(kit):
    """When nothing can leave, one is let in; the next when that one has ended."""
    full(kit)
    line = [kit.manager.admission.reserve(20 * MB, order=(1.0, n)) for n in range(20)]
    line += [kit.manager.admission.admit(f"task-{n}", (), 50 * MB, order=(0.0, n)) for n in range(8)]
    assert [admission.granted for admission in line] == [True] + 27 * [False]
    seen = []
    for _ in line:
        assert promised(kit) <= 150 * MB
        (admission,) = (a for a in line if a.granted and a not in seen)
        seen.append(admission)
        admission.release()
    # Whoever came first, then the tasks, which are more urgent, and each eighth turn the one who came first of all.
    turns = [line.index(admission) for admission in seen]
    assert turns[:1] + turns[1:7] == [0, *range(20, 26)]
    assert turns[7] == 1
    assert sorted(turns) == list(range(28))
    kit.running.release()


def test_what_arrived_and_can_leave_makes_room(kit):
    full(kit)
    first, second = (kit.manager.admission.reserve(20 * MB, outputs={name: 20 * MB}) for name in "ab")
    assert first.overrun
    kit.manager.store("a", Thing(), 20 * MB)
    first.release()
    assert not second.granted  # what arrived can leave
    kit.engine.spill_all()
    assert second.overrun
    assert promised(kit) == 120 * MB
    second.release()
    kit.running.release()


def test_one_who_may_wait_for_others_is_not_waited_for(kit):
    full(kit)
    outer, inner, other = (kit.manager.admission.admit(name, (), 20 * MB) for name in ("outer", "inner", "other"))
    assert (outer.granted, inner.granted) == (True, False)
    kit.manager.admission.detach(outer)
    assert (inner.granted, other.granted) == (True, False)
    kit.manager.admission.detach(outer)
    outer.release()  # has no say any more
    assert not other.granted
    inner.release()
    assert other.granted
    other.release()
    kit.running.release()


def test_one_who_is_within_the_limit_by_now_is_not_waited_for(kit):
    full(kit)
    first, second, third = (kit.manager.admission.admit(name, (), 60 * MB) for name in ("first", "second", "third"))
    kit.running.release()
    kit.manager.discard("x")
    assert promised(kit) == 120 * MB
    assert (second.overrun, third.granted) == (True, False)
    for admission in first, second, third:
        admission.release()


def test_those_who_need_nothing_do_not_wait_for_the_end_of_others(kit):
    full(kit)
    line = [kit.manager.admission.admit(f"task-{n}", (), nbytes) for n, nbytes in enumerate((20 * MB, 0, 0))]
    assert all(admission.granted for admission in line)
    for admission in line:
        admission.release()
    kit.running.release()


def test_tiny_requests_neither_wait_for_the_end_of_others_nor_are_waited_for(kit):
    """As small as values that are spilled last: tasks on a worker that is full of inputs do not run one by one."""
    full(kit)
    sizes = [4095] * 20 + [4096, 4095, 4096]
    line = [kit.manager.admission.admit(f"task-{n}", (), nbytes) for n, nbytes in enumerate(sizes)]
    assert [admission.granted for admission in line] == [True] * 22 + [False], "of 4 KiB one at a time"
    assert promised(kit) == 100 * MB + 21 * 4095 + 4096
    line[20].release()
    assert line[22].granted
    for admission in line:
        admission.release()
    kit.running.release()


def test_no_one_waits_for_ever_for_one_who_does_not_end(kit):
    """What a task waits for cannot be known for sure: after a second the next one is let in."""
    full(kit)
    line = [kit.manager.admission.admit(f"task-{n}", (), MB) for n in range(5)]
    for count in range(1, 5):
        assert sum(admission.granted for admission in line) == count
        assert kit.engine.spill_all() == 1.0
        kit.clock.advance(0.6)
        assert kit.engine.spill_all() == pytest.approx(0.4)
        kit.clock.advance(0.5)
        kit.engine.spill_all()
    assert all(admission.granted for admission in line)
    for admission in line:
        admission.release()
    kit.running.release()


def test_that_does_not_depend_on_spill_threads(kit):
    """They may all be in the middle of writes that hang."""
    full(kit)
    first, second = (kit.manager.admission.admit(name, (), MB) for name in ("first", "second"))
    kit.manager.stalls.relent()
    kit.clock.advance(0.9)
    kit.manager.stalls.relent()
    assert (first.granted, second.granted) == (True, False)
    kit.clock.advance(0.2)
    kit.manager.stalls.relent()
    assert second.granted
    for admission in first, second:
        admission.release()
    kit.running.release()


def test_spill_threads_are_told_that_there_is_something_to_wait_for(kit):
    full(kit)
    first = kit.manager.admission.admit("first", (), MB)
    kit.engine.spill_all()
    kit.engine.wanted = False
    with kit.manager.admission.admit("second", (), MB) as second:
        assert not second.granted
        assert kit.engine.wanted
    first.release()
    kit.running.release()


def test_what_becomes_more_urgent_goes_first(kit):
    full(kit)
    runs, early, late = (kit.manager.admission.reserve(MB, order=(order,)) for order in (0.0, 1.0, 2.0))
    kit.manager.admission.improve(late, (0.5,))
    kit.manager.admission.improve(late, (3.0,))  # less urgent it does not become
    runs.release()
    assert (early.granted, late.granted) == (False, True)
    kit.manager.admission.improve(late, (0.0,))  # too late to matter
    late.release()
    assert early.granted
    early.release()
    kit.running.release()


def test_among_equals_tasks_go_before_transfers_and_those_before_what_is_read_ahead(kit):
    full(kit)
    kinds = [Kind.TASK, Kind.AHEAD, Kind.TRANSFER, Kind.TASK]
    line = [kit.manager.admission.admit(None, (), MB, kind=kind, order=(1.0,)) for kind in kinds]
    order = []
    for _ in line:
        (number,) = (n for n, admission in enumerate(line) if admission.granted and n not in order)
        order.append(number)
        line[number].release()
    assert order == [0, 3, 2, 1]
    kit.running.release()


def test_a_stream_of_urgent_ones_does_not_keep_the_others_waiting_for_ever(kit):
    full(kit)
    runs = kit.manager.admission.reserve(MB, order=(0.0,))
    old = [kit.manager.admission.reserve(MB, order=(9.0,)) for _ in range(3)]
    served = 0
    while not all(admission.granted for admission in old):
        following = kit.manager.admission.reserve(MB, order=(1.0,))
        runs.release()
        served += 1
        assert served <= AGEING * len(old)
        runs = next(a for a in (*old, following) if a.granted and not a.reservation.released)
        if runs is not following:
            runs.release()
            served += 1
            runs = following
    runs.release()
    kit.running.release()
