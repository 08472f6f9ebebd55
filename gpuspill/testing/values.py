"""Values of many kinds, good and bad, that can be told from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["KINDS", "Deadly", "Knot", "Made", "Plain", "Unloadable", "Unpicklable"]


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
    """What the model knows of one value."""

    kind: str
    number: int
    lost: bool = False

    def fits(self, value: Any) -> bool:
        """Whether `value` is what was stored."""
        return _equal(value, KINDS[self.kind](self.number))
