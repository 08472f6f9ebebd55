"""What serialising teaches: sizes that were far off are corrected, for the value at hand and for those to come."""

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.core.sizes import SizeModel


class Model:
    """Of one kind."""


class Frame:
    """Of another."""


def test_a_hidden_size_is_learned():
    model = SizeModel()
    assert model.estimate(Model, 56) == 56
    assert model.learn(Model, 56, 8_000_000) == 8_000_000
    assert model.estimate(Model, 56) == 8_000_000
    assert model.estimate(Frame, 56) == 56, "another type is another matter"


@pytest.mark.parametrize("kind", [tuple, list, dict, set, frozenset])
def test_what_was_in_one_container_says_nothing_about_the_next(kind):
    model = SizeModel()
    assert model.learn(kind, 56, 8_000_000) == 8_000_000
    assert model.estimate(kind, 56) == 56


def test_about_right_teaches_nothing():
    model = SizeModel()
    for serialized in (0, 100, 50_000, 100_000, 140_000):
        assert model.learn(Model, 100_000, serialized) == 100_000
    assert model.learn(Model, 1000, 1499) == 1000
    assert model.learn(Model, 0, 4096) == 0, "small values are never the problem"
    assert model.estimate(Model, 1000) == 1000


def test_one_lie_is_forgiven_in_time():
    model = SizeModel()
    model.learn(Model, 100, 1_000_000)
    for _ in range(40):
        assert model.learn(Model, 10_000, 10_000) == 10_000
    assert model.estimate(Model, 10_000) <= 20_000


def test_one_that_hides_much_does_not_make_giants_of_the_others():
    model = SizeModel()
    model.learn(Model, 56, 56_000_000)
    assert model.estimate(Model, 10_000_000) <= 56_000_000


def test_types_are_not_kept_alive():
    model = SizeModel()
    kind = type("Made", (), {})
    model.learn(kind, 56, 8_000_000)
    made = weakref.ref(kind)
    del kind
    gc.collect()
    assert made() is None


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from([Model, Frame]), st.integers(0, 10**7), st.integers(0, 10**7)), max_size=20),
    st.integers(0, 10**9),
)
def test_estimates_stay_between_what_was_said_and_what_was_seen(observations, nbytes):
    model = SizeModel()
    largest = {Model: 0, Frame: 0}
    for kind, said, serialized in observations:
        right = model.learn(kind, said, serialized)
        largest[kind] = max(largest[kind], serialized)
        assert right in (said, serialized)
        assert right >= said
    for kind, seen in largest.items():
        assert nbytes <= model.estimate(kind, nbytes) <= max(nbytes, seen)
