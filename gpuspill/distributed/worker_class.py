"""Classes to be named in a configuration."""

from __future__ import annotations

from typing import Any

import distributed

from gpuspill.distributed.attach import attach
from gpuspill.distributed.worker import spilling_class

__all__ = ["Nanny", "Worker"]


class Worker(spilling_class(distributed.Worker)):  # type: ignore[misc]
    """A ``distributed.Worker`` that spills by gpuspill, with the settings of dask's configuration.

    For ``dask worker --worker-class gpuspill.Worker`` and
    ``LocalCluster(worker_class=gpuspill.Worker)``. Takes what ``distributed.Worker`` takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("data", dict)  # replaced before it can hold anything
        super().__init__(*args, **kwargs)
        attach(self)


class Nanny(distributed.Nanny):
    """A ``distributed.Nanny`` whose worker is a :class:`Worker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("worker_class") is None:
            kwargs["worker_class"] = Worker
        super().__init__(*args, **kwargs)
