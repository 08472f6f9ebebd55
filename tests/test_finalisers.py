"""A finaliser that waits for another thread, at any line: no lock may be held there that the other one needs.

The garbage collector may run it anywhere. Here it runs before each line of gpuspill's own code, one after another, and
asks for a value that another thread is just reading: it has to be given a copy, or to be able to wait.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.distributed.mapping import SpillStore
from tests.threads import in_thread
from tests.tracing import interrupted

TIMEOUT = 60
NBYTES = 200_000


def value(key: str) -> bytes:
    return key.encode() * NBYTES


class Parked:
    """Reads a value in a thread of its own, which waits in the middle until it is let go."""

    def __init__(self, store: SpillStore, key: str) -> None:
        arrived, self.go = threading.Event(), threading.Event()
        allocate = store.manager._restorer._allocate
        assert allocate is not None
        reader: list[threading.Thread] = []

        def park(nbytes: int) -> memoryview:
            if threading.current_thread() in reader:
                arrived.set()
                assert self.go.wait(TIMEOUT)
            return allocate(nbytes)

        def read() -> bytes:
            reader.append(threading.current_thread())
            return bytes(store[key])

        store.manager._restorer._allocate = park
        self.result = in_thread(read)
        assert arrived.wait(TIMEOUT)


OPERATIONS: dict[str, Callable[[SpillStore], object]] = {
    "get": lambda store: store["a"],
    "get of what is in memory": lambda store: store["m"],
    "get_many": lambda store: store.manager.batch.get_many(["a", "b"]).result(TIMEOUT),
    "set": lambda store: store.__setitem__("new", value("n")),
    "delete": lambda store: store.__delitem__("a"),
    "evict": lambda store: store.manager.limits.evict_all(),
    "statistics": lambda store: store.statistics(),
    "wake": lambda store: store.manager.engine.wake(),
}


@pytest.mark.fault(
    "a finaliser in between",
    on=("host→disk", "disk→host", "release", "close"),
    outcome="does not wait for its own thread",
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_whoever_waits_at_any_line_is_not_waited_for(name: str, tmp_path: Path) -> None:
    for nth in itertools.count(1):
        store = build_store(Settings(device=None), str(tmp_path))
        try:
            for key in "abcx":
                store[key] = value(key)
            store.manager.limits.evict_all()
            store["m"] = value("m")
            parked = Parked(store, "x")
            found = []

            def finaliser(parked: Parked = parked, store: SpillStore = store, found: list[Any] = found) -> None:
                parked.go.set()
                found.append(bytes(store["x"]))

            done = in_thread(interrupted, lambda store=store: OPERATIONS[name](store), nth, finaliser)  # type: ignore[misc]
            there_is_such_a_line = done()
            parked.go.set()
            assert parked.result() == value("x"), nth
            if there_is_such_a_line:
                assert found == [value("x")], nth
            assert bytes(store["b"]) == value("b"), nth
            store.manager.validate()
        except BaseException as error:
            error.add_note(f"before line {nth} of {name}")
            raise
        finally:
            store.close()
        if not there_is_such_a_line:
            break
    assert nth > 3, "nothing was interrupted"
