"""Warnings that a user can act on: clients are told of them, too.

``client.get_events("gpuspill")`` returns them, and ``client.subscribe_topic("gpuspill", handler)``
hears of each.
"""

from __future__ import annotations

import logging
import weakref
from functools import cache
from typing import Any, Final

from gpuspill.distributed.observing import TOPIC

__all__ = ["forward_warnings"]

_LOGGER: Final = "gpuspill"


class _Forwarder(logging.Handler):
    """Tells the scheduler of warnings, through one of the workers of this process.

    One, and not each: a record of Python's logging says nothing of the worker that it is about,
    beyond its text.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._workers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def add(self, worker: Any, loop: Any) -> None:
        self._workers[worker] = loop

    def emit(self, record: logging.LogRecord) -> None:
        for ref in self._workers.keyrefs():  # a copy in one step: other threads add workers meanwhile
            worker = ref()
            if worker is None or worker.status.name not in ("running", "paused"):
                continue
            loop = self._workers[worker]
            message = {"level": record.levelname, "message": record.getMessage()}
            try:
                # On the loop: warnings come from any thread, and the connection to the scheduler
                # belongs to the loop.
                loop.add_callback(worker.log_event, TOPIC, message)
            except RuntimeError:  # that loop was closed
                continue
            return


def forward_warnings(worker: Any, loop: Any) -> None:
    """Tell a cluster's clients of warnings here. `loop` is the worker's event loop.

    They are printed as distributed's own messages are, unless the program has set up logging: so
    `silence_logs` of a cluster, which sets the level of distributed's handlers, counts for them,
    too.
    """
    _forwarder().add(worker, loop)
    logger = logging.getLogger(_LOGGER)
    if not logging.getLogger().hasHandlers():
        for handler in logging.getLogger("distributed").handlers:
            logger.addHandler(handler)  # does nothing if it has it


@cache  # the logger belongs to the process, and so does what hangs on it, however many workers there are
def _forwarder() -> _Forwarder:
    made = _Forwarder()
    logging.getLogger(_LOGGER).addHandler(made)
    return made
