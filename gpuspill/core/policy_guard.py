"""What becomes of values if a policy of others fails: they leave in the order of their last use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpuspill.core.policy import EvictionPolicy, Order

__all__ = ["GuardedPolicy"]


class GuardedPolicy(EvictionPolicy):
    """Asks another policy as long as that works; then it evicts by last use.

    A policy fails if it raises, names a value that is not in, or names none although there are
    some. Without a guard the first would close the worker, and the last would have tasks wait for
    ever.

    Parameters
    ----------
    failed
        Called once, with what it has done wrong.

    Notes
    -----
    O(1) beside what the other one takes.
    """

    def __init__(self, policy: EvictionPolicy, failed: Callable[[Exception], None]) -> None:
        self.policy = policy
        self._failed = failed
        self._works = True
        self._inside: dict[int, None] = {}  # by last use
        self._grace = 0

    @property
    def grace(self) -> int:
        """As set."""
        return self._grace

    @grace.setter
    def grace(self, count: int) -> None:
        self._grace = count
        self._ask(setattr, self.policy, "grace", count)

    def _ask(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._works:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                self._fail(error)
        return None

    def _fail(self, error: Exception) -> None:
        self._works = False
        self._failed(error)

    def insert(
        self, vid: int, order: Order | None = None, *, dead: bool = False, clean: bool = False, first: bool = False
    ) -> None:
        """See :meth:`EvictionPolicy.insert`."""
        self._inside[vid] = None
        self._ask(self.policy.insert, vid, order, dead=dead, clean=clean, first=first)

    def discard(self, vid: int) -> bool:
        """See :meth:`EvictionPolicy.discard`."""
        self._ask(self.policy.discard, vid)
        return self._inside.pop(vid, self) is None

    def forget(self, vid: int) -> None:
        """See :meth:`EvictionPolicy.forget`."""
        self._ask(self.policy.forget, vid)
        self._inside.pop(vid, None)

    def touch(self, vid: int) -> None:
        """See :meth:`EvictionPolicy.touch`."""
        self._ask(self.policy.touch, vid)
        del self._inside[vid]
        self._inside[vid] = None

    def dirty(self, vid: int) -> None:
        """See :meth:`EvictionPolicy.dirty`."""
        self._ask(self.policy.dirty, vid)

    def first(self) -> int | None:
        """Return the value that goes next."""
        found = self._ask(self.policy.first)
        if self._works:
            if (found is None and not self._inside) or (isinstance(found, int) and found in self._inside):
                return found
            self._fail(ValueError(f"first() returned {found!r}; {len(self._inside)} values are in, not that one"))
        return next(iter(self._inside), None)

    def __contains__(self, vid: object) -> bool:
        return vid in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    def __iter__(self) -> Iterator[int]:
        return iter(self._inside)
