"""What a worker that has gpuspill is bound to: its store, and the answers to what its hooks ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from functools import partial
from time import monotonic
from typing import Any

from tornado.ioloop import IOLoop

from gpuspill.config import Settings
from gpuspill.core.policy import Order
from gpuspill.distributed import internals
from gpuspill.distributed.askers import Askers
from gpuspill.distributed.dashboard import show_worker
from gpuspill.distributed.devices import device_limit
from gpuspill.distributed.hints import Hints
from gpuspill.distributed.mapping import SpillStore
from gpuspill.distributed.memory import MemoryFollower
from gpuspill.distributed.task_inputs import OutputSizes, TaskInputs
from gpuspill.distributed.uses import TieredUses
from gpuspill.distributed.wire import SendBuffer
from gpuspill.errors import DataLostError
from gpuspill.manager.admission import Admission

__all__ = ["SENDING_NBYTES", "Attachment"]

logger = logging.getLogger("gpuspill")

#: Bytes that may be read from disk for sending and not be written to the network yet: enough for
#: one request of the size that distributed asks for
#: (``distributed.worker.transfer.message-bytes-limit``, 50 MB).
SENDING_NBYTES = 64 * 2**20

#: Of a task that reads more than one value.
_INPUTS = 2


class Attachment:
    """What a worker's hooks ask before they do anything: whether there is something to do.

    Parameters
    ----------
    store
        Its data.

    Attributes
    ----------
    sizes
        What the worker's tasks return, by prefix of their keys.
    device_sizes
        The part of it that is on the device.
    window
        Bounds what is read from disk for sending.
    askers
        Those who ask for room.

    Notes
    -----
    Used on the event loop. While everything is in memory and memory is at most half full it costs a
    comparison or two.
    """

    def __init__(self, worker: Any, store: SpillStore, settings: Settings) -> None:
        self._worker = worker
        self.store = store
        self.sizes = OutputSizes()
        self.device_sizes = OutputSizes()
        self.window = SendBuffer(SENDING_NBYTES)
        self._threads = max(1, worker.state.nthreads)
        self._loop = IOLoop.current()
        self._shown = False
        self.thresholds = internals.thresholds(worker, settings)
        self.follower = MemoryFollower(
            self.thresholds,
            process_memory=partial(internals.process_memory, worker),
            accounted=self._accounted,
            set_offset=store.set_offset,
            evicted=self._evicted,
            in_background=self.in_background,
            pool=store.pool,
            trim=None if store.tier is None else store.tier.pinned.trim,
        )
        self.askers = Askers(store.manager, partial(internals.urgency, worker), self._loop.add_callback)
        self.hints = Hints(
            store.manager.uses if store.tier is None else TieredUses(store.manager, store.tier),
            needed=self._is_tight,
            backlog=partial(internals.unfinished, worker),
            inputs=partial(internals.next_use, worker),
            upcoming=partial(internals.upcoming, worker),
            depth=settings.prefetch,
            soon=self._loop.add_callback,
            on_close=self.close,
            on_begin=self.askers.look_again,
            on_secede=self.askers.seceded,
        )
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply options, as far as they can be changed."""
        self.settings = settings
        self.thresholds = self.follower.thresholds = internals.thresholds(self._worker, settings)
        self.hints.depth = settings.prefetch
        limit = self.thresholds.limit
        self._low_watermark = float("inf") if limit is None else limit // 2
        self.store.manager.limits.set_limit(
            limit,
            internals.max_spill(self._worker, settings),
            disk_limit_from=f"{'distributed.worker.memory' if settings.max_spill == 'auto' else 'gpuspill'}.max-spill",
        )
        # What the tasks that have just ended read: the scheduler's word to give it up is on its
        # way.
        self.store.manager.limits.set_grace(_INPUTS * 2 * self._threads)
        tier = self.store.tier
        if tier is not None:
            tier.manager.limits.set_limit(device_limit(settings, tier.device), None)
            tier.grace = 2 * self._threads

    # -- questions of the hooks ------------------------------------------------------------------

    def below_low_watermark(self, keys: Collection[Hashable], extra: int = 0) -> bool:
        """Whether `keys` here stay in memory although `extra` bytes arrive."""
        store = self.store
        manager = store.manager
        if self._in_memory() + extra >= self._low_watermark:
            return False
        if store.has_lost_values:
            return False
        if not keys:
            return True
        ready = manager.is_resident if store.tier is None else store.is_ready
        try:
            return all(map(ready, keys))
        except KeyError:
            return all(ready(key) for key in keys if key in manager)

    def runs_freely(self, prefix: str) -> bool:
        """Whether a task of this kind can run as it is: everything stays in memory.

        The short way to what :meth:`admit` finds out.
        """
        store = self.store
        if store.tier is not None or store.has_lost_values:
            return False
        manager = store.manager
        # Each thread may be running a task of this kind about which nothing was noted.
        more = self._threads * self.sizes.expected(prefix)
        return manager.all_ready and self._in_memory() + more < self._low_watermark

    def _in_memory(self) -> int:
        return self.store.manager.memory_total() + max(0, self.follower.offset)

    def admit(
        self, key: Hashable, prefix: str, inputs: Collection[Hashable], order: Order = ()
    ) -> Generator[None, None, TaskInputs | None]:
        """Pin the inputs of a task, in pieces, and reserve room; None if it can simply run.

        A smaller `order` is more urgent.
        """
        expected = self.sizes.expected(prefix)
        manager, tier = self.store.manager, self.store.tier
        if tier is not None:
            tier.verify()  # before the task runs, also if it needs nothing
        on_device = 0 if tier is None else self.device_sizes.expected(prefix)
        # Each thread may be running a task of this kind about which nothing was noted.
        if (tier is None or tier.has_room(self._threads * on_device)) and self.below_low_watermark(
            inputs, self._threads * expected
        ):
            return None
        self.hints.follow()
        # One that was released while the task was being cancelled: distributed finds out by itself,
        # but may first come across others, which must not be read on the event loop.
        inputs = [name for name in inputs if name in manager]
        try:
            admission = yield from manager.admission.admit_in_pieces(key, inputs, expected, order=order)
        except KeyError:
            return None  # on another thread, just now
        wait = self.settings.admission
        if tier is None:
            return TaskInputs(manager, admission, wait=wait)
        try:
            arriving = {name: nbytes for name in inputs if (nbytes := manager.arriving_nbytes(name))}
            device_admission = tier.admit(key, map(manager.look, inputs), on_device, arriving, order)
        except KeyError:
            admission.release()
            return None
        return TaskInputs(manager, admission, wait=wait, tier=tier, device_admission=device_admission)

    def learn(self, key: Hashable, value: object) -> int | None:
        """Learn from a value to be stored what its task returns, if it is a task's.

        Returns its size in bytes, if the worker knows it.
        """
        nbytes, prefix = internals.known_of(self._worker, key)
        if prefix is not None and nbytes is not None:
            on_device = 0
            tier = self.store.tier
            if tier is not None:
                on_device = self.store.new_nbytes(key, value)
                self.device_sizes.learn(prefix, on_device)
                # What ended last is what most likely runs next.
                tier.ahead.headroom = self._threads * self.device_sizes.expected(prefix)
            self.sizes.learn(prefix, max(0, nbytes - on_device))
        return nbytes

    def expect(self, incoming: Mapping[Hashable, int], source: str) -> Admission | None:
        """Reserve room for a transfer, bytes by key; None if it can simply come."""
        nbytes = sum(incoming.values())
        if not self.settings.admission or self.below_low_watermark((), self._threads * nbytes):
            return None
        self.hints.follow()
        order = internals.urgency(self._worker, incoming, source)
        return self.store.manager.admission.reserve(nbytes, order=order, outputs=incoming)

    def _is_tight(self) -> bool:
        """Whether something is on disk or may soon have to be."""
        manager, tier = self.store.manager, self.store.tier
        if tier is not None and (tier.manager.spilled_count or not tier.has_room(0)):
            return True
        return bool(manager.spilled_count) or manager.memory_total() >= self._low_watermark

    # -- the rest --------------------------------------------------------------------------------

    def update(self) -> None:
        """Look at the memory of the process. To be called regularly."""
        if not self._shown:
            self._shown = True  # once: now the worker's HTTP server runs
            show_worker(self._worker)
        self.store.notice_stalls()
        self.follower.update()
        self.hints.follow_if_needed()  # if values came although no task ran here
        self.store.manager.stalls.relent()
        if self.store.tier is not None:
            self.store.tier.manager.stalls.relent()
            self.store.tier.pinned.tend(monotonic())

    def _accounted(self) -> int:
        store = self.store
        store.settle_parked()
        # The simulated device is memory of this process.
        simulated = store.statistics().device_nbytes if self.settings.device == "simulated" else 0
        return store.manager.accounted_total() + simulated + self._for_sending()

    def _for_sending(self) -> int:
        """Bytes in sending now or lately: nothing is evicted for them.

        That is no more than what leaves the process well below the point at which distributed
        pauses the worker.
        """
        lately = self.window.lately()
        if not (lately or self.window.used):
            return 0
        pool = self.store.pool
        idle = 0 if pool is None else pool.idle_nbytes
        limit = self.thresholds.memory_limit
        return min(self.window.used + min(idle, lately), SENDING_NBYTES, limit // 20 if limit else SENDING_NBYTES)

    def _evicted(self) -> int:
        statistics = self.store.statistics()
        # What came back must have left before.
        return statistics.spilled_total_nbytes + statistics.restored_total_nbytes

    def in_background(self, work: Callable[[], object]) -> None:
        """Run `work` on a thread that has no other duty. RuntimeError if the loop is closed."""
        asyncio.get_running_loop().run_in_executor(None, work)

    def lost(self, error: DataLostError) -> None:
        """A reader by key found that a value is lost. Any thread."""
        self._loop.add_callback(internals.recover, self._worker, error.key)

    async def close(self) -> None:
        """Close the store. Idempotent."""
        try:
            await asyncio.to_thread(self.store.close)
        except RuntimeError:  # Python is ending and has stopped that pool of threads
            self.store.close()
