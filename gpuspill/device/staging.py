"""Copies of any size between a device and ordinary host memory.

They go in pieces, so that others come in between; by way of pinned memory if the device's plan says
so. Then a thread moves bytes between pinned and ordinary memory while the device moves the next
ones: two buffers for each copy under way, and two copies under way in each direction. What goes on
to somewhere else (to disk) goes there from two such buffers, and is never in host memory as a
whole.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import numpy as np

from gpuspill.device.host import HostArray, as_bytes
from gpuspill.device.port import Allocation, CopyPlan, Device, DeviceError, Event, PinnedBuffer, Stream, StreamKind
from gpuspill.device.values import Part

__all__ = ["Copier", "probe"]

#: Pinned buffers of one copy, and copies of each direction that have some at the same time.
_BUFFERS: Final = 2
_LANES: Final = 2

#: Most bytes of a piece that goes on to a disk: that gains nothing from larger ones.
_ONWARD: Final = 8 * 2**20

#: What is tried, and how much is copied to try it.
_CHUNKS: Final = (2**20, 2 * 2**20, 4 * 2**20, 8 * 2**20, 16 * 2**20)
_SAMPLE: Final = 32 * 2**20


class Copier:
    """Copies whole allocations.

    Parameters
    ----------
    plan
        How. Default: as the device says.

    Notes
    -----
    Thread-safe; no lock is held during a copy. The methods block until everything is done, also if
    they raise: neither end is in use any more. They do not hold the interpreter's lock while bytes
    move.
    """

    def __init__(self, device: Device, plan: CopyPlan | None = None) -> None:
        self._device = device
        self._plan = plan
        # What waits for a disk has lanes of its own: copies to memory must not wait for it.
        self._lanes = {kind: _Lanes(device) for kind in ("to_host", "to_device", "onward")}

    def to_host(self, allocation: Allocation, buffer: memoryview) -> None:
        """Copy an allocation, its producer observed, into a buffer of its size."""
        self.to_host_together([Part(allocation, 0, buffer)])

    def to_host_together(self, parts: Sequence[Part], pinned: Sequence[Part] = ()) -> None:
        """Copy parts of allocations, whose producers were observed, to the host.

        Parameters
        ----------
        parts
            To ordinary memory.
        pinned
            To pinned memory: without a copy in between, and while the others are staged.

        Raises
        ------
        DeviceError
            A copy failed; what the buffers hold is not valid.
        """
        device, stream = self._device, self._device.stream("to_host")
        hosts = [as_bytes(part.host, writable=True) for part in parts]

        def enqueue(piece: _Piece, staging: HostArray | None) -> Event:
            host = hosts[piece.which][piece.start : piece.stop] if staging is None else staging
            part = parts[piece.which]
            return device.copy_to_host(part.allocation, host, stream, offset=part.offset + piece.start)

        def after(piece: _Piece, staging: HostArray) -> None:
            device.copy_on_host(hosts[piece.which][piece.start : piece.stop], staging)

        with _under_way() as events:
            for part in pinned:
                events.append(device.copy_to_host(part.allocation, part.host, stream, offset=part.offset))
            self._in_pieces("to_host", hosts, enqueue, after)

    def _in_pieces(
        self,
        kind: StreamKind,
        hosts: Sequence[HostArray],
        enqueue: Callable[[_Piece, HostArray | None], Event],
        after: Callable[[_Piece, HostArray], None] | None,
    ) -> None:
        sizes = [host.nbytes for host in hosts]
        if any(sizes):
            plan = self._plan or self._device.plan()
            with self._lanes[kind].lend(plan) as buffers:
                _copy(_pieces(sizes, plan.chunk_nbytes), buffers, enqueue, after)

    def onward(self, allocation: Allocation, sink: Callable[[memoryview], object]) -> None:
        """Copy an allocation, its producer observed, in pieces, passed to `sink` in order.

        While it has one, the next one is copied. It may keep a piece no longer than the call lasts;
        what it raises ends the copy and is passed on.

        Raises
        ------
        DeviceError
            A copy failed.
        MemoryError
            There is no memory for the pieces.
        """
        device, stream = self._device, self._device.stream("to_host")

        def enqueue(piece: _Piece, staging: HostArray | None) -> Event:
            assert staging is not None
            return device.copy_to_host(allocation, staging, stream, offset=piece.start)

        def after(piece: _Piece, staging: HostArray) -> None:
            sink(staging.data)

        nbytes = allocation.nbytes
        chunk = min(_ONWARD, (self._plan or device.plan()).chunk_nbytes)
        # Pinned even if copies to ordinary memory are as fast: copies to that may make the caller
        # wait.
        with self._lanes["onward"].lend(CopyPlan(chunk, staged=nbytes > 0)) as buffers:
            while len(buffers) < _BUFFERS:
                buffers.append(np.empty(min(chunk, nbytes), np.uint8))
            _copy(_pieces([nbytes], chunk), buffers, enqueue, after)

    def to_device(self, buffer: memoryview, allocation: Allocation) -> None:
        """Copy a buffer into an allocation of its size, which must not be in use."""
        self.to_device_together([Part(allocation, 0, buffer)])

    def to_device_together(self, parts: Sequence[Part], pinned: Sequence[Part] = ()) -> None:
        """Copy bytes of the host into parts of allocations, which must not be in use.

        Parameters
        ----------
        parts, pinned
            From ordinary and from pinned memory, as for :meth:`to_host_together`.

        Raises
        ------
        DeviceError
            A copy failed; what the allocations hold is not valid.
        """
        device, stream = self._device, self._device.stream("to_device")
        hosts = [as_bytes(part.host, writable=False) for part in parts]

        def enqueue(piece: _Piece, staging: HostArray | None) -> Event:
            host = hosts[piece.which][piece.start : piece.stop]
            if staging is not None:
                device.copy_on_host(staging, host)
            part = parts[piece.which]
            return device.copy_to_device(
                host if staging is None else staging, part.allocation, stream, offset=part.offset + piece.start
            )

        with _under_way() as events:
            for part in pinned:
                events.append(device.copy_to_device(part.host, part.allocation, stream, offset=part.offset))
            self._in_pieces("to_device", hosts, enqueue, after=None)

    def close(self) -> None:
        """Give pinned memory back. What is under way keeps its own."""
        for lanes in self._lanes.values():
            lanes.close()


@contextmanager
def _under_way() -> Iterator[list[Event]]:
    """Wait, at the end of the block, for copies that it enqueued on one stream, however it ends."""
    events: list[Event] = []
    try:
        yield events
        if events:
            events[-1].wait()  # which is after all others
    except BaseException:
        for event in events:
            with suppress(DeviceError):
                event.wait()
        raise


class _Piece(NamedTuple):
    """Bytes of one of the things that are copied together."""

    which: int
    start: int
    stop: int


def _pieces(sizes: Sequence[int], chunk: int) -> list[_Piece]:
    return [
        _Piece(which, start, min(start + chunk, nbytes))
        for which, nbytes in enumerate(sizes)
        for start in range(0, nbytes, chunk)
    ]


def _copy(
    pieces: Sequence[_Piece],
    buffers: list[HostArray],
    enqueue: Callable[[_Piece, HostArray | None], Event],
    after: Callable[[_Piece, HostArray], None] | None,
) -> None:
    """Copy in pieces, by way of `buffers` if any; `after` takes one while the next moves.

    Without buffers all pieces are enqueued, and the last one is waited for: they are on one stream.
    """
    pending: deque[tuple[Event, _Piece, HostArray | None]] = deque()

    def finish() -> None:
        event, piece, staging = pending[0]
        event.wait()
        pending.popleft()
        if staging is not None and after is not None:
            after(piece, staging)

    try:
        for number, piece in enumerate(pieces):
            staging = None
            if buffers:
                if len(pending) == len(buffers):
                    finish()
                staging = buffers[number % len(buffers)][: piece.stop - piece.start]
            pending.append((enqueue(piece, staging), piece, staging))
        if pending and not buffers:
            pending[-1][0].wait()
            pending.clear()
        while pending:
            finish()
    except BaseException:
        # Neither end may go, nor the staging between them, while a copy that was enqueued is under
        # way.
        for event, _, _ in pending:
            with suppress(DeviceError):
                event.wait()
        raise


class _Lanes:
    """Pinned buffers for the copies to one place."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition(threading.Lock())
        self._lent = 0
        self._idle: list[PinnedBuffer] = []

    @contextmanager
    def lend(self, plan: CopyPlan) -> Iterator[list[HostArray]]:
        """Wait for a lane and lend its buffers for the block; none if they cannot be had.

        The holder of a lane waits for nothing but a disk, so every caller that waits for a lane
        gets it.
        """
        if not plan.staged:
            yield []
            return
        with self._changed:
            self._changed.wait_for(lambda: self._lent < _LANES)
            self._lent += 1
            buffers = [self._idle.pop() for _ in range(min(_BUFFERS, len(self._idle)))]
        try:
            buffers = [buffer for buffer in buffers if buffer.nbytes == plan.chunk_nbytes]
            with suppress(MemoryError):  # fewer then, or ordinary memory
                while len(buffers) < _BUFFERS:
                    buffers.append(self._device.pinned(plan.chunk_nbytes))
            yield [as_bytes(buffer.view, writable=True) for buffer in buffers]
        finally:
            with self._changed:
                self._lent -= 1
                self._idle += buffers
                self._changed.notify()

    def close(self) -> None:
        """Release what is idle."""
        with self._changed:
            idle, self._idle = self._idle, []
        for buffer in idle:
            with suppress(DeviceError):
                buffer.release()


def probe(device: Device, now: Callable[[], float] = time.perf_counter) -> CopyPlan:
    """Find out, by trying, how to copy from and to ordinary memory. Takes tens of ms.

    Parameters
    ----------
    now
        Returns the time in seconds.

    Returns
    -------
    CopyPlan
        The smallest piece that is about as fast as the fastest, by way of pinned memory unless that
        is slower.

    Raises
    ------
    MemoryError
        There is no room to try.
    DeviceError
        The device failed.
    """
    if device.memory_info().free < 4 * _SAMPLE:
        raise MemoryError("too little room on the device to try how fast copies are")
    allocation = device.allocate(_SAMPLE)
    stream = device.stream("to_host")
    with device.pinned(_SAMPLE) as pinned:
        seconds = {chunk: _time(device, allocation, pinned.view, chunk, stream, now) for chunk in _CHUNKS}
    fastest = min(seconds.values())
    chunk = next(chunk for chunk in _CHUNKS if seconds[chunk] <= 1.05 * fastest)
    ways = {}
    for staged in (True, False):
        plan = CopyPlan(chunk, staged)
        copier = Copier(device, plan)
        try:
            copier.to_host(allocation, _fresh())  # the buffers for staging are made
            # To pages that the system has yet to find: so are those that what leaves goes to, if
            # they are not pinned.
            fresh = _fresh()
            start = now()
            copier.to_host(allocation, fresh)
            ways[plan] = now() - start
        finally:
            copier.close()
    return min(ways, key=ways.__getitem__)


def _fresh() -> memoryview:
    """Return memory for the sample, untouched."""
    return memoryview(mmap.mmap(-1, _SAMPLE))


def _time(
    device: Device, allocation: Allocation, host: memoryview, chunk: int, stream: Stream, now: Callable[[], float]
) -> float:
    """Return how long a copy in pieces takes; the better of two."""
    found = []
    for _ in range(2):
        start = now()
        events = [
            device.copy_to_host(allocation, host[low : low + chunk], stream, offset=low)
            for low in range(0, len(host), chunk)
        ]
        for event in events:
            event.wait()
        found.append(now() - start)
    return min(found)
