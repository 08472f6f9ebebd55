"""What a manager should hold and deliver: a dictionary, against which it is checked."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from gpuspill.core.residency import State
from gpuspill.errors import DataLostError, ReadInterrupted, StorageError, answerable
from gpuspill.manager.ports import Encoded, PickleSerializer
from gpuspill.manager.slots import Restore
from gpuspill.testing.interruptions import Interruptions
from gpuspill.testing.managers import ManagerKit
from gpuspill.testing.values import Made
from gpuspill.testing.walks import pick

__all__ = ["KEYS", "ManagerModel"]

KEYS = "abcdef"


def _decoded(value: Any) -> Any:
    if not isinstance(value, Encoded):
        return value
    try:
        return PickleSerializer().loads(value.header, [memoryview(bytearray(frame)) for frame in value.frames])
    except GeneratorExit as error:
        raise answerable(error) from error


@dataclass(eq=False)
class _Asked:
    future: Future[Any]
    expected: dict[str, Made]


class ManagerModel:
    """What a manager should hold and deliver.

    Parameters
    ----------
    kit
        The manager, and what it works with.
    interruptions
        Account for errors.

    Attributes
    ----------
    values
        What each key should have.
    tasks
        What running tasks have in hand, and are in the middle of changing.
    """

    def __init__(self, kit: ManagerKit, interruptions: Interruptions) -> None:
        self.kit = kit
        self._interruptions = interruptions
        self.values: dict[str, Made] = {}
        self.tasks: list[tuple[Made, Any]] = []
        kit.manager.slots.in_use = self._in_use
        self._asked: list[_Asked] = []

    def _in_use(self, keys: Collection[Hashable]) -> bool:
        return any(self.values.get(str(key)) is made for made, _ in self.tasks for key in keys)

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare keys, and what was delivered since."""
        manager = self.kit.manager
        manager.validate()
        assert set(manager) == self.values.keys()
        assert len(manager) == len(self.values)
        for key in KEYS:
            assert (key in manager) == (key in self.values)
        for asked in [asked for asked in self._asked if asked.future.done()]:
            self._asked.remove(asked)
            self._deliver(asked)

    def _deliver(self, asked: _Asked) -> None:
        try:
            values = {key: _decoded(value) for key, value in asked.future.result(0).items()}
        except CancelledError:
            return
        except (StorageError, DataLostError, ZeroDivisionError, ReadInterrupted) as error:
            self.explain(error, asked.expected)
            return
        assert values.keys() == asked.expected.keys()
        for key, value in values.items():
            self.compare(asked.expected[key], value, ever=True)

    def compare(self, made: Made, value: Any, *, ever: bool = False) -> None:
        """Compare a value with what was stored, or what it has `ever` been since."""
        assert made.fits(value, ever=ever), f"{made} came back as {value!r}"

    def explain(self, error: Exception, expected: Mapping[str, Made]) -> None:
        """Some of what was asked for must account for the error."""
        if isinstance(error, DataLostError):
            key = error.key
            assert isinstance(key, str)
            assert repr(key) in str(error)
            assert expected[key].lost, f"nothing was done to {key}: {error}"
        elif isinstance(error, ZeroDivisionError):
            assert any(made.kind == "unloadable" for made in expected.values())
        elif isinstance(error, ReadInterrupted) and isinstance(error.__cause__, GeneratorExit):
            assert any(made.kind == "deadly" for made in expected.values())
        else:
            assert self._interruptions.failures, f"the disk did not fail: {error}"

    # -- asking ------------------------------------------------------------------------------------

    def ask(self, future: Future[Any], expected: dict[str, Made]) -> None:
        """Note what was asked for, and what should come."""
        self._asked.append(_Asked(future, expected))

    def cancel(self, i: int) -> None:
        """Give up something that was asked for."""
        if self._asked:
            pick(self._asked, i).future.cancel()

    @property
    def waiting(self) -> bool:
        """Whether something that was asked for has not come."""
        return bool(self._asked)

    def get(self, key: str) -> Any:
        """Read a key and compare; return the value, or None for a known reason."""
        made = self.values[key]
        if self.in_hand(key):
            return None
        restore = self._restore(key)
        try:
            value = self.kit.manager.get(key)
        except (StorageError, DataLostError, ZeroDivisionError, ReadInterrupted) as error:
            self.explain(error, {key: made})
            return None
        finally:
            if restore is not None:
                assert restore.done(), f"{key}, which was in line to be read, was not taken over"
        self.compare(made, value)
        return value

    # -- looking -----------------------------------------------------------------------------------

    def known(self, i: int) -> str | None:
        """Return one of the keys there are."""
        return pick(sorted(self.values), i) if self.values else None

    def expected(self, *keys: str) -> dict[str, Made]:
        """Return what those of some keys have that there are."""
        return {key: self.values[key] for key in keys if key in self.values}

    def state(self, key: str) -> State:
        """Return the state of what a key has."""
        return self.kit.state(key)

    def returning(self, key: str) -> bool:
        """Whether what a key has is being brought back, or in line for that."""
        return self._restore(key) is not None

    def in_hand(self, key: str) -> bool:
        """Whether this same thread is in the middle of bringing back what a key has."""
        restore = self._restore(key)
        return restore is not None and restore.reader is not None

    def _restore(self, key: str) -> Restore | None:
        return self.kit.manager._metadata.slots[self.kit.manager.proxy(key).pid].restoring

    def find(self, value: Any) -> Made | None:
        """Return what was stored as an object, if there: some objects are unique."""
        slots = self.kit.manager._metadata.slots
        pid = slots.find(value)
        if pid is None:
            return None
        for key, made in self.values.items():
            if self.kit.manager.proxy(key).pid == pid:
                return made
        return None
