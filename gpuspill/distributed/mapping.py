"""``Worker.data``: a mapping that spills.

:class:`SpillStore` is correct on its own: ``store[key]`` is the plain object, in any thread that
asks and it is on. What makes a worker fast is that the hooks in :mod:`gpuspill.distributed.worker`
have read the value before anybody asks; where a hook is missing the result is the same, only the
caller waits.
"""

from __future__ import annotations

import threading
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Sized,
)
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from gpuspill.classes import is_instance
from gpuspill.config import Settings
from gpuspill.core.policy import Order
from gpuspill.core.residency import Tier
from gpuspill.device.external import external_types
from gpuspill.distributed.async_get import gather
from gpuspill.distributed.blocking import BlockingReads
from gpuspill.distributed.inspection import TierView, shown, with_device
from gpuspill.distributed.lost import LostValue
from gpuspill.distributed.metrics import Metrics
from gpuspill.distributed.parked import ParkedKeys
from gpuspill.distributed.sizes import SCALARS, Claims, Noted, external_nbytes, measure
from gpuspill.distributed.takeover import AdoptingStore
from gpuspill.distributed.wire import Wire
from gpuspill.errors import DataLostError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.manager.statistics import Statistics
from gpuspill.manager.story import Event
from gpuspill.storage.buffers import BufferPool
from gpuspill.tier import DeviceTier, Internal, Prepared, Skeleton
from gpuspill.tier.tier import lost

__all__ = ["SpillStore", "SpilledSize"]


_ABSENT = object()


class SpilledSize(NamedTuple):
    """Size of what is spilled, as in distributed: bytes saved in memory, bytes on disk."""

    memory: int
    disk: int


class SpillStore(MutableMapping[Hashable, object]):
    """Keys and values of one worker, in memory or on disk.

    Parameters
    ----------
    manager
        Holds the values. :meth:`close` closes it.
    metrics
        What the manager reports its work to.
    pool
        The manager's read buffers.
    records
        The manager's store, if it can take over spilled values.
    tier
        Keeps what values have on a device, if there is one. The manager then has skeletons in the
        place of such values, and keys of the tier's own, which are not shown here.

    Attributes
    ----------
    on_store
        ``on_store(key, value)`` is told of every value that is about to be stored decoded, and
        returns what the worker believes to be its size, in bytes, or None. Asked before ``sizeof``,
        which takes 35 µs and more and would run on the event loop; the worker knows because the
        task's thread measured it.
    passes_on
        ``passes_on(key)``: whether what is about to be stored is what another key holds, and no
        user code had it in hand. Else a record that there is of it no longer counts.
    has_lost_values
        Whether another worker sent word that a value is lost for good, and its key is still here.
    claims
        What values claimed to have in the threads that made them.
    on_lost
        Called with the error when a read by key finds that a value is lost, in the reading thread.

    Notes
    -----
    Thread-safe. Setting, deleting, membership, length and iteration never do I/O and never wait for
    it. Deleting raises nothing but KeyError and reads nothing. Reading a spilled value blocks the
    calling thread; on the event loop's thread it is counted
    (:attr:`~gpuspill.manager.statistics.Statistics.loop_io`) and warned about; use
    :meth:`async_get` there.

    It defines neither ``fast`` nor ``evict()``, by which distributed's memory monitor would spill
    on the event loop; it is told of the process's memory through :meth:`set_offset` instead.
    """

    def __init__(
        self,
        manager: ProxifyManager,
        metrics: Metrics | None = None,
        *,
        settings: Settings | None = None,
        pool: BufferPool | None = None,
        records: AdoptingStore | None = None,
        tier: DeviceTier | None = None,
    ) -> None:
        self.tier = tier
        self._parked = ParkedKeys()
        self._blocking = BlockingReads()
        self.manager = manager
        self.records = records
        self.settings = Settings() if settings is None else settings
        self.pool = pool
        self.on_store: Callable[[Hashable, object], int | None] | None = None
        self.passes_on: Callable[[Hashable], bool] | None = None
        self.on_lost: Callable[[DataLostError], object] | None = None
        self.metrics = Metrics() if metrics is None else metrics
        self._lost: set[Hashable] = set()
        self._prepared: dict[Hashable, Prepared] = {}  # each step is one operation that Python makes atomic
        self.claims = Claims()
        self.claims.parked = self._parked
        self._estimated = Noted()
        self._external = Noted()

    # -- mapping -----------------------------------------------------------------------------------

    @property
    def has_lost_values(self) -> bool:
        """See the class."""
        return bool(self._lost)

    def __setitem__(self, key: Hashable, value: object) -> None:
        if self._parked.given_up:
            self.settle_parked()
        if self._lost:
            self._lost.discard(key)
        if id(type(value)) in SCALARS:
            # With as few calls as can be: this is what the smallest tasks return, by the hundred
            # thousand.
            if self._estimated.nbytes or self._external.nbytes:
                self._estimated.note(key, None)
                self._external.note(key, None)
            self.manager.store(key, value, None if self.on_store is None else self.on_store(key, value))
            if self.tier is not None:
                self.tier.settle()
            return
        if type(value) is Wire:
            self.manager.store_encoded(key, value.encoded)
            return
        if is_instance(value, LostValue):
            self._lost.add(key)
            # A receiver has to get something else in its place, which would go unnoticed in a
            # record.
            self.manager.store(key, value, 0, spillable=False)
            return
        nbytes = None if self.on_store is None else self.on_store(key, value)
        prepared = self._prepared_of(key, value)
        self.end_preparing(key)
        claimed = self.claims.take(value)
        self._estimated.note(key, claimed)
        if claimed is not None:
            nbytes = claimed
        externals = external_types()
        external = external_nbytes(value, externals) if externals else None
        self._external.note(key, external)
        if external is not None:
            # It is not in our hands: nothing of it can be evicted, and nothing of it is in the
            # host's memory.
            nbytes = max(0, (measure(value) if nbytes is None else nbytes) - external)
        touched = self.passes_on is None or not self.passes_on(key)
        if self.tier is not None:
            # The worker's size is that of the whole value; what is on the device is counted there.
            skeleton = self.tier.proxify(value, key, touched=touched) if prepared is None else prepared.found
            if skeleton is not value:
                self._estimated.note(key, None)
                self.manager.store(key, skeleton, self.tier.host_nbytes(skeleton, nbytes), spillable=False)
                self.tier.expect_use(skeleton, self.manager.uses.next(key), key)
                self.tier.settle()
                return
        self.manager.store(key, value, nbytes, spillable=external is None, touched=touched)
        if self.tier is not None:
            self.tier.settle()

    def prepare(self, key: Hashable, value: object) -> None:
        """Take a value apart before it is stored, in the thread that made it.

        :meth:`end_preparing` forgets it, if it never is stored.
        """
        assert self.tier is not None
        found = self.tier.prepare(value, label=key)
        if type(found) is Prepared:
            self._prepared[key] = found

    def _prepared_of(self, key: Hashable, value: object) -> Prepared | None:
        """Return what :meth:`prepare` has made of this very value."""
        found = self._prepared.get(key)
        return found if found is not None and found.value is value else None

    def new_nbytes(self, key: Hashable, value: object) -> int:
        """Bytes on a device that come with a value to be stored under `key`."""
        if self.tier is None:
            return 0
        prepared = self._prepared_of(key, value)
        return self.tier.new_nbytes(value) if prepared is None else prepared.new_nbytes

    def end_preparing(self, key: Hashable) -> None:
        """Forget what :meth:`prepare` has made, if it has."""
        self._prepared.pop(key, None)

    def __getitem__(self, key: Hashable) -> Any:
        value = self.manager.get_ready(key, _ABSENT)
        try:
            if value is _ABSENT:
                self._warn(key)
                value = self.manager.get(key)
            if type(value) is Skeleton:
                value = self._resolve(key, value)
        except DataLostError as error:
            if self.on_lost is not None:
                self.on_lost(error)
            raise
        if is_instance(value, LostValue):
            raise value.error
        return value

    def _resolve(self, key: Hashable, skeleton: Skeleton) -> Any:
        assert self.tier is not None
        if not self.tier.is_ready(skeleton):
            self._warn(key)
        try:
            return self.tier.resolve(skeleton)
        except DataLostError as error:
            raise lost(error, key) from error

    def _warn(self, key: Hashable) -> None:
        if threading.get_ident() == self.manager.loop_thread:
            self._blocking.warn(key)

    def holds(self, key: Hashable) -> bool:
        """Whether `key` is here, and nothing has found that its value is lost. No I/O."""
        return key in self.manager and key not in self._lost and not self.manager.is_lost(key)

    def is_ready(self, key: Hashable) -> bool:
        """Whether the value of `key` needs no read or copy. KeyError if unknown."""
        if not self.manager.is_resident(key):
            return False
        return self.tier is None or self.tier.is_ready(self.manager.look(key))

    def any_on_device(self, keys: Iterable[Hashable]) -> bool:
        """Whether a decoded value of `keys` is or was on the device, at least in part."""
        return any(type(self.manager.look(key)) is Skeleton for key in keys)

    def peek(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of `key` if it :meth:`is_ready`, else `default`."""
        value = self.manager.peek(key, default)
        if type(value) is not Skeleton:
            return value
        assert self.tier is not None
        return self.tier.resolve(value) if self.tier.is_ready(value) else default

    def __delitem__(self, key: Hashable) -> None:
        self.manager.discard(key)
        self._lost.discard(key)
        self._estimated.note(key, None)
        self._external.note(key, None)
        if self.tier is not None:
            self.tier.settle()

    def __contains__(self, key: object) -> bool:
        return key in self.manager

    def __len__(self) -> int:
        return len(shown(self.manager.keys())) if self.has_internal_keys else len(self.manager)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(shown(self.manager.keys()))

    # -- parking -----------------------------------------------------------------------------------

    @property
    def has_internal_keys(self) -> bool:
        """Whether the manager may have keys that are not shown."""
        return self.tier is not None or bool(self._parked)

    def park(self, value: object) -> Internal:
        """Store a value under a key of its own, which is not shown; returns the key."""
        key = self._parked.new()
        self[key] = value
        return key

    def wait_for_room(self) -> None:
        """Wait, off the event loop, until what was stored fits. Blocks unless admission is off."""
        if not self.settings.admission or threading.get_ident() == self.manager.loop_thread:
            return
        if self.tier is not None:
            self.tier.manager.admission.wait_for_room()
        self.manager.admission.wait_for_room()

    def unpark_later(self, key: Internal, pins: Sequence[Admission] = ()) -> None:
        """Give a parked value and its pins up, soon. For finalisers: takes no lock."""
        self._parked.give_up(key, pins)

    @property
    def parked(self) -> Sized:
        """The keys of parked values: empty if there is none."""
        return self._parked

    def notice_stalls(self) -> None:
        """Stop waiting for spills that take too long; see :mod:`gpuspill.manager.stalls`."""
        self.manager.stalls.notice()
        if self.tier is not None:
            self.tier.manager.stalls.notice()

    def settle_parked(self) -> None:
        """Delete the parked values that were given up."""
        if self._parked.given_up:
            self._parked.settle(self.pop_quietly)

    def clear(self) -> None:
        """Delete all keys. Reads nothing."""
        self.settle_parked()
        for key in list(self):
            self.pop_quietly(key)

    def pop_quietly(self, key: Hashable) -> None:
        """Delete `key` if it is there. Reads nothing, unlike ``pop``."""
        with suppress(KeyError):
            del self[key]

    __hash__ = object.__hash__
    """By identity, although mappings compare by content: stores are put into weak sets."""

    def __repr__(self) -> str:
        manager = self.manager
        return f"<SpillStore: {len(self)} keys, {manager.spilled_count} of them on disk>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SpillStore belongs to its worker and cannot be pickled; "
            "pass gpuspill.data(...) where a cluster is configured"
        )

    # -- asynchronous (dask/distributed#4424) ------------------------------------------------------

    def async_get(
        self, keys: Collection[Hashable], missing: Literal["raise", "omit"] = "raise", *, order: Order = ()
    ) -> Awaitable[dict[Hashable, Any]]:
        """Read values without holding the event loop, on which this has to be called.

        Parameters
        ----------
        keys
            Any number of keys.
        missing
            ``"raise"``: awaiting raises KeyError if a key is absent when this is called.
            ``"omit"``: absent keys are left out.
        order
            How urgent it is, as the priority of a task: the values may have to wait for room in
            memory. Smaller is sooner; the default goes before all others.

        Returns
        -------
        awaitable of dict
            A future that is done already when all values are in memory. Cancelling it stops the
            wait and nothing else.

        Raises
        ------
        KeyError
            When awaited; see `missing`. A key that was set before is never absent, one that was
            deleted before always is. A key that is deleted while its value is read is delivered.
        DataLostError
            When awaited: a value was on disk and cannot be read back.
        """
        return gather(self.manager, self.tier, keys, missing, order)

    def memory_total(self) -> int:
        """Bytes of values in memory (estimated): neither what is spilled nor the offset."""
        return self.manager.memory_total()

    def set_offset(self, n: int) -> None:
        """Set the bytes to add to :meth:`memory_total` for spilling; may be negative.

        Returns at once; values may be spilled, or no longer be, in the background.
        """
        self.manager.limits.set_offset(n)

    # -- what reads SpillBuffer --------------------------------------------------------------------

    @property
    def spilled_total(self) -> SpilledSize:
        """Bytes on disk only, as they were in memory; bytes of all records. O(1)."""
        return SpilledSize(*self.manager.spilled_total)

    @property
    def cumulative_metrics(self) -> dict[tuple[str, str], float]:
        """A copy of the totals: ``(label, unit) -> value``, labels as ``SpillBuffer``'s."""
        return self.metrics.totals()

    @property
    def memory(self) -> Mapping[Hashable, object]:
        """What is in memory, for inspection. ``len`` is O(1)."""
        return TierView(self, self.manager, Tier.HOST)

    @property
    def disk(self) -> Mapping[Hashable, object]:
        """What is on disk only, for inspection. ``len`` is O(1); reading a value brings it back."""
        return TierView(self, self.manager, Tier.DISK)

    @property
    def slow(self) -> Mapping[Hashable, object]:
        """The same as :attr:`disk`, by the name for distributed's Prometheus collector."""
        return self.disk

    def statistics(self) -> Statistics:
        """Return a snapshot of every number. O(1)."""
        self.settle_parked()
        found = replace(
            self.manager.statistics(),
            estimated_nbytes=self._estimated.total,
            device_external_nbytes=self._external.total,
        )
        return found if self.tier is None else with_device(found, self.tier)

    def story(self, key: Hashable) -> list[Event]:
        """Return what became of the values of `key` since they left a tier; oldest first.

        Events of what they have on a device are among them. The last few thousand of the store are
        kept.
        """
        events = self.manager.story(key)
        value = self.manager.look(key)
        if self.tier is not None and type(value) is Skeleton:
            for unit in value.units:
                events += self.tier.manager.story(unit)
        return sorted(events, key=lambda event: -event.ago)

    def close(self) -> None:
        """Stop background work and remove everything from disk. Blocks; idempotent.

        Values in memory stay readable.
        """
        if self.tier is not None:
            self.tier.close()
        self.manager.close()
        if self.tier is not None:
            # What the threads that have just ended let go of last: no thread comes by any more to
            # notice.
            self.tier.settle()
        if self.pool is not None:
            self.pool.close()
