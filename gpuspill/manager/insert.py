"""How values come in: into memory, or as a record that is on disk already."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from gpuspill.core.sizes import SizeModel, as_nbytes
from gpuspill.manager.metadata import Metadata
from gpuspill.manager.sharing import VIEW_NBYTES, Sharing
from gpuspill.storage.base import Receipt

__all__ = ["Intake"]


class Intake:
    """Takes values in on behalf of a manager.

    Parameters
    ----------
    metadata, sharing
        The manager's.
    sizes
        Corrects sizes by what was learned of the type.
    sizeof
        Bytes a value takes in memory.

    Notes
    -----
    Thread-safe; nothing blocks.
    """

    def __init__(self, metadata: Metadata, sharing: Sharing, sizes: SizeModel, sizeof: Callable[[object], int]) -> None:
        self._metadata = metadata
        self._sharing = sharing
        self._sizes = sizes
        self._sizeof = sizeof

    def store(
        self, key: Hashable, value: object, nbytes: int | None = None, spillable: bool = True, touched: bool = True
    ) -> None:
        """Put `value` in memory under `key`, replacing what the key held; spilling may start in the background.

        Parameters
        ----------
        key
            Any hashable.
        value
            Any object. The same object under several keys is charged once.
        nbytes
            Its size in bytes, if the caller knows; else ``sizeof`` is called here.
        spillable
            Whether it may leave memory.
        touched
            Whether it may have been changed in place since it was stored before, under whatever key: then its record is
            given up.
        """
        nbytes = as_nbytes(self._sizeof(value) if nbytes is None else nbytes)
        sharing, metadata = self._sharing, self._metadata
        shared = sharing.look(value)
        slots = metadata.slots
        with metadata as state:
            if metadata.nested:
                metadata.defer(partial(self.store, key, value, nbytes, spillable, touched))
                return
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
                    state.renew(pid)  # a task that changed its input in place and returned it stores it anew
            else:
                size = self._sizes.estimate(type(value), nbytes)
                if shared is None:
                    pid = state.insert(key, size, spillable=spillable)
                else:
                    hash(key)  # raises before anything is charged
                    own = max(VIEW_NBYTES, nbytes - shared.covered)
                    pid = state.insert(
                        key, own, spillable=spillable, parts=sharing.parts(key, shared), apart_nbytes=size
                    )
                slots.enter(state.ledger.entries[pid], key, value, nbytes)

    def adopt(self, key: Hashable, nbytes: int, receipt: Receipt) -> None:
        """Put a value that is on disk already under `key`, replacing what the key held.

        Parameters
        ----------
        key
            Any hashable.
        nbytes
            Bytes that the value will take in memory.
        receipt
            Of its record, which the store can read and now belongs to this manager.
        """
        with self._metadata as state:
            if self._metadata.nested:
                self._metadata.defer(partial(self.adopt, key, nbytes, receipt))
                return
            nbytes = as_nbytes(nbytes)
            pid = state.insert_below(key, nbytes, receipt.nbytes)
            self._metadata.slots.enter_below(state.ledger.entries[pid], key, nbytes, receipt)
