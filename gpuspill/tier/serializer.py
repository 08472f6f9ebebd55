"""Memory of a device to host bytes and back: the serialiser of the device's manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from gpuspill.device.past_host import PastHost
from gpuspill.device.port import Allocation, AllocationId, Device, DeviceError, Event
from gpuspill.device.values import Part
from gpuspill.errors import StorageError
from gpuspill.manager.ports import Serialized
from gpuspill.storage.base import FrameStream
from gpuspill.storage.inplace import FileMemory
from gpuspill.tier.composites import DeviceObject, Families
from gpuspill.tier.pinned_pool import PinnedPool
from gpuspill.tier.registry import Book
from gpuspill.tier.units import DeviceMemory, Unit

__all__ = ["DeviceSerializer"]

_T = TypeVar("_T")


class DeviceSerializer:
    """Copies units from and to a device.

    Parameters
    ----------
    book
        Told where units are.
    allocate
        Gives host buffers.
    families
        Move opaque objects.
    past_host
        Moves bytes between the device and files; None if nothing can.
    pinned
        Pinned memory for what leaves; None if there is none.

    Attributes
    ----------
    take_apart
        Called with a composite that has to leave, in the thread that makes it leave.
    """

    def __init__(
        self,
        device: Device,
        book: Book,
        allocate: Callable[[int], memoryview],
        families: Families | None = None,
        past_host: PastHost | None = None,
        pinned: PinnedPool | None = None,
    ) -> None:
        self._pinned = pinned
        self.take_apart: Callable[[DeviceObject], object] = lambda memory: None
        self._families = families
        self.past_host = past_host
        self._device = device
        self._book = book
        self._allocate = allocate
        from gpuspill.device.staging import Copier  # needs NumPy, which workers without a device can do without

        self._copier = Copier(device)

    @property
    def past_host_spills(self) -> int:
        """Units that were written past host memory."""
        return 0 if self.past_host is None else self.past_host.writes

    def dumps(self, value: object) -> Serialized:
        """Return a unit's bytes as a stream: they are copied when it is read.

        What is opaque is copied here, which blocks.

        Raises
        ------
        StorageError
            The device reports an error. The unit stays where it is, and may be tried again.
        """
        if type(value) is not DeviceMemory:
            assert isinstance(value, DeviceObject)
            return self._dump_object(value) if value.composite is None else self._take_apart(value)
        return Serialized(str(value.unit.number).encode(), [_UnitStream(self, value.allocation, value.unit)])

    def read(self, source: _UnitStream) -> memoryview:
        """Copy a unit to ordinary host memory of its own."""
        buffer = self._allocate(source.nbytes)
        self._copy([source], partial(self._copier.to_host, source.allocation, buffer))
        return buffer

    def read_together(self, sources: Sequence[_UnitStream]) -> list[list[memoryview]]:
        """Copy several units to host memory, each to its own: ordered together, copied together.

        Each is in parts, of pinned memory if there is some.
        """
        parts: list[Part] = []
        pinned: list[Part] = []
        found = []
        sizes = [source.nbytes for source in sources]
        lent = [None] * len(sizes) if self._pinned is None else self._pinned.allocate_together(sizes)
        for source, nbytes, buffers in zip(sources, sizes, lent, strict=True):
            where = parts if buffers is None else pinned
            buffers = [self._allocate(nbytes)] if buffers is None else buffers
            where += _parts(source.allocation, buffers)
            found.append(buffers)
        self._copy(sources, lambda: self._copier.to_host_together(parts, pinned))
        return found

    def copy_to(self, source: _UnitStream, sink: Callable[[memoryview], object]) -> None:
        """Copy a unit in pieces, and call `sink` with each."""
        self._copy([source], partial(self._copier.onward, source.allocation, sink))

    def copy_into(self, source: _UnitStream, fd: int, before_each: Callable[[], object]) -> bool:
        """Copy a unit to the start of a file, past host memory. False if that is impossible."""
        assert self.past_host is not None
        # What writes files knows of no streams.
        return self._copy([source], partial(self.past_host.write, source.allocation, fd, before_each), observed=True)

    def _copy(self, sources: Sequence[_UnitStream], copy: Callable[[], _T], *, observed: bool = False) -> _T:
        problem: str | None = None
        try:
            self._follow_producers(sources, observed=observed)
            return copy()
        except DeviceError as error:
            nbytes = sum(source.nbytes for source in sources)
            problem = f"could not copy {nbytes} bytes from {self._device!r}: {error}"
        # Not chained: the traceback of what was caught has the unit's memory, and lives as long as
        # the error.
        raise StorageError(problem)

    def _follow_producers(self, sources: Sequence[_UnitStream], *, observed: bool) -> None:
        """Order later copies after the computations of a unit, or observe that these are done."""
        events = self._events(sources)
        if events is None:
            self._device.synchronize()
            return
        copies = self._device.stream("to_host")
        for event in events:
            if observed:
                event.wait()
            else:
                copies.wait(event)

    def _events(self, sources: Sequence[_UnitStream]) -> list[Event] | None:
        """Return events for all that was enqueued so far for some units; None without any."""
        events = self._device.fences([source.allocation for source in sources])
        if events is None:
            return None
        found = dict.fromkeys(events)
        streams: dict[int, Event | None] = {}
        for source in sources:
            for handle, kept in list(source.unit.streams.items()):
                if isinstance(kept, Event):
                    found[kept] = None
                elif handle not in streams:
                    streams[handle] = None if kept is None else self._device.produced(handle)
        found.update((event, None) for event in streams.values() if event is not None)
        return None if None in streams.values() else list(found)

    def _take_apart(self, memory: DeviceObject) -> Serialized:
        # On which streams it was used is not known.
        self._synchronize()
        self.take_apart(memory)
        # No thread reads this record: its unit is stored anew, and has no bytes.
        return Serialized(str(memory.unit.number).encode(), [])

    def _dump_object(self, memory: DeviceObject) -> Serialized:
        assert self._families is not None
        self._synchronize()
        header, frames = self._families.dumps(memory.value)
        return Serialized(b"%d:%s" % (memory.unit.number, header), frames)

    def _synchronize(self) -> None:
        try:
            self._device.synchronize()
        except DeviceError as error:
            raise StorageError(f"could not copy from {self._device!r}: {error}") from None

    def _load_object(self, header: bytes, frames: Sequence[memoryview]) -> DeviceObject:
        assert self._families is not None
        number, _, rest = header.partition(b":")
        # As they are in the host's memory, or were there: the object may not share them.
        value = self._families.loads(rest, [memoryview(bytearray(frame)) for frame in frames])
        unit = self._book.unit(int(number))
        memory = DeviceObject(unit, value, AllocationId(self._device.identity, 0, unit.nbytes))
        self._book.enter_object(memory)
        return memory

    def loads(self, header: bytes, frames: Sequence[memoryview]) -> object:
        """Copy a unit to the device, and wait until it is there. Blocks.

        Raises
        ------
        MemoryError
            The device has no room, although everything that could was made to leave.
        DeviceError
            The copy failed.
        """
        if b":" in header:
            return self._load_object(header, frames)
        unit = self._book.unit(int(header))
        allocation = self._device.allocate(unit.nbytes)
        try:
            self._fill(allocation, frames)
        except BaseException:
            # Now: the traceback refers to it, and may live for long.
            with suppress(DeviceError):
                self._device.free(allocation)
            raise
        return self._enter(unit, allocation)

    def _enter(self, unit: Unit, allocation: Allocation) -> DeviceMemory:
        # Arrays on memory that it had before are no longer its own.
        unit.arrays = {}
        memory = DeviceMemory(unit, allocation, allocation)
        self._book.enter(memory)
        return memory

    def loads_together(self, records: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[object]:
        """Copy several units to the device and wait; None in the place of others. Blocks.

        Raises as :meth:`loads`; then nothing is left on the device of any.
        """
        memories: list[object] = [None] * len(records)
        filled: list[tuple[int, Unit, Allocation]] = []
        parts: list[Part] = []
        try:
            for place, (header, frames) in enumerate(records):
                if b":" not in header:
                    unit = self._book.unit(int(header))
                    allocation = self._device.allocate(unit.nbytes)
                    filled.append((place, unit, allocation))
                    parts += _parts(allocation, frames)
            self._copy_back(parts)
        except BaseException:
            for _, _, allocation in filled:
                with suppress(DeviceError):
                    self._device.free(allocation)
            raise
        for place, unit, allocation in filled:
            memories[place] = self._enter(unit, allocation)
        return memories

    def _fill(self, allocation: Allocation, frames: Sequence[memoryview]) -> None:
        if len(frames) == 1 and isinstance(memory := frames[0].obj, FileMemory):
            if self.past_host is not None:
                # The memory is free for use on this stream, and what reads files knows of no
                # streams.
                self._device.stream("to_device").synchronize()
                if self.past_host.read(memory.fileno(), allocation):
                    return
            frames = [memory.load(frames[0], self._allocate)]
        self._copy_back(_parts(allocation, frames))

    def _copy_back(self, parts: Sequence[Part]) -> None:
        pool = self._pinned
        split: tuple[list[Part], list[Part]] = [], []
        for part in parts:
            split[pool is not None and pool.owns(part.host.obj)].append(part)
        self._copier.to_device_together(*split)

    def close(self) -> None:
        """Give pinned memory back. Idempotent."""
        self._copier.close()


def _parts(allocation: Allocation, buffers: Sequence[memoryview]) -> list[Part]:
    """Return which buffer has which bytes of an allocation that they are parts of."""
    if len(buffers) == 1 and buffers[0].nbytes == allocation.nbytes:
        return [Part(allocation, 0, buffers[0])]
    parts = []
    offset = 0
    for buffer in buffers:
        parts.append(Part(allocation, offset, buffer))
        offset += buffer.nbytes
    assert offset == allocation.nbytes, (offset, allocation)
    return parts


class _UnitStream(FrameStream):
    """The bytes of a unit, on the device until they are wanted.

    Raises what is said for the stream, and MemoryError where the host has no buffer. An error that
    the device reports, of this copy or of something before it, is a StorageError: the unit stays
    where it is, and may be tried again.
    """

    def __init__(self, serializer: DeviceSerializer, allocation: Allocation, unit: Unit) -> None:
        self.nbytes = unit.nbytes
        self.allocation = allocation
        self.unit = unit
        self._serializer = serializer

    @property
    def past_host(self) -> bool:
        """See :attr:`FrameStream.past_host`."""
        past_host = self._serializer.past_host
        return past_host is not None and past_host.worth(self.nbytes)

    @classmethod
    def read_together(cls, streams: Sequence[_UnitStream]) -> list[list[memoryview]]:
        """See :meth:`FrameStream.read_together`. They are of one serialiser."""
        return streams[0]._serializer.read_together(streams)

    def copy_into(self, fd: int, before_each: Callable[[], object]) -> bool:
        """See :meth:`FrameStream.copy_into`."""
        return self._serializer.copy_into(self, fd, before_each)

    def copy_to(self, sink: Callable[[memoryview], object]) -> None:
        """See :meth:`FrameStream.copy_to`."""
        self._serializer.copy_to(self, sink)

    def read(self) -> memoryview:
        """See :meth:`FrameStream.read`."""
        return self._serializer.read(self)
