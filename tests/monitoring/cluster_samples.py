"""Samples of clusters that do not exist."""

from __future__ import annotations

from gpuspill.monitoring.catalogue import catalogue
from gpuspill.monitoring.samples import ClusterSample


def worker(**numbers: float | None) -> dict[str, float | None]:
    """Return the statistics of a worker: 0, but for what is given."""
    unknown = numbers.keys() - catalogue().keys()
    assert not unknown, unknown
    limits: dict[str, float | None] = {"limit": 1000, "disk_limit": None, "device_limit": None}
    return {name: numbers.get(name, limits.get(name, 0)) for name in catalogue()}


def run(*steps: dict[str, float | None], seconds: float = 1.0) -> list[ClusterSample]:
    """Return samples of one worker, so many seconds apart."""
    return [ClusterSample(100.0 + i * seconds, {"w": numbers}) for i, numbers in enumerate(steps)]
