"""The names of the numbers that a worker publishes, and where they are collected.

``SpillStore.cumulative_metrics``
    Totals of the store. distributed's Prometheus collector reads them.
fine performance metrics (``context_meter``)
    The same, booked on the task or transfer in whose context it happened.
heartbeat, ``WorkerState.metrics["gpuspill"]``
    :func:`heartbeat`.
``gpuspill.statistics(client)``
    See :mod:`gpuspill.distributed.frames`.
Prometheus
    :func:`export`: all of them, beside what distributed exports.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import dask.config
from distributed.metrics import context_meter

from gpuspill.monitoring.prometheus import collector, families

if TYPE_CHECKING:
    from gpuspill.distributed.mapping import SpillStore

__all__ = ["LABELS", "WAIT", "Metrics", "export", "export_prefix", "heartbeat", "statistics_of_worker"]

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

#: Time that a task waited for admission. Not part of the totals: ``SpillBuffer`` has no such number.
WAIT = "gpuspill-wait"

#: Units that distributed's Prometheus collector accepts; it fails on others.
_UNITS = frozenset({"seconds", "bytes", "count"})


class Metrics:
    """Adds up what a manager reports, and passes it on to what is metered in the current context.

    Only what ``SpillBuffer`` has too; a store knows more about itself, see its statistics. What is metered is the task
    or the transfer on whose behalf the work was done. Thread-safe; called in the thread that did the work.
    """

    def __init__(self) -> None:
        # No lock that anybody waits for: a finaliser may use the store, and report, at any point of this.
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
        """Go on from the totals of a store that this one takes over from, so that no counter goes back."""
        self._reports.extend(totals.items())
        self._add_up()

    def totals(self) -> dict[tuple[str, str], float]:
        """Return a copy of the totals; without what is just being added by another thread, perhaps."""
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


def heartbeat(store: SpillStore) -> dict[str, float | None]:
    """Return the store's numbers as a flat dictionary that msgpack can write. O(1)."""
    found = store.statistics()
    return {name: getattr(found, name) for name in found.__slots__}  # asdict would copy each number deeply


def statistics_of_worker(dask_worker: Any) -> dict[str, float | None] | None:
    """Return the numbers of a worker's store now, None without one: for ``client.run``."""
    from gpuspill.distributed.mapping import SpillStore  # which imports this module

    data = dask_worker.data
    return heartbeat(data) if isinstance(data, SpillStore) else None


def export_prefix(who: str) -> str:
    """Return how the names of gpuspill's metrics for Prometheus begin; `who` is ``worker`` or ``scheduler``."""
    namespace = dask.config.get("distributed.dashboard.prometheus.namespace", default="dask")
    return "_".join(part for part in (namespace, who, "gpuspill") if part)


def export(worker: Any, store: SpillStore) -> None:
    """Show the numbers of a store on its worker's page ``/metrics``, as long as the store is alive.

    Does nothing where ``prometheus_client`` is not installed. The label ``worker`` holds the worker's name.
    """
    exporter = collector()
    if exporter is None:
        return
    prefix, name = export_prefix("worker"), str(worker.name)

    def families_of(store: SpillStore) -> Iterator[Any]:
        return families(prefix, {name: heartbeat(store)}, "worker")

    exporter.add(store, families_of)
