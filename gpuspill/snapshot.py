"""The numbers a store gives about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Statistics"]


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
        Keys known, and distinct values behind them.
    host_keys, disk_keys
        Values with a copy in memory; values that are on disk only.
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
        Values that could not be evicted when tried: held by somebody else, or the disk refused
        them.
    waits, overruns
        Admissions that had to wait; admissions granted beyond the limit because nothing could be
        freed.
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
