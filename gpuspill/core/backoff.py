"""How long to wait before something that did not work is tried again."""

from __future__ import annotations

__all__ = ["Backoff"]


class Backoff:
    """A wait that doubles each time it was in vain.

    Parameters
    ----------
    first, most
        Seconds: the first wait, and the longest.

    Notes
    -----
    Has no clock: every method is told the time, in seconds. Not thread-safe.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = first
        self._most = most
        self._wait = 0.0
        self._until = -float("inf")

    def left(self, now: float) -> float:
        """Seconds until it may be tried again; zero or less if it may be now."""
        return self._until - now

    def start(self, now: float) -> None:
        """It is tried now, or failed for the first time: wait twice as long as last time."""
        self._wait = min(2 * self._wait, self._most) if self._wait else self._first
        self._until = now + self._wait

    def failed(self, now: float, *, again: bool) -> None:
        """An attempt came to nothing.

        Parameters
        ----------
        again
            It had failed before, so the wait begins when this attempt has ended. What fails for the
            first time must not put off what waits already: there may always be something new.
        """
        if not self._wait or self.left(now) <= 0:
            self.start(now)
        elif again:
            self._until = now + self._wait

    def relent(self, now: float) -> None:
        """Another attempt is worth while: begin anew, in no more than the first wait."""
        self._wait = 0.0
        self._until = min(self._until, now + self._first)

    def succeeded(self) -> None:
        """What had failed worked: go on at once."""
        self._wait = 0.0
        self._until = -float("inf")
