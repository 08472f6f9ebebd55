"""Values that leave memory in another order: the setting ``eviction-policy``. And doors for installed packages."""

from __future__ import annotations

import dataclasses
import logging
import sys

import dask
import numpy as np
import pytest
import zict
from distributed import wait
from distributed.utils_test import gen_cluster

import gpuspill
from gpuspill.config import Settings
from gpuspill.core.policy import NextUsePolicy
from gpuspill.core.residency import Tier
from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.distributed.attach import attach
from gpuspill.distributed.factory import build_store
from gpuspill.errors import ConfigError
from gpuspill.storage.files import FileStore
from gpuspill.storage.wrappers import WrapperStore
from gpuspill.testing.managers import bench
from tests.distributed.clusters import all_spilled


class LastInFirstOut(NextUsePolicy):
    """What came last leaves first."""

    def first(self):
        return max(self, default=None)


@pytest.mark.cluster
@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"data": gpuspill.data(eviction_policy=LastInFirstOut, host_limit="250 kB")},
    config={"distributed.worker.memory.spill": False, "gpuspill.follow-process-memory": False},
)
async def test_a_worker_evicts_in_the_order_of_its_policy(c, s, a):
    xs = []
    for number in range(4):
        xs.append(c.submit(np.full, 10_000, number, key=f"x-{number}"))
        await wait(xs)
    manager = a.data.manager
    assert type(manager._metadata.state.queue.policy.policy) is LastInFirstOut
    # By recency the first ones would have gone.
    assert "x-0" in manager.keys_in(Tier.HOST)
    assert sum(await c.gather(c.map(np.sum, xs))) == 60_000


@pytest.mark.cluster
@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    worker_kwargs={"data": gpuspill.data(eviction_policy=LastInFirstOut, device="simulated", host_limit=1)},
)
async def test_it_orders_both_tiers_and_is_shown_by_its_name(c, s, a):
    x = c.submit(np.ones, 1000)
    await wait(x)
    await all_spilled(a)
    assert type(a.data.tier.manager._metadata.state.queue.policy.policy) is LastInFirstOut
    shown = (await gpuspill.settings(c)).loc[(a.address, "eviction_policy")]
    assert shown["in_force"] == f"{__name__}:LastInFirstOut"


class Refusing(NextUsePolicy):
    """Lets nothing go."""

    def first(self):
        return None


class Unknown(NextUsePolicy):
    """Names a value that there is not."""

    def first(self):
        return 1_000_000


class Raising(NextUsePolicy):
    """Works until it has to choose."""

    def first(self):
        raise ZeroDivisionError("by design")


class Closed(NextUsePolicy):
    """Works for no value at all."""

    def insert(self, *args, **options):
        raise ZeroDivisionError("by design")


@pytest.mark.cluster
@pytest.mark.parametrize("policy", [Refusing, Unknown, Raising, Closed])
def test_a_policy_that_fails_stops_no_worker(policy, caplog):
    @gen_cluster(
        client=True,
        nthreads=[("", 2)],
        worker_kwargs={"data": gpuspill.data(eviction_policy=policy, host_limit="250 kB")},
        config={"distributed.worker.memory.spill": False, "gpuspill.follow-process-memory": False},
    )
    async def body(c, s, a):
        xs = c.map(np.full, [10_000] * 20, range(20))
        assert sum(await c.gather(c.map(np.sum, xs))) == 10_000 * sum(range(20))
        assert a.data.statistics().spills > 10
        a.data.manager.validate()

    with caplog.at_level(logging.ERROR, "gpuspill"):
        body()
    (message,) = [record.getMessage() for record in caplog.records if "policy" in record.getMessage()]
    assert message.startswith("the eviction policy (gpuspill.eviction-policy) has failed")


def dictionary(values):
    return {}


class OldStore(WrapperStore):
    """Reads by an older contract."""

    def read(self, receipt, allocate=None):
        return self.store.read(receipt, allocate)


def old_store(directory):
    return OldStore(FileStore(directory))


class OldPolicy(NextUsePolicy):
    """Is told of values by an older contract."""

    def insert(self, vid, order=None, *, dead=False, clean=False):
        super().insert(vid, order, dead=dead, clean=clean)


def no_bucket(argument):
    raise OSError("no such bucket")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (dictionary, r"gpuspill.eviction-policy: .*dictionary.* returned builtins.dict; expected"),
        (no_bucket, r"gpuspill.eviction-policy: .*no_bucket.* raised OSError: no such bucket"),
        (
            OldPolicy,
            r"gpuspill.eviction-policy: .*returned a OldPolicy whose insert\(\) cannot be called as",
        ),
    ],
)
def test_a_policy_that_no_worker_can_use_is_one_error_where_the_cluster_is_made(tmp_path, policy, message):
    with pytest.raises(ConfigError, match=message):
        gpuspill.data(eviction_policy=policy)
    with pytest.raises(ConfigError, match=message):
        build_store(Settings.load(eviction_policy=policy, device="simulated"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_fails_on_the_second_tier_only_leaves_nothing_behind(tmp_path):
    made = []

    def once(values):
        made.append(values)
        return NextUsePolicy(values) if len(made) == 1 else no_bucket(values)

    settings = Settings.load(device="simulated")
    with pytest.raises(ConfigError, match="no such bucket"):
        build_store(dataclasses.replace(settings, eviction_policy=once), str(tmp_path))
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_fails_is_told_of_by_the_call_in_which_it_does(caplog):
    """Not by the next spill alone: a policy that takes no value may fail long before the first one."""
    with bench(policy=Closed) as kit:
        kit.manager.store("x", bytes(100))
        kit.manager.store("y", bytes(100))
    (record,) = caplog.records
    assert "eviction policy" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_what_no_worker_can_use_is_one_clear_error(c, s, a):
    with pytest.raises(ConfigError, match=r"gpuspill.eviction-policy: .*dictionary.* returned builtins.dict; expected"):
        attach(a, eviction_policy=dictionary)
    with pytest.raises(ConfigError, match=r"gpuspill.store: .* returned a OldStore whose read\(\) cannot be called"):
        attach(a, store=old_store)
    with pytest.raises(ConfigError, match=r"gpuspill.store: .*no_bucket.* raised OSError: no such bucket"):
        attach(a, store=no_bucket)
    assert not hasattr(a, "_gpuspill")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with entry points."""

    def install(code, **points):
        (tmp_path / "plug_in_for_tests.py").write_text(code)
        about = tmp_path / "plug_in_for_tests-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in-for-tests\nVersion: 1.0\n")
        text = "".join(f"[gpuspill.{group}]\n{line}\n" for group, line in points.items())
        (about / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("plug_in_for_tests", None)


def test_packages_bring_stores_and_policies_by_name(package, tmp_path):
    package(
        "from zict import File as Files\nfrom gpuspill.core.policy import NextUsePolicy as Order\n",
        stores="zipped = plug_in_for_tests:Files",
        policies="ordered = plug_in_for_tests:Order\nbroken = plug_in_for_tests:Nothing\nworse = plug_in_worse:Any",
    )
    (tmp_path / "plug_in_worse.py").write_text("1 / 0")
    with dask.config.set({"gpuspill.store": "zipped", "gpuspill.eviction-policy": "ordered"}):
        settings = Settings.load()
    assert settings.store is zict.File
    assert settings.eviction_policy is NextUsePolicy
    with pytest.raises(
        ConfigError, match=r"eviction-policy: expected .* entry point in .* \(installed: 'broken', 'ord"
    ):
        Settings.load(eviction_policy="unordered")
    with pytest.raises(ConfigError, match=r"gpuspill.eviction-policy: 'broken' cannot be imported"):
        Settings.load(eviction_policy="broken")
    with pytest.raises(ConfigError, match=r"gpuspill.eviction-policy: 'worse' cannot be imported: ZeroDivisionError"):
        Settings.load(eviction_policy="worse")


ADAPTER = """
from gpuspill.core.residency import Tier
from gpuspill.device.adapters import NumpyAdapter

class Array:
    pass

class Adapter(NumpyAdapter):
    name = "made-up"
    library = __name__

    def types(self, library):
        return (library.Array,)
"""


def test_packages_bring_array_adapters(package, caplog):
    package(
        ADAPTER,
        array_adapters="b = plug_in_for_tests:Adapter\nc = plug_in_for_tests:Array\nd = plug_in_for_tests:No",
    )
    with caplog.at_level(logging.WARNING, "gpuspill"):
        names = [adapter.name for adapter in all_adapters()]
    assert names[0] == "made-up"
    assert names.count("made-up") == 1
    import plug_in_for_tests

    assert ArrayRegistry(all_adapters()).adapter(plug_in_for_tests.Array).name == "made-up"
    messages = [record.getMessage() for record in caplog.records]
    assert any("plug_in_for_tests:Array cannot be used: TypeError" in message for message in messages)
    assert any("plug_in_for_tests:No cannot be used: AttributeError" in message for message in messages)
    assert all("package plug-in-for-tests" in message for message in messages)
