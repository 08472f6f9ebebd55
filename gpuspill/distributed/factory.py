"""From options to a working store: the one place where its parts are put together."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
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

__all__ = ["build_store", "check_settings"]

logger = logging.getLogger("gpuspill")

#: Where records go if nothing else is said, for messages.
LOCAL_DIRECTORY = (
    "the worker's local directory (--local-directory, temporary-directory; or set gpuspill.spill-directory)"
)


def build_store(settings: Settings, directory: str, *, name: str = "0") -> SpillStore:
    """Return a store without limits; they are set before the first value arrives.

    Parameters
    ----------
    directory
        The worker's local directory; records go below it unless the settings say otherwise.
    name
        Part of the names of its threads.

    Raises
    ------
    ConfigError
        The compression is unknown or not installed, the device or GPUDirect Storage cannot be had,
        or ``gpuspill.store`` failed or made no store, or ``gpuspill.eviction-policy`` no policy.
        Nothing is left open.
    StorageError
        The directory cannot be written to.
    """
    device = find_device(settings)
    policy = None if settings.eviction_policy is None else _checked(settings.eviction_policy)
    past_host = find_past_host(settings, device, settings.spill_directory or directory)
    metrics = Metrics()
    with ExitStack() as undo:
        files = _records(settings, settings.spill_directory or directory, metrics)
        undo.callback(files.close)
        tells = isinstance(files, FileStore | MappingStore)
        if settings.storage_delay:
            files = DelayedStore(files, settings.storage_delay)
        pool = BufferPool(settings.buffer_pool)

        def observe(label: str, value: float, unit: str, /) -> None:
            # Stores of gpuspill's own tell of disk I/O themselves, without the time in codecs and
            # checksums.
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
        undo.pop_all()
        undo.callback(manager.close)
        tier = None
        if device is not None:
            limit = device_limit(settings, device)
            noted = claim(device, limit)
            if noted is not None:
                undo.callback(noted.release)
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
        undo.pop_all()
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
    made = _made("store", settings.store, directory)
    if isinstance(made, Store):
        try:
            _check_calls("store", settings.store, made, Store)
        except ConfigError:
            made.close()
            raise
        return made
    if isinstance(made, MutableMapping):
        return MappingStore(made, metrics=metrics)
    raise ConfigError(
        f"gpuspill.store: {settings.store!r} returned {type(made).__module__}.{type(made).__qualname__}; expected a "
        "gpuspill.storage.base.Store or a MutableMapping[str, bytes]"
    )


def _made(setting: str, make: Callable[[Any], Any], argument: object) -> Any:
    """Return what a user's function makes. ConfigError, with the setting, if it raises."""
    try:
        return make(argument)
    except Exception as error:
        raise ConfigError(f"gpuspill.{setting}: {make!r} raised {type(error).__name__}: {error}") from error


def _check_calls(setting: str, make: Callable[[Any], Any], made: object, port: type) -> None:
    """Raise ConfigError if methods cannot be called as the port says."""
    for name in sorted(port.__abstractmethods__):  # type: ignore[attr-defined]
        expected = inspect.signature(getattr(port, name))
        parameters = [each.replace(annotation=each.empty) for each in expected.parameters.values()][1:]
        try:
            found = inspect.signature(getattr(made, name))
        except (TypeError, ValueError):
            continue  # not written in Python
        try:
            found.bind(
                *(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD),
                **{each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY},
            )
        except TypeError as error:
            shown = expected.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
            raise ConfigError(
                f"gpuspill.{setting}: {make!r} returned a {type(made).__qualname__} whose {name}() cannot be called as "
                f"{name}{shown}: {error}. See {port.__module__}.{port.__qualname__}.{name}"
            ) from None


def _checked(make: Callable[[Mapping[int, Any]], Any]) -> MakePolicy:
    """Return the function, which says so if it fails or what it made is no policy."""

    def checked(values: Mapping[int, HasSize]) -> EvictionPolicy:
        made = _made("eviction-policy", make, values)
        if not isinstance(made, EvictionPolicy):
            raise ConfigError(
                f"gpuspill.eviction-policy: {make!r} returned {type(made).__module__}.{type(made).__qualname__}; "
                "expected a gpuspill.core.policy.EvictionPolicy"
            )
        _check_calls("eviction-policy", make, made, EvictionPolicy)
        return made

    return checked


def check_settings(settings: Settings) -> None:
    """Raise ConfigError if no worker can use what is configured.

    That is what distributed says of compression, where that counts, and an eviction policy: one is
    made, for no values.
    """
    if settings.eviction_policy is not None:
        _checked(settings.eviction_policy)({})
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
