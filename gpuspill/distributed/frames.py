"""Questions to all workers of a cluster, answered as data frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from gpuspill.config.jit_unspill import answer_once
from gpuspill.distributed.reporting import statistics_of_worker
from gpuspill.manager.statistics import Statistics
from gpuspill.monitoring import units
from gpuspill.monitoring.catalogue import catalogue
from gpuspill.monitoring.samples import combined

__all__ = ["ask_workers", "require_pandas", "statistics", "wide"]


def statistics(client: Any, *, detail: bool = False) -> Any:
    """Ask every worker for the numbers of its store.

    Parameters
    ----------
    client
        A ``distributed.Client``.
    detail
        What is shown when the frame is printed or displayed: a few columns that answer questions,
        in readable units and with a last row for all workers together; or, if true, every column as
        it is.

    Returns
    -------
    pandas.DataFrame
        A row a worker (the index holds the addresses), a column for each attribute of
        :class:`~gpuspill.manager.statistics.Statistics`, in bytes, seconds and counts. Workers
        without gpuspill have no row; if that is all of them, a warning is logged, once. From an
        asynchronous client: an awaitable of it.

    Raises
    ------
    ImportError
        pandas is not installed here.
    """
    require_pandas("gpuspill.statistics")
    return ask_workers(client, statistics_of_worker, _detailed if detail else _summarised)


def require_pandas(who: str) -> Any:
    """Return pandas, which is optional; the ImportError says who wants it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            f"{who} returns a pandas.DataFrame, and pandas cannot be imported here ({error}): pip install pandas"
        ) from error
    return pandas


def ask_workers(client: Any, question: Callable[[Any], Any], combine: Callable[[dict[str, Any]], Any]) -> Any:
    """Run `question` on every worker, and `combine` the answers; may be awaitable.

    An answer of None says that the worker has no gpuspill. If none has, the error says how to come
    by it.
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


#: What a summary shows: heading, and the statistic.
_SUMMARY = {
    "device": "device_nbytes",
    "device limit": "device_limit",
    "in memory": "host_nbytes",
    "limit": "limit",
    "in use": "pinned_nbytes",
    "on disk": "spilled_nbytes",
    "written": "written_nbytes",
    "read": "read_nbytes",
    "waited": "wait_seconds",
    "overcommits": "overruns",
    "lost": "lost",
}


@cache  # made when pandas is needed first: it is no requirement
def _frames() -> tuple[Any, Any]:
    """Return two kinds of data frame: one prints all, the other a summary."""
    pd = require_pandas("gpuspill.statistics")

    plain: Any = pd.DataFrame

    class Wide(plain):  # type: ignore[misc]
        """Prints all of its columns, however many there are."""

        @property
        def _constructor(self) -> Any:
            return plain

        def __repr__(self) -> str:
            text: str = self.to_string(max_rows=60)
            return text

    class Summary(Wide):
        """Has all numbers of all workers; prints a few of them, with their units and their sums."""

        def summary(self) -> Any:
            """Return what is printed: text."""
            rows = {address: dict(row) for address, row in self.astype(object).where(self.notna(), None).iterrows()}
            if len(rows) > 1:
                rows[f"all {len(rows)}"] = combined(rows)
            columns = {
                heading: name
                for heading, name in _SUMMARY.items()
                if not name.startswith("device")
                or any(row.get("device_limit") or row.get(name) for row in rows.values())
            }
            known = catalogue()
            return pd.DataFrame(
                {
                    heading: [units.amount(known[name], row[name]) for row in rows.values()]
                    for heading, name in columns.items()
                },
                index=list(rows),
            )

        def __repr__(self) -> str:
            if not set(_SUMMARY.values()) <= set(self.columns):
                return super().__repr__()
            text: str = self.summary().to_string(max_rows=60)
            return f"{text}\n(all {self.shape[1]} columns: statistics(client, detail=True))"

        def _repr_html_(self) -> str:
            html: str = self.summary()._repr_html_()
            return html

    return Wide, Summary


def wide(frame: Any) -> Any:
    """Return a frame that prints all of its columns."""
    return _frames()[0](frame)


def _detailed(answers: Mapping[str, Mapping[str, float | None] | None]) -> Any:
    return wide(_numbers(answers))


def _summarised(answers: Mapping[str, Mapping[str, float | None] | None]) -> Any:
    return _frames()[1](_numbers(answers))


def _numbers(answers: Mapping[str, Mapping[str, float | None] | None]) -> Any:
    pd = require_pandas("gpuspill.statistics")

    rows = {address: row for address, row in answers.items() if row is not None}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(Statistics.__slots__))
