"""A CUDA kernel of your own, compiled by Numba, runs on arrays that come and go.

A task gets plain device arrays: its inputs are on the device before it starts, and stay
there until it has ended. Needs a GPU with its libraries (`pip install ".[cuda12]"`).
Without one the script says so and ends.
"""

import sys

import gpuspill
import numpy as np
from dask.distributed import Client, wait

try:
    from numba import cuda

    if not cuda.is_available():
        raise RuntimeError("numba.cuda.is_available() is false")
except Exception as error:
    sys.exit(f"skipped: no GPU that Numba can use ({error})")


@cuda.jit
def scale(source, factor, target):
    """Multiply each element."""
    i = cuda.grid(1)
    if i < source.size:
        target[i] = source[i] * factor


def make(number: int):
    """Copy one block to the device: 80 MB."""
    return cuda.to_device(np.full(10_000_000, float(number)))


def scaled(block):
    """Run the kernel on a block."""
    result = cuda.device_array_like(block)
    scale[(block.size + 255) // 256, 256](block, 2.0, result)
    cuda.synchronize()
    return result


def first(block) -> float:
    """Return one element."""
    return float(block[:1].copy_to_host()[0])


def main() -> None:
    """Make blocks, run the kernel on each, and check."""
    with (
        gpuspill.LocalCUDACluster(n_workers=1, device_memory_limit="800 MB") as cluster,
        Client(cluster) as client,
    ):
        blocks = client.map(make, range(20))  # 1.6 GB
        wait(blocks)
        results = client.gather(client.map(first, client.map(scaled, blocks)))
        assert results == [2.0 * number for number in range(20)]
        numbers = gpuspill.statistics(client)
        print(
            numbers[["device_limit", "device_nbytes", "device_spills", "device_restores"]].T
        )
        assert numbers["device_spills"].sum() > 0


if __name__ == "__main__":
    main()
