"""The statistics for Prometheus: of each worker, and of all at the scheduler.

distributed exports what ``prometheus_client.REGISTRY`` has, on the pages ``/metrics`` of workers
and schedulers. A collector there asks the stores and schedulers of this process when a page is
asked for, and costs nothing before.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from gpuspill.monitoring.catalogue import Metric, catalogue
from gpuspill.monitoring.samples import Numbers

__all__ = ["Collector", "collector", "exported_name", "families"]


def exported_name(metric: Metric, prefix: str) -> str:
    """Return the name that Prometheus gives a statistic: with unit, and ``_total``.

    Parameters
    ----------
    prefix
        ``dask_worker_gpuspill`` or ``dask_scheduler_gpuspill``.
    """
    name = "host_limit" if metric.name == "limit" else metric.name
    name = name.removesuffix("_nbytes").removesuffix("_seconds")
    # "spilled" is the gauge of the bytes that are on disk now, and a name may stand for one metric
    # only.
    name = name.replace("_total", "_cumulative")
    unit = {"bytes": "_bytes", "seconds": "_seconds", "count": ""}[metric.unit]
    return f"{prefix}_{name}{unit}{'_total' if metric.kind == 'counter' else ''}"


def families(prefix: str, rows: Mapping[str, Numbers], label: str | None) -> Iterator[Any]:
    """Yield a metric family for each statistic.

    Parameters
    ----------
    prefix
        Of the names.
    rows
        Statistics, by the value of the label.
    label
        Name of the label; None if there is one row and it needs none. Then totals are exported as
        gauges: they shrink when a worker leaves.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric in catalogue().values():
        counter = metric.kind == "counter" and label is not None
        name = exported_name(metric, prefix)
        help_text = (
            metric.explanation if counter or metric.kind == "gauge" else f"{metric.explanation} Workers here now."
        )
        made = CounterMetricFamily if counter else GaugeMetricFamily
        family = made(name, help_text, labels=[] if label is None else [label])
        for value, numbers in rows.items():
            number = numbers.get(metric.name)
            if number is not None:
                family.add_metric([] if label is None else [value], number)
        if family.samples:
            yield family


class Collector:
    """Exports the stores and the schedulers of this process, as long as they are alive.

    Thread-safe: each access is one operation that Python makes atomic.
    """

    def __init__(self) -> None:
        # By identity: to compare stores, which are mappings, means to read all that is in them.
        self._sources: dict[int, tuple[weakref.ref[Any], Callable[[Any], Iterator[Any]]]] = {}

    def add(self, owner: Any, source: Callable[[Any], Iterator[Any]]) -> None:
        """Export what ``source(owner)`` yields, as long as `owner` is alive."""
        ident, sources = id(owner), self._sources
        sources[ident] = weakref.ref(owner, lambda _: sources.pop(ident, None)), source

    def discard(self, owner: Any) -> None:
        """Stop exporting `owner`. Idempotent."""
        self._sources.pop(id(owner), None)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of all owners; families of the same name are one."""
        merged: dict[str, Any] = {}
        for ref, source in list(self._sources.values()):
            owner = ref()
            if owner is None:
                continue
            for family in source(owner):
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from merged.values()

    def describe(self) -> list[Any]:
        """Return nothing: what is exported depends on what is there."""
        return []


def collector() -> Collector | None:
    """Return the collector of this process; None where distributed does not export anything."""
    # distributed has imported it, if it is installed.
    return _registered() if "prometheus_client" in sys.modules else None


@cache  # Prometheus's registry belongs to the process; so does what is in it, however many workers there are
def _registered() -> Collector:
    from prometheus_client import REGISTRY

    made = Collector()
    REGISTRY.register(made)
    return made
