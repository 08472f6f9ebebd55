"""What became of a value that left memory: asked for by key, and told with an error."""

from __future__ import annotations

import pickle
import weakref

import pytest

from gpuspill import DataLostError
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.errors import StorageError
from gpuspill.manager import story
from gpuspill.manager.story import Event
from gpuspill.simulated.arrays.creation import ones
from gpuspill.testing.managers import ManagerKit, bench
from gpuspill.testing.values import Plain


def happened(kit: ManagerKit, key: object) -> list[tuple[str, str]]:
    return [(event.what, event.tier) for event in kit.manager.story(key)]


def test_what_never_leaves_memory_has_no_story():
    with bench() as kit:
        manager = kit.manager
        for key in "abc":
            manager.store(key, Plain(key), 100)
            manager.get(key)
            manager.admission.admit("out", [key], 10).release()
            manager.store(key, Plain("new"), 100)
        manager.discard("a")
        kit.idle()
        assert manager.story("a") == manager.story("b") == []
        assert not manager._metadata.story._events


def test_the_life_of_a_value():
    with bench() as kit:
        manager = kit.manager
        manager.store("a", Plain("a"), 100)
        kit.spill("a")
        kit.clock.advance(2.0)
        manager.get("a")
        kit.spill("a")
        assert manager.story("a")[0].ago == 2.0
        assert [event.nbytes for event in manager.story("a")][1:] == [100, 100, 100]
        manager.discard("a")
        life = [("written", "disk"), ("evicted", "host"), ("read", "host"), ("evicted", "host")]
        assert happened(kit, "a") == [*life, ("record deleted", "disk")]
        # Of the next value of the key it is the history.
        manager.store("a", Plain("new"), 100)
        kit.spill("a")
        assert [what for what, _ in happened(kit, "a")][-3:] == ["record deleted", "written", "evicted"]
        assert manager.story("unknown") == []


def test_a_value_that_has_several_keys_has_one_story():
    with bench() as kit:
        value = Plain("a")
        kit.manager.store("a", value, 100)
        kit.manager.store("b", value, 100)
        del value
        kit.spill()
        assert kit.manager.story("a") == kit.manager.story("b") != []


def test_what_failed_says_why():
    with bench() as kit:

        def refuse(operation: str, when: str) -> None:
            if operation == "write" and when == "before":
                raise StorageError("no such luck")

        kit.store.hook = refuse
        kit.manager.store("a", Plain("a"), 100)
        kit.manager.limits.set_limit(0, None)
        kit.engine.spill_all()
        (event,) = kit.manager.story("a")
        assert (event.what, event.cause) == ("not written", "StorageError: no such luck")
        assert str(event) == "0.000 s ago not written (disk, 100 bytes): StorageError: no such luck"
        assert pickle.loads(pickle.dumps(event)) == event


READS = {
    "get": lambda manager: manager.get("a"),
    "get again": lambda manager: get_again(manager),
    "get_many": lambda manager: manager.batch.get_many(["a"]).result(0),
    "materialize": lambda manager: manager.batch.materialize(manager.admission.admit(None, ["a"])),
    "export": lambda manager: manager.batch.export(manager.admission.pin(["a"])).result(0),
    "fetch": lambda manager: manager.batch.fetch("a"),
    "in the middle of a change": lambda manager: in_the_middle(manager),
}


def get_again(manager) -> None:
    with pytest.raises(DataLostError):
        manager.get("a")
    manager.get("a")


def in_the_middle(manager) -> None:
    with manager._metadata:
        manager.get("a")


@pytest.mark.parametrize("read", READS)
def test_the_error_of_a_lost_value_tells_its_story(read):
    kit = ManagerKit()
    kit.manager.store("a", Plain("a"), 100)
    kit.manager.store("other", Plain("other"), 100)
    kit.spill()
    kit.store.damaged.add(kit.manager.slots[kit.manager.proxy("a").pid].receipt)
    if read in ("get_many", "export"):
        kit.engine.submit = lambda work, urgency=0: [work()]
    with pytest.raises(DataLostError) as caught:
        READS[read](kit.manager)
    (note,) = caught.value.__notes__
    first, *lines = note.splitlines()
    assert first == "what happened before:"
    assert [line.split(" ago ")[1].split(" (")[0] for line in lines][:2] == ["written", "evicted"]
    assert "other" not in note
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.__notes__) == (str(caught.value), [note])


def test_events_are_bounded_and_keep_nothing_alive(monkeypatch):
    monkeypatch.setattr(story, "_EVENTS", 10)

    class Own:
        """As a key of gpuspill's own."""

    with bench() as kit:
        key = Own()
        kit.manager.store(key, Plain("own"), 100)
        kit.spill(key)
        assert [event.key for event in kit.manager.story(key)] == [None, None]
        gone = weakref.ref(key)
        kit.manager.discard(key)
        kit.idle()
        del key
        assert gone() is None
        for n in range(20):
            kit.manager.store(n, Plain(n), 100)
        kit.spill()
        assert len(kit.manager._metadata.story._events) == 10
        assert kit.manager.story(0) == []
        assert [event.what for event in kit.manager.story(19)] == ["written", "evicted"]


def test_tables_that_contradict_each_other_come_with_the_last_events():
    kit = ManagerKit()
    kit.manager.store("a", Plain("a"), 100)
    kit.spill("a")
    kit.manager._metadata.state.memory.used += 1
    with pytest.raises(AssertionError) as caught:
        kit.manager.validate()
    (note,) = caught.value.__notes__
    assert note.splitlines()[0] == "what happened before:"
    assert note.endswith("evicted (host, 100 bytes) 'a'")


def test_what_a_value_has_on_a_device_has_a_story_too(tmp_path):
    store = build_store(Settings.load(device="simulated"), str(tmp_path))
    try:
        assert store.tier is not None
        store["x"] = ones(1000)
        assert store.story("x") == []
        store.tier.manager.limits.evict_all()
        assert [(event.what, event.tier) for event in store.story("x")] == [("written", "host"), ("evicted", "device")]
        assert all(isinstance(event, Event) and event.key is None for event in store.story("x"))
        assert float(store["x"].sum()) == 1000
        assert [event.what for event in store.story("x")][2] == "read"
    finally:
        store.close()
