"""The proxify manager: all values of one worker, wherever they are.

It composes the parts and offers them by key: the core decides (:mod:`gpuspill.core.state`, behind the lock in
:mod:`gpuspill.metadata`), :mod:`gpuspill.spilling` and :mod:`gpuspill.restoring` carry out,
:mod:`gpuspill.engine` owns the threads. ``docs/design/contract.md`` states what holds when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, Literal

from gpuspill.admission import Admission
from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.ledger import Entry
from gpuspill.core.policy import Order
from gpuspill.core.residency import State, Tier
from gpuspill.core.sizes import SizeModel
from gpuspill.device.shared_memory import SharedMemory
from gpuspill.engine import Engine
from gpuspill.errors import ManagerClosed
from gpuspill.metadata import Metadata
from gpuspill.observer import Observer
from gpuspill.proxy import Proxy
from gpuspill.restoring import Restorer
from gpuspill.serialization import Encoded, Serializer
from gpuspill.sharing import VIEW_NBYTES, Sharing
from gpuspill.slots import Custody, Slot
from gpuspill.snapshot import Statistics, take_snapshot
from gpuspill.spilling import Spiller
from gpuspill.storage.base import Frame, Receipt, Store

__all__ = ["ProxifyManager"]


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
        Bytes a value takes in memory; called on the storing thread when the caller does not give the size.
    allocate
        Gives the buffer that a record is read into.
    observer
        Told about I/O and hits.
    shared
        ``shared(value)`` tells which memory a value keeps alive that others may keep alive too: that is charged once,
        for as long as one of them is in memory.
    custody
        Knows values that stand for memory elsewhere; their sizes are taken as exact.
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

    A finaliser that the garbage collector runs in the middle of one of them may read: it is given a copy of what is not
    in memory. What it stores, deletes or releases is stored, deleted or released a moment later. It can neither pin
    nor ask for room nor close (RuntimeError).
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
        keep_clean: bool = True,
        spill_threads: int = 1,
        restore_threads: int = 2,
        name: str = "0",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = Metadata(
            limit=limit, disk_limit=disk_limit, keep_clean=keep_clean, store=store, custody=custody, clock=clock
        )
        self._ledger = self._metadata.state.ledger
        self._labels: dict[Hashable, Admission] = {}
        self._sizes = SizeModel()
        self._sizeof = sizeof
        self._sharing = Sharing(self._metadata, shared)
        self._store = store
        self._observer = observer
        self._spiller = Spiller(
            self._metadata, store, serializer, self._sizes if custody is None else None, observer=observer
        )
        self._engine = Engine(
            self._spiller.step, spill_threads=spill_threads, restore_threads=restore_threads, name=name
        )
        self._metadata.engine = self._engine
        self._restorer = Restorer(
            self._metadata,
            self._engine,
            store,
            serializer,
            allocate=allocate,
            observer=observer,
            sharing=self._sharing,
        )

    # -- by key: never blocks ------------------------------------------------------------------------

    def store(
        self,
        key: Hashable,
        value: object,
        nbytes: int | None = None,
        *,
        spillable: bool = True,
        touched: bool = True,
    ) -> None:
        """Put `value` in memory under `key`, replacing what the key held; spilling may start in the background.

        Parameters
        ----------
        key
            Any hashable.
        value
            Any object. The same object under several keys is charged once.
        nbytes
            Its size in bytes, if the caller knows; else ``sizeof`` is called here.
        spillable
            Whether it may leave memory.
        touched
            Whether it may have been changed in place since it was stored before, under whatever key: then its record is
            given up.
        """
        if nbytes is None:
            nbytes = self._sizeof(value)
        shared = self._sharing.look(value)
        slots = self._metadata.slots
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.store, key, value, nbytes, spillable=spillable, touched=touched))
                return
            admission = self._labels.pop(key, None)
            if admission is not None:
                # The output is about to be charged; its promise must not be charged as well.
                state.settle(admission.reservation, admission.outputs.pop(key))
            pid = slots.find(value)
            if pid is not None:
                slots[pid].refusals = 0  # the caller has it in hand: patience with it begins anew
                state.alias(key, pid)
                self._sharing.take_up(pid, value, shared)
                if touched:
                    state.renew(pid)  # a task that changed its input in place and returned it stores it anew
            else:
                size = self._sizes.estimate(type(value), nbytes)
                if shared is None:
                    pid = state.insert(key, size, spillable=spillable)
                else:
                    hash(key)  # raises before anything is charged
                    own = max(VIEW_NBYTES, nbytes - shared.covered)
                    pid = state.insert(
                        key, own, spillable=spillable, parts=self._sharing.parts(key, shared), apart_nbytes=size
                    )
                slots[pid] = Slot(key, value, nbytes)
                slots.by_id[id(value)] = pid

    def store_encoded(self, key: Hashable, encoded: Encoded) -> None:
        """Put a value that came as bytes in memory under `key`; it is decoded when somebody needs it, if ever.

        Evicting it before that writes the bytes as they are.
        """
        self.store(key, encoded, encoded.nbytes)

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
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.adopt, key, nbytes, receipt))
                return
            self._metadata.slots.enter_below(state.insert_below(key, nbytes, receipt.nbytes), key, nbytes, receipt)

    def store_on_disk(self, key: Hashable, header: bytes, frames: Sequence[Frame], nbytes: int) -> None:
        """Write a value to disk under `key`, replacing what the key held, without its ever being in memory. Blocks.

        Parameters
        ----------
        key
            Any hashable.
        header, frames
            Of the record: what the serialiser makes the value from.
        nbytes
            Bytes that the value will take in memory.

        Raises
        ------
        StorageError
            It could not be written: no room (StorageFull), not allowed (QuotaExceeded), the manager was closed
            meanwhile, or whatever the disk or a frame stream reports. Then nothing is left of it, and the key holds
            what it held.
        """
        self._spiller.store_on_disk(key, header, frames, nbytes)

    def discard(self, key: Hashable) -> None:
        """Forget `key`. Its record is deleted later, on another thread.

        Raises
        ------
        KeyError
            The key is unknown.
        """
        with self._metadata as state:
            if self._metadata.nested and key in self._ledger.keys:
                self._metadata.defer(partial(self.discard, key))
            else:
                state.remove(key)

    def __contains__(self, key: object) -> bool:
        return key in self._ledger.keys

    def __len__(self) -> int:
        return len(self._ledger.keys)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.keys())

    def keys(self) -> list[Hashable]:
        """All keys, as of now."""
        with self._metadata:
            return list(self._ledger.keys)

    def keys_in(self, tier: Tier) -> list[Hashable]:
        """Return the keys whose value is in memory (`Tier.HOST`) or not (`Tier.DISK`). O(n)."""
        wanted = tier is Tier.HOST
        with self._metadata:
            return [key for key, entry in self._ledger.keys.items() if entry.residency.resident is wanted]

    def is_resident(self, key: Hashable) -> bool:
        """Whether the value of `key` is in memory and can be handed out at once. KeyError if unknown."""
        return self._restorer.ready(self._ledger.keys[key])

    def tier_of(self, key: Hashable) -> Tier:
        """Return the fastest tier in which the value of `key` is, decoded or not. KeyError if unknown."""
        return Tier.HOST if self._ledger.keys[key].residency.resident else Tier.DISK

    def nbytes(self, key: Hashable) -> int:
        """Bytes the value of `key` takes in memory, wherever it is. KeyError if unknown.

        Memory that it shares is not counted, but its view of it is.
        """
        entry = self._ledger.keys[key]
        return entry.apart_nbytes if entry.parts else entry.nbytes

    def peek(self, key: Hashable, default: Any = None) -> Any:
        """Return the value of `key` if it is in memory, else `default`. Never does I/O; counts as a use."""
        with self._metadata:
            entry = self._ledger.keys.get(key)
            if entry is None or not self._restorer.ready(entry):
                return default
            return self._restorer.hit(entry)

    def look(self, key: Hashable) -> Any:
        """Return the value of `key` as it is in memory, else None. No use: what the manager knows stays as it is."""
        with self._metadata:
            entry = self._ledger.keys.get(key)
            return None if entry is None else self._metadata.slots[entry.pid].value

    # -- values --------------------------------------------------------------------------------------

    def get(self, key: Hashable) -> Any:
        """Return the value of `key`.

        If it is on disk it is read in the calling thread, which blocks, without waiting for admission.

        Raises
        ------
        KeyError
            The key is unknown.
        DataLostError
            The only copy was on disk and cannot be read back intact.
        ManagerClosed
            The store was closed while the value was on disk.
        """
        with self._metadata:
            entry = self._ledger.keys[key]
            ready = self._restorer.ready(entry)
            value = self._restorer.hit(entry) if ready else None
        if not ready:
            # Looked up anew: if the key was overwritten meanwhile, the new value is the right one.
            return self._restorer.bring(key)
        self._observe_hit(entry.nbytes)
        return value

    def proxy(self, key: Hashable) -> Proxy:
        """Return a handle for the value that `key` holds now. KeyError if unknown."""
        return Proxy(self, key, self._ledger.keys[key].pid)

    def resolve(self, proxy: Proxy) -> Any:
        """Return the value a proxy stands for; as :meth:`get`."""
        return self._restorer.bring(proxy.key, proxy.pid)

    def nbytes_of(self, proxy: Proxy) -> int:
        """Bytes the value of a proxy takes in memory. KeyError if it is gone."""
        return self._restorer.entry(proxy.key, proxy.pid).nbytes

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
            Done already when every value is in memory. Waits for admission otherwise. Cancelling it gives up waiting;
            reads that have begun end in the background and leave the store consistent. A value whose key is
            deleted meanwhile is delivered.
        """
        result: Future[dict[Hashable, Any]] = Future()
        with self._metadata:
            known = self._ledger.keys
            found: dict[Hashable, Entry] = {}
            for key in keys:
                entry = known.get(key)
                if entry is not None:
                    found[key] = entry
                elif missing == "raise":
                    raise KeyError(key)
            if all(map(self._restorer.ready, found.values())):
                result.set_result({key: self._restorer.hit(entry) for key, entry in found.items()})
                return result
            admission = self._promise(found, {}, 0, Kind.TRANSFER)
        gathered = self.materialize_later(admission)
        gathered.add_done_callback(lambda _: admission.release())
        return gathered

    def export(self, admission: Admission, *, borrow: bool = False) -> Future[dict[Hashable, Encoded | Any]]:
        """Return a future of what to send for the inputs of an admission, read on the restore threads.

        The value itself where it is in memory; else its record's bytes, checked but not decoded. What is on disk stays
        there, and nothing else has to leave for it: the future never waits for room. Whoever sends bounds what is under
        way.

        Parameters
        ----------
        admission
            Of the inputs.
        borrow
            Whether the bytes are only looked at, soon; see :class:`gpuspill.storage.base.Borrow`. Nothing may be
            decoded from them then that is kept.

        Raises
        ------
        DataLostError, ManagerClosed
            In the future: a value cannot be read.
        """
        result: Future[dict[Hashable, Encoded | Any]] = Future()
        self._restorer.export(admission, result, borrow=borrow)
        return result

    # -- admission, pins, hints ----------------------------------------------------------------------

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
            The key under which the output will be stored; storing it settles the promise. None if there is no output.
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
        with self._metadata:
            known = self._ledger.keys
            return self._promise({key: known[key] for key in inputs}, outputs, output_nbytes, kind)

    def pin(self, keys: Iterable[Hashable]) -> Admission:
        """Pin values where they are, without asking for room to bring them into memory.

        For whoever looks at them without needing them there, such as :meth:`export`. Unknown keys are left out.
        """
        with self._metadata as state:
            known = self._ledger.keys
            pids = {key: known[key].pid for key in keys if key in known}
            self._metadata.forbid_nested("pin")
            for pid in pids.values():
                state.pin(pid)
            nothing = Reservation(Kind.TRANSFER, 0, granted=True)
            return Admission(self, nothing, pids, {}, 0, self._metadata.clock())

    def missing_nbytes(self, admission: Admission) -> int:
        """Bytes of the inputs of an admission that are on disk now."""
        with self._metadata:
            # By proxy: several keys may hold one.
            entries = {pid: self._restorer.entry(key, pid) for key, pid in admission.pids.items()}
            return sum(entry.nbytes for entry in entries.values() if entry.residency.state is State.SPILLED)

    def fetch(self, key: Hashable, *, in_place: bool = False) -> Encoded | Any:
        """Return what :meth:`export` delivers for one key, read in the calling thread, which blocks.

        Parameters
        ----------
        key
            Whose.
        in_place
            Frames that came to disk past host memory may be left there: see
            :class:`gpuspill.storage.inplace.FileMemory`.

        Raises
        ------
        KeyError
            The key is unknown.
        DataLostError, ManagerClosed
            Its value cannot be read.
        """
        with self.pin([key]) as pins:
            return self._restorer.fetch(key, pins.pids[key], in_place=in_place)

    def settle(self, label: Hashable) -> None:
        """Give back what is promised for the output `label`: it arrived, or part of it, under other names."""
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.settle, label))
                return
            admission = self._labels.pop(label, None)
            if admission is not None:
                state.settle(admission.reservation, admission.outputs.pop(label))

    def decode(self, encoded: Encoded) -> Future[Any]:
        """Return a future of the value that some bytes stand for, decoded on a restore thread. Stores nothing."""
        result: Future[Any] = Future()
        if not self._engine.submit(partial(self._restorer.decode, encoded, result)):
            result.set_exception(ManagerClosed("the store was closed"))
        return result

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
            The keys under which they will be stored and the part of each, if known; storing a key settles its part.
        """
        with self._metadata:
            return self._promise({}, dict(outputs or {}), nbytes, kind)

    def reserve_now(
        self, nbytes: int, kind: Kind, *, outputs: Mapping[Hashable, int] | None = None
    ) -> Admission | None:
        """As :meth:`reserve`, but None if it would have to wait, or be granted beyond the limit.

        Clean values that come first in the order of eviction make room for it.
        """
        with self._metadata as state:
            self._metadata.forbid_nested("ask for room")
            reservation = state.reserve_now(nbytes, kind)
            return None if reservation is None else self._admission(reservation, {}, dict(outputs or {}), nbytes)

    def wait_for_room(self) -> None:
        """Wait until what is in memory fits the limit, or nothing more can leave. Blocks: others write.

        For whoever makes more and more of it in one go. Returns at once where waiting would be for oneself: in a spill
        thread, and in a finaliser that runs in the middle of a change.
        """
        with self._metadata:
            if self._metadata.nested or self._metadata.closed or self._engine.spilling_here:
                return
            admission = self._promise({}, {}, 0, Kind.TASK)
        with admission:
            admission.wait()

    def _promise(
        self,
        entries: Mapping[Hashable, Entry],
        outputs: dict[Hashable, int],
        output_nbytes: int,
        kind: Kind,
    ) -> Admission:
        """Under the lock: pin the inputs and queue for room."""
        self._metadata.forbid_nested("ask for room")
        state = self._metadata.state
        missing: dict[int, int] = {}  # by proxy: several keys may hold one
        pids: dict[Hashable, int] = {}
        for key, entry in entries.items():
            state.pin(entry.pid)
            pids[key] = entry.pid
            if entry.residency.state is State.SPILLED:
                missing[entry.pid] = entry.nbytes
        reservation = state.reserve(sum(missing.values()) + output_nbytes, kind)
        return self._admission(reservation, pids, outputs, output_nbytes)

    def _admission(
        self, reservation: Reservation, pids: dict[Hashable, int], outputs: dict[Hashable, int], output_nbytes: int
    ) -> Admission:
        """Under the lock: hand out what was reserved."""
        admission = Admission(self, reservation, pids, outputs, output_nbytes, self._metadata.clock())
        if not reservation.granted:
            self._metadata.admissions[reservation] = admission
        for key in outputs:
            self._labels[key] = admission
        return admission

    def materialize(self, admission: Admission) -> dict[Hashable, Any]:
        """Return the values of the inputs of a granted admission, reading what is on disk.

        Blocks. The calling thread reads one of them itself while the restore threads read the others. What is left of
        the promise for inputs is given back.
        """
        values: dict[Hashable, Any] = {}
        absent = []
        hits = []
        with self._metadata:
            for key, pid in admission.pids.items():
                entry = self._restorer.entry(key, pid)
                if self._restorer.ready(entry):
                    values[key] = self._restorer.hit(entry)
                    hits.append(entry.nbytes)
                else:
                    absent.append((key, pid))
        if absent:
            futures = [(key, self._restorer.start(key, pid, admission)) for key, pid in absent[1:]]
            key, pid = absent[0]
            values[key] = self._restorer.bring(key, pid, admission)
            for key, future in futures:
                values[key] = self._restorer.outcome(key, future)
        self._settle_inputs(admission)
        for nbytes in hits:
            self._observe_hit(nbytes)
        return values

    def materialize_later(self, admission: Admission) -> Future[dict[Hashable, Any]]:
        """Return a future of what :meth:`materialize` returns, read on the restore threads.

        Waits for the admission to be granted. Cancel the future before the admission is released, or reads may begin
        that nobody needs.
        """
        result: Future[dict[Hashable, Any]] = Future()
        admission.add_done_callback(
            partial(copy_context().run, self._restorer.gather, admission, result, self._settle_inputs)
        )
        return result

    def _settle_inputs(self, admission: Admission) -> None:
        """Give back what was promised for inputs that were brought by somebody else meanwhile."""
        if admission.reservation.nbytes > admission.output_nbytes:
            with self._metadata as state:
                if self._metadata.nested:
                    self._metadata.defer(partial(self._settle_inputs, admission))
                else:
                    state.shrink(admission.reservation, admission.output_nbytes)

    def release(self, admission: Admission) -> None:
        """Undo :meth:`admit`; called by :meth:`Admission.release`, once."""
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.release, admission))
                return
            self._metadata.admissions.pop(admission.reservation, None)
            for key in admission.outputs:
                if self._labels.get(key) is admission:
                    del self._labels[key]
            state.release(admission.reservation)
            for pid in admission.pids.values():
                state.unpin(pid)

    def worth_making_room(self, key: Hashable, nbytes: int) -> bool:
        """Whether `nbytes` are free, or what would leave for them is needed later than `key`, if at all."""
        with self._metadata as state:
            if state.memory.fits(nbytes):
                return True
            victim = state.queue.peek()
            if victim is None:
                return False
            mine, other = state.uses.next(key), state.queue.next_use(victim)
            return mine is not None and (other is None or other > mine)

    def give_back_output(self, admission: Admission) -> None:
        """Give back what was promised to an admission for an output."""
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.give_back_output, admission))
                return
            state.shrink(admission.reservation, max(0, admission.reservation.nbytes - admission.output_nbytes))
            admission.output_nbytes = 0

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
        with self._metadata as state:
            if self._metadata.closed or self._metadata.nested:
                return 0
            for key in keys:
                entry = state.ledger.keys.get(key)
                if entry is None or entry.residency.state is not State.SPILLED:
                    continue
                order = state.uses.next(key)
                if not state.begin_prefetch(entry.pid, () if order is None else order):
                    break
                self._metadata.slots[entry.pid].restoring = Future()
                begun.append((key, entry.pid))
        for key, pid in begun:
            self._restorer.submit(key, pid)
        return len(begun)

    def expect_uses(self, keys: Iterable[Hashable], order: Order, user: Hashable) -> None:
        """`user` is going to read `keys`; a smaller `order` is sooner."""
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.expect_uses, keys, order, user))
                return
            for key in keys:
                state.expect_use(key, user, order)

    def drop_uses(self, keys: Iterable[Hashable], user: Hashable) -> None:
        """`user` has read `keys` or never will."""
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.drop_uses, keys, user))
                return
            for key in keys:
                state.drop_use(key, user)

    def next_use(self, key: Hashable) -> Order | None:
        """When `key` is needed next, as far as that is known."""
        with self._metadata as state:
            return state.uses.next(key)

    # -- limits and numbers --------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether everything is in memory and nobody needs room: nothing has to be prepared for anybody."""
        state = self._metadata.state
        return not state.spilled and state.memory.excess() <= 0

    @property
    def loop_thread(self) -> int | None:
        """Identifier of the event loop's thread; restores on it are counted."""
        return self._restorer.loop_thread

    @loop_thread.setter
    def loop_thread(self, ident: int | None) -> None:
        self._restorer.loop_thread = ident

    @property
    def limit(self) -> int | None:
        """Bytes of values to keep in memory; None for no limit."""
        return self._metadata.state.memory.limit

    @property
    def offset(self) -> int:
        """What :meth:`set_offset` set, in bytes."""
        return self._metadata.state.memory.offset

    def memory_total(self) -> int:
        """Bytes of values in memory, without the offset and without what is spilled."""
        return self._metadata.state.memory.used

    @property
    def spilled_total(self) -> tuple[int, int]:
        """In-memory size of the values that are on disk only, and bytes of all records."""
        state = self._metadata.state
        return state.spilled_nbytes, state.disk.used

    @property
    def spilled_count(self) -> int:
        """Number of values that are on disk only."""
        return self._metadata.state.spilled

    def set_limit(self, limit: int | None, disk_limit: int | None, *, disk_limit_from: str | None = None) -> None:
        """Change the limits, in bytes; None for no limit. Without effect after :meth:`close`.

        Parameters
        ----------
        limit, disk_limit
            As of the class.
        disk_limit_from
            The setting that says what `disk_limit` is, for messages; None: the same as before.
        """
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.set_limit, limit, disk_limit, disk_limit_from=disk_limit_from))
            elif not self._metadata.closed:
                self._metadata.disk_limit_from = disk_limit_from or self._metadata.disk_limit_from
                state.set_limits(limit, disk_limit)

    def set_offset(self, nbytes: int) -> None:
        """Set the bytes of unmanaged process memory that count against the limit; may be negative."""
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.set_offset, nbytes))
            else:
                state.set_offset(nbytes)

    def evict_all(self) -> None:
        """Spill whatever can be spilled now, and wait until it is done. Blocks; for tests and benchmarks.

        What somebody holds, or what cannot be written, stays.
        """
        with self._metadata as state:
            if self._metadata.closed:
                return
            self._metadata.forbid_nested("evict")
            limit, disk_limit = state.memory.limit, state.disk.limit
            # Below nothing, so that values of no size go as well, and whatever the offset takes off.
            state.set_limits(min(0, state.memory.offset) - 1, disk_limit)
        try:
            while True:
                done = self._spiller.step() is not None
                with self._metadata as state:
                    if self._metadata.closed or (done and not (state.spilling or state.queue)):
                        break
                if done:
                    time.sleep(0.001)  # another thread has the last ones in hand
        finally:
            self.set_limit(limit, disk_limit)

    def make_room(self, nbytes: int) -> int:
        """Evict values until `nbytes` bytes are free that were not, whatever the limit. Blocks: this thread writes.

        Returns
        -------
        int
            Bytes that were freed; fewer than asked for if everything else is in use or cannot be written. What
            others were writing meanwhile is waited for, and counts too.
        """
        freed = 0
        with self._metadata as state:
            self._metadata.forbid_nested("make room")
            state.retry()
        while freed < nbytes:
            with self._metadata as state:
                if self._metadata.closed:
                    break
                used = state.memory.used
                pid = state.next_spill(force=True)
                dropped = used - state.memory.used
                spilling = state.spilling
                size = 0 if pid is None else state.ledger.entries[pid].nbytes
            freed += dropped
            if pid is not None:
                self._spiller.spill(pid, force=True)
                with self._metadata as state:
                    entry = state.ledger.entries.get(pid)
                    freed += size if entry is None or not entry.residency.resident else 0
            elif not dropped:
                if not spilling or self._engine.spilling_here:
                    break
                time.sleep(0.001)  # another thread has the last ones in hand
                with self._metadata as state:
                    freed += max(0, used - state.memory.used)
        return freed

    def statistics(self) -> Statistics:
        """Return a snapshot of every number. O(1) but for the waiting line."""
        return take_snapshot(self._metadata, self._restorer)

    def validate(self) -> None:
        """Raise AssertionError if the manager's tables and the core's contradict each other. O(n)."""
        slots = self._metadata.slots
        with self._metadata as state:
            state.validate()
            entries = state.ledger.entries
            assert slots.keys() == entries.keys()
            for pid, slot in slots.items():
                residency = entries[pid].residency
                if residency.resident:
                    listed = slots.by_id.get(id(slot.value))
                    assert listed is None or slots[listed].value is slot.value, slot.key
                else:
                    assert slot.value is None, slot.key
                assert (slot.receipt is not None) == residency.has(Tier.DISK), slot.key
                decoding = slot.restoring is not None and isinstance(slot.value, Encoded)
                assert decoding or (slot.restoring is not None) == (residency.target == Tier.HOST), slot.key
                assert residency.lost == (slot.lost is not None), slot.key
            assert all(id(slots[pid].value) == ident for ident, pid in slots.by_id.items())

    def close(self) -> None:
        """Stop the threads and remove everything from disk. Values in memory stay readable.

        Whoever waits for room is let go. Idempotent; blocks until running moves have ended.
        """
        with self._metadata as state:
            if self._metadata.closed:
                return
            self._metadata.forbid_nested("close")
            self._metadata.closed = True
            state.memory.limit = None
            state.retry()
        self._engine.close()
        self._metadata.engine = None  # breaks the only cycle: values go with the manager, not with the next collection
        self._store.close()

    def _observe_hit(self, nbytes: int) -> None:
        if self._observer is not None:
            self._observer("memory-read", 1, "count")
            self._observer("memory-read", nbytes, "bytes")
