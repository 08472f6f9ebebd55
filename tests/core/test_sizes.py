"""What serialising teaches: sizes that were far off are corrected, for the value at hand and for those to come."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.core.sizes import SizeModel


def test_a_hidden_size_is_learned():
    model = SizeModel()
    assert model.estimate(list, 56) == 56
    assert model.learn(list, 56, 8_000_000) == 8_000_000
    assert model.estimate(list, 56) == 8_000_000
    assert model.estimate(dict, 56) == 56, "another type is another matter"


def test_about_right_teaches_nothing():
    model = SizeModel()
    for serialized in (0, 100, 50_000, 100_000, 140_000):
        assert model.learn(list, 100_000, serialized) is None
    assert model.learn(list, 1000, 1499) is None
    assert model.learn(list, 0, 4096) is None, "small values are never the problem"
    assert model.estimate(list, 1000) == 1000


def test_one_lie_is_forgiven_in_time():
    model = SizeModel()
    model.learn(list, 100, 1_000_000)
    for _ in range(40):
        assert model.learn(list, 10_000, 10_000) is None
    assert model.estimate(list, 10_000) <= 20_000


def test_one_that_hides_much_does_not_make_giants_of_the_others():
    model = SizeModel()
    model.learn(list, 56, 56_000_000)
    assert model.estimate(list, 10_000_000) <= 56_000_000


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from([int, str]), st.integers(0, 10**7), st.integers(0, 10**7)), max_size=20),
    st.integers(0, 10**9),
)
def test_estimates_stay_between_what_was_said_and_what_was_seen(observations, nbytes):
    model = SizeModel()
    largest = {int: 0, str: 0}
    for kind, said, serialized in observations:
        corrected = model.learn(kind, said, serialized)
        largest[kind] = max(largest[kind], serialized)
        assert corrected in (None, serialized)
        if corrected is not None:
            assert serialized > said
    for kind, seen in largest.items():
        assert nbytes <= model.estimate(kind, nbytes) <= max(nbytes, seen)
