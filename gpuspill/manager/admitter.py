"""Letting those who add bytes in: pins on inputs, and room promised before it is filled."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from typing import Literal, TypeAlias

from gpuspill.core.budget import Kind, Reservation
from gpuspill.core.policy import Order
from gpuspill.core.residency import State
from gpuspill.core.state import SpillState
from gpuspill.manager.admission import Admission
from gpuspill.manager.stalls import Stalls
from gpuspill.manager.threads import Engine
from gpuspill.manager.transaction import (
    BATCH,
    Metadata,
    at_once,
    batches,
    deferred,
    deferred_in_pieces,
    reads,
    refused,
    skipped,
)

__all__ = ["Admitter"]

#: What becomes of an unknown key.
_Unknown: TypeAlias = Literal["raise", "omit"]
#: ``ask(pids, missing_nbytes)``, under the lock: returns an admission for what was pinned.
_Ask: TypeAlias = Callable[[dict[Hashable, int], int], Admission]


class Admitter:
    """Hands out admissions on behalf of a manager, and takes them back.

    Attributes
    ----------
    notice_stalls
        To be called now and then while a task or a transfer waits; see
        :meth:`gpuspill.manager.stalls.Stalls.notice`.

    Notes
    -----
    Thread-safe; only :meth:`wait_for_room` blocks.
    """

    def __init__(self, metadata: Metadata, engine: Engine, stalls: Stalls) -> None:
        self._metadata = metadata
        self._engine = engine
        self.notice_stalls = stalls.notice

    # -- handing out -------------------------------------------------------------------------------

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
            The key under which the output will be stored; storing it settles the promise. None if
            there is no output.
        inputs
            Keys; pinned from now until :meth:`Admission.release`, whether in memory or not.
        output_nbytes
            Expected size of the output in bytes.
        arriving
            Labels of inputs that are not known yet and come in parts, under other names, and their
            sizes in bytes: :meth:`settle` gives back what is promised for one. What is left of it
            goes when the inputs are there.
        kind, order
            A smaller order is served first, and among equals a task before a transfer; see
            :mod:`gpuspill.core.line`.

        Raises
        ------
        KeyError
            An input is unknown. Nothing stays pinned.
        """
        return self._pin_at_once(inputs, "raise", self._asker(label, output_nbytes, arriving, kind, order))

    @refused("ask for room")
    def admit_in_pieces(
        self,
        label: Hashable | None,
        inputs: Iterable[Hashable],
        output_nbytes: int = 0,
        *,
        order: Order = (),
    ) -> Generator[None, None, Admission]:
        """Do as :meth:`admit` does, a few inputs at a time. Giving it up pins nothing.

        Room is asked for when all are pinned.
        """
        return self._pin(inputs, "raise", self._asker(label, output_nbytes, None, Kind.TASK, order))

    def _asker(
        self,
        label: Hashable | None,
        output_nbytes: int,
        arriving: Mapping[Hashable, int] | None,
        kind: Kind,
        order: Order,
    ) -> _Ask:
        outputs = dict(arriving or ())
        arriving_nbytes = sum(outputs.values()) if outputs else 0
        if label is not None and output_nbytes:
            outputs[label] = output_nbytes

        def ask(pids: dict[Hashable, int], missing_nbytes: int) -> Admission:
            return self._promise(pids, outputs, output_nbytes, missing_nbytes + arriving_nbytes, kind, order)

        return ask

    @refused("pin")
    def pin(self, keys: Iterable[Hashable]) -> Admission:
        """Pin values where they are, without asking for room to bring them into memory.

        For callers that do not need them in memory, such as
        :meth:`gpuspill.manager.batch.Gatherer.export`. Unknown keys are left out.
        """
        return self._pin_at_once(keys, "omit", self._ask_for_none)

    @refused("pin")
    def pin_in_pieces(self, keys: Iterable[Hashable]) -> Generator[None, None, Admission]:
        """Do as :meth:`pin` does, a few keys at a time. Giving it up pins nothing."""
        return self._pin(keys, "omit", self._ask_for_none)

    def _ask_for_none(self, pids: dict[Hashable, int], _: int) -> Admission:
        nothing = Reservation(Kind.TRANSFER, 0, granted=True)
        return Admission(self, nothing, pids, {}, 0, self._metadata.clock())

    def _pin(self, keys: Iterable[Hashable], unknown: _Unknown, ask: _Ask) -> Generator[None, None, Admission]:
        """Pin values in batches; nothing stays pinned after a failure.

        With the last batch, under the lock, `ask` is given the proxies by key and the bytes of
        those that are not in memory, and returns the result.
        """
        missing: dict[int, int] = {}  # by proxy: several keys may hold one
        pids: dict[Hashable, int] = {}
        left = list(batches(keys)) or [()]
        left.reverse()
        try:
            while True:
                with self._metadata as state:
                    self._pin_batch(state, left.pop(), unknown, pids, missing)
                    if not left:
                        return ask(pids, sum(missing.values()))
                yield
        except BaseException:
            at_once(self._unpin(pids.values()))
            raise

    def _pin_at_once(self, keys: Iterable[Hashable], unknown: _Unknown, ask: _Ask) -> Admission:
        """Do as :meth:`_pin` does, without a pause, which would cost tasks of few inputs."""
        every = tuple(keys)
        if len(every) > BATCH:
            return at_once(self._pin(every, unknown, ask))
        missing: dict[int, int] = {}
        pids: dict[Hashable, int] = {}
        try:
            with self._metadata as state:
                self._pin_batch(state, every, unknown, pids, missing)
                return ask(pids, sum(missing.values()))
        except BaseException:
            at_once(self._unpin(pids.values()))
            raise

    @staticmethod
    def _pin_batch(
        state: SpillState,
        keys: Iterable[Hashable],
        unknown: _Unknown,
        pids: dict[Hashable, int],
        missing: dict[int, int],
    ) -> None:
        known = state.ledger.keys
        for key in keys:
            entry = known.get(key)
            if entry is None and unknown == "raise":
                raise KeyError(key)
            if entry is None or key in pids:
                continue
            state.pin(entry.pid)
            pids[key] = entry.pid
            if entry.state is State.SPILLED:
                missing[entry.pid] = entry.nbytes

    def _unpin(self, pids: Iterable[int], admission: Admission | None = None) -> Generator[None, None, None]:
        """Undo pins in batches, the admission with the first and last; given up, all at once."""
        left = list(batches(pids)) or [()]
        count = len(left)
        try:
            while left:
                self._undo(left.pop(), admission, first=len(left) == count - 1, last=not left)
                if left:
                    yield
        finally:
            while left:
                self._undo(left.pop(), admission, first=False, last=not left)

    @deferred()
    def _undo(self, pids: Iterable[int], admission: Admission | None, *, first: bool, last: bool) -> None:
        with self._metadata as state:
            if admission is not None and first:
                self._withdraw(state, admission)
            for pid in pids:
                state.unpin(pid)
            if admission is not None and last:
                # Now, and not before: who waits for its end may find that the inputs can make room.
                state.room.release(admission.reservation)

    def _withdraw(self, state: SpillState, admission: Admission) -> None:
        """Under the lock: end an admission that is about to be released."""
        metadata = self._metadata
        metadata.admissions.pop(admission.reservation, None)
        for key in admission.outputs:
            if metadata.promises.get(key) is admission:
                del metadata.promises[key]
        if not admission.granted:
            state.room.release(admission.reservation)  # nothing has to make room for it any more

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
            The keys under which they will be stored and the part of each, if known; storing a key
            settles its part.
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
            reservation = state.room.reserve_now(nbytes, kind)
            return None if reservation is None else self._hand_out(reservation, {}, dict(outputs or {}), nbytes)

    @skipped(None)
    def wait_for_room(self) -> None:
        """Wait until memory fits the limit, or nothing more can leave. Blocks: others write.

        For a task that stores more and more in one go. Returns at once where the thread would wait
        for itself: in a spill thread, and in a finaliser that runs in the middle of a change.
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
        reservation = self._metadata.state.room.reserve(inputs_nbytes + output_nbytes, kind, order)
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
        """It has become as urgent as `order`, if that is more urgent. No-op once granted."""
        with self._metadata as state:
            state.room.improve(admission.reservation, order)

    @deferred()
    def detach(self, admission: Admission) -> None:
        """Its holder may wait for others in line: they do not wait for its end."""
        with self._metadata as state:
            state.room.detach(admission.reservation)

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

    # -- taking back -------------------------------------------------------------------------------

    @deferred_in_pieces
    def release(self, admission: Admission) -> Iterable[None]:
        """Undo :meth:`admit`, in pieces; called by :meth:`Admission.release`, once.

        Each piece is put off, in the middle of a change, until that is complete.
        """
        pids = admission.pids.values()
        if len(pids) > BATCH:
            return self._unpin(pids, admission)
        self._undo(pids, admission, first=True, last=True)
        return ()

    @deferred()
    def settle(self, label: Hashable) -> None:
        """Give back what is promised for the output `label`: it came under other names."""
        with self._metadata as state:
            admission = self._metadata.promises.pop(label, None)
            if admission is not None:
                state.settle(admission.reservation, admission.outputs.pop(label))

    @deferred()
    def settle_inputs(self, admission: Admission) -> None:
        """Give back what was promised for inputs that another thread has brought meanwhile."""
        if admission.reservation.nbytes > admission.output_nbytes:
            with self._metadata as state:
                state.room.shrink(admission.reservation, admission.output_nbytes)

    @deferred()
    def give_back_output(self, admission: Admission) -> None:
        """Give back what was promised to an admission for an output."""
        with self._metadata as state:
            state.room.shrink(admission.reservation, max(0, admission.reservation.nbytes - admission.output_nbytes))
            admission.output_nbytes = 0
