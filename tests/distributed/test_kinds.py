"""A spilled value is the value: every kind of value, alone and in containers, with stock beside it."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import kinds_table
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.testing.kinds import CORE, MORE, Color, Data, Plain, Point
from gpuspill.testing.same import difference

KINDS = [pytest.param(make, id=f"{library}: {name}") for library, kinds in CORE.items() for name, make in kinds.items()]


@pytest.fixture
def store(tmp_path: Any) -> Any:
    store = build_store(Settings(), str(tmp_path))
    yield store
    store.manager.validate()
    store.close()


@pytest.mark.parametrize("make", KINDS)
def test_a_spilled_value_is_the_value(store: Any, make: Any) -> None:
    assert difference(kinds_table.by_gpuspill(make()), make()) is None
    store["x"] = make()
    store.manager.limits.evict_all()
    assert difference(store["x"], make()) is None


@pytest.mark.leaking("descriptors", reason="libraries keep databases of theirs open")
@pytest.mark.parametrize("library", MORE)
def test_of_other_libraries(library: str) -> None:
    pytest.importorskip(library)
    for name, make in MORE[library]().items():
        assert difference(kinds_table.by_gpuspill(make()), make()) is None, name


def test_most_kinds_go_to_disk(store: Any) -> None:
    """So that the test above is one of spilling."""
    for library, kinds in CORE.items():
        for name, make in kinds.items():
            store[library, name] = make()
    store.manager.limits.evict_all()
    statistics = store.statistics()
    assert statistics.unspillable == 0
    assert len(store.disk) >= 0.9 * len(store)


def test_the_table_in_the_documentation() -> None:
    page = kinds_table.PAGE.read_text()
    if kinds_table.HEAD[0] not in page:
        pytest.skip("the page says what another release of distributed does")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kinds_table.replaced(page) == page, "run ci/kinds_table.py --write"


# -- containers --------------------------------------------------------------------------------------

LEAVES = [make for kinds in CORE.values() for make in kinds.values()]
#: How to make a container of some parts.
CONTAINERS: list[Any] = [
    list,
    tuple,
    lambda parts: dict(enumerate(parts)),
    lambda parts: {Color.RED: parts},
    lambda parts: {Point(n, n): part for n, part in enumerate(parts)},
    lambda parts: Point(parts, len(parts)),
    lambda parts: Data(parts),
    lambda parts: Plain(parts=parts),
    lambda parts: collections.OrderedDict((str(n), part) for n, part in enumerate(parts)),
    lambda parts: collections.deque(parts),
    lambda parts: _objects(parts),
]


def _objects(parts: list[Any]) -> Any:
    made = np.empty(len(parts), dtype=object)
    for place, part in enumerate(parts):
        made[place] = part
    return made


#: A plan: a number of LEAVES, a container of plans, or something that was made before.
PLANS = st.recursive(
    st.integers(0, len(LEAVES) - 1),
    lambda inner: st.tuples(st.integers(0, len(CONTAINERS) - 1), st.lists(inner | st.just("again"), max_size=4)),
    max_leaves=8,
)


def build(plan: Any, made: list[Any]) -> Any:
    if plan == "again":
        return made[0] if made else None
    if isinstance(plan, int):
        value = LEAVES[plan]()
    else:
        number, parts = plan
        value = CONTAINERS[number]([build(part, made) for part in parts])
    made.append(value)
    return value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
@example((0, [3, "again", (3, ["again", 40]), "again"]))
def test_containers_of_all_kinds(plan: Any) -> None:
    assert difference(kinds_table.by_gpuspill(build(plan, [])), build(plan, [])) is None


class TestTheComparison:
    """That tells the same from what is not."""

    @pytest.mark.parametrize("make", KINDS)
    def test_a_new_one_is_the_same(self, make: Any) -> None:
        assert difference(make(), make()) is None

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (1, True),
            ((1, 2), Point(1, 2)),
            ([1], [2]),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            (np.arange(3.0), np.arange(3)),
            (np.arange(3), np.arange(1, 4)),
            (np.zeros((3, 4)), np.asfortranarray(np.zeros((3, 4)))),
            (np.rec.fromarrays([[1]], names="a").view(np.ndarray), np.rec.fromarrays([[1]], names="a")),
            (CORE["NumPy"]["masked array"](), CORE["NumPy"]["masked array, hard mask"]()),
            (CORE["NumPy"]["masked array"](), CORE["NumPy"]["masked array, fill value"]()),
            (CORE["NumPy"]["array"](), CORE["NumPy"]["array, read-only"]()),
            (
                CORE["NumPy"]["array"]().view(type(CORE["NumPy"]["ndarray subclass"]())),
                CORE["NumPy"]["ndarray subclass"](),
            ),
            (CORE["pandas"]["DataFrame"](), CORE["pandas"]["DataFrame, attrs"]()),
            (CORE["pyarrow"]["Table"](), CORE["pyarrow"]["Table, metadata"]()),
            (ValueError(1), ValueError(2)),
            (Data(1), Data(2)),
            (Plain(a=1), Plain(b=1)),
        ],
    )
    def test_others_differ(self, value: Any, expected: Any) -> None:
        assert difference(value, expected) is not None
        assert difference(expected, value) is not None

    def test_sharing_counts(self) -> None:
        one: list[Any] = []
        assert difference([one, one], [[], []]) is not None
        assert difference([[], []], [one, one]) is not None
