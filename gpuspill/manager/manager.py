"""The proxify manager: all values of one worker, wherever they are.

It puts the parts together, shows those that others use, and has what concerns one key. The core
decides (:mod:`gpuspill.core.state`, behind the lock in :mod:`gpuspill.manager.transaction`); the
parts carry out. Those that are not shown: values come in (:mod:`gpuspill.manager.insert`), one
value comes back (:mod:`gpuspill.manager.restore`), or several do
(:mod:`gpuspill.manager.restore_together`), and is decoded (:mod:`gpuspill.manager.decode`), values
are written (:mod:`gpuspill.manager.spill`).

``docs/design/contract.md`` states what holds when.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpuspill.core.policy import MakePolicy
from gpuspill.core.residency import State, Tier
from gpuspill.core.sizes import SizeModel
from gpuspill.device.shared_memory import SharedMemory
from gpuspill.manager.admitter import Admitter
from gpuspill.manager.batch import Gatherer
from gpuspill.manager.decode import Decoder, Disperse
from gpuspill.manager.insert import Intake, Sharing
from gpuspill.manager.limits import Evictor
from gpuspill.manager.ports import Custody, Encoded, LoadsTogether, Observer, Serializer
from gpuspill.manager.prefetch import Prefetcher
from gpuspill.manager.proxy import Proxy
from gpuspill.manager.restore import Restorer
from gpuspill.manager.restore_together import TogetherRestorer
from gpuspill.manager.spill import Spiller
from gpuspill.manager.stalls import Stalls
from gpuspill.manager.statistics import Statistics, take_snapshot
from gpuspill.manager.story import Event
from gpuspill.manager.threads import Engine, run_for
from gpuspill.manager.transaction import Metadata, batches, deferred, reads, refused
from gpuspill.storage.base import Frame, Receipt, Store

__all__ = ["ProxifyManager"]

logger = logging.getLogger("gpuspill")

_ABSENT = object()


class ProxifyManager:
    """All values of one worker, wherever they are.

    Parameters
    ----------
    limit, disk_limit
        Bytes of values to keep in memory, and of records to keep on disk; None for no limit.
    store
        Where records go. The manager closes it.
    serializer
        How values become bytes.
    loads_together
        Rebuilds several values at once, or none, where that costs less; None: they are rebuilt one
        by one. Instead of a value, None says that it has to be.
    sizeof
        Bytes a value takes in memory; called on the storing thread when the caller does not give
        the size.
    allocate
        Gives the buffer that a record is read into.
    observer
        Told about I/O and hits.
    shared
        ``shared(value)`` tells which memory a value keeps alive that others may keep alive too:
        that is charged once, for as long as one of them is in memory.
    custody
        Knows values that stand for memory elsewhere; their sizes are taken as exact.
    policy
        Makes the order of eviction; None: :class:`~gpuspill.core.policy.NextUsePolicy`.
    keep_clean
        Keep the record of restored values.
    spill_threads, restore_threads
        Background threads.
    spill_timeout
        Seconds that others wait for a spill, and that closing the manager waits for threads and
        I/O. 0 for no limit.
    name
        Part of the thread names.
    clock, engine
        Seconds, monotonic; makes the threads. For tests.

    Attributes
    ----------
    admission
        Pins, and promises of room: :class:`~gpuspill.manager.admitter.Admitter`.
    batch
        Several values at once, for tasks and for transfers:
        :class:`~gpuspill.manager.batch.Gatherer`.
    uses
        Next uses, and what is brought back ahead of them:
        :class:`~gpuspill.manager.prefetch.Prefetcher`.
    limits
        Limits, and making values leave before a limit asks for it:
        :class:`~gpuspill.manager.limits.Evictor`.
    stalls, slots, engine
        Waits that take too long; the table of values; the threads.

    Notes
    -----
    All methods, and those of the parts above, may be called from any thread. Those that may block
    for I/O say so; no other does.

    A finaliser that the garbage collector runs in the middle of one of them may read: it is given a
    copy of what is not in memory. What it stores, deletes or releases is stored, deleted or
    released a moment later. It can neither pin nor ask for room nor close (RuntimeError).
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
        shared: Callable[[object], SharedMemory | None] | None = None,
        custody: Custody | None = None,
        policy: MakePolicy | None = None,
        loads_together: LoadsTogether | None = None,
        keep_clean: bool = True,
        spill_threads: int = 1,
        restore_threads: int = 2,
        spill_timeout: float = 0.0,
        name: str = "0",
        clock: Callable[[], float] = time.monotonic,
        engine: Callable[..., Engine] = Engine,
    ) -> None:
        metadata = self._metadata = Metadata(
            limit=limit,
            disk_limit=disk_limit,
            keep_clean=keep_clean,
            store=store,
            custody=custody,
            policy=policy,
            clock=clock,
        )
        self.slots = metadata.slots
        self._ledger = metadata.state.ledger
        self._store = store
        sizes = SizeModel()
        sharing = Sharing(metadata, shared)
        self._timeout = spill_timeout
        self._name = f"gpuspill-{name}"
        self.stalls = stalls = Stalls(metadata, spill_timeout, spill_threads)
        self._spiller = Spiller(
            metadata, store, serializer, sizes if custody is None else None, stalls, observer=observer
        )
        self.engine = threads = engine(
            self._spiller.step, spill_threads=spill_threads, restore_threads=restore_threads, name=name
        )
        metadata.engine = threads
        self._decoder = Decoder(metadata, serializer, observer)
        self._restorer = Restorer(
            metadata,
            threads,
            store,
            serializer,
            self._decoder,
            allocate=allocate,
            observer=observer,
            sharing=sharing,
        )
        together = None
        if loads_together is not None:
            together = TogetherRestorer(metadata, self.engine, store, self._restorer, loads_together)
        self._intake = Intake(metadata, sharing, sizes, sizeof, store, observer)
        self.admission = Admitter(metadata, threads, stalls)
        self.batch = Gatherer(metadata, threads, serializer, self._restorer, self.admission, together)
        self.limits = Evictor(metadata, threads, self._spiller)
        self.uses = Prefetcher(metadata, self._restorer, together)

    # -- values come and go ------------------------------------------------------------------------

    @deferred()
    def store(
        self,
        key: Hashable,
        value: object,
        nbytes: int | None = None,
        *,
        spillable: bool = True,
        touched: bool = True,
    ) -> None:
        """Put `value` in memory under `key`, replacing what it held; see :meth:`.Intake.store`."""
        self._intake.store(key, value, nbytes, spillable, touched)

    @deferred()
    def invalidate(self, keys: Iterable[Hashable]) -> None:
        """Values in the caller's hand may have been changed: their records no longer count.

        Nor does one that is being written. As storing them again; unknown keys do not matter.
        """
        keys = tuple(keys)
        for batch in batches(keys):
            with self._metadata as state:
                for key in batch:
                    entry = self._ledger.keys.get(key)
                    if entry is not None and entry.resident:
                        state.invalidate(entry.pid)
        self._restorer.revive(keys)

    @deferred()
    def store_encoded(self, key: Hashable, encoded: Encoded) -> None:
        """Put a value that came as bytes in memory under `key`; it is decoded on first use.

        Evicting it before that writes the bytes as they are.
        """
        self._intake.store(key, encoded, encoded.nbytes)

    @deferred()
    def store_encoded_together(self, values: Mapping[Hashable, Encoded]) -> None:
        """Put new values that came as bytes in memory, in one go; as :meth:`store_encoded`."""
        self._intake.store_encoded(values)

    @deferred()
    def adopt(self, key: Hashable, nbytes: int, receipt: Receipt) -> None:
        """Put a value that is on disk already under `key`, replacing what the key held."""
        self._intake.adopt(key, nbytes, receipt)

    @refused("write to disk")
    def store_on_disk(self, key: Hashable, header: bytes, frames: Sequence[Frame], nbytes: int) -> None:
        """Write a value to disk under `key`, past memory. Blocks; StorageError if it cannot."""
        self._intake.store_on_disk(key, header, frames, nbytes)

    @deferred(lambda self, key: self._ledger.keys[key])
    def discard(self, key: Hashable) -> None:
        """Forget `key`. Its record is deleted later, on another thread.

        Raises
        ------
        KeyError
            The key is unknown.
        """
        with self._metadata as state:
            state.remove(key)

    @deferred()
    def discard_together(self, keys: Iterable[Hashable]) -> None:
        """Forget several keys, in one go; as :meth:`discard`. Unknown keys do not matter."""
        for batch in batches(tuple(keys)):
            with self._metadata as state:
                for key in batch:
                    if key in self._ledger.keys:
                        state.remove(key)

    # -- what is there -----------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._ledger.keys

    def __len__(self) -> int:
        return len(self._ledger.keys)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.keys())

    @reads
    def keys(self) -> list[Hashable]:
        """All keys, as of now."""
        with self._metadata:
            return list(self._ledger.keys)

    @reads
    def keys_in(self, tier: Tier) -> list[Hashable]:
        """Return the keys whose value is in memory (`Tier.HOST`) or not (`Tier.DISK`). O(n)."""
        wanted = tier is Tier.HOST
        with self._metadata:
            return [key for key, entry in self._ledger.keys.items() if entry.resident is wanted]

    @reads
    def is_resident(self, key: Hashable) -> bool:
        """Whether the value of `key` is in memory and ready. KeyError if unknown."""
        return self._restorer.ready(self._ledger.keys[key])

    @reads
    def is_lost(self, key: Hashable) -> bool:
        """Whether a read has found the value of `key` lost. KeyError if unknown."""
        return self._ledger.keys[key].state is State.LOST

    @reads
    def tier_of(self, key: Hashable) -> Tier:
        """Return the fastest tier that has the value of `key`. KeyError if unknown."""
        return Tier.HOST if self._ledger.keys[key].resident else Tier.DISK

    @reads
    def nbytes(self, key: Hashable) -> int:
        """Bytes the value of `key` takes in memory, wherever it is. KeyError if unknown.

        Memory that it shares is not counted, but its view of it is.
        """
        entry = self._ledger.keys[key]
        return entry.whole_nbytes

    @reads
    def arriving_nbytes(self, key: Hashable) -> int:
        """Bytes on a device that decoding the value of `key` takes; 0 if it is decoded."""
        return self.slots[self._ledger.keys[key].pid].device_nbytes

    # -- one value ---------------------------------------------------------------------------------

    @reads
    def peek(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of `key` if it is in memory, else `default`. No I/O; a use."""
        with self._metadata:
            entry = self._ledger.keys.get(key)
            if entry is None or not self._restorer.ready(entry):
                return default
            return self._restorer.hit(entry)

    @reads
    def look(self, key: Hashable) -> Any:
        """Return the value of `key` as it is in memory, else None. Does not count as a use."""
        with self._metadata:
            entry = self._ledger.keys.get(key)
            return None if entry is None else self.slots[entry.pid].value

    @reads
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
        value = self.get_ready(key, _ABSENT)
        # Looked up anew: if the key was overwritten meanwhile, the new value is the right one.
        return self._restorer.bring(key) if value is _ABSENT else value

    @reads
    def get_ready(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of `key`; `default` if it would have to be read or decoded."""
        with self._metadata:
            entry = self._ledger.keys[key]
            if not self._restorer.ready(entry):
                return default
            value = self._restorer.hit(entry)
        self._restorer.observe_hit(entry.nbytes)
        return value

    @reads
    def proxy(self, key: Hashable) -> Proxy:
        """Return a handle for the value that `key` holds now. KeyError if unknown."""
        return Proxy(self._restorer, key, self._ledger.keys[key].pid)

    @reads
    def proxies(self, pids: Mapping[Hashable, int]) -> dict[Hashable, Proxy]:
        """Return handles for some values that are pinned, by key, whatever their keys hold now."""
        return {key: Proxy(self._restorer, key, pid) for key, pid in pids.items()}

    @reads
    def look_together(self, keys: Iterable[Hashable]) -> list[Any]:
        """Return the values of some keys as they are in memory, else None. As :meth:`look`."""
        slots, known = self._metadata.slots, self._ledger.keys
        values: list[Any] = []
        for batch in batches(keys):
            with self._metadata:
                values += [slots[known[key].pid].value if key in known else None for key in batch]
        return values

    @reads
    def disperse_by(self, disperse: Disperse) -> None:
        """Have the device part of values that came as bytes taken over on decoding."""
        self._decoder.disperse = disperse

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        """Whether every value is in memory and can be handed out at once."""
        return not (self._metadata.state.charges.away or self.slots.undecoded)

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the manager's; see ``docs/design/contract.md``."""
        return self._metadata.inherited

    @property
    def loop_thread(self) -> int | None:
        """Identifier of the event loop's thread; restores on it are counted."""
        return self._restorer.loop_thread

    @loop_thread.setter
    def loop_thread(self, ident: int | None) -> None:
        self._restorer.loop_thread = ident

    @reads
    def memory_total(self) -> int:
        """Bytes of values in memory, without the offset and without what is spilled."""
        return self._metadata.state.memory.used

    @reads
    def accounted_total(self) -> int:
        """Bytes of values in memory, and of those that were promised room there."""
        memory = self._metadata.state.memory
        return memory.used + memory.reserved

    @property
    def spilled_total(self) -> tuple[int, int]:
        """In-memory size of the values that are on disk only, and bytes of all records."""
        state = self._metadata.state
        return state.spilled_nbytes, state.disk.used

    @property
    def spilled_count(self) -> int:
        """Number of values that are on disk only."""
        return self._metadata.state.spilled

    @reads
    def story(self, key: Hashable) -> list[Event]:
        """Return what became of the values of a key since they left memory; oldest first.

        The last few thousand events of the manager are kept. Events of an earlier value of the key
        are among them.
        """
        with self._metadata:
            entry = self._ledger.keys.get(key)
            return self._metadata.story.of(key, None if entry is None else entry.pid)

    @reads
    def statistics(self) -> Statistics:
        """Return a snapshot of every number. O(1) but for the waiting line."""
        return take_snapshot(self._metadata, self._restorer)

    @reads
    def validate(self) -> None:
        """Raise AssertionError if the manager's tables and the core's differ. O(n)."""
        self._metadata.validate()

    @refused("close", unless_closed=True)
    def close(self) -> None:
        """Stop the threads and remove everything from disk. Values in memory stay readable.

        Waiting admissions are granted. Idempotent; blocks until running moves have ended, or for no
        longer than twice the manager's `spill_timeout`: then threads, and perhaps files, are left
        behind, with a warning.
        """
        with self._metadata as state:
            if self._metadata.closed:
                return
            self._metadata.closed = True
            state.memory.limit = None
            state.retry()
        self.engine.close(self._timeout)
        # What breaks cycles: values go with the manager, not with the next collection.
        self._metadata.engine = None
        self._decoder.disperse = None
        if not run_for(self._store.close, self._timeout, f"{self._name}-close"):
            logger.warning(
                "closing does not wait any longer for the removal of files, after %g seconds (gpuspill.spill-timeout): "
                "the disk may hang. What stays is swept by the next start",
                self._timeout,
            )
