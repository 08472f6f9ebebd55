"""Spilling for Dask workers (device, host, disk) that never stops the worker.

Public names only. They are loaded when first used, so that importing :mod:`gpuspill` costs next to nothing and needs
neither a GPU library nor a running event loop.

This module is also the preload: ``dask worker ... --preload gpuspill``.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gpuspill.errors import ConfigError, DataLostError, GpuspillError

if TYPE_CHECKING:
    from distributed import Worker as _Worker

    from gpuspill.cluster import LocalCUDACluster
    from gpuspill.config import Settings
    from gpuspill.distributed.attachment import data
    from gpuspill.distributed.metrics import statistics
    from gpuspill.distributed.parking import proxify, unproxify
    from gpuspill.distributed.plugin import SpillPlugin
    from gpuspill.distributed.settings_report import settings
    from gpuspill.distributed.worker import Nanny, Worker

__all__ = [
    "ConfigError",
    "DataLostError",
    "GpuspillError",
    "LocalCUDACluster",
    "Nanny",
    "Settings",
    "SpillPlugin",
    "Worker",
    "__version__",
    "dask_setup",
    "data",
    "proxify",
    "settings",
    "statistics",
    "unproxify",
]

try:
    __version__ = version("gpuspill")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

#: Where each public name lives.
_HOMES = {
    "LocalCUDACluster": "gpuspill.cluster",
    "Nanny": "gpuspill.distributed.worker",
    "Settings": "gpuspill.config",
    "SpillPlugin": "gpuspill.distributed.plugin",
    "Worker": "gpuspill.distributed.worker",
    "data": "gpuspill.distributed.attachment",
    "proxify": "gpuspill.distributed.parking",
    "settings": "gpuspill.distributed.settings_report",
    "statistics": "gpuspill.distributed.metrics",
    "unproxify": "gpuspill.distributed.parking",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def dask_setup(worker: _Worker) -> None:
    """Attach to `worker`; called by distributed's preload machinery.

    A plain function and not a click command: preloads all get the same arguments, and those of other preloads
    (dask-cuda passes one) would be
    unknown options here.
    """
    from gpuspill.distributed.attachment import attach

    attach(worker)
