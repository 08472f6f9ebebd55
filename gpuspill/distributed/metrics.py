"""What a manager reports of its work, added up, and passed on to what distributed meters."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping

from distributed.metrics import context_meter

__all__ = ["LABELS", "WAIT", "Metrics"]

#: What distributed's ``SpillBuffer`` reports; its consumers know these labels.
LABELS = frozenset(
    {
        "memory-read",
        "disk-read",
        "disk-write",
        "serialize",
        "deserialize",
        "compress",
        "decompress",
    }
)

#: Time that a task waited for admission. Not part of the totals: ``SpillBuffer`` has no such
#: number.
WAIT = "gpuspill-wait"

#: Units that distributed's Prometheus collector accepts; it fails on others.
_UNITS = frozenset({"seconds", "bytes", "count"})


class Metrics:
    """Adds up what a manager reports, and passes it on to what is metered in the current context.

    Only what ``SpillBuffer`` has too; a store knows more about itself, see its statistics. What is
    metered is the task or the transfer on whose behalf the work was done. Thread-safe; called in
    the thread that did the work.
    """

    def __init__(self) -> None:
        # No lock that anybody waits for: a finaliser may use the store, and report, at any point of
        # this.
        self._adding = threading.Lock()
        self._reports: deque[tuple[tuple[str, str], float]] = deque()
        self._totals: defaultdict[tuple[str, str], float] = defaultdict(int)

    def __call__(self, label: str, value: float, unit: str, /) -> None:
        """Report one unit of work."""
        if label in LABELS and unit in _UNITS:
            self._reports.append(((label, unit), value))
            self._add_up()
            context_meter.digest_metric(label, value, unit)

    def add(self, totals: Mapping[tuple[str, str], float]) -> None:
        """Go on from the totals of the store before, so that no counter goes back."""
        self._reports.extend(totals.items())
        self._add_up()

    def totals(self) -> dict[tuple[str, str], float]:
        """Return a copy of the totals, perhaps without what is being added now."""
        self._add_up()
        return self._totals.copy()

    def _add_up(self) -> None:
        """Add what was reported to the totals, unless another thread is just doing that."""
        while self._reports and self._adding.acquire(blocking=False):
            try:
                while self._reports:
                    name, value = self._reports.popleft()
                    self._totals[name] += value
            finally:
                self._adding.release()
