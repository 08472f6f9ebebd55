"""The warning about reads that stop the worker."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from time import monotonic

from gpuspill.distributed.parked import ParkedKey

__all__ = ["BlockingReads"]

logger = logging.getLogger("gpuspill")

#: Seconds between two warnings.
_WARN_INTERVAL = 300.0


class BlockingReads:
    """Warns about reads that block the event loop. On the loop's thread only."""

    def __init__(self) -> None:
        self._warn_after = 0.0

    def warn(self, key: Hashable) -> None:
        """Say how to read a value that is on disk instead, unless that was said not long ago."""
        now = monotonic()
        if now < self._warn_after:
            return
        self._warn_after = now + _WARN_INTERVAL
        if isinstance(key, ParkedKey):
            logger.warning(
                "A parked value was read on the event loop while it was on disk, which stops the worker until it is "
                "read. Open the handle in a task that is no coroutine, or in a thread (await asyncio.to_thread(...)). "
                "Further reads like this are only counted."
            )
            return
        logger.warning(
            "worker.data[%r] was read on the event loop while the value was on disk, which stops the worker until it "
            "is read. Await worker.data.async_get([key]) instead, or read it in a task. "
            "Further reads like this are only counted.",
            key,
        )
