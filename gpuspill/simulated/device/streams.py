"""Streams and events of the simulated device: what is ordered after what, and when it is done.

Work is numbered within its stream. A stream remembers, for every other stream, up to which number
it is ordered after it (a vector clock), and an event is a snapshot of that. So "is this ordered
after the last write?" is answered from what the program *did*, never from how fast anything
happened to be: a race is found on every run.

When a piece of work is done is computed when it is enqueued, from bandwidth and latency. Nothing
happens at that moment. The bytes of a copy move in the thread that first waits for it, or for
something ordered after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuspill.device.port import Event, Stream
from gpuspill.simulated.device.copies import Copy

if TYPE_CHECKING:
    from gpuspill.simulated.device.device import SimulatedDevice
    from gpuspill.simulated.device.schedule import Schedule

__all__ = ["SimulatedEvent", "SimulatedStream"]


class SimulatedEvent(Event):
    """A point in a stream of the simulated device.

    Attributes
    ----------
    stream, number
        The stream, and the number of the last work before the event.
    due
        When that is done, in seconds of the device's clock.
    seen
        What it is ordered after on other streams: stream number → number there.
    copy
        The copy whose event it is, if any.
    """

    __slots__ = ("_schedule", "copy", "due", "number", "seen", "stream")

    def __init__(self, schedule: Schedule, stream: SimulatedStream, copy: Copy | None = None) -> None:
        self._schedule = schedule
        self.stream = stream
        self.number = stream.issued
        self.due = stream.ready_at
        self.seen: Mapping[int, int] = dict(stream.seen)
        self.copy = copy

    def done(self) -> bool:
        """Whether everything before it is done, by the device's clock; if so, the bytes move now."""
        if self._schedule.clock.now() < self.due:
            return False
        self._schedule.complete(self)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until everything before it is done; seconds are those of the device's clock."""
        clock = self._schedule.clock
        if timeout is not None and (deadline := clock.now() + timeout) < self.due:
            clock.wait_until(deadline)
            return False
        self._schedule.complete(self)
        return True

    def __repr__(self) -> str:
        return f"<SimulatedEvent {self.number} of {self.stream!r}, due at {self.due} s>"


class SimulatedStream(Stream):
    """A stream of the simulated device.

    Attributes
    ----------
    name, ident
        For messages; number on the device.
    issued, completed
        Number of the last work enqueued, and of the last that a host thread observed to be done.
    ready_at
        When all that was enqueued will be done, in seconds of the device's clock.
    seen
        What later work is ordered after on other streams: stream number → number there.
    queue
        Copies that were not observed, in order.
    carrying
        Whether a thread is moving the bytes of the first copy that has not landed.
    """

    __slots__ = (
        "_device",
        "_schedule",
        "carrying",
        "completed",
        "ident",
        "issued",
        "name",
        "queue",
        "ready_at",
        "seen",
    )

    def __init__(self, device: SimulatedDevice, schedule: Schedule, name: str, ident: int) -> None:
        self._device = device
        self._schedule = schedule
        self.name = name
        self.ident = ident
        self.issued = 0
        self.completed = 0
        self.ready_at = 0.0
        self.seen: dict[int, int] = {}
        self.queue: deque[Copy] = deque()
        self.carrying = False

    @property
    def device(self) -> SimulatedDevice:
        """The device it is on."""
        return self._device

    def record(self) -> SimulatedEvent:
        """Return an event for everything enqueued so far."""
        with self._schedule.condition:
            return SimulatedEvent(self._schedule, self)

    def wait(self, event: Event) -> None:
        """Order all later work of this stream after `event`."""
        if not isinstance(event, SimulatedEvent) or event.stream.device is not self._device:
            raise ValueError(f"{event!r} is no event of {self._device!r}")
        with self._schedule.condition:
            for ident, number in (*event.seen.items(), (event.stream.ident, event.number)):
                if ident != self.ident:
                    self.seen[ident] = max(self.seen.get(ident, 0), number)
            self.ready_at = max(self.ready_at, event.due)

    def __repr__(self) -> str:
        return f"<SimulatedStream {self.name!r} of {self._device!r}>"
