"""Which parts of large, equal pieces of memory (*slabs*) are free: by halves, as buddies.

A block has a power of two of bytes and lies at a multiple of them, so the other half of its parent,
its *buddy*, is found by one operation, and whenever both are free they are one again. What is asked
for is put together from a few blocks: whole slabs, and powers of two for the rest, so that at most
an eighth is lost.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

__all__ = ["Block", "Slabs"]


class Block(NamedTuple):
    """A part of a slab: which slab, the first byte there, and how many there are."""

    slab: int
    offset: int
    nbytes: int


class Slabs:
    """Decides who has which part of a slab.

    Parameters
    ----------
    slab_nbytes
        Bytes of each slab; a power of two.
    smallest
        Bytes of the smallest block; a power of two.

    Attributes
    ----------
    used_nbytes
        Bytes of blocks that are taken.
    peak_nbytes
        The most that they were since :meth:`unneeded` was asked; all there is, if that was not
        enough.

    Notes
    -----
    Not thread-safe. Each method takes time in proportion to the number of blocks that it returns or
    is given, times the number of sizes that there are; but :meth:`remove_idle` and
    :meth:`validate`.
    """

    def __init__(self, slab_nbytes: int, smallest: int) -> None:
        for name, nbytes in (("slab_nbytes", slab_nbytes), ("smallest", smallest)):
            if nbytes < 1 or nbytes & (nbytes - 1):
                raise ValueError(f"{name}: expected a power of two, found {nbytes}")
        if smallest > slab_nbytes:
            raise ValueError(f"smallest: {smallest} is more than a slab of {slab_nbytes}")
        self._slab_nbytes = slab_nbytes
        self._smallest = smallest
        self._numbers = 0
        self._slabs: set[int] = set()
        # By size; dictionaries, as sets that keep their order.
        self._free: dict[int, dict[tuple[int, int], None]] = {}
        nbytes = smallest
        while nbytes <= slab_nbytes:
            self._free[nbytes] = {}
            nbytes *= 2
        self.used_nbytes = self.peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return len(self._slabs) * self._slab_nbytes

    def add(self) -> int:
        """A slab more is there. Returns its number, which no other one had."""
        number = self._numbers
        self._numbers += 1
        self._slabs.add(number)
        self._free[self._slab_nbytes][number, 0] = None
        return number

    def unneeded(self) -> int:
        """Return how many slabs were not needed since the last call."""
        spare = max(0, self.nbytes - self.peak_nbytes) // self._slab_nbytes
        self.peak_nbytes = self.used_nbytes
        return spare

    def remove_idle(self, most: int | None = None) -> list[int]:
        """Forget slabs that are wholly free, at most so many; returns their numbers."""
        idle = self._free[self._slab_nbytes]
        gone = list(idle)[:most]
        for place in gone:
            del idle[place]
        numbers = [slab for slab, _ in gone]
        self._slabs.difference_update(numbers)
        return numbers

    def sizes(self, nbytes: int) -> list[int]:
        """Return the sizes of the blocks that make up so many bytes, largest first."""
        if self._smallest <= nbytes <= self._slab_nbytes and not nbytes & (nbytes - 1):
            return [nbytes]
        whole, rest = divmod(nbytes, self._slab_nbytes)
        step = max(self._smallest, 1 << max(0, (rest - 1).bit_length() - 4)) if rest else 1
        rest = -(-rest // step) * step
        parts = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
        return [self._slab_nbytes] * whole + parts

    def take(self, nbytes: int) -> list[Block] | None:
        """Take blocks for so many bytes, or none at all: None if there are not enough."""
        taken: list[Block] = []
        for size in self.sizes(nbytes):
            block = self._take(size)
            if block is None:
                for each in taken:
                    self.give_back(each)
                self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
                return None
            taken.append(block)
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return taken

    def _take(self, size: int) -> Block | None:
        found = size
        while found <= self._slab_nbytes and not self._free[found]:
            found *= 2
        if found > self._slab_nbytes:
            return None
        (slab, offset), _ = self._free[found].popitem()
        while found > size:  # the second half stays, and so does that of what is left
            found //= 2
            self._free[found][slab, offset + found] = None
        self.used_nbytes += size
        return Block(slab, offset, size)

    def give_back(self, block: Block) -> None:
        """A block that was taken is free again."""
        slab, offset, size = block
        self.used_nbytes -= size
        while size < self._slab_nbytes:
            buddy = slab, offset ^ size
            if buddy not in self._free[size]:
                break
            del self._free[size][buddy]
            offset = min(offset, buddy[1])
            size *= 2
        self._free[size][slab, offset] = None

    def validate(self) -> None:
        """Raise AssertionError unless free blocks are apart, joined where possible, and add up."""
        spans = sorted((slab, offset, size) for size, free in self._free.items() for slab, offset in free)
        for (slab, offset, size), (after, start, _) in pairwise(spans):
            assert slab != after or offset + size <= start, spans
        for slab, offset, size in spans:
            assert slab in self._slabs, slab
            assert offset % size == 0, (offset, size)
            assert offset + size <= self._slab_nbytes, (offset, size)
            assert size == self._slab_nbytes or (slab, offset ^ size) not in self._free[size], (slab, offset, size)
        assert sum(size for _, _, size in spans) + self.used_nbytes == self.nbytes
        assert self.used_nbytes <= self.peak_nbytes
