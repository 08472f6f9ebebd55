"""Values that keep memory alive which others keep alive as well: charged by itself, once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gpuspill.core.residency import State
from gpuspill.device.shared_memory import SharedMemory
from gpuspill.manager.metadata import Metadata

__all__ = ["VIEW_NBYTES", "Sharing"]

#: What is charged for a view besides the memory that it shows.
VIEW_NBYTES = 128


class Sharing:
    """Finds shared memory and charges it. Shared by the manager and those who bring values back.

    Parameters
    ----------
    metadata
        What is known of all values.
    find
        Returns what memory a value keeps alive that may be kept alive by others, or None; by default nothing is
        looked for.

    Notes
    -----
    :meth:`look` may take its time and holds no lock; the rest is to be called under the lock of the metadata.
    """

    def __init__(self, metadata: Metadata, find: Callable[[object], SharedMemory | None] | None) -> None:
        self._metadata = metadata
        self._find = find

    def look(self, value: object) -> SharedMemory | None:
        """Return what memory `value` keeps alive, if it may be kept alive by others."""
        return None if self._find is None else self._find(value)

    def parts(self, key: Hashable, shared: SharedMemory) -> tuple[int, ...]:
        """Return the proxies of what a value keeps alive."""
        return tuple(dict.fromkeys(self._part(key, owner, nbytes) for owner, nbytes in shared.owners))

    def divide(self, pid: int, shared: SharedMemory | None) -> None:
        """Charge by itself what a value keeps alive that is in memory without parts; nothing if it is not there."""
        state = self._metadata.state
        entry = state.ledger.entries.get(pid)
        if shared is not None and entry is not None and entry.resident:
            own = max(VIEW_NBYTES, entry.nbytes - shared.covered)
            state.divide(pid, own, self.parts(self._metadata.slots[pid].key, shared))

    def take_up(self, pid: int, value: object, shared: SharedMemory | None = None) -> None:
        """Note that a value that was evicted while somebody held it is here again: nothing has to be read."""
        state = self._metadata.state
        if state.ledger.entries[pid].state is State.SPILLED:
            state.begin_restore(pid)
            self._metadata.slots.attach(pid, value)
            state.complete_restore(pid)
            state.renew(pid)  # who had it meanwhile may have changed it, and nobody has read what is on disk
            self.divide(pid, shared)

    def _part(self, key: Hashable, owner: object, nbytes: int) -> int:
        """Return the proxy of memory that a value keeps alive, which is thereby in memory."""
        state, slots = self._metadata.state, self._metadata.slots
        pid = slots.find(owner)
        if pid is not None:
            self.take_up(pid, owner)
            if state.ledger.entries[pid].resident:
                return pid
        pid = state.insert_part(nbytes)
        slots.enter(state.ledger.entries[pid], key, owner, nbytes)
        return pid
