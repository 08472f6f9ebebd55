"""A clock that stands still until a test moves it."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Give it wherever a ``clock`` is taken: calling it returns the time.

    Parameters
    ----------
    now
        The time it starts at, in seconds.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"time does not go back, got {seconds} seconds")
        self._now += seconds
