"""The port through which work is measured."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Observer"]


class Observer(Protocol):
    """Told about every unit of work, in the thread that did it and without a lock held.

    Labels and units are those of distributed's fine performance metrics: ``disk-read``, ``disk-write``,
    ``memory-read``, ``serialize``, ``deserialize``; ``seconds``, ``bytes``, ``count``.
    """

    def __call__(self, label: str, value: float, unit: str, /) -> None:
        """Add `value` to the metric."""
        ...
