"""A stack of images is corrected, aligned and projected.

Each image is read twice: once for the mean of the stack, and once for its own correction.
The stack is larger than the worker's memory.
"""

import dask.array as da
import gpuspill
import numpy as np
from dask.distributed import Client, LocalCluster

IMAGES = 80
SIDE = 512


def expose(block_info=None) -> np.ndarray:
    """Make one image: noise, a gradient, and a bright spot."""
    number = block_info[None]["chunk-location"][0]
    image = np.random.default_rng(number).random((1, SIDE, SIDE)) + np.linspace(0, 1, SIDE)
    image[0, number % SIDE, number % SIDE] = 100
    return image


def main() -> None:
    """Correct the stack by its mean, and take the largest value of each pixel."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, data=gpuspill.data(host_limit="50 MB")
        ) as cluster,
        Client(cluster) as client,
    ):
        stack = da.map_blocks(
            expose, chunks=((1,) * IMAGES, SIDE, SIDE), dtype=float
        ).persist()  # 168 MB
        background = stack.mean(axis=0).persist()
        projection = (stack - background).max(axis=0).compute()
        assert projection[:IMAGES, :IMAGES].diagonal().min() > 50  # every spot is found
        print(f"{IMAGES} images, {int((projection > 50).sum())} bright spots")
        numbers = gpuspill.statistics(client)
        print(
            numbers[
                ["limit", "host_nbytes", "disk_nbytes", "spills", "restores", "clean_drops"]
            ].T
        )
        assert numbers["spills"].sum() > 0


if __name__ == "__main__":
    main()
