"""Whether one value is the same as another, in all that a task can see of it."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gpuspill.classes import attribute_of, named

__all__ = ["difference"]


def difference(value: Any, expected: Any) -> str | None:
    """Return where and how a value differs from the expected one; None if it is the same.

    Compares types, contents, attributes, flags and order of arrays, and what is shared inside:
    where the one has an object twice, so has the other.
    """
    return _Comparison().differ(value, expected, "value")


class _Comparison:
    def __init__(self) -> None:
        self._pairs: dict[int, int] = {}
        self._back: dict[int, int] = {}
        self._alive: list[Any] = []

    def differ(self, value: Any, expected: Any, where: str) -> str | None:
        cls = type(expected)
        if type(value) is not cls:
            return f"{where} is a {named(type(value))}, not a {named(cls)}"
        if value is expected:
            return None
        if isinstance(expected, bool | type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
            return f"{where} is {value!r}, not {expected!r}"
        if cls in (int, str, bytes, float, complex):
            return None if repr(value) == repr(expected) else f"{where} is another {cls.__name__}"
        known, back = self._pairs.get(id(expected)), self._back.get(id(value))
        if known is not None or back is not None:
            same = known == id(value) and back == id(expected)
            return None if same else f"what is shared with {where} before is not shared afterwards, or the reverse"
        self._pairs[id(expected)], self._back[id(value)] = id(value), id(expected)
        self._alive += value, expected
        return self._contents(value, expected, where)

    def _contents(self, value: Any, expected: Any, where: str) -> str | None:
        if isinstance(expected, np.ndarray):
            return self._array(value, expected, where)
        modules = (base.__module__.partition(".")[0] for base in type(expected).__mro__)
        check = next((_CHECKS[module] for module in modules if module in _CHECKS), None)
        if check is not None:
            return None if check(value, expected) else f"{where} has another content"
        if isinstance(expected, dict):
            found = self._all(dict.keys(value), dict.keys(expected), f"keys of {where}")
            found = found or self._all(dict.values(value), dict.values(expected), where)
        elif isinstance(expected, list | tuple | collections.deque):
            found = self._all(value, expected, where)
        elif isinstance(expected, BaseException):
            found = self.differ(value.args, expected.args, f"arguments of {where}")
            found = found or self.differ(str(value), str(expected), f"text of {where}")
        elif isinstance(expected, set | frozenset | str | bytes | bytearray | int | float):
            found = None if value == expected else f"{where} has another content"
        else:
            found = self._reduced(value, expected, where)
        return found or self._attributes(value, expected, where)

    def _all(self, values: Iterable[Any], expected: Iterable[Any], where: str) -> str | None:
        first, second = list(values), list(expected)
        if len(first) != len(second):
            return f"{where} has {len(first)} items, not {len(second)}"
        pairs = zip(first, second, strict=True)
        return next((d for n, (v, e) in enumerate(pairs) if (d := self.differ(v, e, f"{where}[{n}]"))), None)

    def _attributes(self, value: Any, expected: Any, where: str) -> str | None:
        first, second = getattr(value, "__dict__", {}), getattr(expected, "__dict__", {})
        if not isinstance(first, Mapping) or isinstance(expected, np.memmap):
            return None
        for name in sorted(first.keys() | second.keys()):
            there = hasattr(value, name), hasattr(expected, name)
            if there[0] != there[1]:
                return f"{where} has the attribute {name}, or not"
            if found := self.differ(getattr(value, name), getattr(expected, name), f"{where}.{name}"):
                return found
        return None

    def _array(self, value: Any, expected: Any, where: str) -> str | None:
        told = {
            "dtype": (value.dtype, expected.dtype),
            "fields": (value.dtype.fields, expected.dtype.fields),
            "metadata": (dict(value.dtype.metadata or {}), dict(expected.dtype.metadata or {})),
            "shape": (value.shape, expected.shape),
            "writeable": (value.flags.writeable, expected.flags.writeable),
            "C order": (value.flags.c_contiguous, expected.flags.c_contiguous or not expected.flags.forc),
            "Fortran order": (value.flags.f_contiguous, expected.flags.f_contiguous),
        }
        if not expected.flags.forc:
            del told["C order"], told["Fortran order"]  # memory without its gaps
        for name, (first, second) in told.items():
            if first != second:
                return f"{name} of {where} is {first}, not {second}"
        if isinstance(expected, np.ma.MaskedArray):
            masks = (np.ma.getmaskarray(value), np.ma.getmaskarray(expected))
            about = (value.hardmask, repr(value.fill_value), np.ma.getmask(value) is np.ma.nomask)
            if about != (expected.hardmask, repr(expected.fill_value), np.ma.getmask(expected) is np.ma.nomask):
                return f"mask or fill value of {where} differ"
            data = np.asarray(value.data), np.asarray(expected.data)
            return self.differ(*masks, f"mask of {where}") or self.differ(*data, f"data of {where}")
        plain = np.asarray(value).view(np.ndarray), np.asarray(expected).view(np.ndarray)
        if expected.dtype.hasobject and expected.dtype.kind in "OV":
            found = self._all(plain[0].ravel().tolist(), plain[1].ravel().tolist(), where)
        else:
            found = None if plain[0].tobytes() == plain[1].tobytes() else f"{where} has another content"
            if found and expected.dtype.kind not in "biumMSUV":  # some have gaps in an element, others addresses
                found = None if np.array_equal(*plain) else found
        return found or self._attributes(value, expected, where)

    def _reduced(self, value: Any, expected: Any, where: str) -> str | None:
        """Compare what pickle sees of objects, if they say no more of themselves."""
        slots = {
            name for base in type(expected).__mro__ for name in _names(base) if name not in ("__dict__", "__weakref__")
        }
        for name in sorted(slots):
            there = hasattr(value, name), hasattr(expected, name)
            if there[0] != there[1]:
                return f"{where} has {name}, or not"
            if there[0] and (d := self.differ(getattr(value, name), getattr(expected, name), f"{where}.{name}")):
                return d
        if slots or hasattr(expected, "__dict__"):
            return None
        if attribute_of(type(expected), "__eq__") is not object.__eq__:
            return None if value == expected else f"{where} is not equal"
        try:
            return self.differ(value.__reduce_ex__(5), expected.__reduce_ex__(5), f"pickle of {where}")
        except TypeError as error:
            return f"{where} cannot be compared: {error}"


def _names(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _pandas(value: Any, expected: Any) -> bool:
    import pandas as pd

    checks = {
        pd.DataFrame: pd.testing.assert_frame_equal,
        pd.Series: pd.testing.assert_series_equal,
        pd.Index: pd.testing.assert_index_equal,
    }
    for cls, check in checks.items():
        if isinstance(expected, cls):
            try:
                check(value, expected)
            except AssertionError:
                return False
            return bool(getattr(value, "attrs", None) == getattr(expected, "attrs", None))
    if isinstance(expected, pd.api.extensions.ExtensionArray):
        return bool(value.equals(expected))
    return bool(value == expected)


def _pyarrow(value: Any, expected: Any) -> bool:
    schema = getattr(expected, "schema", None)
    if schema is not None and not value.schema.equals(schema, check_metadata=True):
        return False
    return bool(value.equals(expected))


def _xarray(value: Any, expected: Any) -> bool:
    return bool(value.identical(expected))


def _sparse(value: Any, expected: Any) -> bool:
    return bool(value.shape == expected.shape and value.dtype == expected.dtype and not (value != expected).nnz)


def _scipy(value: Any, expected: Any) -> bool:
    return bool(
        value.format == expected.format and _sparse(value, expected)
        if hasattr(expected, "format")
        else value == expected
    )


def _awkward(value: Any, expected: Any) -> bool:
    return bool(value.type == expected.type and value.attrs == expected.attrs and value.tolist() == expected.tolist())


def _geopandas(value: Any, expected: Any) -> bool:
    return bool(value.equals(expected) and value.crs == expected.crs)


def _shapely(value: Any, expected: Any) -> bool:
    return bool(value.equals_exact(expected) and value.has_z == expected.has_z)


def _image(value: Any, expected: Any) -> bool:
    return bool(value == expected)


def _networkx(value: Any, expected: Any) -> bool:
    parts = ((graph.graph, list(graph.nodes(data=True)), list(graph.edges(data=True))) for graph in (value, expected))
    first, second = parts
    return first == second


def _astropy(value: Any, expected: Any) -> bool:
    if hasattr(expected, "colnames"):
        return bool(value.colnames == expected.colnames and value.meta == expected.meta and (value == expected).all())
    return bool(np.all(value == expected))


#: By the library's own means, by its name.
_CHECKS: Mapping[str, Callable[[Any, Any], bool]] = {
    "pandas": _pandas,
    "pyarrow": _pyarrow,
    "xarray": _xarray,
    "sparse": _sparse,
    "scipy": _scipy,
    "awkward": _awkward,
    "geopandas": _geopandas,
    "shapely": _shapely,
    "PIL": _image,
    "networkx": _networkx,
    "astropy": _astropy,
}
