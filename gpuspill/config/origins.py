"""Where the value of an option comes from.

Found out by comparison and not by book-keeping: what differs from what the configuration of this
process says must have been given in code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

import dask.config

from gpuspill.config import Settings
from gpuspill.errors import ConfigError

__all__ = ["configured_files", "origins"]

_PREFIX = "DASK_GPUSPILL__"


def origins(settings: Settings, files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Say for each option where its value comes from.

    Parameters
    ----------
    settings
        Options that are in force.
    files
        From :func:`configured_files`, to have the names of files.

    Returns
    -------
    dict
        By option: ``"default"``, ``"keyword"``, the name of an environment variable, or
        ``"configuration"`` (or the path of the file).
    """
    configured = _named(dask.config.get("gpuspill", None))
    variables = {
        name[len(_PREFIX) :].lower(): (name, dask.config.interpret_value(text))
        for name, text in os.environ.items()
        if name.startswith(_PREFIX)
    }
    found = {}
    for field in fields(Settings):
        name, value = field.name, getattr(settings, field.name)
        if name in variables and _says(name, variables[name][1], value):
            found[name] = variables[name][0]
        elif name in configured and _says(name, configured[name], value):
            found[name] = (files or {}).get(name, "configuration")
        else:
            found[name] = "default" if name not in configured and value == field.default else "keyword"
    return found


def configured_files() -> dict[str, str]:
    """Return the configuration file that decides each option. Reads all of dask's."""
    found: dict[str, str] = {}
    for path, content in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        found.update(dict.fromkeys(_named(content.get("gpuspill")), str(path)))
    return found


def _named(options: object) -> dict[str, object]:
    if not isinstance(options, Mapping):
        return {}
    return {str(name).replace("-", "_"): value for name, value in options.items()}


def _says(name: str, raw: object, value: object) -> bool:
    try:
        return bool(getattr(Settings.load(**{name: raw}), name) == value)
    except ConfigError:
        return False
