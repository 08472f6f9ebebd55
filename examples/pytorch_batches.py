"""Batches of tensors wait for their turn on the GPU, or where there is room.

Needs a GPU, PyTorch and dask-cuda. Without them the script says so and ends. PyTorch
allocates through RMM here (`rmm_allocator_external_lib_list` of dask-cuda). So an
allocation that does not fit evicts values, and is retried.
"""

import sys

import gpuspill
from dask.distributed import Client, wait

try:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch.cuda.is_available() is false")
except Exception as error:
    sys.exit(f"skipped: no GPU that PyTorch can use ({error})")


def make(number: int):
    """Make one batch: 64 MB."""
    return torch.full((16, 1_000_000), float(number), device="cuda")


def loss(batch, weight: float) -> float:
    """Compute something on the device, and bring a number back."""
    return float(((batch * weight) ** 2).mean())


def main() -> None:
    """Go over the batches twice, as two epochs would."""
    with (
        gpuspill.LocalCUDACluster(
            n_workers=1,
            device_memory_limit="600 MB",
            rmm_pool_size="1 GB",
            rmm_allocator_external_lib_list="torch",
        ) as cluster,
        Client(cluster) as client,
    ):
        batches = client.map(make, range(20))  # 1.3 GB
        wait(batches)
        for weight in (1.0, 2.0):
            losses = client.gather(client.map(loss, batches, weight=weight))
            assert losses == [(number * weight) ** 2 for number in range(20)]
        numbers = gpuspill.statistics(client)
        print(
            numbers[["device_limit", "device_nbytes", "device_spills", "device_restores"]].T
        )
        assert numbers["device_spills"].sum() > 0


if __name__ == "__main__":
    main()
