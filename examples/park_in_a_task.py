"""A task keeps more intermediate results than fit into memory.

Dask cannot see what is inside of a task. `gpuspill.proxify` gives a value to the worker's
store, which may spill it until the task asks for it again.
"""

import gpuspill
import numpy as np
from dask.distributed import Client, LocalCluster


def simulate(steps: int, size: int) -> float:
    """Keep every step, then go through them backwards."""
    state = np.zeros(size)
    parked = []
    for step in range(steps):
        state = state + step
        parked.append(
            gpuspill.proxify(state)
        )  # waits while there is no room and something can leave
    del state  # what the task refers to cannot leave
    total = 0.0
    while parked:
        with (
            parked.pop() as earlier
        ):  # the plain array, which stays in memory until the end of the block
            total += float(earlier[-1])
    return total


def main() -> None:
    """Run the task on a worker that holds a quarter of its steps."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, data=gpuspill.data(host_limit="40 MB")
        ) as cluster,
        Client(cluster) as client,
    ):
        steps = 20
        result = client.submit(simulate, steps, 1_000_000).result()  # 20 arrays of 8 MB
        assert result == sum(sum(range(step + 1)) for step in range(steps))
        numbers = gpuspill.statistics(client)
        print(numbers[["limit", "spills", "restores", "written_nbytes", "wait_seconds"]].T)
        assert numbers["spills"].sum() > 0


if __name__ == "__main__":
    main()
