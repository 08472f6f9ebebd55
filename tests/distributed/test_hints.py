"""What the worker's tasks tell: what is needed next, what to read ahead."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Event, wait
from distributed.collections import HeapSet
from distributed.utils_test import async_poll_for, inc

from gpuspill.distributed import internals
from gpuspill.distributed.hints import Hints
from tests.distributed.clusters import all_spilled, attached, spilling


class Recorder:
    """In the place of a manager."""

    def __init__(self, spilled=0):
        self.uses = {}
        self.prefetched = []
        self.away = spilled

    def expect(self, keys, order, user):
        for key in keys:
            self.uses[key, user] = order

    def drop(self, keys, user):
        for key in keys:
            self.uses.pop((key, user), None)

    def prefetch(self, keys):
        self.prefetched.append(list(keys))


TASKS = {"y": ((1,), ("a", "b")), "z": ((0,), ("b",))}


async def _closed():
    pass


def make(manager, *, depth=2, soon=None, needed=lambda: True, backlog=(), began=lambda: None, seceded=list):
    later = []
    hints = Hints(
        manager,
        needed=needed,
        backlog=lambda: iter(backlog),
        inputs=TASKS.get,
        upcoming=lambda n: [TASKS[key][1] for key in ("z", "y")][:n],
        depth=depth,
        soon=later.append if soon is None else soon,
        on_close=_closed,
        on_begin=began,
        on_secede=seceded,
    )
    hints.follow_if_needed()
    while later:
        later.pop(0)()
    return hints, later


def test_a_use_is_expected_from_waiting_to_the_end():
    manager = Recorder()
    hints, _ = make(manager)
    hints.transition("y", "released", "waiting")
    hints.transition("z", "released", "waiting")
    assert manager.uses == {("a", "y"): (1,), ("b", "y"): (1,), ("b", "z"): (0,)}
    hints.transition("y", "waiting", "ready")
    hints.transition("y", "ready", "executing")
    assert ("a", "y") in manager.uses
    hints.transition("y", "executing", "memory")
    assert manager.uses == {("b", "z"): (0,)}
    hints.transition("z", "waiting", "released")
    assert manager.uses == {}
    hints.transition("z", "released", "forgotten")


@pytest.mark.parametrize("end", ["memory", "error", "released", "rescheduled", "forgotten"])
def test_every_end_is_an_end(end):
    manager = Recorder()
    hints, _ = make(manager)
    hints.transition("y", "released", "waiting")
    hints.transition("y", "executing", end)
    assert not manager.uses


def test_a_task_that_waits_again_is_expected_anew():
    manager = Recorder()
    hints, _ = make(manager)
    hints.transition("y", "released", "waiting")
    hints.transition("y", "missing", "waiting")
    assert len(manager.uses) == 2


def test_unknown_tasks_do_not_matter():
    manager = Recorder()
    hints, _ = make(manager)
    hints.transition("unknown", "released", "waiting")
    hints.transition("unknown", "executing", "memory")
    assert not manager.uses


def test_tasks_are_not_followed_while_it_does_not_matter():
    manager = Recorder()
    tight = False
    tasks = [f"task-{i}" for i in range(250)]
    TASKS.update((key, ((1,), ("a",))) for key in tasks)
    hints, later = make(manager, needed=lambda: tight, backlog=tasks)
    assert not hasattr(hints, "transition")  # distributed does not even call
    assert not later
    assert not hints.follow_if_needed()
    tight = True
    assert hints.follow_if_needed()
    hints.transition("z", "released", "waiting")
    assert manager.uses == {("b", "z"): (0,)}
    # What was missed meanwhile is made up for, bit by bit.
    n = 0
    while later:
        before = len(manager.uses)
        later.pop(0)()
        assert len(manager.uses) - before <= 100
        n += 1
    assert n > 2
    assert len(manager.uses) == 251


def test_reading_ahead_once_for_many_transitions():
    manager = Recorder(spilled=1)
    hints, later = make(manager)
    for key in "yz":
        hints.transition(key, "waiting", "ready")
    assert len(later) == 1
    later.pop()()
    assert manager.prefetched == [["b"], ["a", "b"]]
    hints.transition("y", "ready", "executing")
    assert len(later) == 1


def test_nothing_to_read_ahead():
    hints, later = make(Recorder(spilled=0))
    hints.transition("y", "waiting", "ready")
    hints, later2 = make(Recorder(spilled=1), depth=0)
    hints.transition("y", "waiting", "ready")
    assert not later
    assert not later2


def test_reading_ahead_is_booked_on_nobody():
    from distributed.metrics import context_meter

    class Metered(Recorder):
        def prefetch(self, keys):
            context_meter.digest_metric("disk-read", 1, "count")

    hints, later = make(Metered(spilled=1))
    hints.transition("y", "waiting", "ready")
    seen = []
    with context_meter.add_callback(lambda *event: seen.append(event)):
        later.pop()()
    assert not seen


def test_errors_are_logged_once(caplog):
    """distributed swallows what plugins raise."""

    class Broken(Recorder):
        def expect(self, keys, order, user):
            raise ZeroDivisionError

    hints, _ = make(Broken())
    hints.transition("y", "released", "waiting")
    hints.transition("z", "released", "waiting")
    assert len([r for r in caplog.records if r.exc_info]) == 1


class Task:
    def __init__(self, priority, inputs):
        self.priority = priority
        self.dependencies = inputs


class Dep:
    def __init__(self, key):
        self.key = key


class FakeWorker:
    class state:
        actors = ()
        ready = None


def test_upcoming_tasks_in_order():
    rng = np.random.default_rng(0)
    tasks = [Task((int(p),), [Dep(int(p))]) for p in rng.permutation(200)]
    ready = HeapSet(key=lambda ts: ts.priority)
    for ts in tasks:
        ready.add(ts)
    for ts in tasks[::3]:
        ready.discard(ts)  # stays in the heap for a while
    FakeWorker.state.ready = ready
    left = sorted(ts.priority[0] for i, ts in enumerate(tasks) if i % 3)
    for n in (0, 1, 5, 1000):
        assert [inputs[0] for inputs in internals.upcoming(FakeWorker, n)] == left[:n]
    assert len(ready) == len(left)
    FakeWorker.state.ready = HeapSet(key=lambda ts: ts.priority)
    assert list(internals.upcoming(FakeWorker, 5)) == []


# -- in a worker ---------------------------------------------------------------------------------

ALL_AT_ONCE = {"distributed.scheduler.worker-saturation": float("inf")}


def uses(worker):
    return worker.data.manager._metadata.state.uses


@pytest.mark.cluster
@spilling(limits=(1000,), nthreads=[("", 1)], config=ALL_AT_ONCE)
async def test_a_worker_tells_what_its_tasks_need(c, s, a):
    release = Event()
    xs = c.map(inc, range(5))
    await wait(xs)
    blocker = c.submit(lambda release: release.wait(), release)
    ys = c.map(inc, xs)
    await async_poll_for(lambda: len(a.state.ready) == 5, timeout=5)
    assert not len(uses(a))  # 5 small numbers do not make memory tight
    big = await c.scatter(np.ones(1000))
    zs = c.map(lambda x, big: x, xs, big=big)
    await async_poll_for(lambda: len(a.state.ready) == 10, timeout=5)
    await async_poll_for(lambda: len(uses(a)) == 6, timeout=5)
    await release.set()
    await wait(zs)
    await wait(ys)
    assert not len(uses(a))
    assert not attached(a).hints._expected
    del blocker


@pytest.mark.cluster
@spilling(limits=(100_000,), nthreads=[("", 1)], config=ALL_AT_ONCE)
async def test_inputs_of_the_next_tasks_are_read_ahead(c, s, a):
    xs = [c.submit(np.full, 1000, i, key=f"x-{i}") for i in range(8)]
    await wait(xs)
    await all_spilled(a)
    started, release = Event(), Event()

    def block(started, release):
        started.set()
        release.wait()

    blocker = c.submit(block, started, release)
    await started.wait()
    ys = [c.submit(lambda x: int(x[0]), xs[i], key=f"y-{i}", priority=-i) for i in range(8)]
    await async_poll_for(lambda: len(a.state.ready) == 8, timeout=5)
    # As many as the option says, the most urgent first.
    await async_poll_for(lambda: a.data.statistics().prefetches >= 4, timeout=5)
    await async_poll_for(lambda: all(a.data.manager.is_resident(f"x-{i}") for i in range(4)), timeout=5)
    await release.set()
    assert await c.gather(ys) == list(range(8))
    assert a.data.statistics().loop_io == 0
    del blocker


@pytest.mark.cluster
@spilling(limits=(100_000,), nthreads=[("", 1)], config={**ALL_AT_ONCE, "gpuspill.prefetch": 0})
async def test_reading_ahead_can_be_switched_off(c, s, a):
    xs = [c.submit(np.full, 1000, i, key=f"x-{i}") for i in range(8)]
    await wait(xs)
    await all_spilled(a)
    assert await c.gather(c.map(lambda x: int(x[0]), xs)) == list(range(8))
    assert a.data.statistics().prefetches == 0


@pytest.mark.cluster
@spilling(limits=(85_000,), nthreads=[("", 1)], config={**ALL_AT_ONCE, "gpuspill.prefetch": 0})
async def test_what_is_needed_next_stays(c, s, a):
    """Without hints the oldest would go; with them what no task waits for does."""
    needed = [c.submit(np.full, 1000, i, key=f"needed-{i}") for i in range(5)]
    await wait(needed)
    unneeded = [c.submit(np.full, 1000, i, key=f"unneeded-{i}") for i in range(5)]
    await wait(unneeded)
    assert not a.data.disk
    started, release = Event(), Event()

    def block(started, release):
        started.set()
        release.wait()
        return np.ones(3000)

    blocker = c.submit(block, started, release)
    await started.wait()
    users = [c.submit(lambda x: int(x[0]), x, key=f"user-{i}", priority=-1) for i, x in enumerate(needed)]
    await async_poll_for(lambda: len(a.state.ready) == 5, timeout=5)
    await release.set()
    await wait(blocker)
    await async_poll_for(lambda: a.data.disk, timeout=5)
    assert all(key.startswith("unneeded") for key in a.data.disk)
    assert await c.gather(users) == list(range(5))


@pytest.mark.cluster
@spilling(limits=(1,), nthreads=[("", 1)], config=ALL_AT_ONCE)
async def test_cancelled_tasks_need_nothing(c, s, a):
    release = Event()
    blocker = c.submit(lambda release: release.wait(), release)
    await async_poll_for(lambda: a.state.executing_count, timeout=5)
    x = await c.scatter(np.ones(1000))
    ys = c.map(inc, [x] * 10, pure=False)
    await async_poll_for(lambda: len(uses(a)), timeout=5)
    await c.cancel(ys)
    await async_poll_for(lambda: not len(uses(a)), timeout=5)
    await release.set()
    await wait(blocker)
