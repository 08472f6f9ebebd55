"""Parts of slabs, against a model that knows bytes only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gpuspill.core.slabs import Block, Slabs

SLAB, SMALLEST = 1024, 16


class SlabsMachine(RuleBasedStateMachine):
    """Every byte of every slab has one owner at most, and nothing is refused that would fit in one piece."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(SLAB, SMALLEST)
        self.numbers: set[int] = set()
        self.owners: dict[tuple[int, int], Block] = {}
        self.peak = 0

    @rule()
    def add(self) -> None:
        number = self.slabs.add()
        assert number not in self.numbers
        self.numbers.add(number)

    @rule(target=taken, nbytes=st.integers(1, 3 * SLAB))
    def take(self, nbytes: int) -> object:
        free = len(self.numbers) * SLAB - len(self.owners)
        blocks = self.slabs.take(nbytes)
        if blocks is None:
            assert free < len(self.numbers) * SLAB or sum(self.slabs.sizes(nbytes)) > free
            self.peak = max(self.peak, len(self.numbers) * SLAB)
            return multiple()
        assert [block.nbytes for block in blocks] == self.slabs.sizes(nbytes)
        self.peak = max(self.peak, len(self.owners) + sum(block.nbytes for block in blocks))
        for block in blocks:
            assert block.slab in self.numbers
            for byte in range(block.offset, block.offset + block.nbytes):
                assert (block.slab, byte) not in self.owners
                self.owners[block.slab, byte] = block
        return multiple(*blocks)

    @rule(block=consumes(taken))
    def give_back(self, block: Block) -> None:
        self.slabs.give_back(block)
        for byte in range(block.offset, block.offset + block.nbytes):
            assert self.owners.pop((block.slab, byte)) == block

    @rule(most=st.none() | st.integers(0, 3))
    def remove_idle(self, most: int | None) -> None:
        used = {slab for slab, _ in self.owners}
        idle = self.numbers - used
        gone = self.slabs.remove_idle(most)
        assert set(gone) <= idle
        # What is free is joined, however it was taken apart.
        assert len(gone) == len(idle) if most is None else len(gone) == min(most, len(idle))
        self.numbers -= set(gone)

    @rule()
    def look_what_was_unneeded(self) -> None:
        assert self.slabs.unneeded() == max(0, len(self.numbers) * SLAB - self.peak) // SLAB
        self.peak = len(self.owners)

    @invariant()
    def adds_up(self) -> None:
        self.slabs.validate()
        assert self.slabs.nbytes == len(self.numbers) * SLAB
        assert self.slabs.used_nbytes == len(self.owners)
        assert self.slabs.peak_nbytes == self.peak


TestSlabs = SlabsMachine.TestCase


@given(nbytes=st.integers(1, 10 * SLAB))
def test_at_most_an_eighth_is_lost(nbytes: int) -> None:
    sizes = Slabs(SLAB, SMALLEST).sizes(nbytes)
    assert sizes == sorted(sizes, reverse=True)
    assert all(SMALLEST <= size <= SLAB and not size & (size - 1) for size in sizes)
    assert nbytes <= sum(sizes) <= max(nbytes + nbytes // 8 + 1, -(-nbytes // SMALLEST) * SMALLEST)
    assert len(sizes) <= nbytes // SLAB + 5


def test_powers_of_two_are_one_block() -> None:
    slabs = Slabs(SLAB, SMALLEST)
    for bit in range(4, 11):
        assert slabs.sizes(1 << bit) == [1 << bit]


@pytest.mark.parametrize(("slab_nbytes", "smallest"), [(1000, 16), (1024, 0), (16, 32)])
def test_sizes_are_powers_of_two(slab_nbytes: int, smallest: int) -> None:
    with pytest.raises(ValueError, match=r"slab_nbytes|smallest"):
        Slabs(slab_nbytes, smallest)
