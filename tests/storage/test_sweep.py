"""What the sweep of leftovers takes for a dead store's, and what it never touches: anything that may be somebody's."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.storage import directory as module
from gpuspill.storage.directory import PREFIX, sweep_leftovers
from gpuspill.storage.files import FileStore
from gpuspill.storage.filesystems import file_system_type
from gpuspill.storage.marker import Marker, boot_id
from tests.storage.leftovers import create, leave, mark, snapshot

ELSEWHERE = "00000000-1111-2222-3333-444444444444"


def renamed(path, name):
    path.rename(path.parent / name)


def replaced(path, content):
    create(path, content)


def doubled(path):
    shutil.copytree(path, path.parent / f"{PREFIX}1-{0:012x}")
    shutil.rmtree(path)


def linked(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def piped(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def foreign(path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)


#: Each makes a dead store's directory differ from one in a single respect.
LOOK_ALIKES = {
    "another name": lambda path: renamed(path, "gpuspill-results"),
    "a name with more behind": lambda path: renamed(path, path.name + ".bak"),
    "a name with a line behind": lambda path: renamed(path, path.name + "\n"),
    "a name with capitals": lambda path: renamed(path, f"{PREFIX}1-ABCDEFABCDEF"),
    "another user's": foreign,
    "for others to read": lambda path: path.chmod(0o755),
    "for others to write": lambda path: path.chmod(0o770),
    "read only": lambda path: path.chmod(0o500),
    "a link": linked,
    "no lock file": lambda path: (path / "lock").unlink(),
    "an empty lock file, as of versions before": lambda path: replaced(path / "lock", b""),
    "another lock file": lambda path: replaced(path / "lock", b"locked by table.py"),
    "half a marker": lambda path: replaced(path / "lock", (path / "lock").read_bytes()[:-3]),
    "another format": lambda path: mark(path, format=2),
    "true as the format": lambda path: mark(path, format=True),
    "a lock file that another user owns": lambda path: foreign(path / "lock"),
    "a lock file for others to read": lambda path: (path / "lock").chmod(0o644),
    "a lock file with two names": lambda path: os.link(path / "lock", path.parent / "lock"),
    "a lock file that is a link": lambda path: linked(path / "lock"),
    "a lock file that is a pipe": lambda path: piped(path / "lock"),
    "a copy": doubled,
    "a store without locks": lambda path: mark(path, locked=False),
    "a file of another name": lambda path: create(path / "table.csv", b"1,2"),
    "a hidden file": lambda path: create(path / ".nfs0001", b"x"),
    "a number with a zero before": lambda path: create(path / "01", b"x"),
    "a number in other digits": lambda path: create(path / "٣", b"x"),
    "a folder": lambda path: (path / "7").mkdir(),
    "a folder with something in it": lambda path: (path / "sub" / "sub").mkdir(parents=True),
    "a record that is a link": lambda path: (path / "3").symlink_to("1"),
    "a dangling link": lambda path: (path / "3").symlink_to("nowhere"),
    "a record that is a pipe": lambda path: piped(path / "1"),
    "a record with two names": lambda path: os.link(path / "1", path.parent / "1"),
    "a record with two names here": lambda path: os.link(path / "1", path / "3"),
    "a record that another user owns": lambda path: foreign(path / "1"),
    "a record for others to read": lambda path: (path / "1").chmod(0o644),
    "a record that can be run": lambda path: (path / "1").chmod(0o700),
}


@pytest.mark.parametrize("change", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_what_differs_in_one_respect_stays_as_a_whole(tmp_path, change):
    path = leave(tmp_path)
    change(path)
    before = snapshot(tmp_path)
    assert sweep_leftovers(tmp_path) == 0
    with FileStore(tmp_path) as store:
        store.write(b"", [b"x"])
    assert snapshot(tmp_path) == before
    for left in tmp_path.iterdir():  # the checks for leaks take them for ours
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def test_what_differs_in_no_respect_goes(tmp_path):
    tmp_path.chmod(0o2770)  # whose directories inherit a bit
    leave(tmp_path)
    leave(tmp_path, files=())
    assert sweep_leftovers(tmp_path) == 2
    assert os.listdir(tmp_path) == []


def test_what_no_store_has_made_is_named_in_a_warning(tmp_path, caplog):
    path = leave(tmp_path)
    (path / "table.csv").touch()
    sweep_leftovers(tmp_path)
    assert f"{path} was left by a killed process, but holds what no store has made (table.csv)" in caplog.text
    shutil.rmtree(path)


def test_a_renamed_leftover_still_goes(tmp_path):
    path = leave(tmp_path)
    renamed(path, f"{PREFIX}1-{0:012x}")
    assert sweep_leftovers(tmp_path) == 1


class TestOtherHosts:
    @pytest.mark.parametrize("kind", [None, "nfs4", "fuse.sshfs", "lustre", "cifs", "9p", "virtiofs"])
    @pytest.mark.parametrize("elsewhere", [{"boot": ELSEWHERE}, {"boot": ""}, {"device": 1}])
    def test_where_several_hosts_may_write_only_what_this_one_made_goes(self, tmp_path, monkeypatch, kind, elsewhere):
        monkeypatch.setattr(module, "file_system_type", lambda path: kind)
        theirs = leave(tmp_path, **elsewhere)
        ours = leave(tmp_path)
        before = snapshot(theirs)
        assert sweep_leftovers(tmp_path) == 1
        assert not ours.exists()
        assert snapshot(theirs) == before
        shutil.rmtree(theirs)

    def test_on_a_local_disk_what_was_left_before_a_reboot_goes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "file_system_type", lambda path: "ext4")
        leave(tmp_path, boot=ELSEWHERE, host="elsewhere", device=1)
        assert sweep_leftovers(tmp_path) == 1

    def test_locks_that_do_not_lock(self, tmp_path, monkeypatch):
        """Two get the same lock: so the store may be alive."""
        path = leave(tmp_path)
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
        before = snapshot(tmp_path)
        assert sweep_leftovers(tmp_path) == 0
        assert snapshot(tmp_path) == before
        shutil.rmtree(path)

    @pytest.mark.fault("no locks on the file system", on="close", outcome="left alone")
    def test_a_store_that_could_not_lock_is_never_swept(self, tmp_path, monkeypatch):
        def flock(fd, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", flock)
            store = FileStore(tmp_path)
        receipt = store.write(b"", [b"x"])
        assert sweep_leftovers(tmp_path) == 0
        assert bytes(store.read(receipt)[1][0]) == b"x"
        store.close()

    def test_a_kernel_that_does_not_tell_itself_from_others(self, tmp_path, monkeypatch):
        monkeypatch.setattr("gpuspill.storage.marker._BOOT_ID", str(tmp_path / "missing"))
        monkeypatch.setattr(module, "file_system_type", lambda path: None)
        assert boot_id() == ""
        path = leave(tmp_path)
        assert sweep_leftovers(tmp_path) == 0
        shutil.rmtree(path)


MOUNTS = """\
22 27 0:21 / /proc rw - proc proc rw
27 1 254:0 / / rw,discard - ext4 /dev/vda rw
31 27 0:28 / {0} rw shared:1 master:2 - tmpfs tmpfs rw
32 31 0:29 / {0}/with\\040blank rw - nfs4 server:/x rw
33 31 0:30 / {0}/twice rw - xfs /dev/x rw
34 31 0:31 / {0}/twice rw - fuse.sshfs x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", "tmpfs"),
        ("/below", "tmpfs"),
        ("/with blank/below", "nfs4"),
        ("/with", "tmpfs"),
        ("/twice", "fuse.sshfs"),
        ("x", "ext4"),
        ("/link", "nfs4"),
    ],
)
def test_the_type_of_a_file_system(tmp_path, path, kind):
    base = tmp_path / "base"
    base.mkdir()
    (base / "link").symlink_to(base / "with blank")
    (tmp_path / "mounts").write_text(MOUNTS.format(base))
    assert file_system_type(f"{base}{path}", str(tmp_path / "mounts")) == kind


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3 4 relative rw - ext4 x rw", "\0 / - \0"])
def test_the_type_of_a_file_system_that_cannot_be_told(tmp_path, text):
    (tmp_path / "mounts").write_text(text)
    assert file_system_type(tmp_path, str(tmp_path / "mounts")) is None
    assert file_system_type(tmp_path, str(tmp_path / "missing")) is None


@given(text=st.binary(max_size=200) | st.text().map(str.encode))
def test_no_text_is_a_marker_by_chance(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(text)
    with open(path, "rb") as file:
        assert Marker.read(file.fileno()) is None


@given(nested=st.integers(1, 2000))
@settings(max_examples=5)
def test_nested_text_is_no_marker(tmp_path_factory, nested):
    path = tmp_path_factory.getbasetemp() / "nested"
    path.write_bytes(b"[" * nested)
    with open(path, "rb") as file:
        assert Marker.read(file.fileno()) is None


#: Names that are, or nearly are, those of stores, locks and records.
names = st.sampled_from(
    ["lock", "1", "2", "10", "0", "01", "1.part", "data.csv", "gpuspill", "gpuspill-", "gpuspill-results"]
    + [f"{PREFIX}{pid}-{number:012x}" for pid in (1, 77) for number in (1, 2**40)]
)
contents = st.sampled_from([b"", b"1,2,3", b"{}", b"marker", b"[[["])
modes = st.sampled_from([0o600, 0o644, 0o700, 0o755, 0o500, 0o400])
trees = st.recursive(
    st.tuples(st.sampled_from(["file", "link", "hardlink", "pipe"]), contents, modes),
    lambda inner: st.tuples(st.just("folder"), st.dictionaries(names, inner, max_size=4), modes),
    max_leaves=12,
)


def grow(path, tree, outside):
    kind, inside, mode = tree
    if kind == "folder":
        path.mkdir()
        for name, branch in inside.items():
            grow(path / name, branch, outside)
        path.chmod(mode)
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "hardlink":
        path.hardlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path, mode)
    elif inside == b"marker":
        marker = leave(Path(outside).parent)
        create(path, (marker / "lock").read_bytes(), mode)
        shutil.rmtree(marker)
    else:
        create(path, inside, mode)


@pytest.mark.fault("files of others in the spill directory", on="close", outcome="left alone")
@given(tree=st.dictionaries(names, trees, max_size=6), dead=st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_nothing_that_no_store_has_made_ever_changes(tmp_path_factory, tree, dead):
    """Random trees beside stores that live, close and are killed; whatever the trees are called."""
    base = tmp_path_factory.mktemp("random")
    (base / "outside").mkdir()
    create(base / "outside" / "precious", b"precious")
    parent = base / "parent"
    parent.mkdir()
    left = [leave(parent) for _ in range(dead)]
    for name, branch in tree.items():
        grow(parent / name, branch, base / "outside" / "precious")
    ours = tuple(str(path) for path in left)
    before = {name: status for name, status in snapshot(parent).items() if not name.startswith(ours or "//")}
    outside = snapshot(base / "outside")
    assert sweep_leftovers(parent) == dead
    with FileStore(parent) as store:
        store.delete(store.write(b"", [b"x"]))
        store.write(b"", [b"y"])
    assert snapshot(parent) == before
    assert snapshot(base / "outside") == outside
    for where, folders, _ in os.walk(base):
        for name in folders:
            os.chmod(os.path.join(where, name), 0o700)
    shutil.rmtree(base)


@given(tree=st.dictionaries(names.filter(lambda name: name not in ("1", "2", "10")), trees, max_size=4))
@settings(max_examples=50, deadline=None)
def test_nothing_that_is_put_into_the_directory_of_a_living_store_changes(tmp_path_factory, tree):
    base = tmp_path_factory.mktemp("random")
    create(base / "precious", b"precious")
    store = FileStore(base)
    path = Path(store.path)
    receipt = store.write(b"", [b"x"])
    for name, branch in tree.items():
        if name != "lock":
            grow(path / name, branch, base / "precious")
    ours = {str(path), f"{path}/1", f"{path}/lock"}
    before = {name: status for name, status in snapshot(base).items() if name not in ours}
    store.delete(receipt)
    store.write(b"", [b"y"])
    store.close()
    assert {name: status for name, status in snapshot(base).items() if name != str(path)} == before
    assert path.exists() == (len(before) > 1)
    for where, folders, _ in os.walk(base):
        for name in folders:
            os.chmod(os.path.join(where, name), 0o700)
    shutil.rmtree(base)


@pytest.mark.fault("files of others in the spill directory", on="close", outcome="left alone")
def test_files_of_a_user_stay_while_a_worker_attaches_is_killed_and_starts_again(tmp_path):
    """Old and new ones, links, and another user's; only the dead worker's own go."""
    for number in range(3):
        folder = tmp_path / f"{PREFIX}results-{number}"
        (folder / "nested" / "gpuspill-1-000000000001").mkdir(parents=True)
        for name in ("table.csv", "1", "2", "lock"):
            create(folder / name, b"1,2")
        os.utime(folder, (0, 0) if number else None)
    twin = tmp_path / f"{PREFIX}1-00000000000f"
    twin.mkdir(mode=0o700)
    for name in ("1", "2", "lock"):
        create(twin / name, b"1,2")
    (tmp_path / f"{PREFIX}2-00000000000f").symlink_to(twin)
    create(tmp_path / f"{PREFIX}3-00000000000f", b"a file")
    if not os.geteuid():
        theirs = leave(tmp_path)
        os.chown(theirs, 12345, 12345)
    before = snapshot(tmp_path)
    code = f"""
        import asyncio, os, signal
        import distributed, gpuspill
        async def main():
            async with distributed.Scheduler(port=0, dashboard_address=":0") as scheduler:
                worker = distributed.Worker(scheduler.address, local_directory={str(tmp_path)!r},
                    data=gpuspill.data(host_limit=1, spill_directory={str(tmp_path)!r}, device=None))
                async with worker:
                    worker.data["x"] = b"x" * 100_000
                    while not worker.data.manager.spilled_count:
                        await asyncio.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True)
        assert done.returncode == -9, done.stderr.decode()
    found = {name: status for name, status in snapshot(tmp_path).items() if name in before}
    assert found == before
    new = [path for path in tmp_path.iterdir() if path.name.startswith(PREFIX) and str(path) not in before]
    assert len(new) == 1  # the second start swept what the first one left
    assert stat.S_IMODE(new[0].stat().st_mode) == 0o700
    assert sweep_leftovers(tmp_path) == 1
    found = {name: status for name, status in snapshot(tmp_path).items() if name in before}
    assert found == before
    shutil.rmtree(tmp_path)
