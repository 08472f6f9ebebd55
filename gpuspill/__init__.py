"""Spilling for Dask workers (device, host, disk) that never stops the worker.

Public names only. They are loaded when first used, so that importing :mod:`gpuspill` costs next to
nothing and needs neither a GPU library nor a running event loop.

This module is also the preload: ``dask worker ... --preload gpuspill``, and for the dashboard's
page about all workers ``dask scheduler --preload gpuspill``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gpuspill.errors import ConfigError, DataLostError, GpuspillError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from gpuspill.cluster import LocalCUDACluster
    from gpuspill.config import Settings
    from gpuspill.distributed.attach import data
    from gpuspill.distributed.dashboard import MonitorPlugin
    from gpuspill.distributed.frames import statistics
    from gpuspill.distributed.observing import report
    from gpuspill.distributed.parking import proxify, unproxify
    from gpuspill.distributed.plugin import SpillPlugin
    from gpuspill.distributed.settings_report import settings
    from gpuspill.distributed.story import story
    from gpuspill.distributed.worker_class import Nanny, Worker

__all__ = [
    "ConfigError",
    "DataLostError",
    "GpuspillError",
    "LocalCUDACluster",
    "MonitorPlugin",
    "Nanny",
    "Settings",
    "SpillPlugin",
    "Worker",
    "__version__",
    "dask_setup",
    "data",
    "proxify",
    "report",
    "settings",
    "statistics",
    "story",
    "unproxify",
]

try:
    __version__ = version("gpuspill")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

#: Where each public name lives.
_HOMES = {
    "LocalCUDACluster": "gpuspill.cluster",
    "MonitorPlugin": "gpuspill.distributed.dashboard",
    "Nanny": "gpuspill.distributed.worker_class",
    "Settings": "gpuspill.config",
    "SpillPlugin": "gpuspill.distributed.plugin",
    "Worker": "gpuspill.distributed.worker_class",
    "data": "gpuspill.distributed.attach",
    "proxify": "gpuspill.distributed.parking",
    "report": "gpuspill.distributed.observing",
    "settings": "gpuspill.distributed.settings_report",
    "statistics": "gpuspill.distributed.frames",
    "story": "gpuspill.distributed.story",
    "unproxify": "gpuspill.distributed.parking",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def dask_setup(server: Any) -> Awaitable[None] | None:
    """Attach to a worker, or show stores on a scheduler; distributed's preload calls it.

    A plain function and not a click command: preloads all get the same arguments, and those of
    other preloads (dask-cuda passes one) would be unknown options here. What it returns for a
    scheduler has to be awaited.
    """
    from gpuspill.distributed.plugin import set_up

    return set_up(server)
