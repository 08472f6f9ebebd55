"""Host memory that is used again.

Filling memory that the process just got costs more than the copy itself, because the kernel has to
find, clear and map every page of it first. A pool keeps the memory of values that died for those
that come.

**How memory finds its way back.** Consumers do not give buffers back: a buffer becomes an array's
memory, user code takes a view, other code pickles it without a copy. So a buffer is a chain: an
anonymous mapping, a ctypes array over it (the *leaf*), and the memoryview that is handed out. Every
view keeps the leaf alive; when the last is gone the leaf dies, and the callback of a weak reference
puts the mapping with the idle ones.

**No locks.** The callback runs in whatever thread dropped the last view, at any point of it, also
in the middle of this module's own code. A lock could be held by the very thread that then waits for
it. So there is none around memory: what is shared are deques and dictionaries, and each step is one
operation on one of them that Python makes atomic.

**A dead weak reference is no proof.** When the garbage collector clears a cycle, callbacks run
*before* the finalizers of the cycle's members, and these can still use the memory, or even bring it
back to life. So a mapping has to prove that it is free before it is used again: one that anything
still exports memory from refuses to be resized, even to the size it has.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpuspill import forks

__all__ = ["BufferPool", "BufferStatistics", "size_class"]

#: Up to this size the ordinary allocator reuses memory well enough, and a mapping costs more than
#: it saves.
SMALL_NBYTES = 65_536
_ALIGNMENT = 64
_HUGE_PAGE_NBYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """A snapshot of a pool; its numbers are of nearly, not exactly, the same moment.

    Parameters
    ----------
    hits, misses
        Pooled allocations that were served from idle memory, and that needed new memory.
    idle_nbytes, idle_buffers
        Memory waiting to be used again.
    lent_nbytes, lent_buffers
        Memory of pooled buffers in use, rounded up to size classes.
    trimmed_nbytes
        Memory given back to the system because too much was idle, in all.
    max_idle_nbytes
        Most bytes that are kept idle.
    """

    hits: int
    misses: int
    idle_nbytes: int
    idle_buffers: int
    lent_nbytes: int
    lent_buffers: int
    trimmed_nbytes: int
    max_idle_nbytes: int


class _Lease(weakref.ref["ctypes.Array[ctypes.c_ubyte]"]):
    """A weak reference to a leaf that knows the mapping under it."""

    __slots__ = ("mapping", "nbytes")

    mapping: mmap.mmap
    nbytes: int


def size_class(nbytes: int) -> int:
    """Return how many bytes are mapped for a buffer of `nbytes` bytes.

    There are eight classes between one power of two and the next, so that buffers of nearly equal
    size share one, and at most an eighth is lost: of address space, since pages that are never
    touched cost nothing. Whole pages.
    """
    step = max(mmap.PAGESIZE, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


class BufferPool:
    """Lends buffers, and takes their memory back when the last view of it is gone.

    Parameters
    ----------
    max_idle_nbytes
        Most bytes to keep for later. What comes back beyond that pushes out what has been idle
        longest. 0 keeps nothing.

    Notes
    -----
    Any method may be called from any thread at any time, finalizers included.

    Contents are whatever the last user left. Memory comes back, and may be unmapped, in the thread
    that drops the last view.
    """

    def __init__(self, max_idle_nbytes: int) -> None:
        if max_idle_nbytes < 0:
            raise ValueError(f"max_idle_nbytes must be at least 0, got {max_idle_nbytes}")
        self._max_idle_nbytes = max_idle_nbytes
        # By size class, each oldest first, with the turn at which it came back.
        self._idle: dict[int, deque[tuple[int, mmap.mmap]]] = {}
        self._turns = itertools.count()
        # A weak reference only calls back while it is alive itself.
        self._lent: dict[int, _Lease] = {}
        self._on_death = _callback(weakref.ref(self))
        # Guards numbers that nothing is decided by. Reentrant: a finalizer may come in between.
        self._counting = forks.lock()
        self._hits = self._misses = self._trimmed_nbytes = 0
        # Two threads at once may lose the larger of two: it is an observation, and the next is
        # near.
        self._peak_idle_nbytes = 0

    def __repr__(self) -> str:
        return f"<BufferPool: {self.idle_nbytes:,} of {self._max_idle_nbytes:,} bytes idle>"

    @property
    def idle_nbytes(self) -> int:
        """Bytes waiting to be used again."""
        # By keys, which are numbers: making pairs could run the garbage collector, and that this
        # very code.
        return sum(size * len(self._idle[size]) for size in list(self._idle))

    def peak_idle_nbytes(self) -> int:
        """Return the most bytes that waited to be used again since the last call."""
        idle = self.idle_nbytes
        peak, self._peak_idle_nbytes = max(self._peak_idle_nbytes, idle), idle
        return peak

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory for `nbytes` bytes.

        Parameters
        ----------
        nbytes
            Size in bytes; may be 0.

        Returns
        -------
        memoryview
            Writable, one-dimensional, format ``B``, starting at a multiple of 64 bytes (of a page
            beyond 64 KiB). Not initialised. It is yours, with every view made of it, until the last
            of them is gone.

        Raises
        ------
        MemoryError
            The system has none, even after all idle memory was given back.
        """
        if nbytes <= SMALL_NBYTES:
            return _small(nbytes)
        size = size_class(nbytes)
        mapping = self._reuse(size)
        with self._counting:
            if mapping is None:
                self._misses += 1
            else:
                self._hits += 1
        if mapping is None:
            try:
                mapping = _map(size)
            except MemoryError:
                self.trim()
                mapping = _map(size)
        leaf = (ctypes.c_ubyte * size).from_buffer(mapping)
        lease = _Lease(leaf, self._on_death)
        lease.mapping = mapping
        lease.nbytes = size
        self._lent[id(lease)] = lease
        return memoryview(leaf).cast("B")[:nbytes]

    def trim(self, max_nbytes: int = 0) -> int:
        """Give idle memory back until at most `max_nbytes` are idle; longest idle first.

        Returns
        -------
        int
            Bytes given back.
        """
        trimmed = 0
        while self.idle_nbytes > max_nbytes:
            size = self._longest_idle()
            if size is None:
                break
            # Another thread may have taken it meanwhile.
            with suppress(IndexError):
                # Not closed but dropped: it goes once nothing uses it, whatever the weak reference
                # said.
                self._idle[size].popleft()
                trimmed += size
        if trimmed:
            with self._counting:
                self._trimmed_nbytes += trimmed
        return trimmed

    def statistics(self) -> BufferStatistics:
        """Return what the pool holds and did."""
        lent = list(self._lent.values())
        sizes = list(self._idle)
        with self._counting:
            return BufferStatistics(
                hits=self._hits,
                misses=self._misses,
                idle_nbytes=self.idle_nbytes,
                idle_buffers=sum(len(self._idle[size]) for size in sizes),
                lent_nbytes=sum(lease.nbytes for lease in lent),
                lent_buffers=len(lent),
                trimmed_nbytes=self._trimmed_nbytes,
                max_idle_nbytes=self._max_idle_nbytes,
            )

    def close(self) -> None:
        """Give all idle memory back and keep none from now on. Buffers in use stay valid."""
        self._max_idle_nbytes = 0
        self.trim()

    def _reuse(self, size: int) -> mmap.mmap | None:
        idle = self._idle.get(size)
        while idle:
            try:
                # The latest first: it is the most likely to be in a cache still.
                _, mapping = idle.pop()
            except IndexError:
                break
            try:
                mapping.resize(size)
            except BufferError:
                # In use after all; see the module.
                continue
            return mapping
        return None

    def _take_back(self, lease: _Lease) -> None:
        if self._lent.pop(id(lease), None) is None:
            return
        idle = self._idle.get(lease.nbytes)
        if idle is None:
            idle = self._idle.setdefault(lease.nbytes, deque())
        idle.append((next(self._turns), lease.mapping))
        del lease.mapping
        self.trim(self._max_idle_nbytes)
        self._peak_idle_nbytes = max(self._peak_idle_nbytes, self.idle_nbytes)

    def _longest_idle(self) -> int | None:
        """Return the size class whose oldest buffer is the oldest of all."""
        oldest: tuple[int, int] | None = None
        for size in list(self._idle):
            with suppress(IndexError):
                turn = self._idle[size][0][0]
                if oldest is None or turn < oldest[0]:
                    oldest = turn, size
        return None if oldest is None else oldest[1]


def _callback(pool_ref: weakref.ref[BufferPool]) -> Callable[[weakref.ref[ctypes.Array[ctypes.c_ubyte]]], None]:
    # Through a weak reference: the pool keeps the leases, and these keep their callback.
    def on_death(lease: weakref.ref[ctypes.Array[ctypes.c_ubyte]]) -> None:
        pool = pool_ref()
        if pool is not None:
            assert isinstance(lease, _Lease)
            pool._take_back(lease)

    return on_death


def _map(nbytes: int) -> mmap.mmap:
    try:
        # Private: by default Python asks for shared memory, which is another kind of memory to the
        # kernel.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(f"cannot map {nbytes:,} bytes: {exc.strerror}") from exc
    if nbytes >= _HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # Advice: a kernel without huge pages says no, and nothing is lost.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _small(nbytes: int) -> memoryview:
    memory = bytearray(nbytes + _ALIGNMENT - 1)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _ALIGNMENT
    return memoryview(memory)[offset : offset + nbytes]
