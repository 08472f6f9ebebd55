"""The numbers a device tier gives about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TierStatistics"]


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A snapshot of the device tier. Sizes in bytes.

    Attributes
    ----------
    limit
        Bytes of values to keep on the device; None for no limit.
    units
        Allocations that are known, wherever they are.
    device_nbytes
        Bytes of those on the device, those arriving included.
    pinned_nbytes
        The part of it that is in use by tasks.
    reserved_nbytes
        Bytes promised to tasks that have not arrived yet.
    spilled_nbytes
        Bytes of those that are not on the device.
    lingering_nbytes
        Bytes that are still on the device because somebody has a view on what left.
    estimated_nbytes
        Bytes of objects of types that nobody knows, wherever they are: their size is what they claim.
    spills, restores
        Moves from the device, and back, so far.
    direct_spills
        The part of the moves from the device that went to disk without being in host memory.
    past_host_spills
        Writes among these that went past host memory: by GPUDirect Storage, not hashed.
    out_of_memory, out_of_memory_helped
        Times an allocation did not fit, and times something was freed for it.
    loop_io
        Copies that the event loop's thread made or waited for.
    overruns
        Admissions granted beyond the limit because nothing could be freed.
    host_pinned_nbytes, host_pinned_used_nbytes
        Bytes of host memory that are pinned for what left the device, and those in use.
    host_pinned_refused
        Moves from the device for which there was none, so that they went by way of ordinary memory.
    """

    limit: int | None
    units: int
    device_nbytes: int
    pinned_nbytes: int
    reserved_nbytes: int
    spilled_nbytes: int
    lingering_nbytes: int
    estimated_nbytes: int
    spills: int
    direct_spills: int
    past_host_spills: int
    restores: int
    out_of_memory: int
    out_of_memory_helped: int
    loop_io: int
    overruns: int
    host_pinned_nbytes: int
    host_pinned_used_nbytes: int
    host_pinned_refused: int
