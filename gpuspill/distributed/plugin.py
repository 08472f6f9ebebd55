"""Switching gpuspill on in a running cluster, and by ``--preload``."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import WorkerPlugin

from gpuspill.config import Settings
from gpuspill.distributed.attach import attach
from gpuspill.distributed.dashboard import MonitorPlugin

__all__ = ["SpillPlugin", "set_up"]


class SpillPlugin(WorkerPlugin):
    """Attaches gpuspill to every worker, also to those that join later.

    >>> client.register_plugin(gpuspill.SpillPlugin(host_limit="2 GiB"))  # doctest: +SKIP

    Parameters
    ----------
    **options
        See :class:`~gpuspill.config.Settings`; checked here.

    Raises
    ------
    ConfigError
        An option cannot be used.

    Notes
    -----
    Workers may have data, in memory and spilled: it is taken over without being read. Registering
    it again changes the options. Unregistering it changes nothing for workers that have it: there
    is no way back while values are on disk.
    """

    name = "gpuspill"
    idempotent = False

    def __init__(self, **options: object) -> None:
        Settings.load(**options)
        self.options = options

    def setup(self, worker: Any) -> None:
        """Attach; called by distributed on the worker's event loop."""
        attach(worker, **self.options)

    def teardown(self, worker: Any) -> None:
        """Do nothing: the store works until the worker is closed."""


def set_up(server: Any) -> Awaitable[None] | None:
    """Do what :func:`gpuspill.dask_setup` promises."""
    if isinstance(server, Scheduler):
        plugin = MonitorPlugin()
        shown: Awaitable[None] = server.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)
        return shown
    attach(server)
    return None
