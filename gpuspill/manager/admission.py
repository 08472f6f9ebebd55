"""Letting those who add bytes in: pins on what they need, and a promise of room before it is filled."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from typing import Literal

from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.policy import Order
from gpuspill.core.residency import State
from gpuspill.manager.stalls import Stalls
from gpuspill.manager.threads import Engine
from gpuspill.manager.transaction import (
    Metadata,
    at_once,
    batches,
    deferred,
    deferred_in_pieces,
    reads,
    refused,
    skipped,
)

__all__ = ["Admission", "Admitter"]

logger = logging.getLogger("gpuspill")

#: Seconds until whoever waits looks whether there is still something to wait for.
_LOOK_AGAIN = 0.5


class Admission:
    """Pins on the inputs of one task or transfer, and room for what is missing and for the output.

    Made by :meth:`Admitter.admit`; a context manager that releases at the end.

    Attributes
    ----------
    outputs
        Promised bytes by the key under which they will be stored; storing a key settles its part.
    reservation
        The core's promise.
    pids
        The pinned proxies by key.
    output_nbytes
        The part of the promise that is for the output, in bytes.
    asked_at
        When it was asked for, by the manager's clock.
    awaited
        Whether somebody ever waited for it, or asked to be told.

    Notes
    -----
    Thread-safe. Granting waits only while something can still make room, so a wait ends without
    anybody's help.
    """

    __slots__ = (
        "__weakref__",
        "_admitter",
        "_callbacks",
        "_unreleased",
        "asked_at",
        "awaited",
        "output_nbytes",
        "outputs",
        "pids",
        "reservation",
    )

    def __init__(
        self,
        admitter: Admitter,
        reservation: Reservation,
        pids: Mapping[Hashable, int],
        outputs: dict[Hashable, int],
        output_nbytes: int,
        asked_at: float,
    ) -> None:
        self._admitter = admitter
        self.outputs = outputs
        self.reservation = reservation
        self.pids = pids
        self.output_nbytes = output_nbytes
        self.asked_at = asked_at
        self.awaited = False
        # No lock: a finaliser may make the room that is waited for here, in this very thread, at any point. Each step
        # is one operation that Python makes atomic.
        self._unreleased = [True]
        self._callbacks: deque[Callable[[], None]] = deque()

    @property
    def granted(self) -> bool:
        """Whether there is room (or waiting for it is pointless)."""
        return self.reservation.granted

    @property
    def overrun(self) -> bool:
        """Whether it was granted beyond the limit."""
        return self.reservation.overrun

    def wait(self, timeout: float | None = None) -> bool:
        """Block until granted or released.

        Parameters
        ----------
        timeout
            Seconds; None for no limit.

        Returns
        -------
        bool
            Whether it is granted (or released) now.
        """
        if self._settled():
            return True
        waiting = threading.Lock()
        waiting.acquire()
        self.add_done_callback(waiting.release)
        left = float("inf") if timeout is None else timeout
        while left > _LOOK_AGAIN:
            if waiting.acquire(timeout=_LOOK_AGAIN):
                return True
            self._admitter.notice_stalls()  # what is waited for may hang
            left -= _LOOK_AGAIN
        return waiting.acquire(timeout=max(0.0, left))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once granted or released: now, in this thread, if it is; else in the thread that makes room.

        The callback must not block and must not raise.
        """
        if not self._settled():
            self.awaited = True
            self._callbacks.append(callback)
            if self._settled():
                self.fulfil()  # it may have come too late for whoever settled it
            return
        callback()

    def _settled(self) -> bool:
        return self.reservation.granted or not self._unreleased

    def fulfil(self) -> None:
        """Tell those who wait. Called by the manager after the core granted it, without a lock held."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # somebody else tells the last
            try:
                callback()
            except Exception:
                # It must not raise; the others, and whoever made the room, have nothing to do with it.
                logger.exception("a callback of an admission failed")

    def release(self) -> None:
        """Undo the pins and give back what is left of the promise. Idempotent; also ends a wait."""
        try:
            self._unreleased.pop()
        except IndexError:
            return
        at_once(self._admitter.release(self))
        self.fulfil()

    def release_in_pieces(self) -> Generator[None, None, None]:
        """Do as :meth:`release` does, a number of pins at a time. If it is given up, the rest is done at once."""
        try:
            self._unreleased.pop()
        except IndexError:
            return
        yield from self._admitter.release(self)
        self.fulfil()

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admitter:
    """Hands out admissions on behalf of a manager, and takes them back.

    Parameters
    ----------
    metadata, engine, stalls
        The manager's.

    Attributes
    ----------
    notice_stalls
        To be called now and then while somebody waits; see :meth:`gpuspill.manager.stalls.Stalls.notice`.

    Notes
    -----
    Thread-safe; only :meth:`wait_for_room` blocks.
    """

    def __init__(self, metadata: Metadata, engine: Engine, stalls: Stalls) -> None:
        self._metadata = metadata
        self._engine = engine
        self.notice_stalls = stalls.notice

    # -- handing out ---------------------------------------------------------------------------------

    @refused("ask for room")
    def admit(
        self,
        label: Hashable | None,
        inputs: Iterable[Hashable],
        output_nbytes: int = 0,
        *,
        arriving: Mapping[Hashable, int] | None = None,
        kind: Kind = Kind.TASK,
        order: Order = (),
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
        arriving
            Labels of inputs that are not known yet and come in parts, under other names, and their sizes in bytes:
            :meth:`settle` gives back what is promised for one. What is left of it goes when the inputs are there.
        kind, order
            A smaller order is served first, and among equals a task before a transfer; see :mod:`gpuspill.core.line`.

        Raises
        ------
        KeyError
            An input is unknown. Nothing stays pinned.
        """
        return at_once(self.admit_in_pieces(label, inputs, output_nbytes, arriving=arriving, kind=kind, order=order))

    @refused("ask for room")
    def admit_in_pieces(
        self,
        label: Hashable | None,
        inputs: Iterable[Hashable],
        output_nbytes: int = 0,
        *,
        arriving: Mapping[Hashable, int] | None = None,
        kind: Kind = Kind.TASK,
        order: Order = (),
    ) -> Generator[None, None, Admission]:
        """Do as :meth:`admit` does, a number of inputs at a time. If it is given up, nothing stays pinned.

        Room is asked for when all are pinned.
        """
        outputs = dict(arriving or {})
        arriving_nbytes = sum(outputs.values())
        if label is not None and output_nbytes:
            outputs[label] = output_nbytes
        pids, missing_nbytes = yield from self._pin(inputs, unknown="raise")
        with self._metadata:
            return self._promise(pids, outputs, output_nbytes, missing_nbytes + arriving_nbytes, kind, order)

    @refused("pin")
    def pin(self, keys: Iterable[Hashable]) -> Admission:
        """Pin values where they are, without asking for room to bring them into memory.

        For whoever looks at them without needing them there, such as :meth:`gpuspill.manager.batch.Gatherer.export`.
        Unknown keys are left out.
        """
        return at_once(self.pin_in_pieces(keys))

    @refused("pin")
    def pin_in_pieces(self, keys: Iterable[Hashable]) -> Generator[None, None, Admission]:
        """Do as :meth:`pin` does, a number of keys at a time. If it is given up, nothing stays pinned."""
        pids, _ = yield from self._pin(keys, unknown="omit")
        nothing = Reservation(Kind.TRANSFER, 0, granted=True)
        return Admission(self, nothing, pids, {}, 0, self._metadata.clock())

    def _pin(
        self, keys: Iterable[Hashable], unknown: Literal["raise", "omit"]
    ) -> Generator[None, None, tuple[dict[Hashable, int], int]]:
        """Pin values in batches; return their proxies by key, and the bytes of those that are not in memory.

        Nothing stays pinned after a failure.
        """
        missing: dict[int, int] = {}  # by proxy: several keys may hold one
        pids: dict[Hashable, int] = {}
        try:
            for batch in batches(keys):
                if pids:
                    yield
                with self._metadata as state:
                    known = state.ledger.keys
                    for key in batch:
                        entry = known.get(key)
                        if entry is None and unknown == "raise":
                            raise KeyError(key)
                        if entry is None or key in pids:
                            continue
                        state.pin(entry.pid)
                        pids[key] = entry.pid
                        if entry.state is State.SPILLED:
                            missing[entry.pid] = entry.nbytes
        except BaseException:
            at_once(self._unpin(pids.values(), None))
            raise
        return pids, sum(missing.values())

    def _unpin(self, pids: Iterable[int], reservation: Reservation | None) -> Generator[None, None, None]:
        """Undo pins in batches, and give back a promise with the last; what is left is done at once if it is given up.

        A reservation may have been released before.
        """
        left = list(batches(pids))
        try:
            while left:
                batch = left.pop()
                self._undo(batch, None if left else reservation)
                if left:
                    yield
        finally:
            while left:
                batch = left.pop()
                self._undo(batch, None if left else reservation)

    @deferred()
    def _undo(self, pids: Iterable[int], reservation: Reservation | None) -> None:
        with self._metadata as state:
            for pid in pids:
                state.unpin(pid)
            if reservation is not None:
                state.release(reservation)

    @refused("ask for room")
    def reserve(
        self,
        nbytes: int,
        kind: Kind = Kind.TRANSFER,
        *,
        order: Order = (),
        outputs: Mapping[Hashable, int] | None = None,
    ) -> Admission:
        """Ask for room for bytes that come from elsewhere, such as a transfer.

        Parameters
        ----------
        nbytes
            How many.
        kind, order
            As for :meth:`admit`.
        outputs
            The keys under which they will be stored and the part of each, if known; storing a key settles its part.
        """
        with self._metadata:
            return self._promise({}, dict(outputs or {}), nbytes, 0, kind, order)

    @refused("ask for room")
    def reserve_now(
        self, nbytes: int, kind: Kind, *, outputs: Mapping[Hashable, int] | None = None
    ) -> Admission | None:
        """As :meth:`reserve`, but None if it would have to wait, or be granted beyond the limit.

        Clean values that come first in the order of eviction make room for it.
        """
        with self._metadata as state:
            reservation = state.reserve_now(nbytes, kind)
            return None if reservation is None else self._hand_out(reservation, {}, dict(outputs or {}), nbytes)

    @skipped(None)
    def wait_for_room(self) -> None:
        """Wait until what is in memory fits the limit, or nothing more can leave. Blocks: others write.

        For whoever makes more and more of it in one go. Returns at once where waiting would be for oneself: in a spill
        thread, and in a finaliser that runs in the middle of a change.
        """
        with self._metadata:
            if self._metadata.closed or self._engine.spilling_here:
                return
            admission = self._promise({}, {}, 0, 0, Kind.TASK)
        with admission:
            admission.wait()

    def _promise(
        self,
        pids: dict[Hashable, int],
        outputs: dict[Hashable, int],
        output_nbytes: int,
        inputs_nbytes: int,
        kind: Kind,
        order: Order = (),
    ) -> Admission:
        """Under the lock: queue for room, for an output and for inputs that are pinned."""
        reservation = self._metadata.state.reserve(inputs_nbytes + output_nbytes, kind, order)
        return self._hand_out(reservation, pids, outputs, output_nbytes)

    def _hand_out(
        self, reservation: Reservation, pids: dict[Hashable, int], outputs: dict[Hashable, int], output_nbytes: int
    ) -> Admission:
        """Under the lock: hand out what was reserved."""
        metadata = self._metadata
        admission = Admission(self, reservation, pids, outputs, output_nbytes, metadata.clock())
        if not reservation.granted:
            metadata.admissions[reservation] = admission
        for key in outputs:
            metadata.promises[key] = admission
        return admission

    @deferred()
    def improve(self, admission: Admission, order: Order) -> None:
        """It has become as urgent as `order`, if that is more urgent than before. Does nothing once it is granted."""
        with self._metadata as state:
            state.improve(admission.reservation, order)

    @deferred()
    def detach(self, admission: Admission) -> None:
        """Its holder may wait for others in line: they do not wait for its end."""
        with self._metadata as state:
            state.detach(admission.reservation)

    @reads
    def missing_nbytes(self, keys: Iterable[Hashable]) -> int:
        """Bytes of the values of some keys that are on disk now. Unknown keys are left out."""
        missing: dict[int, int] = {}  # by proxy: several keys may hold one
        for batch in batches(keys):
            with self._metadata as state:
                known = state.ledger.keys
                found = (entry for key in batch if (entry := known.get(key)) is not None)
                missing |= {entry.pid: entry.nbytes for entry in found if entry.state is State.SPILLED}
        return sum(missing.values())

    # -- taking back ---------------------------------------------------------------------------------

    @deferred_in_pieces
    def release(self, admission: Admission) -> Generator[None, None, None]:
        """Undo :meth:`admit`, in pieces; called by :meth:`Admission.release`, once.

        Each piece is put off, in the middle of a change, until that is complete.
        """
        self._withdraw(admission)
        # Before the promise goes: who waits for its end may find that the inputs can make room.
        yield from self._unpin(admission.pids.values(), admission.reservation)

    @deferred()
    def _withdraw(self, admission: Admission) -> None:
        metadata = self._metadata
        with metadata as state:
            metadata.admissions.pop(admission.reservation, None)
            for key in admission.outputs:
                if metadata.promises.get(key) is admission:
                    del metadata.promises[key]
            if not admission.granted or not admission.pids:
                state.release(admission.reservation)  # nothing has to make room for it any more

    @deferred()
    def settle(self, label: Hashable) -> None:
        """Give back what is promised for the output `label`: it arrived, or part of it, under other names."""
        with self._metadata as state:
            admission = self._metadata.promises.pop(label, None)
            if admission is not None:
                state.settle(admission.reservation, admission.outputs.pop(label))

    @deferred()
    def settle_inputs(self, admission: Admission) -> None:
        """Give back what was promised for inputs that were brought by somebody else meanwhile."""
        if admission.reservation.nbytes > admission.output_nbytes:
            with self._metadata as state:
                state.shrink(admission.reservation, admission.output_nbytes)

    @deferred()
    def give_back_output(self, admission: Admission) -> None:
        """Give back what was promised to an admission for an output."""
        with self._metadata as state:
            state.shrink(admission.reservation, max(0, admission.reservation.nbytes - admission.output_nbytes))
            admission.output_nbytes = 0
