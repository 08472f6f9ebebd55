"""What the core wants done outside after an event, and how often it has decided what."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuspill.core.budget import Reservation
from gpuspill.core.ledger import Entry

__all__ = ["Counters", "Effects"]


@dataclass(slots=True)
class Effects:
    """What the caller has to do after an event, outside its lock.

    Every part of the core that decides something adds to the same one.

    Attributes
    ----------
    dropped
        Proxies whose value in memory is to be let go.
    deleted
        Proxies whose record is to be deleted.
    granted
        Reservations that were granted while they waited.
    forgotten
        Proxies that no longer exist, and what was known of them.
    released_parts
        Proxies of memory that no value has any more once what is dropped is gone; then
        :meth:`SpillState.release_parts <gpuspill.core.state.SpillState.release_parts>`.
    failures
        What an eviction policy of others has done wrong.
    """

    dropped: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    granted: list[Reservation] = field(default_factory=list)
    forgotten: dict[int, Entry] = field(default_factory=dict)
    released_parts: list[int] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.dropped or self.deleted or self.granted or self.forgotten or self.released_parts or self.failures
        )

    def take(self) -> Effects:
        """Return what was collected, once."""
        taken = Effects(self.dropped, self.deleted, self.granted, self.forgotten, self.released_parts, self.failures)
        self.dropped, self.deleted, self.granted, self.forgotten, self.released_parts, self.failures = (
            [],
            [],
            [],
            {},
            [],
            [],
        )
        return taken


@dataclass(slots=True)
class Counters:
    """Ever-increasing counts of decisions; bytes are bytes in memory unless said otherwise."""

    spills: int = 0
    spilled_nbytes: int = 0
    spill_failures: int = 0
    clean_drops: int = 0
    restores: int = 0
    restored_nbytes: int = 0
    restore_failures: int = 0
    prefetches: int = 0
    overruns: int = 0
    waits: int = 0
    lost: int = 0
    records_reclaimed: int = 0
