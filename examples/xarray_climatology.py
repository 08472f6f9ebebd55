"""Daily fields are averaged by month, and the anomaly from that mean is computed.

Both steps read all of the data. The second one finds most of it on disk, and reads ahead.
"""

import sys

import dask.array as da
import gpuspill
import numpy as np
import pandas as pd
from dask.distributed import Client, LocalCluster

try:
    import xarray as xr
except ImportError:
    sys.exit("skipped: xarray is not installed (pip install xarray)")


def main() -> None:
    """Compute the climatology and the anomaly."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, data=gpuspill.data(host_limit="30 MB")
        ) as cluster,
        Client(cluster) as client,
    ):
        time = pd.date_range("2000-01-01", "2001-12-31")
        fields = da.random.default_rng(0).random(
            (len(time), 90, 180), chunks=(90, 90, 180)
        )  # 95 MB
        temperature = xr.DataArray(
            fields, dims=("time", "lat", "lon"), coords={"time": time}, name="temperature"
        )
        temperature = temperature.persist()
        climatology = temperature.groupby("time.month").mean().compute()
        anomaly = temperature.groupby("time.month") - climatology
        largest = float(abs(anomaly.groupby("time.month").mean()).max().compute())
        print(f"largest mean anomaly: {largest:.1e}")
        assert np.isclose(largest, 0, atol=1e-12)
        numbers = gpuspill.statistics(client)
        print(
            numbers[
                ["limit", "host_nbytes", "disk_nbytes", "spills", "restores", "prefetches"]
            ].T
        )
        assert numbers["restores"].sum() > 0


if __name__ == "__main__":
    main()
