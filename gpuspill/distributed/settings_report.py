"""The settings in force on a worker: for its log, and for clients."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace
from typing import Any

from dask.utils import format_bytes
from distributed import Client

from gpuspill.config import Settings
from gpuspill.config.jit_unspill import answer_once, answers
from gpuspill.config.origins import configured_files, origins
from gpuspill.distributed import internals
from gpuspill.distributed.attachment import Attachment
from gpuspill.distributed.devices import device_limit
from gpuspill.distributed.frames import ask_workers, require_pandas, wide
from gpuspill.errors import ConfigError, GpuspillError

Rows = dict[str, dict[str, object]]

__all__ = ["announce_settings", "connect", "here", "in_force", "of_cluster", "settings", "text"]

#: The worker's own: shown on its terminal, and what ``client.get_worker_logs()`` returns.
logger = logging.getLogger("distributed.worker")

#: Options in bytes.
_SIZES = frozenset({"host_limit", "max_spill", "buffer_pool", "device_memory_limit", "pinned_memory"})
#: What None means where it is not that there is no limit.
_NONE = {
    "spill_directory": "the worker's",
    "compression": "off",
    "device": "off",
    "gds": "off",
    "store": "files",
    "eviction_policy": "by use",
}


def in_force(worker: Any) -> Rows:
    """Return the options of a worker that has gpuspill.

    Returns
    -------
    dict
        By option: its ``value``, what it comes to here (``in_force``: bytes, a path, a name), and
        its ``origin``.
    """
    attachment: Attachment = worker._gpuspill
    store, options = attachment.store, attachment.settings
    device = None if store.tier is None else store.tier.device
    given = _shown(options)
    resolved = {
        **given,
        "host_limit": attachment.thresholds.limit,
        "max_spill": internals.max_spill(worker, options),
        "spill_directory": options.spill_directory or worker.local_directory,
        "device": None if device is None else type(device).__name__,
        "device_memory_limit": None if device is None else device_limit(options, device),
        "pinned_memory": None if store.tier is None else _pinned(options.pinned_memory, attachment.thresholds.limit),
        "follow_process_memory": attachment.thresholds.follows_process,
    }
    found = origins(options)
    return {name: {"value": value, "in_force": resolved[name], "origin": found[name]} for name, value in given.items()}


def _pinned(asked: float, host_limit: int | None) -> int:
    return asked if isinstance(asked, int) else int(asked * (host_limit or 0))


def _shown(options: Settings) -> dict[str, Any]:
    """Return options as values that mean something on other machines: of a function its name."""
    plain = asdict(replace(options, store=None, eviction_policy=None))
    return {**plain, "store": _name(options.store), "eviction_policy": _name(options.eviction_policy)}


def _name(function: object) -> str | None:
    if function is None:
        return None
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def announce_settings(worker: Any) -> None:
    """Log a worker's settings in force, and answer those of JIT-unspill."""
    lines = [
        f"  {name.replace('_', '-'):22} {text(name, row['in_force']):24} {row['origin']}"
        for name, row in in_force(worker).items()
    ]
    logger.info("gpuspill is attached to %s. Settings in force:\n%s", internals.called(worker), "\n".join(lines))
    for answer in answers():
        answer_once(answer)


def text(name: str, value: object) -> str:
    """Return the value of an option as it is shown."""
    if value is None:
        return _NONE.get(name, "no limit")
    return format_bytes(value) if name in _SIZES and isinstance(value, int) else str(value)


def settings(client: Any) -> Any:
    """Ask every worker for its settings in force.

    Parameters
    ----------
    client
        A ``distributed.Client``.

    Returns
    -------
    pandas.DataFrame
        A row for each worker and option (both are in the index), with the columns ``value`` (as
        given), ``in_force`` (what it comes to on this worker: bytes, a path, a name) and ``origin``
        (``"default"``, ``"keyword"``, ``"configuration"`` or the name of an environment variable).
        Workers without gpuspill have no rows; if that is all of them, a warning is logged, once.
        From an asynchronous client: an awaitable of it.

    Raises
    ------
    ImportError
        pandas is not installed here. ``gpuspill config ADDRESS`` shows the same without it.
    """
    require_pandas("gpuspill.settings")
    return ask_workers(client, settings_of_worker, _frame)


def settings_of_worker(dask_worker: Any) -> Rows | None:
    """Return :func:`in_force`, or None if the worker has no gpuspill; for ``client.run``."""
    return None if getattr(dask_worker, "_gpuspill", None) is None else in_force(dask_worker)


def here() -> list[tuple[str, Rows]]:
    """Return the settings that a worker started here would have, under a heading.

    Raises
    ------
    ConfigError
        An option cannot be used.
    """
    options = Settings.load()
    found = origins(options, configured_files())
    rows = {name: {"value": value, "in_force": value, "origin": found[name]} for name, value in _shown(options).items()}
    return [("Settings here; what is 'auto' is found out by each worker", rows)]


def of_cluster(scheduler: str) -> list[tuple[str, Rows]]:
    """Return the settings on a cluster's workers; equal ones share a heading.

    Parameters
    ----------
    scheduler
        Address, or path of a scheduler file.

    Returns
    -------
    list
        Headings and settings. Where workers under one heading have directories of their own, these
        stand in lines in the order of the workers. No settings for those without gpuspill.

    Raises
    ------
    ConfigError
        `scheduler` is neither an address nor the path of a scheduler file.
    GpuspillError
        There is no scheduler.
    """
    with connect(scheduler) as client:
        answers = client.run(settings_of_worker)
    groups: list[dict[str, Rows]] = []
    without = []
    for address, rows in answers.items():
        if rows is None:
            without.append(address)
            continue
        same = next((group for group in groups if _common(next(iter(group.values()))) == _common(rows)), None)
        if same is None:
            groups.append({address: rows})
        else:
            same[address] = rows
    shown = [(", ".join(group), _merged(list(group.values()))) for group in groups]
    return [*shown, (f"{', '.join(without)}: without gpuspill", {})] if without else shown


def connect(scheduler: str) -> Client:
    """Return a client of a cluster, by the scheduler's address or the path of a scheduler file.

    Raises
    ------
    ConfigError
        `scheduler` is neither.
    GpuspillError
        There is no scheduler.
    """
    if os.path.exists(scheduler):
        try:
            with open(scheduler) as file:
                scheduler = json.load(file)["address"]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{scheduler}: no scheduler file: {type(error).__name__}: {error}") from error
    elif "://" not in scheduler and not scheduler.rpartition(":")[2].isdigit():
        raise ConfigError(
            f"{scheduler}: no such file, and no address such as tcp://host:8786. Name a file that "
            "client.write_scheduler_file() or dask scheduler --scheduler-file wrote, or where the scheduler listens"
        )
    try:
        return Client(scheduler)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise GpuspillError(f"{scheduler}: cannot connect to a scheduler there: {error}") from error


def _common(rows: Rows) -> Rows:
    """Return the settings of a worker without its own directory, which no other has."""
    return {**rows, "spill_directory": {**rows["spill_directory"], "in_force": None}}


def _merged(alike: list[Rows]) -> Rows:
    directories = list(dict.fromkeys(str(rows["spill_directory"]["in_force"]) for rows in alike))
    rows = alike[0]
    return {**rows, "spill_directory": {**rows["spill_directory"], "in_force": "\n".join(directories)}}


def _frame(answers: dict[str, Rows | None]) -> Any:
    pd = require_pandas("gpuspill.settings")
    rows = {(address, name): row for address, found in answers.items() for name, row in (found or {}).items()}
    index = pd.MultiIndex.from_tuples(rows, names=["worker", "option"])
    return wide(pd.DataFrame(list(rows.values()), index=index, columns=["value", "in_force", "origin"], dtype=object))
