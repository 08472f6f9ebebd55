"""A store's directory: nobody else's, gone afterwards, swept if its owner was killed."""

import errno
import fcntl
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspill.errors import StorageError
from gpuspill.storage.directory import PREFIX, PrivateDirectory, sweep_leftovers
from gpuspill.storage.files import FileStore
from tests.storage.leftovers import leave, snapshot


@pytest.fixture
def make(tmp_path):
    made = []

    def make(parent=tmp_path):
        made.append(PrivateDirectory(parent))
        return made[-1]

    yield make
    for directory in made:
        directory.remove()


class TestPrivateDirectory:
    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    def test_modes(self, tmp_path, umask):
        before = os.umask(umask)
        try:
            with FileStore(tmp_path) as store:
                receipt = store.write(b"", [b"x"])
                path = store.path
                assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
                for name in os.listdir(path):
                    assert stat.S_IMODE(os.stat(os.path.join(path, name)).st_mode) == 0o600
                assert sorted(os.listdir(path)) == [str(receipt.number), "lock"]
        finally:
            os.umask(before)

    def test_parent_is_made(self, tmp_path, make):
        parent = tmp_path / "not" / "there"
        directory = make(parent)
        directory.remove()
        assert os.listdir(parent) == []

    def test_parent_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(StorageError, match=r"cannot use .*file for spilling"):
            PrivateDirectory(tmp_path / "file")

    @pytest.mark.parametrize("below", ["", "/and/below"])
    def test_the_message_says_what_is_wrong_once_and_where_the_name_comes_from(self, tmp_path, below):
        path = tmp_path / "file"
        path.touch()
        with pytest.raises(StorageError) as caught:
            PrivateDirectory(f"{path}{below}", "gpuspill.spill-directory")
        number, found = (errno.EEXIST, "File exists") if not below else (errno.ENOTDIR, f"Not a directory: {path}/and")
        assert str(caught.value) == (
            f"[Errno {number}] gpuspill.spill-directory: cannot use {path}{below} for spilling ({found}). Name a "
            "directory that is there, or can be made, and in which this user may write"
        )

    def test_relative_parent(self, tmp_path, make, monkeypatch):
        monkeypatch.chdir(tmp_path)
        directory = make("here")
        monkeypatch.chdir("/")
        assert os.path.isdir(directory.path)
        directory.remove()
        assert os.listdir(tmp_path / "here") == []

    def test_two_are_different(self, make):
        assert make().path != make().path

    def test_removing_twice(self, make):
        directory = make()
        directory.remove()
        directory.remove()
        directory.empty()
        assert not os.path.exists(directory.path)

    @pytest.mark.fault("spill directory removed", on="close", outcome="no error")
    def test_removed_by_somebody_else(self, make):
        directory = make()
        os.unlink(os.path.join(directory.path, "lock"))
        os.rmdir(directory.path)
        assert directory.gone
        directory.remove()

    def test_something_that_no_store_makes_is_left(self, make, caplog):
        directory = make()
        os.makedirs(os.path.join(directory.path, "sub", "sub"))
        with open(os.path.join(directory.path, "1"), "w"):
            pass
        directory.remove()
        assert os.listdir(directory.path) == ["sub"]
        assert "Could not remove everything" in caplog.text
        os.removedirs(os.path.join(directory.path, "sub", "sub"))

    @pytest.mark.fault("another file in its place", on="close", outcome="left alone")
    def test_links_are_neither_followed_nor_removed(self, tmp_path, make):
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "file").write_text("x")
        directory = make(tmp_path / "parent")
        path = pathlib.Path(directory.path)
        (path / "1").symlink_to(precious)
        (path / "2").symlink_to(precious / "file")
        (path / "3").hardlink_to(precious / "file")
        before = snapshot(precious)
        directory.remove()
        assert snapshot(precious) == before
        assert sorted(os.listdir(path)) == ["1", "2", "3"]
        shutil.rmtree(path)

    def test_a_name_that_another_directory_has_by_now(self, tmp_path, make):
        directory = make()
        os.rename(directory.path, tmp_path / "moved")
        os.mkdir(directory.path)
        directory.remove()
        assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(directory.path), "moved"])
        os.rmdir(directory.path)

    def test_replaced_while_it_is_made(self, tmp_path, monkeypatch):
        mkdir = os.mkdir
        theirs = []

        def replaced(name, mode=0o777, *, dir_fd=None):
            mkdir(name, mode, dir_fd=dir_fd)
            if dir_fd is not None and not theirs:
                theirs.append(tmp_path / name)
                os.rename(theirs[0], tmp_path / "moved")
                mkdir(theirs[0])
                (theirs[0] / "lock").write_text("theirs")

        monkeypatch.setattr(os, "mkdir", replaced)
        with FileStore(tmp_path) as store:
            assert store.path != str(theirs[0])
            assert (theirs[0] / "lock").read_text() == "theirs"
        assert (theirs[0] / "lock").read_text() == "theirs"
        shutil.rmtree(theirs[0])

    def test_the_mode_whatever_the_umask_takes_away(self, make):
        before = os.umask(0o100)
        try:
            directory = make()
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700

    def test_a_disk_without_room_for_the_marker(self, tmp_path, make, monkeypatch, caplog):
        def pwrite(fd, data, offset):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", pwrite)
        directory = make()
        monkeypatch.undo()
        assert "stays if this process is killed" in caplog.text
        directory.remove()
        assert os.listdir(tmp_path) == []

    def test_replaced_by_a_link_while_in_use(self, tmp_path):
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "1").write_text("x")
        parent = tmp_path / "parent"
        store = FileStore(parent)
        receipt = store.write(b"", [b"x"])
        os.rename(store.path, parent / "moved")
        os.symlink(precious, store.path)
        # Neither reads, writes nor removals go through the link.
        assert bytes(store.read(receipt)[1][0]) == b"x"
        store.delete(receipt)
        store.write(b"", [b"y"])
        store.close()
        assert [path.name for path in precious.iterdir()] == ["1"]
        assert os.listdir(parent / "moved") == []
        os.unlink(store.path)

    @pytest.mark.fault("no locks on the file system", on="host→disk", outcome="works, with a warning")
    def test_a_file_system_without_locks(self, tmp_path, make, monkeypatch, caplog):
        def flock(fd, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
        directory = make()
        assert "has no locks" in caplog.text
        # Nobody can tell whether it is in use, so nobody sweeps it.
        assert sweep_leftovers(tmp_path) == 0
        assert os.path.isdir(directory.path)
        directory.remove()
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("call", ["mkdir", "open", "flock"])
    def test_failing_to_make_one_leaves_nothing(self, tmp_path, monkeypatch, call):
        target = fcntl if call == "flock" else os
        real = getattr(target, call)

        def fail(path, *args, **kwargs):
            if call == "open" and path != "lock":
                return real(path, *args, **kwargs)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(target, call, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            PrivateDirectory(tmp_path)
        monkeypatch.undo()
        assert os.listdir(tmp_path) == []

    @pytest.mark.fault("process forked", on="close", outcome="the parent's files stay")
    def test_forked_child_leaves_the_parents_files_alone(self, tmp_path):
        with FileStore(tmp_path) as store:
            receipt = store.write(b"", [b"x"])
            pid = os.fork()
            if pid == 0:
                try:
                    store.close()
                finally:
                    os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert bytes(store.read(receipt)[1][0]) == b"x"

    def test_dropped_store_closes_itself(self, tmp_path):
        store = FileStore(tmp_path)
        store.write(b"", [b"x"])
        del store
        assert os.listdir(tmp_path) == []

    def test_exit_closes(self, tmp_path):
        code = f"""
            from gpuspill.storage.files import FileStore
            store = FileStore({str(tmp_path)!r})
            store.write(b"", [b"x"])
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
        assert os.listdir(tmp_path) == []


class TestSweep:
    def test_leftovers_go(self, tmp_path):
        leave(tmp_path)
        leave(tmp_path, files=())
        assert sweep_leftovers(tmp_path) == 2
        assert os.listdir(tmp_path) == []

    def test_a_new_store_sweeps(self, tmp_path):
        leave(tmp_path)
        with FileStore(tmp_path) as store:
            assert os.listdir(tmp_path) == [os.path.basename(store.path)]

    def test_not_if_told_not_to(self, tmp_path):
        path = leave(tmp_path)
        with FileStore(tmp_path, sweep=False):
            assert path.exists()
        sweep_leftovers(tmp_path)

    def test_nothing_there(self, tmp_path):
        assert sweep_leftovers(tmp_path / "missing") == 0
        assert sweep_leftovers(tmp_path) == 0

    def test_live_stores_stay(self, tmp_path):
        with FileStore(tmp_path) as first, FileStore(tmp_path) as second:
            receipts = [store.write(b"", [b"x"]) for store in (first, second)]
            assert sweep_leftovers(tmp_path) == 0
            for store, receipt in zip((first, second), receipts, strict=True):
                assert bytes(store.read(receipt)[1][0]) == b"x"

    def test_other_things_stay(self, tmp_path):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "1").touch()
        (tmp_path / (PREFIX + "file")).touch()
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "1").touch()
        (tmp_path / (PREFIX + "link")).symlink_to(precious)
        (tmp_path / (PREFIX + "dangling")).symlink_to(tmp_path / "nowhere")
        before = sorted(tmp_path.rglob("*"))
        assert sweep_leftovers(tmp_path) == 0
        assert sorted(tmp_path.rglob("*")) == before
        for path in tmp_path.glob(PREFIX + "*"):
            path.unlink()

    @pytest.mark.fault("process killed", on=("host→disk", "close"), outcome="swept by the next start")
    def test_killed_process(self, tmp_path):
        code = f"""
            import sys
            from gpuspill.storage.files import FileStore
            store = FileStore({str(tmp_path)!r})
            store.write(b"", [b"x" * 1000])
            print(store.path, flush=True)
            sys.stdin.read()
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            path = process.stdout.readline().strip()
            assert os.path.exists(os.path.join(path, "1"))
            # While it lives, its directory stays.
            assert sweep_leftovers(tmp_path) == 0
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert os.path.exists(os.path.join(path, "1"))
        with FileStore(tmp_path) as store:
            assert os.listdir(tmp_path) == [os.path.basename(store.path)]


class TestRaces:
    """A sweep at every point of a store being made, and of another sweep."""

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("call", ["mkdir", "open", "flock", "pwrite", "fstat"])
    @pytest.mark.parametrize("nth", range(4))
    def test_sweep_while_a_store_is_made(self, tmp_path, monkeypatch, when, call, nth):
        target = fcntl if call == "flock" else os
        real = getattr(target, call)
        calls = []

        def with_sweep(*args, **kwargs):
            calls.append(call)
            if len(calls) - 1 != nth:
                return real(*args, **kwargs)
            if when == "before":
                assert sweep_leftovers(tmp_path) == 0
            result = real(*args, **kwargs)
            if when == "after":
                assert sweep_leftovers(tmp_path) == 0
            return result

        monkeypatch.setattr(target, call, with_sweep)
        store = FileStore(tmp_path, sweep=False)
        monkeypatch.undo()
        with store:
            receipt = store.write(b"", [b"x"])
            assert sweep_leftovers(tmp_path) == 0
            assert bytes(store.read(receipt)[1][0]) == b"x"
            assert os.listdir(tmp_path) == [os.path.basename(store.path)]
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("call", ["open", "flock", "stat", "fstat", "listdir", "unlink", "rmdir", "pread"])
    @pytest.mark.parametrize("nth", range(5))
    def test_a_store_made_and_a_sweep_while_sweeping(self, tmp_path, monkeypatch, call, nth):
        leave(tmp_path)
        leave(tmp_path)
        target = fcntl if call == "flock" else os
        real = getattr(target, call)
        calls = []
        stores = []

        def interleaved(*args, **kwargs):
            calls.append(call)
            if len(calls) - 1 == nth:
                stores.append(FileStore(tmp_path))
            return real(*args, **kwargs)

        monkeypatch.setattr(target, call, interleaved)
        sweep_leftovers(tmp_path)
        monkeypatch.undo()
        for store in stores:
            receipt = store.write(b"", [b"x"])
            assert bytes(store.read(receipt)[1][0]) == b"x"
            store.close()
        sweep_leftovers(tmp_path)  # what each of the two left to the other
        assert os.listdir(tmp_path) == []

    def test_threads(self, tmp_path):
        barrier = threading.Barrier(6)

        def work(i):
            barrier.wait(60)
            for turn in range(15):
                with FileStore(tmp_path) as store:
                    receipt = store.write(b"", [b"%d-%d" % (i, turn)])
                    sweep_leftovers(tmp_path)
                    assert bytes(store.read(receipt)[1][0]) == b"%d-%d" % (i, turn)
                    store.validate()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert os.listdir(tmp_path) == []

    def test_processes(self, tmp_path):
        code = f"""
            import sys
            from gpuspill.storage.files import FileStore
            print("ready", flush=True)
            sys.stdin.readline()
            for turn in range(100):
                with FileStore({str(tmp_path)!r}) as store:
                    receipt = store.write(b"", [b"%d" % turn])
                    assert bytes(store.read(receipt)[1][0]) == b"%d" % turn
                    store.validate()
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            process.communicate()
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert os.listdir(tmp_path) == []
