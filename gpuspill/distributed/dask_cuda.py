"""What gpuspill knows of dask-cuda beyond its documented interface. All of it stands here.

Written for dask-cuda 26.06 to 26.10. :func:`missing_parts` names what an installed release does not
have any more; ``tests/dask_cuda/test_parts.py`` fails with those names. Nothing here imports
dask-cuda before it is called.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any

import dask.config

__all__ = [
    "SWITCH",
    "adopted_options",
    "bind",
    "cluster_class",
    "device_limit_option",
    "missing_parts",
    "switched_off",
    "why_no_devices",
    "worker_command",
]

#: dask-cuda's own switch for machines without devices: it then touches none.
SWITCH = "DASK_CUDA_TEST_DISABLE_DEVICE_SPECIFIC"


def cluster_class() -> type | None:
    """Return ``dask_cuda.LocalCUDACluster``; None where dask-cuda cannot be imported."""
    try:
        found: type = importlib.import_module("dask_cuda").LocalCUDACluster
    except ImportError:
        return None
    return found


def worker_command() -> Any | None:
    """Return the command behind ``dask cuda worker``; None without dask-cuda."""
    try:
        return importlib.import_module("dask_cuda.cli").worker
    except ImportError:
        return None


def bind(cluster: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return by name the arguments with which a cluster class of dask-cuda is called.

    Raises
    ------
    TypeError
        There are too many, or one is there twice.
    """
    given = inspect.signature(cluster.__init__).bind_partial(None, *args, **kwargs).arguments  # type: ignore[misc]
    given = dict(list(given.items())[1:])
    return {**given.pop("kwargs", {}), **given}


def why_no_devices(visible: object = None) -> str | None:
    """Return why dask-cuda cannot start workers for devices on this machine; None if it can.

    Parameters
    ----------
    visible
        What was given as ``CUDA_VISIBLE_DEVICES``; None for that of the environment.
    """
    try:
        utils = importlib.import_module("dask_cuda.utils")
    except ImportError as error:
        return f"dask-cuda cannot be imported ({error})"
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible or str(visible).strip() == "-1"):
        return "CUDA_VISIBLE_DEVICES hides all devices"
    if switched_off():
        return None
    try:
        if utils.get_gpu_count():
            return None
    except Exception as error:  # NVML's own errors, and whatever a driver that is half there makes of it
        return f"no CUDA device was found (NVML: {error})"
    return "no CUDA device was found"


def switched_off() -> bool:
    """Whether dask-cuda is told not to touch devices."""
    return int(os.environ.get(SWITCH) or "0") != 0


def device_limit_option(limit: object) -> object:
    """Translate dask-cuda's ``device_memory_limit`` into the option of gpuspill.

    The words differ: dask-cuda's ``"default"`` is gpuspill's ``"auto"`` (0.8 of the device), and
    its ``"auto"`` is *no limit*.
    """
    if isinstance(limit, str):
        word = limit.strip().lower()
        if word in ("default", "auto"):
            return "auto" if word == "default" else None
    return limit


def adopted_options(data: object) -> dict[str, object]:
    """Return options of a worker's ``DeviceHostFile`` that gpuspill was not given.

    So ``--device-memory-limit`` of ``dask cuda worker`` counts however gpuspill comes in.
    """
    if type(data).__name__ != "DeviceHostFile" or not type(data).__module__.startswith("dask_cuda"):
        return {}
    absent = object()
    if dask.config.get("gpuspill.device-memory-limit", absent) is not absent:
        return {}
    # A dict if there is no limit.
    return {"device_memory_limit": getattr(getattr(data, "device_buffer", None), "n", None)}


#: Keywords of dask-cuda's cluster and parameters of its command that gpuspill reads or sets.
_KEYWORDS = (
    "CUDA_VISIBLE_DEVICES",
    "n_workers",
    "threads_per_worker",
    "memory_limit",
    "device_memory_limit",
    "protocol",
)
_PARAMETERS = ("device_memory_limit", "memory_limit", "worker_class", "preload")


def missing_parts() -> dict[str, str]:
    """Return which parts of dask-cuda are not as expected, and what was found.

    Raises
    ------
    ImportError
        dask-cuda is not installed.
    """
    found: dict[str, str] = {}
    cluster = importlib.import_module("dask_cuda").LocalCUDACluster
    parameters = inspect.signature(cluster.__init__).parameters
    for name in _KEYWORDS:
        if name not in parameters:
            found[f"LocalCUDACluster({name}=)"] = f"the keywords are {', '.join(parameters)}"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        found["LocalCUDACluster(**kwargs)"] = "it takes no other keywords, so no data="
    command = importlib.import_module("dask_cuda.cli").worker
    names = [getattr(parameter, "name", None) for parameter in getattr(command, "params", ())]
    for name in _PARAMETERS:
        if name not in names:
            found[f"dask_cuda.cli.worker, parameter {name}"] = f"the parameters are {names}"
    if not callable(getattr(command, "callback", None)):
        found["dask_cuda.cli.worker.callback"] = "it is not a click command with a callback"
    if not callable(getattr(importlib.import_module("dask_cuda.utils"), "get_gpu_count", None)):
        found["dask_cuda.utils.get_gpu_count"] = "it does not exist"
    if SWITCH not in inspect.getsource(importlib.import_module("dask_cuda.worker_common")):
        found[SWITCH] = "dask_cuda.worker_common does not look at it"
    if not hasattr(importlib.import_module("dask_cuda.device_host_file"), "DeviceHostFile"):
        found["dask_cuda.device_host_file.DeviceHostFile"] = "it does not exist"
    return found
