"""Values for tests of the manager."""

import asyncio
import concurrent.futures
import pickle
from typing import Any

import numpy as np

from gpuspill.testing.managers import ManagerKit


class Thing:
    """Can be weakly referenced; equal if it holds the same."""

    def __init__(self, content: object = 0, nbytes: int = 100) -> None:
        self.content = content
        self.nbytes = nbytes

    def __eq__(self, other: object) -> bool:
        return type(other) is Thing and other.content == self.content

    __hash__ = None  # type: ignore[assignment]


class Unpicklable(Thing):
    def __reduce__(self):
        raise TypeError("this is not for pickling")


class Exiting(Thing):
    """Raises what is no Exception."""

    def __reduce__(self):
        raise SystemExit("not here")


class Endless(Thing):
    def __reduce__(self):
        return self.__reduce__()


class Nested(Thing):
    """Deeper than pickle goes."""

    def __init__(self, content: object = 0, nbytes: int = 100) -> None:
        super().__init__(content, nbytes)
        self.nested: list[Any] = []
        for _ in range(100_000):
            self.nested = [self.nested]


def explode(message: str) -> None:
    raise ValueError(message)


class Unloadable(Thing):
    def __reduce__(self):
        return explode, ("cannot be rebuilt",)


class Panic(BaseException):
    """What libraries in other languages raise."""


#: What is no error, or passes for somebody's own cancellation.
DEADLY = {
    f"{error.__module__}.{error.__name__}": error
    for error in (
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        StopIteration,
        Panic,
        asyncio.CancelledError,
        concurrent.futures.CancelledError,
    )
}


def die(kind: str) -> None:
    raise DEADLY[kind]("deadly")


class Deadly(Thing):
    """Can be serialised; rebuilding it would end a thread."""

    def __reduce__(self):
        return die, (self.content,)


class Delegating:
    """Can be pickled, and while it is rebuilt asks itself for what it does not have yet."""

    def __init__(self) -> None:
        self.thing = Thing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.thing, name)


VALUES: dict[str, Any] = {
    "bytes": b"some bytes",
    "empty bytes": b"",
    "bytearray": bytearray(b"more bytes"),
    "list": [1, [2, "three"]],
    "dict": {"a": (1, 2)},
    "None": None,
    "int": 7,
    "large int": 10**30,
    "float": 1.5,
    "true": True,
    "text": "some text that nobody interns",
    "class": Thing,
    "array": np.arange(100.0),
    "view": np.arange(200.0).reshape(10, 20)[2:5, ::2],
    "reversed": np.arange(50.0)[::-1],
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "zero size": np.zeros((0, 3)),
    "zero dimensions": np.array(5.0),
    "structured": np.zeros(5, dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([None, "a", 3], dtype=object),
    "dates": np.array(["2001-02-03", "NaT"], dtype="M8[D]"),
    "thing": Thing("content"),
}


def the_values() -> dict[str, Any]:
    return VALUES


# The interpreter itself refers to these, or the module above does by name: evicting them would free nothing.
SHARED = {"None", "int", "true", "class", "empty bytes"}


def fresh(kind: str) -> Any:
    """Return a value of a kind that nobody else refers to, unless it is one of a kind."""
    value = VALUES[kind]
    if isinstance(value, np.ndarray):
        copy = value.copy(order="K")
        if kind == "view":
            return np.arange(200.0).reshape(10, 20)[2:5, ::2]
        return copy[::-1].copy()[::-1] if kind == "reversed" else copy
    return pickle.loads(pickle.dumps(value))


def assert_same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    if isinstance(expected, np.ndarray):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)
        assert value.flags.f_contiguous == expected.flags.f_contiguous or not expected.flags.forc
    else:
        assert value == expected


def squeeze(kit: ManagerKit) -> float:
    """Ask for everything to be evicted, once."""
    kit.manager.limits.set_limit(0, None)
    return kit.engine.spill_all()
