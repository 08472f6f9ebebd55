"""Transfers that go wrong in the middle: nothing is left behind, and the computation ends with the right result."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import asynccontextmanager

import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker, wait
from distributed.spill import SpillBuffer
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster, gen_test
from distributed.worker_state_machine import FreeKeysEvent

import gpuspill
from gpuspill.distributed import worker as hooks
from gpuspill.distributed.attach import attach
from gpuspill.distributed.sending import Receiver, pack
from gpuspill.distributed.wire import SendBuffer, Wire
from gpuspill.errors import StorageFull
from gpuspill.storage.wrappers import FaultyStore, nth
from gpuspill.testing.stores import Gate, GatedStore
from tests.distributed.clusters import all_spilled, at_rest, attached, spilling
from tests.distributed.counted import COUNTS, NBYTES, Counted, acquired, pair, quiet, spilled, total

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _nothing_counted():
    COUNTS.clear()


def no_type(key):
    return None


def gated_reads(worker):
    """Stop a worker's reads until the gate is opened."""
    restorer = worker.data.manager._restorer
    restorer._store = GatedStore(restorer._store)
    gate = restorer._store.before["read"] = Gate()
    return gate


@asynccontextmanager
async def opened(gate):
    """Open a gate at the end, whatever happens, so that closing the worker does not wait for it."""
    try:
        yield
    finally:
        gate.open()


async def arrived(gate, n=1):
    for _ in range(n):
        assert await asyncio.to_thread(gate.arrived.acquire, timeout=10)


# -- giving up -------------------------------------------------------------------------------------


@pytest.mark.fault("cancelled meanwhile", on="send", outcome="nothing pinned, nothing promised")
@pytest.mark.parametrize("form", ["wire", "serialized", "value"])
@gen_test()
async def test_giving_up_while_it_is_read(form):
    async with pair() as (c, _s, a, _b):
        (x,) = await spilled(c, a)
        gate = gated_reads(a)
        async with opened(gate):
            packing = asyncio.create_task(pack(a, attached(a), [x.key], Receiver(form, by_system=True), no_type))
            await arrived(gate)
            assert attached(a).window.used > 0
            assert a.data.manager._metadata.state.ledger.keys[x.key].pins == 1
            packing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await packing
            assert attached(a).window.used == 0
            assert a.data.manager._metadata.state.ledger.keys[x.key].pins == 0
        await quiet(a)
        assert (await x).data[0] == 1


@gen_test()
async def test_giving_up_in_the_line():
    async with pair() as (c, _s, a, _b):
        x, y = await spilled(c, a, n=2)
        attached(a).window = SendBuffer(NBYTES)
        gate = gated_reads(a)
        async with opened(gate):
            first, second, third = (
                asyncio.create_task(pack(a, attached(a), [key], Receiver("wire", by_system=True), no_type))
                for key in (x.key, y.key, y.key)
            )
            await arrived(gate)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        parcel = await first
        assert isinstance(parcel.values[x.key], Wire)
        assert not third.done()
        parcel.release()
        parcel.release()
        parcel = await third
        assert isinstance(parcel.values[y.key], Wire)
        parcel.release()
        await quiet(a)


@gen_test()
async def test_giving_up_while_it_is_decoded(monkeypatch):
    async with pair() as (c, _s, a, _b):
        (x,) = await spilled(c, a)
        gate = Gate()
        serializer = a.data.manager._restorer._serializer
        loads = serializer.loads

        def gated(header, frames):
            gate.pass_through()
            return loads(header, frames)

        monkeypatch.setattr(serializer, "loads", gated)
        async with opened(gate):
            packing = asyncio.create_task(pack(a, attached(a), [x.key], Receiver("value", by_system=True), no_type))
            await arrived(gate)
            packing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await packing
            assert attached(a).window.used == 0
        await quiet(a)


@pytest.mark.fault("disk slow or stuck", on="send", outcome="bounded; others do not wait")
@gen_test()
async def test_the_window_bounds_what_is_read():
    async with pair() as (c, s, a, b):
        xs = await spilled(c, a, n=6)
        attached(a).window = window = SendBuffer(2 * NBYTES + 1000, share=2 * NBYTES + 1000)
        gate = gated_reads(a)
        async with opened(gate):
            packings = [
                asyncio.create_task(pack(a, attached(a), [x.key], Receiver("wire", by_system=True), no_type))
                for x in xs
            ]
            await arrived(gate, 2)
            assert window.used <= window._limit
            assert not gate.arrived.acquire(blocking=False)
        for packing in packings:
            parcel = await packing
            assert window.used <= window._limit
            parcel.release()
        await quiet(a)
        await acquired(s, b, xs)


@gen_test()
async def test_a_request_that_waits_for_its_turn_keeps_nothing_in_memory():
    async with pair() as (c, _s, a, _b):
        x, y, z = await spilled(c, a, n=3)
        assert (await y).data[0] == 2  # in memory again
        attached(a).window = SendBuffer(NBYTES)
        gate = gated_reads(a)
        async with opened(gate):
            first, second = (
                asyncio.create_task(pack(a, attached(a), keys, Receiver("wire", by_system=True, peer=keys), no_type))
                for keys in ((x.key,), (y.key, z.key))
            )
            await arrived(gate)
            assert a.data.manager._metadata.state.ledger.keys[y.key].pins == 0
            await all_spilled(a)
            assert not a.data.manager.is_resident(y.key)
        parcel = await first
        parcel.release()
        parcel = await second
        assert {key: type(value) for key, value in parcel.values.items()} == {y.key: Wire, z.key: Wire}
        assert attached(a).window.used >= 2 * NBYTES
        parcel.release()
        assert attached(a).window.used == 0
        await quiet(a)


@gen_test()
async def test_a_worker_that_reads_for_others_is_busy():
    async with pair() as (c, s, a, _b):
        xs = await spilled(c, a, n=3)
        a.transfer_outgoing_count_limit = 1  # two on the same host
        gate = gated_reads(a)
        rpc = s.rpc(a.address)
        async with opened(gate):
            first, second = (asyncio.create_task(rpc.get_data(keys=[x.key])) for x in xs[:2])
            await arrived(gate, 2)
            assert await rpc.get_data(keys=[xs[2].key]) == {"status": "busy"}
            assert not gate.arrived.acquire(blocking=False)  # nothing was read for it
        # A reader that does not confirm keeps the sender waiting; this one never does.
        for asked, x in ((first, xs[0]), (second, xs[1])):
            assert set((await asked)["data"]) == {x.key}
        await rpc.close_rpc()


# -- keys that go while they are read --------------------------------------------------------------


@pytest.mark.fault("deleted meanwhile", on="send", outcome="sent; nothing left")
@gen_test()
async def test_a_key_that_is_given_up_while_it_is_read():
    async with pair() as (c, s, a, b):
        x, y = await spilled(c, a, n=2)
        await acquired(s, b, [x])
        gate = gated_reads(a)
        async with opened(gate):
            rpc = s.rpc(a.address)
            asked = asyncio.create_task(rpc.get_data(keys=[x.key, y.key]))
            await arrived(gate)
            s.request_remove_replicas(a.address, [x.key], stimulus_id="test")
            await async_poll_for(lambda: x.key not in a.data, timeout=10)
        answer = await asked
        assert answer["status"] == "OK"
        assert set(answer["data"]) == {y.key}
        await rpc.close_rpc()


@pytest.mark.fault("cancelled meanwhile", on="receive", outcome="nothing pinned, nothing promised")
@pytest.mark.fault("deleted meanwhile", on="receive", outcome="nothing left")
@gen_test()
async def test_nobody_asks_for_it_any_more():
    async with pair() as (c, s, a, b):
        (x,) = await spilled(c, a)
        gate = gated_reads(a)
        async with opened(gate):
            y = c.submit(total, x, workers=[b.address])
            await arrived(gate)
            await c.cancel([x, y])
            await async_poll_for(lambda: not s.tasks, timeout=10)
        await async_poll_for(lambda: not a.state.tasks and not b.state.tasks, timeout=10)
        assert (len(a.data), len(b.data)) == (0, 0)
        await quiet(a)
        await quiet(b)


class Recorder:
    """Remembers what a worker tells the scheduler of finished tasks."""

    def __init__(self, worker, monkeypatch):
        self.types = {}
        send = worker.batched_send

        def record(message):
            if message["op"] == "task-finished":
                self.types[message["key"]] = message["typename"]
            send(message)

        monkeypatch.setattr(worker, "batched_send", record)


async def ask_to_compute_what_arrives(s, b, x, gate):
    """Have `b` fetch `x`; while that waits at the gate the scheduler thinks better of it, and wants it computed."""
    async with opened(gate):
        s.request_acquire_replicas(b.address, [x.key], stimulus_id="test")
        await arrived(gate)
        b.handle_stimulus(FreeKeysEvent(keys=[x.key], stimulus_id="test"))
        s.send_task_to_worker(b.address, s.tasks[x.key])
        await async_poll_for(lambda: b.state.tasks[x.key].state == "resumed", timeout=10)


@pytest.mark.fault("overwritten meanwhile", on="receive", outcome="one of both, whole")
def test_a_value_that_is_to_be_computed_while_it_arrives(monkeypatch):
    @gen_test()
    async def test():
        async with pair() as (c, s, a, b):
            (x,) = await spilled(c, a)
            recorder = Recorder(b, monkeypatch)
            gate = gated_reads(a)
            await ask_to_compute_what_arrives(s, b, x, gate)
            await async_poll_for(lambda: x.key in recorder.types, timeout=10)
            assert recorder.types[x.key].endswith(".Counted")
            await async_poll_for(lambda: b.state.tasks[x.key].state == "memory", timeout=10)
            assert b.data.manager.is_resident(x.key)
            await quiet(a)
            await quiet(b)

    test()


class Unreadable:
    def __reduce__(self):
        return _fail, ()


def _fail():
    raise RuntimeError("cannot be read")


def test_it_is_to_be_computed_while_it_arrives_and_cannot_be_decoded(monkeypatch):
    @gen_test()
    async def test():
        async with pair() as (c, s, a, b):
            x = c.submit(Unreadable, workers=[a.address])
            await wait(x)
            await all_spilled(a)
            gate = gated_reads(a)
            await ask_to_compute_what_arrives(s, b, x, gate)
            await async_poll_for(lambda: b.state.tasks[x.key].state == "memory", timeout=10)
            with pytest.raises(RuntimeError, match="cannot be read"):
                await c.submit(repr, x, workers=[b.address])
            assert await c.submit(abs, -1, workers=[b.address]) == 1

    test()


@pytest.mark.fault("value cannot be rebuilt", on=("send", "receive"), outcome="the task that needs it fails")
@spilling(limits=(1,))
async def test_what_cannot_be_decoded_fails_the_task_that_needs_it(c, s, a, b):
    x = c.submit(Unreadable, workers=[a.address])
    await wait(x)
    await all_spilled(a)
    for worker in (b, a):
        with pytest.raises(RuntimeError, match="cannot be read"):
            await c.submit(repr, x, workers=[worker.address], pure=False)
    assert await c.submit(abs, -1, workers=[b.address]) == 1


# -- what distributed's own buffer wrote -----------------------------------------------------------


@pytest.mark.parametrize("receiver", ["gpuspill", "stock"])
def test_records_that_were_taken_over(receiver):
    config = {**NO_AMM, "distributed.worker.memory.target": 50_000 / 10**10, "distributed.worker.memory.spill": False}

    @gen_cluster(client=True, nthreads=[("", 1)] * 2, worker_kwargs={"memory_limit": 10**10}, config=config)
    async def test(c, s, a, b):
        xs = [c.submit(Counted, 20_000, i, workers=[a.address]) for i in range(8)]
        await wait(xs)
        assert isinstance(a.data, SpillBuffer)
        assert len(a.data.slow) >= 5
        for worker in (a, b)[: 2 if receiver == "gpuspill" else 1]:
            attach(worker)
        await async_poll_for(lambda: not a.data.manager.statistics().pinned_nbytes, timeout=10)
        before = a.data.statistics().restores
        assert [x.data[0] for x in await c.gather(xs)] == list(range(8))
        assert [x.data[0] for x in await c.gather(xs, direct=True)] == list(range(8))
        assert await c.submit(total, xs, workers=[b.address]) == 28.0 * 2500
        assert a.data.statistics().restores == before
        await quiet(a)

    test()


# -- losing the sender, the connection, the disk ---------------------------------------------------


@pytest.mark.fault("connection lost", on=("send", "receive"), outcome="asked again; nothing pinned")
@gen_test()
async def test_the_connection_is_cut():
    async with pair() as (c, _s, a, b):
        xs = await spilled(c, a, n=3)
        gate = gated_reads(a)
        async with opened(gate):
            y = c.submit(total, xs, workers=[b.address])
            await arrived(gate)
            for comm in list(a._comms):
                if comm.remote_info.get("gpuspill"):
                    comm.abort()
            await async_poll_for(lambda: b.state.transfer_incoming_count == 0, timeout=10)
        assert await y == 6.0 * NBYTES / 8
        await quiet(a)
        await quiet(b)


@pytest.mark.fault("worker stopped, restarted, retired", on="send", outcome="computed anew")
@gen_test()
async def test_the_sender_goes():
    async with pair() as (c, s, a, b):
        xs = [c.submit(Counted, NBYTES, i, workers=[a.address], allow_other_workers=True) for i in range(3)]
        await wait(xs)
        await all_spilled(a)
        gate = gated_reads(a)
        async with opened(gate):
            y = c.submit(total, xs, workers=[b.address])
            await arrived(gate)
            closing = asyncio.create_task(a.close())
            await async_poll_for(lambda: a.data.manager._metadata.closed, timeout=10)
            assert a.address in s.workers
        await closing
        assert await y == 3.0 * NBYTES / 8
        await quiet(b)


async def die_when_read(dask_worker):
    """Kill this worker's process when it reads a record for somebody else."""
    manager = dask_worker.data.manager
    while manager.statistics().disk_keys < 4:
        await asyncio.to_thread(manager.limits.evict_all)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    manager.batch.export = die


@pytest.mark.fault("process killed", on="send", outcome="computed anew")
@pytest.mark.fault("process killed", on="receive", outcome="computed anew")
@pytest.mark.slow
@gen_test(timeout=60)
async def test_the_senders_process_is_killed():
    cluster = {"threads_per_worker": 1, "data": gpuspill.data(), "dashboard_address": ":0", "memory_limit": 0}
    async with (
        LocalCluster(n_workers=2, asynchronous=True, **cluster) as cluster,
        Client(cluster, asynchronous=True) as c,
    ):
        sender, receiver = cluster.scheduler.workers
        where = {"workers": [sender], "allow_other_workers": True}
        xs = [c.submit(np.full, 10_000, i, **where, key=f"x-{i}") for i in range(4)]
        await wait(xs)
        await c.run(die_when_read, workers=[sender])
        assert await c.submit(lambda xs: float(sum(x.sum() for x in xs)), xs, workers=[receiver]) == 60_000.0
        assert sender not in cluster.scheduler.workers


@pytest.mark.fault("disk full", on="receive", outcome="stays in memory")
def test_the_receivers_disk_is_full(caplog):
    @spilling(limits=(1,))
    async def test(c, s, a, b):
        spiller = b.data.manager._spiller
        spiller._store = FaultyStore(spiller._store, nth("write", error=lambda: StorageFull(errno.ENOSPC, "full")))
        xs = await spilled(c, a, n=5)
        await acquired(s, b, xs)
        assert await c.submit(total, xs, workers=[b.address]) == 15.0 * NBYTES / 8
        await c.replicate(xs, n=2)
        assert b.data.statistics().disk_keys == 0
        assert b.data.statistics().spill_failures > 0
        # And on from there.
        await all_spilled(a)
        assert [x.data[0] for x in await c.gather(xs)] == [1, 2, 3, 4, 5]
        await at_rest(b)

    test(limit=1)
    assert "could not spill" in caplog.text


@pytest.mark.fault("disk slow or stuck", on="receive", outcome="asked for once there is room")
@gen_test()
async def test_incoming_bytes_wait_for_room_before_they_are_requested():
    async with pair(limits=(None, 2 * NBYTES)) as (c, s, a, b):
        (x,) = await spilled(c, a)
        spiller = b.data.manager._spiller
        spiller._store = GatedStore(spiller._store)
        gate = spiller._store.before["write"] = Gate()
        with b.data.manager.admission.reserve(2 * NBYTES) as promised:
            assert promised.granted
            async with opened(gate):
                y = c.submit(Counted, NBYTES, 9, workers=[b.address])
                await wait(y)
                await arrived(gate)  # something can still make room
                s.request_acquire_replicas(b.address, [x.key], stimulus_id="test")
                await async_poll_for(lambda: b.data.statistics().waiting == 1, timeout=10)
                assert a.transfer_outgoing_count_total == 0
            await async_poll_for(lambda: x.key in b.data, timeout=10)
        await quiet(b)


@pytest.mark.fault("nothing can leave memory", on="receive", outcome="tasks go on, counted")
@gen_test()
async def test_incoming_bytes_do_not_wait_for_what_will_not_come():
    async with pair(limits=(None, 2 * NBYTES)) as (c, s, a, b):
        (x,) = await spilled(c, a)
        with b.data.manager.admission.reserve(2 * NBYTES):
            await acquired(s, b, [x])
            assert b.data.statistics().overruns == 1
        await quiet(b)


# -- without the hooks -----------------------------------------------------------------------------

HOOKS = ["gather_dep", "get_data", "update_data", "_update_metrics_received_data"]


@pytest.mark.parametrize("missing", [*([name] for name in HOOKS), HOOKS], ids=str)
def test_results_are_right_without_hooks(missing, monkeypatch):
    from gpuspill.distributed import internals

    monkeypatch.setattr(internals, "missing_hooks", lambda base: dict.fromkeys(missing, "taken away by the test"))
    monkeypatch.setattr(hooks, "missing_hooks", internals.missing_hooks)
    hooks.spilling_class.cache_clear()

    @gen_test()
    async def test():
        async with pair(limits=(1, 1)) as (c, _s, a, b):
            for name in missing:
                assert name not in vars(type(a))
            xs = await spilled(c, a, n=3)
            assert await c.submit(total, xs, workers=[b.address]) == 6.0 * NBYTES / 8
            await c.replicate(xs, n=2)
            await all_spilled(a, b)
            assert [x.data[0] for x in await c.gather(xs)] == [1, 2, 3]

    try:
        test()
    finally:
        hooks.spilling_class.cache_clear()


@pytest.mark.parametrize("name", ["update_data", "_update_metrics_received_data"])
def test_a_hook_that_does_not_fit_is_left_out(name):
    from gpuspill.distributed import internals

    class Changed(Worker):
        pass

    setattr(Changed, name, lambda self, something, quite, different: None)
    assert list(internals.missing_hooks(Changed)) == [name]
    assert name not in vars(hooks.spilling_class(Changed))
