"""Brings units to the device before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from gpuspill.core.line import LAST, Kind
from gpuspill.core.residency import Tier
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.tier.units import Unit

__all__ = ["Lookahead"]

#: So many units are brought, or wait for room for that, at a time.
_AT_MOST = 8


class Lookahead:
    """Brings units to the device before they are needed.

    Parameters
    ----------
    manager
        Manager of the device's memory.
    verify
        Called before a unit is copied to the device; any thread, must not block.

    Attributes
    ----------
    headroom
        Bytes to have free besides when a unit is brought: for what the tasks that run until then return. A device that
        was filled to the brim ahead of them would make them wait.

    Notes
    -----
    Thread-safe. No method blocks: the copies are made on the manager's threads.
    """

    def __init__(self, manager: ProxifyManager, verify: Callable[[], None]) -> None:
        self.headroom = 0
        self._manager = manager
        self._verify = verify
        self._asked: dict[Unit, Admission] = {}

    def bring(self, units: Iterable[Unit]) -> int:
        """Ask for room for units that are going to be needed in this order, and bring each when it has some.

        Where there is no room it is made, by spilling, if what would leave first is needed later. Tasks that wait for
        room are served first.

        Returns
        -------
        int
            For how many units room was asked for.
        """
        begun = 0
        for unit in units:
            if unit in self._asked:
                continue
            if len(self._asked) >= _AT_MOST:
                break
            try:
                if self._manager.tier_of(unit) is Tier.HOST:
                    continue
                if not self._manager.uses.worth_making_room(unit, unit.nbytes + self.headroom):
                    break
                admission = self._manager.admission.admit(None, [unit], self.headroom, kind=Kind.AHEAD, order=LAST)
            except KeyError:
                continue  # given up meanwhile
            self._asked[unit] = admission
            begun += 1
            admission.add_done_callback(partial(self._bring, unit, admission))
        return begun

    def needed_now(self, units: Iterable[Unit]) -> None:
        """Stop asking for room for units: somebody has asked for room for them on account of a task."""
        for unit in units:
            admission = self._asked.get(unit)
            if admission is not None and not admission.granted:
                admission.release()

    def _bring(self, unit: Unit, admission: Admission) -> None:
        """There is room for a unit, or it is not wanted any more."""

        def end(_: object = None) -> None:
            self._asked.pop(unit, None)
            admission.release()

        if not admission.granted or admission.overrun:
            end()
            return
        self._verify()
        self._manager.admission.give_back_output(admission)
        self._manager.batch.materialize_later(admission).add_done_callback(end)
