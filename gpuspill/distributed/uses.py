"""What is needed next, told to all tiers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from gpuspill.core.policy import Order
from gpuspill.manager import ProxifyManager
from gpuspill.tier import DeviceTier, Skeleton

__all__ = ["TieredUses", "Uses"]


class Uses(Protocol):
    """What is told what is needed next, as :class:`~gpuspill.manager.prefetch.Prefetcher`."""

    @property
    def away(self) -> int:
        """Number of values that are not where they are used."""
        ...

    def expect(self, keys: Iterable[Hashable], order: Order, user: Hashable) -> None:
        """`user` is going to read `keys`; a smaller `order` is sooner."""
        ...

    def drop(self, keys: Iterable[Hashable], user: Hashable) -> None:
        """`user` has read `keys` or never will."""
        ...

    def prefetch(self, keys: Iterable[Hashable]) -> int:
        """Begin to bring values ahead of their use, as far as there is room; return how many."""
        ...


class TieredUses:
    """Tells the host's manager, and the device's of the units that values have."""

    def __init__(self, manager: ProxifyManager, tier: DeviceTier) -> None:
        self._manager = manager
        self._tier = tier

    @property
    def away(self) -> int:
        """Number of values and units that are not where they are used."""
        return self._manager.spilled_count + self._tier.manager.spilled_count

    def expect(self, keys: Iterable[Hashable], order: Order, user: Hashable) -> None:
        """See :meth:`Uses.expect`."""
        keys = list(keys)
        self._manager.uses.expect(keys, order, user)
        self._pass_on(keys)

    def drop(self, keys: Iterable[Hashable], user: Hashable) -> None:
        """See :meth:`Uses.drop`."""
        keys = list(keys)
        self._manager.uses.drop(keys, user)
        self._pass_on(keys)

    def _pass_on(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            value = self._manager.look(key)
            if type(value) is Skeleton:
                self._tier.expect_use(value, self._manager.uses.next(key), key)

    def prefetch(self, keys: Iterable[Hashable]) -> int:
        """See :meth:`Uses.prefetch`."""
        keys = [key for key in keys if key in self._manager]
        values = [value for value in map(self._manager.look, keys) if type(value) is Skeleton]
        # What came as bytes would be decoded, on the device, without a promise of room.
        keys = [key for key in keys if not self._manager.arriving_nbytes(key)]
        return self._manager.uses.prefetch(keys) + self._tier.prefetch(values)
