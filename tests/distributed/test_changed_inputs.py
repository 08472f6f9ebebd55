"""Tasks that change their inputs in place; ``tests/test_changed_in_place.py`` has every moment of it."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from distributed import Event
from distributed.utils_test import async_poll_for

from tests.distributed.clusters import all_spilled, spilling

pytestmark = pytest.mark.cluster

ONE = (("127.0.0.1", 1),)
SIZE = 200_000


def bump(x, half, go):
    """Change the first half; the rest when told to."""
    x[: SIZE // 2] += 1
    half.set()
    go.wait(60)
    x[SIZE // 2 :] += 1


def look(x):
    return set(np.unique(x).tolist())


@spilling(limits=[None], nthreads=ONE)
async def test_what_a_running_task_has_in_hand_is_not_written(c, s, a):
    """However often the room that it takes is needed."""
    half, go = Event(client=c), Event(client=c)
    x = await c.scatter(np.zeros(SIZE), hash=False)
    task = c.submit(bump, x, half, go)
    await half.wait()
    try:
        for _ in range(10):
            await asyncio.to_thread(a.data.manager.limits.evict_all)
        assert a.data.statistics().spills == 0
    finally:
        await go.set()
    await task
    await all_spilled(a)
    assert x.key in a.data.disk
    assert await c.submit(look, x) == {1}


@pytest.mark.parametrize("clean_copies", [True, False])
@pytest.mark.parametrize("ends", ["before", "after"])
@spilling(limits=[None], nthreads=ONE)
async def test_a_task_is_given_what_is_being_written(c, s, a, monkeypatch, ends, clean_copies):
    """It ends before the write does, or after."""
    records, manager = a.data.records, a.data.manager
    manager._metadata.state._records.keep_clean = clean_copies
    writing, written = threading.Event(), threading.Event()
    half, go = Event(client=c), Event(client=c)
    write = records.write

    def held_up(header, frames):
        if not writing.is_set():
            writing.set()
            written.wait(60)
        return write(header, frames)

    monkeypatch.setattr(records, "write", held_up)
    x = await c.scatter(np.zeros(SIZE), hash=False)
    evicting = asyncio.create_task(asyncio.to_thread(manager.limits.evict_all))
    await asyncio.to_thread(writing.wait, 60)
    task = c.submit(bump, x, half, go)
    await half.wait()
    try:
        if ends == "before":
            await go.set()
            await task
        written.set()
        await evicting
        assert ends == "before" or x.key in a.data.memory, "it is still being changed"
    finally:
        written.set()
        await go.set()
    await task
    await all_spilled(a)
    await async_poll_for(lambda: x.key in a.data.disk, timeout=10)
    assert await c.submit(look, x) == {1}
