"""A task on its way to its inputs."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from distributed import Reschedule
from distributed.metrics import context_meter

from gpuspill import DataLostError
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.distributed.lost import LostValue
from gpuspill.distributed.metrics import WAIT
from gpuspill.distributed.task_inputs import OutputSizes, TaskInputs, granted
from gpuspill.distributed.views import ResidentView, View


def test_output_sizes():
    sizes = OutputSizes(weight=0.5)
    assert sizes.expected("inc") == 0
    sizes.learn("inc", 100)
    assert sizes.expected("inc") == 100
    sizes.learn("inc", 200)
    assert sizes.expected("inc") == 150
    assert sizes.expected("dec") == 0


def test_output_sizes_forget_kinds_that_never_come_back():
    sizes = OutputSizes(capacity=3)
    for i in range(10):
        sizes.learn(f"kind-{i}", 1)
    assert sum(sizes.expected(f"kind-{i}") for i in range(10)) <= 3


@pytest.fixture
def store(tmp_path):
    store = build_store(Settings(), str(tmp_path))
    store["x"] = np.ones(1000)
    store["y"] = np.zeros(1000)
    store.manager.limits.evict_all()
    yield store
    statistics = store.statistics()
    assert statistics.pinned_nbytes == statistics.reserved_nbytes == statistics.waiting == 0
    store.manager.validate()
    store.close()


def job_for(store, keys, output=0, wait=True):
    return TaskInputs(store.manager, store.manager.admission.admit("out", keys, output), wait=wait)


def metered(function):
    seen = []
    with context_meter.add_callback(lambda label, value, unit: seen.append((label, unit))):
        function()
    return seen


def test_prepare_reads_the_inputs(store):
    job = job_for(store, "xy")
    assert not job.ready
    seen = metered(job.prepare)
    assert ("disk-read", "bytes") in seen
    assert ("deserialize", "seconds") in seen
    assert (WAIT, "seconds") not in seen
    filled = job.fill({"x": "stand-in", "y": "stand-in", "actor": "as it is"})
    assert filled["x"].sum() == 1000
    assert filled["y"].sum() == 0
    assert filled["actor"] == "as it is"
    assert job.stopped >= job.started
    job.abandon()


def test_fill_prepares_if_nobody_did(store):
    job = job_for(store, "x")
    assert job.fill({"x": None})["x"].sum() == 1000
    job.abandon()


def test_ready(store):
    job = job_for(store, "x")
    job.prepare()
    assert job.ready
    job.abandon()


def test_values_are_not_kept(store):
    import weakref

    job = job_for(store, "x")
    job.prepare()
    ref = weakref.ref(job.take()["x"])
    job.abandon()
    store.manager.limits.evict_all()
    assert ref() is None


def blocked(store):
    """Fill the memory; what could make room is for a disk that is slow."""
    store.manager.limits.set_limit(20_000, None)
    holder = store.manager.admission.admit(None, (), 15_000)
    store["z"] = np.ones(1000)
    return holder


def test_prepare_waits_for_room_and_says_how_long(store):
    gate = threading.Event()
    write = store.records.store.write

    def slow(header, frames):
        assert gate.wait(10)
        return write(header, frames)

    store.records.store.write = slow
    holder = blocked(store)
    job = job_for(store, "x")
    assert not job.admission.granted
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(metered(job.prepare)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    gate.set()
    thread.join(10)
    assert (WAIT, "seconds") in seen
    assert job.take()["x"].sum() == 1000
    job.abandon()
    holder.release()


def test_abandon_ends_the_wait(store):
    gate = threading.Event()
    write = store.records.store.write
    store.records.store.write = lambda *args: (gate.wait(10), write(*args))[1]
    holder = blocked(store)
    job = job_for(store, "x")
    thread = threading.Thread(target=job.prepare)
    thread.start()
    job.abandon()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(Reschedule):
        job.take()
    gate.set()
    holder.release()


def test_no_wait_if_admission_is_off(store):
    holder = blocked(store)
    job = job_for(store, "x", wait=False)
    job.prepare()
    assert job.take()["x"].sum() == 1000
    job.abandon()
    holder.release()


def test_errors_come_out_of_take(store):
    class Unreadable:
        def __reduce__(self):
            return _fail, ()

    store["bad"] = Unreadable()
    store.manager.limits.evict_all()
    job = job_for(store, ["bad"])
    job.prepare()
    with pytest.raises(ZeroDivisionError):
        job.fill({"bad": None})
    job.abandon()


def _fail():
    raise ZeroDivisionError


def lose(store):
    for slot in store.manager._metadata.slots.values():
        if slot.receipt is not None:
            store.records.store.delete(slot.receipt)


def test_a_lost_input_asks_to_be_rescheduled(store):
    lose(store)
    job = job_for(store, "x")
    job.prepare()
    assert job.lost.key == "x"
    assert not job.final
    with pytest.raises(Reschedule):
        job.fill({"x": None})
    job.abandon()


def test_a_value_that_is_lost_for_good(store):
    store["gone"] = LostValue(DataLostError("lost", "gone"))
    job = job_for(store, ["gone"])
    job.prepare()
    assert job.final
    assert job.lost.key == "gone"
    job.abandon()


def test_word_of_a_loss_matters_as_long_as_the_key_is_here(store):
    """Each task and each request takes the long way while there is one."""
    for key in ("deleted", "replaced", "cleared"):
        store[key] = LostValue(DataLostError("lost", key))
    del store["deleted"]
    assert store.has_lost_values
    store["replaced"] = 1
    assert store.has_lost_values
    store.pop_quietly("cleared")
    assert not store.has_lost_values


def test_prepare_later(store):
    async def main():
        job = job_for(store, "xy")
        await job.prepare_later()
        values = job.take()
        assert values["x"].sum() + values["y"].sum() == 1000
        job.abandon()

    asyncio.run(main())


def test_prepare_later_books_the_reading_on_its_context(store):
    seen = []

    async def main():
        job = job_for(store, "xy")
        with context_meter.add_callback(lambda label, value, unit: seen.append((label, unit))):
            await job.prepare_later()
        job.take()
        job.abandon()

    asyncio.run(main())
    assert seen.count(("disk-read", "count")) == 2


def test_prepare_later_of_a_lost_input(store):
    async def main():
        lose(store)
        job = job_for(store, "x")
        await job.prepare_later()
        assert job.lost.key == "x"
        with pytest.raises(Reschedule):
            job.take()
        job.abandon()

    asyncio.run(main())


def test_prepare_later_can_be_cancelled(store):
    async def main():
        gate = threading.Event()
        read = store.records.store.read
        store.records.store.read = lambda *args, **lend: (gate.wait(10), read(*args, **lend))[1]
        job = job_for(store, "x")
        task = asyncio.ensure_future(job.prepare_later())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        job.abandon()
        gate.set()
        assert (await store.async_get("x"))["x"].sum() == 1000

    asyncio.run(main())


def test_granted(store):
    async def main():
        gate = threading.Event()
        write = store.records.store.write
        store.records.store.write = lambda *args: (gate.wait(10), write(*args))[1]
        holder = blocked(store)
        admission = store.manager.admission.reserve(10_000)
        waiting = asyncio.ensure_future(granted(admission))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await asyncio.wait_for(waiting, 10)
        await granted(admission)
        admission.release()
        holder.release()

    asyncio.run(main())


# -- views ---------------------------------------------------------------------------------------


def test_view_hands_each_value_out_once(store):
    view = View(store, {"x": "stand-in", "new": 1})
    assert "x" in view
    assert "new" in view
    assert "y" in view
    assert view["x"] == "stand-in"
    assert view["x"].sum() == 1000
    assert view["new"] == 1
    assert "new" not in view
    with pytest.raises(KeyError):
        view["new"]


def test_resident_view_reads_nothing(store):
    view = ResidentView(store, {"y": "here"})
    assert "x" not in view
    assert "y" in view
    assert "unknown" not in view
    store["z"] = np.ones(10)
    assert "z" in view
    store.manager.limits.evict_all()
    assert view["z"].sum() == 10  # held since it was asked for
    assert store.statistics().restores == 0
