"""What tasks return: a table of kinds of values, to be spilled and read back.

Each kind is a function that makes a new value, with no reference to it anywhere else. Kinds of
libraries stand in :mod:`gpuspill.testing.library_kinds`.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import ipaddress
import operator
import pathlib
import random
import re
import types
import uuid
import zoneinfo
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gpuspill.testing.library_kinds import MORE, Make, pandas_kinds, pyarrow_kinds

__all__ = ["CORE", "MORE", "Color", "Make", "Point"]


class Point(NamedTuple):
    """Equal to a tuple, and not one."""

    x: Any
    y: Any


class Color(enum.Enum):
    """A key of dictionaries."""

    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    """An integer to msgpack."""

    LOW = 1


class Mode(enum.Flag):
    """Can be combined."""

    READ = 1
    WRITE = 2


class Text(str):
    """A string with something in it."""

    unit = "none"


class Whole(int):
    """An integer with something in it."""


class Real(float):
    """A number with something in it."""


class Octets(bytes):
    """Bytes with something in it."""


class Row(list[Any]):
    """A list with something in it."""


class Table(dict[Any, Any]):
    """A dictionary with something in it."""


class Pair(tuple[Any, ...]):
    """A tuple with something in it."""


class Signal(np.ndarray[Any, Any]):
    """An array with something in it, which NumPy's pickles do not have."""


class Slotted:
    """Has no dictionary, and cannot be weakly referenced."""

    __slots__ = ("content", "whole")

    def __init__(self, content: Any) -> None:
        self.content: Any = content
        self.whole: Any = None


class Plain:
    """Has a dictionary."""

    def __init__(self, **content: Any) -> None:
        self.__dict__.update(content)


@dataclasses.dataclass
class Data:
    """With fields."""

    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """With fields that stay."""

    x: Any


class Particular(ValueError):
    """Called with something else than what becomes its arguments."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text}: {number}")
        self.number = number


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _in_itself() -> list[Any]:
    value: list[Any] = [np.arange(1000.0)]
    value.append({"whole": value})
    return value


def _shared() -> list[Any]:
    item, inner = np.arange(1000.0), [1]
    return [item, item, {"again": item, Color.RED: inner}, (inner, Data(item, inner))]


def _tree() -> Slotted:
    root = Slotted([])
    for n in range(3):
        child = Slotted(np.full(100, n))
        child.whole = root
        root.content.append(child)
    return root


def _readonly(value: Any) -> Any:
    value.flags.writeable = False
    return value


def _record() -> Any:
    return np.rec.fromarrays([np.arange(1000), np.arange(1000.0)], names="id,mass")  # type: ignore[call-overload]


def _masked(*, hard: bool = False, **options: Any) -> Any:
    made = np.ma.MaskedArray(np.arange(1000.0), np.arange(1000) % 3 == 0, **options)
    if hard:
        made.harden_mask()
    return made


#: Of the standard library.
STANDARD: Mapping[str, Make] = {
    "list": lambda: [1, [2.5, "three"], (None, True)],
    "list that contains itself": _in_itself,
    "shared inside": _shared,
    "tree with parents": _tree,
    "dict in order": lambda: {"z": 1, 2: "a", None: 3, (1, "b"): 4},
    "dict, keys named tuples": lambda: {Point(1, 2): np.arange(1000.0), Point(3, 4): 1},
    "dict, keys enums": lambda: {Color.RED: np.arange(1000.0), Level.LOW: 1},
    "dict, keys of subclasses": lambda: {Text("a"): 1, Whole(2): 2, Octets(b"c"): 3},
    "set": lambda: {1, "a", (2, 3), frozenset([4])},
    "named tuple": lambda: Point(np.arange(1000.0), "y"),
    "enum": lambda: [Color.RED, Level.LOW, Mode.READ | Mode.WRITE],
    "text": lambda: "some text \U0001f600 \ud800" * 100,
    "large int": lambda: -(10**400),
    "floats": lambda: [float("nan"), float("-inf"), -0.0, 5e-324],
    "complex": lambda: complex(-0.0, float("nan")).conjugate() * 0 + 1j,
    "bytes": lambda: bytes(range(256)) * 100,
    "bytearray": lambda: bytearray(range(256)) * 100,
    "memoryview": lambda: memoryview(bytearray(range(256))),
    "memoryview of numbers": lambda: memoryview(array.array("d", range(24))).cast("B").cast("d", (4, 6)),
    "array.array": lambda: array.array("d", [1.0, 2.0] * 1000),
    "array.array of text": lambda: array.array("u", "text" * 1000),
    "array.array, empty": lambda: array.array("h"),
    "str subclass": lambda: _with(Text("x" * 1000), unit="m"),
    "int subclass": lambda: _with(Whole(5), unit="m"),
    "float subclass": lambda: _with(Real(5.5), unit="m"),
    "bytes subclass": lambda: _with(Octets(b"x" * 1000), unit="m"),
    "list subclass": lambda: _with(Row([np.arange(1000.0), 2]), unit="m"),
    "dict subclass": lambda: _with(Table(a=np.arange(1000.0)), unit="m"),
    "tuple subclass": lambda: _with(Pair([np.arange(1000.0), 2]), unit="m"),
    "OrderedDict": lambda: collections.OrderedDict([("z", np.arange(1000.0)), ("a", 1)]),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [1]}),
    "Counter": lambda: collections.Counter("abracadabra"),
    "deque": lambda: collections.deque([1, 2, np.arange(1000.0)], maxlen=5),
    "ChainMap": lambda: collections.ChainMap({"a": 1}, {"b": 2}),
    "UserDict": lambda: collections.UserDict(a=1),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=np.arange(1000.0)),
    "datetime": lambda: datetime.datetime(2020, 1, 2, 3, 4, 5, 6, zoneinfo.ZoneInfo("UTC"), fold=1),
    "timedelta": lambda: datetime.timedelta(1, 2, 3),
    "Decimal": lambda: decimal.Decimal("-0.100"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "range and slice": lambda: [range(1, 9, 2), slice(1, None, 3), ...],
    "pattern": lambda: re.compile(r"(a+)b", re.I),
    "path": lambda: pathlib.PurePosixPath("/a/b"),
    "UUID": lambda: uuid.UUID(int=5),
    "address": lambda: ipaddress.ip_network("10.0.0.0/8"),
    "random": lambda: random.Random(5).getstate(),
    "partial": lambda: functools.partial(operator.add, 5),
    "itemgetter": lambda: operator.itemgetter(1, 2),
    "function and class": lambda: [operator.add, Point, len, np],
    "error": lambda: _with(ValueError("a", 1), more=np.arange(10)),
    "error with a class of its own": lambda: Particular(5, "text"),
    "error of the system": lambda: FileNotFoundError(2, "no such file", "name"),
    "errors": lambda: ExceptionGroup("many", [ValueError(1), KeyError("k")]),
    "object": lambda: Plain(a=np.arange(1000.0), b={"c": [1]}),
    "object with slots": lambda: Slotted(np.arange(1000.0)),
    "dataclass": lambda: Data(np.arange(1000.0), Frozen(5)),
}

#: Of NumPy.
NUMPY: Mapping[str, Make] = {
    "array": lambda: np.arange(1000.0),
    "array, Fortran order": lambda: np.asfortranarray(np.arange(1200.0).reshape(30, 40)),
    "array with gaps": lambda: np.arange(2400.0).reshape(40, 60)[::2, ::3],
    "array, reversed": lambda: np.arange(1000)[::-1],
    "array, repeated": lambda: np.broadcast_to(np.arange(4.0), (1000, 4)),
    "array, read-only": lambda: _readonly(np.arange(1000.0)),
    "array with gaps, read-only": lambda: _readonly(np.arange(2400.0).reshape(40, 60)[::2, ::3]),
    "array, no dimension": lambda: np.array(5.0),
    "array, no element": lambda: np.zeros((0, 5), "f4"),
    "array, another byte order": lambda: np.arange(1000, dtype=">i4"),
    "array of bool": lambda: np.arange(1000) % 3 == 0,
    "array of float16": lambda: np.arange(1000, dtype="f2"),
    "array of longdouble": lambda: np.arange(1000, dtype="g"),
    "array of complex": lambda: np.arange(1000, dtype="c16"),
    "array of text": lambda: np.array(["a", "bcd", "é"] * 300),
    "array of bytes": lambda: np.array([b"a", b"bcd"] * 300),
    "array of strings of any length": lambda: np.array(["a", "b" * 100] * 300, dtype=np.dtypes.StringDType()),
    "array of datetimes": lambda: np.arange("2020", "2022", dtype="M8[D]"),
    "array of timedeltas": lambda: np.arange(1000, dtype="m8[ns]"),
    "array of objects": lambda: np.array([None, "a", {"b": [1]}, 5] * 10, dtype=object),
    "array of records": lambda: np.zeros(1000, [("a", "i4"), ("b", "f8", (2, 3)), ("c", "S3")]),
    "array of aligned records": lambda: np.zeros(1000, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "array of records with objects": lambda: np.array([(1, "x"), (2, None)], [("a", "i4"), ("b", "O")]),
    "array of void": lambda: np.zeros(1000, "V10"),
    "dtype with metadata": lambda: np.zeros(1000, np.dtype("f8", metadata={"unit": "m"})),
    "ndarray subclass": lambda: _with(np.arange(1000.0).view(Signal), unit="m"),
    "ndarray subclass with gaps": lambda: _with(np.arange(2000.0).view(Signal)[::2], unit="m"),
    "recarray": _record,
    "record": lambda: _record()[5],
    "memmap": lambda: np.arange(1000.0).view(np.memmap),
    "matrix": lambda: np.asmatrix(np.arange(1200.0).reshape(30, 40)),
    "char array": lambda: np.char.asarray(["a", "bcd"] * 300),
    "masked array": _masked,
    "masked array, hard mask": lambda: _masked(hard=True),
    "masked array, fill value": lambda: _masked(fill_value=-1.0),
    "masked array, no mask": lambda: np.ma.MaskedArray(np.arange(1000.0)),
    "masked array, all unmasked": lambda: np.ma.MaskedArray(np.arange(10.0), np.zeros(10, bool), shrink=False),
    "masked array of records": lambda: np.ma.zeros(100, [("a", "i4"), ("b", "f8")]),
    "masked": lambda: np.ma.masked,
    "scalars": lambda: [
        np.float32(1.5),
        np.int8(-1),
        np.bool(True),
        np.datetime64("2020"),
        np.str_("x"),
        np.void(b"ab"),
    ],
    "dtype": lambda: np.dtype([("a", "i4"), ("b", "f8")]),
    "generator": lambda: np.random.default_rng(5).bit_generator.state,
    "arrays in containers": lambda: {"a": [np.arange(1000.0), (np.ones(3), "x")], "b": {1, 2}},
}


#: What every run can make, by library.
CORE: Mapping[str, Mapping[str, Make]] = {
    "Python": STANDARD,
    "NumPy": NUMPY,
    "pandas": pandas_kinds(),
    "pyarrow": pyarrow_kinds(),
}
