"""Computations on the simulated device: NumPy's, enqueued on a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from gpuspill.simulated.device.memory import SimulatedAllocation
from gpuspill.simulated.device.streams import Schedule, SimulatedEvent, SimulatedStream

__all__ = ["Kernels"]

# Stream to compute on, by the number of its device's schedule. The mappings are never changed, only
# replaced.
_chosen: ContextVar[MappingProxyType[int, SimulatedStream]] = ContextVar(
    "gpuspill-simulated-streams", default=MappingProxyType({})
)


class Kernels:
    """Computations of one device. Thread-safe.

    Attributes
    ----------
    count
        How many there were.
    """

    def __init__(self, schedule: Schedule, default_stream: SimulatedStream) -> None:
        self._schedule = schedule
        self._default_stream = default_stream
        self.count = 0

    @property
    def stream(self) -> SimulatedStream:
        """The stream on which the calling context computes."""
        return _chosen.get().get(id(self), self._default_stream)

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Compute on `stream` in this context until the end of the block."""
        token = _chosen.set(MappingProxyType({**_chosen.get(), id(self): stream}))
        try:
            yield
        finally:
            _chosen.reset(token)

    def launch(
        self,
        what: str,
        reads: Iterable[SimulatedAllocation],
        writes: Iterable[SimulatedAllocation],
        seconds: float,
    ) -> SimulatedEvent:
        """Enqueue a computation on the current stream and wait for its inputs.

        It needs the bytes of copies that it is ordered after and that have not landed. That wait is
        the simulation's, not the program's: those copies do not count as observed.

        Parameters
        ----------
        what
            Its name, for messages.
        reads, writes
            What it uses. New memory for results is marked with :meth:`produced` afterwards.
        seconds
            How long it takes on the device.

        Raises
        ------
        UnorderedAccess
            It is not ordered after what it depends on.
        UseAfterFree
            It uses memory that was freed.
        """
        schedule, stream = self._schedule, self.stream
        uses = [(allocation, False) for allocation in reads] + [(allocation, True) for allocation in writes]
        with schedule.condition:
            for allocation, written in uses:
                allocation.require()
                schedule.check(stream, allocation, what, writes=written)
            needed = {copy for a, written in uses for copy in a.copies if written or copy.kind == "to_device"}
            pending = [(other, copy) for other, copy in schedule.in_flight() if copy in needed] if needed else []
            event = schedule.issue(stream, seconds)
            for allocation, written in uses:
                schedule.mark(stream, allocation, what, writes=written)
            self.count += 1
        for other, copy in pending:
            schedule.reach(other, copy.number, copy.due)
        return event

    def produced(self, event: SimulatedEvent, allocation: SimulatedAllocation, what: str) -> None:
        """Note that the computation of `event` wrote to new memory, which no one else knows yet."""
        allocation.writer = (event.stream.ident, event.number, what)
