"""Several keys at once, and the end."""

import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from gpuspill.errors import ManagerClosed, StorageError
from gpuspill.testing.managers import ManagerKit
from tests.things import Thing


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


def test_get_many_is_done_already_when_everything_is_in_memory(kit):
    values = {key: Thing(key) for key in range(5)}
    for key, value in values.items():
        kit.manager.store(key, value)
    future = kit.manager.batch.get_many(values)
    assert future.done()
    assert future.result() == values
    assert kit.manager.batch.get_many([]).result(0) == {}
    assert kit.manager.batch.get_many(["unknown"], missing="omit").result(0) == {}


def test_get_many_reads_what_is_on_disk_and_lets_go_of_everything(kit):
    for key in range(5):
        kit.manager.store(key, Thing(key))
    kit.spill(0, 1, 2)
    future = kit.manager.batch.get_many(range(5))
    assert not future.done()
    assert kit.manager.statistics().pinned_nbytes == 500
    while kit.engine.restore():
        kit.manager.validate()
    assert future.result(0) == {key: Thing(key) for key in range(5)}
    stats = kit.manager.statistics()
    assert (stats.pinned_nbytes, stats.reserved_nbytes) == (0, 0)


def test_get_many_of_an_unknown_key(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    with pytest.raises(KeyError, match="'b'"):
        kit.manager.batch.get_many(["a", "b"])
    assert kit.manager.statistics().reserved_nbytes == 0
    future = kit.manager.batch.get_many(["a", "b"], missing="omit")
    kit.engine.restore()
    assert future.result(0) == {"a": Thing("a")}


def test_get_many_delivers_what_is_deleted_or_overwritten_meanwhile(kit):
    for key in "ab":
        kit.manager.store(key, Thing(key))
    kit.spill()
    future = kit.manager.batch.get_many("ab")
    kit.manager.discard("a")
    kit.manager.store("b", Thing("new"))
    kit.idle()
    assert future.result(0) == {"a": Thing("a"), "b": Thing("b")}
    future = None
    kit.manager.discard("b")
    assert kit.records() == kit.manager.memory_total() == 0


@pytest.mark.fault("cancelled meanwhile", on="disk→host", outcome="nothing pinned, nothing promised")
@pytest.mark.parametrize("when", ["waiting", "queued", "reading", "done"])
def test_cancelling_get_many_leaves_everything_in_order(when):
    kit = ManagerKit(1000)
    manager = kit.manager
    manager.store("a", Thing("a"))
    kit.spill("a")
    if when == "waiting":
        held = Thing("held")
        manager.store("in the way", held, 1000)
        manager.store("could go", Thing(), 500)
    future = manager.batch.get_many(["a"])
    if when == "waiting":
        assert manager.statistics().waiting == 1
    if when == "reading":
        kit.store.hook = lambda operation, at: future.cancel() if at == "before" else None
        kit.engine.restore()
    elif when == "done":
        kit.engine.restore()
        assert not future.cancel()
        assert future.result() == {"a": Thing("a")}
    else:
        assert future.cancel()
    if when != "done":
        with pytest.raises(CancelledError):
            future.result(0)
    manager.validate()
    kit.idle()
    stats = manager.statistics()
    assert (stats.pinned_nbytes, stats.reserved_nbytes, stats.waiting) == (0, 0, 0)
    assert manager.get("a") == Thing("a")
    kit.close()


def test_what_get_many_delivers_is_not_kept_alive(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    future = kit.manager.batch.get_many(["a"])
    kit.engine.restore()
    gone = weakref.ref(future.result()["a"])
    del future
    kit.spill("a")
    assert gone() is None


def test_the_error_of_a_missing_key_does_not_keep_what_was_found_before_it(kit):
    kit.manager.store("a", Thing("a"))
    gone = weakref.ref(kit.manager.get("a"))
    with pytest.raises(KeyError) as error:
        kit.manager.batch.get_many(["a", "unknown"])
    kit.manager.discard("a")
    assert gone() is None
    del error


def test_a_set_then_get_many_never_raises_and_a_delete_then_get_many_always_does(kit):
    for start in ("in memory", "on disk"):
        kit.manager.store("a", Thing(start))
        if start == "on disk":
            kit.spill("a")
        future = kit.manager.batch.get_many(["a"])
        kit.idle()
        assert future.result(0) == {"a": Thing(start)}
        kit.manager.discard("a")
        with pytest.raises(KeyError):
            kit.manager.batch.get_many(["a"])


def test_readers_of_one_value_share_one_read(kit):
    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    futures = [kit.manager.batch.get_many(["a"]) for _ in range(3)]
    assert kit.manager.uses.prefetch(["a"]) == 0, "it is on its way"
    while kit.engine.restore():
        pass
    values = [future.result(0)["a"] for future in futures]
    assert values[0] is values[1] is values[2]
    assert kit.store.statistics().reads == 1


def test_a_failed_read_is_reported_to_all_who_wait_and_can_be_repeated(kit):
    def hook(operation, when):
        raise StorageError(5, "broken")

    kit.manager.store("a", Thing("a"))
    kit.spill("a")
    futures = [kit.manager.batch.get_many(["a"]) for _ in range(3)]
    kit.store.hook = hook
    while kit.engine.restore():
        pass
    for future in futures:
        with pytest.raises(StorageError, match="broken"):
            future.result(0)
    kit.store.hook = lambda operation, when: None
    assert kit.manager.get("a") == Thing("a")


def test_after_closing(kit):
    manager = kit.manager
    manager.store("memory", Thing("memory"))
    manager.store("disk", Thing("disk"))
    kit.spill("disk")
    pending = manager.batch.get_many(["memory", "disk"])
    manager.close()
    manager.close()
    assert kit.records() == 0
    assert pending.done()
    with pytest.raises(ManagerClosed):
        pending.result()
    assert manager.get("memory") == Thing("memory")
    with pytest.raises(ManagerClosed):
        manager.get("disk")
    with pytest.raises(ManagerClosed):
        manager.batch.get_many(["disk"]).result(0)
    assert manager.uses.prefetch(["disk"]) == 0
    manager.store("new", Thing("new"))
    assert manager.get("new") == Thing("new")
    admission = manager.admission.admit("out", ["memory"], 10**9)
    assert admission.granted
    admission.release()
    for key in list(manager):
        manager.discard(key)
    assert manager.memory_total() == 0


def test_nothing_is_spilled_or_waited_for_after_closing(kit):
    kit.manager.store("a", Thing())
    kit.manager.close()
    kit.manager.limits.set_limit(1, None)
    assert kit.manager.admission.admit("out", (), 10**9).granted
    kit.manager.limits.evict_all()
    assert kit.manager.is_resident("a")
    assert kit.store.statistics().writes == 0


def test_everything_is_evicted_whatever_the_offset():
    kit = ManagerKit(100)
    kit.manager.limits.set_offset(-1000)
    kit.manager.store("a", Thing())
    kit.manager.limits.evict_all()
    assert not kit.manager.is_resident("a")
    assert kit.manager.limits.offset == -1000
    kit.close()


def test_closing_grants_what_waits():
    kit = ManagerKit(100)
    kit.manager.store("a", Thing())
    waits = kit.manager.admission.admit("out", (), 50)
    assert not waits.granted
    kit.manager.close()
    assert waits.granted
    assert waits.wait(0)
    waits.release()


def test_a_closed_manager_lets_its_values_go(kit):
    value = Thing()
    gone = weakref.ref(value)
    other = ManagerKit()
    other.manager.store("a", value)
    del value
    other.close()
    del other
    assert gone() is None
