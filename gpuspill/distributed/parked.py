"""The keys of parked values: which there are, and which are not needed any more."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuspill.manager.admission import Admission
from gpuspill.tier import Internal

__all__ = ["ParkedKey", "ParkedKeys"]


class ParkedKey(Internal):
    """Key of a value that a task has parked."""

    __slots__ = ()
    called = "parked value"


class ParkedKeys:
    """The keys of parked values. Its length is how many there are.

    Attributes
    ----------
    given_up
        Keys that are not needed any more, whose values were not deleted yet, and what pins those.

    Notes
    -----
    Thread-safe; takes no lock. A finaliser may let go of a parked value. It can only note that:
    the next caller deletes the value.
    """

    __slots__ = ("_keys", "_numbers", "given_up")

    def __init__(self) -> None:
        self._keys: set[Internal] = set()
        self._numbers = itertools.count(1)
        self.given_up: deque[tuple[Internal, Sequence[Admission]]] = deque()

    def new(self) -> Internal:
        """Return a new key."""
        key = ParkedKey(next(self._numbers))
        self._keys.add(key)
        return key

    def give_up(self, key: Internal, pins: Sequence[Admission] = ()) -> None:
        """Note that a key and its pins are not needed any more. From any thread, any time."""
        self.given_up.append((key, pins))

    def settle(self, delete: Callable[[Internal], object]) -> None:
        """Unpin each value that is not needed, call ``delete(key)``, and forget the key."""
        with suppress(IndexError):
            while True:
                key, pins = self.given_up.popleft()
                for pin in pins:
                    pin.release()
                delete(key)
                self._keys.discard(key)

    def __len__(self) -> int:
        return len(self._keys)
