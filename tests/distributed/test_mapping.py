"""The store on its own: a mapping, and the asynchronous contract of dask/distributed#4424."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
from zict.tests.utils_test import check_mapping

from gpuspill import DataLostError, simulated
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.storage.wrappers import WrapperStore


class Gate(WrapperStore):
    """Reads and writes wait until they are let through; who asks is noted."""

    def __init__(self, store):
        super().__init__(store)
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Semaphore(0)
        self.threads = set()

    def _pass(self):
        self.threads.add(threading.get_ident())
        self.waiting.release()
        assert self.open.wait(10)

    def write(self, header, frames):
        self._pass()
        return self.store.write(header, frames)

    def read(self, receipt, allocate=None, **lend):
        self._pass()
        return self.store.read(receipt, allocate, **lend)

    def delete(self, receipt):
        self.threads.add(threading.get_ident())
        self.store.delete(receipt)


@pytest.fixture
def store(tmp_path):
    store = build_store(Settings(), str(tmp_path))
    yield store
    store.manager.validate()
    store.close()


@pytest.fixture
def gate(store):
    """Put a gate between the store and its files."""
    gate = store.records.store = Gate(store.records.store)
    yield gate
    gate.open.set()


def spill(store, *keys):
    store.manager.limits.evict_all()
    assert all(not store.manager.is_resident(key) for key in keys)


def test_is_a_mapping(store):
    check_mapping(store)


@pytest.mark.parametrize("limit", [1, 100, None])
def test_is_a_mapping_while_it_spills(tmp_path, limit):
    store = build_store(Settings(), str(tmp_path))
    try:
        store.manager.limits.set_limit(limit, None)
        store["a"] = 1
        store["b"] = [2]
        assert store == {"a": 1, "b": [2]}
        assert store != {"a": 1}
        store.update({"c": "3"})
        assert sorted(store) == ["a", "b", "c"]
        assert store.pop("c") == "3"
        assert store.setdefault("a", 5) == 1
        store["a"] = 6
        assert store["a"] == 6
        del store["a"]
        with pytest.raises(KeyError, match="a"):
            store["a"]
        with pytest.raises(KeyError, match="a"):
            del store["a"]
        store.clear()
        assert len(store) == 0
        store.manager.validate()
    finally:
        store.close()


def test_same_object_while_it_is_in_memory(store):
    value = object()
    store["x"] = value
    assert store["x"] is value


def test_same_object_after_spilling_while_somebody_holds_it(store):
    value = np.ones(1000)
    store["x"] = value
    store.manager.limits.evict_all()
    assert store["x"] is value


@pytest.mark.fault("disk slow or stuck", on=("host→disk", "release"), outcome="the loop does not wait")
def test_nothing_but_reading_waits_for_the_disk(store, gate):
    for i in range(4):
        store[i] = np.full(1000, i)
    gate.open.clear()
    store.manager.limits.set_limit(1, None)
    assert gate.waiting.acquire(timeout=10)  # a write hangs
    store["new"] = 1
    store[0] = 2
    del store[1]
    assert 1 not in store
    assert sorted(map(str, store)) == ["0", "2", "3", "new"]
    assert len(store) == 4
    store.pop_quietly(2)
    store.pop_quietly("unknown")
    assert store.memory_total() > 0
    store.set_offset(10)
    store.statistics()
    assert store.spilled_total == (0, store.spilled_total.disk)
    assert threading.get_ident() not in gate.threads
    gate.open.set()


def test_deleting_reads_nothing(store, gate):
    store["x"] = np.ones(1000)
    spill(store, "x")
    reads = store.statistics().read_nbytes
    del store["x"]
    store.clear()
    assert store.statistics().read_nbytes == reads


def test_clear_reads_nothing(store, gate):
    for i in range(5):
        store[i] = np.full(100, i)
    spill(store, *range(5))
    store.clear()
    assert store.statistics().restores == 0
    assert len(store) == 0


def test_size_hint_replaces_sizeof(store):
    class NoSize:
        def __sizeof__(self):
            raise AssertionError("sizeof was called")

    store.on_store = lambda key, value: {"x": 123}.get(key)
    store["x"] = NoSize()
    assert store.memory_total() == 123
    store["y"] = np.ones(10)  # not known: sizeof
    assert store.memory_total() >= 123 + 80


def test_where_records_go(tmp_path):
    mine, given = tmp_path / "mine", tmp_path / "given"
    for settings, parent in ((Settings(), mine), (Settings(spill_directory=str(given)), given)):
        store = build_store(settings, str(mine))
        try:
            store["x"] = np.ones(1000)
            spill(store, "x")
            (directory,) = parent.iterdir()
            assert sum(path.stat().st_size for path in directory.iterdir()) >= 8000
        finally:
            store.close()
        assert not list(parent.iterdir())


class Wary:
    """Notes what it is asked for."""

    def __init__(self, asked):
        object.__setattr__(self, "asked", asked)

    def __getattribute__(self, name):
        object.__getattribute__(self, "asked").append(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name):
        raise RuntimeError(f"nobody should ask for {name}")

    def __len__(self):
        raise RuntimeError("nobody should ask how long it is")

    def __bool__(self):
        raise RuntimeError("nobody should ask whether it is true")

    def __eq__(self, other):
        raise RuntimeError("nobody should compare it")

    __hash__ = None


@pytest.mark.parametrize("device", [None, "simulated"])
def test_storing_asks_a_value_for_nothing_but_its_size_and_class(tmp_path, device):
    with simulated.use(simulated.SimulatedDevice(1000)):
        store = build_store(Settings(device=device), str(tmp_path))
    try:
        assert (store.tier is None) is (device is None)
        asked = []
        value = Wary(asked)
        store["x"] = value
        store["y"] = [value]
        assert store["x"] is value
        assert store["y"][0] is value
        del store["x"], store["y"]
        assert set(asked) <= {"__class__", "__sizeof__", "nbytes"}
    finally:
        store.close()


def test_hash_and_pickle(store):
    assert hash(store) == object.__hash__(store)
    assert store in {store}
    with pytest.raises(TypeError, match=r"gpuspill\.data"):
        pickle.dumps(store)
    assert "0 keys" in repr(store)


def test_views_of_the_tiers(store):
    store["x"] = np.ones(1000)
    spill(store, "x")
    store["y"] = 1
    assert list(store.memory) == ["y"]
    assert list(store.slow) == list(store.disk) == ["x"]
    assert len(store.memory) == len(store.disk) == len(store.slow) == 1
    assert "x" in store.disk
    assert "x" not in store.memory
    assert "z" not in store.disk
    assert store.memory["y"] == 1
    with pytest.raises(KeyError):
        store.memory["x"]
    assert store.disk["x"].sum() == 1000
    assert not store.disk
    assert "1 keys" in repr(store.memory) or "2 keys" in repr(store.memory)


def test_distributed_finds_no_manual_eviction(store):
    """Its memory monitor would spill on the event loop through these."""
    assert not hasattr(store, "fast")
    assert not hasattr(store, "evict")


def test_sizes(store):
    store["x"] = np.ones(1000)
    nbytes = store.memory_total()
    assert nbytes >= 8000
    assert store.spilled_total == (0, 0)
    spill(store, "x")
    assert store.memory_total() == 0
    assert store.spilled_total.memory == nbytes
    assert store.spilled_total.disk >= 8000
    store["x"]
    assert store.spilled_total.memory == 0
    assert store.spilled_total.disk >= 8000  # the clean copy
    del store["x"]
    assert store.memory_total() == 0


def test_read_on_the_loop_thread_is_counted_and_warned_about_once(store, caplog):
    for key in "ab":
        store[key] = np.ones(100)
    spill(store, "a", "b")
    store.manager.loop_thread = threading.get_ident()
    assert store["a"].sum() == 100
    assert store["b"].sum() == 100
    assert store["b"].sum() == 100  # in memory
    assert store.statistics().loop_io == 2
    assert len([r for r in caplog.records if "event loop" in r.message]) == 1


def test_read_on_another_thread_is_not_counted(store):
    store["a"] = np.ones(100)
    spill(store, "a")
    store.manager.loop_thread = threading.get_ident() + 1
    assert store["a"].sum() == 100
    assert store.statistics().loop_io == 0


def test_metrics(store):
    store["x"] = np.ones(1000)
    spill(store, "x")
    store["x"]
    store["x"]
    metrics = store.cumulative_metrics
    assert metrics["disk-write", "count"] == 1
    assert metrics["disk-write", "bytes"] >= 8000
    assert metrics["disk-read", "count"] == 1
    assert metrics["disk-read", "bytes"] >= 8000
    assert metrics["memory-read", "count"] == 1
    assert metrics["memory-read", "bytes"] >= 8000
    for label in ("disk-write", "disk-read", "serialize", "deserialize"):
        assert metrics[label, "seconds"] > 0
    assert {unit for _, unit in metrics} == {"seconds", "bytes", "count"}
    metrics.clear()
    assert store.cumulative_metrics  # a copy


# -- the asynchronous contract -------------------------------------------------------------------


def run(coroutine):
    """Run on a loop that fails if anything on it takes long only because it waited for the disk."""
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_async_get_is_done_when_all_is_fast(store):
    async def main():
        store["x"], store["y"] = 1, 2
        future = store.async_get(["x", "y"])
        assert future.done()
        assert await future == {"x": 1, "y": 2}
        assert await store.async_get([]) == {}
        assert await store.async_get(["x", "z"], missing="omit") == {"x": 1}

    run(main())


def test_async_get_reads_what_is_spilled(store, gate):
    async def main():
        store["x"], store["y"] = np.ones(100), np.zeros(100)
        spill(store, "x", "y")
        store["z"] = 3
        gate.threads.clear()
        gate.open.clear()
        future = store.async_get(["x", "y", "z"])
        assert not future.done()
        await asyncio.to_thread(gate.waiting.acquire)
        assert not future.done()
        gate.open.set()
        values = await future
        assert {k: np.sum(v) for k, v in values.items()} == {"x": 100, "y": 0, "z": 3}
        assert threading.get_ident() not in gate.threads

    run(main())


def test_set_then_async_get_never_raises(store):
    async def main():
        store.manager.limits.set_limit(1, None)
        for i in range(50):
            store["x"] = i
            assert await store.async_get(["x"]) == {"x": i}

    run(main())


def test_delete_then_async_get_always_raises(store):
    async def main():
        store["x"] = np.ones(100)
        spill(store, "x")
        del store["x"]
        with pytest.raises(KeyError, match="x"):
            await store.async_get(["x"])
        assert await store.async_get(["x"], missing="omit") == {}

    run(main())


def test_a_key_deleted_while_it_is_read_is_delivered(store, gate):
    async def main():
        store["x"] = np.ones(100)
        spill(store, "x")
        gate.open.clear()
        future = store.async_get(["x"])
        await asyncio.to_thread(gate.waiting.acquire)
        del store["x"]
        assert "x" not in store
        gate.open.set()
        assert (await future)["x"].sum() == 100
        with pytest.raises(KeyError):
            await store.async_get(["x"])

    run(main())


def test_a_key_replaced_while_it_is_read(store, gate):
    async def main():
        store["x"] = np.ones(100)
        spill(store, "x")
        gate.open.clear()
        future = store.async_get(["x"])
        await asyncio.to_thread(gate.waiting.acquire)
        store["x"] = "new"
        gate.open.set()
        assert (await future)["x"].sum() == 100
        assert store["x"] == "new"

    run(main())


@pytest.mark.fault("cancelled meanwhile", on="disk→host", outcome="nothing pinned, nothing promised")
def test_cancelling_async_get_leaves_the_store_consistent(store, gate):
    async def main():
        store["x"], store["y"] = np.ones(100), np.zeros(100)
        spill(store, "x", "y")
        gate.open.clear()
        task = asyncio.ensure_future(store.async_get(["x", "y"]))
        await asyncio.to_thread(gate.waiting.acquire)
        other = store.async_get(["x"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        assert (await other)["x"].sum() == 100
        assert (await store.async_get(["y"]))["y"].sum() == 0

    run(main())
    statistics = store.statistics()
    assert statistics.pinned_nbytes == statistics.reserved_nbytes == statistics.waiting == 0


def test_async_get_of_what_cannot_be_read(store):
    class Unreadable:
        def __reduce__(self):
            return _fail, ()

    async def main():
        store["x"], store["y"] = Unreadable(), 1
        spill(store, "x")
        with pytest.raises(ZeroDivisionError):
            await store.async_get(["x", "y"])
        assert await store.async_get(["y"]) == {"y": 1}

    run(main())


def _fail():
    raise ZeroDivisionError


def test_lost_value_names_its_key_and_is_reported(store):
    store["my key"] = np.ones(100)
    spill(store, "my key")
    reported = []
    store.on_lost = reported.append
    slot_receipt = next(iter(store.manager._metadata.slots.values())).receipt
    store.records.store.delete(slot_receipt)
    with pytest.raises(DataLostError, match="my key") as caught:
        store["my key"]
    assert reported == [caught.value]
    del store["my key"]  # never raises
    store["my key"] = 1
    assert store["my key"] == 1


def test_memory_total_is_without_offset_and_offset_spills(store):
    nbytes = 8000
    store.on_store = lambda key, value: nbytes
    store["x"] = np.ones(1000)
    store["y"] = np.ones(1000)
    store.manager.limits.set_limit(3 * nbytes, None)
    assert store.memory_total() == 2 * nbytes
    store.set_offset(2 * nbytes)
    wait_until(lambda: store.memory_total() == nbytes)
    store.set_offset(-nbytes)
    store["z"] = np.ones(1000)
    store["w"] = np.ones(1000)
    assert store.memory_total() == 3 * nbytes
    assert store.statistics().spills == 1


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("condition not reached")


def test_close_removes_files_and_keeps_what_is_in_memory(tmp_path):
    store = build_store(Settings(), str(tmp_path))
    store["x"] = np.ones(1000)
    spill(store, "x")
    store["y"] = 1
    assert list(tmp_path.iterdir())
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    assert store["y"] == 1
    assert sorted(store) == ["x", "y"]
    del store["x"]
    assert len(store) == 1


def test_what_was_gathered_from_a_device_goes_without_the_garbage_collector(tmp_path):
    device = simulated.SimulatedDevice(10_000)

    async def gather():
        got = await store.async_get(["x", "on disk"])
        assert simulated.asnumpy(got["x"][0]).sum() == 100

    with simulated.use(device):
        store = build_store(Settings(device="simulated"), str(tmp_path))
        gc.disable()
        try:
            store["x"] = [simulated.asarray(np.ones(100, "u1")), np.ones(10)]
            store["on disk"] = np.ones(10)
            spill(store, "on disk")
            asyncio.run(gather())
            del store["x"]
            store.close()
            assert device.statistics().live_bytes == 0
        finally:
            gc.enable()
            store.close()


def test_a_value_takes_no_more_than_400_bytes_beside_itself_and_its_key(tmp_path):
    """Of small values there may be a million."""
    count = 50_000
    keys, values = [f"key-{n}" for n in range(count)], [float(n) for n in range(count)]
    store = build_store(Settings(device=None), str(tmp_path))
    try:
        store["first"] = None
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for key, value in zip(keys, values, strict=True):
                store[key] = value
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (after - before) / count <= 400
        for key in keys:
            store.peek(key)
        assert len(store.manager._metadata.state.queue.policy._recent._places) <= 2 * count + 64, (
            "uses leave something behind"
        )
    finally:
        store.close()


def test_what_is_on_disk_is_counted_in_blocks(tmp_path):
    store = build_store(Settings(device=None), str(tmp_path))
    try:
        for n in range(10):
            store[n] = float(n)
        store.manager.limits.evict_all()
        assert store.spilled_total.disk == 10 * os.statvfs(tmp_path).f_frsize
    finally:
        store.close()
