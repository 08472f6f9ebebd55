"""Kinds of values that libraries make; see :mod:`gpuspill.testing.kinds`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

__all__ = ["MORE", "Labelled", "Make", "pandas_kinds", "pyarrow_kinds"]

Make: TypeAlias = Callable[[], Any]


class Labelled(pd.DataFrame):  # type: ignore[misc]
    """A frame of another class."""

    @property
    def _constructor(self) -> Any:
        return Labelled


def _frame() -> Any:
    columns = {"a": np.arange(300), "b": np.arange(300.0), "c": list("xyz") * 100}
    return pd.DataFrame(columns, index=pd.date_range("2020", periods=300, tz="UTC"))


def _noted() -> Any:
    frame = _frame()
    frame.attrs["unit"] = "m"
    return frame


def _twice() -> Any:
    frame = _frame()
    return {"a": [frame, frame], "b": (frame.a,)}


def pandas_kinds() -> dict[str, Make]:
    """Return the kinds of pandas."""
    return {
        "DataFrame": _frame,
        "DataFrame, objects": lambda: pd.DataFrame({"o": [[1], {"a": 2}, None] * 10}),
        "DataFrame, categories": lambda: _frame().astype({"c": "category"}),
        "DataFrame, nullable": lambda: pd.DataFrame({"i": pd.array([1, None] * 50, "Int64"), "s": ["a", None] * 50}),
        "DataFrame, Arrow": lambda: pd.DataFrame({"i": pd.array([1, None] * 50, "int64[pyarrow]")}),
        "DataFrame, levels": lambda: _frame().set_index(["a", "c"]),
        "DataFrame, empty": lambda: _frame().iloc[:0],
        "DataFrame, attrs": _noted,
        "DataFrame, sparse": lambda: pd.DataFrame({"s": pd.arrays.SparseArray([0, 0, 1] * 100)}),
        "DataFrame, columns twice": lambda: pd.concat([_frame(), _frame()], axis=1),
        "DataFrame subclass": lambda: Labelled(_frame()),
        "Series": lambda: _frame().b,
        "Series, named": lambda: _frame().b.rename(("x", 1)),
        "Series, period": lambda: pd.Series(pd.period_range("2020", periods=10, freq="M")),
        "Series, interval": lambda: pd.Series(pd.interval_range(0, 10)),
        "Index": lambda: pd.Index(list("abc") * 100, name="n"),
        "RangeIndex": lambda: pd.RangeIndex(3, 300, 3, name="n"),
        "MultiIndex": lambda: pd.MultiIndex.from_product([[1, 2], list("ab")], names=["x", None]),
        "DatetimeIndex": lambda: pd.date_range("2020", periods=10, freq="W", tz="UTC"),
        "Timestamp": lambda: pd.Timestamp("2020-01-02 03:04:05.000000007", tz="UTC"),
        "Timedelta": lambda: pd.Timedelta("1D 2ns"),
        "Categorical": lambda: pd.Categorical(list("xyx"), list("zyx"), ordered=True),
        "NA and NaT": lambda: [pd.NA, pd.NaT],
        "frames in containers": _twice,
    }


def _table() -> Any:
    return pa.table({"a": list(range(300)), "b": ["x", None, "z"] * 100})


def _tables() -> Any:
    table = _table()
    return {"a": [table, table], "b": (table["a"],)}


def pyarrow_kinds() -> dict[str, Make]:
    """Return the kinds of pyarrow."""
    return {
        "Table": _table,
        "Table, metadata": lambda: _table().replace_schema_metadata({"unit": "m"}),
        "Table, slice": lambda: _table().slice(10, 100),
        "Table, empty": lambda: _table().slice(0, 0),
        "RecordBatch": lambda: _table().to_batches()[0],
        "Array": lambda: pa.array([1, None, 3] * 100),
        "Array, nested": lambda: pa.array([[1], None, [2, 3]] * 100),
        "Array, dictionary": lambda: pa.array(["x", "y"] * 100).dictionary_encode(),
        "ChunkedArray": lambda: pa.chunked_array([[1, 2], [3]]),
        "Schema": lambda: _table().schema.with_metadata({"unit": "m"}),
        "Scalar": lambda: pa.scalar(5, pa.int8()),
        "Buffer": lambda: pa.py_buffer(b"x" * 10_000),
        "Arrow in containers": _tables,
    }


def _scipy() -> dict[str, Make]:
    from scipy import sparse

    def of(form: str) -> Make:
        return lambda: sparse.random_array((100, 80), density=0.1, format=form, rng=np.random.default_rng(5))

    forms = {f"{form} array": of(form) for form in ("csr", "csc", "coo", "bsr", "dia", "dok", "lil")}
    return forms | {
        "csr matrix": lambda: sparse.csr_matrix(np.eye(30)),
        "dok matrix": lambda: sparse.dok_matrix(np.eye(30)),
        "sparse in containers": lambda: [sparse.csr_array(np.eye(30)), {"a": sparse.coo_array(np.eye(3))}],
    }


def _sparse() -> dict[str, Make]:
    import sparse

    return {
        "COO": lambda: sparse.COO.from_numpy(np.eye(30)),
        "GCXS": lambda: sparse.GCXS.from_numpy(np.eye(30)),
        "DOK": lambda: sparse.DOK.from_numpy(np.eye(5)),
        "COO, fill value": lambda: sparse.COO.from_numpy(np.eye(30), fill_value=1.0),
    }


def _awkward() -> dict[str, Make]:
    import awkward as ak

    return {
        "Array": lambda: ak.Array([[1, 2], [], [3.5, None]] * 30),
        "Array of records": lambda: ak.Array([{"x": 1, "y": "a"}] * 30),
        "Array, attrs": lambda: ak.Array([1, 2, 3], attrs={"unit": "m"}),
        "Record": lambda: ak.Record({"x": 1, "y": [1, 2]}),
    }


def _xarray() -> dict[str, Make]:
    import xarray as xr

    def data() -> Any:
        return xr.DataArray(
            np.arange(1200.0).reshape(30, 40),
            dims=("x", "y"),
            coords={"x": np.arange(30)},
            attrs={"unit": "m"},
            name="n",
        )

    return {
        "DataArray": data,
        "Dataset": lambda: xr.Dataset({"a": data(), "b": ("y", np.arange(40))}, attrs={"of": "it"}),
        "Variable": lambda: xr.Variable(("x",), np.arange(30), {"unit": "m"}),
        "DataTree": lambda: xr.DataTree.from_dict(
            {"/": xr.Dataset({"a": data()}), "/child": xr.Dataset({"b": data()})}
        ),
    }


def _shapely() -> dict[str, Make]:
    import shapely

    return {
        "Point": lambda: shapely.Point(1, 2, 3),
        "Polygon": lambda: shapely.Polygon([(0, 0), (1, 0), (1, 1)], [[(0.2, 0.1), (0.3, 0.1), (0.3, 0.2)]]),
        "array of geometries": lambda: shapely.points(np.arange(20.0).reshape(10, 2)),
    }


def _geopandas() -> dict[str, Make]:
    import geopandas
    import shapely

    def frame() -> Any:
        points = shapely.points(np.arange(20.0).reshape(10, 2))
        return geopandas.GeoDataFrame({"a": np.arange(10)}, geometry=points, crs="EPSG:4326")

    return {"GeoDataFrame": frame, "GeoSeries": lambda: frame().geometry}


def _astropy() -> dict[str, Make]:
    from astropy import coordinates, table, time, units

    return {
        "Quantity": lambda: np.arange(1000.0) * units.m,
        "Quantity, one": lambda: 5 * units.km / units.s,
        "Angle": lambda: coordinates.Angle(np.arange(10.0), "deg"),
        "Column": lambda: table.Column(np.arange(10), name="a", unit="m", description="of it"),
        "MaskedColumn": lambda: table.MaskedColumn(np.arange(10), mask=np.arange(10) % 2 == 0, name="a"),
        "Table": lambda: table.Table({"a": np.arange(10), "b": list("abcdefghij")}, meta={"of": "it"}),
        "QTable": lambda: table.QTable({"a": np.arange(10) * units.m}),
        "Time": lambda: time.Time(["2020-01-01", "2021-01-01"]),
        "SkyCoord": lambda: coordinates.SkyCoord([1, 2] * units.deg, [3, 4] * units.deg),
        "Unit": lambda: units.m / units.s,
    }


def _pillow() -> dict[str, Make]:
    from PIL import Image

    return {
        "Image": lambda: Image.fromarray(np.arange(3072, dtype="u1").reshape(32, 32, 3)),
        "Image, palette": lambda: Image.new("P", (8, 8), 3),
    }


def _networkx() -> dict[str, Make]:
    import networkx as nx

    return {
        "Graph": lambda: nx.path_graph(50),
        "DiGraph": lambda: nx.DiGraph([(1, 2, {"weight": 3}), (2, "x", {})], name="n"),
        "MultiGraph": lambda: nx.MultiGraph([(1, 2, "a"), (1, 2, "b")]),
    }


#: What is made where the library is installed: kinds by the module to import.
MORE: Mapping[str, Callable[[], Mapping[str, Make]]] = {
    "scipy": _scipy,
    "sparse": _sparse,
    "awkward": _awkward,
    "xarray": _xarray,
    "shapely": _shapely,
    "geopandas": _geopandas,
    "astropy": _astropy,
    "PIL": _pillow,
    "networkx": _networkx,
}
