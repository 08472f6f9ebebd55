"""Brings units to the device before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from gpuspill.core.line import LAST, Kind
from gpuspill.core.residency import Tier
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.tier.units import Unit

__all__ = ["Readahead"]

#: So many are brought, or wait for room for that, at a time: units, or several that are small.
_AT_MOST = 8
#: Units that are brought together, and their bytes, at most.
_TOGETHER = 256
_TOGETHER_NBYTES = 64 * 2**20


class Readahead:
    """Brings units to the device before they are needed.

    Parameters
    ----------
    verify
        Called before a unit is copied to the device; any thread, must not block.

    Attributes
    ----------
    headroom
        Bytes to have free besides when a unit is brought: for what the tasks that run until then
        return. A device that was filled to the brim ahead of them would make them wait.

    Notes
    -----
    Thread-safe. No method blocks: the copies are made on the manager's threads.
    """

    def __init__(self, manager: ProxifyManager, verify: Callable[[], None]) -> None:
        self.headroom = 0
        self._manager = manager
        self._verify = verify
        self._asked: dict[Unit, Admission] = {}

    def bring(self, values: Iterable[Iterable[Unit]]) -> int:
        """Ask for room for units that are needed in this order, and bring those that have it.

        Where there is no room it is made, by spilling, if what would leave first is needed later.
        Tasks that wait for room are served first.

        Returns
        -------
        int
            For how many units room was asked for.
        """
        begun = 0
        for group in self._groups(values):
            asked = self._ask(group)
            # One by one, if there is not room for all of them.
            for unit in () if asked or len(group) == 1 else group:
                if not self._ask([unit]):
                    return begun
                begun += 1
            if asked:
                begun += len(group)
            elif len(group) == 1:
                break
        return begun

    def _groups(self, values: Iterable[Iterable[Unit]]) -> Iterator[list[Unit]]:
        """Yield the units that are to be brought; small ones of one value together."""
        for units in values:
            group: list[Unit] = []
            nbytes = 0
            for unit in units:
                try:
                    if unit in self._asked or self._manager.tier_of(unit) is Tier.HOST:
                        continue
                except KeyError:
                    continue  # given up meanwhile
                if group and (nbytes + unit.nbytes > _TOGETHER_NBYTES or len(group) == _TOGETHER):
                    yield group
                    group, nbytes = [], 0
                group.append(unit)
                nbytes += unit.nbytes
            if group:
                yield group

    def _ask(self, group: Sequence[Unit]) -> bool:
        """Ask for room for some units. False if it is not worth it, or enough wait."""
        if len(set(self._asked.values())) >= _AT_MOST:
            return False
        nbytes = sum(unit.nbytes for unit in group)
        try:
            if not self._manager.uses.worth_making_room(group[0], nbytes + self.headroom):
                return False
            admission = self._manager.admission.admit(None, group, self.headroom, kind=Kind.AHEAD, order=LAST)
        except KeyError:
            return True  # one was given up meanwhile; the others are asked for the next time
        self._asked.update(dict.fromkeys(group, admission))
        admission.add_done_callback(partial(self._bring, group, admission))
        return True

    def needed_now(self, units: Iterable[Unit]) -> None:
        """Stop asking for room for units: a task has asked for it."""
        for unit in units:
            admission = self._asked.get(unit)
            if admission is not None and not admission.granted:
                admission.release()

    def _bring(self, group: Sequence[Unit], admission: Admission) -> None:
        """There is room for some units, or they are not wanted any more."""

        def end(_: object = None) -> None:
            for unit in group:
                self._asked.pop(unit, None)
            admission.release()

        if not admission.granted or admission.overrun:
            end()
            return
        self._verify()
        self._manager.admission.give_back_output(admission)
        self._manager.batch.materialize_later(admission).add_done_callback(end)
