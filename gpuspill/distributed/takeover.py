"""Taking over what distributed's ``SpillBuffer`` has spilled, without reading it.

When gpuspill is attached to a running worker, some of its values may be in files that
``SpillBuffer`` wrote. They stay there: the manager gets a receipt for each, and the store knows
whom to ask for the bytes. A value that is read once and spilled again is still in its old file.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from gpuspill import forks
from gpuspill.distributed.metrics import Metrics
from gpuspill.distributed.serialization import FOREIGN_HEADER
from gpuspill.errors import RecordLost
from gpuspill.storage.base import Allocate, Lend, Receipt, Store
from gpuspill.storage.wrappers import WrapperStore

__all__ = ["AdoptingStore", "ForeignReceipt"]


@dataclass(frozen=True, slots=True)
class ForeignReceipt(Receipt):
    """The handle of a file that another store wrote.

    Parameters
    ----------
    key
        The key by which `files` knows it.
    files
        Mapping of keys to the bytes in the file.
    """

    key: Hashable = field(compare=False)
    files: MutableMapping[Any, Any] = field(compare=False)


class AdoptingStore(WrapperStore):
    """A store that also reads and deletes a ``SpillBuffer``'s files; else as the one it wraps.

    Parameters
    ----------
    store
        Where records are written.
    metrics
        Told about reads of adopted files; the store below tells about its own.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        super().__init__(store)
        self._metrics = metrics
        # Re-entrant, for finalisers, which may delete but do not adopt.
        self._lock = forks.lock()
        self._pid = os.getpid()
        self._foreign: set[ForeignReceipt] = set()
        self._adopted = 0

    def adopt(self, files: MutableMapping[Any, Any], key: Hashable, nbytes: int) -> ForeignReceipt:
        """Return a receipt for the file of `key`, which takes `nbytes` bytes on disk. No I/O."""
        with self._lock:
            self._adopted += 1
            # The store below counts its records from 1 upwards.
            receipt = ForeignReceipt(-self._adopted, nbytes, nbytes, nbytes, 0, key=key, files=files)
            self._foreign.add(receipt)
        return receipt

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Return a record; an adopted file comes back whole, as the only frame.

        Raises
        ------
        RecordLost
            The file is gone. Unlike records it has no checksum, so damage shows only if it cannot
            be deserialised.
        """
        if not isinstance(receipt, ForeignReceipt):
            return self.store.read(receipt, allocate, lend=lend)
        start = perf_counter()
        try:
            blob = receipt.files[receipt.key]
        except (KeyError, FileNotFoundError) as error:
            raise RecordLost(
                f"the file that SpillBuffer wrote for {receipt.key!r} is gone: {error}", receipt.key
            ) from error
        self._metrics("disk-read", perf_counter() - start, "seconds")
        self._metrics("disk-read", 1, "count")
        self._metrics("disk-read", len(blob), "bytes")
        return FOREIGN_HEADER, [memoryview(blob)]

    def delete(self, receipt: Receipt) -> None:
        """Delete a record or an adopted file."""
        if not isinstance(receipt, ForeignReceipt):
            self.store.delete(receipt)
            return
        if os.getpid() != self._pid:
            return  # a forked child: the files are its parent's
        with self._lock:
            if receipt not in self._foreign:
                return
            self._foreign.discard(receipt)
        with suppress(KeyError, OSError):  # gone already; the directory goes with the worker's
            del receipt.files[receipt.key]

    def close(self) -> None:
        """Close the store below and delete what was adopted."""
        self.store.close()
        with self._lock:
            left = list(self._foreign)
        for receipt in left:
            self.delete(receipt)
