"""Noticing spills that take too long: a disk that hangs, or a value whose own code waits for a lock.

A task that holds a lock and waits for room, while the code that serialises a value waits for that very lock, would wait
for ever. So would all tasks if the disk stopped in the middle of a write. Such a spill cannot be ended, but it need not
be waited for.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from gpuspill.core.state import SpillState
from gpuspill.manager.transaction import Metadata, skipped

__all__ = ["Stalls"]

logger = logging.getLogger("gpuspill")

_SERIALISING = (
    "serialising",
    "Its own code may wait for a lock that a task holds which waits for room, or take that long",
)
_WRITING = "writing", "The disk of the spill directory may hang, or be that slow"


@dataclass(slots=True)
class _Move:
    since: float
    spill_thread: int | None
    doing: tuple[str, str] = _SERIALISING
    stalled: bool = False


class Stalls:
    """The spills in flight of a manager, and those among them that take too long.

    Parameters
    ----------
    metadata
        The manager's.
    timeout
        Seconds that a spill may take; 0 for no limit.
    spill_threads
        How many threads spill.

    Notes
    -----
    Has no thread: whoever waits for room looks now and then. Thread-safe; nothing blocks.
    """

    def __init__(self, metadata: Metadata, timeout: float, spill_threads: int) -> None:
        self._metadata = metadata
        self._timeout = timeout
        self._spill_threads = spill_threads
        self._moves: dict[int, _Move] = {}

    def begin(self, pid: int) -> None:
        """The calling thread spills a value from now on."""
        engine = self._metadata.engine
        here = engine is not None and engine.spilling_here
        self._moves[pid] = _Move(self._metadata.clock(), threading.get_ident() if here else None)

    def serialised(self, pid: int) -> None:
        """What is left to do is to write it."""
        self._moves[pid].doing = _WRITING

    def end(self, pid: int, state: SpillState) -> None:
        """Under the lock: the spill comes to its end now."""
        move = self._moves.pop(pid)
        if move.stalled:
            state.set_stuck(self._stuck)

    @skipped(None)
    def look(self) -> None:
        """Let nobody wait any more for spills that take too long, and say so once of each."""
        if not self._moves or not self._timeout:
            return
        metadata = self._metadata
        now = metadata.clock()
        found = []
        with metadata as state:
            for pid, move in list(self._moves.items()):
                if not move.stalled and now - move.since > self._timeout:
                    move.stalled = True
                    found.append((metadata.slots[pid].key, move))
                    state.stall_spill(pid)
            if found:
                state.set_stuck(self._stuck)
        for key, move in found:
            logger.warning(
                "%s the value of %r takes more than %g seconds (gpuspill.spill-timeout), so that nobody waits for it "
                "any more: tasks may go beyond the limit. %s",
                move.doing[0],
                key,
                self._timeout,
                move.doing[1],
            )

    @property
    def _stuck(self) -> bool:
        """Whether all spill threads are in the middle of such spills."""
        moves = list(self._moves.values())
        # A thread may have several in hand.
        stalled = {move.spill_thread for move in moves if move.stalled and move.spill_thread is not None}
        return len(stalled) >= self._spill_threads
