"""A value on disk is sent as it is, and what arrives stays as it is until a task needs it."""

from __future__ import annotations

import shutil
import sys
import threading
from types import ModuleType

import dask
import numpy as np
import pytest
from dask.sizeof import sizeof
from dask.utils import typename
from distributed import Client, wait, worker_client
from distributed.client import FutureCancelledError
from distributed.protocol import dask_deserialize, dask_serialize
from distributed.utils_test import async_poll_for, gen_test

from gpuspill.distributed import sending
from gpuspill.distributed.attachment import SENDING_NBYTES
from gpuspill.distributed.lost import LostValue
from gpuspill.distributed.wire import Wire, real_type, wrap
from gpuspill.errors import DataLostError
from gpuspill.manager.ports import Encoded
from gpuspill.storage.files import FileStore
from tests.distributed.clusters import all_spilled, attached, spilling
from tests.distributed.counted import (
    COUNTS,
    NBYTES,
    Counted,
    acquired,
    certificate,
    pair,
    quiet,
    residency,
    spilled,
    total,
)

pytestmark = pytest.mark.cluster

SIZE = sizeof(Counted(NBYTES))


@pytest.fixture(autouse=True)
def _nothing_counted():
    COUNTS.clear()


@pytest.fixture(params=["tcp", "tls", "inproc"])
def network(request, tmp_path):
    """Protocol and certificates."""
    if request.param == "tls":
        if shutil.which("openssl") is None:
            pytest.skip("needs the openssl command to make a certificate")
        return {"protocol": "tls", "security": certificate(tmp_path)}
    return {"protocol": request.param}


# -- between workers -------------------------------------------------------------------------------


def test_between_workers(network):
    @gen_test()
    async def test():
        async with pair(**network) as (c, s, a, b):
            xs = await spilled(c, a, n=3)
            before = residency(a)
            await acquired(s, b, xs)
            # Neither side has decoded anything.
            assert not COUNTS
            assert residency(a) == before
            statistics = b.data.statistics()
            assert (statistics.host_nbytes, statistics.spills, statistics.deserialize_seconds) == (3 * SIZE, 0, 0)
            assert not any(b.data.manager.is_resident(x.key) for x in xs)
            # Nobody can tell it from an ordinary transfer.
            for x in xs:
                assert s.tasks[x.key].type == typename(Counted)
                assert s.tasks[x.key].nbytes == b.state.tasks[x.key].nbytes == SIZE
                assert b.state.tasks[x.key].type is Counted
            assert s.workers[a.address].nbytes == s.workers[b.address].nbytes == 3 * SIZE
            # Three tasks need them, each is decoded once.
            tasks = [c.submit(total, xs, workers=[b.address], pure=False) for _ in range(3)]
            assert await c.gather(tasks) == [6.0 * NBYTES / 8] * 3
            assert COUNTS == {"unpickled": 3}
            assert residency(a) == before
            await quiet(a)
            await quiet(b)

    test()


@gen_test()
async def test_what_does_not_fit_goes_to_disk_undecoded():
    async with pair(limits=(None, 1)) as (c, s, a, b):
        xs = await spilled(c, a, n=4)
        await acquired(s, b, xs)
        await async_poll_for(lambda: b.data.statistics().disk_keys == 4, timeout=10)
        assert not COUNTS
        assert b.data.statistics().host_nbytes == 0
        # And from there to a third place, or back.
        a_keys = [x.key for x in xs]
        s.request_remove_replicas(a.address, a_keys, stimulus_id="test")
        await async_poll_for(lambda: not a.data, timeout=10)
        await acquired(s, a, xs)
        assert not COUNTS
        assert [a.state.tasks[key].type for key in a_keys] == [Counted] * 4
        assert await c.submit(total, xs, workers=[a.address]) == 10.0 * NBYTES / 8
        assert COUNTS == {"unpickled": 4}
        await quiet(a)
        await quiet(b)


@gen_test()
async def test_what_arrived_is_passed_on_from_memory_undecoded():
    async with pair(limits=(None, None, None)) as (c, s, a, b, third):
        xs = await spilled(c, a, n=2)
        await acquired(s, b, xs)
        await a.close()
        await acquired(s, third, xs)
        assert not COUNTS
        assert b.data.statistics().spills == 0
        assert third.state.tasks["x-0"].type is Counted
        assert sum([x.data[0] for x in await c.gather(xs)]) == 3
        assert COUNTS == {"unpickled": 2}


@gen_test()
async def test_what_is_in_memory_goes_from_memory():
    async with pair() as (c, s, a, b):
        x = c.submit(Counted, NBYTES, 1, workers=[a.address])
        await wait(x)
        await acquired(s, b, [x])
        assert COUNTS == {"pickled": 1, "unpickled": 1}
        assert b.data.manager.is_resident(x.key)
        assert a.data.statistics().spills == 0


@spilling(limits=("100 kB",))
async def test_a_mixture_of_both(c, s, a, b):
    xs = [c.submit(Counted, 40_000, i, workers=[a.address]) for i in range(6)]
    await wait(xs)
    assert await c.submit(total, xs, workers=[b.address]) == 15.0 * 5000
    assert await c.submit(total, xs[::-1], workers=[a.address]) == 15.0 * 5000
    assert (await c.gather(xs))[5].data[0] == 5
    await quiet(a)
    await quiet(b)


@spilling(limits=(1,))
async def test_all_kinds_of_values(c, s, a, b):
    import pandas as pd

    values = [
        None,
        1,
        "text",
        b"bytes" * 1000,
        np.arange(1000),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(20)[::3],
        np.zeros((0, 3)),
        np.array(["a", None], dtype=object),
        pd.DataFrame({"a": range(1000), "b": ["text"] * 1000}),
        {"nested": [np.ones(1000), (np.zeros(10),)]},
        [np.arange(i) for i in range(100)],
    ]
    futures = [await c.scatter(value, workers=[a.address], hash=False) for value in values]
    await all_spilled(a)

    def same(got, number):
        return type(got) is type(values[number]) and dask.base.tokenize(got) == dask.base.tokenize(values[number])

    for number, future in enumerate(futures):
        assert await c.submit(same, future, number, workers=[b.address]), values[number]


@spilling(limits=(1,))
async def test_arrays_that_were_sent_can_be_written_to(c, s, a, b):
    x = c.submit(np.ones, 1000, workers=[a.address])
    await wait(x)
    await all_spilled(a)

    def flags(x):
        return x.flags.writeable

    assert await c.submit(flags, x, workers=[b.address])
    await all_spilled(a)
    assert (await c.gather(x)).flags.writeable


@gen_test()
async def test_a_long_header_is_not_decoded_on_the_event_loop():
    """As that of a value with 100,000 buffers, which a client gets as a header that distributed can add to."""
    threads = []

    def noted(*arguments):
        threads.append(threading.get_ident())
        return wrap(*arguments)

    async with pair() as (c, _s, a, _b):
        short = await c.scatter(np.ones(1000), workers=[a.address], hash=False)
        long = c.submit(lambda: [np.ones(1000) for _ in range(1000)], workers=[a.address])
        await wait(long)
        await all_spilled(a)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sending, "wrap", noted)
            patch.setattr(sending, "_ON_LOOP_NBYTES", 900)
            got = await c.gather([short, long])
        assert len(got[1]) == 1000
        loop = threading.get_ident()
        assert sorted(thread == loop for thread in threads) == [False, True]
        await quiet(a)


def test_large_values_are_sent_without_a_copy(network, monkeypatch):
    """From where the system has the file, if only the system reads it: a receiver in this process keeps it."""
    borrowed = []
    real = FileStore.read

    def read(store, receipt, allocate=None, **lend):
        header, frames = real(store, receipt, allocate, **lend)
        borrowed.append(frames[0].readonly)
        return header, frames

    monkeypatch.setattr(FileStore, "read", read)

    def double(x):
        x *= 2  # in place
        return x

    @gen_test()
    async def test():
        async with pair(**network) as (c, _s, a, b):
            x = c.submit(np.arange, 500_000, workers=[a.address])
            await wait(x)
            await all_spilled(a)
            y = await c.submit(double, x, workers=[b.address])
            np.testing.assert_array_equal(y, 2 * np.arange(500_000))
            assert borrowed[0] == (network["protocol"] == "tcp")
            assert y.flags.writeable
            await quiet(a)

    test()


@gen_test()
async def test_bandwidth_by_type():
    async with pair() as (c, s, a, b):
        xs = await spilled(c, a, n=2, nbytes=1_200_000)
        ys = await c.scatter([np.ones(200_000)], workers=[a.address])
        await all_spilled(a)
        COUNTS.clear()
        await acquired(s, b, xs[:1])
        assert set(b.bandwidth_types) == {Counted}
        await acquired(s, b, ys)
        assert set(b.bandwidth_types) == {Counted, np.ndarray}
        assert b.bandwidth_types[Counted][1] == 1
        await acquired(s, b, xs[1:])
        assert b.bandwidth_types[Counted][1] == 2
        assert b.bandwidth_types[Counted][0] > 0
        assert not COUNTS
        await b.heartbeat()
        assert {name.rpartition(".")[2] for name in s.bandwidth_types} == {"Counted", "ndarray"}


@gen_test()
async def test_bandwidth_of_several_types_at_once_is_nobodys():
    async with pair() as (c, _s, a, b):
        xs = await spilled(c, a, nbytes=1_200_000)
        y = c.submit(np.ones, 200_000, workers=[a.address])
        await wait(y)
        await all_spilled(a)
        assert await c.submit(lambda x, y: float(y.sum()), xs[0], y, workers=[b.address]) == 200_000
        assert not b.bandwidth_types or Wire not in b.bandwidth_types


# -- to clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
def test_client(network, direct):
    @gen_test()
    async def test():
        async with pair(**network) as (c, s, a, b):
            xs = await spilled(c, a, n=3)
            before = residency(a)
            got = await c.gather(xs, direct=direct)
            assert [x.data[0] for x in got] == [1, 2, 3]
            assert COUNTS == {"unpickled": 3}
            assert residency(a) == before
            # What another worker got as bytes is fine for a client, too.
            await acquired(s, b, xs)
            await a.close()
            got = await c.gather(xs, direct=direct)
            assert [x.data[0] for x in got] == [1, 2, 3]
            assert COUNTS == {"unpickled": 6}
            await quiet(b)

    test()


@pytest.mark.parametrize("direct", [False, True])
@gen_test()
async def test_client_that_accepts_pickles_only(direct):
    async with pair(client={"serializers": ["pickle"], "deserializers": ["pickle"]}) as (c, _s, a, _b):
        xs = await spilled(c, a, n=2)
        y = c.submit(np.ones, 1000, workers=[a.address])  # on disk in another form than pickle
        await wait(y)
        await all_spilled(a)
        before = residency(a)
        x, z, y = await c.gather([*xs, y], direct=direct)
        assert (x.data[0], z.data[0], y.sum()) == (1, 2, 1000)
        assert residency(a) == before
        await quiet(a)


@gen_test()
async def test_each_answer_is_an_object_of_its_own():
    async with pair("inproc") as (c, _s, a, _b):
        (x,) = await spilled(c, a)
        one, two = await c.gather(x), await c.gather(x)
        one.data[:] = 5
        assert two.data[0] == 1
        assert (await c.submit(total, x)) == NBYTES / 8


@spilling(limits=(1,))
async def test_publish(c, s, a, b):
    (x,) = await spilled(c, a)
    await c.publish_dataset(x=x)
    async with Client(s.address, asynchronous=True) as other:
        before = residency(a)
        got = await (await other.get_dataset("x"))
        assert got.data[0] == 1
        assert COUNTS == {"unpickled": 1}
        assert residency(a) == before
    await c.unpublish_dataset("x")


@spilling(limits=(1,), nthreads=[("127.0.0.1", 1), ("127.0.0.1", 2)])
async def test_client_of_a_task(c, s, a, b):
    """It gathers from another worker without that one restoring anything."""
    (x,) = await spilled(c, a)
    before = residency(a)

    def nested(key):
        from distributed import Future

        with worker_client() as client:
            return client.gather(Future(key, client)).data[0]

    assert await c.submit(nested, x.key, workers=[b.address]) == 1
    assert COUNTS == {"unpickled": 1}
    assert residency(a) == before


# -- workers without gpuspill ----------------------------------------------------------------------


@pytest.mark.fault("a peer without gpuspill", on=("send", "receive"), outcome="the value, decoded")
def test_mixed_cluster(network):
    @gen_test()
    async def test():
        async with pair(**network, limits=(None, "stock")) as (c, s, a, b):
            assert type(b.data) is dict
            xs = await spilled(c, a, n=2)
            before = residency(a)
            await acquired(s, b, xs)
            assert COUNTS == {"unpickled": 2}
            assert [type(b.data[x.key]) for x in xs] == [Counted] * 2
            assert residency(a) == before
            assert await c.submit(total, xs, workers=[b.address]) == 3.0 * NBYTES / 8
            # The other way.
            y = c.submit(Counted, NBYTES, 5, workers=[b.address])
            assert await c.submit(total, y, workers=[a.address]) == 5.0 * NBYTES / 8
            assert a.data.manager.is_resident(y.key)
            await all_spilled(a)
            assert [x.data[0] for x in await c.gather([*xs, y])] == [1, 2, 5]
            await quiet(a)

    test()


# -- what moves data about -------------------------------------------------------------------------


@spilling(limits=(1,))
async def test_replicate(c, s, a, b):
    xs = await spilled(c, a, n=3)
    before = residency(a)
    await c.replicate(xs, n=2)
    await async_poll_for(lambda: b.data.statistics().disk_keys == 3, timeout=10)
    assert not COUNTS
    assert residency(a) == before
    assert [b.state.tasks[x.key].type for x in xs] == [Counted] * 3
    assert [b.state.tasks[x.key].nbytes for x in xs] == [SIZE] * 3
    assert s.workers[b.address].nbytes == 3 * SIZE


@spilling(
    limits=(1,),
    worker_kwargs={"memory_limit": 10 * NBYTES},
    config={"distributed.worker.memory.pause": False, "distributed.worker.memory.terminate": False},
)
async def test_rebalance(c, s, a, b):
    xs = await spilled(c, a, n=6)
    s.MEMORY_REBALANCE_MEASURE = "spilled"
    s.MEMORY_REBALANCE_SENDER_MIN, s.MEMORY_REBALANCE_RECIPIENT_MAX, s.MEMORY_REBALANCE_HALF_GAP = 0.0, 1.0, 0.05
    await a.heartbeat()
    await b.heartbeat()
    await c.rebalance()
    assert len(a.data) == len(b.data) == 3
    assert not COUNTS
    assert (a.data.statistics().restores, b.data.statistics().restores) == (0, 0)
    assert [x.data[0] for x in await c.gather(xs)] == [1, 2, 3, 4, 5, 6]


@spilling(
    limits=(1,),
    config={
        "distributed.scheduler.active-memory-manager": {
            "start": False,
            "policies": [{"class": "distributed.active_memory_manager.ReduceReplicas"}],
            "interval": "1h",
            "measure": "managed",
        }
    },
    amm=True,
)
async def test_reduce_replicas(c, s, a, b):
    xs = await spilled(c, a, n=3)
    await c.replicate(xs, n=2)
    await async_poll_for(lambda: b.data.statistics().disk_keys == 3, timeout=10)
    s.extensions["amm"].run_once()
    await async_poll_for(lambda: len(a.data) + len(b.data) == 3, timeout=10)
    assert not COUNTS
    assert (a.data.statistics().restores, b.data.statistics().restores) == (0, 0)
    assert [x.data[0] for x in await c.gather(xs)] == [1, 2, 3]


@pytest.mark.fault("worker stopped, restarted, retired", on="send", outcome="all sent, on the loop nothing")
@spilling(
    limits=(5 * NBYTES,),
    amm=True,
    config={
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.scheduler.active-memory-manager.start": False,
    },
)
async def test_retire_a_worker_with_three_times_its_limit(c, s, a, b):
    xs = [
        c.submit(Counted, NBYTES, i + 1, workers=[a.address], allow_other_workers=True, key=f"x-{i}") for i in range(15)
    ]
    await wait(xs)
    await async_poll_for(lambda: a.data.statistics().host_nbytes <= 5 * NBYTES, timeout=10)
    COUNTS.clear()
    manager, highest = a.data.manager, []
    read = manager._restorer._store.read

    def observed(receipt, allocate=None, **lend):
        highest.append(manager.memory_total())
        return read(receipt, allocate, **lend)

    manager._restorer._store = Observed(manager._restorer._store, observed)
    await c.retire_workers([a.address])
    assert len(highest) >= 10
    assert max(highest) <= 5 * NBYTES
    assert a.data.statistics().restores == 0
    assert COUNTS["unpickled"] <= 5  # those that were in memory
    # All came in one message; what does not fit leaves again in the background.
    await async_poll_for(lambda: b.data.statistics().host_nbytes <= 6 * NBYTES, timeout=10)
    assert sum(x.data[0] for x in await c.gather(xs)) == 120


class Observed:
    """A store whose reads go through a function."""

    def __init__(self, store, read):
        self.store, self.read = store, read

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.mark.parametrize("method", ["p2p", "tasks"])
@spilling(limits=(1,), timeout=120)
async def test_shuffle_of_what_another_worker_has(c, s, a, b, method):
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame({"k": np.arange(300) % 7, "v": np.arange(300)})
    parts = [c.submit(lambda i: frame.iloc[50 * i : 50 * i + 50], i, workers=[a.address]) for i in range(6)]
    await wait(parts)
    await all_spilled(a)
    df = dd.from_delayed(parts, meta=frame.iloc[:0], verify_meta=False)
    with dask.config.set({"dataframe.shuffle.method": method}):
        got = await c.compute(df.shuffle("k"))
    pd.testing.assert_frame_equal(got.sort_values("v").reset_index(drop=True), frame)


# -- what the store says of it ---------------------------------------------------------------------


@gen_test()
async def test_what_is_not_decoded_is_in_memory():
    async with pair() as (c, s, a, b):
        xs = await spilled(c, a, n=2)
        await acquired(s, b, xs)
        keys = {x.key for x in xs}
        assert set(b.data.memory) == keys
        assert all(key in b.data.memory and key not in b.data.disk for key in keys)
        assert (len(b.data.memory), len(b.data.disk)) == (2, 0)
        await all_spilled(b)
        assert set(b.data.disk) == keys
        assert all(key in b.data.disk and key not in b.data.memory for key in keys)
        assert not COUNTS


@gen_test()
async def test_bytes_under_way_evict_nothing():
    async with pair() as (_c, _s, a, _b):
        attachment = attached(a)
        before = attachment._accounted()
        slot = await attachment.window.take(1000)
        assert attachment._accounted() == before + 1000
        slot.release()
        slot = await attachment.window.take(10**12)  # goes alone, but not unnoticed
        assert attachment._accounted() <= before + SENDING_NBYTES
        slot.release()
        assert attachment._accounted() == before


@pytest.mark.parametrize(("protocol", "error"), [("tcp", DataLostError), ("inproc", FutureCancelledError)])
@gen_test()
async def test_word_of_a_loss_is_no_value_for_a_client(protocol, error):
    """Who cannot be sent something that raises gets nothing, and learns that there is nothing."""
    async with pair(protocol) as (c, _s, a, _b):
        x = await c.scatter(np.ones(1000), workers=[a.address], hash=False)
        a.data[x.key] = LostValue(DataLostError("gone", x.key))
        with pytest.raises(error):
            await c.gather(x, direct=True)


# -- names of types --------------------------------------------------------------------------------


class Outer:
    class Inner:
        pass


@pytest.mark.parametrize("kind", [int, str, np.ndarray, Counted, type(None), Outer.Inner])
def test_the_name_of_a_type_leads_back_to_it(kind):
    found = real_type(typename(kind))
    assert typename(found) == typename(kind)
    if kind not in (Outer.Inner, type(None)):
        assert found is kind


@pytest.mark.parametrize("name", ["no.such.module.Thing", "numpy.NoSuchThing", "numpy.ones", "Thing"])
def test_a_type_that_is_not_here_keeps_its_name(name):
    assert typename(real_type(name)) == name.removeprefix("builtins.")


def test_there_is_one_class_for_a_name_however_often_it_comes():
    """distributed keeps by type what it measures of transfers, for ever."""
    kinds = {real_type(f"no.such.module.Kind{n % 3}") for n in range(1000)}
    assert len(kinds) == 3


def test_looking_for_a_type_imports_nothing(monkeypatch):
    module = ModuleType("lazy_module")
    module.__getattr__ = lambda name: pytest.fail("asked to import something")
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    assert typename(real_type("lazy_module.Thing")) == "lazy_module.Thing"


def test_a_wire_says_what_it_is():
    wire = Wire(Encoded(b"h", [b"abc"], 12), "numpy.ndarray")
    assert repr(wire) == "<numpy.ndarray of 12 bytes, not decoded>"
    assert dask.sizeof.sizeof(wire) == 12


def test_another_version_is_refused():
    header, frames = dask_serialize(Wire(Encoded(b"h", [b"abc"], 12), "numpy.ndarray"))
    again = dask_deserialize.dispatch(Wire)(header, frames)
    assert (again.encoded.header, again.encoded.nbytes, again.type_name) == (b"h", 12, "numpy.ndarray")
    with pytest.raises(ValueError, match="version 99"):
        dask_deserialize.dispatch(Wire)({**header, "version": 99}, frames)
