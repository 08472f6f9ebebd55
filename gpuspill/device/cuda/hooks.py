"""Callbacks for an allocation on a GPU that does not fit, made by any library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gpuspill.device.cuda.idle_pools import empty_pools
from gpuspill.device.cuda.port import Driver, Fits
from gpuspill.device.hooks import HookChain

__all__ = ["Attempt", "GpuHooks"]

# A hook that says it made room when it did not would otherwise go round for ever.
_MAX_RETRIES: Final = 1000


@dataclass(slots=True)
class Attempt:
    """One allocation of the port: whether hooks were asked, and what one raised."""

    asked: bool = False
    raised: BaseException | None = None


class GpuHooks(HookChain):
    """The chain of one GPU. It hangs on the allocator that all libraries share.

    Parameters
    ----------
    settle
        Frees what was left for other threads to free.
    """

    def __init__(self, driver: Driver, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle
        self._driver = driver
        self._here = threading.local()

    def connected(self) -> bool:
        """Whether the allocator asks this chain."""
        return self._driver.connected()

    def connect(self) -> None:
        """Make the allocator ask this chain."""
        if not self._driver.connected():
            self._driver.connect(self._failed)

    def disconnect(self) -> None:
        """Make the allocator ask this chain no more."""
        self._driver.disconnect()

    @contextmanager
    def watching(self) -> Iterator[Attempt]:
        """Note what happens here during an allocation of the calling thread."""
        outer = getattr(self._here, "attempt", None)
        attempt = self._here.attempt = Attempt()
        try:
            yield attempt
        finally:
            self._here.attempt = outer

    def _failed(self, nbytes: int, fits: Fits) -> bool:
        """Answer the allocator, in the thread that allocates: whether to try again.

        It does not say whether it asked before for the same allocation, and "collect garbage once"
        has to know. So it is told to try again only when that is going to work: trying takes place
        here.
        """
        if self.asking:
            return False
        attempt = getattr(self._here, "attempt", None) or Attempt()
        attempt.asked = True
        try:
            self._settle()
            # What libraries only keep for later goes before any value does, and also if none can.
            if empty_pools() and fits(nbytes):
                return True
            for retries in range(_MAX_RETRIES):
                if not self.ask(nbytes, retries):
                    return False
                if fits(nbytes):
                    return True
        except BaseException as error:
            attempt.raised = error
            raise
        return False
