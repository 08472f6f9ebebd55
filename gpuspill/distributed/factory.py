"""From options to a working store: the one place where its parts are put together."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import dask.config
from distributed.protocol.compression import compressions

from gpuspill.config import Settings, codec_names
from gpuspill.core.policy import EvictionPolicy, HasSize, MakePolicy
from gpuspill.device.shared_memory import shared_memory
from gpuspill.distributed.device_claims import claim
from gpuspill.distributed.devices import device_limit, find_device, find_past_host
from gpuspill.distributed.mapping import SpillStore
from gpuspill.distributed.metrics import Metrics
from gpuspill.distributed.serialization import DaskSerializer, DeviceFamilies
from gpuspill.distributed.sizes import measure
from gpuspill.distributed.takeover import AdoptingStore
from gpuspill.errors import ConfigError
from gpuspill.manager import ProxifyManager
from gpuspill.storage.base import Store
from gpuspill.storage.buffers import BufferPool
from gpuspill.storage.codecs import CodecChooser
from gpuspill.storage.files import FileStore
from gpuspill.storage.filesystems import IN_MEMORY, file_system_type
from gpuspill.storage.mapping import MappingStore
from gpuspill.storage.patient import PatientStore
from gpuspill.storage.processors import Processors
from gpuspill.storage.wrappers import DelayedStore
from gpuspill.tier import DeviceTier

__all__ = ["build_store", "check_compression"]

logger = logging.getLogger("gpuspill")

#: Where records go if nothing else is said, for messages.
LOCAL_DIRECTORY = (
    "the worker's local directory (--local-directory, temporary-directory; or set gpuspill.spill-directory)"
)


def build_store(settings: Settings, directory: str, *, name: str = "0") -> SpillStore:
    """Return a store without limits for host and disk; who knows the worker sets them before the first value arrives.

    Parameters
    ----------
    settings
        Options.
    directory
        The worker's local directory; records go below it unless the settings say otherwise.
    name
        Part of the names of its threads.

    Raises
    ------
    ConfigError
        The compression is unknown or not installed, the device or GPUDirect Storage cannot be had, or what
        ``gpuspill.store`` made is no store, or ``gpuspill.eviction-policy`` no policy. What making them raises is
        passed on.
    StorageError
        The directory cannot be written to.
    """
    device = find_device(settings)
    policy = None if settings.eviction_policy is None else _checked(settings.eviction_policy)
    past_host = find_past_host(settings, device, settings.spill_directory or directory)
    metrics = Metrics()
    files = _records(settings, settings.spill_directory or directory, metrics)
    tells = isinstance(files, FileStore | MappingStore)
    if settings.storage_delay:
        files = DelayedStore(files, settings.storage_delay)
    pool = BufferPool(settings.buffer_pool)

    def observe(label: str, value: float, unit: str, /) -> None:
        # Stores of gpuspill's own tell of disk I/O themselves, without the time in codecs and checksums.
        if not (tells and label.startswith("disk-")):
            metrics(label, value, unit)

    records = AdoptingStore(files, metrics)
    manager = ProxifyManager(
        limit=None,
        store=PatientStore(records),
        serializer=DaskSerializer(),
        sizeof=measure,
        allocate=pool.allocate,
        observer=observe,
        shared=shared_memory,
        keep_clean=settings.clean_copies,
        policy=policy,
        spill_threads=settings.spill_threads,
        restore_threads=settings.restore_threads,
        spill_timeout=settings.spill_timeout,
        name=name,
    )
    tier = None
    if device is not None:
        limit = device_limit(settings, device)
        noted = claim(device, limit)
        tier = DeviceTier(
            device,
            manager,
            limit=limit,
            closed=None if noted is None else noted.release,
            families=DeviceFamilies(),
            allocate=pool.allocate,
            past_host=past_host,
            pinned_limit=settings.pinned_memory,
            policy=policy,
            spill_threads=settings.spill_threads,
            restore_threads=settings.restore_threads,
            spill_timeout=settings.spill_timeout,
            name=name,
        )
    return SpillStore(manager, metrics, settings=settings, pool=pool, records=records, tier=tier)


def _warn_of_memory(directory: str) -> None:
    kind = file_system_type(directory)
    if kind in IN_MEMORY:
        logger.warning(
            "the spill directory %s is on a file system in memory (%s), so spilling frees none. Name a directory on a "
            "disk by gpuspill.spill-directory, or for all of dask by temporary-directory",
            directory,
            kind,
        )


def _records(settings: Settings, directory: str, metrics: Metrics) -> Store:
    """Return where records go: files in `directory`, or what the settings name."""
    if settings.store is None:
        compression, setting = _compression(settings)
        _warn_of_memory(directory)
        return FileStore(
            directory,
            named="gpuspill.spill-directory" if settings.spill_directory else LOCAL_DIRECTORY,
            codecs=CodecChooser(compression, compressions, named=setting, busy=Processors().busy),
            metrics=metrics,
            sweep=False,  # takes as long as there are leftovers; attaching does it in the background
        )
    made = settings.store(directory)
    if isinstance(made, Store):
        return _readable(made, settings.store)
    if isinstance(made, MutableMapping):
        return MappingStore(made, metrics=metrics)
    raise ConfigError(
        f"gpuspill.store: {settings.store!r} returned {type(made).__module__}.{type(made).__qualname__}; expected a "
        "gpuspill.storage.base.Store or a MutableMapping[str, bytes]"
    )


def _readable(store: Store, made_by: object) -> Store:
    """Return the store, unless it reads by an older contract, which would fail when the first value comes back."""
    try:
        inspect.signature(store.read).bind(None, None, lend=None)
    except TypeError as error:
        store.close()
        raise ConfigError(
            f"gpuspill.store: {made_by!r} returned a {type(store).__qualname__} whose read() cannot be called as "
            f"read(receipt, allocate, lend=None): {error}. See gpuspill.storage.base.Store.read"
        ) from None
    return store


def _checked(make: Callable[[Mapping[int, Any]], Any]) -> MakePolicy:
    """Return the function, which says so if what it made is no policy."""

    def checked(values: Mapping[int, HasSize]) -> EvictionPolicy:
        made = make(values)
        if not isinstance(made, EvictionPolicy):
            raise ConfigError(
                f"gpuspill.eviction-policy: {make!r} returned {type(made).__module__}.{type(made).__qualname__}; "
                "expected a gpuspill.core.policy.EvictionPolicy"
            )
        return made

    return checked


def check_compression(settings: Settings) -> None:
    """Raise ConfigError if what distributed says of compression, where that counts, can mean nothing on any worker."""
    value, setting = _compression(settings)
    if value not in (None, False, "auto") and value not in codec_names():
        names = ", ".join(map(repr, sorted(codec_names())))
        raise ConfigError(f"{setting}: expected None, 'auto', or one of {names}; found {value!r}")


def _compression(settings: Settings) -> tuple[Any, str]:
    """Return which compression is wanted, and the setting that says so."""
    if settings.compression == "auto":
        setting = "distributed.worker.memory.spill-compression"
        return dask.config.get(setting), setting
    return settings.compression, "gpuspill.compression"
