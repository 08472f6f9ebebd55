"""What is known of the next uses of values, and bringing them back ahead of these."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from gpuspill.core.policy import Order
from gpuspill.core.residency import State
from gpuspill.manager.restore import Restorer
from gpuspill.manager.restore_together import TogetherRestorer
from gpuspill.manager.slots import Restore
from gpuspill.manager.threads import Urgency
from gpuspill.manager.transaction import Metadata, batches, deferred, reads, skipped

__all__ = ["Prefetcher"]


class Prefetcher:
    """Is told on behalf of a manager who needs what and when, and acts on it.

    Notes
    -----
    Thread-safe; nothing blocks.
    """

    def __init__(self, metadata: Metadata, restorer: Restorer, together: TogetherRestorer | None = None) -> None:
        self._metadata = metadata
        self._together = together
        self._restorer = restorer

    @property
    def away(self) -> int:
        """Number of values that are on disk only."""
        return self._metadata.state.spilled

    @deferred()
    def expect(self, keys: Iterable[Hashable], order: Order, user: Hashable) -> None:
        """`user` is going to read `keys`; a smaller `order` is sooner."""
        for batch in batches(keys):
            with self._metadata as state:
                for key in batch:
                    state.candidates.expect(key, user, order)

    @deferred()
    def drop(self, keys: Iterable[Hashable], user: Hashable) -> None:
        """`user` has read `keys` or never will."""
        for batch in batches(keys):
            with self._metadata as state:
                for key in batch:
                    state.candidates.unexpect(key, user)

    @reads
    def next(self, key: Hashable) -> Order | None:
        """When `key` is needed next, as far as that is known."""
        with self._metadata as state:
            return state.uses.next(key)

    @skipped(False)
    def worth_making_room(self, key: Hashable, nbytes: int) -> bool:
        """Whether `nbytes` are free, or held by what is needed later than `key`, if at all."""
        # Looking who comes first forgets those who have gone.
        with self._metadata as state:
            if state.memory.fits(nbytes):
                return True
            victim = state.queue.peek(small=False)
            if victim is None:
                return False
            mine, other = state.uses.next(key), state.candidates.next_use(state.ledger.entries[victim])
            return mine is not None and (other is None or other > mine)

    @skipped(0)
    def prefetch(self, keys: Iterable[Hashable]) -> int:
        """Begin to restore values ahead of their use, as far as there is room without a write.

        Parameters
        ----------
        keys
            In the order of use. Unknown ones and those in memory are skipped.

        Returns
        -------
        int
            How many restores were begun.
        """
        begun: list[tuple[Hashable, int, Restore]] = []
        room = True
        for batch in batches(keys):
            with self._metadata as state:
                for key in batch:
                    entry = state.ledger.keys.get(key)
                    if entry is None or entry.state is not State.SPILLED:
                        continue
                    order = state.uses.next(key)
                    room = not self._metadata.closed and state.restores.begin_ahead(
                        entry.pid, () if order is None else order
                    )
                    if not room:
                        break
                    restore = self._metadata.slots[entry.pid].restoring = Restore()
                    begun.append((key, entry.pid, restore))
            if not room:
                break
        if self._together is not None:
            self._together.queue(begun, Urgency.AHEAD)
        else:
            for key, pid, restore in begun:
                self._restorer.queue(key, pid, restore, Urgency.AHEAD)
        return len(begun)
