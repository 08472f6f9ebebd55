"""The threads: they start when needed, do one thing at a time, miss no wake-up and are gone after closing."""

import asyncio
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gpuspill.manager.threads import Engine, Urgency, _finish
from gpuspill.testing.stores import Gate
from tests.threads import in_thread

TIMEOUT = 60
FOREVER = float("inf")


class Steps:
    """What spill threads are told to do: each call takes the next answer, at the end to sleep."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.lock = threading.Lock()
        self.calls = threading.Semaphore(0)
        self.threads: list[str] = []

    def __call__(self) -> float | None:
        with self.lock:
            self.threads.append(threading.current_thread().name)
            answer = self.answers.pop(0) if self.answers else FOREVER
        self.calls.release()
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return answer()
        return answer  # type: ignore[return-value]

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.calls.acquire(timeout=TIMEOUT), "the step was not called"


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines = []

    def make(step: Callable[[], float | None], *, spill_threads: int = 1, restore_threads: int = 2) -> Engine:
        engine = Engine(step, spill_threads=spill_threads, restore_threads=restore_threads, name="test")
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gpuspill-"))


def test_there_is_no_thread_before_one_is_needed(make):
    engine = make(Steps())
    assert ours() == []
    engine.wake()
    assert ours() == ["gpuspill-spill-test-0"]
    done = threading.Event()
    engine.submit(done.set)
    assert done.wait(TIMEOUT)
    reaped = threading.Event()
    engine.reap(reaped.set)
    assert reaped.wait(TIMEOUT)
    assert {name.rsplit("-", 1)[0] for name in ours()} >= {
        "gpuspill-spill-test",
        "gpuspill-restore-test",
        "gpuspill-reaper-test",
    }
    engine.close()
    assert ours() == []


def test_a_step_that_did_something_is_repeated_until_there_is_nothing_to_do(make):
    steps = Steps(None, None, None)
    engine = make(steps)
    engine.wake()
    steps.wait(4)
    assert steps.threads == ["gpuspill-spill-test-0"] * 4
    assert not steps.calls.acquire(blocking=False)


def test_a_step_is_repeated_when_its_pause_is_over(make):
    steps = Steps(0.0, 0.001, 0.0)
    engine = make(steps)
    engine.wake()
    steps.wait(4)


def test_a_wake_up_while_the_step_runs_is_not_missed(make):
    """The step looked before the change and would sleep for ever."""
    gate = Gate()

    def slow() -> float:
        gate.pass_through()
        return FOREVER

    steps = Steps(slow)
    engine = make(steps)
    engine.wake()
    assert gate.arrived.acquire(timeout=TIMEOUT)
    engine.wake()
    gate.open()
    steps.wait(2)


def test_each_wake_up_leads_to_a_step(make):
    steps = Steps()
    engine = make(steps)
    for _ in range(20):
        engine.wake()
        steps.wait(1)


def test_several_threads_work_side_by_side(make):
    together = threading.Barrier(3)

    def meet() -> float:
        together.wait(TIMEOUT)
        return FOREVER

    steps = Steps(meet, meet, meet)
    engine = make(steps, spill_threads=3)
    engine.wake()
    steps.wait(3)
    assert len(set(steps.threads)) == 3


def test_a_spill_thread_that_wakes_the_engine_does_not_wake_itself(make):
    """It looks again anyway; else whatever it does would make it look once more."""
    engines = []

    def wake() -> float:
        assert engines[0].spilling_here
        engines[0].wake()
        return FOREVER

    steps = Steps(wake)
    engines.append(make(steps))
    assert not engines[0].spilling_here
    engines[0].wake()
    steps.wait(1)
    engines[0].wake()
    steps.wait(1)
    assert len(steps.threads) == 2


class Panic(BaseException):
    """What libraries in other languages raise."""


DEADLY = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Panic, RuntimeError]


@pytest.mark.parametrize("error", DEADLY)
@pytest.mark.parametrize("method", ["wake", "submit", "reap", "delete"])
def test_nothing_that_is_raised_ends_a_thread(make, caplog, method, error):
    deaths: list[object] = []
    raised = error("deadly")

    def die() -> None:
        deaths.append(threading.current_thread())
        raise raised

    def work() -> float:
        deaths.append(threading.current_thread())
        done.set()
        return FOREVER

    done = threading.Event()
    steps = Steps(die, die, work)
    engine = make(steps, restore_threads=1)
    if method == "wake":
        engine.wake()
    else:
        for piece in die, die, work:
            getattr(engine, method)(piece)
    assert done.wait(TIMEOUT)
    assert len(deaths) == 3
    assert len(set(deaths)) == 1, "it was another thread"
    assert [record.exc_info[1] for record in caplog.records] == [raised, raised]


@pytest.mark.parametrize("method", ["wake", "submit", "reap", "delete"])
def test_a_log_that_fails_ends_no_thread_either(make, monkeypatch, method):
    done = threading.Event()
    steps = Steps(Panic(), lambda: done.set() or FOREVER)
    engine = make(steps, restore_threads=1)

    def die() -> None:
        raise Panic

    def fail(message: str) -> None:
        raise Panic

    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.manager.threads.logger.exception", fail)
        if method == "wake":
            engine.wake()
        else:
            getattr(engine, method)(die)
            getattr(engine, method)(done.set)
        assert done.wait(TIMEOUT)
        engine.close()


@pytest.mark.fault("a thread cannot be started or ends", on=("host→disk", "disk→host"), outcome="replaced")
@pytest.mark.parametrize(("method", "kind"), [("wake", "spill"), ("submit", "restore"), ("reap", "reaper")])
def test_a_thread_that_ended_is_replaced(make, method, kind):
    steps = Steps()
    engine = make(steps, restore_threads=1)

    def use() -> threading.Thread:
        done = threading.Event()
        if method == "wake":
            engine.wake()
            steps.wait(1)
        else:
            getattr(engine, method)(done.set)
            assert done.wait(TIMEOUT)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == f"gpuspill-{kind}-test-0"]
        return thread

    first = use()
    threads = {"wake": engine._spillers, "submit": engine._restorers, "reap": engine._reaper}[method]
    threads._closed = True
    threads._stop()
    first.join(TIMEOUT)
    assert not first.is_alive()
    threads._closed = False
    second = use()
    assert second is not first
    assert len(ours()) == 1


def test_the_most_urgent_work_is_done_first(make):
    engine = make(Steps(), restore_threads=1)
    gate = Gate()
    done = []
    engine.submit(gate.pass_through)
    assert gate.arrived.acquire(timeout=TIMEOUT)
    for n, urgency in enumerate([Urgency.AHEAD, Urgency.SEND, Urgency.TASK, Urgency.AHEAD, Urgency.TASK]):
        engine.submit(partial(done.append, (urgency, n)), urgency)
    gate.open()
    engine.close()
    assert done == [(0, 2), (0, 4), (1, 1), (2, 0), (2, 3)]


class Trash:
    """Garbage in a cycle, whose finaliser does something: it runs with the next collection."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.me = self
        self.action = action

    def __del__(self) -> None:
        self.action()


def interrupted_thread(when: str, act: Callable[[], object]) -> type[threading.Thread]:
    """Return a class of threads in which `act` is called while one is made, or before it says that it has begun."""

    class Thread(threading.Thread):
        def __init__(self, *args: object, **options: object) -> None:
            if when == "made":
                act()
            super().__init__(*args, **options)  # type: ignore[arg-type]

        def _bootstrap_inner(self) -> None:
            if when == "beginning":
                act()
            super()._bootstrap_inner()  # type: ignore[misc]

    return Thread


@pytest.mark.parametrize("when", ["made", "beginning"])
@pytest.mark.parametrize("first", ["wake", "reap", "delete", "submit"])
@pytest.mark.parametrize("second", ["wake", "reap", "delete", "submit"])
def test_a_finaliser_that_uses_the_engine_while_a_thread_is_started(make, monkeypatch, when, first, second):
    """The garbage collector may run anywhere, also in a thread that has not said yet that it has begun."""
    engine = make(Steps(), spill_threads=3)
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def use(method: str) -> None:
        if method == "wake":
            engine.wake()
            done.put(method)
        else:
            getattr(engine, method)(partial(done.put, method))

    def use_while_threads_collect() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("gpuspill.manager.threads.threading.Thread", interrupted_thread(when, gc.collect))
            use(first)

    gc.collect()
    gc.disable()
    try:
        Trash(partial(use, second))
        in_thread(use_while_threads_collect)()
    finally:
        gc.enable()
    assert sorted(done.get(timeout=TIMEOUT) for _ in range(2)) == sorted([first, second])
    names = ours()
    assert len(names) == len(set(names)), "two of a kind"
    assert len(engine._spillers._threads) == (3 if "wake" in (first, second) else 0)
    in_thread(engine.close)()
    assert ours() == []


@pytest.mark.parametrize("when", ["made", "beginning"])
@pytest.mark.parametrize("method", ["wake", "reap", "delete", "submit"])
def test_a_finaliser_that_closes_the_engine_while_a_thread_is_started(make, monkeypatch, when, method):
    engine = make(Steps(), spill_threads=3)
    monkeypatch.setattr("gpuspill.manager.threads._PATIENCE", 1)
    done = []

    def use() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("gpuspill.manager.threads.threading.Thread", interrupted_thread(when, engine.close))
            engine.wake() if method == "wake" else getattr(engine, method)(partial(done.append, method))

    in_thread(use)()
    assert done == ([] if method == "wake" else [method])
    assert ours() == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["wake", "reap", "delete", "submit"])
def test_closing_while_somebody_starts_a_thread(make, monkeypatch, method, fails):
    """Nothing is forgotten, and no thread left, whoever is done first."""
    engine = make(Steps())
    gate = Gate()
    done = []

    class Thread(threading.Thread):
        def start(self) -> None:
            if self.name.startswith("gpuspill-"):
                gate.pass_through()
            if fails and self.name.startswith("gpuspill-"):
                raise RuntimeError("can't start new thread")
            super().start()

    def use() -> None:
        engine.wake() if method == "wake" else getattr(engine, method)(partial(done.append, method))

    def close() -> None:
        engine.close()
        assert ours() == []

    monkeypatch.setattr("gpuspill.manager.threads._PATIENCE", 100 * TIMEOUT)
    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.manager.threads.threading.Thread", Thread)
        using = in_thread(use)
        assert gate.arrived.acquire(timeout=TIMEOUT)
    closing = in_thread(close)
    gate.open()
    using()
    closing()
    assert done == ([] if method == "wake" else [method])
    assert ours() == []


@pytest.mark.parametrize("method", ["reap", "delete", "submit"])
def test_closing_from_one_of_the_threads(make, method):
    """It cannot wait for itself; it ends when it has done what it is doing."""
    engine = make(Steps(), restore_threads=1)
    closed = threading.Event()
    done = []

    def close() -> None:
        done.append(threading.current_thread())
        engine.close()
        closed.set()

    getattr(engine, method)(close)
    assert closed.wait(TIMEOUT)
    done[0].join(TIMEOUT)
    assert ours() == []


@pytest.mark.parametrize("method", ["wake", "reap", "delete", "submit"])
def test_no_thread_is_started_when_python_ends(make, monkeypatch, method):
    """It would never begin, and whoever starts it waits for that."""
    engine = make(Steps())
    done = []
    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.manager.threads.sys.is_finalizing", lambda: True)
        patch.setattr("gpuspill.manager.threads.threading.Thread", pytest.fail)
        if method == "wake":
            engine.wake()
        elif method == "submit":
            assert not engine.submit(pytest.fail)
        else:
            getattr(engine, method)(partial(done.append, method))
    assert done == ([method] if method in ("reap", "delete") else [])


def test_somebody_waits_for_what_no_restore_thread_can_be_started_for(make, monkeypatch):
    engine = make(Steps())
    done = []
    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.manager.threads.threading.Thread", NoThread)
        assert engine.submit(partial(done.append, "here"))
        assert done == ["here"]
    assert engine.submit(partial(done.append, "there"))
    engine.close()
    assert done == ["here", "there"]


class NoThread(threading.Thread):
    """One more than the system allows."""

    def start(self) -> None:
        """See the class."""
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("method", ["wake", "reap", "delete"])
def test_what_no_thread_can_be_started_for_is_done_by_the_caller(make, monkeypatch, caplog, method):
    me = threading.current_thread().name
    steps = Steps(None, RuntimeError("a bug"), None, FOREVER)
    engine = make(steps)
    done = []

    def use(what: str) -> None:
        engine.wake() if method == "wake" else getattr(engine, method)(partial(done.append, what))

    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.manager.threads.threading.Thread", NoThread)
        use("first")
        assert steps.threads == ([me] * 2 if method == "wake" else [])
        use("second")
        assert steps.threads == ([me] * 4 if method == "wake" else [])
    assert not engine.spilling_here
    assert done == ([] if method == "wake" else ["first", "second"])
    assert ours() == []
    starts = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert starts == ["cannot start a thread, which is tried again when it is needed next: can't start new thread"]
    use("third")
    if method == "wake":
        steps.wait(5)
        assert steps.threads[4:] == ["gpuspill-spill-test-0"]
    engine.close()
    assert done == ([] if method == "wake" else ["first", "second", "third"])


def test_who_does_the_work_of_spill_threads_does_not_begin_again_in_the_middle(make, monkeypatch):
    engines = []

    def wake() -> float:
        assert engines[0].spilling_here
        engines[0].wake()
        return FOREVER

    monkeypatch.setattr("gpuspill.manager.threads.threading.Thread", NoThread)
    steps = Steps(wake, wake)
    engines.append(make(steps))
    engines[0].wake()
    assert len(steps.threads) == 1


def test_an_interrupted_caller_does_the_rest_first(make):
    """Somebody waits for each piece of work."""
    engine = make(Steps())
    engine.close()
    done = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.reap(interrupt)
    with pytest.raises(KeyboardInterrupt):
        _finish(interrupt, partial(done.append, "rest"))
    assert done == ["rest"]


def test_work_is_done_by_restore_threads_at_most_so_many_at_a_time(make):
    engine = make(Steps(), restore_threads=2)
    together = threading.Barrier(2)
    names = []

    def work() -> None:
        names.append(threading.current_thread().name)
        together.wait(TIMEOUT)

    for _ in range(4):
        assert engine.submit(work)
    engine.close()
    assert len(names) == 4
    assert len(set(names)) == 2
    assert all(name.startswith("gpuspill-restore-test") for name in names)


@pytest.mark.parametrize("method", ["submit", "reap"])
def test_work_that_fails_is_logged_and_stops_nobody(make, caplog, method):
    engine = make(Steps(), restore_threads=1)
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("some bug")

    getattr(engine, method)(fail)
    getattr(engine, method)(done.set)
    assert done.wait(TIMEOUT)
    assert "some bug" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


def test_what_was_reaped_is_let_go(make):
    engine = make(Steps())

    class Value:
        pass

    value = Value()
    gone = weakref.ref(value)
    reaped = threading.Event()
    finalised = threading.Event()
    weakref.finalize(value, finalised.set)

    def work(value: Value = value) -> None:
        reaped.set()

    engine.reap(work)
    del value, work
    assert reaped.wait(TIMEOUT)
    assert finalised.wait(TIMEOUT), "the reaper keeps it while it waits for more"
    assert gone() is None


def test_closing_waits_for_what_runs_and_does_what_is_queued(make):
    """Somebody waits for each piece of work."""
    gate = Gate()
    done = []

    def slow() -> None:
        gate.pass_through()
        done.append("slow")

    engine = make(Steps(), restore_threads=1)
    engine.submit(slow)
    for n in range(3):
        engine.submit(lambda n=n: done.append(n))
    assert gate.arrived.acquire(timeout=TIMEOUT)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(TIMEOUT)
    assert done == ["slow", 0, 1, 2]
    assert ours() == []


def test_closing_waits_for_a_step(make):
    gate = Gate()
    ended = []

    def slow() -> None:
        gate.pass_through()
        ended.append(True)

    engine = make(Steps(slow))
    engine.wake()
    assert gate.arrived.acquire(timeout=TIMEOUT)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(TIMEOUT)
    assert ended == [True]
    assert ours() == []


def test_closing_ends_a_long_sleep(make):
    steps = Steps(10_000.0)
    engine = make(steps)
    engine.wake()
    steps.wait(1)
    engine.close()
    assert ours() == []


def test_after_closing(make):
    engine = make(Steps())
    engine.close()
    engine.close()
    engine.wake()
    assert not engine.submit(pytest.fail)
    engine.reap(lambda: None)
    assert ours() == []


def test_letting_values_go_does_not_wait_for_records_that_are_deleted(make):
    engine = make(lambda: float("inf"))
    slow, reaped = threading.Event(), threading.Event()
    engine.delete(lambda: slow.wait(TIMEOUT))
    engine.reap(reaped.set)
    assert reaped.wait(TIMEOUT), "it waits behind a slow disk"
    slow.set()
