"""After a fork the store is the parent's: what children read, and that they change and wait for nothing."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpuspill import forks
from gpuspill.errors import ManagerClosed, StorageError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import Encoded, PickleSerializer
from gpuspill.simulated import asarray
from gpuspill.storage.files import FileStore
from gpuspill.testing.managers import ManagerKit
from tests.processes import in_child
from tests.things import Thing, squeeze

PROGRAM = Path(__file__).with_name("forking.py")
#: Children in each run of the program; 100 shows that it holds.
ROUNDS = int(os.environ.get("GPUSPILL_TEST_FORKS", "8"))

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "whole\n", done.stderr[-5000:]


@pytest.mark.fault(
    "process forked", on=("host→disk", "disk→host", "release", "close"), outcome="the parent's values stay whole"
)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "_exit", "kill"])
@pytest.mark.parametrize("what", ["park", "read", "delete", "drop", "close", "ask"])
def test_children_of_a_busy_process(what, how):
    run(what, how, ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "needed"),
    [
        ("fork", None),
        ("forkserver", None),
        ("spawn", None),
        ("subprocess", None),
        ("loky", "joblib"),
        ("torch", "torch"),
    ],
)
def test_processes_that_libraries_start(library, needed):
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    run("library", library, 1 + ROUNDS // 8)


@contextmanager
def child_after(function):
    """Fork, do in the parent what stands in the context, then let the child call a function."""
    read, write = os.pipe()
    forked = threading.Event()

    def child():
        os.read(read, 1)
        function()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(in_child, child, forked.set)
        forked.wait()
        try:
            yield
        finally:
            os.write(write, b"x")
            done.result()
            os.close(read)
            os.close(write)


@pytest.fixture
def manager(tmp_path):
    manager = ProxifyManager(
        limit=None, store=FileStore(tmp_path), serializer=PickleSerializer(), sizeof=lambda value: value.nbytes
    )
    manager.store("memory", np.zeros(1000))
    manager.store("disk", np.ones(1000))
    manager.admission.pin(["memory"])
    manager.limits.evict_all()
    assert manager.spilled_count == 1
    yield manager
    manager.validate()
    manager.close()


class TestReading:
    def test_what_is_in_memory_is_the_same_object_and_what_is_on_disk_a_copy(self, manager):
        inside = manager.get("memory")

        def child():
            assert manager.inherited
            assert manager.get("memory") is inside
            for _ in range(2):
                assert (manager.get("disk") == 1).all()
            assert manager.spilled_count == 1
            assert manager.proxy("disk").resolve().shape == (1000,)
            manager.validate()

        in_child(child)
        assert not manager.inherited
        assert manager.statistics().restores == 0

    def test_grandchildren(self, manager):
        in_child(lambda: in_child(lambda: manager.get("disk").sum()))

    @pytest.mark.fault("process forked", on="release", outcome="an error in the child")
    def test_what_the_parent_has_removed_since_is_an_error_that_says_what_to_do(self, manager):
        parent = os.getpid()

        def child():
            with pytest.raises(
                ManagerClosed, match=f"'disk' was on disk .* forked from process {parent}.*Read it before"
            ):
                manager.get("disk")
            with pytest.raises(ManagerClosed, match="forked"):
                manager.batch.get_many(["disk"]).result(10)
            manager.get("memory")

        with child_after(child):
            manager.discard("disk")
            while os.listdir(manager._store.path) != ["lock"]:
                time.sleep(0.001)

    def test_what_was_in_use_at_the_fork_is_there_when_the_parent_gives_up_its_record(self, tmp_path, unsure):
        """The parent takes the value back: its holder may have changed it, so the record counts no more."""
        kit = ManagerKit(store=FileStore(tmp_path))
        held = Thing("content")
        kit.manager.store("a", held)
        squeeze(kit)
        for _ in range(25):
            kit.clock.advance(1)
            kit.engine.spill_all()
        assert not kit.manager.is_resident("a")

        def child():
            assert kit.manager.get("a") is held
            assert kit.manager.batch.get_many(["a"]).result(10)["a"] is held

        with child_after(child):
            kit.manager.limits.set_limit(None, None)
            assert kit.manager.get("a") is held
            assert kit.records() == 0
        kit.close()

    def test_bytes_that_nobody_has_decoded(self, manager):
        header, frames = PickleSerializer().dumps(np.full(10, 5.0))
        manager.store_encoded("encoded", Encoded(header, frames, 80))
        in_child(lambda: np.testing.assert_array_equal(manager.get("encoded"), 5))

    @pytest.mark.fault("process forked", on=("host→device"), outcome="an error in the child")
    def test_a_device_is_not_for_children(self, tmp_path):
        from gpuspill.config import Settings
        from gpuspill.distributed.factory import build_store

        store = build_store(Settings(device="simulated"), str(tmp_path))
        try:
            store["x"] = asarray(np.ones(1000))
            store["y"] = np.zeros(1000)

            def child():
                with pytest.raises(ManagerClosed, match="'spawn' or 'forkserver'"):
                    store["x"]
                with pytest.raises(ManagerClosed, match="'spawn' or 'forkserver'"):
                    store.tier.resolve_later({"x": store.manager.look("x")}).result(10)
                assert not store["y"].any()
                del store["x"]
                store["z"] = store["y"]
                store.wait_for_room()
                store.close()

            in_child(child)
            assert store["x"].sum() == 1000
        finally:
            store.close()


class TestChangingNothing:
    def test_a_child_writes_and_removes_no_file(self, tmp_path):
        with FileStore(tmp_path) as store:
            receipt = store.write(b"", [b"x"])

            def child():
                with pytest.raises(StorageError, match=r"process \d+, from which this one was forked"):
                    store.write(b"", [b"y"])
                store.delete(receipt)
                assert bytes(store.read(receipt)[1][0]) == b"x"
                store.close()
                store.close()
                os.stat(os.path.join(path, "1"))

            path = store.path
            in_child(child)
            assert sorted(os.listdir(path)) == ["1", "lock"]
            assert bytes(store.read(receipt)[1][0]) == b"x"
            assert store.write(b"", [b"z"]).number == 2

    def test_adopted_files_are_the_parents(self, tmp_path):
        from gpuspill.distributed.metrics import Metrics
        from gpuspill.distributed.takeover import AdoptingStore

        files = {"key": b"content"}
        with AdoptingStore(FileStore(tmp_path), Metrics()) as store:
            receipt = store.adopt(files, "key", 7)

            def child():
                store.delete(receipt)
                store.close()
                assert files == {"key": b"content"}

            in_child(child)

    def test_those_who_wait_in_the_parent_still_do_and_nobody_waits_in_the_child(self):
        bench = ManagerKit(limit=100)
        bench.manager.store("a", Thing(nbytes=100))
        admission = bench.manager.admission.admit("b", [], 100)
        told = []
        admission.add_done_callback(lambda: told.append(os.getpid()))
        assert not admission.granted

        def child():
            assert admission.wait(10)
            bench.manager.admission.wait_for_room()
            assert bench.manager.admission.reserve(10**9).wait(10)
            assert not told

        in_child(child)
        assert not admission.granted
        admission.release()
        bench.manager.close()


class TestMoments:
    """A fork while the very thread that forks is in the middle of something, or another one is."""

    @pytest.mark.fault("process forked", on=("host→disk", "disk→host"), outcome="both go on")
    @pytest.mark.parametrize("operation", ["write", "read"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_in_the_middle_of_a_move(self, operation, when):
        bench = ManagerKit(limit=None)
        bench.manager.store("x", Thing("content"))
        bench.manager.store("y", Thing("other"))
        if operation == "read":
            bench.manager.limits.evict_all()
        forked = []

        def hook(found, point):
            if (found, point) == (operation, when) and not forked:
                forked.append(point)

                def child():
                    for key, content in (("x", "content"), ("y", "other")):
                        assert bench.manager.get(key).content == content
                        assert bench.manager.batch.get_many([key]).result(10)[key].content == content
                    bench.manager.store("z", Thing("new"))
                    bench.manager.discard("x")
                    bench.manager.close()

                in_child(child)

        bench.store.hook = hook
        if operation == "write":
            bench.manager.limits.evict_all()
        assert bench.manager.get("x").content == "content"
        assert bench.manager.get("y").content == "other"
        assert forked
        bench.manager.validate()
        bench.manager.close()

    def test_in_the_middle_of_a_change(self, manager):
        """As a finaliser may."""
        with manager._metadata:

            def child():
                assert (manager.get("disk") == 1).all()
                manager.store("z", np.zeros(10))
                manager.discard("memory")

            in_child(child)
            in_child(lambda: manager.get("memory"))
        assert "memory" in manager

    @pytest.mark.parametrize("turn", range(10))
    def test_a_lock_that_another_thread_holds(self, turn):
        """The child finds it free, and what it guards whole."""
        lock = forks.lock()
        others = [forks.lock() for _ in range(3)]
        state = ["whole"]
        arrived, go_on = threading.Event(), threading.Event()

        def change():
            with lock:
                state[0] = "half"
                arrived.set()
                go_on.wait(60)
                with others[turn % 3]:  # whoever forks may have taken it by now
                    state[0] = "whole"

        def child():
            for each in (lock, *others):
                assert each.acquire(timeout=10)
            assert state == ["whole"]

        holder = threading.Thread(target=change)
        forker = threading.Thread(target=in_child, args=(child,))
        holder.start()
        assert arrived.wait(60)
        forker.start()
        go_on.set()
        holder.join(60)
        forker.join(60)
        assert not holder.is_alive()
        assert not forker.is_alive()
        assert state == ["whole"]

    def test_locks_are_taken_all_or_none(self):
        locks = [threading.RLock() for _ in range(4)]
        taken, free = threading.Event(), threading.Event()

        def hold():
            with locks[2]:
                taken.set()
                free.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(60)
        assert forks._take(locks) is locks[2]
        for lock in locks:
            assert not lock._is_owned()
        free.set()
        thread.join()
        assert forks._take(locks) is None
        for lock in locks:
            assert lock._is_owned()
            lock.release()

    def test_a_member_that_fails_stops_no_other(self, manager):
        class Failing:
            def disown(self):
                raise RuntimeError("no")

        failing = Failing()
        forks.tell(failing)
        in_child(lambda: manager.get("disk"))

    def test_nothing_is_kept_alive(self):
        before = len(forks._registry._locks), len(forks._registry._members)
        ManagerKit(limit=None).manager.close()
        assert (len(forks._registry._locks), len(forks._registry._members)) == before
