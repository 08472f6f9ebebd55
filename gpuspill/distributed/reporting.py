"""Where the numbers of a worker's store are shown.

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

from collections.abc import Iterator
from typing import Any

import dask.config

from gpuspill.distributed.mapping import SpillStore
from gpuspill.monitoring.prometheus import collector, families

__all__ = ["export", "export_prefix", "heartbeat", "statistics_of_worker"]


def heartbeat(store: SpillStore) -> dict[str, float | None]:
    """Return the store's numbers as a flat dictionary that msgpack can write. O(1)."""
    found = store.statistics()
    return {name: getattr(found, name) for name in found.__slots__}  # asdict would copy each number deeply


def statistics_of_worker(dask_worker: Any) -> dict[str, float | None] | None:
    """Return the numbers of a worker's store now, None without one: for ``client.run``."""
    data = dask_worker.data
    return heartbeat(data) if isinstance(data, SpillStore) else None


def export_prefix(who: str) -> str:
    """Return the prefix of gpuspill's Prometheus names, for a worker or the scheduler."""
    namespace = dask.config.get("distributed.dashboard.prometheus.namespace", default="dask")
    return "_".join(part for part in (namespace, who, "gpuspill") if part)


def export(worker: Any, store: SpillStore) -> None:
    """Show the numbers of a store on its worker's page ``/metrics``, as long as the store is alive.

    Does nothing where ``prometheus_client`` is not installed. The label ``worker`` holds the
    worker's name.
    """
    exporter = collector()
    if exporter is None:
        return
    prefix, name = export_prefix("worker"), str(worker.name)

    def families_of(store: SpillStore) -> Iterator[Any]:
        return families(prefix, {name: heartbeat(store)}, "worker")

    exporter.add(store, families_of)
