"""Noticing waits that take too long: for a disk, for a value's own code, for others.

A task that holds a lock and waits for room, while the code that serialises a value waits for that
very lock, would wait for ever. So would all tasks if the disk stopped in the middle of a write.
Such a spill cannot be ended, but it need not be waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from gpuspill.core.state import SpillState
from gpuspill.manager.story import Happened
from gpuspill.manager.transaction import Metadata, skipped

__all__ = ["Stalls"]

logger = logging.getLogger("gpuspill")

_SERIALISING = (
    "serialising",
    "Its own code may wait for a lock that a task holds which waits for room, or take that long",
)
_WRITING = "writing", "The disk of the spill directory may hang, or be that slow"
#: After so many seconds in which no one was let in, one more is, beyond the limit, although the one
#: before has not ended. Its end would make room; but it may wait for something that cannot be known
#: here.
_PATIENCE = 1.0


@dataclass(slots=True)
class _Move:
    """What one thread has in hand: one spill, or several that were begun together."""

    since: float
    spill_thread: int | None
    doing: tuple[str, str] = _SERIALISING
    stalled: bool = False


class Stalls:
    """The spills in flight of a manager, which take too long, and who waits too long.

    Parameters
    ----------
    timeout
        Seconds that a spill may take; 0 for no limit.
    spill_threads
        How many threads spill.

    Notes
    -----
    Has no thread. Threads that wait for room, and spill threads, look now and then. Coroutines
    cannot, and spill threads may be stuck: so the worker calls :meth:`notice` and :meth:`relent` as
    well. Thread-safe; nothing blocks.
    """

    def __init__(self, metadata: Metadata, timeout: float, spill_threads: int) -> None:
        self._metadata = metadata
        self._timeout = timeout
        self._spill_threads = spill_threads
        self._moves: dict[int, _Move] = {}
        self._stalled: int | None = None
        self._stalled_at = 0.0

    def begin(self, pids: Iterable[int]) -> None:
        """The calling thread spills some values from now on, all at once."""
        engine = self._metadata.engine
        here = engine is not None and engine.spilling_here
        self._moves.update(dict.fromkeys(pids, _Move(self._metadata.clock(), threading.get_ident() if here else None)))

    def serialised(self, pid: int) -> None:
        """What is left to do, with those that were begun together, is to write them."""
        self._moves[pid].doing = _WRITING

    def end(self, pid: int, state: SpillState) -> None:
        """Under the lock: the spill comes to its end now."""
        move = self._moves.pop(pid)
        if move.stalled:
            state.set_stuck(self._stuck)

    @skipped(None)
    def notice(self) -> None:
        """Stop waiting for spills that take too long, and log each of them once."""
        if not self._moves or not self._timeout:
            return
        metadata = self._metadata
        now = metadata.clock()
        found = []
        with metadata as state:
            late = [
                (pid, move)
                for pid, move in list(self._moves.items())
                if not move.stalled and now - move.since > self._timeout
            ]
            for pid, move in late:
                move.stalled = True
                slot = metadata.slots[pid]
                found.append((slot.key, move))
                metadata.story.note(slot, Happened.STALLED, slot.nbytes, move.doing[0])
                state.stall_spill(pid)
            if found:
                state.set_stuck(self._stuck)
        for key, move in found:
            logger.warning(
                "%s the value of %r takes more than %g seconds (gpuspill.spill-timeout). Tasks stop waiting for it "
                "and may go beyond the limit. %s",
                move.doing[0],
                key,
                self._timeout,
                move.doing[1],
            )

    @skipped(None)
    def relent(self) -> None:
        """Let one in beyond the limit if it waits for others and none was let in for a second."""
        metadata = self._metadata
        with metadata as state:
            if not metadata.closed:
                self.let_in(state)

    def let_in(self, state: SpillState) -> float:
        """Under the lock: do so; return the seconds until it is time; infinity if none waits."""
        waits, now = state.stalled, self._metadata.clock()
        if waits is None:
            return float("inf")
        if waits != self._stalled:
            self._stalled, self._stalled_at = waits, now
        left = self._stalled_at + _PATIENCE - now
        if left > 0:
            return left
        state.room.relent()
        return 0.0

    @property
    def _stuck(self) -> bool:
        """Whether all spill threads are in the middle of such spills."""
        moves = list(self._moves.values())
        # A thread may have several in hand.
        stalled = {move.spill_thread for move in moves if move.stalled and move.spill_thread is not None}
        return len(stalled) >= self._spill_threads
