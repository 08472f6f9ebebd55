"""A cluster that runs already is switched to gpuspill, without a restart.

The workers have data in memory and on disk. The plugin takes over both. It refuses, and
changes nothing, if a worker's data is in something that it does not know.
"""

import dask
import dask.array as da
import gpuspill
from dask.distributed import Client, LocalCluster


def main() -> None:
    """Fill a stock cluster, switch, and go on computing."""
    dask.config.set({"distributed.worker.memory.target": 0.1})  # so that a small job spills
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="1 GiB") as cluster,
        Client(cluster) as client,
    ):
        x = (
            da.random.default_rng(0).random((5_000, 10_000), chunks=(250, 10_000)).persist()
        )  # 400 MB, with stock spilling
        before = float(x.sum().compute())

        client.register_plugin(gpuspill.SpillPlugin())

        assert abs(float(x.sum().compute()) - before) < 1e-6 * before
        numbers = gpuspill.statistics(client)
        print(numbers[["limit", "host_nbytes", "disk_nbytes", "restores", "loop_io"]].T)
        assert len(numbers) == 2
        assert numbers["restores"].sum() > 0


if __name__ == "__main__":
    main()
