"""Values of many kinds, good and bad, that can be told from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["CHANGES", "KINDS", "Deadly", "Knot", "Made", "Plain", "Unloadable", "Unpicklable"]


class Plain:
    """An object that can be weakly referenced."""

    def __init__(self, content: object) -> None:
        self.content = content


class Knot(Plain):
    """Refers to itself, so it looks held for ever."""

    def __init__(self, content: object) -> None:
        super().__init__(content)
        self.me = self


class Unpicklable(Plain):
    """Cannot be serialised."""

    def __reduce__(self) -> Any:
        raise TypeError("not for pickling")


def _explode(content: object) -> object:
    raise ZeroDivisionError(content)


class Unloadable(Plain):
    """Can be serialised, but not be rebuilt."""

    def __reduce__(self) -> Any:
        return _explode, (self.content,)


def _die(content: object) -> object:
    raise GeneratorExit(content)


class Deadly(Plain):
    """Can be serialised; rebuilding it would end a thread."""

    def __reduce__(self) -> Any:
        return _die, (self.content,)


#: How to make a value of each kind that holds a number; a new object each time.
KINDS: Mapping[str, Callable[[int], Any]] = {
    "array": lambda n: np.full(40, float(n)),
    "bytes": lambda n: b"%d" % n * 20,
    "view": lambda n: np.full((10, 8), float(n))[2:8, ::2],
    "fortran": lambda n: np.asfortranarray(np.full((6, 5), n)),
    "list": lambda n: [n, [str(n)]],
    "arrays": lambda n: {"one": (array := np.full(40, float(n))), "more": [array[5:], np.full(30, n)]},
    "none": lambda n: None,
    "bytearray": lambda n: bytearray(str(n) * 10, "ascii"),
    "small int": lambda n: n % 5,
    "empty": lambda n: np.zeros((0, n % 3)),
    "text": lambda n: f"text {n}",
    "plain": Plain,
    "knot": Knot,
    "unpicklable": Unpicklable,
    "unloadable": Unloadable,
    "deadly": Deadly,
}


#: How a task changes a value of some kind in place, so that it holds another number: first a half,
#: then all of it.
CHANGES: Mapping[str, tuple[Callable[[Any, int], object], Callable[[Any, int], object]]] = {
    "array": (lambda value, n: value[:20].fill(n), lambda value, n: value.fill(n)),
    "fortran": (lambda value, n: value[:3].fill(n), lambda value, n: value.fill(n)),
    # The two that share memory do so until they are spilled.
    "arrays": (
        lambda value, n: value["one"].fill(n),
        lambda value, n: [array.fill(n) for array in value["more"]],
    ),
    "list": (lambda value, n: value.__setitem__(0, n), lambda value, n: value[1].__setitem__(0, str(n))),
    "plain": (lambda value, n: None, lambda value, n: setattr(value, "content", n)),
    "knot": (lambda value, n: None, lambda value, n: setattr(value, "content", n)),
}


def _equal(value: Any, expected: Any) -> bool:
    if type(value) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        return bool(value.dtype == expected.dtype and np.array_equal(value, expected))
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], np.ndarray):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(expected, Plain):
        return bool(value.content == expected.content)
    return bool(value == expected)


@dataclass(eq=False)
class Made:
    """What the model knows of one value.

    Attributes
    ----------
    kind, number
        What it was made of, or what it was changed into last.
    lost
        Something was done to its only record.
    before
        Numbers that it may have as well, since what was written of it before it was changed may be
        what counts.
    ever
        All that it ever had: those who were given its record keep what they got.
    changing
        A task is in the middle of changing it.
    """

    kind: str
    number: int
    lost: bool = False
    before: set[int] = field(default_factory=set)
    ever: set[int] = field(default_factory=set)
    changing: bool = False

    def begin_change(self, number: int, *, recorded: bool) -> None:
        """A task begins to change it. `recorded`: a record has what it was."""
        self.before = {*self.before, self.number} if recorded else set()
        self.ever |= {self.number, number}
        self.number, self.changing = number, True

    def fits(self, value: Any, *, ever: bool = False) -> bool:
        """Whether `value` is what it should be by now, or what it has `ever` been."""
        numbers = {self.number, *(self.ever if ever else self.before)}
        return self.changing or any(_equal(value, KINDS[self.kind](number)) for number in numbers)
