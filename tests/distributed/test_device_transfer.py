"""What is on a worker's device goes to other workers as bytes, and onto theirs when a task needs it."""

# ruff: noqa: F811

import asyncio
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from dask.utils import typename
from distributed import Client, LocalCluster, Worker, wait
from distributed.utils_test import NO_AMM, async_poll_for, gen_test

import gpuspill
from gpuspill.core.residency import Tier
from gpuspill.distributed import sending
from gpuspill.distributed import worker as worker_module
from gpuspill.distributed.internals import PROTOCOL_VERSION
from gpuspill.distributed.lost import LostValue, Poison
from gpuspill.distributed.sending import Parcel, Receiver
from gpuspill.distributed.wire import SendBuffer, Wire
from gpuspill.simulated import Array, asarray, asnumpy
from gpuspill.testing.stores import Gate
from gpuspill.tier import Skeleton

from .test_device import CHUNK, KB, checked, device, make, off_device, on_device, total  # noqa: F401
from .test_transfer_failures import Recorder, ask_to_compute_what_arrives

#: Of the receivers' device.
ROOM = 3 * CHUNK
SMALL = {"gpuspill.device-memory-limit": ROOM}
#: Everything goes to disk at once; and all fits.
LIMITS = (1, "100 MiB")
TWO = (("127.0.0.1", 2), ("127.0.0.1", 1))
THREE = (*TWO, ("127.0.0.1", 1))
ANYWHERE = {
    "distributed.worker.memory.rebalance.measure": "managed",
    "distributed.worker.memory.rebalance.sender-min": 0,
    "distributed.worker.memory.rebalance.sender-recipient-gap": 0,
}


def number_of(values):
    return [int(value.sum()) * 8 // CHUNK for value in values]


async def untouched(worker, keys):
    """Wait until a worker has `keys`; check that nothing of them was decoded, or on its device."""
    await async_poll_for(lambda: all(key in worker.data for key in keys), timeout=10)
    manager, tier = worker.data.manager, worker.data.tier
    assert [manager.arriving_nbytes(key) for key in keys] == [CHUNK] * len(keys)
    assert not any(manager.is_resident(key) for key in keys)
    statistics = await checked(worker)
    assert (statistics.units, statistics.device_nbytes, statistics.restores, tier.skeletons) == (0, 0, 0, 0)


@pytest.mark.fault("device memory runs out", on=("send", "receive"), outcome="sent past the device")
@on_device(nthreads=TWO, limits=LIMITS, config={**NO_AMM, **SMALL})
async def test_a_message_three_times_the_device(c, s, a, b, device):
    xs = c.map(make, range(9), workers=[a.address], pure=False)
    await wait(xs)
    keys = [x.key for x in xs]
    await c.replicate(xs, workers=[b.address])
    await untouched(b, keys)
    # Nobody can tell it from an ordinary transfer.
    for key in keys:
        assert s.tasks[key].type == typename(Array)
        assert s.tasks[key].nbytes == a.state.tasks[key].nbytes == b.state.tasks[key].nbytes == CHUNK
        assert b.state.tasks[key].type is Array
    most = []
    store = b.data.tier.manager.store

    def storing(*args, **options):
        store(*args, **options)
        statistics = b.data.tier.manager.statistics()
        most.append(statistics.host_nbytes - statistics.pinned_nbytes)

    b.data.tier.manager.store = storing
    assert await c.gather(c.map(total, xs, workers=[b.address])) == [i * CHUNK // 8 for i in range(9)]
    assert len(most) == 9
    assert max(most) <= ROOM + CHUNK  # what the last task had may still be in somebody's hands
    assert [b.data.manager.arriving_nbytes(key) for key in keys] == [0] * 9
    assert all(type(b.data.manager.look(key)) is Skeleton for key in keys)
    statistics = await checked(b)
    assert statistics.units == 9
    assert statistics.device_nbytes + statistics.spilled_nbytes == 9 * CHUNK
    assert statistics.device_nbytes <= ROOM
    # And once more, from where they are now.
    assert await c.gather(c.map(total, xs, workers=[b.address], pure=False)) == [i * CHUNK // 8 for i in range(9)]


@on_device(
    nthreads=TWO, limits=LIMITS, config={**NO_AMM, **SMALL, "distributed.worker.transfer.message-bytes-limit": "1 MiB"}
)
async def test_inputs_that_are_fetched_for_tasks(c, s, a, b, device):
    """They come in one message, for many tasks, which take turns on the device."""
    xs = c.map(make, range(9), workers=[a.address], pure=False)
    await wait(xs)
    sums = c.map(lambda x, y: total(x, y), xs, xs[1:] + xs[:1], workers=[b.address])
    assert await c.gather(sums) == [(i + (i + 1) % 9) * CHUNK // 8 for i in range(9)]
    assert (await checked(b)).device_nbytes <= ROOM


@pytest.mark.parametrize("how", ["replicate", "rebalance", "retire"])
def test_replicas_are_never_on_the_device(device, how):
    @on_device(
        nthreads=TWO, limits=(None,), config={**NO_AMM, **SMALL, **ANYWHERE}, worker_kwargs={"memory_limit": "8 GiB"}
    )
    async def test(c, s, a, b):
        xs = c.map(make, range(8), workers=[a.address], pure=False)
        await wait(xs)
        keys = [x.key for x in xs]
        if how == "replicate":
            await c.replicate(xs, workers=[b.address])
        elif how == "rebalance":
            await c.rebalance(xs)
            keys = [key for key in keys if b.address in {ws.address for ws in s.tasks[key].who_has}]
            assert keys
        else:
            await c.retire_workers([a.address], close_workers=True, remove=True)
        await untouched(b, keys)
        assert number_of(await c.gather(xs)) == list(range(8))

    test(None)


@on_device(nthreads=THREE, limits=LIMITS, config={**NO_AMM, **SMALL})
async def test_it_is_passed_on_as_it_came(c, s, a, b, d, device):
    xs = c.map(make, range(5), workers=[a.address], pure=False)
    await wait(xs)
    keys = [x.key for x in xs]
    await c.replicate(xs, workers=[b.address])
    await c.retire_workers([a.address])
    await c.replicate(xs, workers=[d.address])
    await untouched(b, keys)
    await untouched(d, keys)
    # To those who have no gpuspill it is what the value would have been.
    async with Worker(s.address, data=dict, nthreads=1) as stranger:
        assert await c.gather(c.map(total, xs, workers=[stranger.address])) == [i * CHUNK // 8 for i in range(5)]
    assert number_of(await c.gather(xs)) == list(range(5))
    await c.publish_dataset(xs=xs)
    async with Client(s.address, asynchronous=True, serializers=["pickle"], deserializers=["pickle"]) as other:
        assert number_of(await other.gather(await other.get_dataset("xs"))) == list(range(5))
    await c.unpublish_dataset("xs")
    await untouched(b, keys)
    await untouched(d, keys)
    assert await c.gather(c.map(total, xs, workers=[d.address], pure=False)) == [i * CHUNK // 8 for i in range(5)]


@on_device(nthreads=TWO, limits=LIMITS, config={**NO_AMM, **SMALL})
async def test_one_object_in_a_value_stays_one(c, s, a, b, device):
    def build():
        x = make(3)
        return {"x": x, "y": [x, "text"], "z": np.arange(5)}

    d = c.submit(build, workers=[a.address])
    await wait(d)
    await c.replicate([d], workers=[b.address])

    def look(d):
        return d["x"] is d["y"][0], d["y"][1], type(d["x"]).__name__, total(d["x"]), d["z"].tolist()

    expected = (True, "text", "Array", 3 * CHUNK // 8, [0, 1, 2, 3, 4])
    assert await c.submit(look, d, workers=[b.address]) == expected
    statistics = await checked(b)
    assert statistics.units == 1
    assert b.data.manager.nbytes(d.key) == a.data.manager.nbytes(d.key)
    await off_device(b)
    assert await c.submit(look, d, workers=[b.address], pure=False) == expected


@on_device(nthreads=THREE, limits=LIMITS, config={**NO_AMM, **SMALL})
async def test_views_share_memory_wherever_they_are_sent(c, s, a, b, d, device):
    """With each other and with their base; charged once, on the way as well."""

    def build():
        x = asarray(np.arange(CHUNK // 8, dtype="i8"))
        y = make(1)[: CHUNK // 16]
        return {"x": x, "views": [x[::-3], x.reshape(-1, 8)[2:, 1:3], x[5:5], x], "y": y, "apart": [x[:1], y[1:]]}

    def look(value):
        x, (back, part, empty, same) = value["x"], value["views"]
        others = [x, back, part, *value["apart"][:1]]
        before = [asnumpy(other) for other in others]
        shared = [other.allocation is x.allocation for other in others]
        small = value["y"].allocation is value["apart"][1].allocation, value["y"].allocation.nbytes
        return [part.tolist() for part in before], shared, small, same is x, empty.shape, [o.strides for o in others]

    value = c.submit(build, workers=[a.address])
    expected = await c.submit(look, value, workers=[a.address])
    assert expected[1:] == ([True] * 4, (True, CHUNK), True, (0,), [(8,), (-24,), (64, 8), (8,)])
    await c.replicate([value], workers=[b.address])
    # Of the second allocation half was ever looked at.
    assert CHUNK * 3 // 2 <= b.data.manager.arriving_nbytes(value.key) <= CHUNK * 3 // 2 + KB
    await c.retire_workers([a.address])
    await c.replicate([value], workers=[d.address])
    for worker in (b, d):
        found = await c.submit(look, value, workers=[worker.address], pure=False)
        assert found == (expected[0], expected[1], (True, CHUNK // 2), *expected[3:])
        statistics = await checked(worker)
        # And the one of no bytes, which looks at no memory.
        assert (statistics.units, statistics.device_nbytes) == (3, CHUNK * 3 // 2)
        await off_device(worker)
        assert await c.submit(look, value, workers=[worker.address], pure=False) == found


@on_device(nthreads=TWO, limits=("100 MiB",), config={**NO_AMM, **SMALL})
async def test_a_view_takes_what_it_shows(c, s, a, b, device):
    x = c.submit(lambda: make(3, 8 * CHUNK)[: CHUNK // 8], workers=[a.address])
    await wait(x)
    await c.replicate([x], workers=[b.address])
    assert CHUNK <= b.data.manager.arriving_nbytes(x.key) <= CHUNK + KB  # with what is no array
    assert await c.submit(total, x, workers=[b.address]) == 3 * CHUNK // 8
    assert (await checked(b)).device_nbytes == CHUNK


@on_device(nthreads=TWO, limits=LIMITS, config={**NO_AMM, **SMALL})
async def test_one_that_is_larger_than_the_device_is_an_error_that_names_it(c, s, a, b, device):
    x = c.submit(make, 1, nbytes=8 * CHUNK, key="too-large", workers=[a.address])
    y = c.submit(make, 2, workers=[a.address])
    await wait([x, y])
    await c.replicate([x, y], workers=[b.address])
    await off_device(a)
    device.configure(memory=4 * CHUNK)
    with pytest.raises(MemoryError, match=r"'too-large'.*came as bytes"):
        await c.submit(total, x, workers=[b.address])
    # It stops nobody, and may be had once there is room.
    assert await c.submit(total, y, workers=[b.address]) == 2 * CHUNK // 8
    device.configure(memory=64 * CHUNK)
    assert await c.submit(total, x, workers=[b.address], pure=False) == 8 * CHUNK // 8


@on_device(nthreads=TWO, limits=LIMITS, config={**NO_AMM, **SMALL})
async def test_readers_other_than_tasks(c, s, a, b, device):
    xs = c.map(make, range(5), workers=[a.address], pure=False)
    await wait(xs)
    keys = [x.key for x in xs]
    await c.replicate(xs, workers=[b.address])
    await untouched(b, keys)
    found = await b.data.async_get(keys[:1])
    assert type(found[keys[0]]) is Array
    assert b.data.is_ready(keys[0])
    del found
    value = await asyncio.to_thread(b.data.__getitem__, keys[1])
    np.testing.assert_array_equal(asnumpy(value), np.full(CHUNK // 8, 1))
    del value

    async def later(x):
        return total(x)

    assert await c.submit(later, xs[2], workers=[b.address]) == 2 * CHUNK // 8
    # Reading ahead would decode them without asking for room.
    await asyncio.to_thread(b.data.manager.limits.evict_all)
    assert b._gpuspill.hints._uses.prefetch([*keys[3:], "unknown"]) == 0
    assert all(type(b.data.manager.look(key)) is Skeleton for key in keys[:3])
    assert all(b.data.manager.tier_of(key) is Tier.DISK for key in keys[3:])
    await c.cancel(xs)
    await async_poll_for(lambda: not b.data, timeout=10)
    assert (await checked(b)).units == 0


@on_device(nthreads=TWO, limits=("100 MiB",))
async def test_what_is_sent_is_made_a_value_at_a_time(c, s, a, b, device):
    """As bytes to workers; from the device if the network takes it from there; as it is within a process."""
    xs = c.map(make, range(6), workers=[a.address], pure=False)
    z = c.submit(lambda: 5, workers=[a.address])
    await wait([*xs, z])
    await off_device(a)
    tier = a.data.tier
    tier.manager.limits.set_limit(2 * CHUNK, None)
    assert await c.submit(total, xs[0], workers=[a.address]) == 0  # one of them is there again
    sent = {}
    receivers = {
        "direct": Receiver("wire", takes_device_memory=True),
        "shared": Receiver("wire", same_process=True),
        "bytes": Receiver("wire"),
    }
    for name, receiver in receivers.items():
        parcel = Parcel(a.data.manager, SendBuffer(2**20), tier)
        chosen = [x.key for x in (xs if name == "bytes" else xs[:1])]
        await parcel.fill([*chosen, z.key], receiver, lambda key: None)
        sent[name] = [type(value) for value in parcel.values.values()]
        if name == "bytes":
            assert tier.statistics().device_nbytes <= 2 * CHUNK
            for wire in list(parcel.values.values())[:-1]:
                assert (wire.type_name, wire.encoded.nbytes, wire.encoded.device_nbytes) == (
                    typename(Array),
                    CHUNK,
                    CHUNK,
                )
            del wire
        parcel.release()
    assert sent == {"bytes": [Wire] * 6 + [int], "direct": [Array, int], "shared": [Array, int]}


@pytest.mark.parametrize(
    ("address", "knows_us", "who", "serializers", "expected"),
    [
        ("tcp://1", True, "tcp://1", None, Receiver("wire", by_system=True, substitute=LostValue)),
        ("tls://1", True, "tls://1", None, Receiver("wire", substitute=LostValue)),
        ("ucx://1", True, "ucx://1", None, Receiver("wire", takes_device_memory=True, substitute=LostValue)),
        ("ucxx://1", True, "ucxx://1", None, Receiver("wire", takes_device_memory=True, substitute=LostValue)),
        ("inproc://1", True, "inproc://1", None, Receiver("wire", same_process=True, substitute=LostValue)),
        ("inproc://1", False, "inproc://1", None, Receiver("value", same_process=True)),
        ("tcp://1", False, "tcp://1", None, Receiver("serialized", by_system=True)),
        ("tcp://1", False, None, None, Receiver("serialized", by_system=True, substitute=Poison)),
        ("inproc://1", False, None, None, Receiver("value", same_process=True)),
        ("tcp://1", True, None, ["pickle"], Receiver("value", True, serializers=["pickle"], substitute=Poison)),
    ],
)
def test_what_each_receiver_takes(address, knows_us, who, serializers, expected):
    info = {"gpuspill": PROTOCOL_VERSION} if knows_us else {}
    comm = SimpleNamespace(peer_address=address, remote_info=info)
    receiver = worker_module._receiver(comm, who, serializers)
    assert receiver == expected
    assert receiver.keeps_bytes == (knows_us and address[:3] in ("tcp", "tls") and serializers is None)
    assert receiver.borrows == (address.startswith("tcp") and serializers is None)


class Unsendable:
    """Has something on the device, and cannot be serialised."""

    def __init__(self, x):
        self.x = x

    def __reduce_ex__(self, protocol):
        raise ValueError("not this one")


@pytest.mark.fault("value cannot be serialised", on="send", outcome="distributed's own error")
@on_device(nthreads=TWO, limits=("100 MiB",))
async def test_what_cannot_be_serialised_is_left_to_distributed(c, s, a, b, device):
    x = c.submit(lambda: [Unsendable(make(1))], workers=[a.address])
    y = c.submit(make, 2, workers=[a.address])
    await wait([x, y])
    parcel = Parcel(a.data.manager, SendBuffer(2**20), a.data.tier)
    await parcel.fill([x.key, y.key], Receiver("wire"), lambda key: None)
    assert {key: type(value) for key, value in parcel.values.items()} == {x.key: list, y.key: Wire}
    parcel.release()


@on_device(nthreads=TWO, limits=("100 MiB",), config={**NO_AMM, **SMALL})
async def test_a_value_that_is_to_be_computed_while_it_arrives(c, s, a, b, device, monkeypatch):
    x = c.submit(make, 3, workers=[a.address])
    await wait(x)
    recorder = Recorder(b, monkeypatch)
    gate, as_wire = Gate(), sending._as_wire

    def gated(tier, value, nbytes):
        gate.pass_through()
        return as_wire(tier, value, nbytes)

    monkeypatch.setattr(sending, "_as_wire", gated)
    await ask_to_compute_what_arrives(s, b, x, gate)
    await async_poll_for(lambda: x.key in recorder.types, timeout=10)
    assert recorder.types[x.key].endswith(".Array")
    await async_poll_for(lambda: b.state.tasks[x.key].state == "memory", timeout=10)
    assert b.data.is_ready(x.key)
    statistics = await checked(b)
    assert (statistics.device_nbytes, statistics.reserved_nbytes) == (CHUNK, 0)


@pytest.mark.cluster
@gen_test(timeout=60)
async def test_processes(device):
    """Each with a device of 4 MB, which are asked for 24 MB of each other at once."""
    config = {"gpuspill.device": "simulated", "gpuspill.simulated.memory": 4_000_000, **NO_AMM}
    with dask.config.set(config):
        async with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                protocol="tcp://",
                data=gpuspill.data(host_limit="16 MB"),
                dashboard_address=":0",
                asynchronous=True,
            ) as cluster,
            Client(cluster, asynchronous=True) as c,
        ):
            a, b = (await c.scheduler.identity())["workers"]
            xs = c.map(lambda i: asarray(np.full(125_000, i)), range(24), workers=[a])
            await wait(xs)
            ys = c.map(lambda x: int(x.max()), xs, workers=[b])
            await c.replicate(xs, workers=[b])
            assert await c.gather(ys) == list(range(24))
            frame = await gpuspill.statistics(c)
            assert (frame["device_nbytes"] <= 4_000_000).all()
            assert (frame["lost"] == 0).all()
