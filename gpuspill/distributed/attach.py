"""Attaching gpuspill to a worker: the one thing behind all ways of switching it on.

``data=gpuspill.data(...)``, ``--preload gpuspill``, ``gpuspill.Worker`` and
:class:`~gpuspill.distributed.plugin.SpillPlugin` all end in :func:`attach`, which may be called any
number of times.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from distributed.spill import SpillBuffer
from tornado.ioloop import IOLoop

from gpuspill.config import Settings
from gpuspill.distributed import internals
from gpuspill.distributed.attachment import Attachment
from gpuspill.distributed.dask_cuda import adopted_options
from gpuspill.distributed.factory import build_store, check_settings
from gpuspill.distributed.mapping import SpillStore
from gpuspill.distributed.notices import forward_warnings
from gpuspill.distributed.reporting import export, heartbeat
from gpuspill.distributed.settings_report import announce_settings
from gpuspill.distributed.worker import claims_of, spilling_class
from gpuspill.errors import ConfigError
from gpuspill.storage.directory import sweep_leftovers

__all__ = ["attach", "attach_owner", "create", "data"]

logger = logging.getLogger("gpuspill")

#: Settings that are built into a store; the others can be changed later.
_FIXED = (
    "spill_directory",
    "compression",
    "spill_threads",
    "restore_threads",
    "clean_copies",
    "buffer_pool",
    "device",
    "device_fence",
    "pinned_memory",
    "gds",
    "spill_timeout",
    "storage_delay",
    "store",
    "eviction_policy",
)


def attach(worker: Any, **options: object) -> SpillStore:
    """Make a worker keep its data in a store that spills, and never wait for it on the event loop.

    Parameters
    ----------
    worker
        A ``distributed.Worker``, running or not, in this process. Has to be called on its event
        loop.
    **options
        See :class:`~gpuspill.config.Settings`. On a worker that is attached already they take the
        place of the options in force, except for those that are built into its store.

    Returns
    -------
    SpillStore
        ``worker.data`` from now on. Values that the worker has are taken over; those that are
        spilled stay on disk until they are needed.

    Raises
    ------
    ConfigError
        An option cannot be used, the worker's data is of a kind that cannot be taken over, or this
        Python runs without its global lock. Nothing was changed.
    StorageError
        The spill directory cannot be used. Nothing was changed.

    Notes
    -----
    Does not await, so no task or transfer of the worker comes in between. Does no I/O but to make a
    directory.
    """
    attachment: Attachment | None = getattr(worker, "_gpuspill", None)
    if attachment is not None:
        _reconfigure(attachment, options)
        return attachment.store
    _check_interpreter()
    old = worker.memory_manager.data
    if isinstance(old, SpillStore):
        store, settings = old, old.settings
        if options:
            settings = Settings.load(**options)
    else:
        _check(old)
        settings = Settings.load(**{**adopted_options(old), **options})
        store = build_store(settings, worker.local_directory, name=str(worker.name))
    attachment = Attachment(worker, store, settings)
    store.manager.loop_thread = threading.get_ident()
    store.manager.slots.in_use = partial(internals.in_use, worker)
    if store.tier is not None:
        store.tier.manager.loop_thread = threading.get_ident()
    store.on_store = attachment.learn
    store.passes_on = partial(internals.passes_on, worker)
    store.on_lost = attachment.lost
    for name, executor in worker.executors.items():
        claims = claims_of(executor, store.parked)
        if claims is not None and name == "default":
            store.claims = claims
    if store is not old:
        _take_over(worker, old, store)
        internals.replace_data(worker, store)
    for hook, problem in internals.missing_hooks(type(worker)).items():
        logger.warning(
            "%s does not fit this version of distributed: %s. Spilled values may block the worker there.", hook, problem
        )
    worker._gpuspill = attachment
    try:
        internals.swap_class(worker, spilling_class(worker.__class__))
    except TypeError as error:
        logger.warning(
            "cannot hook into a worker of class %s: %s. Spilled values may block it wherever they are read.",
            type(worker).__qualname__,
            error,
        )
    internals.answer_who_holds(worker, store.holds)
    internals.announce(worker)
    worker.metrics["gpuspill"] = lambda _: heartbeat(store)
    export(worker, store)
    forward_warnings(worker, IOLoop.current())
    worker.plugins[attachment.hints.name] = attachment.hints
    attachment.hints.follow_if_needed()
    internals.add_periodic_callback(worker, "gpuspill", attachment.update)
    with suppress(RuntimeError):  # no loop is running yet
        attachment.in_background(partial(sweep_leftovers, settings.spill_directory or worker.local_directory))
    announce_settings(worker)
    return store


def _check_interpreter() -> None:
    """Raise ConfigError in a Python without a global lock: it makes single steps atomic."""
    has_lock: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)  # documented, from Python 3.13 on
    if not has_lock():
        raise ConfigError(
            "this Python runs without its global interpreter lock (free-threaded), which gpuspill does not support "
            "yet. Start it with PYTHON_GIL=1, or use another build of Python"
        )


def _check(old: Any) -> None:
    if old and not isinstance(old, dict | SpillBuffer):
        raise ConfigError(
            f"cannot take over the {len(old)} values of {type(old).__module__}.{type(old).__qualname__}, "
            "the data of this worker: gpuspill knows how to take them from a dict or from distributed's SpillBuffer "
            "only. Attach it before the worker has data, by data=gpuspill.data() or --preload gpuspill."
        )


def _take_over(worker: Any, old: Any, store: SpillStore) -> None:
    """Move what `old` holds. Values on disk stay where they are."""
    if isinstance(old, SpillBuffer):
        resident, spilled, files = internals.unpack_spill_buffer(old)
        store.metrics.add(old.cumulative_metrics)
    else:
        resident, spilled, files = dict(old), {}, {}
        if isinstance(old, dict):
            old.clear()
    manager = store.manager
    if spilled:
        assert store.records is not None
        for key, (nbytes, disk_nbytes) in spilled.items():
            manager.adopt(key, nbytes, store.records.adopt(files, key, disk_nbytes))
    for key in list(resident):
        store[key] = resident.pop(key)
    if spilled:
        logger.info("took over %d spilled values", len(spilled))


def _reconfigure(attachment: Attachment, options: Mapping[str, object]) -> None:
    if not options:
        return
    settings = Settings.load(**options)
    ignored = [name for name in _FIXED if getattr(settings, name) != getattr(attachment.settings, name)]
    if ignored:
        logger.warning("cannot change %s of a worker that has data; the rest was changed", ", ".join(ignored))
    attachment.configure(settings)


# -- data= ---------------------------------------------------------------------------------------


def data(**options: object) -> tuple[Callable[..., SpillStore], dict[str, Any]]:
    """Return what to give as ``data=`` to a cluster, nanny or worker.

    Parameters
    ----------
    **options
        See :class:`~gpuspill.config.Settings`; checked here, and read again from the configuration
        of each worker's process.

    Raises
    ------
    ConfigError
        An option cannot be used, no worker can know what
        ``distributed.worker.memory.spill-compression`` names, ``eviction_policy`` makes no policy
        (one is made to see), or this Python runs without its global lock.

    Examples
    --------
    >>> cluster = LocalCluster(memory_limit="4 GiB", data=gpuspill.data(host_limit="1 GiB"))  # doctest: +SKIP
    """
    _check_interpreter()
    check_settings(Settings.load(**options))
    return create, {"options": options}


def create(worker_local_directory: str, options: Mapping[str, object]) -> SpillStore:
    """Make the store of a worker that is being made, and attach it as soon as the worker exists.

    Called by distributed, which dictates the name of the first parameter.
    """
    store = build_store(Settings.load(**options), worker_local_directory)
    IOLoop.current().add_callback(attach_owner, store)
    return store


def attach_owner(store: SpillStore) -> None:
    """Attach the store to the worker that it was made for. Does nothing if that has been done."""
    worker = internals.find_worker(store)
    if worker is not None:
        attach(worker)
        return
    logger.warning(
        "no worker uses the store made by gpuspill.data(). If a worker does that could not be found, its data will "
        "never be spilled; call gpuspill.dask_setup(worker) on its event loop."
    )
