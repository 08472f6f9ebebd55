"""What the worker's own tasks tell about the future: who reads what next.

A worker knows the inputs and the priorities of the tasks it was given. That is enough to evict
first what is needed last, and to read ahead what the next tasks need while the current ones
compute.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from distributed.metrics import context_meter

from gpuspill.core.policy import Order
from gpuspill.distributed.uses import Uses

__all__ = ["Hints", "Upcoming"]

logger = logging.getLogger("gpuspill")

#: ``upcoming(n)``: inputs of the `n` tasks that run next, in order.
Upcoming = Callable[[int], Iterable[Iterable[Hashable]]]

#: How many tasks to look at in one go when following begins: the event loop must not stand still
#: for it.
_CATCH_UP = 100

_BEGINS = frozenset({"waiting"})
_COMES_CLOSE = frozenset({"ready", "constrained", "executing"})
_SECEDES = "long-running"
_ENDS = frozenset({"memory", "error", "released", "rescheduled", "forgotten", "cancelled"})


class Hints:
    """A plugin of the worker that listens to the transitions of its tasks, once they matter.

    Parameters
    ----------
    uses
        Is told.
    needed
        Whether it may matter now what is needed next. While it does not, the tasks are not followed
        at all.
    backlog
        The tasks that have not ended yet and may read something; asked for when following begins,
        and gone through bit by bit.
    inputs
        ``inputs(key)``: priority and inputs of a task, or None if it has no inputs or is not known.
    depth
        How many of the next tasks to read ahead for; 0 for none.
    soon
        Calls a function on the event loop, soon.
    on_close
        Awaited when the worker is being closed.
    on_begin, on_secede
        Called when there is a new task, and with the key of a task that secedes.

    Attributes
    ----------
    transition
        Absent until the tasks are followed. distributed calls of a plugin what it has, several
        times a task: that would be a third of what a task costs while nothing has to be spilled,
        and is why this is no ``WorkerPlugin``.

    Notes
    -----
    On the event loop. distributed swallows what plugins raise, so this logs it itself, once.
    """

    name = "gpuspill-hints"
    transition: Callable[..., None]

    def __init__(
        self,
        uses: Uses,
        *,
        needed: Callable[[], bool],
        backlog: Callable[[], Iterator[Hashable]],
        inputs: Callable[[Hashable], tuple[Order, tuple[Hashable, ...]] | None],
        upcoming: Upcoming,
        depth: int,
        soon: Callable[[Callable[[], None]], object],
        on_close: Callable[[], Awaitable[None]],
        on_begin: Callable[[], None],
        on_secede: Callable[[Hashable], None],
    ) -> None:
        self._uses = uses
        self._needed = needed
        self._backlog = backlog
        self._inputs = inputs
        self._upcoming = upcoming
        self.depth = depth
        self._soon = soon
        self._on_close = on_close
        self._on_begin = on_begin
        self._on_secede = on_secede
        self._expected: dict[Hashable, tuple[Hashable, ...]] = {}
        self._following = False
        self._reading_ahead = False
        self._failed = False

    def setup(self, worker: Any) -> None:
        """Do nothing: attaching gpuspill to the worker makes it and tells it everything."""

    async def teardown(self, worker: Any) -> None:
        """The worker closes: its tasks are cancelled; soon its directory is removed.

        No thread may still be deleting files in there then.
        """
        vars(self).pop("transition", None)  # refers to this object
        await self._on_close()

    def follow_if_needed(self) -> bool:
        """Begin to follow the worker's tasks if it matters; whether they are followed."""
        if not self._following and self._needed():
            self.follow()
        return self._following

    def follow(self) -> None:
        """Begin to follow the worker's tasks. Idempotent."""
        if not self._following:
            self._following = True
            self.transition = self._transition
            self._soon(partial(self._catch_up, self._backlog()))

    def _transition(self, key: Hashable, start: str, finish: str, **kwargs: Any) -> None:
        """Note what a task is going to read, or has read."""
        try:
            if finish in _BEGINS:
                self._expect(key)
                self._on_begin()
            elif finish in _COMES_CLOSE:
                if self._uses.away and not self._reading_ahead and self.depth:
                    self._reading_ahead = True
                    # Once for all tasks of one message, and not in the context of whichever task is
                    # finishing.
                    self._soon(self._read_ahead)
            elif finish in _ENDS:
                self._forget(key)
            elif finish == _SECEDES:
                self._on_secede(key)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("could not follow task %r from %s to %s", key, start, finish)

    def _catch_up(self, backlog: Iterator[Hashable]) -> None:
        keys = list(islice(backlog, _CATCH_UP))
        for key in keys:
            self._expect(key)
        if keys:
            self._soon(partial(self._catch_up, backlog))

    def _expect(self, key: Hashable) -> None:
        self._forget(key)
        found = self._inputs(key)
        if found is None:
            return
        order, inputs = found
        self._expected[key] = inputs
        self._uses.expect(inputs, order, key)

    def _forget(self, key: Hashable) -> None:
        inputs = self._expected.pop(key, None)
        if inputs is not None:
            self._uses.drop(inputs, key)

    def _read_ahead(self) -> None:
        self._reading_ahead = False
        with context_meter.clear_callbacks():
            for inputs in self._upcoming(self.depth):
                self._uses.prefetch(inputs)
