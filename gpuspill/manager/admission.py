"""Pins on what a task or a transfer needs, and a promise of room for what comes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from typing import Protocol

from gpuspill.core.budget import Reservation

__all__ = ["Admission"]

logger = logging.getLogger("gpuspill")

#: Seconds until a waiting thread looks whether there is still something to wait for.
_LOOK_AGAIN = 0.5


class Issuer(Protocol):
    """Where an admission comes from; see :class:`gpuspill.manager.admitter.Admitter`."""

    def notice_stalls(self) -> None:
        """Stop waiting for spills that take too long."""

    def release(self, admission: Admission) -> Iterable[None]:
        """Take an admission back, in pieces."""


class Admission:
    """Pins on the inputs of one task or transfer, and room for what is missing and for the output.

    Made by :meth:`.Admitter.admit`; a context manager that releases at the end.

    Attributes
    ----------
    outputs
        Promised bytes by the key under which they will be stored; storing a key settles its part.
    reservation
        The core's promise.
    pids
        The pinned proxies by key.
    output_nbytes
        The part of the promise that is for the output, in bytes.
    asked_at
        When it was asked for, by the manager's clock.
    awaited
        Whether any thread ever waited for it, or asked to be told.

    Notes
    -----
    Thread-safe. Granting waits only while something can still make room, so a wait ends without
    anybody's help.
    """

    __slots__ = (
        "__weakref__",
        "_admitter",
        "_callbacks",
        "_unreleased",
        "asked_at",
        "awaited",
        "output_nbytes",
        "outputs",
        "pids",
        "reservation",
    )

    def __init__(
        self,
        admitter: Issuer,
        reservation: Reservation,
        pids: Mapping[Hashable, int],
        outputs: dict[Hashable, int],
        output_nbytes: int,
        asked_at: float,
    ) -> None:
        self._admitter = admitter
        self.outputs = outputs
        self.reservation = reservation
        self.pids = pids
        self.output_nbytes = output_nbytes
        self.asked_at = asked_at
        self.awaited = False
        # No lock: a finaliser may make the room that is waited for here, in this very thread, at
        # any point. Each step is one operation that Python makes atomic.
        self._unreleased = [True]
        self._callbacks: deque[Callable[[], None]] = deque()

    @property
    def granted(self) -> bool:
        """Whether there is room (or waiting for it is pointless)."""
        return self.reservation.granted

    @property
    def overrun(self) -> bool:
        """Whether it was granted beyond the limit."""
        return self.reservation.overrun

    def wait(self, timeout: float | None = None) -> bool:
        """Block until granted or released.

        Parameters
        ----------
        timeout
            Seconds; None for no limit.

        Returns
        -------
        bool
            Whether it is granted (or released) now.
        """
        if self._settled():
            return True
        waiting = threading.Lock()
        waiting.acquire()
        self.add_done_callback(waiting.release)
        left = float("inf") if timeout is None else timeout
        while left > _LOOK_AGAIN:
            if waiting.acquire(timeout=_LOOK_AGAIN):
                return True
            self._admitter.notice_stalls()  # what is waited for may hang
            left -= _LOOK_AGAIN
        return waiting.acquire(timeout=max(0.0, left))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when granted or released: at once, or in the thread that makes room.

        The callback must not block and must not raise.
        """
        if not self._settled():
            self.awaited = True
            self._callbacks.append(callback)
            if self._settled():
                self.fulfil()  # the thread that settled it may not have seen it
            return
        callback()

    def _settled(self) -> bool:
        return self.reservation.granted or not self._unreleased

    def fulfil(self) -> None:
        """Tell those who wait. The manager calls it once the core granted it, unlocked."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # another thread tells the last
            try:
                callback()
            except Exception:
                # It must not raise: neither the others nor the thread that made room caused it.
                logger.exception("a callback of an admission failed")

    def release(self) -> None:
        """Undo the pins and give back what is left of the promise. Idempotent; also ends a wait."""
        try:
            self._unreleased.pop()
        except IndexError:
            return
        for _ in self._admitter.release(self):
            pass
        self.fulfil()

    def release_in_pieces(self) -> Generator[None, None, None]:
        """Do as :meth:`release` does, a few pins at a time; given up, the rest at once."""
        try:
            self._unreleased.pop()
        except IndexError:
            return
        yield from self._admitter.release(self)
        self.fulfil()

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
