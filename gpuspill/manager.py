"""The proxify manager: holds the values, asks the core what to do, does it.

Threads and locks
-----------------
One metadata lock guards the core and the table of slots. It is held for microseconds: never during
I/O, (de)serialisation, a callback, or the destruction of a value. What must follow a decision
(letting values go, deleting records, telling those who wait) is collected under the lock and done
after it. The lock is re-entrant only because the garbage collector may run somebody's finaliser,
which may read the store, in the middle of a section.

A restore is done once, however many threads want the value: the first one reads (*single flight*),
the others wait for its future.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextvars import copy_context
from functools import partial
from sys import getrefcount
from typing import Any, Literal, Protocol

from gpuspill.admission import Admission
from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.ledger import Entry
from gpuspill.core.policy import Order
from gpuspill.core.residency import State, Tier
from gpuspill.core.sizes import SizeModel
from gpuspill.core.state import SpillState
from gpuspill.engine import Engine
from gpuspill.errors import DataLostError, ManagerClosed, StorageError
from gpuspill.proxy import Proxy
from gpuspill.serialization import Serializer
from gpuspill.statistics import Statistics
from gpuspill.storage.base import Receipt, Store

__all__ = ["Observer", "ProxifyManager"]

logger = logging.getLogger("gpuspill")

# : Values below this size are let go where they are; above, on another thread (unmapping 32 MiB
# takes milliseconds).
_REAP_NBYTES = 64 * 1024
#: Seconds between two attempts to evict what could not be evicted: first, and at most.
_BACKOFF = (0.01, 0.2)
# : After so many attempts a value that somebody else holds is evicted all the same, if identity can
# be kept by a weak reference.
_PATIENCE = 3


class Observer(Protocol):
    """Told about every unit of work, in the thread that did it: ``observer(label, value, unit)``.

    Labels and units are those of distributed's fine performance metrics: ``disk-read``,
    ``disk-write``, ``memory-read``, ``serialize``, ``deserialize``; ``seconds``, ``bytes``,
    ``count``.
    """

    def __call__(self, label: str, value: float, unit: str, /) -> None: ...


class _Slot:
    """What the manager keeps of one proxy besides the core's entry."""

    __slots__ = ("ghost", "key", "kind", "lost", "receipt", "refusals", "restoring", "sizeof", "value")

    def __init__(self, key: Hashable, value: object, sizeof: int) -> None:
        self.key = key  # one key it was stored under, for messages
        self.value = value
        self.kind: type = type(value)
        self.sizeof = sizeof
        self.receipt: Receipt | None = None
        self.restoring: Future[Any] | None = None
        self.ghost: weakref.ref[Any] | None = None
        self.refusals = 0
        self.lost: str | None = None


def _unheld_references() -> int:
    """Return the reference count that CPython reports for a value which only its slot refers to."""
    slot = _Slot(None, object(), 0)
    return getrefcount(slot.value)


class _Work:
    """What has to be done after the lock was let go."""

    __slots__ = ("granted", "nbytes", "receipts", "values")

    def __init__(self) -> None:
        self.values: list[object] = []
        self.nbytes = 0
        self.receipts: list[Receipt] = []
        self.granted: list[Admission] = []


class ProxifyManager:
    """All values of one worker, wherever they are.

    Parameters
    ----------
    limit
        Bytes of values to keep in memory; None for no limit.
    disk_limit
        Bytes of records to keep on disk; None for no limit.
    store
        Where records go. The manager closes it.
    serializer
        How values become bytes.
    sizeof
        Bytes a value takes in memory; called on the storing thread when the caller does not give
        the size.
    allocate
        Gives the buffer that a record is read into.
    observer
        Told about I/O and hits.
    keep_clean
        Keep the record of restored values.
    spill_threads, restore_threads
        Background threads.
    name
        Part of the thread names.
    clock
        Seconds, monotonic; for tests.

    Notes
    -----
    All methods may be called from any thread. Those that may block for I/O say so; no other does.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        store: Store,
        serializer: Serializer,
        sizeof: Callable[[object], int],
        disk_limit: int | None = None,
        allocate: Callable[[int], memoryview] | None = None,
        observer: Observer | None = None,
        keep_clean: bool = True,
        spill_threads: int = 1,
        restore_threads: int = 2,
        name: str = "0",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.RLock()
        self._state = SpillState(limit=limit, disk_limit=disk_limit, held=self._held, keep_clean=keep_clean)
        self._slots: dict[int, _Slot] = {}
        self._by_id: dict[int, int] = {}
        self._admissions: dict[Reservation, Admission] = {}
        self._labels: dict[Hashable, Admission] = {}
        self._unheld = _unheld_references()
        self._sizes = SizeModel()
        self._store = store
        self._serializer = serializer
        self._sizeof = sizeof
        self._allocate = allocate
        self._observer = observer
        self._clock = clock
        self._engine = Engine(
            self._spill_step,
            spill_threads=spill_threads,
            restore_threads=restore_threads,
            name=name,
        )
        self._closed = False
        self._pause = _BACKOFF[0]
        self._retry_at = 0.0
        self._logged: set[str] = set()
        self._hits = self._misses = self._loop_io = 0
        self._totals: defaultdict[str, float] = defaultdict(float)
        #: Identifier of the event loop's thread; I/O done on it is counted.
        self.loop_thread: int | None = None

    # -- by key: never blocks ----------------------------------------------------------------------

    def store(self, key: Hashable, value: object, nbytes: int | None = None) -> None:
        """Put `value` in memory under `key`, replacing what the key held; spilling may start in the
        background.

        Parameters
        ----------
        key
            Any hashable.
        value
            Any object. The same object under several keys is charged once.
        nbytes
            Its size in bytes, if the caller knows; else ``sizeof`` is called here.
        """
        if nbytes is None:
            nbytes = self._sizeof(value)
        with self._lock:
            state = self._state
            admission = self._labels.pop(key, None)
            if admission is not None:
                # The output is about to be charged; its promise must not be charged as well.
                state.settle(admission.reservation, admission.outputs.pop(key))
            pid = self._by_id.get(id(value))
            if pid is not None:
                state.alias(key, pid)
            else:
                pid = state.insert(key, self._sizes.estimate(type(value), nbytes))
                self._slots[pid] = _Slot(key, value, nbytes)
                self._by_id[id(value)] = pid
            work = self._after()
        del value
        self._perform(work)

    def adopt(self, key: Hashable, nbytes: int, receipt: Receipt) -> None:
        """Put a value that is on disk already under `key`, replacing what the key held.

        Parameters
        ----------
        key
            Any hashable.
        nbytes
            Bytes that the value will take in memory.
        receipt
            Of its record, which the store can read and now belongs to this manager.
        """
        with self._lock:
            pid = self._state.insert_below(key, nbytes, receipt.nbytes)
            slot = self._slots[pid] = _Slot(key, None, nbytes)
            slot.kind, slot.receipt = object, receipt
            work = self._after()
        self._perform(work)

    def discard(self, key: Hashable) -> None:
        """Forget `key`. Its record is deleted later, on another thread.

        Raises
        ------
        KeyError
            The key is unknown.
        """
        with self._lock:
            self._state.remove(key)
            work = self._after()
        self._perform(work)

    def __contains__(self, key: object) -> bool:
        return key in self._state.ledger.keys

    def __len__(self) -> int:
        return len(self._state.ledger.keys)

    def keys(self) -> list[Hashable]:
        """All keys, as of now."""
        with self._lock:
            return list(self._state.ledger.keys)

    def keys_in(self, tier: Tier) -> list[Hashable]:
        """Return the keys whose value is in memory (`Tier.HOST`) or on disk only (`Tier.DISK`). O(n)."""
        with self._lock:
            wanted = tier is Tier.HOST
            return [key for key, entry in self._state.ledger.keys.items() if entry.residency.resident is wanted]

    def is_resident(self, key: Hashable) -> bool:
        """Whether the value of `key` is in memory now. KeyError if unknown."""
        return self._state.ledger.keys[key].residency.resident

    def nbytes(self, key: Hashable) -> int:
        """Bytes the value of `key` takes in memory, wherever it is. KeyError if unknown."""
        return self._state.ledger.keys[key].nbytes

    def peek(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of `key` if it is in memory, else `default`. Never does I/O; counts as a use."""
        with self._lock:
            entry = self._state.ledger.keys.get(key)
            if entry is None or not entry.residency.resident:
                return default
            return self._hit(entry)

    # -- values ------------------------------------------------------------------------------------

    def get(self, key: Hashable) -> Any:
        """Return the value of `key`.

        If it is on disk it is read in the calling thread, which blocks, without waiting for
        admission.

        Raises
        ------
        KeyError
            The key is unknown.
        DataLostError
            The only copy was on disk and cannot be read back intact.
        ManagerClosed
            The store was closed while the value was on disk.
        """
        with self._lock:
            entry = self._state.ledger.keys[key]
            if entry.residency.resident:
                value = self._hit(entry)
                nbytes = entry.nbytes
            else:
                pid = entry.pid
                nbytes = -1
        if nbytes >= 0:
            self._observe_hit(nbytes)
            return value
        return self._bring(key, pid, None)

    def proxy(self, key: Hashable) -> Proxy:
        """Return a handle for the value that `key` holds now. KeyError if unknown."""
        return Proxy(self, key, self._state.ledger.keys[key].pid)

    def resolve(self, proxy: Proxy) -> Any:
        """Return the value a proxy stands for; as :meth:`get`."""
        return self._bring(proxy.key, proxy.pid, None)

    def nbytes_of(self, proxy: Proxy) -> int:
        """Bytes the value of a proxy takes in memory. KeyError if it is gone."""
        return self._entry(proxy.key, proxy.pid).nbytes

    def get_many(
        self, keys: Iterable[Hashable], missing: Literal["raise", "omit"] = "raise"
    ) -> Future[dict[Hashable, Any]]:
        """Return a future of the values of several keys, read on the restore threads.

        Parameters
        ----------
        keys
            Any number of keys.
        missing
            Whether an unknown key raises KeyError (here, at once) or is left out.

        Returns
        -------
        concurrent.futures.Future
            Done already when every value is in memory. Waits for admission otherwise. Cancelling it
            gives up waiting; reads that have begun end in the background and leave the store
            consistent. A value whose key is deleted meanwhile is delivered.
        """
        result: Future[dict[Hashable, Any]] = Future()
        with self._lock:
            known = self._state.ledger.keys
            found: dict[Hashable, Entry] = {}
            for key in keys:
                entry = known.get(key)
                if entry is not None:
                    found[key] = entry
                elif missing == "raise":
                    raise KeyError(key)
            if all(entry.residency.resident for entry in found.values()):
                result.set_result({key: self._hit(entry) for key, entry in found.items()})
                return result
            admission = self._promise(found, {}, 0, Kind.TRANSFER)
            work = self._after()
        self._perform(work)
        result.add_done_callback(lambda _: admission.release())
        admission.add_done_callback(lambda: self._gather(admission, result))
        return result

    def _gather(self, admission: Admission, result: Future[dict[Hashable, Any]]) -> None:
        """Start the restores of what was admitted; the last one to end delivers."""
        if result.cancelled():
            return
        if not admission.pids:
            result.set_result({})
            return
        pending: list[tuple[Hashable, Future[Any]]] = [
            (key, self._start(key, pid, admission)) for key, pid in admission.pids.items()
        ]
        lock = threading.Lock()
        left = len(pending)

        def ended(_: Future[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            try:
                try:
                    values = {key: self._outcome(key, future) for key, future in pending}
                except Exception as error:
                    result.set_exception(error)
                else:
                    self._settle_inputs(admission)
                    result.set_result(values)
            except InvalidStateError:
                pass  # cancelled
            finally:
                pending.clear()

        for _, future in list(pending):
            future.add_done_callback(ended)

    # -- admission, pins, hints --------------------------------------------------------------------

    def admit(
        self,
        label: Hashable | None,
        inputs: Iterable[Hashable],
        output_nbytes: int = 0,
        *,
        kind: Kind = Kind.TASK,
    ) -> Admission:
        """Pin the inputs and ask for room for those that are not in memory, and for an output.

        Parameters
        ----------
        label
            The key under which the output will be stored; storing it settles the promise. None if
            there is no output.
        inputs
            Keys; pinned from now until :meth:`Admission.release`, whether in memory or not.
        output_nbytes
            Expected size of the output in bytes.
        kind
            Tasks are served before transfers.

        Raises
        ------
        KeyError
            An input is unknown. Nothing stays pinned.
        """
        outputs = {} if label is None or not output_nbytes else {label: output_nbytes}
        with self._lock:
            known = self._state.ledger.keys
            entries = {key: known[key] for key in inputs}
            admission = self._promise(entries, outputs, output_nbytes, kind)
            work = self._after()
        self._perform(work)
        return admission

    def reserve(
        self,
        nbytes: int,
        kind: Kind = Kind.TRANSFER,
        *,
        outputs: Mapping[Hashable, int] | None = None,
    ) -> Admission:
        """Ask for room for bytes that come from elsewhere, such as a transfer.

        Parameters
        ----------
        nbytes
            How many.
        kind
            Tasks are served before transfers.
        outputs
            The keys under which they will be stored and the part of each, if known; storing a key
            settles its part.
        """
        with self._lock:
            admission = self._promise({}, dict(outputs or {}), nbytes, kind)
            work = self._after()
        self._perform(work)
        return admission

    def _promise(
        self,
        entries: Mapping[Hashable, Entry],
        outputs: dict[Hashable, int],
        output_nbytes: int,
        kind: Kind,
    ) -> Admission:
        """Under the lock: pin the inputs and queue for room."""
        state = self._state
        missing = 0
        pids: dict[Hashable, int] = {}
        for key, entry in entries.items():
            state.pin(entry.pid)
            pids[key] = entry.pid
            if entry.residency.state is State.SPILLED:
                missing += entry.nbytes
        reservation = state.reserve(missing + output_nbytes, kind)
        admission = Admission(self, reservation, pids, outputs, output_nbytes, self._clock())
        if not reservation.granted:
            self._admissions[reservation] = admission
        for key in outputs:
            self._labels[key] = admission
        return admission

    def materialize(self, admission: Admission) -> dict[Hashable, Any]:
        """Return the values of the inputs of a granted admission, reading what is on disk.

        Blocks. The calling thread reads one of them itself while the restore threads read the
        others. What is left of the promise for inputs is given back.
        """
        values: dict[Hashable, Any] = {}
        with self._lock:
            absent = []
            for key, pid in admission.pids.items():
                entry = self._entry(key, pid)
                if entry.residency.resident:
                    values[key] = self._hit(entry)
                else:
                    absent.append((key, pid))
        if absent:
            futures = [(key, self._start(key, pid, admission)) for key, pid in absent[1:]]
            key, pid = absent[0]
            values[key] = self._bring(key, pid, admission)
            for key, future in futures:
                values[key] = self._outcome(key, future)
        if admission.reservation.nbytes > admission.output_nbytes:
            self._settle_inputs(admission)
        if self._observer is not None:
            for key in values.keys() - {key for key, _ in absent}:
                self._observe_hit(self._entry(key, admission.pids[key]).nbytes)
        return values

    def materialize_later(self, admission: Admission) -> Future[dict[Hashable, Any]]:
        """Return a future of what :meth:`materialize` returns, read on the restore threads.

        Waits for the admission to be granted. Cancel the future before the admission is released,
        or reads may begin that nobody needs.
        """
        result: Future[dict[Hashable, Any]] = Future()
        admission.add_done_callback(lambda: self._gather(admission, result))
        return result

    def _settle_inputs(self, admission: Admission) -> None:
        with self._lock:
            self._state.shrink(admission.reservation, admission.output_nbytes)
            work = self._after()
        self._perform(work)

    def release(self, admission: Admission) -> None:
        """Undo :meth:`admit`; called by :meth:`Admission.release`, once."""
        with self._lock:
            state = self._state
            self._admissions.pop(admission.reservation, None)
            for key in admission.outputs:
                if self._labels.get(key) is admission:
                    del self._labels[key]
            state.release(admission.reservation)
            for pid in admission.pids.values():
                state.unpin(pid)
            work = self._after()
        self._perform(work)

    def prefetch(self, keys: Iterable[Hashable]) -> int:
        """Begin to restore values ahead of their use, as far as there is room without a write.

        Parameters
        ----------
        keys
            In the order of use. Unknown ones and those in memory are skipped.

        Returns
        -------
        int
            How many restores were begun.
        """
        begun: list[tuple[Hashable, int]] = []
        with self._lock:
            state = self._state
            if self._closed:
                return 0
            for key in keys:
                entry = state.ledger.keys.get(key)
                if entry is None or entry.residency.state is not State.SPILLED:
                    continue
                order = state.uses.next(key)
                if not state.begin_prefetch(entry.pid, () if order is None else order):
                    break
                self._slots[entry.pid].restoring = Future()
                begun.append((key, entry.pid))
            work = self._after()
        self._perform(work)
        for key, pid in begun:
            self._submit(key, pid)
        return len(begun)

    def expect_use(self, key: Hashable, order: Order, user: Hashable) -> None:
        """`user` is going to read `key`; a smaller `order` is sooner."""
        with self._lock:
            self._state.expect_use(key, user, order)

    def drop_use(self, key: Hashable, user: Hashable) -> None:
        """`user` has read `key` or never will."""
        with self._lock:
            self._state.drop_use(key, user)

    # -- limits and numbers ------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether everything is in memory and nobody waits: nothing has to be prepared for anybody."""
        state = self._state
        return not state.spilled and state.memory.excess() <= 0

    def memory_total(self) -> int:
        """Bytes of values in memory, without the offset and without what is spilled."""
        return self._state.memory.used

    @property
    def spilled_total(self) -> tuple[int, int]:
        """In-memory size of the values that are on disk only, and bytes of all records."""
        return self._state.spilled_nbytes, self._state.disk.used

    @property
    def spilled_count(self) -> int:
        """Number of values that are on disk only."""
        return self._state.spilled

    def set_limit(self, limit: int | None, disk_limit: int | None) -> None:
        """Change the limits, in bytes; None for no limit."""
        with self._lock:
            self._state.memory.limit = limit
            self._state.disk.limit = disk_limit
            self._state.retry()
            work = self._after()
        self._perform(work)

    def set_offset(self, nbytes: int) -> None:
        """Set the bytes of unmanaged process memory that count against the limit; may be negative."""
        with self._lock:
            self._state.set_offset(nbytes)
            work = self._after()
        self._perform(work)

    def evict_all(self) -> None:
        """Spill whatever can be spilled, and wait until it is done. Blocks; for tests and benchmarks."""
        with self._lock:
            limit = self._state.memory.limit
        self.set_limit(0, self._state.disk.limit)
        while True:
            with self._lock:
                state = self._state
                busy = len(state.queue) or state.memory.leaving
            if not busy:
                break
            if self._spill_step() is not None:
                time.sleep(0.001)  # another thread has the last ones in hand
        self.set_limit(limit, self._state.disk.limit)

    def statistics(self) -> Statistics:
        """Return a snapshot of every number. O(1)."""
        with self._lock:
            state, counters, totals = self._state, self._state.counters, self._totals
            return Statistics(
                limit=state.memory.limit,
                disk_limit=state.disk.limit,
                keys=len(state.ledger.keys),
                values=len(state.ledger.entries),
                host_keys=len(state.ledger.entries) - state.spilled,
                disk_keys=state.spilled,
                host_nbytes=state.memory.used,
                pinned_nbytes=state.pinned_nbytes,
                spilled_nbytes=state.spilled_nbytes,
                disk_nbytes=state.disk.used,
                reserved_nbytes=state.memory.reserved,
                offset_nbytes=state.memory.offset,
                waiting=sum(1 for _ in state.memory.waiters()),
                hits=self._hits,
                misses=self._misses,
                spills=counters.spills,
                spilled_total_nbytes=counters.spilled_nbytes,
                clean_drops=counters.clean_drops,
                restores=counters.restores,
                restored_total_nbytes=counters.restored_nbytes,
                prefetches=counters.prefetches,
                spill_failures=counters.spill_failures,
                restore_failures=counters.restore_failures,
                lost=counters.lost,
                unspillable=state.unspillable,
                set_aside=state.set_aside,
                waits=counters.waits,
                overruns=counters.overruns,
                wait_seconds=totals["wait"],
                written_nbytes=int(totals["written"]),
                read_nbytes=int(totals["read"]),
                write_seconds=totals["write"],
                read_seconds=totals["reading"],
                serialize_seconds=totals["serialize"],
                deserialize_seconds=totals["deserialize"],
                raw_nbytes=int(totals["raw"]),
                loop_io=self._loop_io,
                records_reclaimed=counters.records_reclaimed,
            )

    def validate(self) -> None:
        """Raise AssertionError if the manager's tables and the core's contradict each other. O(n)."""
        with self._lock:
            self._state.validate()
            entries = self._state.ledger.entries
            assert self._slots.keys() == entries.keys()
            for pid, slot in self._slots.items():
                residency = entries[pid].residency
                if residency.resident:
                    assert self._by_id[id(slot.value)] == pid
                else:
                    assert slot.value is None, slot.key
                assert (slot.receipt is not None) == residency.has(Tier.DISK), slot.key
                assert (slot.restoring is not None) == (residency.target == Tier.HOST), slot.key
                assert residency.lost == (slot.lost is not None), slot.key
            assert len(self._by_id) == sum(e.residency.resident for e in entries.values())

    def close(self) -> None:
        """Stop the threads and remove everything from disk. Values in memory stay readable. Idempotent; blocks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._state.memory.limit = None
            self._state.retry()
            work = self._after()
        self._perform(work)
        self._engine.close()
        self._store.close()

    # -- restoring ---------------------------------------------------------------------------------

    def _entry(self, key: Hashable, pid: int) -> Entry:
        entry = self._state.ledger.entries.get(pid)
        if entry is None:
            raise KeyError(key)
        return entry

    def _observe_hit(self, nbytes: int) -> None:
        if self._observer is not None:
            self._observer("memory-read", 1, "count")
            self._observer("memory-read", nbytes, "bytes")

    def _hit(self, entry: Entry) -> Any:
        """Value of a resident entry, as a use. Under the lock."""
        self._hits += 1
        self._state.touch(entry.pid)
        return self._slots[entry.pid].value

    def _begin(self, key: Hashable, pid: int, admission: Admission | None) -> Future[Any] | None:
        """Under the lock: join a restore in flight (a future), or begin one (None, the caller has to run it)."""
        slot = self._slots[pid]
        if slot.lost is not None:
            raise DataLostError(slot.lost, key)
        if slot.restoring is not None:
            return slot.restoring
        if self._closed:
            raise ManagerClosed(f"the value of {key!r} was on disk when the store was closed")
        self._misses += 1
        self._state.begin_restore(pid, None if admission is None else admission.reservation)
        slot.restoring = Future()
        return None

    def _bring(self, key: Hashable, pid: int, admission: Admission | None) -> Any:
        """Return the value of a proxy, restoring it in this thread if nobody else does."""
        with self._lock:
            entry = self._entry(key, pid)
            if entry.residency.resident:
                return self._hit(entry)
            future = self._begin(key, pid, admission)
            work = self._after()
        self._perform(work)
        if future is None:
            future = self._slots[pid].restoring
            assert future is not None
            if threading.get_ident() == self.loop_thread:
                self._loop_io += 1
            self._restore(pid)
        elif threading.get_ident() == self.loop_thread and not future.done():
            self._loop_io += 1
        return self._outcome(key, future)

    @staticmethod
    def _outcome(key: Hashable, future: Future[Any]) -> Any:
        try:
            return future.result()
        except DataLostError as error:
            # Many may wait for one future; each gets an error of its own that names the key it
            # asked for.
            raise DataLostError(error.message, key) from error

    def _start(self, key: Hashable, pid: int, admission: Admission | None) -> Future[Any]:
        """Return a future of the value, restored on a restore thread if nobody does it already. Never raises."""
        done: Future[Any] = Future()
        with self._lock:
            try:
                entry = self._entry(key, pid)
                if entry.residency.resident:
                    done.set_result(self._hit(entry))
                    return done
                future = self._begin(key, pid, admission)
            except Exception as error:
                done.set_exception(error)
                return done
            ours = self._slots[pid].restoring
            assert ours is not None
            work = self._after()
        self._perform(work)
        if future is None:
            self._submit(key, pid)
        return ours

    def _submit(self, key: Hashable, pid: int) -> None:
        # In a copy of the caller's context, by which the observer tells on whose behalf it is read.
        if not self._engine.submit(partial(copy_context().run, self._restore, pid)):
            self._fail_restore(pid, ManagerClosed(f"the store was closed before {key!r} was read"))

    def _restore(self, pid: int) -> None:
        """Bring a value back. The restore was begun under the lock by whoever calls this. Blocks; never raises."""
        with self._lock:
            slot = self._slots[pid]
            receipt, ghost = slot.receipt, slot.ghost
        assert receipt is not None
        value = None if ghost is None else ghost()
        if value is None:
            try:
                value = self._read(receipt)
            except BaseException as error:
                self._fail_restore(pid, error)
                if not isinstance(error, Exception):
                    raise
                return
        with self._lock:
            future = slot.restoring
            assert future is not None
            slot.value, slot.restoring, slot.ghost = value, None, None
            slot.refusals = 0
            self._by_id[id(value)] = pid
            self._state.complete_restore(pid)
            work = self._after()
        future.set_result(value)
        del value, future
        self._perform(work)

    def _read(self, receipt: Receipt) -> object:
        start = self._clock()
        try:
            header, frames = self._store.read(receipt, self._allocate)
        except StorageError:
            # Nothing says that the record is bad, and a task would fail: once more, for what passes
            # (an interrupted call, a full file table).
            header, frames = self._store.read(receipt, self._allocate)
        middle = self._clock()
        value = self._serializer.loads(header, frames)
        stop = self._clock()
        with self._lock:
            self._totals["reading"] += middle - start
            self._totals["read"] += receipt.nbytes
            self._totals["deserialize"] += stop - middle
        if self._observer is not None:
            self._observer("disk-read", middle - start, "seconds")
            self._observer("disk-read", 1, "count")
            self._observer("disk-read", receipt.nbytes, "bytes")
            self._observer("deserialize", stop - middle, "seconds")
        return value

    def _fail_restore(self, pid: int, error: BaseException) -> None:
        with self._lock:
            slot = self._slots[pid]
            if self._closed and not isinstance(error, ManagerClosed):
                error = ManagerClosed(f"the store was closed while {slot.key!r} was read: {error}")
            lost = isinstance(error, DataLostError)
            future = slot.restoring
            assert future is not None
            slot.restoring = None
            if lost:
                slot.lost = f"the value of {slot.key!r} is lost: {error}"
                error = DataLostError(slot.lost, slot.key)
                logger.error("%s", slot.lost)
            self._state.fail_restore(pid, lost=lost)
            work = self._after()
        future.set_exception(error)
        self._perform(work)

    # -- spilling ----------------------------------------------------------------------------------

    def _held(self, pid: int) -> bool:
        """Whether somebody besides the slot refers to a value, so that evicting it would free
        nothing. Under the lock.

        Works for every type, also those that cannot be weakly referenced, and for views: they refer
        to what they view. A value that refers to itself looks held for ever; after a few refusals
        it is evicted all the same if a weak reference can preserve its identity.
        """
        slot = self._slots.get(pid)
        if slot is None or getrefcount(slot.value) <= self._unheld:
            return False
        slot.refusals += 1
        return slot.refusals <= _PATIENCE or not _weakly_referable(slot.value)

    def _spill_step(self) -> float | None:
        """One unit of background work; see :class:`~gpuspill.engine.Engine`."""
        with self._lock:
            state = self._state
            now = self._clock()
            if state.set_aside and state.memory.over() and now >= self._retry_at:
                state.retry()
            pid = None if self._closed else state.next_spill()
            pause = float("inf")
            if pid is not None:
                self._pause = _BACKOFF[0]
            elif state.set_aside and state.memory.over():
                if now >= self._retry_at:
                    self._retry_at = now + self._pause
                    self._pause = min(2 * self._pause, _BACKOFF[1])
                pause = max(self._retry_at - now, 0.001)
            work = self._after(wake=False)
        self._perform(work)
        if pid is None:
            return pause
        self._spill(pid)
        return None

    def _spill(self, pid: int) -> None:
        """Write a value whose spill was begun. Blocks; never raises."""
        slot = self._slots[pid]
        value = slot.value  # stays: nothing may drop the source of a move
        start = self._clock()
        try:
            header, frames = self._serializer.dumps(value)
            raw = len(header) + sum(memoryview(frame).nbytes for frame in frames)
        except Exception as error:
            self._fail_spill(pid, error, forever=not isinstance(error, MemoryError | OSError))
            return
        middle = self._clock()
        with self._lock:
            corrected = self._sizes.learn(slot.kind, slot.sizeof, raw)
            if corrected is not None:
                self._state.correct_size(pid, corrected)
            allowed = self._state.reserve_record(pid, raw)
            work = self._after(wake=False)
        self._perform(work, here=True)  # records given up for this one must go before it is written
        if not allowed:
            del value, frames
            self._log_once(
                "quota",
                "the disk limit of %s bytes (max-spill) is used up; values stay in memory",
                self._state.disk.limit,
            )
            self._fail_spill(pid, None, forever=False)
            return
        try:
            receipt = self._store.write(header, frames)
        except Exception as error:
            del value, frames
            self._fail_spill(pid, error, forever=not isinstance(error, OSError | MemoryError))
            return
        # The frames alias the value; with them alive it would look held by somebody.
        del value, frames
        stop = self._clock()
        with self._lock:
            slot.receipt = receipt
            self._totals["serialize"] += middle - start
            self._totals["write"] += stop - middle
            self._totals["written"] += receipt.nbytes
            self._totals["raw"] += raw
            self._state.complete_spill(pid, receipt.nbytes)
            self._logged.discard("quota")
            work = self._after()
        self._perform(work)
        if self._observer is not None:
            self._observer("serialize", middle - start, "seconds")
            self._observer("disk-write", stop - middle, "seconds")
            self._observer("disk-write", 1, "count")
            self._observer("disk-write", receipt.nbytes, "bytes")

    def _fail_spill(self, pid: int, error: Exception | None, *, forever: bool) -> None:
        slot = self._slots[pid]
        if error is not None and forever:
            self._log_once(
                f"unspillable {slot.kind}",
                "cannot serialise the value of %r (%s.%s), it stays in memory; further values of this type are not reported: %s: %s",
                slot.key,
                slot.kind.__module__,
                slot.kind.__qualname__,
                type(error).__name__,
                error,
            )
        elif error is not None:
            self._log_once(
                f"storage {type(error).__name__} {getattr(error, 'errno', None)}",
                "could not spill %r, it stays in memory and is tried again: %s",
                slot.key,
                error,
            )
        # The traceback refers to the frames of the failed call, and these to the value.
        if error is not None:
            error.__traceback__ = None
        with self._lock:
            self._state.fail_spill(pid, forever=forever)
            work = self._after(wake=False)
        self._perform(work)

    def _log_once(self, what: str, message: str, *args: object) -> None:
        with self._lock:
            if what in self._logged:
                return
            self._logged.add(what)
        logger.warning(message, *args)

    # -- after an event ----------------------------------------------------------------------------

    def _after(self, *, wake: bool = True) -> _Work | None:
        """Under the lock: take what the core decided, detach values and records, and see whether the spill threads are needed."""
        state = self._state
        effects = state.take_effects()
        if wake and state.pressure and not self._closed:
            self._engine.wake()
        if not effects:
            return None
        work = _Work()
        for pid in effects.dropped:
            slot = self._slots[pid]
            entry = state.ledger.entries.get(pid)
            if slot.refusals and entry is not None:
                slot.ghost = _weak(slot.value)
            self._by_id.pop(id(slot.value), None)
            work.values.append(slot.value)
            work.nbytes += slot.sizeof if entry is None else entry.nbytes
            slot.value = None
        for pid in effects.deleted:
            slot = self._slots[pid]
            if slot.receipt is not None:
                work.receipts.append(slot.receipt)
                slot.receipt = None
        for pid in effects.forgotten:
            del self._slots[pid]
        for reservation in effects.granted:
            admission = self._admissions.pop(reservation, None)
            if admission is not None:
                self._totals["wait"] += self._clock() - admission.asked_at
                work.granted.append(admission)
        return work

    def _perform(self, work: _Work | None, *, here: bool = False) -> None:
        """Without the lock: do what :meth:`_after` collected."""
        if work is None:
            return
        for admission in work.granted:
            admission.fulfil()
        if not work.receipts and work.nbytes <= _REAP_NBYTES:
            return  # the values go with `work`
        if here or self._closed:
            self._finish(work)
        else:
            self._engine.reap(partial(self._finish, work))

    def _finish(self, work: _Work) -> None:
        work.values.clear()
        for receipt in work.receipts:
            self._store.delete(receipt)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.keys())


def _weakly_referable(value: object) -> bool:
    return type(value).__weakrefoffset__ != 0


def _weak(value: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
