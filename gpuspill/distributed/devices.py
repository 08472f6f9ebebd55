"""The worker's device, if it has one, and how much of it may be used."""

from __future__ import annotations

import logging

from gpuspill.config import Settings
from gpuspill.device.past_host import PastHost
from gpuspill.device.port import Device
from gpuspill.errors import ConfigError

__all__ = ["device_limit", "find_device", "find_past_host"]

logger = logging.getLogger("gpuspill")

#: Part of the device's memory that values may take, if nothing else is said; as dask-cuda has it.
DEFAULT_FRACTION = 0.8


def find_device(settings: Settings) -> Device | None:
    """Return the device that gets a tier of its own; None if none does.

    Raises
    ------
    ConfigError
        The device that was asked for cannot be had.
    """
    if settings.device is None:
        return None
    if settings.device == "simulated":
        from gpuspill import simulated  # needs NumPy, which nothing else here does

        return simulated.device()
    from gpuspill.device.cuda import find as cuda  # imports nothing of CUDA unless there is a driver

    try:
        device = cuda.device()
        from gpuspill.device.cuda.device import GpuDevice

        if isinstance(device, GpuDevice):
            device.fence_by_stream = settings.device_fence == "stream"
        return device
    except ConfigError as error:
        if settings.device == "cuda":
            raise ConfigError(f"gpuspill.device: found 'cuda', but {error}") from error
        if not isinstance(error, cuda.NoDevice):
            logger.warning("No tier for a device: %s.", error)
        return None


def find_past_host(settings: Settings, device: Device | None, directory: str) -> PastHost | None:
    """Return what moves bytes between a device and files past host memory; None if nothing does.

    Parameters
    ----------
    device
        The device that has a tier.
    directory
        Where records go.

    Raises
    ------
    ConfigError
        It was asked for and cannot be had.
    """
    if settings.gds is None:
        return None
    try:
        if device is None or settings.device == "simulated":
            raise ConfigError("no CUDA device has a tier here")
        from gpuspill.device.cuda.kvikio_files import kvikio_files

        return PastHost(kvikio_files(directory))
    except ConfigError as error:
        if settings.gds == "on":
            raise ConfigError(
                f"gpuspill.gds: found 'on', but {error}. Set it to auto to use GPUDirect Storage where it is there"
            ) from error
        logger.debug("No GPUDirect Storage: %s.", error)
        return None


def device_limit(settings: Settings, device: Device) -> int | None:
    """Return the bytes of values to keep on the device; None for no limit."""
    limit = DEFAULT_FRACTION if settings.device_memory_limit == "auto" else settings.device_memory_limit
    return int(limit * device.memory_info().total) if isinstance(limit, float) else limit
