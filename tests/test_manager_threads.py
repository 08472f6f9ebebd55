"""The manager with its threads: two things at once on one key, admission, and everything together.

What overlaps is decided by a store that holds up each read and write until the test lets it go on; no test sleeps.
"""

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from gpuspill.core.budget import Kind
from gpuspill.core.residency import State, Tier
from gpuspill.errors import (
    DataLostError,
    ManagerClosed,
    ReadInterrupted,
    RecordCorrupt,
    StorageError,
    StorageFull,
)
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import Encoded, PickleSerializer
from gpuspill.testing.memory_store import ManualStore
from gpuspill.testing.stores import FaultyStore, MemoryStore
from tests.things import DEADLY, Deadly

TIMEOUT = 60


class Value:
    """Can be told from others, and weakly referenced."""

    def __init__(self, content: object, nbytes: int = 100) -> None:
        self.content = content
        self.nbytes = nbytes


class Kit:
    """A manager with threads, over a store that waits for the test."""

    def __init__(self, limit: int | None = None, **options: Any) -> None:
        self.store = ManualStore()
        self._written = threading.Semaphore(0)
        self.manager = ProxifyManager(
            limit=limit,
            store=self.store,
            serializer=PickleSerializer(),
            sizeof=lambda value: value.nbytes,
            observer=self._observe,
            **options,
        )
        self.pool = ThreadPoolExecutor(16, thread_name_prefix="test")

    def on_disk(self, key: str) -> None:
        """Put a value on disk before the test begins."""
        manual, self.store.manual = self.store.manual, frozenset()
        if key not in self.manager:
            self.manager.store(key, Value(key))
        self.manager.limits.evict_all()
        assert not self.manager.is_resident(key)
        self.store.manual = manual
        self.reaped()
        while self._written.acquire(blocking=False):
            pass

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run in another thread."""
        return self.pool.submit(function, *arguments)

    def state(self, key: str) -> State:
        return self.manager._ledger.keys[key].state

    def _observe(self, label: str, value: float, unit: str) -> None:
        if (label, unit) == ("disk-write", "count"):
            self._written.release()

    def wrote(self) -> None:
        """Wait until one more write has ended and its consequences are drawn."""
        assert self._written.acquire(timeout=TIMEOUT), "nothing was written"
        self.reaped()

    def reaped(self) -> None:
        """Wait until values that were to be let go are, and records that were to be deleted."""
        for give in self.manager.engine.reap, self.manager.engine.delete:
            done = threading.Event()
            give(done.set)
            assert done.wait(TIMEOUT)

    def close(self) -> None:
        self.store.let_all_go()
        self.manager.validate()
        self.manager.close()
        self.pool.shutdown()
        self.manager.validate()
        assert self.store.statistics().records == 0


class NoThread(threading.Thread):
    """One more than the system allows."""

    def start(self) -> None:
        """See the class."""
        raise RuntimeError("can't start new thread")


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    kit.close()


def both(*futures: Future[Any]) -> list[Any]:
    wait_all(futures, TIMEOUT)
    return [future.exception(0) or future.result(0) for future in futures]


# -- two at once on one key ------------------------------------------------------------------------------


@pytest.mark.fault("used meanwhile", on="disk→host", outcome="one read for all")
def test_a_second_reader_waits_and_gets_the_same_object(kit):
    kit.on_disk("a")
    first = kit.start(kit.manager.get, "a")
    (read,) = kit.store.wait_for("read")
    others = [kit.start(kit.manager.get, "a") for _ in range(3)]
    many = kit.manager.batch.get_many(["a"])
    proxy = kit.start(kit.manager.proxy("a").resolve)
    assert kit.manager.uses.prefetch(["a"]) == 0
    with kit.manager.admission.admit(None, ["a"]) as admission:
        inputs = kit.start(kit.manager.batch.materialize, admission)
        kit.manager.validate()
        read.let_go()
        value = first.result(TIMEOUT)
        assert all(other.result(TIMEOUT) is value for other in others)
        assert many.result(TIMEOUT)["a"] is proxy.result(TIMEOUT) is inputs.result(TIMEOUT)["a"] is value
    assert kit.store.statistics().reads == 1


@pytest.mark.parametrize(
    ("error", "raised", "state"),
    [
        (StorageError(5, "broken"), StorageError, State.SPILLED),
        (RecordCorrupt("damaged"), DataLostError, State.LOST),
        (ZeroDivisionError(), ZeroDivisionError, State.SPILLED),
        (MemoryError(), MemoryError, State.SPILLED),
    ],
)
def test_a_read_that_fails_reaches_all_who_wait(kit, error, raised, state):
    kit.on_disk("a")
    first = kit.start(kit.manager.get, "a")
    kit.store.wait_for("read")
    many = kit.manager.batch.get_many(["a"])
    other = kit.start(kit.manager.get, "a")
    while not (first.done() and many.done() and other.done()):
        if kit.store.waiting("read"):
            kit.store.wait_for("read")[0].let_go(error)
        wait_all([first, many, other], 0.01)
    for future in first, many, other:
        with pytest.raises(raised):
            future.result(0)
    assert kit.state("a") is state
    kit.manager.validate()
    kit.store.let_all_go()
    if state is State.SPILLED:
        assert kit.manager.get("a").content == "a"
    else:
        with pytest.raises(DataLostError, match="'a'"):
            kit.manager.get("a")


@pytest.mark.fault("value's code raises anything", on="disk→host", outcome="all are answered")
@pytest.mark.parametrize("error", DEADLY)
@pytest.mark.parametrize("encoded", [False, True])
def test_a_deserialiser_that_raises_what_is_no_error_ends_no_thread_and_all_are_answered(kit, error, encoded):
    manager = kit.manager
    keys = [f"deadly {n}" for n in range(4)]
    for key in keys:
        if encoded:
            manager.store_encoded(key, Encoded(*PickleSerializer().dumps(Deadly(error)), nbytes=100))
        else:
            manager.store(key, Deadly(error))
    manager.store("good", Value("good"))
    kit.store.let_all_go()
    if not encoded:
        manager.limits.evict_all()
    for key in keys:
        assert manager.uses.prefetch([key]) == (not encoded)
        for raises in (
            kit.start(manager.get, key),
            manager.batch.get_many([key, "good"]),
            kit.start(manager.batch.materialize, manager.admission.admit(None, [key, "good"])),
            manager.batch.materialize_later(manager.admission.admit(None, [key, "good"])),
            manager.batch.decode(Encoded(*PickleSerializer().dumps(Deadly(error)), nbytes=100)),
        ):
            with pytest.raises(ReadInterrupted, match="deadly") as raised:
                raises.result(TIMEOUT)
            assert isinstance(raised.value.__cause__, DEADLY[error])
        assert kit.state(key) is (State.RESIDENT if encoded else State.SPILLED)
    assert manager.batch.get_many(["good"]).result(TIMEOUT)["good"].content == "good"


@pytest.mark.fault("value's code raises anything", on="host→disk", outcome="stays in memory")
@pytest.mark.parametrize("error", DEADLY)
def test_a_serialiser_that_raises_what_is_no_error_ends_no_thread(kit, error):
    class Worse(Value):
        def __reduce__(self):
            raise DEADLY[error]

    kit.manager.store("worse", Worse(0))
    kit.manager.store("good", Value("good"))
    kit.store.let_all_go()
    kit.manager.limits.set_limit(0, None)
    kit.wrote()
    assert kit.state("good") is State.SPILLED
    assert kit.state("worse") is State.RESIDENT
    assert kit.manager.statistics().unspillable == 1


@pytest.mark.parametrize("error", [*DEADLY, "builtins.ValueError"])
def test_finding_what_a_value_keeps_alive_may_raise_anything(error):
    """It looks into types of others; whoever waits for the value would wait for ever."""

    def look(value: object) -> None:
        if back:
            raise DEADLY.get(error, ValueError)

    back: list[bool] = []
    kit = Kit(shared=look)
    try:
        kit.on_disk("a")
        back.append(True)
        kit.store.let_all_go()
        for future in kit.start(kit.manager.get, "a"), kit.manager.batch.get_many(["a"]):
            with pytest.raises(ReadInterrupted if error in DEADLY else ValueError):
                future.result(TIMEOUT)
        back.clear()
        assert kit.manager.get("a").content == "a"
    finally:
        kit.close()


@pytest.mark.fault(
    "a thread cannot be started or ends", on=("host→disk", "disk→host"), outcome="the caller does the work"
)
def test_without_any_thread_the_callers_spill_and_restore(kit, monkeypatch, caplog):
    """As where the system allows no more threads."""
    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.manager.threads.threading.Thread", NoThread)
        kit.store.let_all_go()
        for key in "abc":
            kit.manager.store(key, Value(key))
        kit.manager.limits.set_limit(150, None)
        assert sorted(map(str, map(kit.state, "abc"))) == ["State.RESIDENT", "State.SPILLED", "State.SPILLED"]
        admission = kit.manager.admission.admit("out", ["a", "b"], 50)
        assert admission.granted
        admission.release()
        values = kit.manager.batch.get_many("abc").result(0)
        assert [values[key].content for key in "abc"] == list("abc")
        del values
        kit.manager.validate()
    assert caplog.text.count("cannot start a thread") <= 4, "once of each kind"


@pytest.mark.fault("used meanwhile", on="host→disk", outcome="stays")
def test_reading_a_value_while_it_is_written_does_not_wait(kit):
    kit.store.manual = {"write"}  # what is written of it is read afterwards, and compared
    value = Value("a")
    kit.manager.store("a", value)
    del value
    kit.manager.limits.set_limit(0, None)
    (write,) = kit.store.wait_for("write")
    assert kit.state("a") is State.SPILLING
    value = kit.manager.get("a")
    assert kit.manager.batch.get_many(["a"]).result(0)["a"] is value
    write.let_go()
    kit.wrote()
    assert kit.manager.get("a") is value, "it was taken up meanwhile"
    del value


@pytest.mark.parametrize("then", ["nothing", "store", "store and get"])
def test_deleting_a_value_while_it_is_written_leaves_no_record(kit, then):
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(0, None)
    (write,) = kit.store.wait_for("write")
    kit.manager.discard("a")
    assert "a" not in kit.manager
    kit.manager.limits.set_limit(None, None)
    if then != "nothing":
        kit.manager.store("a", Value("new"))
    write.let_go()
    kit.wrote()
    if then == "store and get":
        assert kit.manager.get("a").content == "new"
        kit.manager.discard("a")
    done = kit.store.statistics()
    assert (done.writes, done.records) == (1, 0)
    assert kit.manager.memory_total() == (100 if then == "store" else 0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("then", ["discard", "overwrite"])
def test_a_value_that_is_deleted_while_it_is_read(kit, then, fails):
    kit.on_disk("a")
    reader = kit.start(kit.manager.get, "a")
    (read,) = kit.store.wait_for("read")
    if then == "discard":
        kit.manager.discard("a")
        with pytest.raises(KeyError):
            kit.manager.get("a")
    else:
        kit.manager.store("a", Value("new"))
        assert kit.manager.get("a").content == "new"
    read.let_go(RecordCorrupt("damaged") if fails else None)
    if fails:
        with pytest.raises(DataLostError):
            reader.result(TIMEOUT)
    else:
        assert reader.result(TIMEOUT).content == "a"
    kit.reaped()
    kit.manager.validate()
    assert kit.store.statistics().records == 0
    assert kit.manager.memory_total() == (0 if then == "discard" else 100)


def test_two_different_keys_are_read_side_by_side(kit):
    kit.on_disk("a")
    kit.on_disk("b")
    readers = [kit.start(kit.manager.get, key) for key in "ab"]
    reads = kit.store.wait_for("read", 2)
    for read in reversed(reads):
        read.let_go()
    assert [reader.result(TIMEOUT).content for reader in readers] == ["a", "b"]


@pytest.mark.fault("disk slow or stuck", on="disk→host", outcome="others do not wait")
def test_reads_do_not_wait_for_writes(kit):
    kit.on_disk("a")
    kit.manager.store("b", Value("b"))
    kit.manager.limits.set_limit(0, None)
    kit.store.wait_for("write")
    kit.store.manual = frozenset({"write"})
    assert kit.manager.get("a").content == "a"
    assert kit.manager.batch.get_many(["a", "b"]).result(TIMEOUT).keys() == {"a", "b"}


def test_a_task_reads_its_inputs_side_by_side(kit):
    """One in its own thread, the others on the restore threads."""
    for key in "abc":
        kit.on_disk(key)
    with kit.manager.admission.admit(None, "abc") as admission:
        inputs = kit.start(kit.manager.batch.materialize, admission)
        reads = kit.store.wait_for("read", 3)
        assert sorted(read.thread.rstrip("_-0123456789") for read in reads) == [
            "gpuspill-restore",
            "gpuspill-restore",
            "test",
        ]
        for read in reads:
            read.let_go()
        assert {key: value.content for key, value in inputs.result(TIMEOUT).items()} == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("spill_threads", [1, 3])
def test_no_value_is_written_twice(spill_threads):
    kit = Kit(spill_threads=spill_threads)
    for key in "abcde":
        kit.manager.store(key, Value(key))
    kit.manager.limits.set_limit(0, None)
    for _ in range(5):
        kit.store.wait_for("write")[0].let_go()
        kit.wrote()
        kit.manager.validate()
    assert kit.store.statistics().writes == 5
    kit.close()


# -- closing ---------------------------------------------------------------------------------------------


@contextmanager
def closing(kit: Kit) -> Iterator[None]:
    """Close while the block runs; it has to let go what is held up."""
    thread = threading.Thread(target=kit.manager.close)
    closed = threading.Event()
    engine = kit.manager.engine
    close = engine.close

    def told(timeout: float = 0.0) -> None:
        closed.set()
        close(timeout)

    engine.close = told  # type: ignore[method-assign]
    thread.start()
    assert closed.wait(TIMEOUT)
    yield
    thread.join(TIMEOUT)
    assert not thread.is_alive(), "closing never ends"


@pytest.mark.fault("disk slow or stuck", on="close", outcome="waits for the write")
def test_closing_while_a_value_is_written(kit):
    kit.store.manual = {"write"}
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(0, None)
    (write,) = kit.store.wait_for("write")
    with closing(kit):
        assert kit.manager.get("a").content == "a"
        write.let_go()
    assert kit.manager.get("a").content == "a"


def test_closing_while_a_value_is_read(kit):
    """Moves that run may end; whoever waits for one gets the value or is told."""
    kit.on_disk("a")
    reader = kit.start(kit.manager.get, "a")
    (read,) = kit.store.wait_for("read")
    with closing(kit):
        read.let_go()
    outcome = both(reader)[0]
    assert isinstance(outcome, ManagerClosed) or outcome.content == "a"


def test_closing_answers_all_whose_reads_have_not_begun(kit):
    """More reads than threads: those that are queued must not be dropped in silence."""
    for key in "abcdef":
        kit.on_disk(key)
    many = kit.manager.batch.get_many("abcdef")
    alone = kit.manager.batch.get_many("f")
    kit.store.wait_for("read", 2)
    waiting = kit.manager.batch.get_many("e")
    with closing(kit):
        kit.store.let_all_go()
    for future in many, alone, waiting:
        with pytest.raises(ManagerClosed):
            future.result(TIMEOUT)
    kit.manager.validate()


@pytest.mark.fault("closed meanwhile", on="send", outcome="whole, or an error")
def test_closing_while_a_value_is_sent(kit):
    for key in "abc":
        kit.on_disk(key)
    pins = kit.manager.admission.pin("abc")
    sent = [kit.manager.batch.export(pins) for _ in range(4)]
    kit.store.wait_for("read", 2)
    with closing(kit):
        kit.store.let_all_go()
    for future in sent:
        with suppress(ManagerClosed):
            assert len(future.result(TIMEOUT)) == 3
    pins.release()


def test_closing_lets_those_go_who_wait_for_room(kit):
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(100, None)
    admission = kit.manager.admission.admit("out", (), 50)
    waiting = kit.start(admission.wait)
    kit.store.wait_for("write")
    assert not waiting.done()
    with closing(kit):
        assert waiting.result(TIMEOUT) is True
        kit.store.let_all_go()
    admission.release()


# -- admission -------------------------------------------------------------------------------------------


def test_a_task_waits_while_something_can_make_room_and_no_longer(kit):
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(100, None)
    admission = kit.manager.admission.admit("out", (), 50)
    (write,) = kit.store.wait_for("write")
    assert not admission.granted
    assert not admission.wait(0)
    assert kit.manager.statistics().waiting == 1
    waiting = kit.start(admission.wait)
    write.let_go()
    assert waiting.result(TIMEOUT)
    assert (admission.granted, admission.overrun) == (True, False)
    kit.manager.store("out", Value("out", 50))
    stats = kit.manager.statistics()
    assert (stats.reserved_nbytes, stats.host_nbytes, stats.waits, stats.overruns) == (0, 50, 1, 0)
    admission.release()


@pytest.mark.fault("nothing can leave memory", on="host→disk", outcome="tasks go on, counted")
@pytest.mark.parametrize("error", [StorageFull(28, "full"), TypeError("cannot be written")])
def test_when_nothing_can_make_room_a_task_is_let_go_and_that_is_counted(kit, error):
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(100, None)
    admission = kit.manager.admission.admit("out", (), 50)
    kit.store.wait_for("write")[0].let_go(error)
    assert admission.wait(TIMEOUT)
    assert admission.overrun
    assert kit.manager.statistics().overruns == 1
    assert kit.manager.get("a").content == "a"
    admission.release()


def test_two_tasks_that_pin_everything_do_not_wait_for_each_other(kit):
    for key in "ab":
        kit.on_disk(key)
    kit.manager.limits.set_limit(100, None)
    first = kit.manager.admission.admit("x", "ab", 100)
    second = kit.manager.admission.admit("y", "ba", 100)
    assert first.wait(TIMEOUT)
    assert second.wait(TIMEOUT)
    assert first.overrun
    assert second.overrun
    results = [kit.start(kit.manager.batch.materialize, admission) for admission in (first, second)]
    kit.store.wait_for("read", 2)
    kit.store.let_all_go()
    one, other = (result.result(TIMEOUT) for result in results)
    assert one["a"] is other["a"]
    assert one["b"] is other["b"]
    for admission in first, second:
        admission.release()


@pytest.mark.parametrize("how", ["release", "exit", "twice", "another thread"])
def test_giving_up_ends_the_wait_and_leaves_the_line(kit, how):
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(100, None)
    first = kit.manager.admission.admit("x", (), 80)
    second = kit.manager.admission.admit("y", (), 90)
    kit.store.wait_for("write")
    waiting = kit.start(first.wait)
    called = threading.Event()
    first.add_done_callback(called.set)
    if how == "release":
        first.release()
    elif how == "exit":
        with pytest.raises(ZeroDivisionError), first:
            raise ZeroDivisionError
    elif how == "twice":
        first.release()
        first.release()
    else:
        kit.start(first.release).result(TIMEOUT)
    assert waiting.result(TIMEOUT)
    assert called.wait(TIMEOUT)
    assert not first.granted
    assert kit.manager.statistics().waiting == 1
    kit.store.let_all_go()
    assert second.wait(TIMEOUT)
    assert not second.overrun
    second.release()


def test_the_output_of_a_waiting_task_may_come_from_elsewhere(kit):
    """It must not be forgotten in the line, nor granted twice."""
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(100, None)
    admission = kit.manager.admission.admit("out", (), 50)
    kit.store.wait_for("write")
    kit.manager.store("out", Value("out", 50))
    kit.manager.validate()
    waiting = kit.start(admission.wait)
    kit.store.let_all_go()
    assert waiting.result(TIMEOUT)
    assert admission.granted
    admission.release()
    assert kit.manager.statistics().reserved_nbytes == 0


def test_a_callback_that_raises_stops_nobody(kit, caplog):
    kit.manager.store("a", Value("a"))
    kit.manager.limits.set_limit(100, None)
    admissions = [kit.manager.admission.admit(n, (), 10) for n in range(3)]

    def fail() -> None:
        raise RuntimeError("some bug")

    for admission in admissions:
        admission.add_done_callback(fail)
    kit.store.let_all_go()
    for admission in admissions:
        assert admission.wait(TIMEOUT)
        admission.release()
    assert "some bug" in caplog.text
    kit.manager.store("b", Value("b", 500))
    kit.manager.limits.evict_all()
    assert not kit.manager.is_resident("b")


def test_tasks_come_first_then_transfers_each_in_their_order(kit):
    kit.manager.store("a", Value("a", 1000))
    kit.manager.limits.set_limit(1000, None)
    order: list[str] = []
    told = threading.Semaphore(0)

    def tell(name: str) -> None:
        order.append(name)
        told.release()

    admissions = []
    for name in ("transfer 1", "task 1", "transfer 2", "task 2"):
        kind = Kind.TASK if name.startswith("task") else Kind.TRANSFER
        admission = kit.manager.admission.admit(None, (), 100, kind=kind)
        admission.add_done_callback(lambda name=name: tell(name))
        admissions.append(admission)
    kit.store.wait_for("write")
    assert order == []
    kit.store.let_all_go()
    for _ in admissions:
        assert told.acquire(timeout=TIMEOUT)
    assert order == ["task 1", "task 2", "transfer 1", "transfer 2"]
    for admission in admissions:
        admission.release()


def test_get_many_waits_for_room_and_gives_up_when_cancelled(kit):
    kit.on_disk("a")
    kit.manager.store("b", Value("b"))
    kit.manager.limits.set_limit(150, None)
    cancelled, other = kit.manager.batch.get_many(["a"]), kit.manager.batch.get_many(["a"])
    (write,) = kit.store.wait_for("write")
    assert not kit.store.waiting("read"), "it waits for room before it reads"
    assert cancelled.cancel()
    write.let_go()
    kit.store.wait_for("read")[0].let_go()
    assert other.result(TIMEOUT)["a"].content == "a"
    stats = kit.manager.statistics()
    assert (stats.waiting, stats.reserved_nbytes, stats.pinned_nbytes) == (0, 0, 0)


def test_those_who_wait_get_room_by_a_deletion(kit):
    kit.manager.store("a", Value("a"))
    kit.manager.store("b", Value("b"))
    kit.manager.limits.set_limit(200, None)
    admission = kit.manager.admission.admit("out", (), 50)
    kit.store.wait_for("write")
    kit.manager.discard("b" if kit.state("b") is not State.SPILLING else "a")
    assert admission.granted
    assert not admission.overrun
    admission.release()


# -- many threads ----------------------------------------------------------------------------------------


def storm(manager: ProxifyManager, *, threads: int, rounds: int, seed: int, slow: Callable[[], None]) -> list[str]:
    """Do everything at once from many threads; return what is wrong with what was seen."""
    keys = [f"key-{n}" for n in range(12)]
    wrong: list[str] = []
    start = threading.Barrier(threads)
    versions = dict.fromkeys(keys, 0)
    lock = threading.Lock()

    def check(key: str, value: Any) -> None:
        if not (isinstance(value, np.ndarray) and value[0] == float(key[4:]) and (value[1:] == value[1]).all()):
            wrong.append(f"{key}: {value!r}")

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        start.wait(TIMEOUT)
        for _ in range(rounds):
            key, other = chance.choice(keys), chance.choice(keys)
            try:
                match chance.randrange(11):
                    case 0 | 1 | 2:
                        with lock:
                            versions[key] += 1
                            version = versions[key]
                        value = np.full(chance.choice([10, 100, 300]), float(version))
                        value[0] = float(key[4:])
                        manager.store(key, value)
                        del value
                    case 3:
                        manager.discard(key)
                    case 4 | 5:
                        check(key, manager.get(key))
                    case 6:
                        for name, value in manager.batch.get_many([key, other], missing="omit").result(TIMEOUT).items():
                            check(name, value)
                    case 7:
                        with manager.admission.admit(key, [key, other], 800) as admission:
                            if not admission.wait(TIMEOUT):
                                wrong.append("waits for ever")
                            for name, value in manager.batch.materialize(admission).items():
                                check(name, value)
                    case 8:
                        future = manager.batch.get_many([key, other], missing="omit")
                        future.cancel()
                    case 9:
                        manager.uses.prefetch([key, other])
                        manager.limits.set_offset(chance.choice([0, 0, 1000, -1000]))
                        manager.uses.expect([key], (chance.random(),), number)
                        manager.uses.drop([other], number)
                    case 10:
                        with manager.admission.pin([key, other]) as pins:
                            manager.batch.export(pins).result(TIMEOUT)
                        manager.validate()
            except (KeyError, StorageError):
                pass  # deleted by another thread; a disk that fails now and then
            except BaseException as error:
                wrong.append(repr(error))
                raise
            slow()

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, number) for number in range(threads)]:
            future.result()
    return wrong


@pytest.mark.fault(
    "several threads at once",
    on=("host→disk", "disk→host", "release", "close"),
    outcome="every value right, all totals zero",
)
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {}),
        (2, {"spill_threads": 3, "restore_threads": 3}),
        (3, {"keep_clean": False}),
        (4, {"disk_limit": 6000}),
        (5, {"faults": True}),
    ],
)
def test_everything_at_once(seed, options):
    chance = random.Random(seed)
    faults = options.pop("faults", False)

    def fault(operation: str, number: int) -> Exception | None:
        return StorageError(5, "now and then") if faults and chance.random() < 0.2 else None

    store = FaultyStore(MemoryStore(), fault)
    manager = ProxifyManager(
        limit=5000, store=store, serializer=PickleSerializer(), sizeof=lambda value: value.nbytes, **options
    )
    wrong = storm(manager, threads=8, rounds=250, seed=seed, slow=lambda: None)
    manager.limits.set_offset(0)
    assert wrong == []
    manager.validate()
    stats = manager.statistics()
    assert min(stats.spills, stats.restores, stats.hits, stats.waits) > 0, "nothing happened"
    assert (stats.pinned_nbytes, stats.reserved_nbytes, stats.waiting, stats.lost) == (0, 0, 0, 0)
    for key in list(manager):
        manager.discard(key)
    manager.limits.evict_all()
    assert manager.memory_total() == 0
    done = threading.Event()
    manager.engine.delete(done.set)
    assert done.wait(TIMEOUT)
    stats = manager.statistics()
    assert (stats.values, stats.disk_nbytes, stats.spilled_nbytes) == (0, 0, 0)
    assert store.statistics().records == 0
    manager.close()


def test_finalisers_that_use_the_store(kit):
    """The garbage collector may run somebody's finaliser in the middle of anything, also with the lock held."""
    manager = kit.manager
    kit.store.let_all_go()
    manager.limits.set_limit(500, None)
    used = []

    class Trash:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            used.append(manager.peek("a"))
            len(manager), "b" in manager, list(manager), manager.keys_in(Tier.HOST), manager.memory_total()

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for n in range(300):
            Trash()
            manager.store(n % 7, Value(n))
            manager.store("a", Value("a"))
            if n % 3 == 0:
                manager.get((n + 4) % 7 if (n + 4) % 7 in manager else "a")
            with manager.admission.admit(None, ["a"], 10):
                Trash()
            manager.discard(n % 7)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(used) == 600
    manager.validate()


# -- taking over what is in line -------------------------------------------------------------------------


def stuck(kit: Kit) -> None:
    """Keep both restore threads busy with reading for others."""
    for key in "xy":
        kit.on_disk(key)
    pins = kit.manager.admission.pin("xy")
    kit.manager.batch.export(pins).add_done_callback(lambda _: pins.release())
    kit.store.wait_for("read", 2)


def let_own_reads_go(kit: Kit, count: int) -> None:
    """Let so many reads go on that threads of the test do themselves, one after another."""
    done: list[Any] = []

    def mine() -> list[Any]:
        return [op for op in kit.store._of("read") if op.thread.startswith("test") and op not in done]

    for _ in range(count):
        with kit.store._changed:
            assert kit.store._changed.wait_for(mine, TIMEOUT), "it waits for a restore thread"
            done += mine()
        done[-1].let_go()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", ["get", "task"])
def test_who_needs_a_value_takes_over_the_read_that_waits_for_a_thread(kit, ahead, how):
    for key in "abcd":
        kit.on_disk(key)
    stuck(kit)
    many = None
    if ahead:
        assert kit.manager.uses.prefetch("abcd") == 4
    else:
        many = kit.manager.batch.get_many("abcd")
    if how == "get":
        read = kit.start(kit.manager.get, "a")
        let_own_reads_go(kit, 1)
        assert read.result(TIMEOUT).content == "a"
    else:
        with kit.manager.admission.admit(None, "abcd") as admission:
            task = kit.start(kit.manager.batch.materialize, admission)
            let_own_reads_go(kit, 4)
            value = task.result(TIMEOUT)
        assert {key: found.content for key, found in value.items()} == {key: key for key in "abcd"}
        assert many is None or many.result(TIMEOUT) == value, "each was read once, for all"
        assert kit.store.waiting("read") == 2, "it was done while the restore threads are still busy"
    kit.manager.validate()
    kit.store.let_all_go()
    assert set(kit.manager.batch.get_many("abcd").result(TIMEOUT)) == set("abcd")
    assert kit.manager.statistics().restores == 4, "what was taken over is not read once more"


def test_restore_threads_read_for_tasks_first_then_what_is_sent_then_ahead():
    kit = Kit(restore_threads=1)
    try:
        keys = [f"{kind} {n}" for kind in ("ahead", "sent", "task") for n in range(2)]
        for key in ["first", *keys]:
            kit.on_disk(key)
        order: list[Any] = []

        class Loader(PickleSerializer):
            def loads(self, header, frames):
                value = super().loads(header, frames)
                order.append(value.content)
                return value

        kit.manager._decoder._serializer = Loader()
        first = kit.manager.batch.get_many(["first"])
        (busy,) = kit.store.wait_for("read")
        assert kit.manager.uses.prefetch(keys[:2]) == 2
        sent = kit.manager.batch.get_many(keys[2:4])
        with kit.manager.admission.admit(None, keys[4:]) as admission:
            task = kit.manager.batch.materialize_later(admission)
            with kit.manager.admission.pin(keys[1:2]) as pins:
                moved_up = kit.manager.batch.export(pins)
                kit.store.let_all_go()
                busy.let_go()
                for future in first, sent, task, moved_up:
                    future.result(TIMEOUT)
        both(kit.manager.batch.get_many(keys))
        assert order == ["first", "task 0", "task 1", "sent 0", "sent 1", "ahead 1", "ahead 0"]
    finally:
        kit.close()


class Reading:
    """When it is rebuilt it reads another value of the store."""

    nbytes = 100
    manager: ProxifyManager

    def __init__(self, key: str) -> None:
        self.key = key

    def __setstate__(self, state: dict[str, str]) -> None:
        self.key = state["key"]
        self.found = Reading.manager.get(self.key)


def test_a_deserialiser_that_reads_a_value_which_waits_for_its_own_thread():
    kit = Kit(restore_threads=1)
    Reading.manager = kit.manager
    try:
        kit.on_disk("a")
        kit.manager.store("reads a", Reading("a"))
        kit.on_disk("reads a")
        kit.manager.store("reads it", Reading("reads a"))
        kit.on_disk("reads it")
        kit.store.let_all_go()
        many = kit.manager.batch.get_many(["reads it", "reads a", "a"]).result(TIMEOUT)
        assert many["reads it"].found is many["reads a"]
        assert many["reads a"].found is many["a"]
    finally:
        del Reading.manager
        kit.close()


@pytest.mark.parametrize("used", ["not", "spilled and restored"])
def test_values_go_with_a_closed_manager_and_not_with_the_next_collection(used):
    kit = Kit()
    gc.collect()
    gc.disable()
    try:
        kit.store.let_all_go()
        kit.manager.store("a", Value("a"))
        if used != "not":
            kit.on_disk("a")
            kit.manager.batch.get_many(["a"]).result(TIMEOUT)
            kit.reaped()
        gone = weakref.ref(kit.manager.get("a"))
        kit.close()
        assert gone() is not None, "what is in memory stays readable"
        del kit.manager
        assert gone() is None
    finally:
        gc.enable()
