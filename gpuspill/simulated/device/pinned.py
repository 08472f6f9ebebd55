"""Pinned memory of the simulated device: ordinary memory that is counted and watched."""

from __future__ import annotations

import numpy as np

from gpuspill.device.host import HostArray, byte_range
from gpuspill.device.port import FreedUnderCopy, PinnedBuffer
from gpuspill.simulated.device.memory import FRESH
from gpuspill.simulated.device.streams import Schedule

__all__ = ["SimulatedPinned"]


class SimulatedPinned(PinnedBuffer):
    """Host memory that counts as pinned."""

    __slots__ = ("_array", "_nbytes", "_schedule")

    def __init__(self, schedule: Schedule, nbytes: int, *, fill: bool = True) -> None:
        self._schedule = schedule
        self._nbytes = nbytes
        self._array: HostArray | None = np.full(nbytes, FRESH, np.uint8) if fill else np.empty(nbytes, np.uint8)
        with schedule.condition:
            schedule.pinned_bytes += nbytes

    @property
    def view(self) -> memoryview:
        """The memory."""
        if self._array is None:
            raise ValueError(f"the pinned buffer of {self._nbytes} bytes was released")
        return self._array.data

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def release(self) -> None:
        """Give it back, unless a copy uses it."""
        with self._schedule.condition:
            if self._array is None:
                return
            if self._schedule.in_flight(byte_range(self._array)):
                self._schedule.violations += 1
                raise FreedUnderCopy(
                    f"a pinned buffer of {self._nbytes} bytes cannot be released: a copy from or to it is in flight"
                )
            self._schedule.pinned_bytes -= self._nbytes
            self._array = None
