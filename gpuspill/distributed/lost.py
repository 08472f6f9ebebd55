"""What stands for a value that is lost for good, on its way to those who wait for it."""

from __future__ import annotations

from typing import Any

from gpuspill.errors import DataLostError

__all__ = ["LostValue", "Poison"]


class LostValue:
    """Stands on another worker for a value that is lost for good. Reading it from a store raises.

    Distributed has no message by which a worker could tell the scheduler that data is lost and
    cannot be computed again, so that what waits for it fails. So what waits gets this, and fails
    when it reads it.
    """

    def __init__(self, error: DataLostError) -> None:
        self.error = error.retold(error.message, error.key)

    def __reduce__(self) -> Any:
        return LostValue, (self.error,)


class Poison(LostValue):
    """A lost value on its way to a client: raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return _raise_lost, (self.error,)


def _raise_lost(error: DataLostError) -> None:
    raise error
