"""What became of a key's values, asked of all workers of a cluster."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from gpuspill.distributed.frames import ask_workers
from gpuspill.distributed.mapping import SpillStore
from gpuspill.manager.story import Event

__all__ = ["story"]


def story(client: Any, key: Hashable) -> Any:
    r"""Ask every worker what became of the values of a key that left memory there.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    key
        The key, or a future that stands for it.

    Returns
    -------
    dict of str to list of Event
        Events by address of the worker, the oldest first; no entry for workers that know of none.
        See :class:`~gpuspill.manager.story.Event`: ``print(*events, sep="\n")`` shows them. Each
        worker keeps its last few thousand events; what never left memory has none. From an
        asynchronous client: an awaitable of it.
    """
    return ask_workers(client, partial(_story_of_worker, getattr(key, "key", key)), _known)


def _story_of_worker(key: Hashable, dask_worker: Any) -> list[Event] | None:
    data = dask_worker.data
    return data.story(key) if isinstance(data, SpillStore) else None


def _known(answers: dict[str, list[Event] | None]) -> dict[str, list[Event]]:
    return {address: events for address, events in answers.items() if events}
