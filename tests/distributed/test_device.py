"""Workers with a device: what their tasks return is on it, and spilled from there."""

import asyncio
import dataclasses
import gc
import operator
import threading
from collections import Counter

import dask.array as da
import numpy as np
import pytest
from distributed import Event, get_worker, wait
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster

import gpuspill
from gpuspill import simulated, walk
from gpuspill.config import Settings
from gpuspill.device.past_host import PastHost, Trust
from gpuspill.distributed import factory, sending
from gpuspill.distributed.devices import device_limit, find_device
from gpuspill.distributed.serialization import DeviceFamilies
from gpuspill.errors import ConfigError, DataLostError
from gpuspill.simulated import Array, SimulatedDevice, asarray, asnumpy
from gpuspill.simulated.arrays import current as current_device
from gpuspill.testing.fake_files import FakeFiles
from gpuspill.tier import Internal, Skeleton

from .clusters import spilling

KB = 1024
CHUNK = 32 * KB
LIMIT = 16 * CHUNK
ONE = (("127.0.0.1", 2),)
TWO = (("127.0.0.1", 1), ("127.0.0.1", 2))


@pytest.fixture
def device(monkeypatch):
    """The process's device: the threads of workers know no other."""
    device = SimulatedDevice(64 * LIMIT)
    monkeypatch.setattr(current_device._default, "_device", device)
    yield device
    device.validate()
    assert device.statistics().violations == 0


@pytest.fixture
def past_host(device, monkeypatch):
    """Let there be GPUDirect Storage for the process's device."""
    past_host = PastHost(FakeFiles(device), trust=Trust(minimum=CHUNK), piece=4 * KB)
    monkeypatch.setattr(factory, "find_past_host", lambda settings, device, directory: past_host)
    return past_host


def on_device(*, limits=(1, LIMIT * 2), nthreads=ONE, config=None, **options):
    """As ``spilling``, with a device."""
    return spilling(
        limits=limits,
        nthreads=nthreads,
        config={"gpuspill.device": "simulated", "gpuspill.device-memory-limit": LIMIT, **(config or {})},
        **options,
    )


def make(i, nbytes=CHUNK):
    return asarray(np.full(nbytes // 8, i))


def total(*values):
    return int(sum(int(value.sum()) for value in values))


async def off_device(worker):
    """Spill what can be spilled from the device and then from the host."""
    tier = worker.data.tier

    def empty():
        # Whoever made or used a value may let go of it a little later.
        tier.settle()
        tier.manager.limits.evict_all()
        return not tier.statistics().device_nbytes

    await async_poll_for(empty, timeout=10)
    await asyncio.to_thread(worker.data.manager.limits.evict_all)


async def checked(worker):
    """Wait until the tier is at rest and return its numbers, which have been compared with the truth."""
    tier = worker.data.tier

    def idle():
        statistics = tier.statistics()
        leaving = tier.manager._metadata.state.memory.leaving
        return not (statistics.pinned_nbytes or statistics.reserved_nbytes or leaving)

    await async_poll_for(idle, timeout=10)
    tier.validate()
    return tier.statistics()


@on_device()
async def test_a_pipeline_four_times_the_device_and_twice_the_host(c, s, a, device):
    n, chunk = 512, 64
    host = np.random.default_rng(1).integers(0, 1000, (n, n))
    assert host.nbytes == 4 * LIMIT
    x = c.persist(da.from_array(host, chunks=chunk, name=False).map_blocks(asarray))
    await wait(x)
    statistics = await checked(a)
    assert statistics.device_nbytes == device.statistics().live_bytes <= LIMIT
    assert statistics.spilled_nbytes >= 3 * LIMIT
    # What the host has no room for went straight to disk; it never was in the host's memory.
    assert a.data.statistics().device_direct_spills == statistics.direct_spills > 0
    assert a.data.statistics().device_host_pinned_nbytes == statistics.host_pinned_nbytes
    assert a.data.statistics().device_host_pinned_refused == statistics.host_pinned_refused
    y = (x + x.T).sum(axis=0) - x.max(axis=1).sum()
    z = x.rechunk((256, n))[::3, ::-2]
    got_y, got_z = await c.gather(c.compute([y.map_blocks(asnumpy), z.map_blocks(asnumpy)]))
    np.testing.assert_array_equal(got_y, (host + host.T).sum(axis=0) - host.max(axis=1).sum())
    np.testing.assert_array_equal(got_z, host[::3, ::-2])
    statistics = await checked(a)
    assert statistics.restores > 50
    assert statistics.device_nbytes == device.statistics().live_bytes
    del x, y, z
    await async_poll_for(lambda: not a.data, timeout=10)
    statistics = await checked(a)
    assert (statistics.units, statistics.device_nbytes, statistics.lingering_nbytes) == (0, 0, 0)
    assert device.statistics().live_bytes == 0
    assert not a.data.manager.keys()


@on_device()
async def test_a_pipeline_whose_values_go_past_host_memory(c, s, a, past_host, device):
    n, chunk = 512, 64
    host = np.random.default_rng(2).integers(0, 1000, (n, n))
    x = c.persist(da.from_array(host, chunks=chunk, name=False).map_blocks(asarray))
    await wait(x)
    await checked(a)
    y = (x + x.T).sum(axis=0)
    np.testing.assert_array_equal(asnumpy(await c.compute(y)), (host + host.T).sum(axis=0))
    statistics = await checked(a)
    assert 0 < statistics.past_host_spills <= statistics.direct_spills
    assert a.data.statistics().device_past_host_spills == statistics.past_host_spills
    assert past_host.reads > 0
    assert past_host.worth(CHUNK)


@on_device()
async def test_what_is_really_on_the_device_stays_within_the_limit(c, s, a, device, monkeypatch):
    """At every allocation: the limit, what running tasks have as inputs, and for each an output that is not stored."""
    tier = a.data.tier
    worst = []

    def watched(allocate):
        def watch(*args, **kwargs):
            made = allocate(*args, **kwargs)
            live, statistics = device.statistics().live_bytes, tier.manager.statistics()
            worst.append(live - LIMIT - statistics.pinned_nbytes)
            return made

        return watch

    xs = c.map(make, range(64), pure=False)
    await wait(xs)
    await off_device(a)
    for name in ("allocate", "adopt"):
        monkeypatch.setattr(device, name, watched(getattr(device, name)))
    ys = c.map(operator.add, xs, xs[1:] + xs[:1])
    await wait(ys)
    monkeypatch.undo()
    assert len(worst) >= 64
    assert max(worst) <= 2 * CHUNK
    sums = await c.gather(c.map(total, ys))
    assert sums == [(i + (i + 1) % 64) * CHUNK // 8 for i in range(64)]


@on_device()
async def test_the_mapping_shows_values_and_no_keys_of_its_own(c, s, a, device):
    x = c.submit(make, 5, key="x")
    y = c.submit(lambda: 7, key="y")
    await wait([x, y])
    await off_device(a)
    data = a.data
    assert any(isinstance(key, Internal) for key in data.manager)
    assert set(data) == {"x", "y"}
    assert len(data) == 2
    assert len(data.memory) + len(data.disk) == 2
    assert set(data.memory) | set(data.disk) == {"x", "y"}
    assert "x" in data
    assert not data.is_ready("x")
    assert data.peek("x", "absent") == "absent"
    value = (await data.async_get(["x"]))["x"]
    assert type(value) is Array
    assert data.is_ready("x")
    assert data.peek("x") is value
    assert data["x"] is value
    assert (await data.async_get(["x", "y"])) == {"x": value, "y": 7}
    assert data.async_get(["x"]).done()
    assert (await data.async_get(["z"], missing="omit")) == {}
    with pytest.raises(KeyError):
        await data.async_get(["z"])


@on_device(loop_io=1)
async def test_reading_on_the_loop_is_right_and_counted(c, s, a, device):
    await wait(x := c.submit(make, 5, key="x"))
    await off_device(a)
    assert total(a.data["x"]) == 5 * CHUNK // 8
    del x


@on_device(nthreads=TWO)
async def test_values_are_sent_to_workers_and_clients(c, s, a, b, device):
    xs = c.map(make, range(8), workers=[a.address], pure=False)
    await wait(xs)
    await off_device(a)
    sums = await c.gather(c.map(total, xs, workers=[b.address]))
    assert sums == [i * CHUNK // 8 for i in range(8)]
    await off_device(a)
    await off_device(b)
    for i, x in enumerate(await c.gather(xs)):
        assert type(x) is Array
        np.testing.assert_array_equal(asnumpy(x), np.full(CHUNK // 8, i))


@on_device(nthreads=TWO, config=NO_AMM, limits=(1, 64 * LIMIT))
async def test_a_request_for_more_than_the_device_has(c, s, a, b, device, monkeypatch):
    """What has left it is sent a value at a time; the device of who asks is this one, which has room for all."""
    number = 4 * LIMIT // CHUNK
    futures = [c.submit(make, i, workers=[a.address], pure=False) for i in range(number)]
    await wait(futures)
    await off_device(a)
    pinned = []
    serialize = sending.serialize

    def serializing(value, serializers):
        pinned.append(a.data.tier.manager.statistics().pinned_nbytes)
        return serialize(value, serializers=serializers)

    monkeypatch.setattr(sending, "serialize", serializing)
    gathered = await c.gather(futures)
    assert [int(value.sum()) for value in gathered] == [i * CHUNK // 8 for i in range(number)]
    assert pinned == [CHUNK] * number
    assert a.data.tier.statistics().device_nbytes <= LIMIT
    assert not a.data.tier.manager.statistics().pinned_nbytes


@on_device()
async def test_containers_coroutines_and_views(c, s, a, device):
    base = c.submit(lambda: {"x": make(1), "y": [make(2), "text"]}, key="base")
    view = c.submit(lambda d: d["x"][::-2], base, key="view")
    await wait(view)
    statistics = await checked(a)
    assert statistics.units == 2
    assert statistics.device_nbytes == 2 * CHUNK
    await off_device(a)

    async def later(d, v):
        return total(d["x"], d["y"][0], v), d["y"][1], d["x"].allocation is v.allocation

    assert await c.submit(later, base, view) == (CHUNK // 8 * 3 + CHUNK // 16, "text", True)
    del base
    await async_poll_for(lambda: "base" not in a.data, timeout=10)
    assert await c.submit(total, view) == CHUNK // 16
    del view
    await async_poll_for(lambda: not a.data, timeout=10)
    assert device.statistics().live_bytes == 0


@on_device()
async def test_a_task_reads_what_is_spilled_through_the_worker(c, s, a, device):
    await wait(x := c.submit(make, 3, key="x"))
    await off_device(a)
    assert await c.submit(lambda: total(get_worker().data["x"])) == 3 * CHUNK // 8
    del x


@on_device(config={"gpuspill.device-memory-limit": None})
async def test_tasks_that_run_out_of_memory_make_room(c, s, a, device):
    device.configure(memory=8 * CHUNK)
    xs = c.map(make, range(32), pure=False)
    sums = await c.gather(c.map(total, xs))
    assert sums == [i * CHUNK // 8 for i in range(32)]
    statistics = await checked(a)
    assert statistics.limit is None
    assert statistics.out_of_memory > 0
    assert statistics.out_of_memory == statistics.out_of_memory_helped
    assert device.statistics().failed_allocations == 0
    assert a.data.statistics().device_out_of_memory == statistics.out_of_memory


@on_device(limits=(1,))
async def test_what_is_lost_is_computed_again(c, s, a, device):
    x = c.submit(make, 3, key="x")
    await wait(x)
    await off_device(a)
    lose(a)
    assert await c.submit(total, x, pure=False) == 3 * CHUNK // 8


@on_device(limits=(1,))
async def test_what_is_scattered_and_lost_fails_under_its_key(c, s, a, device):
    x = await c.scatter(make(3))
    await off_device(a)
    lose(a)
    with pytest.raises(DataLostError) as caught:
        await c.submit(total, x, pure=False)
    assert caught.value.key == x.key


def lose(worker):
    """Delete all records behind the manager's back."""
    slots = worker.data.manager._metadata.slots
    receipts = [slot.receipt for slot in slots.values() if slot.receipt is not None]
    assert receipts
    for receipt in receipts:
        worker.data.records.delete(receipt)


@pytest.mark.fault("cancelled meanwhile", on="host→device", outcome="nothing pinned, nothing promised")
@on_device()
async def test_cancelled_and_failing_tasks_leave_nothing_pinned(c, s, a, device):
    xs = c.map(make, range(40), pure=False)
    await wait(xs)
    await off_device(a)

    def fail(x):
        raise ValueError("x")

    failing = c.map(fail, xs)
    ys = c.map(lambda x: x + 1, xs)
    await async_poll_for(lambda: a.data.tier.statistics().restores > 2, timeout=30)
    await c.cancel(ys)
    await wait(failing)
    statistics = await checked(a)
    assert statistics.pinned_nbytes == statistics.reserved_nbytes == 0


@on_device(limits=("1 MiB",))
async def test_numbers_of_the_device(c, s, a, device):
    await wait(c.persist(da.zeros(3)))
    xs = c.map(make, range(20), pure=False)
    await wait(xs)
    await checked(a)
    statistics = a.data.statistics()
    assert statistics.device_limit == LIMIT
    assert statistics.device_nbytes == device.statistics().live_bytes <= LIMIT
    assert statistics.device_nbytes + statistics.device_spilled_nbytes == 20 * CHUNK
    assert statistics.device_spills >= 4
    assert statistics.unspillable == 0
    await a.heartbeat()
    assert s.workers[a.address].metrics["gpuspill"]["device_spills"] == statistics.device_spills
    frame = await gpuspill.statistics(c)
    assert frame.loc[a.address, "device_spills"] == statistics.device_spills
    # Of what is spilled, the worker's size is what the scheduler has.
    assert s.tasks[xs[0].key].nbytes == CHUNK


@on_device(limits=("1 MiB",), nthreads=[("127.0.0.1", 1)])
async def test_what_is_needed_next_is_known_to_the_device(c, s, a, device):
    xs = c.map(make, range(20), pure=False)
    await wait(xs)
    uses = a.data.tier.manager._metadata.state.uses
    units = [a.data.manager.look(x.key).units[0] for x in xs]
    event = Event("go", client=c)
    blocker = c.submit(lambda: Event("go").wait(timeout=60), priority=10)
    ys = c.map(total, xs)
    await async_poll_for(lambda: all(y.key in a.state.tasks for y in ys), timeout=10)
    await async_poll_for(lambda: all(uses.next(unit) is not None for unit in units), timeout=10)
    order = [uses.next(unit) for unit in units]
    assert order == sorted(order)
    await event.set()
    await wait([blocker, *ys])
    # But for the last ones, which may be given up in a moment.
    grace = a.data.tier.grace
    await async_poll_for(lambda: len(uses) == grace, timeout=10)
    assert [bool(unit.users) for unit in units] == [False] * (20 - grace) + [True] * grace
    # Known before the value is there, too.
    zs = c.map(total, c.map(make, range(5), pure=False))
    await wait(zs)
    await async_poll_for(lambda: not len(uses), timeout=10)


@spilling(limits=("1 MiB",), nthreads=ONE)
async def test_without_a_device_there_is_no_tier(c, s, a):
    assert a.data.tier is None
    statistics = a.data.statistics()
    assert (statistics.device_limit, statistics.device_nbytes) == (None, 0)


@pytest.fixture
def looked_at(monkeypatch):
    """By thread, how many containers and other objects were looked at to find what is on the device."""
    looked = Counter()

    def counting(parts):
        def count(container):
            for part in parts(container):
                looked[threading.get_ident()] += 1
                yield part

        return count

    monkeypatch.setattr(walk, "_FAST", {ident: counting(parts) for ident, parts in walk._FAST.items()})
    monkeypatch.setattr(walk, "_parts", counting(walk._parts))
    take_apart = DeviceFamilies.take_apart

    def counted(self, value):
        looked[threading.get_ident()] += 1
        return take_apart(self, value)

    monkeypatch.setattr(DeviceFamilies, "take_apart", counted)
    return looked


class Table:
    """A composite: columns on the device."""

    def __init__(self, *columns):
        self.columns = columns


@cuda_serialize.register(Table)
def _(table):
    return {}, list(table.columns)


@cuda_deserialize.register(Table)
def _(header, frames):
    return Table(*frames)


class SizedTable(Table):
    """One that tells its size, and so is looked into when it has to leave."""

    @property
    def nbytes(self):
        return sum(column.nbytes for column in self.columns)


@cuda_serialize.register(SizedTable)
def _(table):
    return {}, list(table.columns)


@cuda_deserialize.register(SizedTable)
def _(header, frames):
    return SizedTable(*frames)


class Foreign:
    """Has no equality and no hash."""

    def __eq__(self, other):
        raise TypeError("not to be compared")

    __hash__ = None


LARGE = {
    "scalars": lambda: [np.float64(i) for i in range(10_000)],
    "nested": lambda: [[{"x": i}, (np.float64(i),)] for i in range(1000)],
    "foreign": lambda: [Foreign() for _ in range(1000)],
    "arrays": lambda: {i: [make(i, 80), np.float64(i)] for i in range(100)},
    "composite": lambda: Table(make(1), make(2)),
    "composites": lambda: [Table(make(1), make(2)), Table(make(3))],
    "sized": lambda: [SizedTable(make(1), make(2)), [SizedTable(make(3))]],
}


@on_device()
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("with_input", [False, True])
async def test_results_are_taken_apart_in_their_tasks_thread(c, s, a, device, looked_at, kind, with_input):
    """Once: not on the event loop, which would stand still the longer the more there is in a value."""
    first = c.submit(make, 1, key="first")
    await wait(first)
    await off_device(a)
    x = c.submit((lambda _: LARGE[kind]()) if with_input else LARGE[kind], *[first][:with_input], key="x")
    await wait(x)
    assert looked_at.pop(threading.get_ident(), 0) == 0
    assert looked_at
    on_device = kind not in ("scalars", "nested", "foreign")
    assert (type(a.data.manager.peek("x")) is Skeleton) is on_device
    statistics = await checked(a)
    assert statistics.device_nbytes == device.statistics().live_bytes
    assert a._gpuspill.device_sizes.expected("x") == (statistics.device_nbytes - with_input * CHUNK)
    await off_device(a)
    assert not device.statistics().live_bytes
    same = await c.submit(lambda x, kind: _same(x, LARGE[kind]()), x, kind)
    assert same


@on_device()
async def test_a_result_that_was_taken_apart_has_the_type_that_the_task_gave_it(c, s, a, device):
    x = c.submit(make, 1, key="x")
    y = c.submit(lambda x: [x, 1], x, key="y")
    await wait([x, y])
    assert [a.state.tasks[key].type for key in ("x", "y")] == [Array, list]
    assert s.tasks["x"].type == "gpuspill.simulated.arrays.array.Array"
    assert s.tasks["y"].type == "list"
    assert not a.data._prepared


@on_device()
async def test_nothing_is_kept_of_a_result_that_was_taken_apart_and_is_never_stored(c, s, a, device):
    started, go_on = Event(), Event()

    def late():
        started.set()
        go_on.wait()
        return make(1)

    x = c.submit(late, key="x")
    await started.wait()
    await c.cancel([x])
    del x
    await async_poll_for(lambda: "x" not in s.tasks, timeout=10)
    await go_on.set()
    await async_poll_for(lambda: "x" not in a.state.tasks and not a.state.executing, timeout=10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await async_poll_for(lambda: not a.data._prepared, timeout=10)
    a.data.tier.settle()
    await async_poll_for(lambda: not device.statistics().live_bytes, timeout=10)


def _same(one, other):
    if type(one) in (Table, SizedTable):
        one, other = one.columns, other.columns
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if type(one) is Array:
        return bool((one == other).all())
    return type(one) is type(other) and (type(one) is Foreign or one == other)


@on_device()
async def test_data_frames_are_looked_into_by_the_threads_that_make_them_leave(c, s, a, device, looked_at):
    """Four times the device; and of those that never leave none is."""
    n = 4 * LIMIT // CHUNK
    made = c.map(lambda i: SizedTable(make(i, CHUNK // 2), make(i, CHUNK // 2)), range(n), pure=False)
    await wait(made)
    assert await c.gather(c.map(lambda table: total(*table.columns), made)) == [i * CHUNK // 8 for i in range(n)]
    assert looked_at.pop(threading.get_ident(), 0) == 0
    assert LIMIT * 3 // CHUNK <= sum(looked_at.values()) <= n
    statistics = await checked(a)
    assert statistics.device_nbytes == device.statistics().live_bytes <= LIMIT
    del made
    await async_poll_for(lambda: not (a.data or a.data.tier.statistics().units), timeout=10)
    assert device.statistics().live_bytes == 0


@dataclasses.dataclass
class Counting:
    """An actor that a walk would look into."""

    array: Array

    def get(self):
        return int(self.array[0])


@on_device()
async def test_actors_are_themselves(c, s, a, device):
    actor = await c.submit(lambda: Counting(make(7)), actor=True)
    assert await actor.get() == 7


@on_device()
async def test_a_result_that_nobody_wants_any_more_leaves_nothing(c, s, a, device):
    began, go = Event("began"), Event("go")

    def late():
        began.set()
        go.wait()
        return [make(1), Table(make(2))]

    x = c.submit(late, key="x")
    await began.wait()
    await x.cancel()
    await async_poll_for(lambda: "x" not in a.state.tasks or a.state.tasks["x"].state == "cancelled", timeout=10)
    await go.set()
    await async_poll_for(lambda: not (a.state.tasks or a.data.tier.statistics().units), timeout=10)
    assert device.statistics().live_bytes == 0


@on_device(limits=("1 MiB",))
async def test_skeletons_never_show(c, s, a, device):
    x = c.submit(make, 1, key="x")
    await wait(x)
    seen = await c.submit(lambda x: type(x).__name__, x)
    assert seen == "Array"
    assert type(a.data.manager.peek("x")) is Skeleton
    assert type(a.data["x"]) is Array


def test_a_running_worker_gets_a_device(device):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=NO_AMM)
    async def body(c, s, a):
        xs = c.map(make, range(20), pure=False)
        await wait(xs)
        await c.register_plugin(
            gpuspill.SpillPlugin(device="simulated", device_memory_limit=LIMIT, host_limit=2 * LIMIT)
        )
        statistics = await checked(a)
        assert statistics.units == 20
        assert statistics.device_nbytes == device.statistics().live_bytes <= LIMIT
        assert await c.gather(c.map(total, xs)) == [i * CHUNK // 8 for i in range(20)]

    body()
    gc.collect()
    assert device.statistics().live_bytes == 0


def test_settings(device):
    assert Settings.load().device == "auto"
    assert find_device(Settings.load()) is None
    assert find_device(Settings.load(device=None)) is None
    assert find_device(Settings.load(device="simulated")) is simulated.device() is device
    total = device.memory_info().total
    for option, limit in {"auto": int(0.8 * total), "0.5": total // 2, 0.25: total // 4, "1 MiB": 2**20, 1: 1}.items():
        settings = Settings.load(device="simulated", device_memory_limit=option)
        assert device_limit(settings, device) == limit
    assert device_limit(Settings.load(device_memory_limit=0), device) is None
    for options in ({"device": "tpu"}, {"device_memory_limit": "much"}, {"device_memory_limit": -1}):
        with pytest.raises(ConfigError, match=next(iter(options)).replace("_", "-")):
            Settings.load(**options)


def test_the_simulated_devices_own_settings_are_no_mistake():
    import dask

    with dask.config.set({"gpuspill.simulated.memory": "1 GiB"}):
        Settings.load()
