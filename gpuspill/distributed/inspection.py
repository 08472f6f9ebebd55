"""What is in a store, for those who look: tier by tier, and in numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from gpuspill.core.residency import Tier
from gpuspill.manager import ProxifyManager
from gpuspill.manager.statistics import Statistics
from gpuspill.tier import DeviceTier, Internal

__all__ = ["TierView", "shown", "with_device"]


def shown(keys: list[Hashable]) -> list[Hashable]:
    """Return the keys that are not gpuspill's own."""
    return [key for key in keys if not isinstance(key, Internal)]


class TierView(Mapping[Hashable, object]):
    """The part of a store that is in one tier, now.

    Parameters
    ----------
    store, manager
        The store, and where it has its values.
    tier
        Memory or disk.
    """

    def __init__(self, store: Mapping[Hashable, object], manager: ProxifyManager, tier: Tier) -> None:
        self._store = store
        self._manager = manager
        self._tier = tier

    def __getitem__(self, key: Hashable) -> object:
        if key not in self:
            raise KeyError(key)
        return self._store[key]

    def __contains__(self, key: object) -> bool:
        try:
            return self._manager.tier_of(key) is self._tier
        except KeyError:
            return False

    def __len__(self) -> int:
        if len(self._store) != len(self._manager):  # some keys are not shown
            return sum(1 for _ in self)
        spilled = self._manager.spilled_count
        return spilled if self._tier is Tier.DISK else len(self._store) - spilled

    def __iter__(self) -> Iterator[Hashable]:
        return iter(shown(self._manager.keys_in(self._tier)))

    def __repr__(self) -> str:
        return f"<{len(self)} keys {'on disk' if self._tier is Tier.DISK else 'in memory'}>"


def with_device(found: Statistics, tier: DeviceTier) -> Statistics:
    """Return the numbers of a store with those of its device."""
    device = tier.statistics()
    return replace(
        found,
        loop_io=found.loop_io + device.loop_io,
        unspillable=max(0, found.unspillable - tier.skeletons),
        estimated_nbytes=found.estimated_nbytes + device.estimated_nbytes,
        device_limit=device.limit,
        device_nbytes=device.device_nbytes,
        device_pinned_nbytes=device.pinned_nbytes,
        device_spilled_nbytes=device.spilled_nbytes,
        device_lingering_nbytes=device.lingering_nbytes,
        device_host_pinned_nbytes=device.host_pinned_nbytes,
        device_host_pinned_used_nbytes=device.host_pinned_used_nbytes,
        device_host_pinned_refused=device.host_pinned_refused,
        device_spills=device.spills,
        device_direct_spills=device.direct_spills,
        device_past_host_spills=device.past_host_spills,
        device_restores=device.restores,
        device_out_of_memory=device.out_of_memory,
    )
