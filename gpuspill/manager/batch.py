"""Several values at once: inputs of a task, those of a transfer, or of many keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Literal

from gpuspill.core.budget import Kind
from gpuspill.core.policy import Order
from gpuspill.errors import ManagerClosed, answerable, is_for_caller
from gpuspill.manager.admission import Admission
from gpuspill.manager.admitter import Admitter
from gpuspill.manager.ports import Encoded, Serializer
from gpuspill.manager.restore import Restorer
from gpuspill.manager.restore_together import TogetherRestorer
from gpuspill.manager.slots import Restore
from gpuspill.manager.threads import Engine, Urgency
from gpuspill.manager.transaction import BATCH, Metadata, batches, reads, refused
from gpuspill.storage.base import Lend

__all__ = ["Gatherer"]


class Gatherer:
    """Collects values for a manager, each in its own time; the last to come delivers all.

    Parameters
    ----------
    together
        Restores several values at a time; None if that costs as much as one after the other.

    Notes
    -----
    Thread-safe. What returns a future does not block; the rest says so.
    """

    def __init__(
        self,
        metadata: Metadata,
        engine: Engine,
        serializer: Serializer,
        restorer: Restorer,
        admitter: Admitter,
        together: TogetherRestorer | None = None,
    ) -> None:
        self._together = together
        self._metadata = metadata
        self._engine = engine
        self._serializer = serializer
        self._restorer = restorer
        self._admitter = admitter

    # -- into memory -------------------------------------------------------------------------------

    @reads
    def get_many(
        self, keys: Iterable[Hashable], missing: Literal["raise", "omit"] = "raise", order: Order = ()
    ) -> Future[dict[Hashable, Any]]:
        """Return a future of the values of several keys, read on the restore threads.

        Parameters
        ----------
        keys
            Any number of keys.
        missing
            Whether an unknown key raises KeyError (here, at once) or is left out.
        order
            How urgent it is, if it has to wait for room; smaller is sooner.

        Returns
        -------
        concurrent.futures.Future
            Done already when every value is in memory. Waits for admission otherwise. Cancelling it
            gives up waiting; reads that have begun end in the background and leave the store
            consistent. A value whose key is deleted meanwhile is delivered.
        """
        result: Future[dict[Hashable, Any]] = Future()
        wanted = tuple(keys)
        while True:
            found, values = self._find(wanted, missing)
            if values is not None:
                result.set_result(values)
                return result
            try:
                admission = self._admitter.admit(None, found, kind=Kind.TRANSFER, order=order)
            except KeyError:
                continue  # it was deleted meanwhile
            break
        gathered = self.materialize_later(admission)
        gathered.add_done_callback(lambda _: self._for_many(len(admission.pids), Urgency.SEND, admission.release))
        return gathered

    def _find(
        self, wanted: Iterable[Hashable], missing: Literal["raise", "omit"]
    ) -> tuple[list[Hashable], dict[Hashable, Any] | None]:
        """Return which keys are known, and their values if all are in memory, as used."""
        found: dict[Hashable, None] = {}
        values: dict[Hashable, Any] | None = {}
        for batch in batches(wanted):
            with self._metadata as state:
                for key in batch:
                    entry = state.ledger.keys.get(key)
                    if entry is not None:
                        found[key] = None
                        if values is not None and self._restorer.ready(entry):
                            values[key] = self._metadata.slots[entry.pid].value
                            self._metadata.touch(entry.pid)
                        else:
                            values = None
                    elif missing == "raise":
                        values = None  # the traceback keeps this frame, and would keep them
                        raise KeyError(key)
        if values is not None:
            with self._metadata:
                self._restorer.hits += len(values)
        return list(found), values

    @reads
    def materialize(self, admission: Admission) -> dict[Hashable, Any]:
        """Return the values of the inputs of a granted admission, reading what is on disk.

        Blocks. The calling thread reads all that no restore thread has begun to read meanwhile.
        What is left of the promise for inputs is given back.
        """
        values: dict[Hashable, Any] = {}
        absent = []
        hits = []
        for batch in batches(admission.pids.items()):
            with self._metadata:
                for key, pid in batch:
                    entry = self._metadata.entry(key, pid)
                    if self._restorer.ready(entry):
                        values[key] = self._restorer.hit(entry)
                        hits.append(entry.nbytes)
                    else:
                        absent.append((key, pid))
        if len(absent) > 1 and self._together is not None:
            values |= self._together.bring(absent, admission)
        elif absent:
            futures = [(key, pid, self._restorer.start(key, pid, admission)) for key, pid in absent[1:]]
            key, pid = absent[0]
            values[key] = self._restorer.bring(key, pid, admission)
            # From the other end than the restore threads.
            for _, pid, future in reversed(futures):
                if isinstance(future, Restore):
                    self._restorer.run(pid, future)
            for key, _, future in futures:
                values[key] = self._restorer.outcome(key, future)
        self._admitter.settle_inputs(admission)
        for nbytes in hits:
            self._restorer.observe_hit(nbytes)
        return values

    @reads
    def materialize_later(self, admission: Admission) -> Future[dict[Hashable, Any]]:
        """Return a future of what :meth:`materialize` returns, read on the restore threads.

        Waits for the admission to be granted. Cancel the future before the admission is released,
        or needless reads may begin.
        """
        result: Future[dict[Hashable, Any]] = Future()
        urgency = Urgency.TASK if admission.reservation.kind is Kind.TASK else Urgency.SEND
        gather = partial(copy_context().run, self._gather, admission, urgency, result)
        admission.add_done_callback(partial(self._for_many, len(admission.pids), urgency, gather))
        return result

    def _gather(self, admission: Admission, urgency: Urgency, result: Future[dict[Hashable, Any]]) -> None:
        """Start the restores of what was admitted."""
        if result.cancelled():
            return
        if not admission.pids:
            self._admitter.settle_inputs(admission)
            result.set_result({})
            return
        items = list(admission.pids.items())
        if self._together is not None and len(items) > 1 and not self._metadata.inherited:
            pending = self._together.start(items, admission, urgency)
        else:
            pending = [(key, self._restorer.start(key, pid, admission, urgency)) for key, pid in items]
        self._deliver(pending, result, partial(self._admitter.settle_inputs, admission))

    # -- as they are -------------------------------------------------------------------------------

    @reads
    def export(self, admission: Admission, *, lend: Lend | None = None) -> Future[dict[Hashable, Encoded | Any]]:
        """Return a future of what to send for an admission's inputs, read on restore threads.

        The value itself where it is in memory; else its record's bytes, checked but not decoded.
        What is on disk stays there, and nothing else has to leave for it: the future never waits
        for room. The sender bounds what is under way.

        Parameters
        ----------
        admission
            Of the inputs.
        lend
            See :meth:`gpuspill.storage.base.Store.read`. Nothing may be decoded from what is lent
            that is kept.

        Raises
        ------
        DataLostError, ManagerClosed
            In the future: a value cannot be read.
        """
        result: Future[dict[Hashable, Encoded | Any]] = Future()
        export = partial(copy_context().run, self._export, admission, lend, result)
        self._for_many(len(admission.pids), Urgency.SEND, export)
        return result

    def _export(self, admission: Admission, lend: Lend | None, result: Future[dict[Hashable, Encoded | Any]]) -> None:
        """Start reading what is on disk of the inputs of an admission."""
        if result.cancelled():
            return
        pending = [(key, self._export_later(key, pid, result, lend)) for key, pid in admission.pids.items()]
        self._deliver(pending, result, lambda: None)

    @refused("pin")
    def fetch(self, key: Hashable, *, lend: Lend | None = None) -> Encoded | Any:
        """Return what :meth:`export` delivers for one key. Blocks: the calling thread reads.

        Parameters
        ----------
        lend
            See :meth:`gpuspill.storage.base.Store.read`.

        Raises
        ------
        KeyError
            The key is unknown.
        DataLostError, ManagerClosed
            Its value cannot be read.
        """
        with self._admitter.pin([key]) as pins:
            return self._restorer.fetch(key, pins.pids[key], lend)

    @reads
    def decode(self, encoded: Encoded) -> Future[Any]:
        """Return a future of the value of some bytes, decoded on a restore thread; not stored."""
        result: Future[Any] = Future()
        if not self._engine.submit(partial(self._decode, encoded, result), Urgency.SEND):
            result.set_exception(ManagerClosed("the store was closed"))
        return result

    def _decode(self, encoded: Encoded, result: Future[Any]) -> None:
        """Deliver the value of some bytes in `result`. Blocks; never raises an Exception."""
        try:
            value = self._serializer.loads(encoded.header, [memoryview(frame) for frame in encoded.frames])
        except BaseException as error:
            with suppress(InvalidStateError):  # cancelled
                result.set_exception(answerable(error))
            if is_for_caller(error):
                raise
        else:
            with suppress(InvalidStateError):
                result.set_result(value)

    def _export_later(self, key: Hashable, pid: int, result: Future[Any], lend: Lend | None) -> Future[Any]:
        """Return a future of what to send for a pinned proxy. Never blocks, never raises.

        A restore in flight is joined here and not on a restore thread: it may be queued behind that
        very thread.
        """
        future: Future[Any] = Future()
        joined: Restore | None = None
        with self._metadata:
            try:
                entry = self._metadata.entry(key, pid)
                slot = self._metadata.slots[pid]
                if slot.loss is not None:
                    raise self._restorer.lost_error(key, pid, slot.loss)
                if entry.resident:
                    future.set_result(slot.value)
                    return future
                joined = slot.restoring
                if joined is None and self._metadata.closed:
                    raise self._metadata.unreadable(key)
            except Exception as error:
                future.set_exception(error)
                return future
        if joined is not None:
            self._restorer.queue(key, pid, joined, Urgency.SEND)
            return joined

        def read() -> None:
            try:
                # If the whole was cancelled, its outcome is not needed.
                future.set_result(None if result.cancelled() else self._restorer.fetch(key, pid, lend))
            except BaseException as error:
                future.set_exception(answerable(error))
                if is_for_caller(error):
                    raise

        if not self._engine.submit(partial(copy_context().run, read), Urgency.SEND):
            future.set_exception(ManagerClosed(f"the store was closed before {key!r} was read"))
        return future

    # -- both --------------------------------------------------------------------------------------

    def _for_many(self, count: int, urgency: Urgency, work: Callable[[], None]) -> None:
        """Do `work` for so many keys: here if few, else on a restore thread. For event loops, too.

        `work` must not raise.
        """
        if count <= BATCH or not self._engine.submit(work, urgency):
            work()

    def _deliver(
        self,
        pending: list[tuple[Hashable, Future[Any]]],
        result: Future[dict[Hashable, Any]],
        before: Callable[[], None],
    ) -> None:
        """Call `before`, then deliver the outcomes of `pending` in the thread of the last."""
        if not pending:
            result.set_result({})
            return
        lock = threading.Lock()
        left = len(pending)

        def ended(_: Future[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            try:
                values = {key: self._restorer.outcome(key, future) for key, future in pending}
                before()
            except BaseException as error:
                with suppress(InvalidStateError):  # cancelled
                    result.set_exception(answerable(error))
            else:
                with suppress(InvalidStateError):
                    result.set_result(values)
            finally:
                pending.clear()

        for _, future in list(pending):
            future.add_done_callback(ended)
