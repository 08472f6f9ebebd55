"""Facts about the machine that a figure depends on, and none that identify it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import dask

__all__ = ["environment"]

_PACKAGES = (
    "gpuspill",
    "dask",
    "distributed",
    "zict",
    "tornado",
    "numpy",
    "pandas",
    "pyarrow",
    "lz4",
    "xxhash",
)


def environment() -> dict[str, object]:
    """Return what a reader has to know to judge a figure.

    Returns
    -------
    dict
        Only text, numbers and dicts of them, so that it can be written as JSON. Neither host names
        nor paths. The load average tells whether the machine was doing something else when the
        benchmark began.
    """
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "distributed.worker.memory": {
            name: dask.config.get(f"distributed.worker.memory.{name}", None)
            for name in ("target", "spill", "pause", "terminate", "max-spill", "spill-compression")
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
