"""How much may be read ahead of its use: learned from what became of what was.

A value that is brought into memory early and has to leave again before anybody used it was read for
nothing. Tasks whose own memory comes and goes, such as those of a shuffle, let the room for values
shrink again and again, and what is needed last leaves first: that is what was read ahead. Nothing
tells so beforehand, so the share of the room that may be taken by it is halved whenever that
happens, and grows again as values that were read ahead are used, and as others have to be read
while a task waits for them.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ReadAhead"]

#: The largest share of the room for values, with which it begins.
MOST = 1 / 3
#: The smallest: from here some twenty reads lead back to a share in which a value fits.
LEAST = 1 / 64
#: Down to this share one value at a time may be read ahead, however large it is.
ONE_DOWN_TO = MOST / 4
#: By how much the share grows with each value that was, or should have been, read ahead.
GROWTH = 1.1


class ReadAhead:
    """The values that were read ahead and not used yet. Not thread-safe; everything is O(1).

    Attributes
    ----------
    nbytes
        Bytes of them in memory, or on their way.
    share
        Of the room for values, that they may take.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.nbytes = 0
        self.share = MOST

    def allows(self, nbytes: int, room: int | None) -> bool:
        """Whether `nbytes` may be read ahead where values may take `room` bytes; None for any."""
        if room is None or self.nbytes + nbytes <= room * self.share:
            return True
        return not self._sizes and self.share >= ONE_DOWN_TO

    def begin(self, pid: int, nbytes: int) -> None:
        """A value is being read ahead."""
        self._sizes[pid] = nbytes
        self.nbytes += nbytes

    def used(self, pid: int) -> None:
        """A caller has the value, or waits for it."""
        if self._sizes and self.gone(pid):
            self._grow()

    def missed(self) -> None:
        """A value has to be read while a caller waits for it."""
        self._grow()

    def evicted(self, pid: int) -> None:
        """A value leaves memory."""
        if self._sizes and self.gone(pid):
            self.share = max(LEAST, self.share / 2)

    def gone(self, pid: int) -> bool:
        """Forget a value, for whatever reason; return whether it was read ahead and not used."""
        nbytes = self._sizes.pop(pid, None)
        if nbytes is None:
            return False
        self.nbytes -= nbytes
        return True

    def _grow(self) -> None:
        self.share = min(MOST, self.share * GROWTH)

    def validate(self, charged: Callable[[int], bool]) -> None:
        """Raise AssertionError unless all values are in memory or arriving, and bytes add up."""
        assert self.nbytes == sum(self._sizes.values()), self.nbytes
        assert all(map(charged, self._sizes)), self._sizes
