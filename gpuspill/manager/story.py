"""What became of each value that left memory: it tells why one is lost, or was slow.

Only what touches a record is an event: a value that never leaves memory has no story, and costs
nothing here.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from gpuspill.manager.slots import Slot

__all__ = ["Event", "Happened", "Story"]

#: How many events are kept.
_EVENTS: Final = 4096
#: What a key of a user's is; others are gpuspill's own, and may keep memory alive.
_OF_USERS: Final = (str, bytes, int, float, tuple)
#: How many are shown with an error.
_SHOWN: Final = 12


class Happened(enum.StrEnum):
    """What may happen to a value."""

    STORED = "stored"
    WRITTEN = "written"
    NOT_WRITTEN = "not written"
    STALLED = "still being written"
    EVICTED = "evicted"
    READ = "read"
    NOT_READ = "not read"
    LOST = "lost"
    DELETED = "record deleted"


class Event(NamedTuple):
    """One event in the life of a value.

    Attributes
    ----------
    ago
        Seconds since then.
    key
        The key under which the value was stored first; None for memory that has no key of a user's.
    what
        What happened.
    tier
        Where: ``"device"``, ``"host"`` or ``"disk"``.
    nbytes
        Bytes of the record; of the value, where it was evicted or read.
    cause
        The error, where something failed; else empty.
    """

    ago: float
    key: Hashable
    what: str
    tier: str
    nbytes: int
    cause: str = ""

    def __str__(self) -> str:
        cause = self.cause and f": {self.cause}"
        return f"{self.ago:.3f} s ago {self.what} ({self.tier}, {self.nbytes:,} bytes){cause}"


class _Kept(NamedTuple):
    at: float
    pid: int
    key: Hashable
    what: Happened
    nbytes: int
    cause: str


class Story:
    """The last events of one manager.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    tiers
        The names of the tiers, from memory downwards.

    Notes
    -----
    All methods are to be called under the lock of the metadata. Nothing that is kept refers to a
    value.
    """

    def __init__(self, clock: Callable[[], float], tiers: tuple[str, str]) -> None:
        self._clock = clock
        self._memory, self._below = tiers
        self._events: deque[_Kept] = deque(maxlen=_EVENTS)

    def note(self, slot: Slot, what: Happened, nbytes: int, cause: BaseException | str | None = None) -> None:
        """Note an event of the value of a slot."""
        key = slot.key if isinstance(slot.key, _OF_USERS) else None
        if cause is not None and isinstance(cause, BaseException):
            cause = _shown(cause)
        self._events.append(_Kept(self._clock(), slot.pid, key, what, nbytes, cause or ""))

    def of(self, key: Hashable, pid: int | None = None) -> list[Event]:
        """Return what happened to values of a key, and to value `pid`, oldest first."""
        return [self._event(kept) for kept in self._events if kept.pid == pid or (key is not None and kept.key == key)]

    def told(self, pid: int | None = None) -> str:
        """Return the last events as text, for an error: those of one value, or of all."""
        found = [self._event(kept) for kept in self._events if pid is None or kept.pid == pid]
        lines = [f"  {event} {'' if pid is not None else repr(event.key)}".rstrip() for event in found[-_SHOWN:]]
        return "\n".join(["what happened before:", *lines]) if lines else ""

    def _event(self, kept: _Kept) -> Event:
        tier = self._memory if kept.what in (Happened.EVICTED, Happened.READ) else self._below
        return Event(self._clock() - kept.at, kept.key, str(kept.what), tier, kept.nbytes, kept.cause)


def _shown(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # of a value's type
        return type(error).__name__
