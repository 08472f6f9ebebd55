"""Pinned host memory that is used again: what leaves a device is copied once.

Pinning is slow, so memory is pinned in slabs that stay. The number of slabs grows in the background
as more is asked for; who asks meanwhile gets none, and uses ordinary memory.

**How memory finds its way back**, and why it takes no lock and does not trust a weak reference that
died, is as in :mod:`gpuspill.storage.buffers`: a ctypes array over a part of a slab is the *leaf*
of all views of it. When that has died the part is free if no view is left, which the memoryview
below the leaf knows: it cannot be released else.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpuspill import forks
from gpuspill.core.slabs import Block, Slabs
from gpuspill.device.port import Device, DeviceError, PinnedBuffer

__all__ = ["PinnedPool", "PinnedStatistics"]

logger = logging.getLogger("gpuspill")

#: Bytes of a slab at most, and of the smallest part of one: less goes to ordinary memory.
_SLAB: Final = 64 * 2**20
_SMALLEST: Final = 4096
#: Slabs that were not needed for so many seconds are given back.
_IDLE_SECONDS: Final = 30.0
#: A pool has room for so many slabs at least, or they are smaller.
_SLABS: Final = 4


@dataclass(frozen=True, slots=True)
class PinnedStatistics:
    """A snapshot of a pool. Sizes in bytes.

    Attributes
    ----------
    limit
        Most bytes to pin.
    pinned_nbytes, lent_nbytes
        Bytes that are pinned, and those in use.
    lent, refused
        How often memory was asked for and there was some, and how often there was none.
    """

    limit: int
    pinned_nbytes: int
    lent_nbytes: int
    lent: int
    refused: int


class _Lease(weakref.ref["ctypes.Array[ctypes.c_ubyte]"]):
    """A weak reference to a leaf that knows the memory under it."""

    __slots__ = ("block", "leaf", "view")

    leaf: int
    block: Block
    view: memoryview


class PinnedPool:
    """Lends pinned memory, and takes it back when the last view of it is gone.

    Parameters
    ----------
    limit
        Returns the most bytes to pin; 0 for none. Asked once, when memory is wanted for the first
        time.
    grow
        Runs a function that pins slabs, or gives them back, on some other thread, soon.

    Notes
    -----
    Thread-safe. Nothing but what is given to `grow` blocks, and no lock is held while memory is
    pinned.
    """

    def __init__(self, device: Device, limit: Callable[[], int], grow: Callable[[Callable[[], None]], object]) -> None:
        self._device = device
        self._ask_limit = limit
        self._grow = grow
        self._lock = forks.lock()
        self._limit: int | None = None
        self._slab_nbytes = _SMALLEST
        self._slabs = Slabs(_SMALLEST, _SMALLEST)
        self._buffers: dict[int, PinnedBuffer] = {}
        # By the identity of the leaf. A weak reference only calls back while it is alive itself,
        # and before that identity can be another object's.
        self._lent: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()
        self._on_death = partial(_give_back, self._lent, self._returned)
        self._shrink_at = float("-inf")
        self._wanted = 0
        self._growing = False
        self._closed = False
        self._counts = {"lent": 0, "refused": 0}

    def allocate(self, nbytes: int) -> list[memoryview] | None:
        """Return pinned memory for so many bytes; as :meth:`allocate_together`."""
        return self.allocate_together([nbytes])[0]

    def allocate_together(self, sizes: Sequence[int]) -> list[list[memoryview] | None]:
        """Return pinned memory for several sizes, each in parts; None where there is none.

        Contents are whatever the last user left. Each part is the caller's with every view made of
        it.
        """
        found: list[list[memoryview] | None] = [None] * len(sizes)
        if self._closed or not self._opened():
            return found
        places = [place for place, nbytes in enumerate(sizes) if nbytes >= _SMALLEST]
        left = self._take(sizes, places, found)
        if left and self._ask_for_more(sum(sizes[place] for place in left)):
            left = self._take(sizes, left, found)  # it may have been done at once
        with self._lock:
            self._counts["lent"] += len(places) - len(left)
            self._counts["refused"] += len(left)
        return found

    def _opened(self) -> bool:
        """Whether there may be any. Finds out how much the first time."""
        if self._limit is None:
            limit = self._ask_limit()
            with self._lock:
                if self._limit is None:
                    self._limit = limit
                    self._slab_nbytes = _SLAB
                    while self._slab_nbytes > _SMALLEST and self._slab_nbytes * _SLABS > limit:
                        self._slab_nbytes //= 2
                    self._slabs = Slabs(self._slab_nbytes, _SMALLEST)
        return self._limit >= self._slab_nbytes

    def _take(self, sizes: Sequence[int], places: Sequence[int], found: list[list[memoryview] | None]) -> list[int]:
        """Put memory at some places, as far as there is some; returns the other places."""
        taken: list[tuple[int, list[tuple[Block, memoryview]]]] = []
        left = []
        with self._lock:
            self._settle()
            whole = {slab: buffer.view for slab, buffer in self._buffers.items()}
            for place in places:
                blocks = self._slabs.take(sizes[place])
                if blocks is None:
                    left.append(place)
                else:
                    taken.append((place, [(each, whole[each[0]][each[1] : each[1] + each[2]]) for each in blocks]))
        for place, blocks_and_views in taken:
            nbytes = sizes[place]
            parts = found[place] = []
            for block, view in blocks_and_views:
                size = block[2]
                leaf = (ctypes.c_ubyte * size).from_buffer(view)
                lease = _Lease(leaf, self._on_death)
                lease.leaf, lease.block, lease.view = id(leaf), block, view
                self._lent[lease.leaf] = lease
                part = memoryview(leaf).cast("B")
                parts.append(part[:nbytes] if nbytes < size else part)
                nbytes -= size
        return left

    def owns(self, memory: object) -> bool:
        """Whether what a view is of (``view.obj``) is memory of a slab."""
        lease = self._lent.get(id(memory))
        return lease is not None and lease() is memory

    def _settle(self) -> None:
        """Under the lock: take back what is not in use any more."""
        for _ in range(len(self._returned)):
            lease = self._returned.popleft()
            try:
                lease.view.release()
            except BufferError:
                self._returned.append(lease)  # a finaliser still uses it
                continue
            self._slabs.give_back(lease.block)

    # -- more and less -----------------------------------------------------------------------------

    def _ask_for_more(self, nbytes: int) -> bool:
        """Pin more, unless a thread is at it or there is enough; whether that was begun."""
        with self._lock:
            self._wanted += nbytes
            if self._growing or not self._may_grow:
                return False
            self._growing = True
        self._grow(self._pin)
        return True

    @property
    def _may_grow(self) -> bool:
        return not self._closed and self._slabs.nbytes + self._slab_nbytes <= (self._limit or 0)

    def _pin(self) -> None:
        """Pin slabs, one after the other, until there is room for what was asked for meanwhile."""
        try:
            while True:
                with self._lock:
                    wanted, self._wanted = self._wanted, 0
                    missing = wanted - (self._slabs.nbytes - self._slabs.used_nbytes)
                for _ in range(0, missing, self._slab_nbytes):
                    if not self._may_grow or not self._add():
                        return
                if missing <= 0:
                    return
        finally:
            self._growing = False

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes pinned, as far as the limit and the system allow. Blocks."""
        self._opened()
        while self._slabs.nbytes < nbytes and self._may_grow and self._add():
            pass

    def _add(self) -> bool:
        try:
            buffer = self._device.pinned(self._slab_nbytes)
        except (MemoryError, DeviceError) as error:
            self._closed = True
            logger.warning(
                "the system pins no more than %s bytes of memory for values of the device (%s). Others go by way of "
                "ordinary memory, which is slower; see gpuspill.pinned-memory, and `ulimit -l`",
                f"{self._slabs.nbytes:,}",
                error,
            )
            return False
        with self._lock:
            self._buffers[self._slabs.add()] = buffer
        return True

    def trim(self) -> int:
        """Give slabs back that are not in use. Returns their bytes."""
        with self._lock:
            self._settle()
            gone = [self._buffers.pop(number) for number in self._slabs.remove_idle()]
        return self._release(gone)

    def shrink(self) -> int:
        """Give slabs back that were not needed since the last call. Returns bytes."""
        with self._lock:
            self._settle()
            gone = [self._buffers.pop(number) for number in self._slabs.remove_idle(self._slabs.unneeded())]
        return self._release(gone)

    def tend(self, now: float) -> None:
        """Shrink now and then, on the other thread. Fast: to be called regularly.

        Parameters
        ----------
        now
            Seconds, monotonic.
        """
        if self._buffers and now >= self._shrink_at:
            first, self._shrink_at = self._shrink_at < 0, now + _IDLE_SECONDS
            if not first:
                self._grow(self._shrink)

    def _shrink(self) -> None:
        self.shrink()

    def _release(self, gone: Sequence[PinnedBuffer]) -> int:
        for buffer in gone:
            with suppress(DeviceError):
                buffer.release()
        return len(gone) * self._slab_nbytes

    def close(self) -> None:
        """Lend nothing any more, and give back what is idle; users keep what they use."""
        self._closed = True
        self.trim()

    # -- looking at it -----------------------------------------------------------------------------

    def statistics(self) -> PinnedStatistics:
        """Return what the pool holds and did."""
        with self._lock:
            self._settle()
            return PinnedStatistics(self._limit or 0, self._slabs.nbytes, self._slabs.used_nbytes, **self._counts)

    def validate(self) -> None:
        """Raise AssertionError unless lent blocks are taken blocks. For tests at rest."""
        with self._lock:
            self._settle()
            self._slabs.validate()
            lent = [*self._lent.values(), *self._returned]
            assert sum(lease.block.nbytes for lease in lent) == self._slabs.used_nbytes
            assert {lease.block.slab for lease in lent} <= self._buffers.keys()


def _give_back(
    lent: dict[int, _Lease], returned: deque[_Lease], ref: weakref.ref[ctypes.Array[ctypes.c_ubyte]]
) -> None:
    """A leaf has died. Runs in any thread, at any point: no lock, and no reference to the pool."""
    assert type(ref) is _Lease
    if lent.pop(ref.leaf, None) is not None:
        returned.append(ref)
