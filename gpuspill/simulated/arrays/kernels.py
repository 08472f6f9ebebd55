"""Computations of one's own on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from gpuspill.simulated.arrays import current
from gpuspill.simulated.arrays.array import Array
from gpuspill.simulated.arrays.launch import launch

__all__ = ["run_kernel"]


def run_kernel(
    function: Callable[..., Any], *args: Any, writes: Collection[Array] = (), seconds: float = 0.0, **kwargs: Any
) -> Any:
    """Enqueue a computation of one's own on the current stream, as a kernel of a GPU.

    It takes `seconds` of the device's time, and no processor's: with the real clock, a thread that
    waits for the stream sleeps. What the function itself costs comes on top, in the calling thread.

    Parameters
    ----------
    function
        What computes. It is called at once, with what NumPy sees of the arrays in the place of
        arrays of the device.
    *args, **kwargs
        Its arguments; lists and tuples are looked into.
    writes
        Which of the arrays it writes to.
    seconds
        How long it takes on the device.

    Returns
    -------
    object
        What the function returns, its arrays on the device.

    Raises
    ------
    TypeError
        There is a host array among the arguments.
    ValueError
        `seconds` is negative, or the arrays are on different devices.
    UnorderedAccess, UseAfterFree, OutOfMemory
        As any computation.

    Examples
    --------
    >>> import numpy as np
    >>> from gpuspill import simulated
    >>> x, y = simulated.zeros(3), simulated.empty(3)
    >>> simulated.run_kernel(np.add, x, 1, out=y, writes=(y,), seconds=0.001)  # doctest: +ELLIPSIS
    <...>
    >>> simulated.device().current_stream().synchronize()
    >>> simulated.asnumpy(y)
    array([1., 1., 1.])
    """
    if not seconds >= 0:
        raise ValueError(f"seconds: expected a number that is not negative, found {seconds!r}")
    what = getattr(function, "__name__", "a computation")
    device = current.device()
    return launch(Array, function, args, kwargs, what=what, writes=writes, device=device, seconds=seconds)
