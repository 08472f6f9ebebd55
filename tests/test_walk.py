"""Replacing what is inside of a value."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspill.walk import kinds, replace


class Thing:
    def __init__(self, name=0):
        self.name = name


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: object
    two: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    one: object
    two: object = None


@dataclasses.dataclass
class Late:
    one: object
    two: object = dataclasses.field(init=False, repr=False)


Pair = namedtuple("Pair", "left right")


class Tagged(list):
    pass


class Labelled(tuple):
    pass


def swap(item):
    return ("was", item) if isinstance(item, Thing) else item


@pytest.mark.parametrize(
    "value", [None, 5, "text", [1, 2], (), {"a": [1.0]}, {1, 2}, object(), Frozen(1, (2,)), [[[]]], {"x": {Thing()}}]
)
def test_without_anything_to_replace_it_is_the_value_itself(value):
    assert replace(value, swap) is value


@pytest.mark.parametrize("kind", [dict, list, tuple, Pair, Frozen])
def test_what_only_claims_to_be_a_container_is_left_alone(kind):
    claims = Mock(spec=kind)
    assert isinstance(claims, kind)
    assert replace(claims, swap) is claims
    assert replace([claims, Thing()], swap)[0] is claims


def test_a_thing_alone():
    thing = Thing()
    assert replace(thing, swap) == ("was", thing)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [1, x],
        lambda x: (x, 2),
        lambda x: Pair(x, 1),
        lambda x: {"a": x, "b": 1},
        lambda x: OrderedDict([("z", 1), ("a", x), ("m", 2)]),
        lambda x: defaultdict(list, {"a": x}),
        lambda x: Frozen(x, 1),
        lambda x: Slotted(1, x),
        lambda x: Late(x),
        lambda x: Tagged([x, 1]),
        lambda x: Labelled((x, 1)),
        lambda x: [{"deep": (Frozen([x]), 1)}],
    ],
)
def test_containers_keep_their_type_and_the_rest_of_their_parts(make):
    thing = Thing()
    value, before = make(thing), make(thing)
    result = replace(value, swap)
    assert result is not value
    assert type(result) is type(value)
    assert repr(result) == repr(make(("was", thing)))
    assert repr(value) == repr(before)  # untouched
    assert repr(replace(result, lambda item: item)) == repr(result)


def test_attributes_and_factories_stay():
    tagged, labelled = Tagged([Thing()]), Labelled((Thing(),))
    tagged.tag, labelled.tag = "t", "l"
    assert replace(tagged, swap).tag == "t"
    assert replace(labelled, swap).tag == "l"
    assert replace(defaultdict(list, {"a": Thing()}), swap).default_factory is list
    assert list(replace(OrderedDict([("z", Thing()), ("a", 1)]), swap)) == ["z", "a"]


def test_what_is_shared_stays_shared_and_is_replaced_once():
    thing, calls = Thing(), []

    def count(item):
        calls.append(item)
        return swap(item)

    shared = [thing]
    result = replace({"a": shared, "b": (shared, thing)}, count)
    assert calls == [thing]
    assert result["a"] is result["b"][0]
    assert result["a"][0] is result["b"][1]


def test_untouched_parts_are_the_same_objects():
    large = [1, 2, 3]
    result = replace([large, Thing()], swap)
    assert result[0] is large


def test_values_that_contain_themselves():
    thing = Thing()
    loop = [thing]
    loop.append(loop)
    result = replace(loop, swap)
    assert result[0] == ("was", thing)
    assert result[1] is result

    inner = []
    outer = (inner, thing)
    inner.append(outer)
    result = replace(outer, swap)
    assert result[0][0] is result
    assert result[1] == ("was", thing)

    empty = []
    empty.append(empty)
    assert replace(empty, swap) is empty


def test_depth_does_not_matter():
    thing = Thing()
    for wrap in (lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: Frozen(x)):
        value = thing
        for _ in range(5000):
            value = wrap(value)
        result = replace(value, swap)
        for _ in range(5000):
            result = getattr(result, "one", None) if isinstance(result, Frozen) else next(iter(values(result)))
        assert result == ("was", thing)


def values(container):
    return container.values() if isinstance(container, dict) else container


def test_what_cannot_be_copied_says_so():
    class Unique(list):
        def __copy__(self):
            return self

    with pytest.raises(TypeError, match="Unique"):
        replace(Unique([Thing()]), swap)


things = st.builds(Thing, st.integers())
trees = st.recursive(
    st.one_of(st.integers(), st.text(max_size=2), things),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(0, 5), inner, max_size=3),
        st.builds(Frozen, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


def model(value):
    """The same by recursion, knowing nothing of sharing."""
    if isinstance(value, Thing):
        return ("was", value)
    if isinstance(value, Pair):
        return Pair(*map(model, value))
    if isinstance(value, list | tuple):
        return type(value)(map(model, value))
    if isinstance(value, dict):
        return {key: model(item) for key, item in value.items()}
    if isinstance(value, Frozen):
        return Frozen(model(value.one), model(value.two))
    return value


@given(trees)
def test_any_tree(tree):
    result = replace(tree, swap)
    assert result == model(tree)
    assert type(result) is type(model(tree))
    back = replace(result, lambda item: item)
    assert back is result


# -- types only -------------------------------------------------------------------------------------


def offered(value):
    """The types of what is offered when it is looked at one by one."""
    found = []
    replace(value, lambda item: (found.append(type(item)), item)[1])
    return {id(cls): cls for cls in found}


@given(trees)
def test_kinds_are_the_types_of_what_is_offered(tree):
    assert kinds(tree) == offered(tree)


def test_kinds_of_odd_values():
    loop = [Thing()]
    loop += [loop, (loop, {"loop": loop})]
    late = Late(Thing())
    for value in (
        5,
        Thing(),
        loop,
        [late],
        Mock(spec=list),
        [{1}, Tagged([2.5, Slotted(Thing())])],
        OrderedDict(a=object()),
    ):
        assert kinds(value) == offered(value)


def test_what_is_shared_is_looked_into_once():
    """Thirty levels, each twice the one below: a thousand million paths."""
    value = [Thing()]
    for _ in range(30):
        value = [value, value]
    assert kinds(value) == {id(Thing): Thing}


def test_kinds_of_what_is_deep():
    value = Thing()
    for _ in range(5000):
        value = [({"k": value},)]
    assert kinds(value) == {id(Thing): Thing}


def test_what_is_boring_is_not_offered():
    asked = []
    replace([Thing(), {1, 2}, [frozenset()]], lambda item: (asked.append(type(item)), item)[1], {id(set)})
    assert asked == [Thing, frozenset]
    assert replace({1}, lambda item: pytest.fail("asked"), {id(set)}) == {1}
