"""A job in a container with a memory limit: more data than the container has memory.

The kernel kills a container that exceeds its limit. So the worker gets a part of what the
container has, and spills to a volume. Outside of a container the same script takes at most
600 MiB.
"""

import os

import dask.array as da
import gpuspill
from dask.distributed import Client, LocalCluster
from distributed.system import MEMORY_LIMIT


def main() -> None:
    """Persist 1 GB, and go over it twice."""
    # The rest is for the client and the scheduler, which are in the same container here.
    worker = min(int(MEMORY_LIMIT * 0.6), 600 * 2**20)
    data = gpuspill.data(spill_directory=os.environ.get("SPILL"))
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, memory_limit=worker, data=data
        ) as cluster,
        Client(cluster) as client,
    ):
        x = (
            da.random.default_rng(0)
            .random((12_500, 10_000), chunks=(250, 10_000))
            .persist()
        )  # 1 GB
        print(f"mean {x.mean().compute():.4f}, deviation {x.std().compute():.4f}")
        numbers = gpuspill.statistics(client)
        print(
            numbers[
                [
                    "limit",
                    "host_nbytes",
                    "offset_nbytes",
                    "disk_nbytes",
                    "spills",
                    "restores",
                ]
            ].T
        )
        assert numbers["spills"].sum() > 0


if __name__ == "__main__":
    main()
