"""Running NumPy on the device's memory: arguments in, computation, results out.

Only here do arrays of the device meet NumPy. The arguments are looked at in place; a result that
shares their memory becomes an array on the same allocation; any other becomes new memory of the
device, and may so run out of it. What NumPy needs in between is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gpuspill.device.host import HostArray
from gpuspill.simulated.arrays.view import ArrayView, supported
from gpuspill.simulated.device.device import SimulatedDevice, SimulatedEvent

__all__ = ["Call", "dense_bytes", "launch"]

A = TypeVar("A", bound=ArrayView)


def implicit(host: HostArray) -> TypeError:
    """Return the error for a host array where one of the device is needed."""
    return TypeError(
        f"a NumPy array of shape {host.shape} cannot be used with arrays on the device: copy it there with "
        "gpuspill.simulated.asarray(), or those to the host with gpuspill.simulated.asnumpy()"
    )


def dense_bytes(array: HostArray) -> HostArray | None:
    """Return an array's memory as bytes by address; None with gaps or overlaps."""
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    ordered = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
    return ordered.reshape(-1).view(np.uint8) if ordered.flags.c_contiguous else None


class Call:
    """The arguments of one call, and what its results are made into.

    Parameters
    ----------
    device
        Where to put results if no argument is on a device.
    """

    def __init__(self, cls: type[A], device: SimulatedDevice | None = None) -> None:
        self._cls: type[ArrayView] = cls
        self._device: SimulatedDevice | None = None
        self._default = device
        self._inputs: dict[int, tuple[HostArray, ArrayView]] = {}
        self._event: SimulatedEvent | None = None

    @property
    def device(self) -> SimulatedDevice:
        """The device of the arguments, or the one for results if none of them is on a device."""
        device = self._device or self._default
        assert device is not None, "no argument is on a device"
        return device

    def unwrap(self, value: Any, *, host: bool = False) -> Any:
        """Return `value` with every array of the device replaced by what NumPy sees.

        Parameters
        ----------
        value
            An argument; lists and tuples are looked into.
        host
            Whether host arrays are welcome (indices and the like).

        Raises
        ------
        TypeError
            There is a host array where none is welcome.
        ValueError
            There are arrays on different devices.
        """
        if isinstance(value, ArrayView):
            if self._device is not None and value.device is not self._device:
                raise ValueError(f"an array is on {value.device!r} and another on {self._device!r}: copy one of them")
            self._device = value.device
            seen = value.on_host()
            self._inputs[id(seen)] = seen, value
            return seen
        if isinstance(value, np.ndarray) and not host:
            raise implicit(value)
        if type(value) in (list, tuple):
            return type(value)(self.unwrap(item, host=host) for item in value)
        return value

    def enqueue(self, what: str, writes: Collection[ArrayView] = (), seconds: float = 0.0) -> None:
        """Count the computation as enqueued; errors as :meth:`Kernels.launch`."""
        written = {id(array.allocation): array.allocation for array in writes}
        read = {id(a.allocation): a.allocation for _, a in self._inputs.values() if id(a.allocation) not in written}
        seconds += self.device.configuration.kernel_latency
        self._event = self.device.kernels.launch(what, read.values(), written.values(), seconds)

    def view_of_input(self, result: HostArray) -> ArrayView | None:
        """Return `result` as an array on the allocation of an argument, if it shares its memory."""
        known = self._inputs.get(id(result))
        if known is not None:
            return known[1]
        address = int(result.__array_interface__["data"][0])
        for _, array in self._inputs.values():
            allocation = array.allocation
            offset = address - allocation.host_address
            if 0 <= offset < allocation.nbytes:
                return self._cls.on(allocation, offset, result.shape, result.strides, supported(result.dtype))
        return None

    def wrap(self, result: Any, what: str = "a computation") -> Any:
        """Return a result of NumPy as arrays of the device; tuples and lists are looked into.

        Scalars become arrays without axes. What is neither array nor scalar of NumPy stays as it
        is.

        Raises
        ------
        OutOfMemory
            There is no room for it.
        TypeError
            It has elements that cannot be on the device.
        """
        if isinstance(result, np.ndarray):
            view = self.view_of_input(result)
            return self._adopt(result, what) if view is None else view
        if isinstance(result, np.generic):
            return self._adopt(np.asarray(result), what)
        if isinstance(result, tuple):
            items = [self.wrap(item, what) for item in result]
            return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
        if isinstance(result, list):
            return [self.wrap(item, what) for item in result]
        return result

    def _adopt(self, result: HostArray, what: str) -> ArrayView:
        dtype = supported(result.dtype)
        # A result that is part of something larger, or has gaps, must not keep more memory than it
        # is charged for.
        if result.base is not None and getattr(result.base, "nbytes", 0) != result.nbytes:
            result = result.copy(order="K")
        raw = dense_bytes(result)
        if raw is None:
            result = result.copy(order="C")
            raw = dense_bytes(result)
        assert raw is not None
        allocation = self.device.adopt(raw)
        if self._event is not None:
            self.device.kernels.produced(self._event, allocation, what)
        return self._cls.on(allocation, 0, result.shape, result.strides, dtype)


def launch(
    cls: type[A],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    what: str,
    host: Collection[int | str] = (),
    writes: Collection[ArrayView] = (),
    device: SimulatedDevice | None = None,
    seconds: float = 0.0,
) -> Any:
    """Compute on the device.

    Parameters
    ----------
    function
        What computes, on NumPy's arrays.
    args, kwargs
        Its arguments.
    what
        Its name, for messages.
    host
        Which arguments (positions and keywords) may be host arrays.
    writes
        Which of the arguments it writes to.
    device
        Where to put results if no argument is on a device.
    seconds
        How long it takes on the device, besides the device's own latency.

    Raises
    ------
    TypeError, ValueError, OutOfMemory
        As :meth:`Call.unwrap` and :meth:`Call.wrap`.
    UnorderedAccess, UseAfterFree
        It is not ordered after what it depends on, or uses memory that was freed.
    """
    call = Call(cls, device)
    seen = [call.unwrap(value, host=i in host) for i, value in enumerate(args)]
    named = {name: call.unwrap(value, host=name in host) for name, value in kwargs.items()}
    call.enqueue(what, writes, seconds)
    return call.wrap(function(*seen, **named), what)
