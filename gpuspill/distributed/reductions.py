"""How objects are pickled whose own way loses part of them, copies, or is final.

Each function returns what ``__reduce_ex__`` might have, made of names of Python, NumPy and
distributed only: clients and workers that do not have gpuspill read records, too.
"""

from __future__ import annotations

import copyreg
import operator
import sys
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Final, Literal

from distributed.protocol.serialize import dask_serialize, deserialize, serialize

from gpuspill.classes import attribute_of, is_plain

__all__ = ["Reduce", "flat", "keep_flag", "reduce_registered", "reduction_of", "registration"]

#: Types that dask's own way returns incomplete, by module and name: a view's format and flag, a
#: hard mask, a fill value; or everything, where it returns no buffers.
_LOSSY: Final = (
    ("builtins", "memoryview"),
    ("numpy.ma", "MaskedArray"),
    ("sparse", "COO"),
    ("scipy.sparse", "dok_matrix"),
    ("pyarrow.fs", "FileInfo"),
)
#: Takes an object and returns what pickle makes it from, or NotImplemented: then pickle asks the
#: object.
Reduce = Callable[[Any], Any]


def registration(cls: type) -> Literal["exact", "inherited"] | None:
    """Return whether dask's ``dask`` family knows a type, or a base of it.

    What is registered for a base makes an object of the base. So it does of subclasses of
    ``numpy.ndarray`` or of ``bytes``, which come back as something else. Public names of dask only:
    its dispatch notes subclasses as its own.
    """
    if not is_plain(cls) or _is_lossy(cls):
        return None
    found = _dispatched(cls)
    if found is None:
        return None
    bases: Sequence[type] = attribute_of(cls, "__mro__")[1:]
    return "inherited" if any(_dispatched(base) is found for base in bases) else "exact"


def _is_lossy(cls: type) -> bool:
    modules = ((sys.modules.get(module), name) for module, name in _LOSSY)
    return any(module is not None and cls is getattr(module, name, None) for module, name in modules)


def _dispatched(cls: type) -> Any:
    try:
        return dask_serialize.dispatch(cls)  # type: ignore[no-untyped-call]
    except Exception:  # TypeError if not; anything, where what dask has for the type's library does not suit it
        return None


def flat(frame: Any) -> memoryview:
    """Return `frame` as flat bytes without copying it, unless its memory has gaps."""
    view = memoryview(frame)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.contiguous:
        return memoryview(view.tobytes())
    if view.ndim == 1 and view.format == "B":
        return view
    return PickleBuffer(view).raw()  # memoryview.cast cannot do Fortran order


def keep_flag(header: Any, value: Any) -> None:
    """Put into dask's header whether an array is writable: dask notes it of a copy."""
    about = header.get("sub-header")
    if type(about) is dict and "writeable" in about:
        writeable = getattr(getattr(value, "flags", None), "writeable", None)
        if type(writeable) is bool:
            about["writeable"] = [writeable]


def reduction_of(cls: type) -> Reduce | None:
    """Return how to reduce objects of a type; None if pickle's own way is right."""
    if cls is memoryview:
        return _reduce_memoryview
    if issubclass(cls, BaseException):
        return _reduce_exception if attribute_of(cls, "__reduce__") is BaseException.__reduce__ else None
    numpy: Any = sys.modules.get("numpy")
    ndarray = getattr(numpy, "ndarray", None)
    if cls is ndarray:
        return _reduce_array
    if cls is getattr(getattr(numpy, "ma", None), "MaskedArray", None):
        return _reduce_masked
    if ndarray is not None and issubclass(cls, ndarray):
        names = ("__reduce__", "__reduce_ex__", "__setstate__")
        if all(attribute_of(cls, name) is getattr(ndarray, name) for name in names):
            return _reduce_subclass
        return None
    if registration(cls) == "exact":
        return reduce_registered
    if not is_plain(cls):
        return _reduce_unasked
    return None


def reduce_registered(value: Any) -> Any:
    """By dask's way for the type."""
    header, frames = serialize(value, serializers=("dask",), on_error="raise")
    keep_flag(header, value)
    return deserialize, (header, [PickleBuffer(flat(frame)) for frame in frames])


def _reduce_unasked(value: Any) -> Any:
    # Pickle looks for the class in a table of types first, which runs its metaclass's code.
    return value.__reduce_ex__(5)


def _reduce_array(array: Any) -> Any:
    """As an array on a buffer, as dask makes it; NumPy's way ends in a view of one."""
    flags, dtype = array.flags, array.dtype
    if dtype.hasobject or not array.nbytes:
        return NotImplemented
    if not (flags.c_contiguous or flags.f_contiguous) or 0 in array.strides:
        # It would write each repeated element of a broadcast array, and copy others twice.
        return reduce_registered(array)
    numpy: Any = sys.modules["numpy"]
    # As bytes, for not every type of elements can be in a buffer.
    raw = PickleBuffer(array.ravel(order="K").view(numpy.uint8))
    return numpy.ndarray, (array.shape, dtype, raw, 0, array.strides)


def _reduce_subclass(array: Any) -> Any:
    """As a plain array and what is seen in it.

    NumPy's own way copies the array, and loses what a subclass has noted in the object.
    """
    numpy: Any = sys.modules["numpy"]
    cls = type(array)
    plain = numpy.ndarray.view(array, numpy.ndarray)
    # What a mapped file notes is of that file; in memory of its own it is a mapped array no more.
    noted = {} if issubclass(cls, numpy.memmap) else getattr(array, "__dict__", {})
    made = numpy.ndarray.view, (plain, cls)
    return (*made, _Update(array, noted), None, None, operator.is_) if noted else made


class _Update:
    """Pickled in the place of an object's state, updates the attributes of the object.

    Where an object has a ``__setstate__`` of its own for something else, pickle can still be given
    a function to set the state. None of Python's takes a dictionary of attributes. So the state is
    the outcome of a call that updates them, and the function is one that does nothing with it.
    """

    def __init__(self, value: Any, noted: dict[str, Any]) -> None:
        self._value = value
        self._noted = noted

    def __reduce__(self) -> Any:
        return dict.update, (_Attributes(self._value), dict(self._noted))


class _Attributes:
    """Pickled, becomes the ``__dict__`` of an object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        return getattr, (self._value, "__dict__")


def _reduce_masked(array: Any) -> Any:
    """With the mask as it is, hard or soft; both dask's way and NumPy's own lose that."""
    numpy: Any = sys.modules["numpy"]
    ma = numpy.ma
    noted = {name: noted for name, noted in vars(array).items() if not name.startswith("_")}
    # data, mask, dtype, copy, subok, ndmin, fill_value, keep_mask, hard_mask, shrink
    made = (
        ma.MaskedArray,
        (array.data, ma.getmask(array), None, False, True, 0, array.fill_value, True, bool(array.hardmask), False),
    )
    return (*made, _Update(array, noted), None, None, operator.is_) if noted else made


def _reduce_memoryview(view: Any) -> Any:
    how = (view.format,) if view.ndim == 1 else (view.format, view.shape)
    if not view.c_contiguous:
        view = memoryview(view.tobytes() if view.readonly else bytearray(view.tobytes()))
    raw = flat(view)
    raw.cast(*how)  # TypeError, now rather than when it is read back, if Python cannot make such a view
    return memoryview.cast, (_View(PickleBuffer(raw)), *how)


class _View:
    """Pickled, becomes a memoryview of some bytes."""

    def __init__(self, raw: PickleBuffer) -> None:
        self._raw = raw

    def __reduce__(self) -> Any:
        return memoryview, (self._raw,)


def _reduce_exception(error: BaseException) -> Any:
    """Without calling the class, whose ``__init__`` may want other arguments.

    With what it was raised from, but without tracebacks, which cannot be pickled.
    """
    cls = type(error)
    args = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    state = dict(error.__dict__)
    for name in ("__cause__", "__context__"):
        if getattr(error, name) is not None:
            state[name] = getattr(error, name)
    if error.__suppress_context__:
        state["__suppress_context__"] = True
    own = any("__init__" in attribute_of(base, "__dict__") for base in _heap_classes(cls))
    made_by_python = next(base for base in attribute_of(cls, "__mro__") if not _is_heap(base))
    if own and attribute_of(cls, "__new__") is attribute_of(made_by_python, "__new__") and _is_simple(made_by_python):
        return (copyreg.__newobj__, (cls, *args), state) if state else (copyreg.__newobj__, (cls, *args))  # type: ignore[attr-defined]
    return (cls, args, state) if state else (cls, args)


def _is_heap(cls: type) -> bool:
    return bool(attribute_of(cls, "__flags__") & 1 << 9)  # Py_TPFLAGS_HEAPTYPE: defined by a class statement


def _heap_classes(cls: type) -> list[type]:
    return [base for base in attribute_of(cls, "__mro__") if _is_heap(base)]


def _is_simple(cls: type) -> bool:
    """Whether an exception of Python's own has nothing but its arguments."""
    return bool(attribute_of(cls, "__basicsize__") == BaseException.__basicsize__)
