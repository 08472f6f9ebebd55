"""What happens in the middle of the next operation of a store, and how that is to end."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Interruptions"]

#: So deep may what happens in the middle of something be interrupted itself.
_DEPTH = 3


class Interruptions:
    """Things to do in the middle of the next operation of a store.

    Attributes
    ----------
    depth
        How many operations are being interrupted now, one in the middle of the other.
    failures
        How often an operation was made to fail.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.failures = 0
        self._actions: list[Callable[[], object]] = []
        self._error: BaseException | None = None

    def add(self, action: Callable[[], object]) -> None:
        """Do something in the middle of the next operation."""
        self._actions.append(action)

    def fail(self, error: BaseException) -> None:
        """Let the next operation end with an error."""
        self._error = error

    def clear(self) -> None:
        """Let the next operation alone."""
        self._actions, self._error = [], None

    def hook(self, operation: str, when: str) -> None:
        """Do it now; for :attr:`gpuspill.testing.memory_store.HookedStore.hook`."""
        if when == "after" and operation == "read":
            return
        actions, error = self._actions, self._error
        self.clear()
        if self.depth < _DEPTH:
            self.depth += 1
            try:
                for action in actions:
                    action()
            finally:
                self.depth -= 1
        if error is not None:
            self.failures += 1
            raise error
