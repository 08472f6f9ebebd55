"""How values come in: into memory, or as a record that is on disk already.

Memory that several values keep alive is charged by itself, once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Hashable, Mapping, Sequence

from gpuspill.core.residency import State
from gpuspill.core.sizes import SizeModel, as_nbytes
from gpuspill.core.state import SpillState
from gpuspill.device.shared_memory import SharedMemory
from gpuspill.errors import QuotaExceeded, StorageError
from gpuspill.manager.ports import Encoded, Observer, observe_write
from gpuspill.manager.transaction import Metadata, batches
from gpuspill.storage.base import Frame, Receipt, Store, frame_nbytes

__all__ = ["VIEW_NBYTES", "Intake", "Sharing"]

#: What is charged for a view besides the memory that it shows.
VIEW_NBYTES = 128


class Sharing:
    """Finds shared memory and charges it. Shared by the manager and those who bring values back.

    Parameters
    ----------
    find
        Returns what memory a value keeps alive that may be kept alive by others, or None; by
        default nothing is looked for.

    Notes
    -----
    :meth:`look` may take its time and holds no lock; the rest is to be called under the lock of the
    metadata.
    """

    def __init__(self, metadata: Metadata, find: Callable[[object], SharedMemory | None] | None) -> None:
        self._metadata = metadata
        self._find = find

    def look(self, value: object) -> SharedMemory | None:
        """Return what memory `value` keeps alive, if it may be kept alive by others."""
        return None if self._find is None else self._find(value)

    def parts(self, key: Hashable, shared: SharedMemory) -> tuple[int, ...]:
        """Return the proxies of what a value keeps alive."""
        return tuple(dict.fromkeys(self._part(key, owner, nbytes) for owner, nbytes in shared.owners))

    def split_parts(self, pid: int, shared: SharedMemory | None) -> None:
        """Charge by itself what a value without parts keeps alive; nothing if it is not there."""
        state = self._metadata.state
        entry = state.ledger.entries.get(pid)
        if shared is not None and entry is not None and entry.resident:
            own = max(VIEW_NBYTES, entry.nbytes - shared.covered)
            slot = self._metadata.slots[pid]
            slot.fixed = shared.fixed
            state.split_parts(pid, own, self.parts(slot.key, shared))

    def take_up(self, pid: int, value: object, shared: SharedMemory | None = None) -> None:
        """Take back a value that was evicted while it was referenced. Nothing is read."""
        state = self._metadata.state
        if state.ledger.entries[pid].state is State.SPILLED:
            state.restores.begin(pid)
            self._metadata.slots.attach(pid, value)
            state.restores.complete(pid)
            state.invalidate(pid)  # its holder may have changed it, and the record was not read
            self.split_parts(pid, shared)

    def _part(self, key: Hashable, owner: object, nbytes: int) -> int:
        """Return the proxy of memory that a value keeps alive, which is thereby in memory."""
        state, slots = self._metadata.state, self._metadata.slots
        pid = slots.find(owner)
        if pid is not None:
            self.take_up(pid, owner)
            if state.ledger.entries[pid].resident:
                return pid
        pid = state.insert_part(nbytes)
        slots.enter(state.ledger.entries[pid], key, owner, nbytes)
        return pid


class Intake:
    """Takes values in on behalf of a manager.

    Parameters
    ----------
    sizes
        Corrects sizes by what was learned of the type.
    sizeof
        Bytes a value takes in memory.

    Notes
    -----
    Thread-safe; only :meth:`store_on_disk` blocks.
    """

    def __init__(
        self,
        metadata: Metadata,
        sharing: Sharing,
        sizes: SizeModel,
        sizeof: Callable[[object], int],
        store: Store,
        observer: Observer | None,
    ) -> None:
        self._store = store
        self._observer = observer
        self._metadata = metadata
        self._sharing = sharing
        self._sizes = sizes
        self._sizeof = sizeof

    def store(
        self, key: Hashable, value: object, nbytes: int | None = None, spillable: bool = True, touched: bool = True
    ) -> None:
        """Put `value` in memory under `key`, replacing what it held; may start spilling.

        Parameters
        ----------
        value
            Any object. The same object under several keys is charged once.
        nbytes
            Its size in bytes, if the caller knows; else ``sizeof`` is called here.
        spillable
            Whether it may leave memory.
        touched
            Whether it may have been changed in place since it was stored before, under whatever
            key: then its record is given up.
        """
        nbytes = as_nbytes(self._sizeof(value) if nbytes is None else nbytes)
        shared = self._sharing.look(value)
        with self._metadata as state:
            self._enter(state, key, value, nbytes, shared, spillable, touched)

    def store_encoded(self, values: Mapping[Hashable, Encoded]) -> None:
        """Put values that came as bytes in memory, in one go; all are new objects."""
        for batch in batches(values.items()):
            with self._metadata as state:
                for key, value in batch:
                    self._enter(state, key, value, value.nbytes, None, spillable=True, touched=True)

    def _enter(
        self,
        state: SpillState,
        key: Hashable,
        value: object,
        nbytes: int,
        shared: SharedMemory | None,
        spillable: bool,
        touched: bool,
    ) -> None:
        """Under the lock."""
        sharing, metadata = self._sharing, self._metadata
        slots = metadata.slots
        admission = metadata.promises.pop(key, None)
        if admission is not None:
            # The output is about to be charged; its promise must not be charged as well.
            state.settle(admission.reservation, admission.outputs.pop(key))
        pid = slots.find(value)
        if pid is not None:
            slots.trust(slots[pid])
            state.alias(key, pid)
            sharing.take_up(pid, value, shared)
            if touched:
                state.invalidate(pid)  # a task that changed its input in place and returned it stores it anew
            return
        size = self._sizes.estimate(type(value), nbytes)
        if shared is None:
            pid = state.insert(key, size, spillable=spillable)
        else:
            hash(key)  # raises before anything is charged
            own = max(VIEW_NBYTES, nbytes - shared.covered)
            pid = state.insert(key, own, spillable=spillable, parts=sharing.parts(key, shared), apart_nbytes=size)
            slots[pid].fixed = shared.fixed
        slots.enter(state.ledger.entries[pid], key, value, nbytes)

    def adopt(self, key: Hashable, nbytes: int, receipt: Receipt) -> None:
        """Put a value that is on disk already under `key`, replacing what the key held.

        Parameters
        ----------
        nbytes
            Bytes that the value will take in memory.
        receipt
            Of its record, which the store can read and now belongs to this manager.
        """
        with self._metadata as state:
            nbytes = as_nbytes(nbytes)
            pid = state.insert_below(key, nbytes, receipt.nbytes)
            self._metadata.enter_below(pid, key, nbytes, receipt)

    def store_on_disk(self, key: Hashable, header: bytes, frames: Sequence[Frame], nbytes: int) -> None:
        """Write a value to disk under `key` without its being in memory. Blocks.

        Parameters
        ----------
        header, frames
            Of the record: what the serialiser makes the value from.
        nbytes
            Bytes that the value will take in memory.

        Raises
        ------
        StorageError
            It could not be written: no room (StorageFull), not allowed (QuotaExceeded), the manager
            was closed meanwhile, or whatever the disk or a frame stream reports. Then nothing is
            left of it, and the key holds what it held.
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
                metadata.enter_below(pid, key, nbytes, receipt)
                written = None  # it has an owner
                metadata.count_writes([receipt], raw, seconds)
        finally:
            with metadata as state:
                state.disk.release(reservation)
            if written is not None:
                self._store.delete(written)
        observe_write(self._observer, receipt, seconds)


def _over_quota(nbytes: int, limit: int | None, named: str) -> QuotaExceeded:
    return QuotaExceeded(f"a record of {nbytes:,} bytes does not fit in the disk limit of {limit:,} bytes ({named})")
