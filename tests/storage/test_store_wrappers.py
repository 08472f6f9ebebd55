"""Each wrapper adds one behaviour; that it adds no other is what the conformance suite shows."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspill.errors import RecordLost, StorageFull
from gpuspill.storage.wrappers import DelayedStore, FaultyStore, WrapperStore, nth
from gpuspill.testing.stores import Gate, GatedStore, MemoryStore


def test_delay():
    slept = []
    with DelayedStore(MemoryStore(), 0.25, sleep=slept.append) as store:
        receipt = store.write(b"", [b"x"])
        store.read(receipt)
        store.delete(receipt)
        store.statistics()
    assert slept == [0.25] * 3


def test_delays_of_threads_overlap():
    barrier = threading.Barrier(4)
    with (
        DelayedStore(MemoryStore(), 0.25, sleep=lambda seconds: barrier.wait(60)) as store,
        ThreadPoolExecutor(4) as pool,
    ):
        futures = [pool.submit(store.write, b"", [b"x"]) for _ in range(4)]
        assert len({future.result(60) for future in futures}) == 4


def test_faults_are_raised_before_anything_happens():
    with FaultyStore(MemoryStore(), nth("write", 2, error=lambda: StorageFull(28, "full"))) as store:
        store.write(b"", [b"1"])
        with pytest.raises(StorageFull, match="full"):
            store.write(b"", [b"2"])
        receipt = store.write(b"", [b"3"])
        assert store.statistics().records == 2
        assert bytes(store.read(receipt)[1][0]) == b"3"


def test_faults_of_every_operation_of_a_kind():
    errors = []

    def error():
        errors.append(RecordLost("lost"))
        return errors[-1]

    with FaultyStore(MemoryStore(), nth("read", error=error)) as store:
        receipt = store.write(b"", [b"1"])
        for _ in range(3):
            with pytest.raises(RecordLost):
                store.read(receipt)
        store.delete(receipt)
    # A new one each time: an exception that is raised twice has a traceback that grows.
    assert len(set(map(id, errors))) == 3


def test_wrappers_can_be_stacked():
    store = WrapperStore(DelayedStore(FaultyStore(MemoryStore(), nth("read", 1, error=KeyError)), 1.0, lambda s: None))
    with store:
        receipt = store.write(b"", [b"x"])
        with pytest.raises(KeyError):
            store.read(receipt)
        assert bytes(store.read(receipt)[1][0]) == b"x"
    assert repr(store).startswith("WrapperStore(DelayedStore(FaultyStore(")


@pytest.mark.parametrize("operation", ["write", "read", "delete"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_gate(operation, side):
    with GatedStore(MemoryStore()) as store, ThreadPoolExecutor(1) as pool:
        kept = store.write(b"", [b"kept"])
        gate = getattr(store, side)[operation] = Gate()
        arguments = (b"", [b"x"]) if operation == "write" else (kept,)
        future = pool.submit(getattr(store, operation), *arguments)
        assert gate.arrived.acquire(timeout=60)
        assert not future.done()
        stats = store.statistics()
        happened = {"write": stats.writes - 1, "read": stats.reads, "delete": stats.deletes}[operation]
        assert happened == (side == "after")
        gate.open()
        future.result(60)


def test_gate_that_nobody_opens():
    with pytest.raises(RuntimeError, match="nobody opened"):
        Gate().pass_through(timeout=0)
