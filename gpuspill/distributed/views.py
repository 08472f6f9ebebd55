"""What distributed's own code sees as ``worker.data`` while it runs under one of the hooks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from gpuspill.distributed.mapping import SpillStore

__all__ = ["ClosedView", "ResidentView", "View"]

_MISSING = object()


class View:
    """A store, with some of its values there already, each for one reading.

    Parameters
    ----------
    store
        Answers for everything else.
    values
        Values, or what stands for them, by key. Read once, because the code of a coroutine task
        runs in the same context and must see the store itself afterwards.
    """

    __slots__ = ("store", "values")

    def __init__(self, store: SpillStore, values: Mapping[Hashable, Any]) -> None:
        self.store = store
        self.values = dict(values)

    def __contains__(self, key: object) -> bool:
        return key in self.values or key in self.store

    def __getitem__(self, key: Hashable) -> Any:
        try:
            return self.values.pop(key)
        except KeyError:
            return self.store[key]


class ClosedView(View):
    """A view that contains nothing else, whatever the store holds.

    What came into the store after the values were got ready may have left memory again already, and
    must not be read on the event loop. The one who asked for it asks again.
    """

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        return key in self.values

    def __getitem__(self, key: Hashable) -> Any:
        return self.values.pop(key)


class ResidentView(View):
    """A view that contains only what can be had without reading from disk.

    Notes
    -----
    What is in memory when it is asked for by ``in`` is held until it is read, so nothing can spill
    it in between.
    """

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        if key not in self.values:
            value = self.store.peek(key, _MISSING)
            if value is _MISSING:
                return False
            self.values[key] = value
        return True
