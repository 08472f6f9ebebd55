"""Which kinds of values are asked for: counted, concluded from, forgotten."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspill.core.prospects import LEAST, MOST, ONE_IN, Prospects

events = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["entered", "wanted"])), max_size=200)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(events)
def test_against_the_whole_history(events):
    prospects = Prospects()
    for category, event in events:
        getattr(prospects, event)(category)
    for category in "abc":
        happened = [event for of, event in events if of == category]
        came = happened.count("entered")
        # Of a category of which nothing came, nothing can be asked for.
        first = happened.index("entered") if came else len(happened)
        asked = happened[first:].count("wanted")
        assert prospects.poor(category) == (came >= LEAST and asked / came < 1 / ONE_IN)


def test_no_category_is_none():
    prospects = Prospects()
    for _ in range(2 * LEAST):
        prospects.entered(None)
    prospects.wanted(None)
    assert not prospects.poor(None)


def test_what_was_long_ago_counts_less():
    prospects = Prospects()
    for _ in range(MOST - 1):
        prospects.entered("a")
    for _ in range(ONE_IN):
        prospects.entered("a")
        prospects.wanted("a")
    assert prospects.poor("a")
    for _ in range(MOST // 6):
        prospects.entered("a")
        prospects.wanted("a")
    assert not prospects.poor("a"), "with all that was before it would be fewer than one in eight"


def test_made_up_categories_do_not_pile_up():
    prospects = Prospects(capacity=10)
    for _ in range(LEAST):
        prospects.entered("real")
    assert prospects.poor("real")
    for number in range(10):
        prospects.entered(number)
    assert len(prospects._counts) <= 10
    assert not prospects.poor("real"), "forgotten"
