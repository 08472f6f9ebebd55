"""What every policy has to do, what this one does besides, and how a cluster uses it."""

import dask.array as da
import gpuspill
from dask.distributed import Client, LocalCluster
from gpuspill.testing.policy_tests import PolicyTests, Value
from largest_first import LargestFirst


class TestLargestFirst(PolicyTests):
    """The conformance suite."""

    make = LargestFirst


def test_the_largest_value_leaves_first():
    policy = LargestFirst({0: Value(10), 1: Value(30), 2: Value(20)})
    for vid in range(3):
        policy.insert(vid)
    assert policy.first() == 1
    policy.discard(1)
    assert policy.first() == 2


def test_on_a_cluster():
    with (
        LocalCluster(
            n_workers=1,
            processes=False,
            dashboard_address=":0",
            data=gpuspill.data(host_limit="2 MiB", eviction_policy=LargestFirst),
        ) as cluster,
        Client(cluster) as client,
    ):
        x = da.arange(1_000_000, chunks=50_000).persist()  # 8 MB
        assert x.max().compute() == 999_999
        assert gpuspill.statistics(client)["spills"].sum() > 0
