"""Programs that change their inputs in place, at every moment of a write: nothing is lost, halved, or an error.

README offers ``clean-copies: false`` for them; with the default they may get back what a value was before.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpuspill.core.residency import State
from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.storage.files import FileStore
from gpuspill.storage.record import RecordEncoder
from gpuspill.testing.managers import ManagerKit
from tests.things import squeeze

MIB = 2**20
LARGE = MIB // 8 + 100  # numbers of 8 bytes: from 1 MiB on a record is mapped to be hashed


def change_frame(frame: pd.DataFrame, column: int, number: float) -> None:
    frame.iloc[:, column] = number


#: How to make a value of zeros, how to change its first half and the rest to ones, and what is in it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object], Callable[[Any], set]]] = {
    "array": (
        lambda: np.zeros(LARGE),
        lambda value: value[: LARGE // 2].fill(1),
        lambda value: value.fill(1),
        lambda value: set(np.unique(value).tolist()),
    ),
    "data frame": (
        lambda: pd.DataFrame({"a": np.zeros(LARGE), "b": np.zeros(LARGE, int)}),
        lambda value: change_frame(value, 0, 1),
        lambda value: change_frame(value, 1, 1),
        lambda value: set(np.unique(value.to_numpy()).tolist()),
    ),
    "list of arrays": (
        lambda: [np.zeros(LARGE), np.zeros(10), [0.0]],
        lambda value: value[0].fill(1),
        lambda value: (value[1].fill(1), value[2].__setitem__(0, 1.0)),
        lambda value: {*np.unique(value[0]), *np.unique(value[1]), *value[2]},
    ),
    "bytearray": (
        lambda: bytearray(LARGE),
        lambda value: value.__setitem__(slice(None, 10), b"\1" * 10),
        lambda value: value.__setitem__(slice(None), b"\1" * LARGE),
        lambda value: set(value),
    ),
}


class Program:
    """A task that is given the value at one moment of its spilling, counted from 0, and changes it in place.

    It ends `lasts` moments later, whether the spill has ended by then or not.
    """

    def __init__(self, kit: ManagerKit, kind: str, moment: int, lasts: int) -> None:
        self._kit, self._moment, self._lasts = kit, moment, lasts
        _, self._begin, self._end, _ = KINDS[kind]
        self._moments = itertools.count()
        self._value: Any = None
        self.began = False
        kit.manager.slots.in_use = lambda keys: self._value is not None

    def pass_by(self) -> None:
        """A moment has come."""
        now = next(self._moments)
        if now == self._moment:
            self.began = True
            self._value = self._kit.manager.get("a")
            self._begin(self._value)
        if now >= self._moment + self._lasts:
            self.end()

    def end(self) -> None:
        """It ends, if it runs."""
        if self._value is not None:
            self._end(self._value)
            self._value = None


class Watched(DaskSerializer):
    """Lets a program act before and after a value is serialised."""

    program: Program | None = None

    def dumps(self, value: object) -> Any:
        if self.program is not None:
            self.program.pass_by()
        serialized = super().dumps(value)
        if self.program is not None:
            self.program.pass_by()
        return serialized


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, program: Program) -> Iterator[None]:
    """Let a program act between any two steps of a spill."""
    writev, feed, read, close = os.writev, RecordEncoder.feed, FileStore.read, os.close

    def in_parts(fd: int, buffers: Any) -> int:
        program.pass_by()
        first = buffers[0]
        return writev(fd, [first[:MIB]] if first.nbytes > MIB else buffers)

    def hashed(encoder: RecordEncoder, data: memoryview) -> None:
        program.pass_by()
        feed(encoder, data)

    def compared(store: FileStore, *args: Any) -> Any:
        program.pass_by()
        found = read(store, *args)
        program.pass_by()
        return found

    def closed(fd: int) -> None:
        close(fd)
        program.pass_by()

    with monkeypatch.context() as patch:
        patch.setattr("gpuspill.storage.vectored.os.writev", in_parts)
        patch.setattr("gpuspill.storage.recordfile.os.close", closed)
        patch.setattr(RecordEncoder, "feed", hashed)
        patch.setattr(FileStore, "read", compared)
        yield


@pytest.mark.fault("changed in place meanwhile", on="host→disk", outcome="whole, changed or unchanged")
@pytest.mark.parametrize("read_before", [False, True], ids=["new", "read back"])
@pytest.mark.parametrize("keep_clean", [True, False], ids=["default", "clean-copies: false"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_every_moment_of_a_write(tmp_path, monkeypatch, record_property, kind, keep_clean, read_before):
    make, _, _, content = KINDS[kind]
    rounds = 0
    for lasts in (0, 1, 3, 1000):
        for moment in itertools.count():
            serializer = Watched()
            kit = ManagerKit(store=FileStore(tmp_path), serializer=serializer, keep_clean=keep_clean)
            kit.manager.store("a", make())
            if read_before:
                kit.spill()
                assert content(kit.manager.get("a")) == {0}
            recorded = kit.state("a") is State.CLEAN
            program = serializer.program = Program(kit, kind, moment, lasts)
            with watched(monkeypatch, program):
                squeeze(kit)
            program.end()
            serializer.program = None
            found = content(kit.manager.get("a"))
            assert found == {1} if program.began and not recorded else found in ({0}, {1})
            kit.spill()
            assert content(kit.manager.get("a")) == found, "it is another one on disk than it was in memory"
            kit.close()
            rounds += 1
            if not program.began:
                break
    record_property("rounds", rounds)
    print(f"{rounds} rounds")
    assert rounds >= (4 if read_before and keep_clean else 20)
