"""The only owner of threads.

Spills and restores have threads of their own, so that a task never waits for its input behind a
queue of writes. distributed's ``offload`` pool is not used: it has one thread and comms depend on
it.
"""

from __future__ import annotations

import enum
import logging
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gpuspill.errors import is_for_caller

__all__ = ["Engine", "Urgency", "run_for"]

logger = logging.getLogger("gpuspill.manager.threads")

#: Seconds to wait after an error that should not have happened.
_AFTER_ERROR = 0.2
#: Hundredths of a second to wait for a caller that is starting a thread.
_PATIENCE = 100


class Urgency(enum.IntEnum):
    """On whose behalf a restore thread works. The lowest number is served first."""

    TASK = 0
    SEND = 1
    AHEAD = 2


class Engine:
    """Background threads of one manager.

    Parameters
    ----------
    spill_step
        Called again and again by each spill thread. Does one unit of work and returns None, or
        finds nothing to do and returns the seconds to sleep before asking again (``float("inf")``:
        until :meth:`wake`). What it raises is logged, and it is called again later.
    spill_threads, restore_threads
        How many of each. A thread that wants a value may restore it itself, so restore threads
        serve prefetch, transfers and coroutines.
    name
        Prefix of the thread names, after ``gpuspill-``.

    Notes
    -----
    Spill threads start with the first :meth:`wake` and restore threads with the first
    :meth:`submit`: a store that never spills has no thread. All are daemons, so that a worker that
    is told to exit in the middle of a write can.

    Nothing that is raised in a thread ends it, be it ``SystemExit`` or what else is no Exception,
    and a thread that ends even so is replaced. While not one thread of a kind can be started, its
    work is done by the caller.

    Any method may be called at any time by a finaliser that the garbage collector runs, in whatever
    thread. So nothing here is of the kind that the standard library's executors are, which wait for
    locks while they start threads.
    """

    def __init__(
        self,
        spill_step: Callable[[], float | None],
        *,
        spill_threads: int,
        restore_threads: int,
        name: str,
    ) -> None:
        self._spillers = _Spillers(f"gpuspill-spill-{name}", spill_threads, spill_step)
        self._restorers = _Workers(f"gpuspill-restore-{name}", restore_threads)
        self._reaper = _Workers(f"gpuspill-reaper-{name}", 1)
        self._deleter = _Workers(f"gpuspill-deleter-{name}", 1, does_io=True)

    # -- spilling ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to spill. Blocks only while the threads start, once.

        But if not one can be started: then this spills.
        """
        if self.spilling_here:
            return  # a spill thread looks again by itself
        self._spillers.wake()

    @property
    def spilling_here(self) -> bool:
        """Whether the calling thread is one of the spill threads, or does their work."""
        return threading.get_ident() in self._spillers.spilling

    # -- everything else ---------------------------------------------------------------------------

    def submit(self, work: Callable[[], None], urgency: Urgency = Urgency.TASK) -> bool:
        """Run `work` on a restore thread, most urgent first. False if the engine is closed."""
        return self._restorers.put(work, urgency)

    def reap(self, work: Callable[[], None]) -> None:
        """Run `work`, which lets values go, on its own thread; here, once the engine is closed.

        Unmapping a large array takes milliseconds that the event loop does not have, and a task
        should not pay for them either.
        """
        if not self._reaper.put(work):
            _finish(work)

    def delete(self, work: Callable[[], None]) -> None:
        """Run `work`, which deletes records, on a thread of its own: memory never waits for it."""
        if not self._deleter.put(work):
            _finish(work)

    def close(self, timeout: float = 0.0) -> None:
        """Stop all threads and wait for what they are doing.

        Idempotent. May be called from one of them, which then ends when it has done what it is
        doing; must not be called with a lock held.

        Parameters
        ----------
        timeout
            Seconds after which threads are left behind that have not ended, with a warning; 0 for
            no limit. What waits to be deleted is not deleted then.
        """
        until = time.monotonic() + timeout if timeout else None
        self._spillers.close(until)
        # What is queued runs, and finds that the store is closed: a caller waits for each of these.
        self._restorers.close(until)
        self._reaper.close(until)
        self._deleter.close(until)

    def disown(self) -> None:
        """Close in a forked child, which has none of the threads. Does not wait."""
        for threads in (self._spillers, self._restorers, self._reaper, self._deleter):
            threads.disown()


def run_for(work: Callable[[], object], timeout: float, name: str) -> bool:
    """Run `work`; whether it ended within `timeout` seconds (0: no limit). It goes on after."""
    if timeout and not sys.is_finalizing():
        thread = threading.Thread(target=work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            pass  # there is none to be had, as when Python ends
        else:
            thread.join(timeout)
            return not thread.is_alive()
    work()
    return True


def _guarded(work: Callable[[], object]) -> BaseException | None:
    """Do `work` and log what it raises; return what interrupts the caller, to be raised."""
    try:
        work()
    except BaseException as error:
        logger.exception("background work failed")
        return error if is_for_caller(error) else None
    return None


def _finish(*works: Callable[[], object]) -> None:
    """Do all that is given, whatever some of it raises; then raise what interrupts."""
    interruption = None
    for work in works:
        interruption = _guarded(work) or interruption
    if interruption is not None:
        raise interruption


class _Threads(ABC):
    """Threads that start when they are needed, with no lock that anybody waits for without end.

    The garbage collector may run while a thread is being made or is beginning, and a finaliser that
    it runs, in the same thread or in the new one, may ask for the same, or close all of this.

    Parameters
    ----------
    name
        Of the threads, before their number.
    count
        How many there may be.
    does_io
        Whether what is left when this is closed may hang as the threads do, so that it is left if
        they are.
    """

    def __init__(self, name: str, count: int, *, does_io: bool = False) -> None:
        self._does_io = does_io
        self._name = name
        self._count = count
        # Only the holder of the claim starts threads, changes the list, or waits for the threads'
        # end.
        self._claim = threading.Lock()
        self._claimant: int | None = None
        self._threads: list[threading.Thread] = []
        self._ended: deque[threading.Thread] = deque()
        self._failed = False
        self._closed = False
        self._until: float | None = None

    def start(self) -> None:
        """Start the threads that are missing, unless another caller is doing that.

        If none can be started, that is logged once; ask again later.
        """
        # At the end of the interpreter a new thread would wait for ever, and its starter for the
        # thread.
        if (len(self._threads) >= self._count and not self._ended) or self._closed or sys.is_finalizing():
            return
        if not self._claim.acquire(blocking=False):
            return
        self._claimant = threading.get_ident()
        try:
            while self._ended:
                self._threads.remove(self._ended.popleft())
            names = {thread.name for thread in self._threads}
            free = (name for n in range(self._count) if (name := f"{self._name}-{n}") not in names)
            while len(self._threads) < self._count and not self._closed:
                thread = threading.Thread(target=self._live, name=next(free), daemon=True)
                thread.start()
                self._threads.append(thread)
            self._failed = False
        except (RuntimeError, MemoryError) as error:
            if not self._failed:
                self._failed = True
                logger.warning("cannot start a thread, which is tried again when it is needed next: %s", error)
        finally:
            self._claimant = None
            self._claim.release()
        if self._is_closed():
            self._end()  # the caller of close() may not have waited for us

    def _live(self) -> None:
        """Be a thread, until this is closed."""
        try:
            while not self._closed:
                try:
                    self._run()
                except BaseException:
                    # Without this thread nothing of its kind would ever be done again, without a
                    # word.
                    with suppress(BaseException):
                        logger.exception("a background thread was interrupted; it goes on")
        finally:
            self._ended.append(threading.current_thread())
            self.start()  # another one, unless this is closed

    @abstractmethod
    def _run(self) -> None:
        """Do what there is to do, until this is closed."""

    def close(self, until: float | None = None) -> None:
        """Start no more threads and wait for those that there are, until a time at most. Blocks."""
        self._until = until
        self._closed = True
        if self._claimant == threading.get_ident():
            return  # called by a finaliser in the middle of starting one, which will see to the rest
        # Who starts a thread is done in a moment, unless it waits for a thread that has not begun
        # yet because of a finaliser, which is what is waiting here, or that is waiting here itself.
        for _ in range(_PATIENCE):
            if any(thread.ident == threading.get_ident() for thread in self._threads):
                break
            if self._claim.acquire(timeout=0.01):
                self._claim.release()
                break
        self._end()

    def disown(self) -> None:
        """Be closed, without a thread to wait for."""
        self._closed = True

    def _end(self) -> None:
        """Wait for all threads, unless another caller does."""
        while self._claim.acquire(blocking=False):
            try:
                self._stop()
                left = [thread.name for thread in self._threads if not self._ends(thread)]
                if left:
                    logger.warning("closing does not wait any longer for %s: I/O may hang", ", ".join(left))
                if not left or not self._does_io:
                    self.do_here()
            finally:
                self._claim.release()
            if left or not self._left_over():
                return

    def _ends(self, thread: threading.Thread) -> bool:
        """Wait for a thread, as long as may be; whether it has ended, or is the calling one."""
        if thread is not threading.current_thread():
            thread.join(None if self._until is None else max(0.0, self._until - time.monotonic()))
            return not thread.is_alive()
        return True

    @property
    def failed(self) -> bool:
        """Whether there is no thread, because none could be started."""
        return self._failed and not self._threads

    def _is_closed(self) -> bool:
        """Whether it was closed by now."""
        return self._closed

    @abstractmethod
    def _stop(self) -> None:
        """Tell all threads to end."""

    @abstractmethod
    def do_here(self) -> None:
        """Do, in the calling thread, what there is no thread for."""

    def _left_over(self) -> bool:
        """Whether something came meanwhile that no thread is left for."""
        return False


class _Spillers(_Threads):
    """Threads that ask again and again whether there is something to do.

    Attributes
    ----------
    spilling
        The threads that do it, by identifier.
    """

    def __init__(self, name: str, count: int, step: Callable[[], float | None]) -> None:
        super().__init__(name, count)
        self._step = step
        self.spilling: set[int] = set()
        # One for each thread. Putting on the queue never blocks; notifying a condition can.
        self._bells: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(count)]
        self._unclaimed = deque(self._bells)

    def wake(self) -> None:
        """Have it asked soon."""
        if self._closed:
            return
        self._stop()
        self.start()
        if self.failed:
            self.do_here()

    def _stop(self) -> None:
        for bell in self._bells:
            # Once is enough: a thread that has not heard it yet looks when it does.
            if bell.empty():
                bell.put(None)

    def _run(self) -> None:
        ident = threading.get_ident()
        self.spilling.add(ident)
        bell = self._unclaimed.popleft()
        try:
            while not self._closed:
                # Before looking: a ring from now on may stand for a change that this look misses.
                with suppress(queue.Empty):
                    while True:
                        bell.get_nowait()
                pause = self._ask()
                # The bell for closing may have been among those that were heard above.
                if pause is not None and not self._closed:
                    with suppress(queue.Empty):
                        bell.get(timeout=None if pause == float("inf") else pause)
        finally:
            self._unclaimed.append(bell)
            self.spilling.discard(ident)

    def _ask(self) -> float | None:
        try:
            return self._step()
        except BaseException as error:
            logger.exception("spilling failed")
            if is_for_caller(error):
                raise
            return _AFTER_ERROR

    def do_here(self) -> None:
        """Ask in the calling thread until there is nothing to do now."""
        ident = threading.get_ident()
        if ident in self.spilling:
            return
        self.spilling.add(ident)
        try:
            while not self._closed and self._ask() is None:
                pass
        finally:
            self.spilling.discard(ident)


class _Workers(_Threads):
    """Threads that do what they are given: the most urgent first, then in order."""

    def __init__(self, name: str, count: int, *, does_io: bool = False) -> None:
        super().__init__(name, count, does_io=does_io)
        self._lines: tuple[deque[Callable[[], None]], ...] = tuple(deque() for _ in Urgency)
        # Rung once for each piece of work, after it was put in line. A thread that finds the lines
        # empty hears it.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, work: Callable[[], None], urgency: Urgency = Urgency.TASK) -> bool:
        """Have `work` done soon. False, and nothing is done, if this is closed, or Python ends.

        Does not wait, but does all there is to do itself if not one thread can be started.
        """
        if self._closed or sys.is_finalizing():
            return False
        self._lines[urgency].append(work)
        self._bell.put(None)
        self.start()
        if self._is_closed():
            self._end()  # perhaps it came too late for the caller of close()
        elif self.failed:
            self.do_here()
        return True

    def _next(self) -> Callable[[], None] | None:
        for line in self._lines:
            with suppress(IndexError):
                return line.popleft()
        return None

    def _run(self) -> None:
        while True:
            work = self._next()
            if work is not None:
                _guarded(work)
                del work  # or its values would live until the next one comes
            elif self._closed:
                return
            else:
                self._bell.get()

    def _stop(self) -> None:
        for _ in range(self._count):
            self._bell.put(None)

    def do_here(self) -> None:
        """Do what waits to be done, in the calling thread."""
        _finish(*iter(self._next, None))

    def _left_over(self) -> bool:
        return any(self._lines)
