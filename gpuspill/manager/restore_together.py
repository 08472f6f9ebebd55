"""Bringing several values back at once, where that costs less than one after the other.

As for one (:mod:`gpuspill.manager.restore`): each value has a restore of its own, which others may
wait for, and comes to an end of its own. What cannot be had together comes by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any

from gpuspill.errors import cut_loose
from gpuspill.manager.admission import Admission
from gpuspill.manager.ports import Encoded, LoadsTogether
from gpuspill.manager.restore import Restorer
from gpuspill.manager.slots import Restore
from gpuspill.manager.story import Happened
from gpuspill.manager.threads import Engine, Urgency
from gpuspill.manager.transaction import Metadata
from gpuspill.storage.base import Receipt, Store

__all__ = ["TogetherRestorer"]

#: How many values come back at most at a time.
_TOGETHER = 256


class TogetherRestorer:
    """Restores several values at a time on behalf of a manager.

    Parameters
    ----------
    loads
        See `loads_together` of :class:`~gpuspill.manager.ProxifyManager`.

    Notes
    -----
    Thread-safe. A thread ends its own restores before it waits for those of others, so two threads
    that each have some of what both want do not wait for each other.
    """

    def __init__(
        self, metadata: Metadata, engine: Engine, store: Store, restorer: Restorer, loads: LoadsTogether
    ) -> None:
        self._metadata = metadata
        self._engine = engine
        self._store = store
        self._restorer = restorer
        self._loads = loads

    def bring(self, items: Sequence[tuple[Hashable, int]], admission: Admission | None) -> dict[Hashable, Any]:
        """Return the values of several proxies, restoring here what no thread does. Blocks.

        Parameters, and what is raised, as for :meth:`Restorer.bring
        <gpuspill.manager.restore.Restorer.bring>`.
        """
        values: dict[Hashable, Any] = {}
        pending: list[tuple[Hashable, int, Future[Any]]] = []
        for start in range(0, len(items), _TOGETHER):
            ours: list[int] = []
            with self._metadata:
                alone = self._metadata.may_not_wait
                for key, pid in () if alone else items[start : start + _TOGETHER]:
                    future = self._begin(key, pid, admission, values)
                    if future is not None:
                        pending.append((key, pid, future))
                        if isinstance(future, Restore) and future.claim():
                            ours.append(pid)
            if threading.get_ident() == self._restorer.loop_thread:
                self._restorer.loop_io += len(ours)
            self._restore(ours)
        begun = {pid for _, pid, _ in pending}
        for key, pid in items:
            if key not in values and pid not in begun:
                values[key] = self._restorer.bring(key, pid, admission)
        for key, pid, future in pending:
            # Another thread may be at it, and wait for this one.
            settled = future.done() or not self._metadata.held_here
            values[key] = self._restorer.outcome(key, future) if settled else self._restorer.copy(key, pid)
        return values

    def start(
        self, items: Sequence[tuple[Hashable, int]], admission: Admission | None, urgency: Urgency
    ) -> list[tuple[Hashable, Future[Any]]]:
        """Return futures of several values, restored together on a restore thread.

        As :meth:`Restorer.start <gpuspill.manager.restore.Restorer.start>`: another thread may
        claim any of them first.
        """
        futures: list[tuple[Hashable, Future[Any]]] = []
        for start in range(0, len(items), _TOGETHER):
            begun: list[tuple[Hashable, int, Restore]] = []
            values: dict[Hashable, Any] = {}
            with self._metadata:
                alone = self._metadata.may_not_wait
                for key, pid in () if alone else items[start : start + _TOGETHER]:
                    future = self._begin(key, pid, admission, values)
                    if future is None:
                        future = Future()
                        future.set_result(values[key])
                    elif isinstance(future, Restore):
                        begun.append((key, pid, future))
                    futures.append((key, future))
            if alone:
                futures += [
                    (key, self._restorer.start(key, pid, admission, urgency))
                    for key, pid in items[start : start + _TOGETHER]
                ]
            self.queue(begun, urgency)
        return futures

    def queue(self, begun: Sequence[tuple[Hashable, int, Restore]], urgency: Urgency) -> None:
        """Put restores in line as one piece of work, unless under way or as far in front."""
        with self._metadata:
            ahead = [
                each
                for each in begun
                if each[2].reader is None and (each[2].urgency is None or each[2].urgency > urgency)
            ]
            if len(ahead) > 1:
                for _, _, restore in ahead:
                    restore.urgency = urgency  # where it was in line before, it will be found done
        if len(ahead) > 1:
            # In a copy of the caller's context, by which the observer tells on whose behalf it is
            # read.
            if self._engine.submit(partial(copy_context().run, self._run, ahead, urgency), urgency):
                return
            with self._metadata:
                for _, _, restore in ahead:
                    restore.urgency = None
        for key, pid, restore in ahead:
            self._restorer.queue(key, pid, restore, urgency)

    def _run(self, begun: Sequence[tuple[Hashable, int, Restore]], urgency: Urgency) -> None:
        """Do here what no thread has claimed of restores begun together. Blocks."""
        with self._metadata:
            ours = [each for each in begun if each[2].claim()]
        rest = set(self._restore([pid for _, pid, _ in ours], alone=False))
        if not rest:
            return
        # What is on disk is read by all threads there are, as if it had come one by one.
        left = [each for each in ours if each[1] in rest]
        with self._metadata:
            for _, _, restore in left:
                restore.reader = restore.urgency = None
        for key, pid, restore in left[1:]:
            self._restorer.queue(key, pid, restore, urgency)
        self._restorer.run(left[0][1], left[0][2])

    def _begin(
        self, key: Hashable, pid: int, admission: Admission | None, values: dict[Hashable, Any]
    ) -> Future[Any] | None:
        """Under the lock: put a ready value in its place, and return None; else what to await."""
        entry = self._metadata.entry(key, pid)
        if self._restorer.ready(entry):
            values[key] = self._restorer.hit(entry)
            return None
        try:
            return self._restorer.begin(key, pid, admission)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _restore(self, pids: Sequence[int], *, alone: bool = True) -> list[int]:
        """Bring several values back, which the caller has claimed; never raises an Exception.

        Parameters
        ----------
        alone
            Whether what cannot be had together comes by itself, after the others.

        Returns
        -------
        list of int
            The proxies of those that are left; none, if they came by themselves.
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
                    state.restores.complete(pid)
                    if pid not in revived:
                        self._metadata.story.note(slot, Happened.READ, slot.nbytes)
                    elif pid in state.ledger.entries:
                        state.invalidate(pid)  # who had it meanwhile may have changed it
            pending = [pid for pid in pids if not (pid in revived or pid in values)]
            for future, value in restores:
                assert future is not None
                future.set_result(value)
            while alone and pending:
                self._restorer.restore(pending.pop())
        except BaseException as error:
            for pid in pending:
                self._restorer.fail(pid, error)
            raise
        return pending

    def _load(self, pids: Sequence[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return values that are still referenced, and those that can be had together.

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
