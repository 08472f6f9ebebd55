"""Values that somebody outside refers to: evicting them would free nothing, and they have to stay what they are."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpuspill.core.residency import State, Tier
from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.testing.managers import Bench
from tests.things import SHARED, VALUES, Thing, assert_same, fresh, squeeze


@pytest.fixture
def kit() -> Iterator[Bench]:
    kit = Bench()
    yield kit
    kit.close()


@pytest.mark.parametrize("kind", sorted(VALUES.keys() - SHARED))
def test_a_value_that_somebody_holds_stays(kind):
    kit = Bench()
    value = fresh(kind)
    kit.manager.store("a", value, 100)
    pause = squeeze(kit)
    assert 0 < pause < float("inf"), "it has to be looked at again"
    assert kit.manager.is_resident("a")
    assert kit.manager.get("a") is value
    assert kit.records() == 0
    del value
    assert kit.engine.spill_all() <= pause, "before its time, nothing happens"
    assert kit.manager.is_resident("a")
    kit.clock.advance(pause)
    kit.engine.spill_all()
    assert not kit.manager.is_resident("a")
    assert_same(kit.manager.get("a"), VALUES[kind])
    kit.close()


def test_a_view_holds_what_it_views(kit):
    array = np.arange(100.0)
    kit.manager.store("a", array)
    view = array[10:20]
    del array
    squeeze(kit)
    assert kit.manager.is_resident("a")
    del view
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert not kit.manager.is_resident("a")


def test_a_view_of_a_restored_array_holds_it():
    """As workers restore them. What pickle rebuilds is a view itself, of which numpy's views do not know."""
    kit = Bench(serializer=DaskSerializer())
    kit.manager.store("a", np.arange(100.0).reshape(10, 10))
    kit.spill("a")
    for make_view in (lambda x: x[1:3], lambda x: x.T, lambda x: x.reshape(-1), lambda x: x[2:][::2]):
        kit.manager.set_limit(None, None)
        view = make_view(kit.manager.get("a"))
        squeeze(kit)
        assert kit.manager.is_resident("a")
        del view
        kit.clock.advance(1)
        kit.engine.spill_all()
        assert not kit.manager.is_resident("a")
    kit.close()


def test_a_container_outside_holds_what_is_in_it(kit):
    kit.manager.store("a", [1, 2])
    outside = {"deep": [kit.manager.get("a")]}
    squeeze(kit)
    assert kit.manager.is_resident("a")
    outside.clear()
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert not kit.manager.is_resident("a")


def test_one_that_is_held_stops_nobody(kit):
    held = Thing("held")
    kit.manager.store("held", held)
    for key in range(10):
        kit.manager.store(key, Thing(key))
    kit.manager.set_limit(100, None)
    kit.engine.spill_all()
    assert kit.manager.memory_total() == 100
    assert kit.manager.keys_in(Tier.HOST) == ["held"]


def test_held_while_it_is_written(kit):
    """Somebody takes it up in the middle of the write: it stays, and the record is a clean copy."""
    taken = []

    def hook(operation, when):
        if (operation, when) == ("write", "before"):
            taken.append(kit.manager.get("a"))

    kit.manager.store("a", Thing("a"))
    kit.store.hook = hook
    squeeze(kit)
    assert kit.state("a") is State.CLEAN
    assert kit.manager.get("a") is taken[0]
    taken.clear()
    kit.clock.advance(1)
    kit.engine.spill_all()
    assert kit.state("a") is State.SPILLED
    assert kit.manager.statistics().spills == 1, "evicting it again is no write"


class Knot(Thing):
    """Refers to itself."""

    def __init__(self, content: object = 0) -> None:
        super().__init__(content)
        self.me = self


def outlast_patience(kit: Bench) -> None:
    squeeze(kit)
    for _ in range(10):
        kit.clock.advance(1)
        kit.engine.spill_all()


def test_a_value_that_refers_to_itself_is_evicted_in_the_end(kit):
    kit.manager.store("a", Knot("a"))
    squeeze(kit)
    assert kit.manager.is_resident("a")
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    gc.collect()
    value = kit.manager.get("a")
    assert value.content == "a"
    assert value.me is value
    del value
    outlast_patience(kit)


def test_an_evicted_value_that_is_alive_comes_back_as_itself(kit):
    value = Knot()
    kit.manager.store("a", value)
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    reads = kit.store.statistics().reads
    assert kit.manager.get("a") is value
    assert kit.store.statistics().reads == reads
    kit.manager.validate()


@pytest.mark.parametrize("key", ["a", "b"])
def test_storing_an_evicted_value_that_is_alive_finds_it(kit, key):
    value = Knot()
    kit.manager.store("a", value)
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    reads = kit.store.statistics().reads
    kit.manager.set_limit(None, None)
    kit.manager.store(key, value)
    kit.manager.validate()
    assert kit.manager.get("a") is kit.manager.get(key) is value
    assert kit.manager.memory_total() == 100, "one value, charged once"
    kit.manager.validate()
    assert kit.store.statistics().reads == reads
    kit.manager.discard("a")
    kit.manager.validate()


def test_a_value_that_is_stored_again_is_in_memory_then(kit):
    """Also where there is no room, and the patience with whoever holds it was at its end."""
    value = Thing()
    kit.manager.store("a", value)
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    assert kit.manager.get("a") is value
    for key in "bcd":
        kit.manager.store(key, value)
        assert kit.manager.peek(key) is value
        kit.clock.advance(1)
        kit.engine.spill_all()
    kit.manager.validate()


def test_the_memory_of_an_evicted_value_may_be_used_for_another(kit):
    """What is remembered of the identity of a value that has died is not taken for another one."""
    for n in range(8):
        value = Knot(n)
        kit.manager.store("a", value)
        outlast_patience(kit)
        del value
        gc.collect()
        fresh = Knot("fresh")
        kit.manager.set_limit(None, None)
        kit.manager.store("b", fresh)
        assert kit.manager.get("b") is fresh
        assert kit.manager.get("a").content == n
        kit.manager.validate()
        del fresh
        kit.manager.discard("b")


def test_what_is_remembered_of_an_evicted_value_goes_with_it(kit):
    value = Knot()
    kit.manager.store("a", value)
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    kit.manager.discard("a")
    kit.manager.set_limit(None, None)
    kit.manager.store("b", value)
    assert kit.manager.get("b") is value
    assert kit.records() == 0
    assert not kit.manager._metadata.slots._ghosts


def test_what_cannot_be_weakly_referenced_is_never_evicted_while_it_is_held(kit):
    knot: list[Any] = [1]
    knot.append(knot)
    kit.manager.store("knot", knot)
    held = b"some bytes that somebody holds" * 10
    kit.manager.store("held", held)
    del knot
    outlast_patience(kit)
    assert kit.manager.get("held") is held
    assert kit.manager.is_resident("knot"), "nobody can tell whether somebody holds it"
    kit.manager.get("knot").clear()
