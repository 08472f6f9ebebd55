"""The only owner of threads.

Spills and restores have threads of their own, so that a task never waits for its input behind a
queue of writes. distributed's ``offload`` pool is not used: it has one thread and comms depend on
it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Engine"]

logger = logging.getLogger("gpuspill.engine")

#: Seconds to wait after an error that should not have happened.
_AFTER_ERROR = 0.2


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
    :meth:`submit`: a store that never spills has no thread. Spill threads are daemons, so that a
    worker that is told to exit in the middle of a write can.
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
        self._name = name
        self._spill_threads = spill_threads
        # Re-entrant: allocating in here may run the garbage collector, that a finaliser, and that may wake us again.
        self._condition = threading.Condition(threading.RLock())
        self._wakes = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start = _Start()
        self._spilling: set[int] = set()
        self._pool = ThreadPoolExecutor(restore_threads, thread_name_prefix=f"gpuspill-restore-{name}")
        self._reaper = _Worker(f"gpuspill-reaper-{name}")
        self._deleter = _Worker(f"gpuspill-deleter-{name}")

    # -- spilling ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to spill. Cheap, never blocks for longer than it takes to start the threads once."""
        if self.spilling_here:
            return  # it looks again by itself
        with self._condition:
            if self._closed:
                return
            self._wakes += 1
            self._condition.notify_all()
        if len(self._threads) < self._spill_threads:
            self._start.attempt(self._start_spilling)

    def _start_spilling(self) -> None:
        while len(self._threads) < self._spill_threads and not self._closed:
            name = f"gpuspill-spill-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._spill_loop, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def spilling_here(self) -> bool:
        """Whether the calling thread is one of the spill threads."""
        return threading.get_ident() in self._spilling

    def _spill_loop(self) -> None:
        self._spilling.add(threading.get_ident())
        while True:
            with self._condition:
                if self._closed:
                    return
                seen = self._wakes
            try:
                pause = self._step()
            except Exception:
                # Must not happen; but without this thread nothing would ever be spilled again, without a word.
                logger.exception("spilling failed")
                pause = _AFTER_ERROR
            if pause is None:
                continue
            with self._condition:
                # A wake that came while the step ran must not be lost.
                if not self._closed and self._wakes == seen:
                    self._condition.wait(None if pause == float("inf") else pause)

    # -- everything else ---------------------------------------------------------------------------

    def submit(self, work: Callable[[], None]) -> bool:
        """Run `work` on a restore thread. Returns False if the engine is closed; never raises."""
        try:
            self._pool.submit(self._guarded, work)
        except RuntimeError:
            return False
        return True

    @staticmethod
    def _guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            logger.exception("background work failed")

    def reap(self, work: Callable[[], None]) -> None:
        """Run `work`, which lets values go, on a thread of its own.

        Unmapping a large array takes milliseconds that the event loop does not have, and a task should not pay for them
        either.
        """
        self._reaper.put(work)

    def delete(self, work: Callable[[], None]) -> None:
        """Run `work`, which deletes records, on another one: however slow the disk, no memory may wait for it."""
        self._deleter.put(work)

    def close(self) -> None:
        """Stop all threads and wait for what they are doing.

        Idempotent; must not be called from one of them or with a lock held.
        """
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        # What is queued runs, and finds that the store is closed: somebody waits for each of these.
        self._pool.shutdown(wait=True)
        self._reaper.close()
        self._deleter.close()


class _Start:
    """Starts threads, one caller at a time, with no lock that anybody waits for.

    The garbage collector may run while a thread is being made or is beginning, and a finaliser that it runs, in the
    same thread or in the new one, may ask for the same.
    """

    def __init__(self) -> None:
        self.claim = threading.Lock()
        self._failed = False

    def attempt(self, start: Callable[[], None]) -> None:
        """Call `start` unless somebody is about to. If it can start no thread, that is logged once; ask again later."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            start()
            self._failed = False
        except RuntimeError as error:
            if not self._failed:
                self._failed = True
                logger.warning("cannot start a thread, which is tried again when it is needed next: %s", error)
        finally:
            self.claim.release()


class _Worker:
    """A thread that runs what it is given, in order; it starts with the first.

    Parameters
    ----------
    name
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = _Start()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, work: Callable[[], None]) -> None:
        """Run `work` soon. Waits for nobody."""
        self._queue.put(work)
        if self._thread is None:
            self._start.attempt(self._begin)

    def _begin(self) -> None:
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            Engine._guarded(work)
            del work  # or its values would live until the next one comes

    def close(self) -> None:
        """Run what was given, then end. Blocks."""
        self._closed = True
        if self._thread is None and self._start.claim.acquire(blocking=False):
            # There is no thread, though one may have been asked for in vain, and now there will be none.
            while not self._queue.empty():
                work = self._queue.get()
                if work is not None:
                    Engine._guarded(work)
            return
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
