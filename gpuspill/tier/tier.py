"""The way of values to the device's manager and back."""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace as replace_fields
from typing import Any

from gpuspill.admission import Admission
from gpuspill.buffers import BufferPool
from gpuspill.core.policy import Order
from gpuspill.core.residency import Tier
from gpuspill.device.arrays import ArrayDescription, ArrayRegistry, Recipe
from gpuspill.device.base import Device
from gpuspill.device.external import external_types
from gpuspill.device.past_host import PastHost
from gpuspill.errors import DataLostError, cut_loose
from gpuspill.manager import ProxifyManager
from gpuspill.tier.ahead import Lookahead
from gpuspill.tier.book import Book
from gpuspill.tier.composites import Composite, DeviceObject, Families
from gpuspill.tier.pressure import OutOfMemoryGuard
from gpuspill.tier.records import HostRecords
from gpuspill.tier.serializer import DeviceSerializer
from gpuspill.tier.statistics import TierStatistics
from gpuspill.tier.units import DeviceMemory, Leaf, Skeleton, Unit
from gpuspill.walk import replace

__all__ = ["DeviceTier", "lost"]

logger = logging.getLogger("gpuspill")

#: What a skeleton is charged for in host memory, at least.
SKELETON_NBYTES = 256


class DeviceTier:
    """Keeps what values have on a device within a limit, by the help of the host's manager.

    A value goes in by :meth:`proxify`, which returns what to store in its place, and comes out by :meth:`resolve`.

    Parameters
    ----------
    device
        The device.
    host
        Manager of the host's memory: what leaves the device goes there.
    limit
        Bytes to keep on the device; None for no limit. The device running full makes room in any case.
    registry
        Knows arrays.
    families
        Know composite types; None if there are none.
    allocate
        Gives host buffers.
    past_host
        Moves bytes between the device and files; None if nothing can.
    spill_threads, restore_threads
        Background threads.
    name
        Part of the thread names.

    Attributes
    ----------
    device
        As given.
    manager
        Manager of the device's memory, by unit.
    ahead
        Brings units before they are needed.
    patience
        How many of the values that were used up last leave only when there is nothing else to evict: they are likely to
        be given up in a moment, and would be copied for nothing.

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
        spill_threads: int = 1,
        restore_threads: int = 2,
        name: str = "0",
    ) -> None:
        self.device = device
        self._registry = ArrayRegistry() if registry is None else registry
        self._families = families
        self._book = Book(device, self._registry)
        self._serializer = DeviceSerializer(
            device, self._book, BufferPool(0).allocate if allocate is None else allocate, families, past_host
        )
        self._records = HostRecords(host, in_place=past_host is not None)
        self.manager = ProxifyManager(
            limit=limit,
            store=self._records,
            serializer=self._serializer,
            sizeof=_sizeof,
            custody=self._book,
            # The copy in host memory would take room that others need; reading from there is cheap to repeat.
            keep_clean=False,
            spill_threads=spill_threads,
            restore_threads=restore_threads,
            name=f"{name}-device",
        )
        self.patience = 0
        self._ended: OrderedDict[Hashable, tuple[Unit, ...]] = OrderedDict()
        self._guard = OutOfMemoryGuard(device, self.manager, self.settle, self._largest)
        self.ahead = Lookahead(self.manager, self._guard.verify)

    # -- in ----------------------------------------------------------------------------------------

    def proxify(self, value: Any, label: Hashable = None) -> Any:
        """Return a :class:`Skeleton` of a value that has something on the device; any other value itself.

        Its memory is known from now on and may leave the device as soon as nobody has an array on it. It is given up
        when the last skeleton with it is.

        Parameters
        ----------
        value
            Anything. What cannot be taken apart is returned as it is.
        label
            Under which room was promised to it, by :meth:`admit`.
        """
        self.settle()
        self._guard.verify()
        if label is not None:
            self.manager.settle(label)
        units: dict[Unit, None] = {}
        leaves: dict[int, Leaf | Composite] = {}
        externals = external_types()

        def stand_in(item: Any) -> Any:
            if externals and isinstance(item, externals):
                return item
            leaf = leaves.get(id(item))
            if leaf is None:
                leaf = self._stand_in(item, units)
                if leaf is None:
                    return item
                leaves[id(item)] = leaf
            return leaf

        try:
            tree = replace(value, stand_in)
        except BaseException as error:
            self._book.dead.append((False, tuple(units)))
            self.settle()
            if not isinstance(error, Exception):
                raise
            # Looking into somebody's types runs their code. Storing must not fail for it: then the value stays whole.
            logger.debug("cannot take a value of type %s apart", type(value).__qualname__, exc_info=True)
            return value
        return self._book.skeleton(tree, tuple(units)) if units else value

    def _describe(self, item: Any) -> ArrayDescription | None:
        adapter = self._registry.adapter(type(item))
        if adapter is not None and not adapter.on_device:
            return None
        found = self._registry.describe(item)
        return found if found is not None and found.identity.device == self.device.identity else None

    def _stand_in(self, item: Any, units: dict[Unit, None]) -> Leaf | Composite | None:
        """Return what stands for an item, whose units `units` then has; None if it stays as it is."""
        families = self._families
        if families is not None and self._registry.adapter(type(item)) is None and families.takes_apart(type(item)):
            return self._composite(item, families, units)
        found = self._describe(item)
        if found is None:
            return None
        if found.recipe is not None:
            unit = self._join(item, found, units)
            return None if unit is None else Leaf(unit, found.recipe)
        return None if families is None else self._opaque(item, found, units)

    def _composite(self, item: Any, families: Families, units: dict[Unit, None]) -> Composite | None:
        known = self._book.join_composite(item)
        if known is not None:
            for unit in known.units:
                self._count(unit, units)
            return known
        taken = self._take_apart(item, families)
        if taken is None:
            return None
        header, frames = taken
        leaves: list[Any] = []
        for frame, found in frames:
            if found is None:
                leaves.append(frame)
                continue
            joined = self._join(None, found, units)
            assert joined is not None, f"{self.device!r} borrowed {found.identity} and now does not"
            leaves.append(Leaf(joined, _frame_recipe(found)))
        composite = Composite(header, leaves)
        self._book.remember(composite, item)
        return composite

    def _take_apart(
        self, item: Any, families: Families
    ) -> tuple[Any, list[tuple[Any, ArrayDescription | None]]] | None:
        """Return the header and the frames of a composite, described where they are on the device.

        None if none is, or if one cannot be moved.
        """
        try:
            header, frames = families.take_apart(item)
            described = [(frame, self._describe(frame)) for frame in frames]
            for _, found in described:
                if found is not None:
                    self.device.borrow(found.identity, found.owner)
        except Exception as error:
            logger.debug("cannot take a value of type %s apart: %r", type(item).__qualname__, error)
            cut_loose(error)
            return None
        if not any(found is not None for _, found in described):
            return None
        if any(found is None and self._registry.is_on_device(frame) for frame, found in described):
            return None
        return header, described

    def _opaque(self, item: Any, found: ArrayDescription, units: dict[Unit, None]) -> Leaf:
        unit = self._book.join_object(item)
        if unit is None:
            new = self._book.create(found.identity.nbytes, estimated=True)
            memory = DeviceObject(new, item, found.identity)
            self.manager.store(new, memory, new.nbytes)
            unit = self._book.enter_object(memory, unless_known=True)
            if unit is not new:
                self._book.give_up(new)
                self.manager.discard(new)
        self._count(unit, units)
        return Leaf(unit, None)

    def _count(self, unit: Unit, units: dict[Unit, None]) -> None:
        if unit in units:
            self._book.dead.append((False, (unit,)))  # one reference for each skeleton
        units[unit] = None

    def _join(self, array: Any, found: ArrayDescription, units: dict[Unit, None]) -> Unit | None:
        """Return the unit of an array, which `units` then has; None if its memory cannot be moved.

        Without the array the memory is that of a composite, which whoever stores it has in hand.
        """
        unit = self._book.join(found.identity)
        if unit is not None:
            self._note(unit, array, found)
        if unit is None:
            try:
                allocation = self.device.borrow(found.identity, found.owner)
            except (ValueError, TypeError):
                return None
            new = self._book.create(found.identity.nbytes, estimated=found.estimated)
            memory = DeviceMemory(new, allocation, found.owner)
            self._note(new, array, found)  # in use: it stays here until the walk is over
            self._book.watch(memory)
            # Before it can be found by others. No lock is held, so another thread may do the same.
            self.manager.store(new, memory, new.nbytes)
            unit = self._book.enter(memory, unless_known=True)
            if unit is not new:
                self._book.give_up(new)
                self.manager.discard(new)
                self._note(unit, array, found)
        self._count(unit, units)
        return unit

    def _note(self, unit: Unit, array: Any, found: ArrayDescription) -> None:
        # A buffer that is its own owner would seem in use for ever.
        if array is not None and array is not found.owner:
            assert found.recipe is not None
            self._book.note(unit, found.recipe, array)

    # -- out ---------------------------------------------------------------------------------------

    def is_ready(self, value: Any) -> bool:
        """Whether a value can be resolved without copying."""
        if type(value) is not Skeleton:
            return True
        try:
            return all(map(self.manager.is_resident, value.units))
        except KeyError:
            return False

    def resolve(self, value: Any) -> Any:
        """Return the value that a skeleton stands for; anything else itself.

        Blocks while what is not on the device is copied there, in the calling thread and on others, without waiting for
        admission.

        Raises
        ------
        DataLostError
            Part of it was on disk and cannot be read back.
        MemoryError
            The device has no room, although everything that could was made to leave.
        ManagerClosed
            The tier was closed while it was not on the device.
        """
        if type(value) is not Skeleton:
            return value
        self.settle()
        with self.manager.pin(value.units) as pins:
            if not self.is_ready(value):
                self._guard.verify()
            return self._build(value, self.manager.materialize(pins))

    def resolve_all(self, values: Mapping[Hashable, Any], admission: Admission | None = None) -> dict[Hashable, Any]:
        """Return several values resolved; as :meth:`resolve`. A DataLostError names the key.

        Parameters
        ----------
        values
            Values by key.
        admission
            What :meth:`admit` returned for them, if it was asked.
        """
        if admission is not None and admission.pids:
            self._guard.verify()
            try:
                # All at once, and out of what was promised.
                self.manager.materialize(admission)
            except DataLostError as error:
                raise _named(error, values) from error
        resolved = {}
        for key, value in values.items():
            try:
                resolved[key] = self.resolve(value)
            except DataLostError as error:
                raise lost(error, key) from error
        return resolved

    def resolve_later(
        self, values: Mapping[Hashable, Any], admission: Admission | None = None
    ) -> Future[dict[Hashable, Any]]:
        """Return a future of several values resolved, copied on the manager's threads; never blocks.

        Done at once if everything is on the device. A DataLostError in it names the key. Parameters as for
        :meth:`resolve_all`.
        """
        result: Future[dict[Hashable, Any]] = Future()
        units = dict.fromkeys(unit for value in values.values() if type(value) is Skeleton for unit in value.units)
        if not units:
            result.set_result(dict(values))
            return result
        self._guard.verify()
        pins = None if admission is not None and units.keys() <= admission.pids.keys() else self.manager.pin(units)
        held = dict(values)  # the skeletons, and so the units

        def build(source: Future[dict[Hashable, Any]]) -> None:
            with suppress(InvalidStateError):  # cancelled
                try:
                    memories = source.result()
                    result.set_result({key: self._build(value, memories) for key, value in held.items()})
                except DataLostError as error:
                    result.set_exception(_named(error, held))
                except BaseException as error:
                    result.set_exception(error)
            if pins is not None:
                pins.release()

        chosen = admission if pins is None else pins
        assert chosen is not None
        self.manager.materialize_later(chosen).add_done_callback(build)
        return result

    def _build(self, value: Any, memories: Mapping[Hashable, DeviceMemory | DeviceObject]) -> Any:
        if type(value) is not Skeleton:
            return value

        def build(item: Any) -> Any:
            if type(item) is Leaf:
                memory = memories[item.unit]
                if isinstance(memory, DeviceObject):
                    return memory.value
                assert item.recipe is not None
                return self._book.array(memory, item.recipe)
            return self._put_together(item, memories) if type(item) is Composite else item

        return replace(value.tree, build)

    def _put_together(self, composite: Composite, memories: Mapping[Hashable, Any]) -> Any:
        value = composite.value
        if value is None:
            assert self._families is not None
            frames = [
                self._registry.rebuild(frame.recipe, memories[frame.unit].allocation)
                if type(frame) is Leaf and frame.recipe is not None
                else frame
                for frame in composite.frames
            ]
            value = self._book.remember(composite, composite.put_together(self._families, frames))
        return value

    def verify(self) -> None:
        """See to it that an allocation that does not fit makes room: a library may have dropped the hook. Cheap."""
        self._guard.verify()

    # -- room --------------------------------------------------------------------------------------

    def admit(self, label: Hashable, values: Iterable[Any], output_nbytes: int = 0) -> Admission:
        """Pin what values have on the device, and ask for room for what is not there and for an output.

        Parameters
        ----------
        label
            With which the output will be given to :meth:`proxify`.
        values
            Skeletons; others do not matter.
        output_nbytes
            Bytes that the output is expected to take on the device.
        """
        self.settle()
        self._guard.verify()
        units = dict.fromkeys(unit for value in values if type(value) is Skeleton for unit in value.units)
        admission = self.manager.admit(label, units, output_nbytes)
        self.ahead.needed_now(units)
        return admission

    def expect_use(self, value: Any, order: Order | None, user: Hashable) -> None:
        """Note when `user`, a key, is needed next; a smaller `order` is sooner, None says that nothing is known.

        Parameters
        ----------
        value
            The skeleton of the key.
        order, user
            As above.
        """
        if type(value) is not Skeleton:
            return
        if order is not None:
            for unit in value.units:
                unit.users.add(user)
            self.manager.expect_uses(value.units, order, user)
            self._ended.pop(user, None)
        elif any(user in unit.users for unit in value.units):
            # It stays what is needed soonest, and so leaves last, until enough others were used up.
            self._ended[user] = value.units
            if len(self._ended) > self.patience:
                self._drop_uses(*self._ended.popitem(last=False))

    def _drop_uses(self, user: Hashable, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.users.discard(user)
        self.manager.drop_uses(units, user)

    def prefetch(self, values: Iterable[Any]) -> int:
        """Begin to bring what values have, which are going to be needed in this order; see :meth:`Lookahead.bring`."""
        return self.ahead.bring(unit for value in values if type(value) is Skeleton for unit in value.units)

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more would leave half of the limit free."""
        manager = self.manager
        return manager.limit is None or manager.memory_total() + manager.offset + nbytes < manager.limit // 2

    def new_nbytes(self, value: Any) -> int:
        """Bytes of the memory that a plain value has on the device and that is not known yet, each allocation once."""
        found: dict[Any, int] = {}

        def note(described: ArrayDescription) -> None:
            if not self._book.knows(described.identity):
                found[described.identity] = described.identity.nbytes

        externals, families = external_types(), self._families

        def look(item: Any) -> Any:
            if externals and isinstance(item, externals):
                return item
            if families is not None and self._registry.adapter(type(item)) is None and families.takes_apart(type(item)):
                if not self._book.knows_composite(item):
                    taken = self._take_apart(item, families)
                    for _, frame in () if taken is None else taken[1]:
                        if frame is not None:
                            note(frame)
                return item
            described = self._describe(item)
            if described is not None and described.recipe is not None:
                note(described)
            elif described is not None and families is not None and not self._book.knows_object(item):
                found[described.identity] = described.identity.nbytes
            return item

        try:
            replace(value, look)
        except Exception:
            return 0  # nothing of it will be known
        return sum(found.values())

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
        """Let go of what nobody refers to any more, and count what lingers. Costs next to nothing if there is none."""
        book = self._book
        while book.unsettled:  # more follows from what is let go of here
            for unit in book.settle():
                for user in list(unit.users):
                    self.manager.drop_uses([unit], user)
                with suppress(KeyError):
                    self.manager.discard(unit)
        lingering = book.lingering_nbytes
        if lingering != self.manager.offset:
            self.manager.set_offset(lingering)

    @property
    def skeletons(self) -> int:
        """How many skeletons there are."""
        return self._book.skeletons

    # -- numbers -----------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """Return a snapshot of every number."""
        self.settle()
        statistics = self.manager.statistics()
        return TierStatistics(
            limit=statistics.limit,
            units=statistics.values,
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
        """Raise AssertionError if what is known and what is there contradict each other. O(n); for tests at rest."""
        self.settle()
        self.manager.validate()
        for key in self.manager:
            assert isinstance(key, Unit)
            assert key.references > 0, f"{key} is kept although nobody refers to it"
            memory = self.manager.peek(key)
            if memory is not None:
                assert memory.unit is key
                assert memory.identity.nbytes == key.nbytes == self.manager.nbytes(key)
                assert self._book.identified(memory), f"{key} is on the device and not known there"

    def close(self) -> None:
        """Stop background work. What is on the device stays readable. Blocks; idempotent; before the host's manager."""
        self._guard.close()
        self.manager.close()
        self._serializer.close()


def lost(error: DataLostError, key: Hashable) -> DataLostError:
    """Return the error under the key of a value, part of which is lost."""
    return DataLostError(f"what {key!r} has on the device is lost: {error.message}", key)


def _named(error: DataLostError, values: Mapping[Hashable, Any]) -> DataLostError:
    """Return the error under the key of the value that is lost."""
    for key, value in values.items():
        if type(value) is Skeleton and error.key in value.units:
            return lost(error, key)
    return error


def _frame_recipe(found: ArrayDescription) -> Recipe:
    """Return how to build a frame: as what it was, or as anything that has the array interface."""
    if found.recipe is not None:
        return found.recipe
    low, _ = found.layout.span
    return Recipe("interface", replace_fields(found.layout, offset=-low))


def _sizeof(value: object) -> int:
    assert isinstance(value, DeviceMemory | DeviceObject)
    return value.unit.nbytes
