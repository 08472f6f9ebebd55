"""The only owner of threads.

Spills and restores have threads of their own, so that a task never waits for its input behind a
queue of writes. distributed's ``offload`` pool is not used: it has one thread and comms depend on
it.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Engine"]

logger = logging.getLogger("gpuspill.manager.threads")

#: Seconds to wait after an error that should not have happened.
_AFTER_ERROR = 0.2
#: Hundredths of a second to wait for somebody who is starting a thread.
_PATIENCE = 100


class Engine:
    """Background threads of one manager.

    Parameters
    ----------
    spill_step
        Called again and again by each spill thread. Does one unit of work and returns None, or
        finds nothing to do and returns the seconds to sleep before asking again (``float("inf")``:
        until :meth:`wake`). Must not raise; if it does all the same, that is logged, and it is called
        again later.
    spill_threads, restore_threads
        How many of each. A thread that wants a value may restore it itself, so restore threads
        serve prefetch, transfers and coroutines.
    name
        Prefix of the thread names, after ``gpuspill-``.

    Notes
    -----
    Spill threads start with the first :meth:`wake` and restore threads with the first
    :meth:`submit`: a store that never spills has no thread. All are daemons, so that a worker that is
    told to exit in the middle of a write can.

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
        self._step = spill_step
        # One for each spill thread. Ringing waits for nobody, which of a condition could not be said.
        self._bells: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(spill_threads)]
        self._unclaimed = deque(self._bells)
        self._closed = False
        self._spilling: set[int] = set()
        self._spillers = _Threads(f"gpuspill-spill-{name}", spill_threads, self._spill_loop)
        self._restorers = _Workers(f"gpuspill-restore-{name}", restore_threads)
        self._reaper = _Workers(f"gpuspill-reaper-{name}", 1)
        self._deleter = _Workers(f"gpuspill-deleter-{name}", 1)

    # -- spilling ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to spill. Cheap, never blocks for longer than it takes to start the threads once."""
        if self._closed or self.spilling_here:
            return  # a spill thread looks again by itself
        self._ring()
        self._spillers.start()

    @property
    def spilling_here(self) -> bool:
        """Whether the calling thread is one of the spill threads."""
        return threading.get_ident() in self._spilling

    def _ring(self) -> None:
        for bell in self._bells:
            # Once is enough: whoever has not heard it yet will look when it does.
            if bell.empty():
                bell.put(None)

    def _spill_loop(self) -> None:
        self._spilling.add(threading.get_ident())
        bell = self._unclaimed.popleft()
        while not self._closed:
            # Before looking: whoever rings from now on may have made a change that is not seen.
            with suppress(queue.Empty):
                while True:
                    bell.get_nowait()
            try:
                pause = self._step()
            except Exception:
                # Must not happen; but without this thread nothing would ever be spilled again, without a word.
                logger.exception("spilling failed")
                pause = _AFTER_ERROR
            # The bell for closing may have been among those that were heard above.
            if pause is not None and not self._closed:
                with suppress(queue.Empty):
                    bell.get(timeout=None if pause == float("inf") else pause)

    # -- everything else ---------------------------------------------------------------------------

    def submit(self, work: Callable[[], None]) -> bool:
        """Run `work` on a restore thread; here, if none can be started. Returns False if the engine is closed."""
        if not self._restorers.put(work):
            return False
        if self._restorers.failed:
            self._restorers.do_here()  # somebody waits for it
        return True

    def reap(self, work: Callable[[], None]) -> None:
        """Run `work`, which lets values go, on a thread of its own; here, once the engine is closed.

        Unmapping a large array takes milliseconds that the event loop does not have, and a task should not pay for them
        either.
        """
        if not self._reaper.put(work):
            _guarded(work)

    def delete(self, work: Callable[[], None]) -> None:
        """Run `work`, which deletes records, on another one: however slow the disk, no memory may wait for it."""
        if not self._deleter.put(work):
            _guarded(work)

    def close(self) -> None:
        """Stop all threads and wait for what they are doing.

        Idempotent. May be called from one of them, which then ends when it has done what it is doing; must not be
        called with a lock held.
        """
        self._closed = True
        self._ring()
        self._spillers.close()
        # What is queued runs, and finds that the store is closed: somebody waits for each of these.
        self._restorers.close()
        self._reaper.close()
        self._deleter.close()


def _guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        logger.exception("background work failed")


class _Threads:
    """Threads that start when they are needed, with no lock that anybody waits for without end.

    The garbage collector may run while a thread is being made or is beginning, and a finaliser that it runs, in the
    same thread or in the new one, may ask for the same, or close all of this.

    Parameters
    ----------
    name
        Of the threads, before their number.
    count
        How many there may be.
    run
        What each does. Must end soon after :meth:`close` was called.
    """

    def __init__(self, name: str, count: int, run: Callable[[], None]) -> None:
        self._name = name
        self._count = count
        self._run = run
        # Only whoever has the claim starts threads, changes the list, or waits for the threads' end.
        self._claim = threading.Lock()
        self._claimant: int | None = None
        self._threads: list[threading.Thread] = []
        self._failed = False
        self._closed = False

    def start(self) -> None:
        """Start the threads that are missing, unless somebody is just doing that.

        If none can be started, that is logged once; ask again later.
        """
        # At the end of the interpreter a new thread would wait for ever, and whoever starts it for the thread.
        if len(self._threads) >= self._count or self._closed or sys.is_finalizing():
            return
        if not self._claim.acquire(blocking=False):
            return
        self._claimant = threading.get_ident()
        try:
            while len(self._threads) < self._count and not self._closed:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
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
            self._end()  # whoever closed did not wait for us, perhaps

    def close(self) -> None:
        """Start no more threads and wait for those that there are. Blocks."""
        self._closed = True
        if self._claimant == threading.get_ident():
            return  # called by a finaliser in the middle of starting one, which will see to the rest
        # Who starts a thread is done in a moment, unless it waits for a thread that has not begun yet because of a
        # finaliser, which is what is waiting here, or that is waiting here itself.
        for _ in range(_PATIENCE):
            if any(thread.ident == threading.get_ident() for thread in self._threads):
                break
            if self._claim.acquire(timeout=0.01):
                self._claim.release()
                break
        self._end()

    def _end(self) -> None:
        """Wait for all threads, if nobody else does."""
        while self._claim.acquire(blocking=False):
            try:
                self._stop(len(self._threads))
                for thread in self._threads:
                    if thread is not threading.current_thread():
                        thread.join()
                self.do_here()
            finally:
                self._claim.release()
            if not self._left_over():
                return

    @property
    def failed(self) -> bool:
        """Whether there is no thread, because none could be started."""
        return self._failed and not self._threads

    def _is_closed(self) -> bool:
        """Whether it was closed by now."""
        return self._closed

    def _stop(self, count: int) -> None:
        """Tell so many threads to end."""

    def do_here(self) -> None:
        """Do what there is no thread for."""

    def _left_over(self) -> bool:
        """Whether something came meanwhile that no thread is left for."""
        return False


class _Workers(_Threads):
    """Threads that do what they are given, in order.

    Parameters
    ----------
    name, count
        As for the base class.
    """

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count, self._work)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def put(self, work: Callable[[], None]) -> bool:
        """Have `work` done soon; waits for nobody. False, and nothing is done, if this is closed, or Python ends."""
        if self._closed or sys.is_finalizing():
            return False
        self._queue.put(work)
        self.start()
        if self._is_closed():
            self._end()  # perhaps it came too late for whoever closed
        return True

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            _guarded(work)
            del work  # or its values would live until the next one comes
            if self._closed and self._queue.empty():
                return  # the work may have closed this, and then nobody tells this thread

    def _stop(self, count: int) -> None:
        for _ in range(count):
            self._queue.put(None)

    def do_here(self) -> None:
        """Do what waits to be done, in the calling thread."""
        with suppress(queue.Empty):
            while True:
                work = self._queue.get_nowait()
                if work is not None:
                    _guarded(work)

    def _left_over(self) -> bool:
        return not self._queue.empty()
