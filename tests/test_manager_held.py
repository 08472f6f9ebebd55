"""Values that somebody outside refers to: evicting them would free nothing, and they have to stay what they are."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpuspill.core.residency import State, Tier
from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.manager.knots import knots
from gpuspill.testing.managers import ManagerKit
from tests.things import SHARED, VALUES, Thing, assert_same, fresh, squeeze


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


@pytest.mark.fault("held by user code", on="host→disk", outcome="stays; others go instead")
@pytest.mark.parametrize("kind", sorted(VALUES.keys() - SHARED))
def test_a_value_that_somebody_holds_stays(kind):
    kit = ManagerKit()
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
    kit = ManagerKit(serializer=DaskSerializer())
    kit.manager.store("a", np.arange(100.0).reshape(10, 10))
    kit.spill("a")
    for make_view in (lambda x: x[1:3], lambda x: x.T, lambda x: x.reshape(-1), lambda x: x[2:][::2]):
        kit.manager.limits.set_limit(None, None)
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
    kit.manager.limits.set_limit(100, None)
    kit.engine.spill_all()
    assert kit.manager.memory_total() == 100
    assert kit.manager.keys_in(Tier.HOST) == ["held"]


@pytest.mark.fault("held by user code", on="host→disk", outcome="stays; others go instead")
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


def outlast_patience(kit: ManagerKit, looks: int = 10) -> None:
    squeeze(kit)
    for _ in range(looks):
        kit.clock.advance(1)
        kit.engine.spill_all()


def outlast_all_patience(kit: ManagerKit) -> None:
    outlast_patience(kit, 25)


@pytest.mark.parametrize("kind", sorted(VALUES.keys() - SHARED))
def test_what_somebody_holds_is_charged_until_it_goes(kind):
    """Also if that lasts: writing it would free nothing."""
    kit = ManagerKit()
    value = fresh(kind)
    kit.manager.store("a", value, 100)
    outlast_all_patience(kit)
    assert kit.manager.is_resident("a")
    assert kit.manager.memory_total() == 100
    assert kit.store.statistics().writes == 0
    del value
    outlast_patience(kit)
    assert not kit.manager.is_resident("a")
    kit.close()


def test_an_array_that_holds_itself_is_evicted_in_the_end(kit):
    """The garbage collector is not told what is in it."""
    array = np.empty(2, object)
    array[0] = array
    kit.manager.store("a", array)
    del array
    outlast_all_patience(kit)
    assert not kit.manager.is_resident("a")
    found = kit.manager.get("a")
    assert found[0] is found
    found[0] = None


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


def test_an_evicted_value_that_is_alive_comes_back_as_itself(kit, unsure):
    value = Knot()
    kit.manager.store("a", value)
    outlast_all_patience(kit)
    assert not kit.manager.is_resident("a")
    reads = kit.store.statistics().reads
    assert kit.manager.get("a") is value
    assert kit.store.statistics().reads == reads
    kit.manager.validate()


@pytest.mark.parametrize("key", ["a", "b"])
def test_storing_an_evicted_value_that_is_alive_finds_it(kit, unsure, key):
    value = Knot()
    kit.manager.store("a", value)
    outlast_all_patience(kit)
    assert not kit.manager.is_resident("a")
    reads = kit.store.statistics().reads
    kit.manager.limits.set_limit(None, None)
    kit.manager.store(key, value)
    kit.manager.validate()
    assert kit.manager.get("a") is kit.manager.get(key) is value
    assert kit.manager.memory_total() == 100, "one value, charged once"
    kit.manager.validate()
    assert kit.store.statistics().reads == reads
    kit.manager.discard("a")
    kit.manager.validate()


def test_a_value_that_is_stored_again_is_in_memory_then(kit, unsure):
    """Also where there is no room, and the patience with whoever holds it was at its end."""
    value = Thing()
    kit.manager.store("a", value)
    outlast_all_patience(kit)
    assert not kit.manager.is_resident("a")
    assert kit.manager.get("a") is value
    for key in "bcd":
        kit.manager.store(key, value)
        assert kit.manager.peek(key) is value
        kit.clock.advance(1)
        kit.engine.spill_all()
    kit.manager.validate()


def test_the_memory_of_an_evicted_value_may_be_used_for_another(kit, unsure):
    """What is remembered of the identity of a value that has died is not taken for another one."""
    for n in range(8):
        value = Knot(n)
        kit.manager.store("a", value)
        outlast_all_patience(kit)
        del value
        gc.collect()
        fresh = Knot("fresh")
        kit.manager.limits.set_limit(None, None)
        kit.manager.store("b", fresh)
        assert kit.manager.get("b") is fresh
        assert kit.manager.get("a").content == n
        kit.manager.validate()
        del fresh
        kit.manager.discard("b")


def test_what_is_remembered_of_an_evicted_value_goes_with_it(kit, unsure):
    value = Knot()
    kit.manager.store("a", value)
    outlast_all_patience(kit)
    assert not kit.manager.is_resident("a")
    kit.manager.discard("a")
    kit.manager.limits.set_limit(None, None)
    kit.manager.store("b", value)
    assert kit.manager.get("b") is value
    assert kit.records() == 0
    assert not kit.manager._metadata.slots._ghosts


def test_what_cannot_be_weakly_referenced_is_never_evicted_while_it_is_held(kit):
    held = b"some bytes that somebody holds" * 10
    kit.manager.store("held", held)
    outlast_patience(kit)
    outlast_patience(kit)
    assert kit.manager.get("held") is held


class Slotted:
    """Cannot be weakly referenced."""

    __slots__ = ("content", "parts", "whole")

    def __init__(self, content: object, whole: Any = None) -> None:
        self.content, self.whole, self.parts = content, whole, []

    def __eq__(self, other: object) -> bool:
        return type(other) is Slotted and other.content == self.content

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Tree:
    content: int
    me: Any = None


def tree() -> Slotted:
    root = Slotted("root")
    root.parts = [Slotted(n, root) for n in range(3)]
    return root


def list_in_itself() -> list[Any]:
    knot: list[Any] = [1]
    knot.append({"deep": (knot,)})
    return knot


def dict_in_itself() -> dict[str, Any]:
    knot: dict[str, Any] = {}
    knot["me"] = [knot, knot]
    return knot


def data_in_itself() -> Tree:
    made = Tree(5)
    made.me = [made]
    return made


def by_a_function() -> Slotted:
    made = Slotted("function")
    made.whole = partial(content_of, made)
    return made


def content_of(made: Slotted) -> object:
    return made.content


LOOPS = [tree, list_in_itself, dict_in_itself, data_in_itself, by_a_function]


class TestLoopsWithoutWeakReferences:
    """Values that refer to themselves, of which nothing else can preserve the identity."""

    @pytest.mark.parametrize("make", LOOPS)
    def test_they_are_evicted(self, kit, make):
        kit.manager.store("a", make())
        squeeze(kit)
        assert kit.manager.is_resident("a"), "not at the first look"
        outlast_patience(kit)
        assert not kit.manager.is_resident("a")
        value = kit.manager.get("a")
        assert type(value) is type(make())
        kit.manager.validate()

    @pytest.mark.parametrize("make", LOOPS)
    def test_not_while_somebody_holds_them(self, kit, make):
        value = make()
        kit.manager.store("a", value)
        outlast_patience(kit)
        outlast_patience(kit)
        assert kit.manager.is_resident("a")
        assert kit.manager.get("a") is value
        del value
        outlast_patience(kit)
        assert not kit.manager.is_resident("a")

    def test_not_while_somebody_holds_a_part_that_leads_to_the_whole(self, kit):
        root = tree()
        part = root.parts[1]
        kit.manager.store("a", root)
        del root
        outlast_patience(kit)
        assert kit.manager.is_resident("a")
        assert part.whole is kit.manager.get("a")
        kit.manager.validate()

    def test_while_somebody_holds_a_part_that_does_not(self, kit):
        root = tree()
        leaf = [1]
        root.parts[0].content = leaf
        kit.manager.store("a", root)
        del root
        outlast_patience(kit)
        assert not kit.manager.is_resident("a")

    def test_taken_up_after_it_was_looked_into(self, kit):
        kit.manager.store("a", tree())
        squeeze(kit)
        kit.manager.limits.set_limit(None, None)
        held = kit.manager.get("a")
        outlast_patience(kit)
        assert kit.manager.get("a") is held

    def test_what_garbage_holds(self, kit):
        class Garbage:
            pass

        held = bytes(range(200))
        garbage = Garbage()
        garbage.me, garbage.held = garbage, held
        kit.manager.store("a", held)
        del garbage, held
        gc.disable()
        try:
            outlast_patience(kit)
        finally:
            gc.enable()
        assert not kit.manager.is_resident("a")

    def test_one_that_is_too_large_to_be_looked_into_goes_in_the_end(self, kit, monkeypatch):
        monkeypatch.setattr("gpuspill.manager.spill.knots", lambda value: knots(value, many=2))
        kit.manager.store("a", tree())
        outlast_patience(kit)
        assert kit.manager.is_resident("a")
        outlast_patience(kit)
        assert not kit.manager.is_resident("a")

    def test_one_after_another_goes_at_once(self, kit):
        """What was found of one is known of the type."""
        kit.manager.store("a", tree())
        outlast_patience(kit)
        kit.manager.limits.set_limit(None, None)
        for key in range(5):
            kit.manager.store(key, tree())
        squeeze(kit)
        kit.clock.advance(0.01)
        kit.engine.spill_all()
        assert not kit.manager.keys_in(Tier.HOST)

    def test_garbage_is_collected_when_much_of_it_was_evicted(self, kit):
        kit.manager.store("a", tree(), 2**27)
        gc.collect()
        gc.disable()
        try:
            outlast_patience(kit)
            assert not kit.manager.is_resident("a")
            assert not [item for item in gc.get_objects() if type(item) is Slotted]
        finally:
            gc.enable()


def test_looking_into_a_value_runs_none_of_its_code():
    class Asked:
        __slots__ = ("me",)

        def __getattribute__(self, name):
            raise AssertionError

        __hash__ = __eq__ = __len__ = __bool__ = __getattribute__

    value = object.__new__(Asked)
    object.__setattr__(value, "me", [value])
    assert knots(value).references == 1
