"""Which objects live on a device, and which allocation owns them.

An :class:`ArrayAdapter` knows the array type of one library, by the library's public API: it takes
an array apart into memory and layout and builds one on other memory. A registry asks the adapter of
a value's type. Libraries are never imported: an adapter is asked only once the user's code has
imported the library. Before that there is no value of its type.

What no adapter knows but has ``__cuda_array_interface__`` is described by that, and flagged as
*estimated*: the interface gives the bytes an array looks at, not the allocation they belong to, and
such an array cannot be rebuilt here. Such an array is moved by its serialiser.

What is *not* covered: containers and composite types (data frames): they are taken apart elsewhere,
and their buffers come here.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Final

from gpuspill.classes import ClassTable, attribute_of
from gpuspill.device.port import AllocationId, Layout
from gpuspill.errors import contained

__all__ = ["ArrayAdapter", "ArrayDescription", "ArrayRegistry", "Recipe", "estimated_nbytes"]


#: Up to here handles of streams are names of default streams: that of the process, and that of each
#: thread.
_PER_THREAD: Final = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to build an array on some memory. Refers to no memory; may be pickled.

    Attributes
    ----------
    adapter
        Name of the adapter that can.
    layout
        How the array looks at the memory.
    """

    adapter: str
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class ArrayDescription:
    """An array, taken apart.

    Attributes
    ----------
    identity
        The memory it looks at. Arrays with the same identity share an allocation, while that lives.
    owner
        What keeps that memory alive: drop it, and all arrays on it, to let the memory go.
    token
        An object that lives exactly as long as that memory, whichever object keeps it. An address
        says which memory is meant only while its token lives. Default: the owner.
    recipe
        How to build the array again; None if it cannot be (see `estimated`).
    layout
        How it looks at the memory.
    estimated
        No adapter knows the type. The identity is that of the bytes it looks at; the allocation may
        be larger and may be shared unnoticed.
    """

    identity: AllocationId
    owner: object
    recipe: Recipe | None
    layout: Layout
    estimated: bool = False
    token: Any = None

    def __post_init__(self) -> None:
        if self.token is None:
            object.__setattr__(self, "token", self.owner)


class ArrayAdapter(ABC):
    """Knows the arrays of one library. Stateless.

    A package brings one as an entry point in ``gpuspill.array_adapters``, called without arguments.
    It has the say over those that gpuspill comes with.
    """

    name: ClassVar[str]
    """Name of the adapter, unique in a registry."""

    library: ClassVar[str]
    """Module that is imported if there can be any value of its types."""

    on_device: ClassVar[bool] = True
    """Whether its arrays are on a device; False for arrays in host memory."""

    @abstractmethod
    def types(self, library: ModuleType) -> tuple[type, ...]:
        """Return the types it knows, without subclasses, which may carry more."""

    @abstractmethod
    def describe(self, value: Any, registry: ArrayRegistry) -> ArrayDescription | None:
        """Take an array apart, without a copy or use of its memory; None leaves it alone.

        What is described as the owner has to keep the memory: it is all that does, once the array
        is gone.

        Parameters
        ----------
        value
            An array of one of :meth:`types`.
        registry
            To ask about an array that this one was made from.
        """

    @abstractmethod
    def rebuild(self, memory: Any, layout: Layout) -> Any:
        """Build an array on `memory`, which it keeps alive. Copies nothing.

        Parameters
        ----------
        memory
            An allocation of the device port; for arrays in host memory, a buffer.
        layout
            As in a description.

        Raises
        ------
        ValueError
            The layout reaches beyond the memory.
        TypeError
            The library cannot have an array there.
        """

    def reduce_view(self, whole: Any, layout: Layout) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """Return how pickle makes an array on another one's memory; None if it cannot.

        Parameters
        ----------
        whole
            An array of its library: bytes.
        layout
            How the array looks at them.

        Returns
        -------
        tuple or None
            As ``__reduce__`` returns it, of names of the library and of Python: others without
            gpuspill may read it.
        """
        return None

    def stream(self, value: Any) -> tuple[int, object] | None:
        """Return the driver's handle of an array's stream, and what keeps it; None if unknown.

        The library's current stream of the calling thread, if arrays have none of their own. May
        raise anything.
        """
        return None

    def describes(
        self, identity: AllocationId, owner: object, layout: Layout, token: object = None
    ) -> ArrayDescription:
        """Return a description of one of its arrays."""
        return ArrayDescription(identity, owner, Recipe(self.name, layout), layout, token=token)


class ArrayRegistry:
    """Finds the adapter of a value.

    Parameters
    ----------
    adapters
        Asked in this order; see :func:`gpuspill.device.adapters.all_adapters`.
    pointer_device
        Returns the identity of the device that an address belongs to, for libraries whose arrays do
        not say (:meth:`~gpuspill.device.base.Device.device_of`). Default: ``"cuda:0"``, for a
        process that sees one.

    Notes
    -----
    Thread-safe. Looking a type up is O(1) after the first time.
    """

    def __init__(
        self,
        adapters: Iterable[ArrayAdapter],
        *,
        pointer_device: Callable[[int], str] = lambda address: "cuda:0",
    ) -> None:
        self.pointer_device = pointer_device
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._by_type: ClassTable[tuple[ArrayAdapter | None]] = ClassTable()

    def adapter(self, cls: type) -> ArrayAdapter | None:
        """Return the adapter for a type, if there is one."""
        known = self._by_type.get(cls)
        if known is None:
            known = (next((adapter for adapter in self._adapters.values() if _knows(adapter, cls)), None),)
            self._by_type[cls] = known
        return known[0]

    def derives(self, cls: type) -> bool:
        """Whether an unknown type derives from a known one: it may be more than an array."""
        return any(self.adapter(base) is not None for base in attribute_of(cls, "__mro__")[1:])

    def describe(self, value: object) -> ArrayDescription | None:
        """Take an array apart.

        Returns
        -------
        ArrayDescription or None
            None if `value` is no array, or one that has to stay as it is: its adapter says so, or
            its type derives from one that is known and may carry more. Never raises.
        """
        cls = type(value)
        adapter = self.adapter(cls)
        with contained:  # if its properties raise it is not an array to us
            if adapter is not None:
                return adapter.describe(value, self)
            return None if self.derives(cls) else self._estimate(value)
        return None

    def stream(self, value: object) -> tuple[int, object] | None:
        """Return the driver's handle of an array's stream, and what keeps it, if any.

        None if nothing says so, or if it is a default stream.
        """
        adapter = self.adapter(type(value))
        found = None
        with contained:
            found = _interface_stream(value) if adapter is None else adapter.stream(value)
        return None if found is None or found[0] <= _PER_THREAD else found

    def is_on_device(self, value: object) -> bool:
        """Whether `value` is an array whose memory is on a device, as far as anybody knows."""
        adapter = self.adapter(type(value))
        if adapter is not None and not adapter.on_device:
            return False
        with contained:
            return self.describe(value) is not None or self._estimate(value) is not None
        return False

    def rebuild(self, recipe: Recipe, memory: Any) -> Any:
        """Build an array on `memory`; see :meth:`ArrayAdapter.rebuild`."""
        return self._adapters[recipe.adapter].rebuild(memory, recipe.layout)

    def reduce_view(self, whole: Any, found: ArrayDescription, low: int) -> Any:
        """Return how pickle makes an array on `whole`, which begins at byte `low`; or None."""
        assert found.recipe is not None
        layout = replace(found.layout, offset=found.layout.offset - low)
        return self._adapters[found.recipe.adapter].reduce_view(whole, layout)

    def _estimate(self, value: object) -> ArrayDescription | None:
        layout_and_address = interface_layout(value)
        if layout_and_address is None:
            return None
        layout, address = layout_and_address
        low, high = layout.span
        identity = AllocationId(self.pointer_device(address), address + low, high - low)
        return ArrayDescription(identity, value, None, layout, estimated=True)


def _knows(adapter: ArrayAdapter, cls: type) -> bool:
    library = sys.modules.get(adapter.library)
    try:
        return library is not None and any(cls is known for known in adapter.types(library))
    except AttributeError:
        # The library is only half imported, or has no such type in this version: there is no value
        # of it.
        return False


def interface_layout(value: object) -> tuple[Layout, int] | None:
    """Return layout and address by ``__cuda_array_interface__``; None if there is none.

    The layout's offset is 0: there is nothing to count it from.
    """
    # The type is asked first: objects that make up attributes have any attribute.
    if attribute_of(type(value), "__cuda_array_interface__") is None:
        return None
    interface: Mapping[str, Any] = value.__cuda_array_interface__  # type: ignore[attr-defined]
    typestr = str(interface["typestr"])
    itemsize = int(typestr[2:].partition("[")[0])  # "<M8[ns]"
    shape = tuple(int(length) for length in interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        steps = [itemsize]
        for length in reversed(shape[1:]):
            steps.append(steps[-1] * length)
        strides = tuple(reversed(steps)) if shape else ()
    address, read_only = interface["data"]
    layout = Layout(0, shape, tuple(int(step) for step in strides), typestr, itemsize, not read_only)
    return layout, int(address or 0)


def _interface_stream(value: object) -> tuple[int, object] | None:
    """Return what ``__cuda_array_interface__`` says of the stream on which an object was filled."""
    if attribute_of(type(value), "__cuda_array_interface__") is None:
        return None
    stream = value.__cuda_array_interface__.get("stream")  # type: ignore[attr-defined]
    return None if stream is None else (int(stream), None)


def estimated_nbytes(value: object) -> int | None:
    """Return the size in bytes that an object claims, by its interface or ``nbytes``.

    Never by ``sys.getsizeof``, which knows nothing of memory on a device. None if it claims none.
    Raises nothing but KeyboardInterrupt.
    """
    with contained:
        found = interface_layout(value)
        if found is not None:
            low, high = found[0].span
            return high - low
        nbytes = getattr(value, "nbytes", None)
        return operator.index(nbytes) if nbytes is not None and nbytes >= 0 else None
    return None
