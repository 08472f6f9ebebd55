"""Make gpuspill the store of every Worker, in this process and in those that it starts.

Python imports a module of this name by itself at start, before anything else and in every process,
so it reaches tests that make a Worker, a Nanny, a LocalCluster or call ``dask worker``. Nothing of
distributed is imported earlier than it would be without: the change is made when
``distributed.worker`` is.

Done only if ``SUITE_ARM`` is set to something else than ``stock``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _set_default_store(worker_module: ModuleType) -> None:
    original: Callable[..., None] = worker_module.Worker.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, data: Any = None, **kwargs: Any) -> None:
        if data is None:  # what a test asks for by itself stays
            import gpuspill

            data = gpuspill.data()
        original(self, *args, data=data, **kwargs)

    worker_module.Worker.__init__ = __init__


class _AfterImport(MetaPathFinder):
    """Runs a function on a module just after it has been executed."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SUITE_ARM", "stock") != "stock":
    sys.meta_path.insert(0, _AfterImport("distributed.worker", _set_default_store))
