"""Two tables are joined and grouped, on one worker that holds less than their data.

The join needs rows of both tables together, so it moves everything between partitions.
Partitions that wait for their turn leave for disk.
"""

import dask
import dask.dataframe as dd
import gpuspill
import numpy as np
import pandas as pd
from dask.distributed import Client, LocalCluster

ROWS = 50_000
PARTITIONS = 40


def orders(number: int) -> pd.DataFrame:
    """Make one partition of the large table: 2.4 MB."""
    random = np.random.default_rng(number)
    columns = {name: random.random(ROWS) for name in ("price", "weight", "tax", "discount")}
    return pd.DataFrame(
        {
            "customer": random.integers(0, 10_000, ROWS),
            "quantity": random.integers(1, 9, ROWS),
            **columns,
        }
    )


def main() -> None:
    """Join, group and check."""
    # A shuffle keeps buffers of its own, which have to be small if the worker is.
    dask.config.set(
        {"distributed.p2p.comm.buffer": "8 MiB", "distributed.p2p.storage.buffer": "8 MiB"}
    )
    data = gpuspill.data(host_limit="40 MB")
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit="1 GiB", data=data
        ) as cluster,
        Client(cluster) as client,
    ):
        table = dd.from_map(orders, range(PARTITIONS)).persist()
        customers = dd.from_pandas(
            pd.DataFrame(
                {
                    "customer": range(10_000),
                    "region": [f"region-{number % 7}" for number in range(10_000)],
                }
            ),
            npartitions=4,
        )
        joined = table.merge(customers, on="customer")
        by_region = joined.groupby("region").quantity.sum().compute()
        assert by_region.sum() == table.quantity.sum().compute()
        print(by_region)
        numbers = gpuspill.statistics(client)
        print(
            numbers[
                ["limit", "host_nbytes", "disk_nbytes", "spills", "restores", "loop_io"]
            ].T
        )
        assert numbers["spills"].sum() > 0


if __name__ == "__main__":
    main()
