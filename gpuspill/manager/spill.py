"""Writing values to disk in the background: one unit of work at a time, as the core decides.

That is one value; or several, where the store gains by having them together.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from gpuspill.classes import named
from gpuspill.core.backoff import Backoff
from gpuspill.core.sizes import SizeModel
from gpuspill.core.state import SpillState
from gpuspill.errors import StorageFull, cut_loose, is_for_caller
from gpuspill.manager.knots import knots
from gpuspill.manager.ports import Encoded, Observer, Serializer, observe_write
from gpuspill.manager.slots import Slot
from gpuspill.manager.stalls import Stalls
from gpuspill.manager.story import Happened
from gpuspill.manager.transaction import Metadata
from gpuspill.storage.base import Frame, Lend, Receipt, Store, frame_nbytes, in_memory
from gpuspill.storage.record import digest, flat

__all__ = ["Spiller"]

logger = logging.getLogger("gpuspill")

#: Seconds between two looks at what was held: first, and at most. A look costs microseconds.
_HELD = (0.01, 0.2)
#: How many of those values are looked at again at a time.
_HELD_AT_A_TIME = 1000
#: Seconds between two garbage collections on behalf of values that look held for ever.
_COLLECTING = (1.0, 60.0)
#: Bytes of values that refer to themselves, and were evicted, after which garbage is collected:
#: they go with it.
_COLLECT_NBYTES = 64 * 2**20
#: Seconds between two attempts to write what could not be written: first, and at most. An attempt
#: serialises a value and may write most of it.
_BLOCKED = (0.25, 4.0)
#: How many of those values are tried at a time, each time others; all of them, one after another,
#: once that works.
_PROBES = 8
#: How many values are written at most at a time, where the store takes them together.
_TOGETHER = 256


@dataclass(slots=True, eq=False)
class _Spill:
    """A spill that was begun: what is known of it, until it has ended."""

    pid: int
    slot: Slot
    value: Any  # stays: nothing may drop the source of a move
    header: bytes = b""
    frames: Sequence[Frame] = ()
    raw: int = 0
    serialising: float = 0.0
    writing: float = 0.0
    receipt: Receipt | None = None
    sure: bool = False
    ended: bool = False


class Spiller:
    """Spills on behalf of a manager.

    Parameters
    ----------
    sizes
        Learns from serialised sizes; None if sizes are exact.
    stalls
        Knows which spills are in flight.
    """

    def __init__(
        self,
        metadata: Metadata,
        store: Store,
        serializer: Serializer,
        sizes: SizeModel | None,
        stalls: Stalls,
        *,
        observer: Observer | None,
    ) -> None:
        self._stalls = stalls
        self._metadata = metadata
        self._store = store
        self._serializer = serializer
        self._sizes = sizes
        self._observer = observer
        self._held = Backoff(*_HELD)
        self._collecting = Backoff(*_COLLECTING)
        self._blocked = Backoff(*_BLOCKED)
        self._relieved = 0
        self._logged: set[str] = set()

    def step(self) -> float | None:
        """Do one unit of work, on a spill thread.

        Returns
        -------
        float or None
            None after some work; else the seconds after which there may be some (infinity: when
            woken).
        """
        metadata = self._metadata
        if self._store.inside:
            return float("inf")  # a finaliser, in a thread that does the work of spill threads: it has locks
        with metadata as state:
            if metadata.closed:
                return float("inf")
            pids = self.choose(state)
            pause = float("inf")
            loose = state.loose
            # Only when nothing is left to try is it time to try again what failed or was held:
            # those who wait for room are let go at this very point, and would wait for ever if
            # there always were something to try.
            if not pids:
                pause = self._stalls.let_in(state)
            if not pids and state.candidates.set_aside and state.memory.over():
                pause = min(pause, self._try_again(state, metadata.clock()))
        if metadata.slots.looped_nbytes >= _COLLECT_NBYTES:
            metadata.slots.looped_nbytes = 0
            gc.collect()
        if not pids and metadata.slots.doubtful:
            self._look_inside()
            return None
        if not pids:
            # What was dropped may be gone by now, and what it kept in memory has become a
            # candidate.
            return None if loose and not metadata.state.loose else pause
        self.spill(pids)
        return None

    def choose(self, state: SpillState, nbytes: int = 0) -> list[int]:
        """Under the lock: begin to spill one value, or several if the store takes them together.

        Parameters
        ----------
        nbytes
            Bytes that have to leave whatever the limit; 0 for what the limit asks for.
        """
        pids: list[int] = []
        chosen = 0
        while not pids or (chosen < self._store.together_nbytes and len(pids) < _TOGETHER):
            if nbytes and chosen >= nbytes:
                break
            pid = state.spills.next(force=nbytes > 0)
            if pid is None:
                break
            pids.append(pid)
            chosen += state.ledger.entries[pid].whole_nbytes
        return pids

    def _look_inside(self) -> None:
        """Find out which of the values that look held for ever hold themselves."""
        metadata = self._metadata
        if self._collecting.left(metadata.clock()) <= 0:
            # What refers to them may be garbage itself: an error's traceback, with the frames that
            # it came through.
            self._collecting.start(metadata.clock())
            gc.collect()
        with metadata:
            values = metadata.slots.take_doubtful()
        while values:
            pid, value = values.pop()
            found = knots(value)
            with metadata:
                metadata.slots.untie(pid, value, found)
            del value
        self._held.relent(metadata.clock())

    def _try_again(self, state: SpillState, now: float) -> float:
        """Make what was set aside candidates when it is time; return seconds until the next."""
        pause = float("inf")
        if state.candidates.relieved != self._relieved:
            self._relieved = state.candidates.relieved
            self._blocked.relent(now)
        held = blocked = 0
        if state.candidates.held:
            pause = self._held.left(now)
            if pause <= 0:
                self._held.start(now)
                held = _HELD_AT_A_TIME
        if state.candidates.blocked:
            left = self._blocked.left(now)
            pause = min(pause, left)
            if left <= 0:
                self._blocked.start(now)
                blocked = _PROBES
        if held or blocked:
            state.retry(held, blocked)
        return max(0.0, pause)

    def spill(self, pids: Sequence[int], *, force: bool = False) -> None:
        """Write values whose spills were begun. Blocks; raises only what interrupts.

        Parameters
        ----------
        pids
            The proxies. Each comes to an end of its own, whatever becomes of the others.
        force
            Whether they are to go even if the limit does not ask for it.
        """
        slots = self._metadata.slots
        spills = [_Spill(pid, slots[pid], slots[pid].value) for pid in pids]
        self._stalls.begin(pids)
        try:
            self._serialise(spills)
            self._reserve([each for each in spills if not each.ended])
            self._write([each for each in spills if not each.ended])
            self._complete([each for each in spills if not each.ended], force=force)
        except BaseException as error:
            for each in spills:
                if not each.ended:
                    self._let_go(each)
                    self._give_up(each.pid, error)
            raise

    def _serialise(self, spills: Sequence[_Spill]) -> None:
        clock = self._metadata.clock
        for each in spills:
            start = clock()
            try:
                each.header, each.frames = self._dumps(each.value)
                each.raw = len(each.header) + sum(map(frame_nbytes, each.frames))
            except BaseException as error:
                self._stop(each, error)
                continue
            each.serialising = clock() - start
        for each in spills:
            if not each.ended:
                self._stalls.serialised(each.pid)
                break

    def _reserve(self, spills: Sequence[_Spill]) -> None:
        refused = []
        with self._metadata as state:
            for each in spills:
                slot = each.slot
                if self._sizes is not None and slot.kind is not Encoded:
                    right = self._sizes.learn(slot.kind, slot.sizeof, each.raw)
                    if right != slot.whole_nbytes:
                        state.correct_size(each.pid, right)
                if not state.spills.reserve_record(each.pid, each.raw):
                    refused.append(each)
        # On leaving the block the records that were given up for these have been deleted.
        for each in refused:
            self._let_go(each)
            self._log_once(
                "quota",
                "the disk limit of %s bytes (%s) is used up; values stay in memory. Release data, add workers, "
                "or raise the limit",
                lambda: (f"{self._metadata.state.disk.limit:,}", self._metadata.disk_limit_from),
            )
            self._fail(each.pid, None, forever=False)

    def _write(self, spills: Sequence[_Spill]) -> None:
        clock = self._metadata.clock
        start = clock()
        self._write_together(spills)
        shared = (clock() - start) / max(1, len(spills))
        self._trust_device([each for each in spills if each.receipt is not None])
        for each in spills:
            start = clock()
            try:
                if each.receipt is None:
                    each.receipt = self._store.write(each.header, each.frames)
                each.sure = each.sure or self._make_sure(each.pid, each.receipt)
            except BaseException as error:
                self._stop(each, error)
                continue
            each.writing = shared + clock() - start
            # The frames alias the value; with them alive it would look held.
            each.value, each.frames = None, ()

    def _write_together(self, spills: Sequence[_Spill]) -> None:
        """Write all, or none: whatever fails then is written by itself, and fails by itself."""
        if len(spills) < 2:
            return
        try:
            receipts = self._store.write_together([(each.header, each.frames) for each in spills])
        except Exception as error:
            cut_loose(error)
            return
        for each, receipt in zip(spills, receipts or (), strict=False):
            each.receipt = receipt

    def _trust_device(self, spills: Sequence[_Spill]) -> None:
        """Be sure of values that stand for memory elsewhere: a device orders copies."""
        if self._metadata.slots.elsewhere:
            with self._metadata as state:
                for each in spills:
                    state.spills.in_doubt(each.pid)
                    each.sure = True

    def _complete(self, spills: Sequence[_Spill], *, force: bool) -> None:
        metadata = self._metadata
        with metadata as state:
            if any(each.sure for each in spills):
                self._held.relent(metadata.clock())
            for each in spills:
                receipt, slot = each.receipt, each.slot
                assert receipt is not None
                slot.receipt = receipt
                metadata.story.note(slot, Happened.WRITTEN, receipt.nbytes)
                if slot.rare is not None and slot.refusals:
                    self._blocked.succeeded()
                    self._logged.discard("quota")
                self._stalls.end(each.pid, state)
                state.spills.complete(each.pid, receipt.nbytes, force=force)
                each.ended = True
            metadata.totals["serialize"] += sum(each.serialising for each in spills)
            metadata.count_writes(
                [each.receipt for each in spills if each.receipt is not None],
                sum(each.raw for each in spills),
                sum(each.writing for each in spills),
            )
        if self._observer is not None:
            for each in spills:
                assert each.receipt is not None
                self._observer("serialize", each.serialising, "seconds")
                observe_write(self._observer, each.receipt, each.writing)

    def _let_go(self, each: _Spill) -> None:
        """A spill is about to end without a record."""
        each.value, each.frames, each.ended = None, (), True
        if each.receipt is not None:
            self._store.delete(each.receipt)

    def _stop(self, each: _Spill, error: BaseException) -> None:
        """End a spill that `error` stopped, which is raised if it is for the caller."""
        self._let_go(each)
        if self._give_up(each.pid, error):
            raise error

    def _make_sure(self, pid: int, receipt: Receipt) -> bool:
        """Find out whether a record still matches a value that may have changed meanwhile.

        Who was given the value meanwhile may have changed it, or may be about to; so may who held
        it before, which is evicted in the end, and who has another value with which it
        shares memory. A value that no caller had in hand costs nothing here.
        """
        slots = self._metadata.slots
        slot = slots[pid]
        with self._metadata as state:
            used = state.spills.in_doubt(pid)
            if slots.elsewhere:
                return True
            if not (used or slots.perhaps_held(slot) or slots.shares(slot)):
                return True
            sure = not slots.in_hand(slot)
        sure = sure and self._is_of(receipt, slot.value)
        if not sure:
            with self._metadata as state:
                state.spills.doubt(pid)
        return sure

    def _is_of(self, receipt: Receipt, value: object) -> bool:
        """Whether a record is what would be written of a value now. Reads it."""
        try:
            header, frames = self._dumps(value)
            found_header, found = self._store.read(receipt, lend=Lend.MEMORY)
            return (header, len(frames)) == (found_header, len(found)) and all(
                digest(before) == digest(flat(in_memory(now))) for before, now in zip(found, frames, strict=True)
            )
        except Exception:  # it is being changed, or the record cannot be read
            return False

    def _dumps(self, value: object) -> tuple[bytes, Sequence[Frame]]:
        if type(value) is Encoded:
            return value.header, value.frames
        return self._serializer.dumps(value)

    def _give_up(self, pid: int, error: BaseException) -> bool:
        """End a spill that `error` stopped, for good if it is the value's; whether to raise it."""
        interrupted = is_for_caller(error)
        with self._metadata as state:
            # What cannot be serialised while it is being changed may be a moment later.
            changing = state.spills.in_doubt(pid) or self._metadata.slots.in_hand(self._metadata.slots[pid])
        forever = not (interrupted or changing or isinstance(error, MemoryError | OSError))
        self._fail(pid, error, forever=forever)
        return interrupted

    def _fail(self, pid: int, error: BaseException | None, *, forever: bool) -> None:
        slot = self._metadata.slots[pid]
        try:
            if error is not None and not self._metadata.closed:  # else it is for that, and not tried again
                self._report(slot, error, forever)
        finally:
            if error is not None:
                cut_loose(error)
            with self._metadata as state:
                if not forever:
                    self._blocked.failed(self._metadata.clock(), again=bool(state.ledger.entries[pid].refusals))
                self._stalls.end(pid, state)
                self._metadata.story.note(slot, Happened.NOT_WRITTEN, slot.nbytes, error or "the disk limit is used up")
                state.spills.fail(pid, forever=forever)

    def _report(self, slot: Slot, error: BaseException, forever: bool) -> None:
        """Log why a value stays in memory, once of each kind. Never raises."""
        if forever:
            kind = named(slot.kind)
            self._log_once(
                f"unspillable {kind}",
                "cannot serialise the value of %s (%s), it stays in memory; "
                "further values of this type are not reported: %s: %s",
                lambda: (_shown(lambda: repr(slot.key)), kind, type(error).__name__, _shown(lambda: str(error))),
            )
            return
        self._log_once(
            f"storage {type(error).__name__} {getattr(error, 'errno', None)}",
            "could not spill %s, it stays in memory and is tried again: %s: %s%s",
            lambda: (
                _shown(lambda: repr(slot.key)),
                type(error).__name__,
                _shown(lambda: str(error)),
                f". To leave room to others, set {self._metadata.disk_limit_from}"
                if isinstance(error, StorageFull)
                else "",
            ),
        )

    def _log_once(self, what: str, message: str, arguments: Callable[[], tuple[object, ...]]) -> None:
        with self._metadata:
            if what in self._logged:
                return
            self._logged.add(what)
        logger.warning(message, *arguments())


def _shown(make: Callable[[], str]) -> str:
    """Return a text, cut if it is long; what is wrong if it raises."""
    try:
        return shorten(make()[:5000], 500, placeholder=" ...")
    except Exception as error:
        return f"<cannot be shown: {type(error).__name__}>"
