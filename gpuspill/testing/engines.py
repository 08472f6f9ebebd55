"""An engine without threads: what it is given is done when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gpuspill.manager.threads import Urgency

__all__ = ["ManualEngine"]


class ManualEngine:
    """Stands in for :class:`gpuspill.manager.threads.Engine`.

    Parameters
    ----------
    spill_step, spill_threads, restore_threads, name
        As there.

    Attributes
    ----------
    wanted
        Whether spill threads were woken since they last found nothing to do.
    restores
        What restore threads would do next, the most urgent first.
    reaps
        What the reaper would do next.
    """

    def __init__(
        self, spill_step: Callable[[], float | None], *, spill_threads: int, restore_threads: int, name: str
    ) -> None:
        self._step = spill_step
        self.wanted = False
        self.restores: list[tuple[Urgency, Callable[[], None]]] = []
        self.reaps: deque[Callable[[], None]] = deque()
        self.spilling_here = False
        self._closed = False

    def wake(self) -> None:
        """Note that there may be something to spill."""
        self.wanted = True

    def submit(self, work: Callable[[], None], urgency: Urgency = Urgency.TASK) -> bool:
        """Keep `work` for a restore thread."""
        if self._closed:
            return False
        self.restores.append((urgency, work))
        self.restores.sort(key=lambda item: item[0])  # which leaves those of one urgency in order
        return True

    def reap(self, work: Callable[[], None]) -> None:
        """Keep `work` for the reaper."""
        self.reaps.append(work)

    def delete(self, work: Callable[[], None]) -> None:
        """Keep `work` for the thread that deletes records, which the same test method is."""
        self.reaps.append(work)

    # -- for the test ------------------------------------------------------------------------------

    def spill(self) -> float | None:
        """Be a spill thread for one unit of work; return what it returns."""
        outer, self.spilling_here = self.spilling_here, True
        try:
            pause = self._step()
        finally:
            self.spilling_here = outer
        self.wanted = pause is None
        return pause

    def spill_all(self, limit: int = 10_000) -> float:
        """Be a spill thread until it would sleep; return for how many seconds it would."""
        for _ in range(limit):
            pause = self.spill()
            if pause:
                return pause
        raise AssertionError(f"still at work after {limit} units")

    def restore(self) -> bool:
        """Be a restore thread for one piece of work; return whether there was one."""
        if not self.restores:
            return False
        _, work = self.restores.pop(0)
        work()
        return True

    def reap_all(self) -> None:
        """Be the reaper until there is nothing left."""
        while self.reaps:
            self.reaps.popleft()()

    def disown(self) -> None:
        """See :meth:`Engine.disown <gpuspill.manager.threads.Engine.disown>`."""
        self._closed = True

    def close(self, timeout: float = 0.0) -> None:
        """Do what is left; refuse more."""
        self._closed = True
        while self.restore():
            pass
        self.reap_all()
