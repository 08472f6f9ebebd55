"""Finding out whether there is a GPU, and opening it. Imports no GPU library before."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

from gpuspill.device.cuda.driver import CudaDriver, NoDevice
from gpuspill.device.port import Device
from gpuspill.errors import ConfigError

if TYPE_CHECKING:
    from gpuspill.device.cuda.device import GpuDevice

__all__ = ["CudaDriver", "NoDevice", "device", "missing_libraries"]

logger = logging.getLogger("gpuspill")

#: What has to be installed: module, and what to install to have it.
_LIBRARIES: Final = {"cuda.bindings": "cuda-bindings"}


# -- finding it ------------------------------------------------------------------------------------


def _driver_installed() -> bool:
    """Whether the system has NVIDIA's driver. Initialises nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _hidden() -> bool:
    """Whether the process is told to see no device."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def missing_libraries() -> dict[str, str]:
    """Return the libraries that are not installed: module → what to install."""

    def installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package it is in
            return False

    return {name: package for name, package in _LIBRARIES.items() if not installed(name)}


class _Opened:
    """The process's device, opened when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: GpuDevice | None = None

    def get(self) -> GpuDevice:
        with self._lock:
            if self._device is None:
                self._device = _open()
            return self._device


def _open() -> GpuDevice:
    if _hidden():
        raise NoDevice("CUDA_VISIBLE_DEVICES hides all devices from this process")
    if not _driver_installed():
        raise NoDevice("there is no NVIDIA driver on this machine (libcuda.so.1 was not found)")
    missing = missing_libraries()
    if missing:
        install = ", ".join(f"{name} (install {package})" for name, package in missing.items())
        raise ConfigError(
            f"this machine has a driver for NVIDIA GPUs, but no {install}, so nothing is spilled from a GPU. "
            "Set gpuspill.device to none if nothing should be"
        )
    from gpuspill.device.cuda.device import (
        GpuDevice,  # needs NumPy, as every library does whose arrays could be on a GPU
    )

    try:
        driver = CudaDriver()
    except ImportError as error:
        raise ConfigError(f"a library for GPUs is installed and cannot be imported: {error}") from error
    logger.info("gpuspill spills from %s", driver.description)
    return GpuDevice(driver)


# One a process, as there is one set of devices a process: workers that share the process share
# streams and staging.
_opened: Final = _Opened()


def device() -> Device:
    """Return the GPU of this process: the first that it sees, as dask-cuda gives them.

    Raises
    ------
    NoDevice
        There is none, or no driver.
    ConfigError
        There is one that cannot be used: a library is missing (the message says which), the driver
        does not start or is too old, or the device has no memory of its own.
    """
    return _opened.get()
