# mypy: disallow-untyped-calls=False
"""A cluster from the inside: whether its workers rest, and what it does if it hangs."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from distributed import LocalCluster, Worker

from gpuspill.bench.chaos.faults import running

__all__ = ["HELD", "describe", "examine"]

_STACKS = 1.0
"""Seconds for the workers to write their stacks."""


HELD = frozenset({"keys", "values", "host_nbytes", "disk_nbytes", "some keys", "fetches from"})
"""What there is of keys that a worker has: of those that :func:`examine` names."""


def examine(dask_worker: Worker) -> tuple[int, dict[str, object]]:
    """Return how many admissions overran the limit, and what keeps a worker from being at rest.

    Runs in the worker. Nothing does if no key is left and no byte is in memory, on disk, pinned or
    promised.
    """
    data = cast("Any", dask_worker.data)
    manager = getattr(data, "manager", None)
    if manager is None:
        return 0, {"keys": list(data)[:5]} if data else {}
    try:
        manager.validate()
    except AssertionError as error:
        return 0, {"validate": repr(error)}
    # What a task that failed had, and futures of its client, are in the frames of its error until a
    # collection.
    gc.collect()
    found = data.statistics()
    names = ("keys", "values", "host_nbytes", "disk_nbytes", "pinned_nbytes", "reserved_nbytes", "waiting")
    left = {name: getattr(found, name) for name in names if getattr(found, name)}
    if left:
        left["some keys"] = [repr(key) for key in list(data)[:5]]
        # What is promised to a transfer stays promised until distributed gives up connecting.
        left["fetches from"] = sorted(dask_worker.state.in_flight_workers)
    return found.overruns, left


def describe(cluster: LocalCluster, directory: Path) -> str:
    """Return the scheduler's tasks and workers, and the stacks of all threads of all workers.

    Parameters
    ----------
    cluster
        Whose.
    directory
        Where workers write their stacks to, see :class:`~gpuspill.bench.chaos.trouble.Troubled`.

    Notes
    -----
    Asks no worker anything, which might hang too, but sends each a signal. Reads the scheduler's
    state from another thread than its own: that of a cluster which does nothing.
    """
    return "\n".join([*_scheduler(cluster.scheduler), *_workers(cluster, directory), "", "this process", *_here()])


def _scheduler(scheduler: Any) -> Iterator[str]:
    for address, worker in list(scheduler.workers.items()):
        yield (
            f"worker {address}: {worker.status.name}, {len(worker.processing)} tasks processing, "
            f"{len(worker.has_what)} keys, last seen {time.time() - worker.last_seen:.1f} s ago"
        )
    for key, task in list(scheduler.tasks.items()):
        if task.state not in ("memory", "released", "forgotten"):
            where = "" if task.processing_on is None else f" on {task.processing_on.address}"
            yield f"task {key!r}: {task.state}{where}, waits for {[other.key for other in task.waiting_on or ()][:5]}"
            for other in list(task.dependencies)[:8]:
                yield f"    needs {other.key!r}: {other.state}, {[who.address for who in other.who_has or ()]}"


def _workers(cluster: LocalCluster, directory: Path) -> Iterator[str]:
    nannies = running(cluster)
    for nanny in nannies:
        with suppress(ProcessLookupError, TypeError):
            os.kill(cast("int", nanny.pid), signal.SIGCONT)
            os.kill(cast("int", nanny.pid), signal.SIGUSR1)
    time.sleep(_STACKS)  # nothing tells that a signal's handler is done
    for nanny in nannies:
        yield f"\nworker {nanny.name}, process {nanny.pid}, {nanny.worker_address}"
        path = directory / f"stacks-{nanny.pid}"
        yield path.read_text() if path.exists() else "no stacks: it was not ready yet"


def _here() -> Iterator[str]:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        yield file.read()
