"""Streams, events and the schedule of the simulated device: order and time of work.

Work is numbered within its stream. A stream remembers, for every other stream, up to which number
it is ordered after it (a vector clock), and an event is a snapshot of that. So "is this ordered
after the last write?" is answered from what the program *did*, never from how fast anything
happened to be: a race is found on every run.

When a piece of work is done is computed when it is enqueued, from bandwidth and latency. Nothing
happens at that moment. The bytes of a copy move in the thread that first waits for it, or for
something ordered after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import NoReturn

from gpuspill.device.host import HostRange
from gpuspill.device.port import Device, DeviceError, Event, Stream, StreamKind, UnorderedAccess
from gpuspill.simulated.device.clock import Clock
from gpuspill.simulated.device.memory import Copy, Mark, SimulatedAllocation
from gpuspill.simulated.device.timeline import Span

__all__ = ["Schedule", "SimulatedEvent", "SimulatedStream"]


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
        """Whether everything before it is done, by the clock; if so, the bytes move now."""
        if self._schedule.clock.now() < self.due:
            return False
        self._schedule.complete(self)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Block until everything before it is done; seconds of the device's clock."""
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

    def __init__(self, device: Device, schedule: Schedule, name: str, ident: int) -> None:
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
    def device(self) -> Device:
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


class Schedule:
    """All streams of one device: enqueues work, checks that it is ordered, and completes it.

    Methods under *enqueueing* need the device's lock. Those under *completing* must be called
    without it: they wait and move bytes.

    Attributes
    ----------
    condition
        The device's lock; notified when a copy has landed.
    streams
        Every stream there ever was, by number.
    violations
        How often the contract was found broken.
    pinned_bytes
        Host memory that counts as pinned.
    timeline
        Where to note what is done when; None if that is not wanted.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.condition = threading.Condition(threading.Lock())
        self.streams: list[SimulatedStream] = []
        self.violations = 0
        self.pinned_bytes = 0
        self.timeline: list[Span] | None = None
        self._links: dict[StreamKind, float] = {"to_host": 0.0, "to_device": 0.0}

    def new_stream(self, device: Device, name: str) -> SimulatedStream:
        """Make a stream. Takes the lock."""
        with self.condition:
            stream = SimulatedStream(device, self, name, len(self.streams))
            self.streams.append(stream)
            return stream

    # -- enqueueing --------------------------------------------------------------------------------

    def issue(self, stream: SimulatedStream, seconds: float, copy: Copy | None = None) -> SimulatedEvent:
        """Enqueue work that takes `seconds`; a copy also waits for the link of its direction."""
        start = max(self.clock.now(), stream.ready_at)
        if copy is not None:
            start = max(start, self._links[copy.kind])
            self._links[copy.kind] = start + seconds
        stream.ready_at = start + seconds
        if self.timeline is not None and seconds:
            lane, nbytes = (stream.name, 0) if copy is None else (copy.kind, copy.nbytes)
            self.timeline.append(Span(lane, start, start + seconds, nbytes))
        stream.issued += 1
        event = SimulatedEvent(self, stream, copy)
        if copy is not None:
            copy.number, copy.due, copy.seen = event.number, event.due, event.seen
            stream.queue.append(copy)
        return event

    def mark(self, stream: SimulatedStream, allocation: SimulatedAllocation, what: str, *, writes: bool) -> None:
        """Note that the work just issued on `stream` uses `allocation`."""
        mark = (stream.ident, stream.issued, what)
        if writes:
            allocation.writer = mark
            allocation.readers.clear()
        else:
            allocation.readers[stream.ident] = mark

    def after(self, allocation: SimulatedAllocation) -> SimulatedEvent:
        """Return an event after all work that was enqueued for an allocation."""
        marks = list(allocation.readers.values())
        if allocation.writer is not None:
            marks.append(allocation.writer)
        event = SimulatedEvent(self, self.streams[0])
        # What is observed to be done needs no waiting; the rest is done when its stream is, at the
        # latest.
        event.seen = {ident: number for ident, number, _ in marks if self.streams[ident].completed < number}
        event.number, event.due = 0, max((self.streams[ident].ready_at for ident in event.seen), default=0.0)
        return event

    def check(self, stream: SimulatedStream, allocation: SimulatedAllocation, what: str, *, writes: bool) -> None:
        """Raise UnorderedAccess unless work enqueued on `stream` now may use `allocation`."""
        earlier = [] if allocation.writer is None else [allocation.writer]
        if writes:
            earlier += allocation.readers.values()
        for mark in earlier:
            if not self._ordered(stream, mark):
                self._complain(stream, what, repr(allocation), mark)

    def check_host(self, stream: SimulatedStream, copy: Copy, what: str) -> bool:
        """Raise UnorderedAccess if an unordered copy in flight conflicts in host memory.

        Returns
        -------
        bool
            Whether an earlier copy, ordered before this one, still uses the host memory.
        """
        shared = False
        for other, earlier in self.in_flight(copy.host_range):
            mark = (other.ident, earlier.number, f"a copy ({earlier.kind})")
            if "to_host" in (copy.kind, earlier.kind) and not self._ordered(stream, mark):
                self._complain(stream, what, "host memory", mark)
            shared = True
        return shared

    def _ordered(self, stream: SimulatedStream, mark: Mark) -> bool:
        ident, number, _ = mark
        return ident == stream.ident or self.streams[ident].completed >= number or stream.seen.get(ident, 0) >= number

    def _complain(self, stream: SimulatedStream, what: str, memory: str, mark: Mark) -> NoReturn:
        self.violations += 1
        ident, _, earlier = mark
        raise UnorderedAccess(
            f"{what} on stream {stream.name!r} uses {memory}, which {earlier} on stream "
            f"{self.streams[ident].name!r} may still be using: nothing orders the one after the other. Let the stream "
            "wait for an event of the other (Stream.wait), or observe one (Event.wait, Event.done, synchronize) first"
        )

    def in_flight(self, host_range: HostRange | None = None) -> list[tuple[SimulatedStream, Copy]]:
        """Return the copies that were not observed; of `host_range` only, if given."""
        return [
            (stream, copy)
            for stream in self.streams
            for copy in stream.queue
            if host_range is None or copy.touches(host_range)
        ]

    def validate(self) -> None:
        """Raise AssertionError unless the queues hold what was not observed, in order."""
        for stream in self.streams:
            numbers = [copy.number for copy in stream.queue]
            assert numbers == sorted(set(numbers)), (stream, numbers)
            assert all(stream.completed < number <= stream.issued for number in numbers), (stream, numbers)
            assert stream.completed <= stream.issued, stream

    # -- completing --------------------------------------------------------------------------------

    def complete(self, event: SimulatedEvent) -> None:
        """Wait until `event` is due; move the bytes of copies before it, as observed.

        Raises
        ------
        DeviceError
            A copy before it went wrong, and this is its event or the error was not raised yet.
        """
        with self.clock.call():
            self._complete(event)

    def _complete(self, event: SimulatedEvent) -> None:
        before = [(self.streams[ident], number) for ident, number in event.seen.items()]
        for stream, number in before:
            self.reach(stream, number, event.due)
        self.reach(event.stream, event.number, event.due)
        problems: list[DeviceError] = []
        with self.condition:
            for stream, number in (*before, (event.stream, event.number)):
                problems += self._observe(stream, number)
        if event.copy is not None and event.copy.problem is not None:
            raise event.copy.problem
        if problems:
            raise problems[0]

    def reach(self, stream: SimulatedStream, number: int, due: float) -> None:
        """Wait until work is due and move its bytes, without observing the copies."""
        if self.clock.runs_by_itself:
            # Moving the bytes takes real time, which is part of the time that the copy is to take.
            self._carry(stream, number)
            self.clock.wait_until(due)
        else:
            self.clock.wait_until(due)
            self._carry(stream, number)

    def _observe(self, stream: SimulatedStream, number: int) -> list[DeviceError]:
        problems = []
        stream.completed = max(stream.completed, number)
        while stream.queue and stream.queue[0].number <= number:
            copy = stream.queue.popleft()
            copy.completed()
            if copy.problem is not None:
                self.violations += 1
                problems.append(copy.problem)
        return problems

    def _carry(self, stream: SimulatedStream, number: int) -> None:
        """Move the bytes of a stream's copies up to `number`, each after what it is ordered after.

        One thread at a time for each stream; others wait for it. They cannot wait for each other in
        a circle: a copy is taken up only when all before it on its stream have landed, and nothing
        is ordered after itself.
        """
        while True:
            with self.condition:
                copy = next((c for c in stream.queue if not c.landed), None)
            if copy is None or copy.number > number:
                return
            for ident, earlier in copy.seen.items():
                self._carry(self.streams[ident], earlier)
            with self.condition:
                if stream.carrying:
                    self.condition.wait_for(lambda: not stream.carrying)
                    continue
                if copy.landed:
                    continue
                stream.carrying = True
            try:
                copy.land()
            except Exception as error:
                copy.problem = DeviceError(f"the copy could not be done: {error!r}")
            finally:
                with self.condition:
                    copy.landed = True
                    stream.carrying = False
                    self.condition.notify_all()
