"""The device tier: values on a device, spilled to the host and from there to disk.

===================================  ===================================================================
:mod:`~gpuspill.tier.tier`           :class:`~gpuspill.tier.tier.DeviceTier`: everything behind one door
:mod:`~gpuspill.tier.finding`        what objects have on the device
:mod:`~gpuspill.tier.entry`          the way in: memory becomes a unit
:mod:`~gpuspill.tier.disassemble`    the way in: a value becomes a skeleton
:mod:`~gpuspill.tier.assemble`       the way out: a skeleton becomes a value
:mod:`~gpuspill.tier.read`           the way out: what is not on the device comes back
:mod:`~gpuspill.tier.prefetch`       the same before anybody asks
:mod:`~gpuspill.tier.units`          what stands for a value (a skeleton) and for memory (a unit)
:mod:`~gpuspill.tier.registry`       which memory belongs to which unit, and what lingers on the device
:mod:`~gpuspill.tier.composites`     values that a library takes apart itself
:mod:`~gpuspill.tier.serializer`     memory to host bytes and back
:mod:`~gpuspill.tier.pinned_pool`    pinned host memory that is used again
:mod:`~gpuspill.tier.host_store`     records of the device's manager, kept by the host's
:mod:`~gpuspill.tier.out_of_memory`  what happens when an allocation does not fit
:mod:`~gpuspill.tier.statistics`     the numbers
===================================  ===================================================================
"""

from __future__ import annotations

from gpuspill.tier.statistics import TierStatistics
from gpuspill.tier.tier import DeviceTier
from gpuspill.tier.units import Internal, Prepared, Skeleton

__all__ = ["DeviceTier", "Internal", "Prepared", "Skeleton", "TierStatistics"]
