"""Facts about the machine that a figure depends on, and none that identify it."""

from __future__ import annotations

import mmap
import os
import platform
from importlib import metadata
from pathlib import Path

import dask

__all__ = ["back_memory", "environment"]

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

_HUGE_PAGE = 2**21


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


def back_memory(nbytes: int) -> int:
    """Touch free memory and give it back, so that the next run does not pay for that.

    A virtual machine whose host takes free pages back (free page reporting, on by default with a
    balloon device of recent kernels) gets each of them anew from the host at the first touch, at a
    fifth of the speed and less. Which run pays depends on what the run before it left behind, not
    on what is compared. Where nothing takes pages back this costs the time to clear them.

    Parameters
    ----------
    nbytes
        How much the run may use, page cache included. At most three quarters of what is free are
        touched.

    Returns
    -------
    int
        Bytes touched; 0 where the system has no private mappings.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return 0
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    length = min(nbytes, free * 3 // 4) // _HUGE_PAGE * _HUGE_PAGE
    if not length:
        return 0
    with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, length, mmap.PAGESIZE):
            mapped[offset] = 1
    return length


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
