"""A store in memory whose operations a test can hold up, fail, or interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gpuspill.errors import RecordCorrupt
from gpuspill.storage.base import Allocate, Frame, Lend, Receipt, Store
from gpuspill.storage.wrappers import WrapperStore
from gpuspill.testing.stores import MemoryStore

__all__ = ["HookedStore", "ManualStore", "Operation"]


class HookedStore(WrapperStore):
    """Runs what a test wants in the middle of a write or a read, in the thread that does it.

    Nothing of gpuspill holds a lock there, so whatever may happen at the same time may happen
    inside the hook: a test gets any interleaving with one thread, the same each time.

    Parameters
    ----------
    store
        What does the work; by default a :class:`~gpuspill.testing.stores.MemoryStore`.

    Attributes
    ----------
    hook
        ``hook(operation, when)`` with ``"write"`` or ``"read"`` and ``"before"`` or ``"after"``.
        What it raises fails the operation: before, nothing was done; after, the record exists all
        the same, and no caller has its receipt.
    damaged : set of Receipt
        Records whose bytes are not what was written.
    """

    def __init__(self, store: Store | None = None) -> None:
        super().__init__(MemoryStore() if store is None else store)
        self.hook: Callable[[str, str], None] = lambda operation, when: None
        self.damaged: set[Receipt] = set()

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """See :meth:`Store.write`."""
        self.hook("write", "before")
        receipt = self.store.write(header, frames)
        try:
            self.hook("write", "after")
        except BaseException:
            self.store.delete(receipt)
            raise
        return receipt

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """See :meth:`Store.read`."""
        self.hook("read", "before")
        if receipt in self.damaged:
            raise RecordCorrupt(f"record {receipt.number} is damaged")
        result = self.store.read(receipt, allocate, lend=lend)
        self.hook("read", "after")
        return result


class Operation:
    """One write or read that waits for the test.

    Attributes
    ----------
    kind
        ``"write"`` or ``"read"``.
    thread
        Name of the thread that does it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.thread = threading.current_thread().name
        self._go = threading.Event()
        self._error: BaseException | None = None

    def let_go(self, error: BaseException | None = None) -> None:
        """Let it go on; with an error, fail instead."""
        self._error = error
        self._go.set()

    def _wait(self, timeout: float) -> None:
        if not self._go.wait(timeout):
            raise RuntimeError(f"the test let no {self.kind} go on")
        if self._error is not None:
            raise self._error


class ManualStore(WrapperStore):
    """Each write and read waits until the test lets it go on.

    Parameters
    ----------
    store
        What does the work; by default a :class:`~gpuspill.testing.stores.MemoryStore`.
    timeout
        Seconds after which a waiting thread gives up with an error: a test that fails ends all the
        same.

    Attributes
    ----------
    manual : frozenset of str
        The operations that wait. Assign to change what happens to those to come.
    """

    def __init__(self, store: Store | None = None, timeout: float = 60.0) -> None:
        super().__init__(MemoryStore() if store is None else store)
        self.manual: frozenset[str] = frozenset({"write", "read"})
        self._timeout = timeout
        self._waiting: list[Operation] = []
        self._changed = threading.Condition()

    def wait_for(self, kind: str, count: int = 1) -> list[Operation]:
        """Return the operations of a kind that wait, as soon as there are so many."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._of(kind)) >= count, self._timeout):
                raise RuntimeError(f"{len(self._of(kind))} of {count} operations {kind!r} came")
            return self._of(kind)

    def waiting(self, kind: str) -> int:
        """Return how many operations of a kind wait now."""
        with self._changed:
            return len(self._of(kind))

    def let_all_go(self) -> None:
        """Let everything go on, now and from now on."""
        self.manual = frozenset()
        with self._changed:
            for operation in self._waiting:
                operation.let_go()

    def _of(self, kind: str) -> list[Operation]:
        return [operation for operation in self._waiting if operation.kind == kind]

    def _hold_up(self, kind: str) -> None:
        if kind not in self.manual:
            return
        operation = Operation(kind)
        with self._changed:
            self._waiting.append(operation)
            self._changed.notify_all()
        try:
            operation._wait(self._timeout)
        finally:
            with self._changed:
                self._waiting.remove(operation)

    def write(self, header: bytes, frames: Sequence[Frame]) -> Receipt:
        """Wait, then write."""
        self._hold_up("write")
        return self.store.write(header, frames)

    def read(
        self, receipt: Receipt, allocate: Allocate | None = None, *, lend: Lend | None = None
    ) -> tuple[bytes, list[memoryview]]:
        """Wait, then read."""
        self._hold_up("read")
        return self.store.read(receipt, allocate, lend=lend)
