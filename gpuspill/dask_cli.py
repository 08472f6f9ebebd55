"""``dask gpuspill``, and a flag of ``dask cuda worker``: added when gpuspill is installed.

``dask`` imports this module at start, as it does everything that is registered in the entry point
group ``dask_cli``. The flag ``--enable-jit-unspill`` is then added to dask-cuda's own command,
which does not have it since 26.06. Not reached by what starts without the ``dask`` command:
``dask-cuda-worker`` and ``python -m dask_cuda.cli``.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import click
import dask.config

from gpuspill.cli import gpuspill
from gpuspill.config import Settings
from gpuspill.config.jit_unspill import SHARED_FILESYSTEM, answer_once, jit_unspill
from gpuspill.distributed.dask_cuda import SWITCH, device_limit_option, why_no_devices, worker_command
from gpuspill.errors import ConfigError

__all__ = ["add_flag", "gpuspill"]

logger = logging.getLogger("gpuspill")

_FLAG = "enable_jit_unspill"


def add_flag(command: Any | None) -> bool:
    """Give a command ``--enable-jit-unspill/--disable-jit-unspill``; return whether it was missing.

    Parameters
    ----------
    command
        dask-cuda's ``worker``. None, and one that has the flag, are left alone.
    """
    if command is None or any(parameter.name == _FLAG for parameter in command.params):
        return False
    flag = click.Option(
        ["--enable-jit-unspill/--disable-jit-unspill"],
        default=None,
        help="""Let gpuspill spill: device to host to disk, object by object, without stopping the worker. Takes
        --device-memory-limit and --memory-limit. By default what jit-unspill (DASK_JIT_UNSPILL) says in dask's
        configuration, else disabled.""",
    )
    shared = click.Option(["--shared-filesystem/--no-shared-filesystem"], default=None, hidden=True)
    names = [parameter.name for parameter in command.params]
    at = names.index("worker_class") if "worker_class" in names else len(names)
    command.params[at:at] = [flag, shared]
    command.callback = _with_flag(command.callback)
    return True


def _with_flag(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def run(
        *, enable_jit_unspill: bool | None, shared_filesystem: bool | None, device_memory_limit: Any, **options: Any
    ) -> Any:
        limit = device_limit_option(device_memory_limit)
        # By default what is configured counts.
        chosen = {} if limit == "auto" else {"device_memory_limit": limit}
        try:
            if not (jit_unspill() if enable_jit_unspill is None else enable_jit_unspill):
                return callback(device_memory_limit=device_memory_limit, **options)
            settings = Settings.load(**chosen)  # a worker would log what is wrong and go on without gpuspill
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        if shared_filesystem:
            answer_once(f"--shared-filesystem changes nothing: {SHARED_FILESYSTEM}")
        if options.get("worker_class") is None:
            options["worker_class"] = "gpuspill.Worker"
        else:
            options["preload"] = (*(options.get("preload") or ()), "gpuspill")
        if settings.device == "simulated":
            device_memory_limit = _do_without_devices(device_memory_limit)
        elif why := why_no_devices():
            raise click.ClickException(
                f"{why}, and dask-cuda starts no worker without one. For one that spills from host memory to disk: "
                "dask worker ADDRESS --preload gpuspill. For a simulated device: gpuspill.device: simulated "
                "(DASK_GPUSPILL__DEVICE=simulated)"
            )
        with dask.config.set({f"gpuspill.{name.replace('_', '-')}": value for name, value in chosen.items()}):
            return callback(device_memory_limit=device_memory_limit, **options)

    return run


def _do_without_devices(limit: object) -> object:
    """Keep dask-cuda from looking for absent devices; return the limit to tell it."""
    why = why_no_devices()
    if why is None and os.environ.get(SWITCH) in (None, "", "0"):
        return limit
    if why is not None:
        logger.warning("%s: starting worker(s) with simulated devices.", why)
        os.environ[SWITCH] = "1"
        if os.environ.get("CUDA_VISIBLE_DEVICES", "").strip() in ("", "-1"):
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    return 0  # it would ask the device what the default comes to


add_flag(worker_command())
