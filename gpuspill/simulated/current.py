"""Which simulated device is meant when none is named.

The current device is that of the context (:func:`use`), else the process's default, which is made when it is first
needed, from dask's configuration:

===================================== ======= ===========================================
setting                               default meaning
===================================== ======= ===========================================
``gpuspill.simulated.memory``         1 GiB   capacity
``gpuspill.simulated.bandwidth``      none    bytes a second, each direction on its own
``gpuspill.simulated.latency``        0       seconds each copy takes besides
``gpuspill.simulated.kernel-latency`` 0       seconds each computation takes
``gpuspill.simulated.checks``         true    poison what is not there yet
===================================== ======= ===========================================
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import dask.config
from dask.utils import parse_bytes, parse_timedelta

from gpuspill.device.simulated import SimulatedDevice
from gpuspill.errors import ConfigError

__all__ = ["configure", "device", "use"]

_current: ContextVar[SimulatedDevice | None] = ContextVar("gpuspill-simulated-device", default=None)


def _bandwidth(value: Any) -> float | None:
    return None if value in (None, False, "", "none", "None") else float(parse_bytes(value))


def _seconds(value: Any) -> float:
    return float(parse_timedelta(value) or 0.0)


def _switch(value: Any) -> bool:
    found = str(value).lower()
    if found not in ("1", "true", "yes", "on", "0", "false", "no", "off", "none"):
        raise ValueError("expected true or false")
    return found in ("1", "true", "yes", "on")


_PARSERS: Final[Mapping[str, Any]] = {
    "memory": parse_bytes,
    "bandwidth": _bandwidth,
    "latency": _seconds,
    "kernel_latency": _seconds,
    "checks": _switch,
}


def _parse(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    parsed = {}
    for name, value in options.items():
        known = name.replace("-", "_")
        if known not in _PARSERS:
            raise ConfigError(f"{where}{name}: no such option. There are: {', '.join(sorted(_PARSERS))}.")
        try:
            parsed[known] = _PARSERS[known](value)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"{where}{name}: found {value!r}, which cannot be used: {error}") from None
    return parsed


class _Default:
    """The process's default device, made when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: SimulatedDevice | None = None

    def get(self) -> SimulatedDevice:
        with self._lock:
            if self._device is None:
                options = dask.config.get("gpuspill.simulated", None) or {}
                if not isinstance(options, Mapping):
                    raise ConfigError(f"gpuspill.simulated: expected a mapping of options, found {options!r}")
                try:
                    self._device = SimulatedDevice(**_parse(options, "gpuspill.simulated."))
                except ValueError as error:
                    raise ConfigError(f"gpuspill.simulated: {error}") from None
            return self._device


# One a process, as there is one set of devices a process; everything else of a device is in the device.
_default: Final = _Default()


def device() -> SimulatedDevice:
    """Return the current device: that of the context (:func:`use`), else the process's default.

    Raises
    ------
    ConfigError
        The default device cannot be made from the settings.
    """
    return _current.get() or _default.get()


@contextmanager
def use(chosen: SimulatedDevice) -> Iterator[SimulatedDevice]:
    """Make a device the current one in this context (thread or coroutine) until the end of the block."""
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def configure(**options: Any) -> SimulatedDevice:
    """Change the current device, and return it. What is not given stays.

    Parameters
    ----------
    **options
        `memory` (bytes), `bandwidth` (bytes a second, None for no limit), `latency` and `kernel_latency` (seconds),
        `checks`; in any form that a configuration file may have (``"100 MB"``, ``"1 ms"``).

    Raises
    ------
    ConfigError
        An option is unknown or its value cannot be used, or `memory` is less than what is allocated. Nothing was
        changed.
    """
    changed = device()
    try:
        changed.configure(**_parse(options, ""))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return changed
