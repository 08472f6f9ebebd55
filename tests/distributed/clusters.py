"""Small clusters in this process whose workers spill, checked for cleanliness at the end of each test."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable

import pytest
from distributed.threadpoolexecutor import ThreadPoolExecutor
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster

import gpuspill
from gpuspill.storage.wrappers import WrapperStore

#: Everything is spilled at once; and only what does not fit.
LIMITS = (1, "1 MiB")


def spilling(
    *,
    limits=LIMITS,
    nthreads=(("127.0.0.1", 1), ("127.0.0.1", 2)),
    config=None,
    worker_kwargs=None,
    loop_io: int | None = 0,
    clean: bool = True,
    amm: bool = False,
    timeout: float = 60,
    **options,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a test of ``async def test(c, s, *workers)`` that runs once for each host limit.

    Parameters
    ----------
    limits
        Host limits.
    loop_io
        How many reads on the event loop's thread the test makes, each worker; None if that does not matter.
    clean
        Whether to check that nothing is pinned, promised or waited for at the end, and nothing left on disk.
    """

    def decorate(function):
        @pytest.mark.parametrize("limit", limits)
        def test(limit, **fixtures):
            directories = []

            @gen_cluster(
                client=True,
                nthreads=list(nthreads),
                config={**({} if amm else NO_AMM), "gpuspill.host-limit": limit, **(config or {})},
                worker_kwargs={"data": gpuspill.data(), **(worker_kwargs or {})},
                timeout=timeout,
                **options,
            )
            async def body(c, s, *workers):
                for worker in workers:
                    assert worker.data.statistics().limit is not None or limit is None
                    directories.append(spill_directory(worker))
                await function(c, s, *workers, **fixtures)
                if clean:
                    for worker in workers:
                        await at_rest(worker)
                if loop_io is not None:
                    for worker in workers:
                        assert worker.data.statistics().loop_io == loop_io

            body()
            for directory in directories:
                assert not os.path.exists(directory)

        # What pytest passes: the limit, and whatever the function takes after client, scheduler and workers.
        own = list(inspect.signature(function).parameters.values())[2 + len(nthreads) :]
        marks = test.pytestmark
        functools.update_wrapper(test, function)
        test.pytestmark = [*marks, *getattr(function, "pytestmark", [])]
        limit = inspect.Parameter("limit", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([limit, *own])
        return test

    return decorate


def spill_directory(worker) -> str:
    store = worker.data.records
    while isinstance(store, WrapperStore):
        store = store.store
    return store.path


async def at_rest(worker) -> None:
    """Wait until nobody uses anything, and check the store from end to end."""
    manager = worker.data.manager

    def idle() -> bool:
        statistics = manager.statistics()
        return not (statistics.pinned_nbytes or statistics.reserved_nbytes or statistics.waiting)

    await async_poll_for(idle, timeout=10)
    manager.validate()
    worker.validate_state()


async def all_spilled(*workers) -> None:
    """Spill whatever can be spilled."""
    for worker in workers:
        await asyncio.to_thread(_results_let_go, worker)
        await asyncio.to_thread(worker.data.manager.limits.evict_all)


def _results_let_go(worker) -> None:
    """Wait until no thread that has run a task holds on to the result any more, as it does for a moment after the end.

    What somebody holds is not spilled.
    """
    executor = worker.executors["default"]
    idle = worker.state.nthreads - worker.state.executing_count
    if idle > 0 and isinstance(executor, ThreadPoolExecutor):
        # Each waits for the others, so none runs two of them.
        together = threading.Barrier(idle)
        for future in [executor.submit(together.wait, 60) for _ in range(idle)]:
            future.result(60)


def attached(worker):
    """What the hooks of a worker know."""
    return worker._gpuspill
