"""Arrays of CuPy leave the GPU when it is full, for host memory and then for disk.

Needs a GPU with its libraries (`pip install ".[cuda12]"`). Without one the script says so
and ends.
"""

import sys

import dask.array as da
import gpuspill
from dask.distributed import Client

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:
    sys.exit(f"skipped: no GPU that CuPy can use ({error})")


def main() -> None:
    """Reduce an array that is larger than what may stay on the device."""
    with (
        gpuspill.LocalCUDACluster(
            n_workers=1, device_memory_limit="1 GB", rmm_pool_size="2 GB"
        ) as cluster,
        Client(cluster) as client,
    ):
        x = da.random.default_rng(0).random(
            (20_000, 20_000), chunks=(2_000, 20_000)
        )  # 3.2 GB
        x = x.map_blocks(cupy.asarray).persist()
        mean = (x - x.mean(axis=0)).std().map_blocks(cupy.asnumpy).compute()
        assert abs(float(mean) - 12**-0.5) < 1e-3  # of a uniform distribution
        numbers = gpuspill.statistics(client)
        print(
            numbers[
                [
                    "device_limit",
                    "device_nbytes",
                    "device_spills",
                    "device_restores",
                    "device_out_of_memory",
                ]
            ].T
        )
        assert numbers["device_spills"].sum() > 0


if __name__ == "__main__":
    main()
