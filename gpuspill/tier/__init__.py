"""The device tier: values on a device, spilled to the host and from there to disk.

=====================================  ====================================================================
:mod:`~gpuspill.tier.tier`             :class:`~gpuspill.tier.tier.DeviceTier`: the way in and out
:mod:`~gpuspill.tier.units`            what stands for a value (a skeleton) and for memory (a unit)
:mod:`~gpuspill.tier.book`             which memory belongs to which unit, and what lingers on the device
:mod:`~gpuspill.tier.composites`       values that a library takes apart itself
:mod:`~gpuspill.tier.serializer`       memory to host bytes and back
:mod:`~gpuspill.tier.records`          records of the device's manager, kept by the host's
:mod:`~gpuspill.tier.pressure`         what happens when an allocation does not fit
:mod:`~gpuspill.tier.statistics`       the numbers
=====================================  ====================================================================
"""

from __future__ import annotations

from gpuspill.tier.statistics import TierStatistics
from gpuspill.tier.tier import DeviceTier
from gpuspill.tier.units import Internal, Skeleton

__all__ = ["DeviceTier", "Internal", "Skeleton", "TierStatistics"]
