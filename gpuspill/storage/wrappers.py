"""Stores around a store, each adding one behaviour."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from gpuspill.storage.base import Allocate, Frame, Lend, Receipt, Store, StoreStatistics

__all__ = ["DelayedStore", "FaultyStore", "WrapperStore", "nth"]

#: ``fault(operation, number)``: what to raise in the operation (``"write"`` or ``"read"``), counted
#: from 1 for each kind; None to let it go ahead.
Fault = Callable[[str, int], BaseException | None]


class WrapperStore(Store):
    """Passes everything on; the base of the others.

    Parameters
    ----------
    store
        What does the work. Closed together with this one.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store!r})"

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """See :meth:`Store.write`."""
        return self.store.write(header, frames)

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """See :meth:`Store.read`."""
        return self.store.read(receipt, allocate, lend=lend)

    def delete(self, receipt: Receipt) -> None:
        """See :meth:`Store.delete`."""
        self.store.delete(receipt)

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self.store.close()

    @property
    def block_nbytes(self) -> int:
        """See :attr:`Store.block_nbytes`."""
        return self.store.block_nbytes

    @property
    def inside(self) -> bool:
        """See :attr:`Store.inside`."""
        return self.store.inside

    def statistics(self) -> StoreStatistics:
        """See :meth:`Store.statistics`."""
        return self.store.statistics()

    def validate(self) -> None:
        """See :meth:`Store.validate`."""
        self.store.validate()


class DelayedStore(WrapperStore):
    """Makes each write, read and delete take longer: a slow disk.

    Parameters
    ----------
    store
        What does the work.
    seconds
        How much longer.
    sleep
        What waits.

    Notes
    -----
    Operations of several threads are delayed side by side, not one after another.
    """

    def __init__(self, store: Store, seconds: float, sleep: Callable[[float], object] = time.sleep) -> None:
        super().__init__(store)
        self.seconds = seconds
        self._sleep = sleep

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Wait, then write."""
        self._sleep(self.seconds)
        return self.store.write(header, frames)

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Wait, then read."""
        self._sleep(self.seconds)
        return self.store.read(receipt, allocate, lend=lend)

    def delete(self, receipt: Receipt) -> None:
        """Wait, then delete."""
        self._sleep(self.seconds)
        self.store.delete(receipt)


class FaultyStore(WrapperStore):
    """Fails where it is told to, before the store under it is asked.

    Parameters
    ----------
    store
        What does the work.
    fault
        Asked before each write and read, in the thread that does it. Deleting and closing never
        raise, so they are not asked about.

    Notes
    -----
    Thread-safe if `fault` is. Operations are counted whether they fail or not.
    """

    def __init__(self, store: Store, fault: Fault) -> None:
        super().__init__(store)
        self._fault = fault
        self._writes = itertools.count(1)
        self._reads = itertools.count(1)

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Fail or write."""
        self._ask("write", next(self._writes))
        return self.store.write(header, frames)

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Fail or read."""
        self._ask("read", next(self._reads))
        return self.store.read(receipt, allocate, lend=lend)

    def _ask(self, operation: str, number: int) -> None:
        error = self._fault(operation, number)
        if error is not None:
            raise error


def nth(operation: str, *numbers: int, error: Callable[[], BaseException]) -> Fault:
    """Return a fault for :class:`FaultyStore`.

    Parameters
    ----------
    operation
        ``"write"`` or ``"read"``.
    numbers
        Which of them fail, counted from 1; all if there are none.
    error
        Makes a new exception for each failure.
    """

    def fault(asked: str, number: int) -> BaseException | None:
        return error() if asked == operation and (not numbers or number in numbers) else None

    return fault
