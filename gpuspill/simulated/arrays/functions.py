"""NumPy's functions and ufuncs on arrays of the simulated device (NEP 13 and NEP 18).

Any function of NumPy that dispatches works, by running on the device's memory; this module knows
the exceptions: those that only look (they give views and compute nothing), those that write to an
argument, those that convert, those that read the device's memory for the host and are therefore
refused, and which arguments may be host arrays.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.simulated.arrays.launch import Call, implicit, launch
from gpuspill.simulated.arrays.transfer import to_device
from gpuspill.simulated.arrays.view import ArrayView
from gpuspill.simulated.device.device import SimulatedDevice

__all__ = ["PARAMETERS", "call_function", "call_ufunc", "look"]

A = TypeVar("A", bound=ArrayView)

PARAMETERS: Final[Mapping[str, Collection[int | str]]] = MappingProxyType(
    {
        "array_split": (1, "indices_or_sections"),
        "delete": (1, "obj"),
        "dsplit": (1, "indices_or_sections"),
        "hsplit": (1, "indices_or_sections"),
        "insert": (1, "obj"),
        "nanpercentile": (1, "q"),
        "nanquantile": (1, "q"),
        "pad": (1, "pad_width"),
        "percentile": (1, "q"),
        "quantile": (1, "q"),
        "repeat": (1, "repeats"),
        "split": (1, "indices_or_sections"),
        "take": (1, "indices"),
        "vsplit": (1, "indices_or_sections"),
    }
)
"""Arguments that may be host arrays, by function: they say what to do and are no data."""

_LOOKS: Final = frozenset(
    {
        "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays", "broadcast_to", "diagonal",
        "dsplit", "expand_dims", "flip", "fliplr", "flipud", "hsplit", "imag", "moveaxis", "ravel", "real", "reshape",
        "rollaxis", "rot90", "split", "squeeze", "swapaxes", "transpose", "vsplit",
    }
)  # fmt: skip

_WRITES: Final = frozenset({"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"})

_CONVERSIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "array": {"copy": True},
        "asanyarray": {},
        "asarray": {},
        "ascontiguousarray": {"order": "C", "ndmin": 1},
        "asfortranarray": {"order": "F", "ndmin": 1},
    }
)

_READS_FOR_THE_HOST: Final = frozenset(
    {"array2string", "array_repr", "array_str", "save", "savetxt", "savez", "savez_compressed"}
)


def look(
    cls: type[A], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, what: str,
    host: Collection[int | str] = (),
) -> Any:  # fmt: skip
    """Compute what is usually a view without using memory; else by :func:`launch`.

    A view may be taken of memory that a copy is still writing to; a copy of it may not.
    """
    call = Call(cls)
    seen = [call.unwrap(value, host=i in host) for i, value in enumerate(args)]
    named = {name: call.unwrap(value, host=name in host) for name, value in kwargs.items()}
    result = function(*seen, **named)
    results = [result] if isinstance(result, np.ndarray) else result
    views = [call.view_of_input(part) for part in results] if isinstance(results, list | tuple) else [None]
    if all(view is not None for view in views):
        return views[0] if isinstance(result, np.ndarray) else type(results)(views)
    return launch(cls, function, args, kwargs, what=what, host=host)


def call_function(
    cls: type[A],
    function: Callable[..., Any],
    types: Collection[type],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    default: Callable[[], SimulatedDevice],
) -> Any:
    """Do what ``__array_function__`` does.

    Parameters
    ----------
    default
        Returns the device for results if no argument is on one (``like=`` was given).
    """
    if not all(issubclass(found, (ArrayView, np.ndarray)) for found in types):
        return NotImplemented
    name = function.__name__
    if name in _READS_FOR_THE_HOST:
        raise TypeError(f"numpy.{name} reads the array on the host: use gpuspill.simulated.asnumpy() first")
    if name in _CONVERSIONS:
        return _convert(cls, args, {**_CONVERSIONS[name], **kwargs}, default)
    host = PARAMETERS.get(name, ())
    if name in _LOOKS:
        return look(cls, function, args, kwargs, what=name, host=host)
    writes = _arrays(kwargs.get("out")) + (_arrays(args[0]) if name in _WRITES else [])
    device = default() if _find((*args, *kwargs.values())) is None else None
    return launch(cls, function, args, kwargs, what=name, host=host, writes=writes, device=device)


def _convert(cls: type[A], args: Sequence[Any], kwargs: Mapping[str, Any], default: Callable[[], SimulatedDevice]) -> A:
    options = dict(kwargs)
    options.update(zip(("dtype", "order"), args[1:], strict=False))
    for unused in ("subok", "device"):
        options.pop(unused, None)
    found = _find((args[0],))
    return to_device(cls, args[0], device=default() if found is None else found.device, **options)


def _find(values: Sequence[Any]) -> ArrayView | None:
    for value in values:
        if isinstance(value, ArrayView):
            return value
        if isinstance(value, list | tuple) and (found := _find(value)) is not None:
            return found
    return None


def _arrays(value: Any) -> list[ArrayView]:
    found = value if isinstance(value, tuple) else (value,)
    return [array for array in found if isinstance(array, ArrayView)]


def call_ufunc(cls: type[A], ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do what ``__array_ufunc__`` does."""
    indices = (1,) if method in ("at", "reduceat") else ()
    operands = [value for i, value in enumerate(inputs) if i not in indices]
    outputs = kwargs.get("out", ())
    for value in (*operands, *outputs):
        if isinstance(value, np.ndarray):
            raise implicit(value)
        if not (value is None or isinstance(value, (ArrayView, numbers.Number, np.generic))):
            return NotImplemented
    writes = _arrays(outputs) + (_arrays(inputs[0]) if method == "at" else [])
    return launch(cls, getattr(ufunc, method), inputs, kwargs, what=ufunc.__name__, host=indices, writes=writes)


def keep_axes(seen: HostArray, key: Any) -> HostArray:
    """Index so that a single element comes as a view without axes, and not as a scalar."""
    keys = key if isinstance(key, tuple) else (key,)
    return seen[keys if any(k is Ellipsis for k in keys) else (*keys, Ellipsis)]
