"""Which simulated device is meant when none is named.

The current device is that of the context (:func:`use`), else the process's default, which is made
when it is first needed, from dask's configuration:

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
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import dask.config

from gpuspill.config import simulated_options
from gpuspill.errors import ConfigError
from gpuspill.simulated.device.device import SimulatedDevice

__all__ = ["configure", "device", "use"]

_current: ContextVar[SimulatedDevice | None] = ContextVar("gpuspill-simulated-device", default=None)


class _Default:
    """The process's default device, made when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: SimulatedDevice | None = None

    def get(self) -> SimulatedDevice:
        with self._lock:
            if self._device is None:
                options = simulated_options(dask.config.get("gpuspill.simulated", None))
                try:
                    self._device = SimulatedDevice(**options)
                except ValueError as error:
                    raise ConfigError(f"gpuspill.simulated: {error}") from None
            return self._device


# One a process, as there is one set of devices a process; everything else of a device is in the
# device.
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
    """Make a device current in this context until the end of the block."""
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
        `memory` (bytes), `bandwidth` (bytes a second, None for no limit), `latency` and
        `kernel_latency` (seconds), `checks`; in any form that a configuration file may have (``"100
        MB"``, ``"1 ms"``).

    Raises
    ------
    ConfigError
        An option is unknown or its value cannot be used, or `memory` is less than what is
        allocated. Nothing was changed.
    """
    changed = device()
    try:
        changed.configure(**simulated_options(options, ""))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return changed
