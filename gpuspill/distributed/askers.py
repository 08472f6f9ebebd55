"""Those on a worker who ask for room: how urgent they are, and which of them may wait for others.

The core serves the most urgent first (:mod:`gpuspill.core.line`). A task is as urgent as
distributed says. A transfer is as urgent as the most urgent task that waits for it, and that may
change while it waits for room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

from gpuspill.core.policy import Order
from gpuspill.distributed.task_inputs import TaskInputs, granted
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission

__all__ = ["Askers"]


class Askers:
    """The tasks that were admitted and have not ended, and the transfers that wait for room.

    Parameters
    ----------
    urgency
        ``urgency(keys, source)``: how urgent it is that the values of some keys come from another
        worker.
    soon
        Calls a function on the event loop, soon.

    Notes
    -----
    Used on the event loop, but for :meth:`may_wait`.
    """

    def __init__(
        self,
        manager: ProxifyManager,
        urgency: Callable[[Collection[Hashable], str], Order],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._manager = manager
        self._urgency = urgency
        self._soon = soon
        self._looking = False
        self.jobs: dict[Hashable, TaskInputs] = {}
        self._transfers: dict[Admission, tuple[Collection[Hashable], str]] = {}

    # -- transfers ---------------------------------------------------------------------------------

    async def wait(self, admission: Admission, keys: Collection[Hashable], source: str) -> None:
        """Wait for room for a transfer of `keys`. It may become more urgent meanwhile."""
        self._transfers[admission] = keys, source
        try:
            await granted(admission)
        finally:
            del self._transfers[admission]

    def look_again(self) -> None:
        """There are new tasks: see soon, once for all, whether transfers are more urgent."""
        if self._transfers and not self._looking:
            self._looking = True
            self._soon(self._look)

    def _look(self) -> None:
        self._looking = False
        for admission, (keys, source) in self._transfers.items():
            if not admission.granted:
                self._manager.admission.improve(admission, self._urgency(keys, source))

    # -- tasks -------------------------------------------------------------------------------------

    def seceded(self, key: Hashable) -> None:
        """A task left its thread to others. It may wait for tasks that it made."""
        job = self.jobs.get(key)
        if job is not None:
            job.secede()

    def may_wait(self, key: Hashable | None) -> None:
        """A task has a client, so it may wait for other tasks. Any thread."""
        jobs = list(self.jobs.values()) if key is None else [self.jobs.get(key)]
        for job in jobs:
            if job is not None:
                job.detach()
