"""Which arrays of one allocation are sent as one piece of memory."""

from hypothesis import given
from hypothesis import strategies as st

from gpuspill.device.port import Layout
from gpuspill.tier.overlaps import overlapping

layouts = st.builds(
    lambda offset, length, step, itemsize: Layout(
        offset + (length - 1) * -step if step < 0 < length else offset, (length,), (step,), "|u1", itemsize
    ),
    st.integers(0, 40),
    st.integers(0, 8),
    st.sampled_from([-9, -4, 0, 1, 2, 8]),
    st.sampled_from([1, 2, 8]),
)


def looks_at(layout):
    (length,), (step,) = layout.shape, layout.strides
    return {layout.offset + i * step + byte for i in range(length) for byte in range(layout.itemsize)}


@given(st.lists(layouts, max_size=6))
def test_what_shares_bytes_is_together_unless_most_of_it_is_gaps(found):
    groups = overlapping(enumerate(found))
    members = [number for _, _, numbers in groups for number in numbers]
    assert len(set(members)) == len(members)
    at = {number: place for place, (_, _, numbers) in enumerate(groups) for number in numbers}
    for low, high, numbers in groups:
        assert len(numbers) > 1
        spans = [found[number].span for number in numbers]
        assert (low, high) == (min(low for low, _ in spans), max(high for _, high in spans))
        taken = sum(min(found[number].nbytes, found[number].span[1] - found[number].span[0]) for number in numbers)
        assert high - low <= 2 * taken
    for one, first in enumerate(found):
        for other, second in enumerate(found[:one]):
            if looks_at(first) & looks_at(second):
                # Either both are in one group, or in none: then what they reach into has large gaps.
                assert at.get(one) == at.get(other)


def test_columns_of_a_wide_matrix_go_by_themselves():
    columns = [Layout(8 * column, (100,), (8000,), "<f8", 8) for column in range(3)]
    assert overlapping(enumerate(columns)) == []
    whole = Layout(0, (100, 1000), (8000, 8), "<f8", 8)
    assert [sorted(group) for _, _, group in overlapping(enumerate([*columns, whole]))] == [[0, 1, 2, 3]]
