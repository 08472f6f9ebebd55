"""The numbers a store gives about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuspill.manager.restore import Restorer
    from gpuspill.manager.transaction import Metadata

__all__ = ["Statistics", "take_snapshot"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of one store. Sizes in bytes, times in seconds, everything else counts.

    Attributes
    ----------
    limit
        Bytes of values to keep in memory; None for no limit.
    disk_limit
        Bytes of records to keep on disk; None for no limit.
    keys, values
        Keys known, and distinct values behind them. Memory that values only look at counts as one
        more.
    host_keys, disk_keys
        Values with a copy in memory; values that are on disk only. Those on their way back, and
        lost ones, are neither.
    host_nbytes
        Bytes of values in memory, those arriving included.
    pinned_nbytes
        The part of it that is in use and cannot be evicted.
    spilled_nbytes
        In-memory size of the values that are on disk only.
    disk_nbytes
        Bytes of all records, clean copies included.
    reserved_nbytes
        Bytes promised to tasks and transfers that have not arrived yet.
    offset_nbytes
        Unmanaged process memory that counts against the limit.
    waiting
        Tasks and transfers waiting for room now.
    hits, misses
        Reads of values that were in memory, and of those that were not.
    spills, spilled_total_nbytes
        Values written to disk so far and their size in memory.
    clean_drops
        Evictions that needed no write because the record was there already.
    restores, restored_total_nbytes
        Values brought back so far, prefetched ones included.
    prefetches
        Restores begun ahead of use.
    spill_failures, restore_failures, lost
        What went wrong; `lost` values had no copy left.
    unspillable
        Values in memory that cannot be serialised.
    set_aside
        Values that could not be evicted when tried: held elsewhere, or the disk refused
        them.
    waits
        Admissions that had to wait.
    overruns
        Admissions granted beyond the limit because nothing could be freed.
    wait_seconds
        Total time that tasks and transfers waited for admission.
    written_nbytes, read_nbytes
        Bytes written to and read from disk.
    write_seconds, read_seconds
        Time in disk I/O.
    serialize_seconds, deserialize_seconds
        Time in (de)serialisation.
    raw_nbytes
        Serialised bytes before compression; ``written_nbytes / raw_nbytes`` is the compression
        ratio.
    loop_io
        Reads from disk and (de)serialisations on the event loop's thread. Zero in every path
        distributed itself takes.
    records_reclaimed
        Clean copies given up to make room within the disk limit.
    estimated_nbytes
        Bytes of values of types without a registered size, wherever they are: what they
        claim by their array interface or ``nbytes``.
    device_limit
        Bytes of values to keep on the device; None for no limit or no device. What left the device
        counts as a value in host memory or on disk.
    device_nbytes
        Bytes of values on the device, those arriving included.
    device_pinned_nbytes
        The part of it that is in use by tasks.
    device_spilled_nbytes
        Bytes of values of the device that are not on it.
    device_lingering_nbytes
        Bytes that are still on the device because a view on what left is alive.
    device_host_pinned_nbytes, device_host_pinned_used_nbytes
        Bytes of host memory that are pinned for what left the device, and the part in use. What is
        in use counts in `host_nbytes` as well.
    device_host_pinned_refused
        Moves from the device for which there was no pinned memory, so that they took the slower
        way.
    device_external_nbytes
        Bytes of values that are left alone because their library moves them by itself (cuDF with
        its spilling on).
    device_spills, device_restores
        Moves from the device, and back, so far.
    device_direct_spills
        The part of the moves from the device that went to disk in pieces, without being in host
        memory.
    device_past_host_spills
        Writes among these that went past host memory: by GPUDirect Storage, not hashed.
    device_out_of_memory
        Times an allocation on the device did not fit at first.
    """

    limit: int | None
    disk_limit: int | None
    keys: int
    values: int
    host_keys: int
    disk_keys: int
    host_nbytes: int
    pinned_nbytes: int
    spilled_nbytes: int
    disk_nbytes: int
    reserved_nbytes: int
    offset_nbytes: int
    waiting: int
    hits: int
    misses: int
    spills: int
    spilled_total_nbytes: int
    clean_drops: int
    restores: int
    restored_total_nbytes: int
    prefetches: int
    spill_failures: int
    restore_failures: int
    lost: int
    unspillable: int
    set_aside: int
    waits: int
    overruns: int
    wait_seconds: float
    written_nbytes: int
    read_nbytes: int
    write_seconds: float
    read_seconds: float
    serialize_seconds: float
    deserialize_seconds: float
    raw_nbytes: int
    loop_io: int
    records_reclaimed: int
    estimated_nbytes: int = 0
    device_limit: int | None = None
    device_nbytes: int = 0
    device_pinned_nbytes: int = 0
    device_spilled_nbytes: int = 0
    device_lingering_nbytes: int = 0
    device_host_pinned_nbytes: int = 0
    device_host_pinned_used_nbytes: int = 0
    device_host_pinned_refused: int = 0
    device_external_nbytes: int = 0
    device_spills: int = 0
    device_restores: int = 0
    device_direct_spills: int = 0
    device_past_host_spills: int = 0
    device_out_of_memory: int = 0


def take_snapshot(metadata: Metadata, restorer: Restorer) -> Statistics:
    """Return the numbers of one manager, all of the same moment. O(1) but for the waiting line."""
    with metadata as state:
        counters, totals, ledger, charges = state.counters, metadata.totals, state.ledger, state.charges
        return Statistics(
            limit=state.memory.limit,
            disk_limit=state.disk.limit,
            keys=len(ledger.keys),
            values=len(ledger.entries),
            host_keys=len(ledger.entries) - charges.away,
            disk_keys=charges.spilled,
            host_nbytes=state.memory.used,
            pinned_nbytes=charges.pinned_nbytes,
            spilled_nbytes=charges.spilled_nbytes,
            disk_nbytes=state.disk.used,
            reserved_nbytes=state.memory.reserved,
            offset_nbytes=state.memory.offset,
            waiting=len(state.memory.line.waiting),
            hits=restorer.hits,
            misses=restorer.misses,
            spills=counters.spills,
            spilled_total_nbytes=counters.spilled_nbytes,
            clean_drops=counters.clean_drops,
            restores=counters.restores,
            restored_total_nbytes=counters.restored_nbytes,
            prefetches=counters.prefetches,
            spill_failures=counters.spill_failures,
            restore_failures=counters.restore_failures,
            lost=counters.lost,
            unspillable=charges.unspillable,
            set_aside=state.candidates.set_aside,
            waits=counters.waits,
            overruns=counters.overruns,
            wait_seconds=totals["wait"],
            written_nbytes=int(totals["written"]),
            read_nbytes=int(totals["read"]),
            write_seconds=totals["write"],
            read_seconds=totals["reading"],
            serialize_seconds=totals["serialize"],
            deserialize_seconds=totals["deserialize"],
            raw_nbytes=int(totals["raw"]),
            loop_io=restorer.loop_io,
            records_reclaimed=counters.records_reclaimed,
        )
