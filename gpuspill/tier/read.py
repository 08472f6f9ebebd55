"""Reading values back: what they have is brought to the device, and they are built on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from gpuspill.errors import DataLostError, ManagerClosed, answerable
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.tier.assemble import Builder, OthersInPlace
from gpuspill.tier.units import Skeleton

__all__ = ["Reader", "lost"]


class Reader:
    """Reads what skeletons stand for.

    Parameters
    ----------
    settle
        Lets go of what is not referenced any more.
    verify
        Called before something is copied to the device.

    Notes
    -----
    Thread-safe. What it raises and when it blocks is said in
    :class:`~gpuspill.tier.tier.DeviceTier`.
    """

    def __init__(
        self, manager: ProxifyManager, builder: Builder, settle: Callable[[], None], verify: Callable[[], None]
    ) -> None:
        self._manager = manager
        self._builder = builder
        self._settle = settle
        self._verify = verify

    def is_ready(self, skeleton: Skeleton) -> bool:
        """Whether all that it stands for is on the device."""
        try:
            return all(map(self._manager.is_resident, skeleton.units))
        except KeyError:
            return False

    def read(self, value: Any) -> Any:
        """Return the value of a skeleton; anything else itself. Blocks while it copies."""
        if type(value) is not Skeleton:
            return value
        self._forbid_inherited()
        self._settle()
        while True:
            with self._manager.admission.pin(value.units) as pins:
                if not self.is_ready(value):
                    self._verify()
                memories = self._manager.batch.materialize(pins)
                with suppress(OthersInPlace):
                    return self._builder.build(value, memories)

    def _forbid_inherited(self) -> None:
        if self._manager.inherited:
            raise ManagerClosed(
                "what is on a device cannot be used in a process that was forked from the one that put it there. Start "
                "the process by 'spawn' or 'forkserver', and hand it the value"
            )

    def read_all(self, values: Mapping[Hashable, Any], admission: Admission | None) -> dict[Hashable, Any]:
        """Return several values, by key. Blocks while something is copied."""
        if admission is not None and (admission.pids or admission.outputs):
            self._verify()
            try:
                # All at once, and out of what was promised.
                self._manager.batch.materialize(admission)
            except DataLostError as error:
                raise _named(error, values) from error
        found = {}
        for key, value in values.items():
            try:
                found[key] = self.read(value)
            except DataLostError as error:
                raise lost(error, key) from error
        return found

    def read_later(self, values: Mapping[Hashable, Any], admission: Admission | None) -> Future[dict[Hashable, Any]]:
        """Return a future of several values, by key, copied on the manager's threads."""
        result: Future[dict[Hashable, Any]] = Future()
        units = dict.fromkeys(unit for value in values.values() if type(value) is Skeleton for unit in value.units)
        if not units:
            result.set_result(dict(values))
            return result
        try:
            self._forbid_inherited()
        except ManagerClosed as error:
            result.set_exception(error)
            return result
        self._verify()
        # What arrived after it was admitted is not in the admission.
        covered = admission is not None and units.keys() <= admission.pids.keys()
        pins = None if covered else self._manager.admission.pin(units)
        held = dict(values)  # the skeletons, and so the units

        def build(source: Future[dict[Hashable, Any]]) -> None:
            with suppress(InvalidStateError):  # cancelled
                try:
                    memories = source.result()
                    result.set_result({key: self._builder.build(value, memories) for key, value in held.items()})
                except OthersInPlace:
                    self.read_later(held, None).add_done_callback(partial(_pass_on, result))
                except DataLostError as error:
                    result.set_exception(_named(error, held))
                except BaseException as error:
                    result.set_exception(answerable(error))
            if pins is not None:
                pins.release()

        def read_rest(_: object = None) -> None:
            assert pins is not None
            self._manager.batch.materialize_later(pins).add_done_callback(build)

        if admission is None:
            read_rest()
        else:
            # First all that was promised, and out of it. What fails there fails again below.
            self._manager.batch.materialize_later(admission).add_done_callback(build if pins is None else read_rest)
        return result


def _pass_on(result: Future[Any], source: Future[Any]) -> None:
    with suppress(InvalidStateError):  # cancelled
        error = source.exception()
        if error is None:
            result.set_result(source.result())
        else:
            result.set_exception(error)


def lost(error: DataLostError, key: Hashable) -> DataLostError:
    """Return the error under the key of a value that is partly lost."""
    return error.retold(f"what {key!r} has on the device is lost: {error.message}", key)


def _named(error: DataLostError, values: Mapping[Hashable, Any]) -> DataLostError:
    """Return the error under the key of the value that is lost."""
    for key, value in values.items():
        if type(value) is Skeleton and error.key in value.units:
            return lost(error, key)
    return error
