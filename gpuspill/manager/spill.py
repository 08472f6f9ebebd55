"""Writing values to disk in the background: one unit of work at a time, as the core decides."""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Callable, Hashable, Sequence
from textwrap import shorten

from gpuspill.classes import named
from gpuspill.core.backoff import Backoff
from gpuspill.core.sizes import SizeModel
from gpuspill.core.state import SpillState
from gpuspill.errors import QuotaExceeded, StorageError, StorageFull, cut_loose, is_for_caller
from gpuspill.manager.knots import knots
from gpuspill.manager.ports import Encoded, Observer, Serializer
from gpuspill.manager.slots import Slot
from gpuspill.manager.stalls import Stalls
from gpuspill.manager.transaction import Metadata, skipped
from gpuspill.storage.base import Borrow, Frame, Receipt, Store, frame_nbytes, in_memory
from gpuspill.storage.record import digest, flat

__all__ = ["Spiller"]

logger = logging.getLogger("gpuspill")

#: Seconds between two looks at what somebody held: first, and at most. A look costs microseconds.
_HELD = (0.01, 0.2)
#: How many of those values are looked at again at a time.
_HELD_AT_A_TIME = 1000
#: Seconds between two garbage collections on behalf of values that look held for ever.
_COLLECTING = (1.0, 60.0)
#: Bytes of values that refer to themselves, and were evicted, after which garbage is collected: they go with it.
_COLLECT_NBYTES = 64 * 2**20
#: Seconds between two attempts to write what could not be written: first, and at most. An attempt serialises a value
#: and may write most of it.
_BLOCKED = (0.25, 4.0)
#: How many of those values are tried at a time, each time others; all of them, one after another, once that works.
_PROBES = 8
#: After so many seconds in which no one was let in, one more is, beyond the limit, although the one before has not
#: ended. Its end would make room; but it may wait for something that cannot be known here.
_PATIENCE = 1.0


class Spiller:
    """Spills on behalf of a manager.

    Parameters
    ----------
    metadata, store, serializer
        The manager's.
    sizes
        Learns from serialised sizes; None if sizes are exact.
    stalls
        Knows which spills are in flight.
    observer
        Told about I/O.
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
        self._stalled: int | None = None
        self._stalled_at = 0.0
        self._logged: set[str] = set()

    def step(self) -> float | None:
        """Do one unit of work, on a spill thread.

        Returns
        -------
        float or None
            None after some work; else the seconds after which there may be some (infinity: when woken).
        """
        metadata = self._metadata
        if self._store.inside:
            return float("inf")  # a finaliser, in a thread that does the work of spill threads: it has locks
        with metadata as state:
            if metadata.closed:
                return float("inf")
            pid = state.next_spill()
            pause = float("inf")
            loose = state.loose
            # Only when nothing is left to try is it time to try again what failed or was held: those who wait for room
            # are let go at this very point, and would wait for ever if there always were something to try.
            if pid is None:
                pause = self._relent(state)
            if pid is None and state.candidates.set_aside and state.memory.over():
                pause = min(pause, self._try_again(state, metadata.clock()))
        if metadata.slots.looped_nbytes >= _COLLECT_NBYTES:
            metadata.slots.looped_nbytes = 0
            gc.collect()
        if pid is None and metadata.slots.doubtful:
            self._look_inside()
            return None
        if pid is None:
            # What was dropped may be gone by now, and what it kept in memory has become a candidate.
            return None if loose and not metadata.state.loose else pause
        self.spill(pid)
        return None

    def _look_inside(self) -> None:
        """Find out which of the values that look held for ever hold themselves."""
        metadata = self._metadata
        if self._collecting.left(metadata.clock()) <= 0:
            # What refers to them may be garbage itself: an error's traceback, with the frames that it came through.
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

    @skipped(None)
    def relent(self) -> None:
        """Let one in beyond the limit if no one has been for long, on any thread: spill threads may all be stuck."""
        metadata = self._metadata
        with metadata as state:
            if not metadata.closed:
                self._relent(state)

    def _relent(self, state: SpillState) -> float:
        """Under the lock: do so, and return the seconds until it is time for that; infinity if no one waits so."""
        waits, now = state.stalled, self._metadata.clock()
        if waits is None:
            return float("inf")
        if waits != self._stalled:
            self._stalled, self._stalled_at = waits, now
        left = self._stalled_at + _PATIENCE - now
        if left > 0:
            return left
        state.relent()
        return 0.0

    def _try_again(self, state: SpillState, now: float) -> float:
        """Make candidates of what was set aside, as far as it is time for that; return the seconds until it is."""
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

    def spill(self, pid: int, *, force: bool = False) -> None:
        """Write a value whose spill was begun. Blocks; raises nothing but what interrupts the main thread.

        Parameters
        ----------
        pid
            The proxy.
        force
            Whether the value is to go even if the limit does not ask for it.
        """
        metadata = self._metadata
        clock = metadata.clock
        slot = metadata.slots[pid]
        value = slot.value  # stays: nothing may drop the source of a move
        self._stalls.begin(pid)
        start = clock()
        frames: Sequence[Frame]
        try:
            header, frames = self._dumps(value)
            raw = len(header) + sum(map(frame_nbytes, frames))
        except BaseException as error:
            if self._give_up(pid, error):
                raise
            return
        middle = clock()
        self._stalls.serialised(pid)
        with metadata as state:
            if self._sizes is not None and slot.kind is not Encoded:
                right = self._sizes.learn(slot.kind, slot.sizeof, raw)
                if right != (slot.apart_nbytes if slot.parts else slot.nbytes):
                    state.correct_size(pid, right)
            allowed = state.reserve_record(pid, raw)
        # On leaving the block the records that were given up for this one have been deleted.
        if not allowed:
            del value, frames
            self._log_once(
                "quota",
                "the disk limit of %s bytes (%s) is used up; values stay in memory. Release data, add workers, "
                "or raise the limit",
                lambda: (f"{metadata.state.disk.limit:,}", metadata.disk_limit_from),
            )
            self._fail(pid, None, forever=False)
            return
        receipt = None
        try:
            receipt = self._store.write(header, frames)
            sure = self._make_sure(pid, receipt)
        except BaseException as error:
            del value, frames
            if receipt is not None:
                self._store.delete(receipt)
            if self._give_up(pid, error):
                raise
            return
        # The frames alias the value; with them alive it would look held by somebody.
        del value, frames
        stop = clock()
        with metadata as state:
            slot.receipt = receipt
            metadata.totals["serialize"] += middle - start
            self._count_write(receipt, raw, stop - middle)
            if sure:
                self._held.relent(clock())
            if state.ledger.entries[pid].refusals:
                self._blocked.succeeded()
                self._logged.discard("quota")
            self._stalls.end(pid, state)
            state.complete_spill(pid, receipt.nbytes, force=force)
        if self._observer is not None:
            self._observer("serialize", middle - start, "seconds")
        self._observe_write(receipt, stop - middle)

    def _make_sure(self, pid: int, receipt: Receipt) -> bool:
        """Find out whether a record is of the value as it is, if that may have been changed while it was written.

        Who was given the value meanwhile may have changed it, or may be about to; so may who held it before, which is
        evicted all the same in the end, and who has another value with which it shares memory. A value that nobody had
        in hand costs nothing here.
        """
        slots = self._metadata.slots
        slot = slots[pid]
        with self._metadata as state:
            used = state.in_doubt(pid)
            if slots.elsewhere:
                return True  # a device orders who copies and who changes
            if not (used or slots.perhaps_held(slot) or slots.shares(slot)):
                return True
            sure = not slots.in_hand(slot)
        sure = sure and self._is_of(receipt, slot.value)
        if not sure:
            with self._metadata as state:
                state.doubt(pid)
        return sure

    def _is_of(self, receipt: Receipt, value: object) -> bool:
        """Whether a record is what would be written of a value now. Reads it."""
        try:
            header, frames = self._dumps(value)
            found_header, found = self._store.read(receipt, Borrow())
            return (header, len(frames)) == (found_header, len(found)) and all(
                digest(before) == digest(flat(in_memory(now))) for before, now in zip(found, frames, strict=True)
            )
        except Exception:  # it is being changed, or the record cannot be read
            return False

    def _dumps(self, value: object) -> tuple[bytes, Sequence[Frame]]:
        if type(value) is Encoded:
            return value.header, value.frames
        return self._serializer.dumps(value)

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
        metadata = self._metadata
        clock = metadata.clock
        raw = len(header) + sum(map(frame_nbytes, frames))
        with metadata as state:
            reservation = state.reserve_below(raw)
            blocked, disk_limit = state.candidates.blocked, state.disk.limit
        if reservation is None and blocked:
            raise StorageError(errno.EAGAIN, f"{key!r} cannot be written: the disk refused {blocked} other values")
        if reservation is None:
            raise _over_quota(raw, disk_limit, metadata.disk_limit_from)
        written: Receipt | None = None
        try:
            start = clock()
            written = receipt = self._store.write(header, frames)
            seconds = clock() - start
            with metadata as state:
                if metadata.closed:
                    raise StorageError(errno.EBADF, f"the store was closed while {key!r} was written")
                pid = state.settle_below(reservation, key, nbytes, receipt.nbytes)
                if pid is None:
                    raise _over_quota(receipt.nbytes, state.disk.limit, metadata.disk_limit_from)
                metadata.slots.enter_below(state.ledger.entries[pid], key, nbytes, receipt)
                written = None  # it has an owner
                self._count_write(receipt, raw, seconds)
        finally:
            with metadata as state:
                state.release_below(reservation)
            if written is not None:
                self._store.delete(written)
        self._observe_write(receipt, seconds)

    def _count_write(self, receipt: Receipt, raw: int, seconds: float) -> None:
        """Under the lock."""
        totals = self._metadata.totals
        totals["write"] += seconds
        totals["written"] += receipt.nbytes
        totals["raw"] += raw

    def _observe_write(self, receipt: Receipt, seconds: float) -> None:
        if self._observer is not None:
            self._observer("disk-write", seconds, "seconds")
            self._observer("disk-write", 1, "count")
            self._observer("disk-write", receipt.nbytes, "bytes")

    def _give_up(self, pid: int, error: BaseException) -> bool:
        """End a spill that `error` stopped, for good if that is the value's; return whether it is for the caller."""
        interrupted = is_for_caller(error)
        with self._metadata as state:
            # What cannot be serialised while it is being changed may be a moment later.
            changing = state.in_doubt(pid) or self._metadata.slots.in_hand(self._metadata.slots[pid])
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
                state.fail_spill(pid, forever=forever)

    def _report(self, slot: Slot, error: BaseException, forever: bool) -> None:
        """Log why a value stays in memory, once of each kind. Raises nothing, whatever the value's type does."""
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


def _over_quota(nbytes: int, limit: int | None, named: str) -> QuotaExceeded:
    return QuotaExceeded(f"a record of {nbytes:,} bytes does not fit in the disk limit of {limit:,} bytes ({named})")


def _shown(make: Callable[[], str]) -> str:
    """Return a text, or the beginning of a long one, for some show the whole value; what is wrong if it raises."""
    try:
        return shorten(make()[:5000], 500, placeholder=" ...")
    except Exception as error:
        return f"<cannot be shown: {type(error).__name__}>"
