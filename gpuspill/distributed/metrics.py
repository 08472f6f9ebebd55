"""The names of the numbers that a worker publishes, and where they are collected.

``SpillStore.cumulative_metrics``
    Totals of the store. distributed's Prometheus collector reads them.
fine performance metrics (``context_meter``)
    The same, booked on the task or transfer in whose context it happened.
heartbeat, ``WorkerState.metrics["gpuspill"]``
    :func:`heartbeat`.
``gpuspill.statistics(client)``
    :func:`statistics`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributed.metrics import context_meter

from gpuspill.config.jit_unspill import answer_once

if TYPE_CHECKING:
    from gpuspill.distributed.mapping import SpillStore

__all__ = ["LABELS", "WAIT", "Metrics", "ask_workers", "heartbeat", "require_pandas", "statistics"]

#: What distributed's ``SpillBuffer`` reports; its consumers know these labels.
LABELS = frozenset(
    {
        "memory-read",
        "disk-read",
        "disk-write",
        "serialize",
        "deserialize",
        "compress",
        "decompress",
    }
)

#: Time that a task waited for admission. Not part of the totals: ``SpillBuffer`` has no such number.
WAIT = "gpuspill-wait"

#: Units that distributed's Prometheus collector accepts; it fails on others.
_UNITS = frozenset({"seconds", "bytes", "count"})


class Metrics:
    """Adds up what a manager reports, and passes it on to what is metered in the current context.

    Only what ``SpillBuffer`` has too; a store knows more about itself, see its statistics. What is metered is the task
    or the transfer on whose behalf the work was done. Thread-safe; called in the thread that did the work.
    """

    def __init__(self) -> None:
        # No lock that anybody waits for: a finaliser may use the store, and report, at any point of this.
        self._adding = threading.Lock()
        self._reports: deque[tuple[tuple[str, str], float]] = deque()
        self._totals: defaultdict[tuple[str, str], float] = defaultdict(int)

    def __call__(self, label: str, value: float, unit: str, /) -> None:
        """Report one unit of work."""
        if label in LABELS and unit in _UNITS:
            self._reports.append(((label, unit), value))
            self._add_up()
            context_meter.digest_metric(label, value, unit)

    def add(self, totals: Mapping[tuple[str, str], float]) -> None:
        """Go on from the totals of a store that this one takes over from, so that no counter goes back."""
        self._reports.extend(totals.items())
        self._add_up()

    def totals(self) -> dict[tuple[str, str], float]:
        """Return a copy of the totals; without what is just being added by another thread, perhaps."""
        self._add_up()
        return self._totals.copy()

    def _add_up(self) -> None:
        """Add what was reported to the totals, unless somebody is just doing that."""
        while self._reports and self._adding.acquire(blocking=False):
            try:
                while self._reports:
                    name, value = self._reports.popleft()
                    self._totals[name] += value
            finally:
                self._adding.release()


def heartbeat(store: SpillStore) -> dict[str, float | None]:
    """Return the store's numbers as a flat dictionary that msgpack can write. O(1)."""
    found = store.statistics()
    return {name: getattr(found, name) for name in found.__slots__}  # asdict would copy each number deeply


def statistics(client: Any) -> Any:
    """Ask every worker for the numbers of its store.

    Parameters
    ----------
    client
        A ``distributed.Client``.

    Returns
    -------
    pandas.DataFrame
        A row a worker (the index holds the addresses), a column for each attribute of
        :class:`~gpuspill.manager.statistics.Statistics`. Workers without gpuspill have no row; if that is all of
        them, a warning is logged, once. From an asynchronous client: an awaitable of it.

    Raises
    ------
    ImportError
        pandas is not installed here.
    """
    require_pandas("gpuspill.statistics")
    return ask_workers(client, _statistics_of_worker, _frame)


def require_pandas(who: str) -> Any:
    """Return pandas, which is no requirement; an ImportError that says who wants it if it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            f"{who} returns a pandas.DataFrame, and pandas cannot be imported here ({error}): pip install pandas"
        ) from error
    return pandas


def ask_workers(client: Any, question: Callable[[Any], Any], combine: Callable[[dict[str, Any]], Any]) -> Any:
    """Run `question` on every worker and return what `combine` makes of the answers; awaitable if the client is.

    An answer of None says that the worker has no gpuspill. If none has, whoever asks is told how to come by it.
    """

    def finish(found: dict[str, Any]) -> Any:
        if found and all(answer is None for answer in found.values()):
            answer_once(
                f"no worker of the cluster at {client.scheduler.address} has gpuspill attached, so there is nothing to "
                "tell. client.register_plugin(gpuspill.SpillPlugin()) attaches it to those that run; workers that are "
                "started with data=gpuspill.data() or --preload gpuspill have it from the beginning"
            )
        return combine(found)

    answers = client.run(question)
    if isinstance(answers, dict):
        return finish(answers)

    async def later() -> Any:
        return finish(await answers)

    return later()


def _statistics_of_worker(dask_worker: Any) -> dict[str, float | None] | None:
    from gpuspill.distributed.mapping import SpillStore

    data = dask_worker.data
    return heartbeat(data) if isinstance(data, SpillStore) else None


def _frame(answers: dict[str, dict[str, float | None] | None]) -> Any:
    from gpuspill.manager.statistics import Statistics

    pd = require_pandas("gpuspill.statistics")

    rows = {address: row for address, row in answers.items() if row is not None}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(Statistics.__slots__))
