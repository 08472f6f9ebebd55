# mypy: disallow-untyped-calls=False
"""The contestants: how each of them configures a cluster, everything else being the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dask
from distributed import Client, LocalCluster, Worker

import gpuspill
from gpuspill.bench.delay import delay_files
from gpuspill.bench.watch import WatchPlugin
from gpuspill.errors import ConfigError

__all__ = ["ARMS", "BASELINE", "SMALL_WORKERS", "Arm", "ClusterShape", "open_cluster", "parse_arms"]

BASELINE = "stock"
"""The arm that the others are compared with."""

SMALL_WORKERS: Mapping[str, object] = {
    "distributed.p2p.comm.buffer": "16 MiB",
    "distributed.p2p.storage.buffer": "16 MiB",
    "distributed.nanny.pre-spawn-environ.ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""What has to be set to shuffle on workers of a gigabyte or less, whatever their store.

The shuffle's own buffers are made for larger ones (a worker is killed for the gigabyte it may keep
in them), and Arrow keeps freed memory.
"""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The part of a cluster's configuration that all arms share.

    Parameters
    ----------
    workers, threads
        How many workers, and threads in each.
    memory_limit
        Limit per worker, bytes. Arms that do not spill ignore it.
    processes
        Whether each worker is a process of its own, under a nanny, or lives in the calling process.
    directory
        Where workers put their files; dask's own choice by default.
    """

    workers: int = 1
    threads: int = 2
    memory_limit: int = 2**30
    processes: bool = True
    directory: str | None = None


def _no_data(delay: float) -> None:
    return None


def _gpuspill_data(delay: float) -> object:
    return gpuspill.data(storage_delay=delay) if delay else gpuspill.data()


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant.

    Parameters
    ----------
    name, summary
        What it is called on the command line, and in one line what it is.
    spills
        Whether memory is limited at all.
    data
        Makes what the workers get as ``data=``, given the seconds by which to slow down every file
        operation; ``None`` is distributed's own choice.
    config
        Dask settings in force while the cluster starts and runs.
    """

    name: str
    summary: str
    spills: bool = True
    data: Callable[[float], object] = _no_data
    config: Mapping[str, object] = field(default_factory=dict)

    def cluster_arguments(self, shape: ClusterShape, delay: float = 0.0) -> dict[str, Any]:
        """Return the keyword arguments of a ``LocalCluster`` of this arm."""
        return {
            "n_workers": shape.workers,
            "threads_per_worker": shape.threads,
            "processes": shape.processes,
            "memory_limit": shape.memory_limit if self.spills else 0,
            "local_directory": shape.directory,
            "data": self.data(delay),
            # No dashboard, and no quarrel about its usual port.
            "dashboard_address": ":0",
            "scheduler_kwargs": {"dashboard": False},
        }


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("stock", "distributed's own spilling, as it comes"),
        Arm("gpuspill", "data=gpuspill.data()", data=_gpuspill_data),
        Arm(
            "nospill",
            "no memory limit: what the job takes if memory is no concern",
            spills=False,
            config={
                "distributed.worker.memory.target": False,
                "distributed.worker.memory.spill": False,
                "distributed.worker.memory.pause": False,
                "distributed.worker.memory.terminate": False,
            },
        ),
    )
}


def parse_arms(names: str | Sequence[str], known: Mapping[str, Arm] = ARMS) -> list[Arm]:
    """Turn ``"stock,gpuspill"`` into arms, in that order.

    Parameters
    ----------
    names
        Separated by commas, or one by one.
    known
        What there is to choose among.

    Raises
    ------
    ConfigError
        If a name is unknown, named twice, or none is given.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    listed = [name for name in listed if name]
    if not listed:
        raise ConfigError(f"arms: none given; choose among {', '.join(known)}")
    for name in listed:
        if name not in known:
            raise ConfigError(f"arms: {name!r} is unknown; choose among {', '.join(known)}")
        if listed.count(name) > 1:
            raise ConfigError(f"arms: {name!r} is named twice; use --repeat to run an arm more than once")
    return [known[name] for name in listed]


@contextmanager
def open_cluster(
    arm: Arm,
    shape: ClusterShape,
    *,
    watch: WatchPlugin | None = None,
    delay: float = 0.0,
    silence: int | None = None,
) -> Iterator[Client]:
    """Start a fresh cluster of an arm and connect to it; both are closed at the end.

    Parameters
    ----------
    arm, shape
        What to start.
    watch
        The plugin that measures each worker; none by default.
    delay
        Seconds by which to slow down every file operation of the workers' stores.
    silence
        Level below which the cluster's log messages are dropped; dask's own choice by default.

    Yields
    ------
    Client
        Connected to a cluster all of whose workers have arrived.
    """
    arguments = arm.cluster_arguments(shape, delay)
    if silence is not None:
        arguments["silence_logs"] = silence
    with (
        dask.config.set(dict(arm.config)),
        _level_kept(),
        LocalCluster(**arguments) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(shape.workers, timeout=60)
        if silence is not None:
            client.run(_silence, silence)
        if delay:
            client.run(_slow_down, delay)
        if watch is not None:
            client.register_plugin(watch)
        yield client


@contextmanager
def _level_kept() -> Iterator[None]:
    # Workers without a process of their own are silenced in the caller's, which goes on afterwards.
    logger = logging.getLogger("gpuspill")
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)


def _silence(level: int) -> None:
    # ``silence_logs`` is about distributed's own messages only.
    logging.getLogger("gpuspill").setLevel(level)


def _slow_down(delay: float, dask_worker: Worker) -> None:
    delay_files(dask_worker.data, delay)
