"""Bringing several values back at once, where that costs less than one after the other.

As for one (:mod:`gpuspill.manager.restore`): each value has a restore of its own, which others may wait for, and comes
to an end of its own. What cannot be had together comes by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from gpuspill.errors import cut_loose
from gpuspill.manager.admission import Admission
from gpuspill.manager.ports import Encoded, LoadsTogether
from gpuspill.manager.restore import Restorer
from gpuspill.manager.story import Happened
from gpuspill.manager.transaction import Metadata
from gpuspill.storage.base import Receipt, Store

__all__ = ["TogetherRestorer"]

#: How many values come back at most at a time.
_TOGETHER = 256


class TogetherRestorer:
    """Restores several values at a time on behalf of a manager.

    Parameters
    ----------
    metadata, store, restorer
        The manager's.
    loads
        See `loads_together` of :class:`~gpuspill.manager.ProxifyManager`.

    Notes
    -----
    Thread-safe. A thread ends its own restores before it waits for those of others, so two threads that each have some
    of what both want do not wait for each other.
    """

    def __init__(self, metadata: Metadata, store: Store, restorer: Restorer, loads: LoadsTogether) -> None:
        self._metadata = metadata
        self._store = store
        self._restorer = restorer
        self._loads = loads

    def bring(self, items: Sequence[tuple[Hashable, int]], admission: Admission | None) -> dict[Hashable, Any]:
        """Return the values of several proxies by key, restoring in this thread all that no other one is at. Blocks.

        Parameters, and what is raised, as for :meth:`Restorer.bring <gpuspill.manager.restore.Restorer.bring>`.
        """
        ours: list[int] = []
        futures: list[tuple[Hashable, int, Future[Any]]] = []
        for start in range(0, len(items), _TOGETHER):
            with self._metadata:
                alone = self._metadata.may_not_wait
                for key, pid in () if alone else items[start : start + _TOGETHER]:
                    entry = self._metadata.entry(key, pid)
                    future: Future[Any] = Future()
                    if self._restorer.ready(entry):
                        future.set_result(self._restorer.hit(entry))
                    else:
                        try:
                            future = restore = self._restorer.begin(key, pid, admission)
                        except Exception as error:
                            future.set_exception(error)
                        else:
                            if restore.claim():
                                ours.append(pid)
                    futures.append((key, pid, future))
            if threading.get_ident() == self._restorer.loop_thread:
                self._restorer.loop_io += len(ours)
            self._restore(ours)
            ours = []
        waited = {pid for _, pid, _ in futures}
        values = {key: self._restorer.bring(key, pid, admission) for key, pid in items if pid not in waited}
        for key, pid, future in futures:
            # Another thread may be at it, and wait for this one.
            settled = future.done() or not self._metadata.held_here
            values[key] = self._restorer.outcome(key, future) if settled else self._restorer.copy(key, pid)
        return values

    def _restore(self, pids: Sequence[int]) -> None:
        """Bring several values back, which the caller has claimed; never raises an Exception.

        What cannot be had together comes by itself, after the others.
        """
        pending = list(pids)
        try:
            revived, values = self._load(pids) if len(pids) > 1 else ({}, {})
            with self._metadata as state:
                restores = []
                for pid, value in (*revived.items(), *values.items()):
                    slot = self._metadata.slots[pid]
                    restores.append((slot.restoring, value))
                    self._metadata.slots.attach(pid, value)
                    state.complete_restore(pid)
                    if pid not in revived:
                        self._metadata.story.note(slot, Happened.READ, slot.nbytes)
                    elif pid in state.ledger.entries:
                        state.renew(pid)  # who had it meanwhile may have changed it
            pending = [pid for pid in pids if not (pid in revived or pid in values)]
            for future, value in restores:
                assert future is not None
                future.set_result(value)
            while pending:
                self._restorer.restore(pending.pop())
        except BaseException as error:
            for pid in pending:
                self._restorer.fail(pid, error)
            raise

    def _load(self, pids: Sequence[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return the values of proxies that somebody still has, and of those that can be had together.

        What fails is tried again by itself.
        """
        slots, clock = self._metadata.slots, self._metadata.clock
        revived: dict[int, Any] = {}
        receipts: dict[int, Receipt] = {}
        for pid in pids:
            slot = slots[pid]  # stays: nothing forgets a proxy that moves or is pinned
            if type(slot.value) is Encoded or slot.receipt is None or self._metadata.closed:
                continue
            value = None if slot.ghost is None else slot.ghost()
            if value is None:
                receipts[pid] = slot.receipt
            else:
                revived[pid] = value
        start = clock()
        try:
            records = dict(zip(receipts, self._store.read_together(list(receipts.values())), strict=True))
            found = {pid: record for pid, record in records.items() if record is not None}
            middle = clock()
            loaded = dict(zip(found, self._loads(list(found.values())), strict=True))
        except Exception as error:
            cut_loose(error)
            return revived, {}
        values = {pid: value for pid, value in loaded.items() if value is not None}
        with self._metadata:
            totals = self._metadata.totals
            totals["reading"] += middle - start
            totals["deserialize"] += clock() - middle
            totals["read"] += sum(receipts[pid].nbytes for pid in values)
        return revived, values
