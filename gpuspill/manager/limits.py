"""Limits, and making values leave before a limit asks for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from gpuspill.manager.spill import Spiller
from gpuspill.manager.threads import Engine
from gpuspill.manager.transaction import Bell, Metadata, batches, deferred, reads, refused

__all__ = ["Evictor"]


class Evictor:
    """Moves the limits of a manager, and evicts in the calling thread.

    Notes
    -----
    Thread-safe. :meth:`evict_all`, :meth:`make_room` and :meth:`evict` block.
    """

    def __init__(self, metadata: Metadata, engine: Engine, spiller: Spiller) -> None:
        self._metadata = metadata
        self._engine = engine
        self._spiller = spiller
        # How many evict everything now, and the limits from before the first of them.
        self._evicting = 0
        self._before: tuple[int | None, int | None] = (None, None)

    @property
    def limit(self) -> int | None:
        """Bytes of values to keep in memory; None for no limit."""
        return self._metadata.state.memory.limit

    @property
    def offset(self) -> int:
        """What :meth:`set_offset` set, in bytes."""
        return self._metadata.state.memory.offset

    @deferred()
    def set_limit(self, limit: int | None, disk_limit: int | None, *, disk_limit_from: str | None = None) -> None:
        """Change the limits, in bytes; None for no limit. Does nothing once closed.

        Parameters
        ----------
        limit, disk_limit
            As of the manager.
        disk_limit_from
            The setting that says what `disk_limit` is, for messages; None: the same as before.
        """
        with self._metadata as state:
            if not self._metadata.closed:
                self._metadata.disk_limit_from = disk_limit_from or self._metadata.disk_limit_from
                state.set_limits(limit, disk_limit)

    @deferred()
    def set_grace(self, count: int) -> None:
        """Set how many values are spared of those that were used up last and were not written yet.

        They stay while there are others that no task is known to need.
        """
        with self._metadata as state:
            state.set_grace(count)

    @deferred()
    def set_offset(self, nbytes: int) -> None:
        """Set the bytes of unmanaged process memory that count; may be negative."""
        with self._metadata as state:
            state.set_offset(nbytes)

    @refused("evict", unless_closed=True)
    def evict_all(self) -> None:
        """Spill what can be spilled now, and wait for it. Blocks; for tests and benchmarks.

        What is held, or cannot be written, stays.
        """
        with self._metadata as state:
            if self._metadata.closed:
                return
            if not self._evicting:
                self._before = state.memory.limit, state.disk.limit
            self._evicting += 1
            state.retry()
            # Below nothing, so that values of no size go as well, and whatever the offset takes
            # off.
            state.set_limits(min(0, state.memory.offset) - 1, state.disk.limit)
        try:
            with self._metadata.others_changes() as bell:
                while True:
                    bell.hush()
                    done = self._spiller.step() is not None
                    with self._metadata as state:
                        going = self._metadata.others_letting_go()
                        if going:
                            state.retry()  # it may be what holds others
                        if self._metadata.closed or (done and not (state.spilling or state.queue or going)):
                            break
                    if done:
                        bell.wait()  # another thread has the last ones in hand
        finally:
            with self._metadata as state:
                self._evicting -= 1
                if not (self._evicting or self._metadata.closed):
                    state.set_limits(*self._before)

    @refused("make room")
    def make_room(self, nbytes: int) -> int:
        """Evict values until `nbytes` more bytes are free, whatever the limit. Blocks: it writes.

        Returns
        -------
        int
            Bytes that were freed; fewer than asked for if everything else is in use or cannot be
            written. What others were writing meanwhile is waited for, and counts too.
        """
        with self._metadata as state:
            state.retry()
        with self._metadata.others_changes() as bell:
            return self._make_room(nbytes, bell)

    def _make_room(self, nbytes: int, bell: Bell) -> int:
        freed = 0
        counted: set[object] = set()
        while freed < nbytes:
            bell.hush()
            with self._metadata as state:
                if self._metadata.closed:
                    break
                going = self._metadata.others_letting_go()
                used = state.memory.used
                sizes = {pid: state.ledger.entries[pid].nbytes for pid in self._spiller.choose(state, nbytes - freed)}
                dropped = used - state.memory.used
                spilling = state.spilling
            freed += dropped
            if sizes:
                freed += self._spill(sizes)
            elif not dropped:
                if not going and (not spilling or self._engine.spilling_here):
                    break
                bell.wait()  # another thread has the last ones in hand
                with self._metadata as state:
                    freed += max(0, used - state.memory.used)
                    now = self._metadata.others_letting_go()
                freed += sum(going[each] for each in going.keys() - now.keys() - counted)
                counted |= now.keys() - going.keys()  # it had not left before, and is counted already
        while True:
            bell.hush()
            if not counted & self._metadata.others_letting_go().keys():
                return freed
            bell.wait()

    @refused("make room")
    def evict(self, keys: Iterable[Hashable]) -> int:
        """Evict the values of some keys that may leave, whatever the limit. Blocks: it writes.

        Returns
        -------
        int
            Bytes that were freed.
        """
        freed = 0
        for batch in batches(keys):
            with self._metadata as state:
                found = [state.ledger.keys[key] for key in batch if key in state.ledger.keys]
                sizes = {
                    each.pid: each.nbytes
                    for each in found
                    if not self._metadata.closed and state.spills.begin(each.pid)
                }
            freed += self._spill(sizes)
        return freed

    @reads
    def may_leave(self, keys: Iterable[Hashable]) -> set[object]:
        """Return the keys among some whose values may leave now."""
        found: set[object] = set()
        for batch in batches(keys):
            with self._metadata as state:
                known = state.ledger.keys
                found.update(key for key in batch if key in known and state.candidates.ready(known[key].pid))
        return found

    def _spill(self, sizes: Mapping[int, int]) -> int:
        """Do spills that were begun; return how many bytes were freed."""
        self._spiller.spill(list(sizes), force=True)
        with self._metadata as state:
            gone = (state.ledger.entries.get(pid) for pid in sizes)
            return sum(
                size for size, entry in zip(sizes.values(), gone, strict=True) if entry is None or not entry.resident
            )
