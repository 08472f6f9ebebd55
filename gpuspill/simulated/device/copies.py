"""One copy between the simulated device and the host, from its enqueueing to its completion.

A copy moves its bytes when it *lands*: when a thread waits for it, or for something ordered after
it. Until then its destination holds a poison. The copy refers to its allocation weakly, so it can
tell that the allocation was dropped under it, and to its host buffer strongly.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np

from gpuspill.device.host import HostArray, HostRange, byte_range, overlap
from gpuspill.device.port import (
    DeviceError,
    FreedUnderCopy,
    Layout,
    SourceChanged,
    StreamKind,
)
from gpuspill.simulated.device.memory import PENDING, SimulatedAllocation

__all__ = ["Copy"]


def _fingerprint(host: HostArray) -> int:
    # Cheap, not strong: it has to notice that the buffer was reused, not to withstand an attack.
    raw = host.reshape(-1).view(np.uint8)
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    return hash((int(np.add.reduce(words, dtype=np.uint64)), raw[words.nbytes :].tobytes()))


class Copy:
    """A copy that was enqueued.

    Parameters
    ----------
    kind
        Its direction.
    allocation, layout
        The device's end. A destination is contiguous; a source may have gaps.
    host
        The host's end, C-contiguous.
    checks
        Whether to notice that a source in host memory was changed under the copy.
    moves
        Whether its bytes move; else it only takes its time.

    Attributes
    ----------
    number
        Its number in its stream.
    due
        When it may land, in seconds of the device's clock.
    seen
        What it is ordered after on other streams: stream number → number there.
    landed
        Whether its bytes have moved (or never will: see `problem`).
    problem
        What went wrong, once it has landed.
    """

    def __init__(
        self,
        kind: StreamKind,
        allocation: SimulatedAllocation,
        layout: Layout,
        host: HostArray,
        *,
        checks: bool,
        moves: bool = True,
    ) -> None:
        self.kind = kind
        self.nbytes = layout.nbytes
        self.number = 0
        self.due = 0.0
        self.seen: Mapping[int, int] = {}
        self.landed = False
        self.problem: DeviceError | None = None
        self.host_range = byte_range(host)
        self._allocation = weakref.ref(allocation)
        self._described = repr(allocation)
        self._layout = layout
        self._host: HostArray | None = host
        self._moves = moves
        self._fingerprint = _fingerprint(host) if checks and kind == "to_device" else None

    def touches(self, host_range: HostRange) -> bool:
        """Whether it uses any of these host addresses."""
        return overlap(self.host_range, host_range)

    def poison(self) -> None:
        """Make a read of the destination that comes too early show."""
        if self.kind == "to_host":
            assert self._host is not None
            _fill(self._host)
        else:
            allocation = self._allocation()
            if allocation is not None and not allocation.freed:
                _fill(allocation.view(self._layout))

    def land(self) -> None:
        """Move the bytes, or find out why that cannot be. No lock is held; one thread at a time."""
        allocation = self._allocation()
        host = self._host
        assert host is not None
        if allocation is None or allocation.freed:
            self.problem = FreedUnderCopy(
                f"{self._described} was dropped while a copy of {self.nbytes} bytes ({self.kind}) was in flight: "
                "keep it until the copy's event was observed"
            )
        elif self._fingerprint is not None and _fingerprint(host) != self._fingerprint:
            self.problem = SourceChanged(
                f"the host buffer of {self.nbytes} bytes was changed while it was being copied to {self._described}: "
                "leave it alone until the copy's event was observed"
            )
        elif not self._moves:
            pass
        elif self.kind == "to_host":
            np.copyto(host, allocation.view(self._layout))
        else:
            np.copyto(allocation.view(self._layout), host)
        self._host = None

    def completed(self) -> None:
        """Forget the allocation's side: the copy was observed. The device's lock is held."""
        allocation = self._allocation()
        if allocation is not None:
            allocation.copies.discard(self)


def _fill(array: HostArray) -> None:
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = PENDING
