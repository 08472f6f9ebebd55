"""Spills that take too long: a disk that hangs in the middle of a write, a value whose own code waits for a lock."""

import logging
import threading
import time

import pytest

from gpuspill.core.residency import State
from gpuspill.errors import ManagerClosed
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.storage.files import FileStore
from gpuspill.testing.clock import ManualClock
from gpuspill.testing.memory_store import ManualStore
from gpuspill.testing.stores import Gate, GatedStore
from tests.things import Thing
from tests.threads import in_thread

TIMEOUT = 60


class Kit:
    """A manager whose writes wait for the test, and whose clock stands still."""

    def __init__(self, limit=100, **options):
        self.clock = ManualClock()
        self.store = ManualStore()
        self.manager = ProxifyManager(
            limit=limit,
            store=self.store,
            serializer=PickleSerializer(),
            sizeof=lambda value: value.nbytes,
            clock=self.clock,
            spill_timeout=60.0,
            **options,
        )

    def state(self, key):
        with self.manager._metadata as state:
            return state.find(key).state


def until(condition):
    """Wait until something is so that other threads see to."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def make():
    kits = []

    def make(**options):
        kits.append(Kit(**options))
        return kits[-1]

    yield make
    for kit in kits:
        kit.store.let_all_go()
        kit.manager.validate()
        kit.manager.close()


@pytest.mark.fault("disk slow or stuck", on="host→disk", outcome="after a minute no task waits for it")
def test_a_write_that_hangs_is_not_waited_for(make, caplog):
    kit = make()
    manager = kit.manager
    manager.store("a", Thing("a"))
    manager.store("b", Thing("b"))
    kit.store.wait_for("write")
    admission = manager.admission.admit("c", [], 100)
    kit.clock.advance(60)
    manager.stalls.notice()
    assert not admission.granted
    assert not caplog.records
    kit.clock.advance(1)
    manager.stalls.notice()
    assert admission.granted
    assert admission.overrun
    manager.stalls.notice()
    (record,) = caplog.records
    assert "writing the value of 'a' takes more than 60 seconds (gpuspill.spill-timeout)" in record.getMessage()
    assert "disk of the spill directory may hang" in record.getMessage()
    # Nor does who comes later, once the one before has ended.
    later = manager.admission.reserve(1000)
    admission.release()
    assert later.granted
    manager.validate()
    assert manager.get("a").content == "a"
    later.release()
    # It may end all the same, and then all is as ever.
    kit.store.let_all_go()
    until(lambda: kit.state("a") is not State.SPILLING and manager.memory_total() <= 100)
    kit.store.manual = frozenset({"write"})
    manager.store("d", Thing("d"))
    kit.store.wait_for("write")
    assert not manager.admission.admit("e", [], 100).granted


def test_what_else_can_be_written_makes_room(make):
    """One of two threads hangs: the other goes on, and with it those who wait."""
    kit = make(limit=200, spill_threads=2)
    manager = kit.manager
    for key in "abcde":
        manager.store(key, Thing(key))
    first, second = kit.store.wait_for("write", 2)
    kit.clock.advance(59)
    second.let_go()
    until(lambda: second not in kit.store.wait_for("write", 2))
    kit.clock.advance(2)
    manager.stalls.notice()
    admission = manager.admission.admit("f", [], 100)
    assert not admission.granted
    while not admission.granted:
        for write in kit.store.wait_for("write"):
            if write is not first:
                write.let_go()
        admission.wait(0.01)
    assert not admission.overrun
    admission.release()
    assert manager.statistics().overruns == 0


def test_others_go_in_the_place_of_what_hangs(make):
    kit = make(limit=300, spill_threads=2)
    for key in "abcd":
        kit.manager.store(key, Thing(key))
    kit.store.wait_for("write", 1)
    assert kit.manager.statistics().spills == 0
    kit.clock.advance(61)
    kit.manager.stalls.notice()
    kit.store.wait_for("write", 2)  # in the place of the first


def test_whoever_makes_room_does_not_wait_for_it(make):
    kit = make()
    kit.manager.store("a", Thing("a"))
    kit.manager.store("b", Thing("b"))
    kit.store.wait_for("write")
    kit.clock.advance(61)
    kit.manager.stalls.notice()
    kit.store.manual = frozenset()
    assert kit.manager.limits.make_room(100) == 100
    kit.manager.limits.evict_all()
    assert kit.state("b") is State.SPILLED
    assert kit.state("a") is State.SPILLING


@pytest.mark.parametrize("fails", [False, True])
def test_those_who_wait_notice_by_themselves(make, fails):
    kit = make()
    manager = kit.manager
    manager.store("a", Thing("a"))
    manager.store("b", Thing("b"))
    (write,) = kit.store.wait_for("write")
    waiting = in_thread(manager.admission.wait_for_room)
    until(lambda: manager.statistics().waiting)
    kit.clock.advance(61)
    waiting()
    write.let_go(OSError(5, "broken") if fails else None)
    kit.store.let_all_go()
    manager.admission.wait_for_room()
    assert manager.get("a").content == "a"


def test_a_task_that_waits_for_room_with_a_lock_that_serialising_takes(make, caplog):
    """``with LOCK: gpuspill.proxify(x)``, while ``x.__getstate__`` takes ``LOCK``."""
    lock = threading.Lock()
    arrived = threading.Event()

    class Locking(Thing):
        def __reduce__(self):
            arrived.set()
            with lock:
                return Thing, (self.content,)

    kit = make()
    kit.store.let_all_go()
    manager = kit.manager

    def task():
        with lock:
            manager.store("a", Locking("a"))
            manager.store("b", Locking("b"))
            assert arrived.wait(TIMEOUT)
            manager.admission.wait_for_room()

    running = in_thread(task)
    assert arrived.wait(TIMEOUT)
    until(lambda: manager.statistics().waiting)
    kit.clock.advance(61)
    running()
    assert "serialising the value of" in caplog.text
    assert "lock that a task holds" in caplog.text
    until(lambda: manager.memory_total() <= 100)
    assert manager.get("a").content == "a"


def test_without_a_limit_of_time_it_is_waited_for():
    clock, store = ManualClock(), ManualStore()
    manager = ProxifyManager(
        limit=100, store=store, serializer=PickleSerializer(), sizeof=lambda value: value.nbytes, clock=clock
    )
    manager.store("a", Thing("a"))
    manager.store("b", Thing("b"))
    store.wait_for("write")
    admission = manager.admission.admit("c", [], 100)
    clock.advance(10**6)
    manager.stalls.notice()
    assert not admission.granted
    admission.release()
    store.let_all_go()
    manager.close()


@pytest.mark.fault("disk slow or stuck", on="close", outcome="gives up after a minute")
@pytest.mark.parametrize("operation", ["write", "read", "delete"])
def test_closing_gives_up(tmp_path, caplog, operation):
    store = GatedStore(FileStore(tmp_path))
    manager = ProxifyManager(
        limit=None,
        store=store,
        serializer=PickleSerializer(),
        sizeof=lambda value: value.nbytes,
        spill_timeout=0.1,
    )
    manager.store("a", Thing("a"))
    manager.store("b", Thing("b"))
    if operation != "write":
        manager.limits.evict_all()
    gate = store.before[operation] = Gate()
    if operation == "write":
        manager.limits.set_limit(0, None)
    elif operation == "read":
        future = manager.batch.get_many(["a"])
    else:
        manager.discard("a")
    assert gate.arrived.acquire(timeout=TIMEOUT)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("gpuspill-")]
    manager.close()
    assert "closing does not wait any longer for gpuspill-" in caplog.text
    if operation == "write":
        assert manager.get("a").content == "a"
    else:
        with pytest.raises(ManagerClosed):
            manager.get("b")
    manager.close()
    gate.open()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    if operation == "read":
        with pytest.raises(ManagerClosed):
            future.result(TIMEOUT)


def test_closing_gives_up_where_files_cannot_be_removed(caplog):
    gate = Gate()

    class Hanging(ManualStore):
        def close(self):
            gate.pass_through()
            super().close()

    manager = ProxifyManager(
        limit=None,
        store=Hanging(),
        serializer=PickleSerializer(),
        sizeof=lambda value: value.nbytes,
        spill_timeout=0.1,
        name="hanging",
    )
    manager.store("a", Thing("a"))
    manager.close()
    assert "removal of files, after 0.1 seconds (gpuspill.spill-timeout)" in caplog.text
    assert manager.get("a").content == "a"
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "gpuspill-hanging-close":
            thread.join(TIMEOUT)


def test_closing_says_nothing_if_all_ends_in_time(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    manager = ProxifyManager(
        limit=0,
        store=FileStore(tmp_path),
        serializer=PickleSerializer(),
        sizeof=lambda value: value.nbytes,
        spill_timeout=TIMEOUT,
    )
    for number in range(20):
        manager.store(number, Thing(number))
    manager.close()
    assert not caplog.records
