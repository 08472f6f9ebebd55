"""Each wrapper adds one behaviour; that it adds no other is what the conformance suite shows."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspill.errors import RecordCorrupt, RecordLost, StorageError, StorageFull
from gpuspill.storage.patient import PatientStore
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


class TestPatience:
    @pytest.fixture
    def slept(self):
        return []

    @pytest.fixture
    def patient(self, slept):
        """Return a function: a store with one record, whose reads fail as a list says."""

        def patient(*numbers):
            failures = [number and StorageError(number, os.strerror(number)) for number in numbers]
            store = FaultyStore(MemoryStore(), lambda operation, number: failures.pop(0) if failures else None)
            store = PatientStore(store, sleep=slept.append)
            failures.insert(0, None)
            return store, store.write(b"", [b"x"])

        return patient

    @pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EACCES, errno.ETIMEDOUT, errno.ESPIPE])
    def test_what_cannot_be_read_twice_is_lost(self, patient, slept, number):
        store, receipt = patient(number)
        assert bytes(store.read(receipt)[1][0]) == b"x"
        assert len(slept) == 1
        store, receipt = patient(number, number)
        with pytest.raises(RecordLost, match=f"{os.strerror(number)}, twice"):
            store.read(receipt)

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
    def test_where_the_system_is_short_of_something_it_is_tried_for_a_while(self, patient, slept, number):
        store, receipt = patient(*[number] * 20)
        assert bytes(store.read(receipt)[1][0]) == b"x"
        assert slept == sorted(slept)
        assert len(slept) == 20
        assert max(slept) <= 0.5
        slept.clear()
        store, receipt = patient(*[number] * 1000)
        with pytest.raises(StorageError, match=r"for 10 seconds") as caught:
            store.read(receipt)
        assert caught.value.errno == number
        assert ("ulimit -n" in str(caught.value)) == (number == errno.EMFILE)
        assert 10 <= sum(slept) <= 11

    def test_if_nothing_can_be_read_any_more_nothing_counts_as_lost(self, patient):
        store, receipt = patient(*[errno.EIO] * 16, None, *[errno.EIO] * 20)
        for _ in range(8):
            with pytest.raises(RecordLost):
                store.read(receipt)
        assert bytes(store.read(receipt)[1][0]) == b"x"
        for _ in range(8):
            with pytest.raises(RecordLost):
                store.read(receipt)
        for _ in range(2):
            with pytest.raises(StorageError, match="Input/output error"):
                store.read(receipt)
        assert bytes(store.read(receipt)[1][0]) == b"x"

    def test_both_in_turn(self, patient):
        store, receipt = patient(errno.EMFILE, errno.EIO, errno.ENFILE, errno.EMFILE)
        assert bytes(store.read(receipt)[1][0]) == b"x"
        store, receipt = patient(errno.EMFILE, errno.EIO, errno.ENFILE, errno.EIO)
        with pytest.raises(RecordLost):
            store.read(receipt)

    def test_nobody_waits_for_a_store_that_was_closed(self, slept):
        def fault(operation, number):
            if number == 3:
                store.close()
            return StorageError(errno.EMFILE, "Too many open files") if operation == "read" else None

        store = PatientStore(FaultyStore(MemoryStore(), fault), sleep=slept.append)
        receipt = store.write(b"", [b"x"])
        with pytest.raises(StorageError, match="Too many"):
            store.read(receipt)
        assert len(slept) == 2

    def test_a_finaliser_does_not_wait(self, slept):
        class Inside(FaultyStore):
            inside = True

        store = PatientStore(
            Inside(MemoryStore(), nth("read", error=lambda: StorageError(errno.EMFILE, "full"))), sleep=slept.append
        )
        with pytest.raises(StorageError):
            store.read(store.write(b"", [b"x"]))
        assert slept == []

    def test_what_is_no_error_of_the_disk_is_passed_on(self, slept):
        for error in (RecordLost("gone"), RecordCorrupt("altered"), MemoryError(), KeyboardInterrupt()):
            store = PatientStore(FaultyStore(MemoryStore(), nth("read", error=lambda e=error: e)), sleep=slept.append)
            with pytest.raises(type(error)):
                store.read(store.write(b"", [b"x"]))
        assert slept == []


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
    with pytest.raises(RuntimeError, match="was not opened"):
        Gate().pass_through(timeout=0)
