"""The metadata lock, the core behind it, and what has to follow an event.

>>> with metadata as state:
...     state.remove(key)

holds the lock for the block. On leaving, what the core decided is collected under the lock and done
after it: values let go, records deleted, those who wait told, spill threads woken. The lock is held
for microseconds: never during I/O, (de)serialisation, a callback, or the destruction of a value.

It is re-entrant only because the garbage collector may run a finaliser in the middle of a block,
and that may use the store. In such a nested block nothing may change. So each public method of the
manager and of its parts says by a decorator what becomes of a call in the middle of a change:
:func:`reads`, :func:`deferred`, :func:`skipped` or :func:`refused`. The test of all of them
collects the methods by :func:`policy_of`; one without a policy fails it.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from gpuspill import forks
from gpuspill.core.budget import Reservation
from gpuspill.core.eviction_queue import small_below
from gpuspill.core.ledger import Entry
from gpuspill.core.policy import MakePolicy
from gpuspill.core.residency import Tier
from gpuspill.core.state import SpillState
from gpuspill.errors import ManagerClosed
from gpuspill.manager.admission import Admission
from gpuspill.manager.ports import Custody, Encoded
from gpuspill.manager.slots import Slot, Slots
from gpuspill.manager.story import Happened, Story
from gpuspill.storage.base import Receipt, Store

if TYPE_CHECKING:
    from gpuspill.manager.threads import Engine

__all__ = [
    "BATCH",
    "Metadata",
    "Policy",
    "at_once",
    "batches",
    "deferred",
    "deferred_in_pieces",
    "policy_of",
    "reads",
    "refused",
    "skipped",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

logger = logging.getLogger("gpuspill")

#: Values below this size are let go where they are; above, on another thread (unmapping 32 MiB
#: takes milliseconds).
_REAP_NBYTES = 64 * 1024
#: So many objects of a list are let go at a time.
_PIECE = 10_000
#: So many keys are handled in one block at most: a fraction of a millisecond.
BATCH = 256

#: Seconds after which a thread that waits for other threads looks even so.
_LOOK_AGAIN = 0.1


class Bell:
    """Wakes one waiting thread. Ringing waits for no lock; a ring before a wait counts."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Wake the thread, now or when it waits next."""
        if self._rings.empty():
            self._rings.put(None)

    def hush(self) -> None:
        """Forget the rings so far: what they tell of is looked at next."""
        while not self._rings.empty():
            self._rings.get()

    def wait(self) -> None:
        """Block until the bell rings or some time has passed: time alone rings no bell."""
        with suppress(queue.Empty):
            self._rings.get(timeout=_LOOK_AGAIN)


class Metadata:
    """State of one manager and the lock that guards it; a context manager.

    Parameters
    ----------
    limit, disk_limit, keep_clean
        See :class:`~gpuspill.core.state.SpillState`.
    custody
        See :class:`~gpuspill.manager.slots.Slots`. With one, values are let go at once, in the
        thread that evicts them: what they stand for is the room that others wait for.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    story
        What became of those that left memory.
    admissions
        Those who wait, by reservation.
    promises
        Those who were promised room for an output, by the key under which it will be stored.
    totals
        Sums for the statistics: seconds and bytes by name.
    disk_limit_from
        Where the disk limit comes from, for messages.
    closed
        Nothing is spilled or restored any more.
    inherited
        This process was forked from the one whose values these are. It is closed here, and what is
        on disk is read without becoming part of it.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        disk_limit: int | None,
        keep_clean: bool,
        store: Store,
        custody: Custody | None = None,
        policy: MakePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = forks.lock()
        self._store = store
        self.clock = clock
        self.slots = Slots(custody)
        self.story = Story(clock, ("host", "disk") if custody is None else ("device", "host"))
        self.promptly = custody is not None
        self.state = SpillState(
            limit=limit,
            disk_limit=disk_limit,
            held=self.slots.held,
            keep_clean=keep_clean,
            # Elsewhere there is no block that a small one would take.
            small_below=small_below if custody is None else lambda _: 0,
            policy=policy,
            block_nbytes=store.block_nbytes,
            make_entry=Slot,
            entries=self.slots,
        )
        self.admissions: dict[Reservation, Admission] = {}
        self.promises: dict[Hashable, Admission] = {}
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.disk_limit_from = "disk_limit"
        self.closed = False
        self.inherited = False
        self._pid = os.getpid()
        self.engine: Engine | None = None
        self._owner = threading.Condition(self._lock)
        self._depth = 0
        self._deferred: list[Callable[[], object]] = []
        self._letting_go: dict[object, tuple[int, int]] = {}
        self._bells: dict[Bell, int] = {}  # by the thread that waits
        forks.tell(self)

    def disown(self) -> None:
        """Become what a forked child has of its parent's store. Waiters stay in the parent.

        The child has none of the threads, and no right to the files; but all that is in memory.
        """
        self.closed = self.inherited = True
        if self.engine is not None:
            self.engine.disown()
        self.engine = None
        self.admissions.clear()
        self.promises.clear()
        self._deferred.clear()
        self._letting_go.clear()
        self._bells.clear()
        self._grant_all()

    def _grant_all(self) -> None:
        with self as state:
            if self._depth > 1:
                self._deferred.append(self._grant_all)  # a finaliser forked in the middle of an event
                return
            state.memory.limit = None
            state.retry()

    def unreadable(self, key: Hashable) -> ManagerClosed:
        """Return the error for a value on disk that the closed store cannot read."""
        if self.inherited:
            return ManagerClosed(
                f"the value of {key!r} was on disk when this process was forked from process {self._pid}, whose it is "
                "and which has removed it since. Read it before forking, or hand it to the process, which is then "
                "better started by 'spawn' or 'forkserver'"
            )
        return ManagerClosed(f"the value of {key!r} was on disk when the store was closed")

    def touch(self, pid: int) -> None:
        """Under the lock: count a use of a value, unless it is in the middle of a change."""
        if self._depth == 1:
            self.state.touch(pid)

    @property
    def may_not_wait(self) -> bool:
        """Under the lock: whether a finaliser asks in the middle of a change or operation."""
        return self._depth > 1 or self._store.inside

    def entry(self, key: Hashable, pid: int) -> Entry:
        """Under the lock: return the entry of a proxy; KeyError, naming the key, if it is gone."""
        entry = self.state.ledger.entries.get(pid)
        if entry is None:
            raise KeyError(key)
        return entry

    def enter_below(self, pid: int, key: Hashable, nbytes: int, receipt: Receipt) -> None:
        """Under the lock: a new value is on disk already, for which the core has made a slot."""
        slot = self.slots[pid]
        self.slots.enter_below(slot, key, nbytes, receipt)
        self.story.note(slot, Happened.STORED, receipt.nbytes)

    def count_writes(self, receipts: Iterable[Receipt], raw: int, seconds: float) -> None:
        """Under the lock: count records written in so many seconds, of `raw` bytes in all."""
        self.totals["write"] += seconds
        self.totals["written"] += sum(receipt.nbytes for receipt in receipts)
        self.totals["raw"] += raw

    def validate(self) -> None:
        """Raise AssertionError, with the last events, if core and values differ. O(n)."""
        with self:
            try:
                self._validate()
            except AssertionError as error:
                error.add_note(self.story.told())
                raise

    def _validate(self) -> None:
        slots, state = self.slots, self.state
        state.validate()
        for slot in slots.values():
            assert slot.sizeof >= 0, slot.key
            if slot.resident:
                listed = slots.by_id.get(id(slot.value))
                assert listed is None or slots[listed].value is slot.value, slot.key
            else:
                assert slot.value is None, slot.key
            assert (slot.receipt is not None) == slot.has(Tier.DISK), slot.key
            decoding = slot.restoring is not None and type(slot.value) is Encoded
            assert decoding or (slot.restoring is not None) == (slot.target == Tier.HOST), slot.key
            assert slot.lost == (slot.loss is not None), slot.key
        assert slots.undecoded == sum(type(slot.value) is Encoded for slot in slots.values())
        assert all(id(slots[pid].value) == ident for ident, pid in slots.by_id.items())

    @property
    def held_here(self) -> bool:
        """True if this thread, though in no block, already holds the lock.

        So it is in a finaliser that runs in the middle of one, or just when one begins or ends.
        """
        try:
            self._owner.notify(0)  # wakes no thread, but needs the lock
        except RuntimeError:
            return False
        return True

    def __enter__(self) -> SpillState:
        self._lock.acquire()
        self._depth += 1
        return self.state

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            # What the event that we are in the middle of has decided so far is for the outer block
            # to carry out.
            self._depth -= 1
            self._lock.release()
            return
        engine = None
        try:
            state = self.state
            if not self.closed and state.pressure:
                engine = self.engine
            if not (state.effects or self._deferred):
                return
            effects = state.effects.take()
            values: list[object] = []
            nbytes = 0
            receipts: list[Receipt] = []
            granted: list[Admission] = []
            slots = self.slots
            for pid in effects.dropped:
                slot = slots.get(pid) or effects.forgotten[pid]
                assert type(slot) is Slot
                values.append(slots.detach(slot))
                if pid in slots:
                    nbytes += slot.nbytes
                    self.story.note(slot, Happened.EVICTED, slot.nbytes)
                else:
                    nbytes += slot.sizeof
            for pid in effects.deleted:
                slot = slots.get(pid) or effects.forgotten[pid]
                assert type(slot) is Slot
                if slot.receipt is not None:
                    receipts.append(slot.receipt)
                    self.story.note(slot, Happened.DELETED, slot.receipt.nbytes)
                    slot.receipt = None
            for slot in effects.forgotten.values():
                assert type(slot) is Slot
                slots.forget_ghost(slot)
            for reservation in effects.granted:
                admission = self.admissions.pop(reservation, None)
                if admission is not None:
                    if admission.awaited:
                        self.totals["wait"] += self.clock() - admission.asked_at
                    granted.append(admission)
            deferred, self._deferred = self._deferred, []
            going = object()
            if self.promptly and values:
                self._letting_go[going] = threading.get_ident(), nbytes
        finally:
            self._depth -= 1
            self._lock.release()
            if engine is not None:
                engine.wake()
            if self._bells:
                self._ring()
        if self.promptly:
            try:
                values.clear()
            finally:
                self._letting_go.pop(going, None)
                if self._bells:
                    self._ring()
            self._delete(receipts)
            receipts, nbytes = [], 0
        for admission in granted:
            admission.fulfil()
        for failure in effects.failures:
            logger.error(
                "the eviction policy (gpuspill.eviction-policy) has failed; values leave in the order of their last "
                "use from now on. gpuspill.testing.policy_tests.PolicyTests checks a policy",
                exc_info=failure,
            )
        released_parts = effects.released_parts
        if receipts or nbytes > _REAP_NBYTES:
            self._let_go(values, receipts, released_parts)
        elif released_parts:
            self._release(values, released_parts)
        for action in deferred:
            try:
                action()
            except Exception:
                logger.exception("what a finaliser asked for failed")

    @contextmanager
    def others_changes(self) -> Iterator[Bell]:
        """Give a bell that rings when another thread completes a change or frees memory."""
        bell = Bell()
        self._bells[bell] = threading.get_ident()
        try:
            yield bell
        finally:
            self._bells.pop(bell, None)  # it is gone in a forked child

    def _ring(self) -> None:
        here = threading.get_ident()
        for bell, ident in list(self._bells.items()):
            if ident != here:
                bell.ring()

    def others_letting_go(self) -> dict[object, int]:
        """Return what other threads are freeing, and its bytes: it left, and is not free yet."""
        here = threading.get_ident()
        return {going: nbytes for going, (ident, nbytes) in list(self._letting_go.items()) if ident != here}

    def _let_go(self, values: list[object], receipts: list[Receipt], released_parts: list[int]) -> None:
        engine = self.engine
        if engine is None or self.closed or engine.spilling_here:
            # A spill thread waits for the room on disk that the deleted records leave, so it
            # deletes them itself.
            self._release(values, released_parts)
            self._delete(receipts)
            return
        if values or released_parts:
            engine.reap(partial(self._release, values, released_parts))
        if receipts:
            engine.delete(partial(self._delete, receipts))

    def _release(self, values: list[object], released_parts: list[int]) -> None:
        while values:
            value = values.pop()
            # To let a list of many objects go is one long call, during which no other thread runs,
            # the event loop's included. No other thread knows of this one.
            if type(value) is list and getrefcount(value) == 2:
                while value:
                    del value[-_PIECE:]
            del value
        if released_parts:
            with self as state:
                state.release_parts(released_parts)

    def _delete(self, receipts: list[Receipt]) -> None:
        if self._store.together_nbytes and not self.closed:
            self._store.delete_together(receipts)
            return
        for receipt in receipts:
            if self.closed:
                return  # closing the store removes all records, and need not wait for a queue of single ones
            self._store.delete(receipt)


def batches(items: Iterable[T]) -> Iterable[tuple[T, ...]]:
    """Return some items in tuples of at most :data:`BATCH`, each for one block of the lock."""
    every = tuple(items)
    if len(every) <= BATCH:
        return (every,) if every else ()
    return (every[start : start + BATCH] for start in range(0, len(every), BATCH))


def at_once(pieces: Generator[None, None, T]) -> T:
    """Do, without a pause, what a method offers to do in pieces; return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return cast(T, end.value)


class Policy(enum.Enum):
    """What becomes of a call in the middle of a change."""

    READ = "reads what is there, and changes nothing, the recency included"
    DEFERRED = "is done when the change is complete"
    SKIPPED = "does nothing: it is asked for again and again"
    REFUSED = "raises RuntimeError: it can neither be done now nor be put off"


class _Part(Protocol):
    @property
    def _metadata(self) -> Metadata: ...


def policy_of(function: Callable[..., object]) -> Policy | None:
    """Return what a decorator of this module said of a function; None if none did."""
    found = vars(function).get("policy")
    return found if isinstance(found, Policy) else None


def reads(method: F) -> F:
    """Mark a method that changes nothing, wherever it is called. Adds no frame."""
    vars(method)["policy"] = Policy.READ
    return method


def deferred_in_pieces(method: F) -> F:
    """Mark a generator whose pieces are each a :func:`deferred` method."""
    vars(method)["policy"] = Policy.DEFERRED
    return method


def deferred(check: Callable[..., object] | None = None) -> Callable[[F], F]:
    """Put a call in the middle of a change off until that is complete; keeps arguments.

    Parameters
    ----------
    check
        Called with the same arguments before it is put off; raises what the method would raise for
        them.
    """

    def put_off(method: Callable[..., None], part: _Part, *args: Any, **kwargs: Any) -> None:
        if check is not None:
            check(part, *args, **kwargs)
        part._metadata._deferred.append(partial(method, part, *args, **kwargs))

    return _guard(Policy.DEFERRED, put_off)


def skipped(result: object) -> Callable[[F], F]:
    """Have a method return `result` in the middle of a change, and do nothing."""
    return _guard(Policy.SKIPPED, lambda *_args, **_kwargs: result)


def refused(what: str, *, unless_closed: bool = False) -> Callable[[F], F]:
    """Have a method raise RuntimeError in the middle of a change.

    Parameters
    ----------
    what
        What cannot be done there, for the message.
    unless_closed
        Whether it has nothing to do, and returns None, once the manager is closed.
    """

    def refuse(_method: Callable[..., object], part: _Part, *_args: Any, **_kwargs: Any) -> None:
        if not (unless_closed and part._metadata.closed):
            raise RuntimeError(f"a finaliser that runs in the middle of a change of the store cannot {what}")

    return _guard(Policy.REFUSED, refuse)


def _guard(policy: Policy, instead: Callable[..., object]) -> Callable[[F], F]:
    """Return a decorator that calls `instead` in the middle of a change."""

    def decorate(method: F) -> F:
        @wraps(method)
        def guarded(self: _Part, /, *args: Any, **kwargs: Any) -> Any:
            metadata = self._metadata
            if metadata._depth and metadata.held_here:
                return instead(method, self, *args, **kwargs)
            return method(self, *args, **kwargs)

        vars(guarded)["policy"] = policy
        return cast(F, guarded)

    return decorate
