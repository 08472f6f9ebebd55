"""The numbers a device tier gives about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TierStatistics"]


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A snapshot of the device tier. Sizes in bytes.

    What :class:`~gpuspill.manager.statistics.Statistics` has with ``device_`` before it is
    explained there.

    Attributes
    ----------
    units
        Allocations that are known, wherever they are.
    reserved_nbytes
        Bytes promised to tasks that have not arrived yet.
    estimated_nbytes
        Bytes of objects of unknown types, wherever they are: their size is what they claim.
    out_of_memory_helped
        Times something was freed for an allocation that did not fit.
    loop_io
        Copies that the event loop's thread made or waited for.
    overruns
        Admissions granted beyond the limit because nothing could be freed.
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
