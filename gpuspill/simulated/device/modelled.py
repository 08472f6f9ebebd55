"""A simulated device that says what its use would cost the host.

Nothing sleeps, and unless it is told to, no byte moves: a clock accounts for all of it
(:class:`ThreadClock`). So gigabytes can be copied at the speed of a link on a machine that has
neither.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuspill.device.host import HostArray, as_bytes, byte_range
from gpuspill.device.port import Allocation, CopyPlan, HostBuffer, Stream, StreamKind
from gpuspill.device.staging import probe
from gpuspill.simulated.device.costs import HostCosts
from gpuspill.simulated.device.device import SimulatedDevice
from gpuspill.simulated.device.memory import SimulatedAllocation
from gpuspill.simulated.device.pinned import SimulatedPinned
from gpuspill.simulated.device.streams import SimulatedEvent
from gpuspill.simulated.device.thread_clock import ThreadClock

__all__ = ["ModelledDevice"]

#: What the system hands out at a time, with huge pages.
_PAGE = 2 * 2**20


class ModelledDevice(SimulatedDevice):
    """A device whose host is modelled.

    Parameters
    ----------
    memory
        Capacity in bytes.
    bandwidth
        Of the link, bytes a second in each direction.
    costs
        What the host pays.
    moves
        Whether copies move bytes as well.
    fence_by_stream
        Whether computations are waited for by an event of the default stream, and not by waiting
        for the device.

    Attributes
    ----------
    costs, clock
        The costs; the clock that accounts for them.
    calls
        How often each method was called.
    pageable_nbytes
        Bytes of copies from and to memory that is not pinned.

    Notes
    -----
    Memory of the host that no copy touched before is fresh, by pages of 2 MiB; what a pool hands
    out again counts as fresh again.
    """

    clock: ThreadClock

    def __init__(
        self,
        memory: int,
        *,
        bandwidth: float,
        costs: HostCosts,
        moves: bool = False,
        fence_by_stream: bool = False,
    ) -> None:
        self._by_stream = fence_by_stream
        self.costs = costs
        self.calls: dict[str, int] = {}
        self.pageable_nbytes = 0
        self._model = threading.Lock()
        # Where pinned memory begins, in order, and where it ends.
        self._pinned_starts: list[int] = []
        self._pinned_ends: dict[int, tuple[int, weakref.ref[Any]]] = {}
        # By the identity of what has the memory, which keeps it there as long as it lives.
        self._touched: dict[int, tuple[weakref.ref[Any], set[int]]] = {}
        self._modelled_plan: CopyPlan | None = None
        super().__init__(
            memory,
            bandwidth=bandwidth,
            latency=costs.latency,
            checks=moves,
            moves=moves,
            clock=ThreadClock(costs.call),
        )

    def _count(self, name: str) -> None:
        with self._model:
            self.calls[name] = self.calls.get(name, 0) + 1

    # -- calls of the driver -----------------------------------------------------------------------

    def allocate(self, nbytes: int) -> SimulatedAllocation:
        """See :meth:`Device.allocate`."""
        with self.clock.call():
            self._count("allocate")
            return super().allocate(nbytes)

    def free(self, allocation: Allocation) -> None:
        """See :meth:`Device.free`."""
        with self.clock.call():
            super().free(allocation)

    def fences(self, allocations: Sequence[Allocation]) -> Sequence[SimulatedEvent] | None:
        """Know nothing of allocations, as a device that is shared with libraries does not."""
        if not self._by_stream:
            return None
        with self.clock.call():
            return [self.default_stream.record()]

    def synchronize(self) -> None:
        """See :meth:`Device.synchronize`."""
        with self.clock.call():
            self._count("synchronize")
            super().synchronize()

    def copy_to_host(
        self, allocation: Allocation, host_buffer: HostBuffer, stream: Stream, *, offset: int = 0
    ) -> SimulatedEvent:
        """See :meth:`Device.copy_to_host`."""
        with self.clock.call():
            event = super().copy_to_host(allocation, host_buffer, stream, offset=offset)
            return self._block("to_host", event, as_bytes(host_buffer, writable=True))

    def copy_to_device(
        self, host_buffer: HostBuffer, allocation: Allocation, stream: Stream, *, offset: int = 0
    ) -> SimulatedEvent:
        """See :meth:`Device.copy_to_device`."""
        with self.clock.call():
            event = super().copy_to_device(host_buffer, allocation, stream, offset=offset)
            return self._block("to_device", event, as_bytes(host_buffer, writable=False))

    def _block(self, kind: StreamKind, event: SimulatedEvent, host: HostArray) -> SimulatedEvent:
        """Let a copy from or to pageable memory take the thread: the driver stages it there."""
        self._count(kind)
        if host.nbytes and not self._is_pinned(host):
            with self._model:
                self.pageable_nbytes += host.nbytes
            self.clock.spend(self._memcpy_seconds(host, host.nbytes if kind == "to_host" else 0, host.nbytes))
            self.clock.wait_until(event.due)
        return event

    def _is_pinned(self, host: HostArray) -> bool:
        start, stop = byte_range(host)
        with self._model:
            place = bisect.bisect_right(self._pinned_starts, start) - 1
            if place < 0:
                return False
            end, memory = self._pinned_ends[self._pinned_starts[place]]
            return stop <= end and memory() is not None

    def pinned(self, nbytes: int) -> SimulatedPinned:
        """Return host memory that counts as pinned, which takes its time."""
        with self.clock.call():
            self._count("pinned")
            self.clock.spend(nbytes / self.costs.pin)
            found = super().pinned(nbytes)
            start, stop = byte_range(as_bytes(found.view, writable=True)) if nbytes else (0, 0)
            with self._model:
                # What was there before is gone, or this could not be there.
                low, high = (bisect.bisect_left(self._pinned_starts, at) for at in (start, stop))
                for gone in self._pinned_starts[low:high]:
                    del self._pinned_ends[gone]
                self._pinned_starts[low:high] = [start]
                self._pinned_ends[start] = stop, weakref.ref(found.view.obj)
            return found

    # -- in host memory ----------------------------------------------------------------------------

    def copy_on_host(self, target: HostArray, source: HostArray) -> None:
        """Charge what copying costs; do it if bytes move."""
        with self.clock.call():
            if self.configuration.moves:
                np.copyto(target, source)
            fresh = 0 if self._is_pinned(target) else target.nbytes
            self.clock.spend(self._memcpy_seconds(target, fresh, target.nbytes) - self.costs.call)

    def _memcpy_seconds(self, target: HostArray, written: int, nbytes: int) -> float:
        """Return how long a thread copies, when `written` bytes of them go to ordinary memory."""
        fresh = min(written, self._fresh_nbytes(target)) if written else 0
        return fresh / self.costs.fresh + (nbytes - fresh) / self.costs.memcpy

    def _fresh_nbytes(self, host: HostArray) -> int:
        """Return how many bytes of it are on pages that are touched for the first time."""
        memory: Any = host
        while isinstance(memory, np.ndarray | memoryview):
            memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
        start, stop = byte_range(host)
        with self._model:
            ref, touched = self._touched.get(id(memory), (None, set()))
            if ref is None or ref() is not memory:
                touched = set()
                try:
                    self._touched[id(memory)] = weakref.ref(memory), touched
                except TypeError:
                    return host.nbytes  # a bytearray
        pages = set(range(start // _PAGE, -(-stop // _PAGE))) - touched
        touched |= pages
        return sum(min(stop, (page + 1) * _PAGE) - max(start, page * _PAGE) for page in pages)

    def plan(self) -> CopyPlan:
        """Return how to copy: found out once, by trying, as on a GPU."""
        if self._modelled_plan is None:
            self._modelled_plan = probe(self, self.clock.now)
        return self._modelled_plan
