"""What happens when an allocation on the device does not fit."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable

from gpuspill.core.adjacent import Piece, cheapest_run
from gpuspill.device.port import Device
from gpuspill.manager import ProxifyManager
from gpuspill.tier.registry import Book

__all__ = ["OutOfMemoryGuard"]

logger = logging.getLogger("gpuspill")


class OutOfMemoryGuard:
    """Makes room in the thread that needs it: spills, then collects garbage, then logs once.

    Parameters
    ----------
    device
        The device. The hook is installed at once.
    settle
        Lets go of what is not referenced any more.
    largest
        Describes the largest units on the device, for the log.
    book
        Knows where units are.

    Attributes
    ----------
    calls, helped
        Times an allocation asked, and times something was freed for it.
    """

    def __init__(
        self,
        device: Device,
        manager: ProxifyManager,
        settle: Callable[[], None],
        largest: Callable[[], str],
        book: Book,
    ) -> None:
        self._book = book
        self._device = device
        self._manager = manager
        self._settle = settle
        self._largest = largest
        self._busy: set[int] = set()
        self._last = threading.local()
        self._logged = False
        self.calls = 0
        self.helped = 0
        self._installation = device.on_out_of_memory(self._out_of_memory)

    def verify(self) -> None:
        """Install the hook again if a library dropped it. Cheap."""
        if not self._installation.installed:
            self._installation.reinstall()

    def close(self) -> None:
        """Take the hook out."""
        self._installation.uninstall()

    def _out_of_memory(self, nbytes: int, retries: int) -> bool:
        """Make room for an allocation of `nbytes` bytes that the calling thread is trying to make.

        Waits for nothing that this thread is doing: what it is restoring is in flight, and no
        victim.
        """
        ident = threading.get_ident()
        if ident in self._busy:
            return False
        self._busy.add(ident)
        try:
            self.calls += 1
            before = self._manager.memory_total()
            self._settle()
            # What was given up already, and was not let go of yet, is free as well.
            settled = self._manager.memory_total() < before
            helped = self._make_room(nbytes, retries) > 0 or settled or (not retries and self._collect())
        finally:
            self._busy.discard(ident)
        if helped:
            self.helped += 1
        else:
            self._give_up(nbytes)
        return helped

    def _make_room(self, nbytes: int, retries: int) -> int:
        """Evict so many bytes by use; if that was not enough, so many that lie side by side."""
        limits = self._manager.limits
        asked, departures = getattr(self._last, "attempt", (None, 0))
        # The hook of another tier on the device may have been the first that was asked.
        if not retries or asked != nbytes:
            self._last.attempt = nbytes, self._book.departures
            return limits.make_room(nbytes)
        places = self._book.places()
        may_leave = limits.may_leave(places.values())
        # What this allocation has made leave in vain is free, unless it was given out again.
        free = dict.fromkeys(set(self._book.vacated(departures)) - places.keys())
        occupied = {at: unit for at, unit in places.items() if unit in may_leave}
        pieces: list[Piece[Hashable]] = [Piece(at.address, at.nbytes, unit) for at, unit in (free | occupied).items()]
        return limits.evict(cheapest_run(pieces, nbytes)) or limits.make_room(nbytes)

    def _collect(self) -> bool:
        before = self._device.memory_info().free
        found = gc.collect()
        self._settle()
        # A pool keeps what was freed, so the device may show nothing of it.
        return bool(found) or self._device.memory_info().free > before

    def _give_up(self, nbytes: int) -> None:
        if self._logged:
            return
        self._logged = True
        statistics = self._manager.statistics()
        free, total = self._device.memory_info()
        logger.warning(
            "%r is out of memory and nothing can leave it: %d bytes were asked for; %d of %d bytes are in use by "
            "everybody, %d of them by values that are known here, %d of these pinned by tasks, %d more by views on "
            "values that left. Largest: %s. Further failures are not reported.",
            self._device,
            nbytes,
            total - free,
            total,
            statistics.host_nbytes,
            statistics.pinned_nbytes,
            statistics.offset_nbytes,
            self._largest() or "none",
        )
