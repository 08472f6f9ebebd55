"""A manager on a bench: its store, clock and engine are the test's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from gpuspill.core.residency import State
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer, Serializer
from gpuspill.storage.base import Store
from gpuspill.testing.clock import ManualClock
from gpuspill.testing.engines import ManualEngine
from gpuspill.testing.memory_store import HookedStore

__all__ = ["ManagerKit", "bench"]


def _sizeof(value: object) -> int:
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else 100


class ManagerKit:
    """A manager without threads.

    Parameters
    ----------
    limit
        Bytes of values in memory.
    store, serializer
        By default a :class:`~gpuspill.testing.memory_store.HookedStore` and pickle.
    **options
        For the manager.

    Attributes
    ----------
    manager, store, clock, engine
        The manager and what it works with.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        store: Store | None = None,
        serializer: Serializer | None = None,
        **options: Any,
    ) -> None:
        self.store: Any = HookedStore() if store is None else store
        self.clock = ManualClock()
        options = {"sizeof": _sizeof, **options}
        self.manager = ProxifyManager(
            limit=limit,
            store=self.store,
            serializer=PickleSerializer() if serializer is None else serializer,
            clock=self.clock,
            engine=cast(Any, ManualEngine),
            **options,
        )
        self.engine: ManualEngine = self.manager.engine  # type: ignore[assignment]

    def state(self, key: Hashable) -> State:
        """Return the state of what a key holds, by the contract's names."""
        return self.manager._ledger.keys[key].state

    def records(self) -> int:
        """Return how many records there are, once the reaper has done its work."""
        self.engine.reap_all()
        records: int = self.store.statistics().records
        return records

    def spill(self, *keys: Hashable) -> None:
        """Spill the values of some keys, which must be spillable; all, if none is named."""
        manager = self.manager
        state = manager._metadata.state
        limits = state.memory.limit, state.disk.limit
        others = manager.admission.pin([key for key in manager if keys and key not in keys])
        manager.limits.set_limit(-1, limits[1])
        self.engine.spill_all()
        others.release()
        manager.limits.set_limit(*limits)
        self.engine.reap_all()
        stayed = [key for key in keys or manager.keys() if manager.is_resident(key)]
        assert not stayed, f"{stayed} did not leave memory"

    def idle(self) -> None:
        """Do everything that threads would do by now."""
        while self.engine.restore() or not self.engine.spill_all():
            pass
        self.engine.reap_all()

    def close(self) -> None:
        """Check and close."""
        self.manager.validate()
        self.manager.close()
        self.manager.validate()
        assert self.store.statistics().records == 0


@contextmanager
def bench(limit: int | None = None, **options: Any) -> Iterator[ManagerKit]:
    """Make a :class:`ManagerKit`, and close it at the end unless the test has failed."""
    made = ManagerKit(limit, **options)
    yield made
    made.close()
