"""Unknown sizes of values: of types not registered, and memory that others manage."""

from __future__ import annotations

from collections.abc import Hashable, Sized
from sys import getsizeof
from typing import Any

from dask.sizeof import sizeof, sizeof_default
from distributed.sizeof import safe_sizeof

from gpuspill.classes import identities, is_instance, is_plain
from gpuspill.core.sizes import UNKNOWN_NBYTES, as_nbytes
from gpuspill.device.arrays import estimated_nbytes
from gpuspill.errors import contained
from gpuspill.walk import replace

__all__ = ["SCALARS", "Claims", "Noted", "claimed_nbytes", "external_nbytes", "measure", "passive_nbytes"]

#: There may be hundreds of thousands of them, and nothing has to be found out about them.
SCALARS = identities(int, float, complex, bool, str, bytes, type(None))

#: So many answers are kept at most for values that are not stored: tasks whose worker closes
#: meanwhile.
_CLAIMS = 1000


def claimed_nbytes(value: object) -> int | None:
    """Return the bytes that an object claims if dask knows no size for it; else None.

    Raises nothing but KeyboardInterrupt. What dask says of such types is ``sys.getsizeof``, which
    knows nothing of memory elsewhere, or nothing: looking for the size of a type makes dask import
    what it has for the type's library, which raises for Numba's simulator.
    """
    nbytes = None if _is_known(type(value)) else estimated_nbytes(value)
    return nbytes if nbytes is None or nbytes == as_nbytes(nbytes) else None


def _is_known(cls: type) -> bool:
    known = False
    if is_plain(cls):
        with contained:
            known = sizeof.dispatch(cls) is not sizeof_default  # type: ignore[no-untyped-call]
    return known


def passive_nbytes(value: object) -> int | None:
    """Return an object's bytes without looking at its memory: by dask or ``nbytes``.

    None if neither tells it. Raises nothing but KeyboardInterrupt.
    """
    with contained:
        nbytes = sizeof(value) if _is_known(type(value)) else getattr(value, "nbytes", None)
        return None if nbytes is None else as_nbytes(nbytes)
    return None


class Claims:
    """What objects claim to have, asked in the threads of the tasks that made them.

    A type's ``nbytes`` may take its time, and the event loop, on which values are stored, would
    stand still meanwhile. Thread-safe; each step is one operation that Python makes atomic.

    Attributes
    ----------
    parked
        The keys of values that tasks have parked: while there are any, results may have handles in
        them.
    """

    def __init__(self) -> None:
        self._claims: dict[int, tuple[type, int | None]] = {}
        self.parked: Sized = ()

    def ask(self, value: object) -> None:
        """Ask a value before it is stored, once, here. Raises only KeyboardInterrupt."""
        cls = type(value)
        if id(cls) in SCALARS or _is_known(cls):
            return
        claimed = claimed_nbytes(value)
        if len(self._claims) >= _CLAIMS:
            self._claims.clear()
        self._claims[id(value)] = cls, claimed

    def take(self, value: object) -> int | None:
        """Return what :func:`claimed_nbytes` does; if the value was not asked before, it is now."""
        cls, claimed = self._claims.pop(id(value), (None, None))
        return claimed if cls is type(value) else claimed_nbytes(value)


def measure(value: object) -> int:
    """Return the size of a value in bytes, whether dask knows its type or not.

    Raises nothing but KeyboardInterrupt, whatever the value's type does: this may run on the event
    loop.
    """
    claimed = claimed_nbytes(value)
    if claimed is not None:
        return claimed
    with contained:
        # Of others dask cannot be asked: it has a dictionary of types.
        return as_nbytes((safe_sizeof if is_plain(type(value)) else getsizeof)(value))
    return UNKNOWN_NBYTES


def external_nbytes(value: object, types: tuple[type, ...]) -> int | None:
    """Return the bytes of objects of some types in a value, each once; None without any."""
    found: dict[int, int] = {}

    def look(item: Any) -> Any:
        if is_instance(item, *types):
            found[id(item)] = measure(item)
        return item

    with contained:  # what its own types do when they are looked into is not ours
        replace(value, look)
    return sum(found.values()) if found else None


class Noted:
    """Bytes noted for some keys. Thread-safe.

    Attributes
    ----------
    nbytes
        What is noted, by key. To be read only.
    """

    def __init__(self) -> None:
        self.nbytes: dict[Hashable, int] = {}

    def note(self, key: Hashable, nbytes: int | None) -> None:
        """Note something for a key, or nothing any more."""
        if nbytes is not None:
            self.nbytes[key] = nbytes
        elif self.nbytes:
            self.nbytes.pop(key, None)

    @property
    def total(self) -> int:
        """The sum."""
        return sum(list(self.nbytes.values())) if self.nbytes else 0
