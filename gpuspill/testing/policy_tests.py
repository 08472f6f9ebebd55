"""What every eviction policy has to pass.

To test a policy of your own, derive from :class:`PolicyTests` and say how it is made::

    class TestMyPolicy(PolicyTests):
        make = MyPolicy

The model is a set. It shares no code with the policies, and says nothing of their order: that is
for tests of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

__all__ = ["PolicyTests", "Value", "events"]


@dataclass
class Value:
    """A value of the table that a policy looks into. `turns` and `small` belong to gpuspill."""

    nbytes: int
    turns: int = 0
    small: bool = False


_ORDERS = st.none() | st.lists(st.integers(-3, 3), min_size=1, max_size=3).map(tuple)


def events() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Return a strategy for what may happen to a policy, in any order, to any of a few values."""
    value = st.integers(0, 11)
    known = st.fixed_dictionaries({name: st.booleans() for name in ("dead", "clean", "first")})
    event = st.one_of(
        st.tuples(st.just("insert"), value, _ORDERS, known),
        st.tuples(st.sampled_from(["discard", "touch", "dirty", "forget", "delete", "evict"]), value),
        st.tuples(st.just("grace"), st.integers(0, 4)),
    )
    return st.lists(event, max_size=60)


class PolicyTests:
    """Conformance: what a policy has to do. One test a promise; see ``EvictionPolicy``.

    Attributes
    ----------
    make
        Makes the policy from the table of values.
    """

    make: Callable[[Mapping[int, Value]], Any]

    @pytest.fixture
    def values(self) -> dict[int, Value]:
        """Twelve values of different sizes."""
        return {vid: Value(1000 * (vid % 5 + 1)) for vid in range(12)}

    @pytest.fixture
    def policy(self, values: dict[int, Value]) -> Any:
        """Return the policy, empty."""
        return type(self).make(values)

    def test_an_empty_policy_has_nothing_to_evict(self, policy: Any) -> None:
        """And is asked about values that it never had."""
        assert policy.first() is None
        assert len(policy) == 0
        assert list(policy) == []
        assert 0 not in policy
        assert policy.discard(0) is False

    def test_what_goes_first_stays_in_until_it_is_taken_out(self, policy: Any) -> None:
        """Asking changes nothing."""
        policy.insert(1)
        policy.insert(2)
        assert policy.first() == policy.first()
        assert len(policy) == 2
        assert policy.discard(policy.first()) is True
        assert len(policy) == 1

    @pytest.mark.parametrize("grace", [0, 2, 100])
    def test_each_value_leaves_once(self, policy: Any, values: dict[int, Value], grace: int) -> None:
        """Also those that the policy would rather keep: nothing else may be left."""
        policy.grace = grace
        for vid in values:
            policy.insert(vid, (vid,) if vid % 3 == 0 else None, dead=vid % 3 == 1, clean=vid % 2 == 0)
        assert sorted(_drain(policy)) == sorted(values)

    def test_a_value_that_is_forgotten_leaves_nothing_behind(self, policy: Any, values: dict[int, Value]) -> None:
        """Its number is never used again, so anything left behind would pile up."""
        for order in (None, (1,)):
            for vid in range(12, 400):
                values[vid] = Value(1)
                policy.insert(vid, order)
                policy.touch(vid)
                policy.forget(vid)
                del values[vid]
                assert vid not in policy
                policy.validate()
        assert policy.first() is None

    # Several classes derive from this one.
    @settings(
        deadline=None,
        max_examples=200,
        derandomize=True,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(happened=events())
    def test_any_order_of_events(self, happened: list[tuple[Any, ...]]) -> None:
        """It has the values that were put in and not taken out, and gives each."""
        values = {vid: Value(1000 * (vid % 5 + 1)) for vid in range(12)}
        policy = type(self).make(values)
        inside: dict[int, tuple[Any, bool]] = {}
        for event, argument, *more in happened:
            vid = policy.first() if event == "evict" else argument
            if event == "grace":
                policy.grace = argument
            elif vid is None or (event == "insert" and (vid in inside or vid not in values)):
                continue
            elif event == "insert":
                order, known = more
                policy.insert(vid, order, **known)
                inside[vid] = order, known["clean"]
            elif event in ("discard", "evict"):
                assert policy.discard(vid) is (vid in inside)
                inside.pop(vid, None)
            elif event in ("forget", "delete"):
                if vid in values:
                    policy.forget(vid)
                    inside.pop(vid, None)
                if event == "delete":
                    values.pop(vid, None)
            elif vid in inside and event == "touch":
                policy.touch(vid)
            elif vid in inside:
                policy.dirty(vid)
                inside[vid] = inside[vid][0], False
            assert len(policy) == len(inside)
            assert set(policy) == inside.keys()
            assert all((vid in policy) == (vid in inside) for vid in range(12))
            assert policy.first() in (inside or [None])
            policy.validate(lambda vid: inside[vid][1], lambda vid: inside[vid][0])
        assert sorted(_drain(policy)) == sorted(inside)


def _drain(policy: Any) -> Iterator[int]:
    while (vid := policy.first()) is not None:
        yield vid
        assert policy.discard(vid) is True
        assert vid not in policy
