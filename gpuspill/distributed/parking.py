"""Parking: giving a value that a task does not need for a while to the store.

>>> def task():  # doctest: +SKIP
...     table = gpuspill.proxify(load())
...     work_on_something_else()
...     with table as frame:
...         return summarise(frame)
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuspill.classes import is_instance
from gpuspill.distributed.internals import current_store
from gpuspill.manager.admission import Admission
from gpuspill.walk import replace

if TYPE_CHECKING:
    from gpuspill.distributed.mapping import SpillStore
    from gpuspill.tier import Internal

__all__ = ["Parked", "proxify", "unproxify"]


def proxify(value: Any) -> Parked:
    """Give a value to the store here, which may spill it until it is asked for.

    Parameters
    ----------
    value
        Any object. The caller should let go of it: a value that is referred to cannot leave memory.

    Returns
    -------
    Parked
        A handle. Dropping it gives the value up.

    Notes
    -----
    In a task the store is that of the worker that runs it; elsewhere, in a thread that a task
    started for instance, that of the one running worker of this process that has gpuspill. If there
    is none (in a client's process, in a task of a worker without gpuspill), or if there are
    several, the handle just keeps the value in memory, and gives it as any other does.

    Blocks while there is more in memory than may be and something can still leave, so that a task
    may park more than fits; not on the event loop, not where the handle just keeps the value, and
    not if the setting ``gpuspill.admission`` is off.
    """
    if type(value) is Parked:
        return value
    store = current_store()
    parked = Parked(value, store)
    if store is not None:
        store.wait_for_room()
    return parked


def unproxify(value: Any) -> Any:
    """Return a value with each handle, however deep, replaced by what it stands for.

    Blocks while that is read, in the calling thread.

    Raises
    ------
    DataLostError
        It was on disk and cannot be read back.
    """
    return replace(value, lambda item: unproxify(item.resolve()) if is_instance(item, Parked) else item)


def _identity(value: Any) -> Any:
    """Rebuild a pickled handle: as its value."""
    return value


class Parked:
    """A handle for a parked value. As a context manager it gives the value, kept in memory.

    Parameters
    ----------
    store
        Where to put it; None to keep it here.

    Notes
    -----
    Thread-safe. Pickled, it is the value.
    """

    __slots__ = ("__weakref__", "_key", "_pins", "_store", "_value")

    def __init__(self, value: Any, store: SpillStore | None) -> None:
        self._store = store
        self._pins: list[Admission] = []
        self._key: Internal | None = None
        self._value = None
        if store is None:
            self._value = value
        else:
            self._key = store.park(value)

    def resolve(self) -> Any:
        """Return the value. Blocks while it is read; errors as :func:`unproxify`."""
        return self._value if self._store is None else self._store[self._key]

    def __enter__(self) -> Any:
        if self._store is None:
            return self._value
        assert self._key is not None
        self._pins.append(self._store.manager.admission.pin([self._key]))
        try:
            return self.resolve()
        except BaseException:
            self._pins.pop().release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pins:
            self._pins.pop().release()

    def __del__(self) -> None:
        store = getattr(self, "_store", None)
        if store is not None and self._key is not None:
            store.unpark_later(self._key, self._pins)  # those that were not left, if it was open

    def __reduce__(self) -> Any:
        return _identity, (self.resolve(),)

    def __repr__(self) -> str:
        return "<a parked value>"
