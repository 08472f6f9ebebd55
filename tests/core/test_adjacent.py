"""Which pieces are freed so that what is asked for fits in one place."""

from hypothesis import given
from hypothesis import strategies as st

from gpuspill.core.adjacent import Piece, cheapest_run

#: Pieces in the order of their addresses: bytes between this one and the one before, bytes, whether it is free already.
rows = st.lists(st.tuples(st.sampled_from([0, 256, 511, 512, 4096]), st.integers(1, 2000), st.booleans()), max_size=12)


@given(rows, st.integers(1, 6000), st.randoms(use_true_random=False))
def test_it_is_the_cheapest_run_that_is_long_enough(row, nbytes, random):
    pieces, address = [], 2**20
    for number, (gap, size, free) in enumerate(row):
        address += gap
        pieces.append(Piece(address, size, None if free else number))
        address += size
    costs = []
    for first in range(len(pieces)):
        for last in range(first, len(pieces)):
            run = pieces[first : last + 1]
            together = all(row[number][0] < 512 for number in range(first + 1, last + 1))
            if together and run[-1].address + run[-1].nbytes - run[0].address >= nbytes:
                costs.append(sum(piece.nbytes for piece in run if piece.occupant is not None))
    shuffled = random.sample(pieces, len(pieces))
    found = cheapest_run(shuffled, nbytes)
    assert sum(pieces[number].nbytes for number in found) == min(costs, default=0)
    assert found == sorted(found)
