"""The array type of the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from gpuspill.device.host import HostArray
from gpuspill.simulated.arrays import current
from gpuspill.simulated.arrays.flags import Flags
from gpuspill.simulated.arrays.functions import PARAMETERS, call_function, call_ufunc, keep_axes, look
from gpuspill.simulated.arrays.launch import launch
from gpuspill.simulated.arrays.transfer import to_device, to_host
from gpuspill.simulated.arrays.view import ArrayView, contiguous_strides, supported
from gpuspill.simulated.device.device import SimulatedAllocation, SimulatedDevice

__all__ = ["Array", "restore"]


def _computes(name: str, *, in_place: bool = False) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)
    # The positions in the function's parameters are those in the method's, with the array itself as
    # the first.
    host = PARAMETERS.get(name, ())

    def method(self: Array, *args: Any, **kwargs: Any) -> Any:
        written = [out for out in (kwargs.get("out"),) if isinstance(out, Array)]
        writes = [self, *written] if in_place else written
        return launch(Array, function, (self, *args), kwargs, what=name, host=host, writes=writes)

    method.__name__ = name
    method.__doc__ = f"As :meth:`numpy.ndarray.{name}`; results are on the device."
    return method


def _looks(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: Array, *args: Any, **kwargs: Any) -> Any:
        return look(Array, function, (self, *args), kwargs, what=name)

    method.__name__ = name
    method.__doc__ = f"As :meth:`numpy.ndarray.{name}`: a view on the same memory where NumPy gives one."
    return method


class Array(ArrayView, NDArrayOperatorsMixin):
    """An array whose memory is on a simulated device.

    It behaves as :class:`numpy.ndarray` in computations, and as ``cupy.ndarray`` towards the host:
    NumPy does not get at its bytes (``numpy.asarray(array)`` and ``memoryview(array)`` raise
    TypeError), and it does not mix with NumPy arrays. Explicit copies do:
    :func:`gpuspill.simulated.asarray` and :func:`gpuspill.simulated.asnumpy`; so do
    ``float(array)``, ``int``, ``complex``, ``bool``, ``bytes``, :meth:`item` and :meth:`tolist`,
    which copy and wait. Reductions give arrays without axes, not scalars; so does indexing a single
    element, which is a view.

    Parameters
    ----------
    shape
        Elements along each axis.
    dtype
        Type of the elements: booleans and numbers only.
    allocation, offset, strides
        Memory to look at, and how, in bytes. By default new memory of undefined content.
    order
        ``"C"`` or ``"F"``, if `strides` is not given.
    device
        Where to allocate. Default: the current device.

    Raises
    ------
    OutOfMemory
        The device has no room.
    ValueError
        The array would reach beyond its allocation.
    TypeError
        `dtype` cannot be on the device.

    Notes
    -----
    Its memory is freed with the last array on it. As safe to use from several threads as NumPy's.
    Pickling copies it through the host; it comes back on the current device of the receiver.
    """

    __slots__ = ()

    __array_priority__ = 100

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        allocation: SimulatedAllocation | None = None,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        *,
        order: str = "C",
        device: SimulatedDevice | None = None,
    ) -> None:
        axes = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(length) for length in shape)
        elements = supported(dtype)
        if any(length < 0 for length in axes):
            raise ValueError(f"negative lengths are not allowed: {axes}")
        if strides is None:
            strides = contiguous_strides(axes, elements.itemsize, order)
        if allocation is None:
            nbytes = elements.itemsize * int(np.prod(axes, dtype=object))
            allocation = (device or current.device()).allocate(nbytes)
        super().__init__(allocation, offset, axes, tuple(strides), elements)
        low, high = self.layout.span
        if low < 0 or high > allocation.nbytes:
            raise ValueError(f"an array on bytes {low} to {high} is not within {allocation!r}")

    # -- towards the host --------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(
            "implicit conversion of an array on the device to a NumPy array is not allowed: "
            "use gpuspill.simulated.asnumpy() or its method get()"
        )

    def get(self) -> HostArray:
        """Return a copy as a NumPy array; blocks until it is there."""
        return to_host(self)

    def item(self, *index: Any) -> Any:
        """Return one element as a scalar of Python; copies it and waits."""
        return to_host(self[index] if index else self).item()

    def tolist(self) -> Any:
        """Return the elements in nested lists; copies them and waits."""
        return to_host(self).tolist()

    def __bool__(self) -> bool:
        return bool(to_host(self))

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return to_host(self).__index__()

    def __bytes__(self) -> bytes:
        return to_host(self).tobytes()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        # No content: a message or a log must not move data, nor fail because the data is not there
        # yet.
        return f"<{type(self).__module__}.Array of {self.shape} {self.dtype} on {self.device.identity}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (to_host(self),)

    # -- NumPy's protocols -------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return call_ufunc(Array, ufunc, method, inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call_function(Array, func, types, args, kwargs, lambda: self.device)

    # -- indexing ----------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Array:
        return look(Array, keep_axes, (self, key), {}, what="indexing", host=(1,))  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any) -> None:
        launch(Array, np.ndarray.__setitem__, (self, key, value), {}, what="assigning", host=(1,), writes=(self,))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        if not self.shape:
            raise TypeError("cannot iterate over an array without axes")
        return (self[i] for i in range(self.shape[0]))

    # -- views and copies --------------------------------------------------------------------------

    @property
    def T(self) -> Array:
        """View with the axes reversed."""
        return self.transpose()  # type: ignore[no-any-return]

    @property
    def real(self) -> Array:
        """View of the real part."""
        return np.real(self)

    @property
    def imag(self) -> Array:
        """View of the imaginary part (zeros, if there is none)."""
        return np.imag(self)

    @property
    def flags(self) -> Flags:
        """Whether it is contiguous, and in which order."""
        return Flags(self.on_host().flags, self.layout.span == (0, self.allocation.nbytes))

    def copy(self, order: str = "C") -> Array:
        """Return a copy on the device."""
        return launch(Array, np.ndarray.copy, (self, order), {}, what="copy")  # type: ignore[no-any-return]

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Array:
        return self.copy("K")

    reshape = _looks("reshape")
    ravel = _looks("ravel")
    transpose = _looks("transpose")
    swapaxes = _looks("swapaxes")
    squeeze = _looks("squeeze")
    diagonal = _looks("diagonal")
    view = _looks("view")

    all = _computes("all")
    any = _computes("any")
    argmax = _computes("argmax")
    argmin = _computes("argmin")
    argpartition = _computes("argpartition")
    argsort = _computes("argsort")
    astype = _computes("astype")
    choose = _computes("choose")
    clip = _computes("clip")
    compress = _computes("compress")
    conj = _computes("conj")
    conjugate = _computes("conjugate")
    cumprod = _computes("cumprod")
    cumsum = _computes("cumsum")
    dot = _computes("dot")
    flatten = _computes("flatten")
    max = _computes("max")
    mean = _computes("mean")
    min = _computes("min")
    nonzero = _computes("nonzero")
    prod = _computes("prod")
    repeat = _computes("repeat")
    round = _computes("round")
    searchsorted = _computes("searchsorted")
    std = _computes("std")
    sum = _computes("sum")
    take = _computes("take")
    trace = _computes("trace")
    var = _computes("var")

    fill = _computes("fill", in_place=True)
    partition = _computes("partition", in_place=True)
    put = _computes("put", in_place=True)
    sort = _computes("sort", in_place=True)


def restore(host: HostArray) -> Array:
    """Put a pickled array on the current device."""
    return to_device(Array, host, device=current.device())
