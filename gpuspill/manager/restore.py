"""Bringing values back: once, however many threads want them.

The first thread that wants a spilled value reads it, in its own time; the others wait for its
future and get the same object. A thread that needs a value takes it over from the line for restore
threads. So no task waits for the line, and reading ahead never makes a read slower.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any

from gpuspill.core.ledger import Entry
from gpuspill.core.residency import State
from gpuspill.errors import DataLostError, ManagerClosed, answerable, is_for_caller
from gpuspill.manager.admission import Admission
from gpuspill.manager.decode import Decoder
from gpuspill.manager.insert import Sharing
from gpuspill.manager.ports import Encoded, Observer, Serializer
from gpuspill.manager.slots import Restore
from gpuspill.manager.story import Happened
from gpuspill.manager.threads import Engine, Urgency
from gpuspill.manager.transaction import Metadata
from gpuspill.storage.base import Lend, Receipt, Store

__all__ = ["Restorer"]

logger = logging.getLogger("gpuspill")

_VALUE, _IS_LOST = "the value of ", " is lost: "


class Restorer:
    """Reads records on behalf of a manager.

    Parameters
    ----------
    allocate
        Gives the buffer that a record is read into.
    observer
        Told about I/O and hits.

    Attributes
    ----------
    hits, misses
        Reads of values that were in memory, and of those that were not.
    loop_thread
        Identifier of the event loop's thread.
    loop_io
        Restores that the event loop's thread did or waited for.
    """

    def __init__(
        self,
        metadata: Metadata,
        engine: Engine,
        store: Store,
        serializer: Serializer,
        decoder: Decoder,
        *,
        allocate: Callable[[int], memoryview] | None,
        observer: Observer | None,
        sharing: Sharing,
    ) -> None:
        self._sharing = sharing
        self._metadata = metadata
        self._engine = engine
        self._store = store
        self._serializer = serializer
        self._decoder = decoder
        self._allocate = allocate
        self._observer = observer
        self.hits = 0
        self.misses = 0
        self.loop_io = 0
        self.loop_thread: int | None = None

    # -- under the lock ----------------------------------------------------------------------------

    def nbytes(self, key: Hashable, pid: int) -> int:
        """Bytes the value of a proxy takes in memory. KeyError if it is gone."""
        return self._metadata.entry(key, pid).nbytes

    def ready(self, entry: Entry) -> bool:
        """Whether the value of an entry can be handed out at once."""
        return entry.resident and self._metadata.slots.ready(entry.pid)

    def hit(self, entry: Entry) -> Any:
        """Return the value of an entry that is ready, as a use."""
        self.hits += 1
        self._metadata.touch(entry.pid)
        return self._metadata.slots[entry.pid].value

    def begin(self, key: Hashable, pid: int, admission: Admission | None) -> Restore:
        """Join a restore in flight or begin one. The caller that claims it has to run it.

        Decoding a value that came as bytes is a restore from memory: the proxy is pinned instead of
        moving.
        """
        slot = self._metadata.slots[pid]
        state = self._metadata.state
        if slot.loss is not None:
            raise self.lost_error(key, pid, slot.loss)
        if slot.restoring is not None:
            state.touch(pid)
            return slot.restoring
        if type(slot.value) is Encoded:
            state.pin(pid)
        else:
            if self._metadata.closed:
                raise self._metadata.unreadable(key)
            self.misses += 1
            state.restores.begin(pid, None if admission is None else admission.reservation)
        slot.restoring = Restore()
        return slot.restoring

    # -- without the lock --------------------------------------------------------------------------

    def observe_hit(self, nbytes: int) -> None:
        """Tell the observer of a hit of so many bytes; without the lock."""
        if self._observer is not None:
            self._observer("memory-read", 1, "count")
            self._observer("memory-read", nbytes, "bytes")

    def bring(self, key: Hashable, pid: int | None = None, admission: Admission | None = None) -> Any:
        """Return the value of a proxy, restoring it here unless another thread does. Blocks.

        Parameters
        ----------
        pid
            The proxy; None for the one that the key holds now.
        admission
            The bytes come out of its promise.

        Raises
        ------
        KeyError
            The key or the proxy is gone.
        DataLostError, ManagerClosed
            Its value cannot be brought back.
        """
        if self._metadata.inherited:
            return self._look(key, pid)
        with self._metadata as state:
            entry = state.find(key) if pid is None else self._metadata.entry(key, pid)
            pid = entry.pid
            if self.ready(entry):
                return self.hit(entry)
            before = self._metadata.slots[pid].restoring
            if self._metadata.may_not_wait or (before is not None and before.reader == threading.get_ident()):
                return self.copy(key, pid)
            future = self.begin(key, pid, admission)
            ours = future.claim()
        if threading.get_ident() == self.loop_thread and not future.done():
            self.loop_io += 1
        if ours:
            self.restore(pid)
        elif not future.done() and self._metadata.held_here:
            return self.copy(key, pid)
        return self.outcome(key, future)

    def start(
        self, key: Hashable, pid: int, admission: Admission | None = None, urgency: Urgency = Urgency.TASK
    ) -> Future[Any]:
        """Return a future of the value, restored on a restore thread unless another claims it.

        Never blocks and never raises: what :meth:`bring` raises is in the future.
        """
        done: Future[Any] = Future()
        if self._metadata.inherited:
            try:
                done.set_result(self._look(key, pid))
            except BaseException as error:
                done.set_exception(answerable(error))
            return done
        with self._metadata:
            try:
                entry = self._metadata.entry(key, pid)
                if self.ready(entry):
                    done.set_result(self.hit(entry))
                    return done
                if self._metadata.may_not_wait:
                    done.set_result(self.copy(key, pid))
                    return done
                future = self.begin(key, pid, admission)
            except BaseException as error:
                done.set_exception(answerable(error))
                return done
        self.queue(key, pid, future, urgency)
        return future

    def _look(self, key: Hashable, pid: int | None) -> Any:
        """Return, in a forked child, a value from memory, or a copy of what is on disk."""
        with self._metadata as state:
            entry = state.find(key) if pid is None else self._metadata.entry(key, pid)
            if self.ready(entry):
                return self.hit(entry)
        try:
            return self.copy(key, entry.pid)
        except DataLostError as error:
            # A value that was in use when the process forked is in the child's memory for good. The
            # parent gives up the record of such a value once it takes it back.
            ghost = self._metadata.slots[entry.pid].ghost
            value = None if ghost is None else ghost()
            if value is None:
                raise self._metadata.unreadable(key) from error
            return value

    def copy(self, key: Hashable, pid: int) -> Any:
        """Return a copy of a value that is not ready, and change nothing.

        For a finaliser that runs in the middle of a change or of an operation of the store, or that
        asks for the very value that its thread is about to bring back (so may a deserialiser). It
        cannot wait for the thread that restores the value: that thread waits for this one.
        """
        slot = self._metadata.slots[pid]
        if slot.sizeof < 0:
            raise KeyError(key)  # it is just being stored
        if slot.loss is not None:
            raise self.lost_error(key, pid, slot.loss)
        if type(slot.value) is Encoded:
            # As they are: the value may not share its memory with the one that others will be
            # given.
            frames = [memoryview(bytearray(frame)) for frame in slot.value.frames]
            return self._serializer.loads(slot.value.header, frames)
        if slot.receipt is None or (self._metadata.closed and not self._metadata.inherited):
            raise self._metadata.unreadable(key)
        try:
            record = self._store.read(slot.receipt)
        except DataLostError as error:
            raise self.lost_error(key, pid, error.message) from error
        return self._serializer.loads(*record)

    def lost_error(self, key: Hashable, pid: int, reason: str) -> DataLostError:
        """Return the error for the caller that asked for `key`, with what became of the value."""
        error = DataLostError(_lost(key, reason), key)
        with self._metadata:
            error.add_note(self._metadata.story.told(pid))
        return error

    def queue(self, key: Hashable, pid: int, future: Restore, urgency: Urgency) -> None:
        """Put a restore in line for the threads, unless it is under way or as far in front."""
        with self._metadata:
            if future.reader is not None or (future.urgency is not None and future.urgency <= urgency):
                return
            # Where it was in line before, it will be found done.
            future.urgency = urgency
        # In a copy of the caller's context, by which the observer tells on whose behalf it is read.
        if self._engine.submit(partial(copy_context().run, self.run, pid, future), urgency):
            return
        with self._metadata:
            ours = future.claim()
        if not ours:
            return
        if type(self._metadata.slots[pid].value) is Encoded:
            self.restore(pid)  # what is in memory stays readable, and no thread is left to decode it
        else:
            self.fail(pid, ManagerClosed(f"the store was closed before {key!r} was read"))

    def run(self, pid: int, future: Restore) -> None:
        """Do, in this thread, a restore that was begun, unless a thread has claimed it. Blocks."""
        with self._metadata:
            ours = future.claim()
        if ours:
            self.restore(pid)

    @staticmethod
    def outcome(key: Hashable, future: Future[Any]) -> Any:
        """Wait for a restore; what is lost is lost under the name of the key that was asked for."""
        try:
            return future.result()
        except DataLostError as error:
            # Many may wait for one future; each gets an error of its own.
            raise error.retold(_lost(key, error.message), key) from error

    def restore(self, pid: int) -> None:
        """Bring a value back. The caller has claimed the restore. Never raises an Exception."""
        slot = self._metadata.slots[pid]  # stays: nothing forgets a proxy that moves or is pinned
        if type(slot.value) is Encoded:
            self._decode(pid, slot.value)
            return
        receipt = slot.receipt
        assert receipt is not None
        ghost = slot.ghost
        value = None if ghost is None else ghost()
        alive, left = value is not None, None
        try:
            if not alive:
                if self._metadata.closed:
                    raise ManagerClosed(f"the store was closed before {slot.key!r} was read")
                value, left = self._decoder.decode(slot, *self._read_record(receipt))
            shared = self._sharing.look(value)
        except BaseException as error:
            self.fail(pid, error)
            if is_for_caller(error):
                raise
            return
        with self._metadata as state:
            future = slot.restoring
            assert future is not None
            self._metadata.slots.attach(pid, value)
            state.restores.complete(pid)
            if not alive:
                self._metadata.story.note(slot, Happened.READ, slot.nbytes)
            if left is not None and pid in state.ledger.entries:
                state.shrink_value(pid, left)
            if alive and pid in state.ledger.entries:
                state.invalidate(pid)  # its holder may have changed it, and the record was not read
            self._sharing.split_parts(pid, shared)
        future.set_result(value)

    def revive(self, keys: Iterable[Hashable]) -> None:
        """Take back evicted values that are still referenced. No reads; drops their records.

        Other keys do not matter.
        """
        for key in keys:
            with self._metadata:
                entry = self._metadata.state.ledger.keys.get(key)
                gone = entry is None or entry.state is not State.SPILLED or self._metadata.closed
                if entry is None or gone or self._metadata.slots[entry.pid].ghost is None:
                    continue
                self.begin(key, entry.pid, None).claim()
            self.restore(entry.pid)

    def _decode(self, pid: int, encoded: Encoded) -> None:
        """Decode the value of a pinned proxy in its place. Never raises an Exception."""
        slot = self._metadata.slots[pid]
        value, left, shared, error = None, None, None, None
        try:
            value, left = self._decoder.decode(slot, encoded.header, [memoryview(frame) for frame in encoded.frames])
            shared = self._sharing.look(value)
        except BaseException as caught:
            error = caught
        with self._metadata as state:
            future, slot.restoring = slot.restoring, None
            assert future is not None
            if error is None:
                self._metadata.slots.attach(pid, value)
                self._sharing.split_parts(pid, shared)
                if left is not None:
                    state.shrink_value(pid, left)
            state.unpin(pid)
        if error is not None:
            future.set_exception(answerable(error))
            if is_for_caller(error):
                raise error
            return
        future.set_result(value)

    def fetch(self, key: Hashable, pid: int, lend: Lend | None = None) -> Encoded | Any:
        """Read a record undecoded, or find its value in memory. Blocks on its own I/O only.

        Parameters
        ----------
        key, pid
            Of the proxy.
        lend
            See :meth:`gpuspill.storage.base.Store.read`.

        Raises
        ------
        KeyError, DataLostError, ManagerClosed
            As :meth:`bring`.
        """
        while True:
            with self._metadata:
                entry = self._metadata.entry(key, pid)
                slot = self._metadata.slots[pid]
                if slot.loss is not None:
                    raise self.lost_error(key, pid, slot.loss)
                if entry.resident:
                    return slot.value
                receipt = slot.receipt
            assert receipt is not None
            try:
                header, frames = self._read_record(receipt, lend)
                return Encoded(header, frames, entry.nbytes, slot.device_nbytes)
            except DataLostError as error:
                with self._metadata:
                    if entry.resident or slot.receipt is not receipt:
                        continue  # it was brought back meanwhile, and its record given up
                    if entry.moving or self._metadata.closed:
                        # The thread that restores it finds out, and tells all.
                        raise self.lost_error(key, pid, error.message) from error
                    future = self.begin(key, pid, None)
                    future.claim()
                self.restore(pid)
                return self.outcome(key, future)

    def _read_record(self, receipt: Receipt, lend: Lend | None = None) -> tuple[bytes, list[memoryview]]:
        clock = self._metadata.clock
        start = clock()
        header, frames = self._store.read(receipt, self._allocate, lend=lend)
        seconds = clock() - start
        with self._metadata:
            totals = self._metadata.totals
            totals["reading"] += seconds
            totals["read"] += receipt.nbytes
        if self._observer is not None:
            self._observer("disk-read", seconds, "seconds")
            self._observer("disk-read", 1, "count")
            self._observer("disk-read", receipt.nbytes, "bytes")
        return header, frames

    def fail(self, pid: int, error: BaseException) -> None:
        """End a restore that the caller has claimed: it came to nothing."""
        with self._metadata as state:
            slot = self._metadata.slots[pid]
            if self._metadata.closed and not isinstance(error, ManagerClosed):
                error = ManagerClosed(f"the store was closed while {slot.key!r} was read: {error}")
            lost = isinstance(error, DataLostError)
            future, slot.restoring = slot.restoring, None
            assert future is not None
            self._metadata.story.note(slot, Happened.LOST if lost else Happened.NOT_READ, slot.disk_nbytes, error)
            if lost:
                slot.loss = str(error)
                error.add_note(self._metadata.story.told(pid))
            state.restores.fail(pid, lost=lost)
        if lost:
            logger.error("%s", _lost(slot.key, str(error)))
        future.set_exception(answerable(error))


def _lost(key: Hashable, reason: str) -> str:
    """Return the message for a caller that asked for `key`, one of the value's keys."""
    before, found, rest = reason.partition(_IS_LOST)
    if found and before.startswith(_VALUE):  # said already, to a caller that asked on behalf of this one
        reason = rest
    return f"{_VALUE}{key!r}{_IS_LOST}{reason}"
