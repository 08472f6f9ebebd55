"""What ``dask.array`` is told of the simulated array, by public registries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.simulated.arrays.array import Array
from gpuspill.simulated.arrays.creation import asnumpy, empty

__all__ = ["register"]


def _numel(array: Array, **kwargs: Any) -> Any:
    # How many elements each result of a reduction covers; on the device, so that it can be divided
    # by.
    axis, keepdims = kwargs.get("axis"), kwargs.get("keepdims", False)
    axes = range(array.ndim) if axis is None else (axis if isinstance(axis, tuple | list) else [axis])
    covered = {a % array.ndim for a in axes}
    count = int(np.prod([array.shape[a] for a in covered], dtype=object))
    if axis is None and not keepdims:
        return np.dtype(kwargs.get("dtype", float)).type(count)
    shape = tuple(1 if a in covered else n for a, n in enumerate(array.shape) if keepdims or a not in covered)
    return np.full_like(array, count, dtype=kwargs.get("dtype", float), shape=shape)


def _nannumel(array: Array, **kwargs: Any) -> Any:
    return np.sum(~np.isnan(array), **kwargs)


def _percentile(array: Any, q: Any, method: Any = "linear") -> Any:
    return (np.percentile(array, q, method=method) if len(array) else None), len(array)


def _to_numpy(array: Array, **kwargs: Any) -> HostArray:
    return asnumpy(array)


def _sizeof(array: Array) -> int:
    return array.nbytes


def register() -> None:
    """Tell dask. Doing it again changes nothing.

    Raises
    ------
    ImportError
        ``dask.array`` is not installed.
    """
    import dask.array as da
    from dask.array import dispatch
    from dask.sizeof import sizeof
    from dask.tokenize import normalize_token

    def token(array: Array) -> Any:
        return "gpuspill.simulated.Array", normalize_token(asnumpy(array))

    registries: Any = dispatch
    entries: dict[str, Callable[..., Any]] = {
        "concatenate_lookup": np.concatenate,
        "divide_lookup": np.divide,
        "einsum_lookup": np.einsum,
        "empty_lookup": empty,
        "nannumel_lookup": _nannumel,
        "numel_lookup": _numel,
        "percentile_lookup": _percentile,
        "take_lookup": np.take,
        "tensordot_lookup": np.tensordot,
        "to_numpy_dispatch": _to_numpy,
    }
    for name, function in entries.items():
        # Which registries there are depends on dask's version.
        if hasattr(registries, name):
            getattr(registries, name).register(Array, function)
    for registry, function in ((sizeof, _sizeof), (normalize_token, token)):
        cast(Any, registry).register(Array, function)
    cast(Any, da).register_chunk_type(Array)
