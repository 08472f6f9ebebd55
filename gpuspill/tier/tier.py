"""The way of values to the device's manager and back."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from gpuspill.core.policy import MakePolicy, Order
from gpuspill.core.residency import Tier
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.past_host import PastHost
from gpuspill.device.port import Device
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.storage.buffers import BufferPool
from gpuspill.tier.assemble import Builder
from gpuspill.tier.composites import DeviceObject, Families, TakenApart
from gpuspill.tier.disassemble import Disassembler
from gpuspill.tier.entry import UnitIntake
from gpuspill.tier.finding import Finder
from gpuspill.tier.host_store import HostRecords
from gpuspill.tier.out_of_memory import OutOfMemoryGuard
from gpuspill.tier.overlaps import reductions
from gpuspill.tier.pinned_pool import PinnedPool
from gpuspill.tier.prefetch import Readahead
from gpuspill.tier.read import Reader, lost
from gpuspill.tier.registry import Book
from gpuspill.tier.serializer import DeviceSerializer
from gpuspill.tier.statistics import TierStatistics
from gpuspill.tier.units import DeviceMemory, Leaf, Prepared, Skeleton, Unit

__all__ = ["DeviceTier", "lost"]

#: What a skeleton is charged for in host memory, at least.
SKELETON_NBYTES = 256


class DeviceTier:
    """Keeps what values have on a device within a limit, by the help of the host's manager.

    A value goes in by :meth:`proxify`, which returns what to store in its place, and comes out by
    :meth:`resolve`.

    Parameters
    ----------
    host
        Manager of the host's memory: what leaves the device goes there, and what values have on the
        device that are decoded there comes from it.
    limit
        Bytes to keep on the device; None for no limit. The device running full makes room in any
        case.
    families
        Know composite types; None if there are none.
    allocate
        Gives host buffers.
    past_host
        Moves bytes between the device and files; None if nothing can.
    pinned_limit
        Bytes of host memory to pin at most for what has left the device; a fraction is one of the
        host's limit, when something leaves for the first time.
    policy, spill_threads, restore_threads, spill_timeout
        See :class:`~gpuspill.manager.ProxifyManager`.
    name
        Part of the thread names.
    closed
        Called when it is closed.

    Attributes
    ----------
    manager
        Manager of the device's memory, by unit.
    ahead
        Brings units before they are needed.
    pinned
        Pinned memory for what has left the device.
    grace
        How many of the values that were used up last leave only when there is nothing else to
        evict: they are likely to be given up in a moment, and would be copied for nothing.

    Notes
    -----
    Thread-safe. Methods that may copy say that they block; the others are fast.
    """

    def __init__(
        self,
        device: Device,
        host: ProxifyManager,
        *,
        limit: int | None,
        registry: ArrayRegistry | None = None,
        families: Families | None = None,
        allocate: Callable[[int], memoryview] | None = None,
        past_host: PastHost | None = None,
        pinned_limit: float = 0,
        policy: MakePolicy | None = None,
        spill_threads: int = 1,
        restore_threads: int = 2,
        spill_timeout: float = 0.0,
        name: str = "0",
        closed: Callable[[], None] | None = None,
    ) -> None:
        self._closed = closed
        self.device = device
        if registry is None:
            from gpuspill.device.adapters import all_adapters  # needs NumPy, which workers without a device may lack

            registry = ArrayRegistry(all_adapters(), pointer_device=device.device_of)
        self._registry = registry
        self._book = Book(device, registry)
        # On the thread that lets things go: it has time.
        self.pinned = PinnedPool(
            device, lambda: _part_of(host, pinned_limit), lambda work: self.manager.engine.reap(work)
        )
        self._serializer = DeviceSerializer(
            device,
            self._book,
            BufferPool(0).allocate if allocate is None else allocate,
            families,
            past_host,
            self.pinned,
        )
        self._records = HostRecords(host, in_place=past_host is not None, make_room=self.pinned.trim)
        self._host = host
        host.disperse_by(self._disperse)
        self.manager = ProxifyManager(
            limit=limit,
            store=self._records,
            serializer=self._serializer,
            sizeof=_sizeof,
            custody=self._book,
            policy=policy,
            loads_together=self._serializer.loads_together,
            # The copy in host memory would take room that others need; reading from there is cheap
            # to repeat.
            keep_clean=False,
            spill_threads=spill_threads,
            restore_threads=restore_threads,
            spill_timeout=spill_timeout,
            name=f"{name}-device",
        )
        self._end_release = device.release_by(self.manager.engine.reap)
        self.grace = 0
        self._ended: OrderedDict[Hashable, tuple[Unit, ...]] = OrderedDict()
        self._guard = OutOfMemoryGuard(device, self.manager, self.settle, self._largest, self._book)
        self.ahead = Readahead(self.manager, self._guard.verify)
        entry = UnitIntake(device, self._book, self.manager)
        self._finder = Finder(device, registry, families)
        self._disassembler = Disassembler(self._finder, self._book, entry, self.settle)
        self._serializer.take_apart = self._disassembler.take_apart
        self._reader = Reader(self.manager, Builder(registry, families, self._book), self.settle, self._guard.verify)

    # -- in ----------------------------------------------------------------------------------------

    def prepare(self, value: Any, label: Hashable = None) -> Any:
        """Take a value apart before it is stored, in the thread that made it.

        That takes the longer the more is in it, and some libraries have a current stream in each
        thread.

        Parameters
        ----------
        value, label
            As for :meth:`proxify`.

        Returns
        -------
        object
            A :class:`Prepared`, with what :meth:`proxify` and :meth:`new_nbytes` return; the value
            itself if it has nothing on the device.
        """
        if self.manager.inherited or not self._finder.may_concern(value):
            return value
        new_nbytes = self.new_nbytes(value)
        return Prepared(value, self.proxify(value, label), new_nbytes)

    def proxify(self, value: Any, label: Hashable = None, *, touched: bool = True) -> Any:
        """Return a ``Skeleton`` of a value that has something on the device; else the value.

        Its memory is known from now on and may leave the device as soon as no caller has an array
        on it. It is given up when the last skeleton with it is.

        Parameters
        ----------
        value
            Anything. What cannot be taken apart is returned as it is.
        label
            Under which room was promised to it, by :meth:`admit`.
        touched
            Whether its memory may have been changed in place, if it is known already: a copy that
            is on its way down may have been made before, and is given up.
        """
        if self.manager.inherited:
            return value  # in a forked child, which stays what it is
        self.settle()
        self._guard.verify()
        if label is not None:
            self.manager.admission.settle(label)
        found = self._disassembler.disassemble(value)
        if found is not value:
            try:
                if touched:
                    self.manager.invalidate(found.units)
            finally:
                for unit in found.units:
                    unit.offered = None
        return found

    def _disperse(self, key: Hashable, value: object, nbytes: int) -> tuple[object, int] | None:
        """Take over what a value has on the device that came to the host as bytes.

        See :mod:`gpuspill.manager.decode`.
        """
        # Its users use it on streams of their own.
        self.device.synchronize()
        skeleton = self.proxify(value, key)
        if skeleton is value:
            return None
        self.expect_use(skeleton, self._host.uses.next(key), key)
        return skeleton, self.host_nbytes(skeleton, nbytes)

    # -- out ---------------------------------------------------------------------------------------

    def is_ready(self, value: Any) -> bool:
        """Whether a value can be resolved without copying."""
        return type(value) is not Skeleton or self._reader.is_ready(value)

    def resolve(self, value: Any) -> Any:
        """Return the value that a skeleton stands for; anything else itself.

        Blocks while what is not on the device is copied there, in the calling thread and on others,
        without waiting for admission.

        Raises
        ------
        DataLostError
            Part of it was on disk and cannot be read back.
        MemoryError
            The device has no room, although everything that could was made to leave.
        ManagerClosed
            The tier was closed while it was not on the device.
        """
        return self._reader.read(value)

    def resolve_all(self, values: Mapping[Hashable, Any], admission: Admission | None = None) -> dict[Hashable, Any]:
        """Return several values resolved; as :meth:`resolve`. A DataLostError names the key.

        Parameters
        ----------
        values
            Values by key.
        admission
            What :meth:`admit` returned for them, if it was asked.
        """
        return self._reader.read_all(values, admission)

    def resolve_later(
        self, values: Mapping[Hashable, Any], admission: Admission | None = None
    ) -> Future[dict[Hashable, Any]]:
        """Return a future of several resolved values, copied on the manager's threads.

        Done at once if everything is on the device. A DataLostError in it names the key. Parameters
        as for :meth:`resolve_all`.
        """
        return self._reader.read_later(values, admission)

    def verify(self) -> None:
        """Install the out-of-memory hook again if a library dropped it. Cheap."""
        self._guard.verify()

    # -- room --------------------------------------------------------------------------------------

    def admit(
        self,
        label: Hashable,
        values: Iterable[Any],
        output_nbytes: int = 0,
        arriving: Mapping[Hashable, int] | None = None,
        order: Order = (),
    ) -> Admission:
        """Pin what values have on the device; ask for room for the rest and for an output.

        Parameters
        ----------
        label
            With which the output will be given to :meth:`proxify`.
        values
            Skeletons; others do not matter.
        output_nbytes
            Bytes that the output is expected to take on the device.
        arriving
            Labels with which values that are needed will be given to :meth:`proxify` when they are
            decoded, and the bytes that they will take on the device.
        order
            How urgent it is; smaller is sooner.
        """
        self.settle()
        self._guard.verify()
        units = dict.fromkeys(unit for value in values if type(value) is Skeleton for unit in value.units)
        admission = self.manager.admission.admit(label, units, output_nbytes, arriving=arriving, order=order)
        self.ahead.needed_now(units)
        return admission

    def expect_use(self, value: Any, order: Order | None, user: Hashable) -> None:
        """Note when `user`, a key, is needed next; smaller `order` is sooner, None unknown.

        Parameters
        ----------
        value
            The skeleton of the key.
        """
        if type(value) is not Skeleton:
            return
        if order is not None:
            for unit in value.units:
                unit.users.add(user)
            self.manager.uses.expect(value.units, order, user)
            self._ended.pop(user, None)
        elif any(user in unit.users for unit in value.units):
            # It stays what is needed soonest, and so leaves last, until enough others were used up.
            self._ended[user] = value.units
            if len(self._ended) > self.grace:
                self._drop_uses(*self._ended.popitem(last=False))

    def _drop_uses(self, user: Hashable, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.users.discard(user)
        self.manager.uses.drop(units, user)

    def prefetch(self, values: Iterable[Any]) -> int:
        """Begin to bring values that are needed in this order; see :meth:`Readahead.bring`."""
        return self.ahead.bring(value.units for value in values if type(value) is Skeleton)

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more would leave half of the limit free."""
        limits = self.manager.limits
        return limits.limit is None or self.manager.memory_total() + limits.offset + nbytes < limits.limit // 2

    def new_nbytes(self, value: Any) -> int:
        """Bytes of a plain value's memory on the device that is not known yet, each once."""
        return self._disassembler.new_nbytes(value)

    def overlaps(self, value: Any) -> dict[int, Any]:
        """Return how to pickle arrays that share bytes; see :mod:`gpuspill.tier.overlaps`."""
        return reductions(value, self._finder, self._registry, self.device)

    def host_nbytes(self, skeleton: Skeleton, nbytes: int | None) -> int:
        """Bytes that a skeleton takes in host memory.

        Parameters
        ----------
        skeleton
            What :meth:`proxify` returned.
        nbytes
            Size of the whole value, if it is known: it may have more than arrays of the device.
        """
        if nbytes is None or type(skeleton.tree) is Leaf:
            return SKELETON_NBYTES
        return max(SKELETON_NBYTES, nbytes - skeleton.device_nbytes)

    def settle(self) -> None:
        """Let go of unreferenced units, and count what lingers. Nearly free if none are."""
        if self.manager.inherited:
            return
        book = self._book
        while book.unsettled:  # more follows from what is let go of here
            for unit in book.settle():
                for user in list(unit.users):
                    self.manager.uses.drop([unit], user)
                with suppress(KeyError):
                    self.manager.discard(unit)
        lingering = book.lingering_nbytes
        if lingering != self.manager.limits.offset:
            self.manager.limits.set_offset(lingering)

    @property
    def skeletons(self) -> int:
        """How many skeletons there are."""
        return self._book.skeletons

    # -- numbers -----------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """Return a snapshot of every number."""
        self.settle()
        statistics = self.manager.statistics()
        pinned = self.pinned.statistics()
        return TierStatistics(
            host_pinned_nbytes=pinned.pinned_nbytes,
            host_pinned_used_nbytes=pinned.lent_nbytes,
            host_pinned_refused=pinned.refused,
            limit=statistics.limit,
            units=statistics.values - self._book.taken_apart,
            device_nbytes=statistics.host_nbytes,
            pinned_nbytes=statistics.pinned_nbytes,
            reserved_nbytes=statistics.reserved_nbytes,
            spilled_nbytes=statistics.spilled_nbytes,
            lingering_nbytes=statistics.offset_nbytes,
            estimated_nbytes=self._book.estimated_nbytes,
            spills=statistics.spills,
            direct_spills=self._records.direct,
            past_host_spills=self._serializer.past_host_spills,
            restores=statistics.restores,
            out_of_memory=self._guard.calls,
            out_of_memory_helped=self._guard.helped,
            loop_io=statistics.loop_io,
            overruns=statistics.overruns,
        )

    def _largest(self) -> str:
        manager = self.manager
        sizes = []
        for unit in manager.keys_in(Tier.HOST):  # its own memory, that is
            with suppress(KeyError):
                sizes.append(manager.nbytes(unit))
        return ", ".join(f"{nbytes} bytes" for nbytes in heapq.nlargest(5, sizes))

    def validate(self) -> None:
        """Raise AssertionError if tables and memory differ. O(n); for tests at rest."""
        self.settle()
        self.pinned.validate()
        self.manager.validate()
        for key in self.manager:
            assert isinstance(key, Unit)
            assert key.references > 0, f"{key} is kept without a reference"
            memory = self.manager.peek(key)
            if type(memory) is TakenApart:
                assert self.manager.nbytes(key) == 0
            elif memory is not None:
                assert memory.unit is key
                assert memory.identity.nbytes == self.manager.nbytes(key)
                assert key.nbytes == memory.identity.nbytes or key.parts
                assert self._book.identified(memory), f"{key} is on the device and not known there"

    def close(self) -> None:
        """Stop background work; what is on the device stays readable. Blocks; idempotent."""
        self._guard.close()
        self._end_release()
        self.manager.close()
        self._serializer.close()
        self.pinned.close()
        if self._closed is not None:
            self._closed()


def _part_of(host: ProxifyManager, limit: float) -> int:
    return int(limit) if isinstance(limit, int) else int(limit * (host.limits.limit or 0))


def _sizeof(value: object) -> int:
    if type(value) is TakenApart:
        return 0
    assert isinstance(value, DeviceMemory | DeviceObject)
    return value.unit.nbytes
