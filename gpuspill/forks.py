"""What happens when a process forks: the child has its memory, the store stays the parent's.

A fork copies all memory, but only the thread that forks. So a lock that another thread holds at
that moment would be held in the child for ever, over data in the middle of a change. Therefore the
forking thread takes all locks made by :func:`lock` before the fork, and gives them back after it,
in both processes. They are held for microseconds, never during I/O, so that is how long a fork
waits. After that, objects given to :func:`tell` learn that they are in a child.

Python keeps what is registered with ``os.register_at_fork`` for ever. So there is one registration
for all, and the one registry that it needs, which refers to everything weakly.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from _thread import RLock

__all__ = ["lock", "tell"]

logger = logging.getLogger("gpuspill")


class _Member(Protocol):
    def disown(self) -> None: ...


class _Registry:
    """The locks and members there are, by the order in which they were made."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._locks: WeakValueDictionary[int, RLock] = WeakValueDictionary()
        self._members: WeakValueDictionary[int, _Member] = WeakValueDictionary()
        self._taken: list[RLock] = []

    def lock(self) -> RLock:
        lock = threading.RLock()
        self._locks[next(self._numbers)] = lock
        return lock

    def tell(self, member: _Member) -> None:
        self._members[next(self._numbers)] = member

    def before(self) -> None:
        # A copy in one step: other threads make and drop locks meanwhile.
        locks = [lock for ref in self._locks.valuerefs() if (lock := ref()) is not None]
        while (missed := _take(locks)) is not None:
            # Wait for that one first, with none of the others, which its holder may want.
            locks.remove(missed)
            locks.insert(0, missed)
        self._taken = locks

    def after(self) -> None:
        locks, self._taken = self._taken, []
        for lock in locks:
            lock.release()

    def after_in_child(self) -> None:
        self.after()
        for ref in self._members.valuerefs():
            member = ref()
            if member is not None:
                try:
                    member.disown()
                except Exception:
                    logger.exception("telling a store that it was inherited failed")


def _take(locks: list[RLock]) -> RLock | None:
    """Take all locks, waiting for the first only; return one that was taken, with none held."""
    for number, lock in enumerate(locks):
        if not lock.acquire(blocking=number == 0):
            for taken in locks[:number]:
                taken.release()
            return lock
    return None


_registry: Final = _Registry()
os.register_at_fork(before=_registry.before, after_in_parent=_registry.after, after_in_child=_registry.after_in_child)


def lock() -> RLock:
    """Return a re-entrant lock that is free in a forked child, and guards nothing half done there.

    Its holder must not wait for I/O, a callback or another process: every fork waits for it.
    """
    return _registry.lock()


def tell(member: _Member) -> None:
    """Call ``member.disown()`` in each child that is forked from now on, as long as `member` lives.

    It must not block. What it raises is logged.
    """
    _registry.tell(member)
