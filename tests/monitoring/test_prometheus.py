"""The numbers as Prometheus reads them."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest

from gpuspill.monitoring.catalogue import catalogue
from gpuspill.monitoring.prometheus import Collector, exported_name, families
from tests.monitoring.cluster_samples import worker

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


class Owner:
    """Must not be compared, as a store must not: it would read all that is in it."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise AssertionError("compared")


def exported(collector: Collector) -> dict[str, list[tuple[dict[str, str], float]]]:
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    text = prometheus.generate_latest(registry).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_names_are_valid_and_of_one_metric_each():
    names = [exported_name(metric, "dask_worker_gpuspill") for metric in catalogue().values()]
    bases = [name.removesuffix("_total") for name in names]
    assert len(set(bases)) == len(bases), "OpenMetrics allows a name to stand for one metric only"
    assert all(name.replace("_", "").isalnum() and name == name.lower() for name in names)
    for metric, name in zip(catalogue().values(), names, strict=True):
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.unit == "count" or f"_{metric.unit}" in name


def test_every_statistic_is_exported_with_its_help_and_the_worker_as_a_label():
    owner, collector = Owner(), Collector()
    collector.add(owner, lambda _: families("w", {"one": worker(spills=3)}, "worker"))
    found = exported(collector)
    assert found["w_spills_total"] == [({"worker": "one"}, 3.0)]
    assert found["w_host_limit_bytes"] == [({"worker": "one"}, 1000.0)]
    assert "w_disk_limit_bytes" not in found  # there is none
    assert len(found) == sum(number is not None for number in worker().values())


def test_two_workers_of_one_process_are_one_family():
    owners, collector = [Owner(), Owner()], Collector()
    for name, owner in zip("ab", owners, strict=True):
        collector.add(owner, lambda _, name=name: families("w", {name: worker(keys=1)}, "worker"))
    assert exported(collector)["w_keys"] == [({"worker": "a"}, 1.0), ({"worker": "b"}, 1.0)]


def test_without_a_label_totals_may_shrink():
    owner, collector = Owner(), Collector()
    collector.add(owner, lambda _: families("s", {"": worker(spills=3)}, None))
    found = exported(collector)
    assert found["s_spills_total"] == [({}, 3.0)]


def test_a_store_that_is_gone_is_not_exported():
    owner, collector = Owner(), Collector()
    collector.add(owner, lambda _: families("w", {"one": worker()}, "worker"))
    del owner
    gc.collect()
    assert exported(collector) == {}


def test_what_was_discarded_is_not_exported():
    owner, collector = Owner(), Collector()
    collector.add(owner, lambda _: families("w", {"one": worker()}, "worker"))
    collector.discard(owner)
    collector.discard(owner)
    assert exported(collector) == {}


def test_grafana_asks_for_metrics_that_are_exported():
    dashboard = json.loads((Path(__file__).parents[2] / "docs/grafana/gpuspill.json").read_text())
    exported_names = {exported_name(metric, "dask_worker_gpuspill") for metric in catalogue().values()}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    asked = {name for expression in expressions for name in re.findall(r"dask_\w+", expression)}
    assert len(asked) > 15
    assert asked <= exported_names
    units = {"bytes": "_bytes", "Bps": "_bytes_total"}
    for panel in dashboard["panels"]:
        ending = units.get(panel["fieldConfig"]["defaults"]["unit"])
        for target in panel["targets"]:
            names = re.findall(r"dask_\w+", target["expr"])
            assert ending is None or all(name.endswith(ending) for name in names), panel["title"]
