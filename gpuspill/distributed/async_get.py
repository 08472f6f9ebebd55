"""Reading several values of a store without holding the event loop (dask/distributed#4424)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Collection, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Literal

from gpuspill.classes import is_instance
from gpuspill.core.policy import Order
from gpuspill.distributed.lost import LostValue
from gpuspill.errors import DataLostError
from gpuspill.manager import ProxifyManager
from gpuspill.tier import DeviceTier

__all__ = ["gather"]


def gather(
    manager: ProxifyManager,
    tier: DeviceTier | None,
    keys: Collection[Hashable],
    missing: Literal["raise", "omit"],
    order: Order = (),
) -> Awaitable[dict[Hashable, Any]]:
    """Return a future of the values of some keys; see ``SpillStore.async_get``.

    Parameters
    ----------
    manager
        Holds the values.
    tier
        Holds what they have on a device.
    keys, missing, order
        As there.
    """
    result: asyncio.Future[dict[Hashable, Any]] = asyncio.get_running_loop().create_future()
    try:
        source = manager.batch.get_many(keys, missing=missing, order=order)
    except KeyError as error:
        result.set_exception(error)
        return result
    if tier is not None:
        source = _resolved(source, tier)
    if source.done():
        _copy_outcome(source, result)
        return result
    return asyncio.ensure_future(_checked(source))


def _resolved(source: Future[dict[Hashable, Any]], tier: DeviceTier) -> Future[dict[Hashable, Any]]:
    """Return a future of the values of skeletons; done at once if all are there."""
    result: Future[dict[Hashable, Any]] = Future()

    def copy(resolved: Future[dict[Hashable, Any]]) -> None:
        with suppress(InvalidStateError):  # cancelled
            error = resolved.exception()
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(resolved.result())

    def found(source: Future[dict[Hashable, Any]]) -> None:
        if source.cancelled():
            result.cancel()
        elif source.exception() is not None:
            copy(source)
        else:
            tier.resolve_later(source.result()).add_done_callback(copy)

    source.add_done_callback(found)
    # Futures keep their callbacks when they are done. One that knew the other both ways would keep
    # the values, and what they have on the device, until the garbage collector comes.
    asked = weakref.ref(source)
    result.add_done_callback(lambda _: _cancel(asked()))
    return result


def _cancel(future: Future[Any] | None) -> None:
    if future is not None:
        future.cancel()


def _copy_outcome(source: Future[dict[Hashable, Any]], target: asyncio.Future[dict[Hashable, Any]]) -> None:
    error = source.exception() or _lost(source.result())
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


async def _checked(source: Future[dict[Hashable, Any]]) -> dict[Hashable, Any]:
    values = await asyncio.wrap_future(source)
    error = _lost(values)
    if error is not None:
        raise error
    return values


def _lost(values: Mapping[Hashable, Any]) -> DataLostError | None:
    return next((value.error for value in values.values() if is_instance(value, LostValue)), None)
