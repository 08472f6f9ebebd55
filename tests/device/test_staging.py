"""Copies through pinned staging: complete, in the right order, and over when they say so."""

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpuspill.device.port import CopyPlan, DeviceError
from gpuspill.device.staging import Copier, probe
from gpuspill.simulated.device.device import ManualClock, SimulatedDevice
from gpuspill.testing.devices import fetch, pattern, store
from gpuspill.testing.stores import Gate

MB = 2**20


@pytest.fixture
def device():
    device = SimulatedDevice(MB, bandwidth=1e6, latency=0.5, clock=ManualClock())
    yield device
    device.validate()
    assert device.statistics().copies_in_flight == 0
    device.close()


@pytest.fixture(params=[False, True], ids=["ordinary", "staged"])
def staged(request):
    return request.param


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 200, 201, 1000, 1023])
def test_all_bytes_arrive(device, staged, nbytes):
    copier = Copier(device, CopyPlan(100, staged))
    data = pattern(nbytes)
    host = bytearray(nbytes)
    copier.to_host(store(device, data), memoryview(host))
    assert host == data.tobytes()
    allocation = device.allocate(nbytes)
    copier.to_device(memoryview(bytes(host)), allocation)
    assert fetch(device, allocation) == data.tobytes()
    copier.close()
    assert device.statistics().pinned_bytes == 0


def test_two_buffers_a_copy_and_kept_for_the_next(device):
    copier = Copier(device, CopyPlan(100, staged=True))
    for _ in range(3):
        copier.to_host(store(device, pattern(1000)), memoryview(bytearray(1000)))
        assert device.statistics().pinned_bytes == 200
    copier.to_device(memoryview(bytes(1000)), device.allocate(1000))
    assert device.statistics().pinned_bytes == 400


def test_at_most_two_copies_a_direction_have_staging(device, monkeypatch):
    """The third waits; none waits for another while it has some."""
    copier = Copier(device, CopyPlan(100, staged=True))
    inside = threading.Barrier(3, timeout=60)
    first = set()
    real = device.copy_to_host

    def copy(*args, **kwargs):
        thread = threading.get_ident()
        if len(first) < 2 and thread not in first:
            first.add(thread)
            inside.wait()
        return real(*args, **kwargs)

    sources = [store(device, pattern(500, seed)) for seed in range(4)]
    hosts = [bytearray(500) for _ in sources]
    monkeypatch.setattr(device, "copy_to_host", copy)
    with ThreadPoolExecutor(4) as pool:
        waiters = [pool.submit(copier.to_host, *pair) for pair in zip(sources, map(memoryview, hosts), strict=True)]
        inside.wait()
        for waiter in waiters:
            waiter.result(timeout=60)
    assert hosts == [pattern(500, seed).tobytes() for seed in range(4)]
    assert device.statistics().pinned_bytes <= 400


@pytest.mark.fault("no pinned memory", on=("device→host", "host→device"), outcome="goes through ordinary memory")
def test_without_pinned_memory_ordinary_memory_will_do(device, monkeypatch):
    def fail(nbytes):
        raise MemoryError

    monkeypatch.setattr(device, "pinned", fail)
    copier = Copier(device, CopyPlan(100, staged=True))
    data = pattern(1000)
    host = bytearray(1000)
    copier.to_host(store(device, data), memoryview(host))
    assert host == data.tobytes()


@pytest.mark.fault("copy on the device fails", on=("device→host", "host→device"), outcome="nothing is under way")
@pytest.mark.parametrize("fails", [1, 2, 3, 10])
@pytest.mark.parametrize("kind", ["to_host", "to_device"])
def test_when_it_raises_nothing_is_under_way(device, staged, monkeypatch, kind, fails):
    copier = Copier(device, CopyPlan(100, staged))
    allocation = store(device, pattern(1000))
    name = f"copy_{kind}"
    real = getattr(device, name)
    calls = iter(range(1, 100))

    def copy(*args, **kwargs):
        if next(calls) == fails:
            raise DeviceError("broken")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(device, name, copy)
        ends = [allocation, memoryview(bytearray(1000))]
        with pytest.raises(DeviceError, match="broken"):
            getattr(copier, kind)(*(ends if kind == "to_host" else reversed(ends)))
    assert device.statistics().copies_in_flight == 0
    host = bytearray(1000)
    copier.to_device(memoryview(bytes(range(250)) * 4), allocation)  # the staging is usable again
    copier.to_host(allocation, memoryview(host))
    assert host == bytes(range(250)) * 4


# -- what goes on to somewhere else ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 200, 201, 1000, 1023])
def test_pieces_come_in_order(device, staged, nbytes):
    copier = Copier(device, CopyPlan(100, staged))
    data = pattern(nbytes)
    pieces = []
    copier.onward(store(device, data), lambda piece: pieces.append(bytes(piece)))
    assert b"".join(pieces) == data.tobytes()
    assert [len(piece) for piece in pieces] == [100] * (nbytes // 100) + ([nbytes % 100] if nbytes % 100 else [])
    # By way of pinned memory, whatever is faster to ordinary memory.
    assert device.statistics().pinned_bytes == (200 if nbytes else 0)
    copier.close()
    assert device.statistics().pinned_bytes == 0


def test_the_next_piece_is_on_its_way_while_one_is_used(device, monkeypatch):
    story = []
    real = device.copy_to_host

    def copy(allocation, host, stream, *, offset):
        story.append(f"copy {offset}")
        return real(allocation, host, stream, offset=offset)

    def sink(piece):
        story.append(f"use {sum(entry.startswith('use') for entry in story) * 100}")
        in_flight.append(device.statistics().copies_in_flight)

    in_flight = []
    allocation = store(device, pattern(400))
    monkeypatch.setattr(device, "copy_to_host", copy)
    Copier(device, CopyPlan(100)).onward(allocation, sink)
    assert story == ["copy 0", "copy 100", "use 0", "copy 200", "use 100", "copy 300", "use 200", "use 300"]
    assert in_flight == [1, 1, 1, 0]


def test_pieces_are_no_larger_than_a_disk_can_use(monkeypatch):
    device = SimulatedDevice(32 * MB, clock=ManualClock())
    sizes = []
    Copier(device, CopyPlan(32 * MB)).onward(device.allocate(20 * MB), lambda piece: sizes.append(len(piece)))
    assert sizes == [8 * MB, 8 * MB, 4 * MB]


def test_without_pinned_memory_pieces_come_in_ordinary_memory(device, monkeypatch):
    def fail(nbytes):
        raise MemoryError

    monkeypatch.setattr(device, "pinned", fail)
    pieces = []
    copier = Copier(device, CopyPlan(100))
    copier.onward(store(device, pattern(250)), lambda piece: pieces.append(bytes(piece)))
    assert b"".join(pieces) == pattern(250).tobytes()


@pytest.mark.parametrize("fails", [1, 2, 3, 10])
@pytest.mark.parametrize("what", ["the copy", "the sink"])
def test_when_a_piece_fails_nothing_is_under_way(device, monkeypatch, what, fails):
    copier = Copier(device, CopyPlan(100))
    allocation = store(device, pattern(1000))
    real = device.copy_to_host
    calls = iter(range(1, 100))

    def at(error):
        if next(calls) == fails:
            raise error

    def copy(*args, **kwargs):
        at(DeviceError("broken"))
        return real(*args, **kwargs)

    def sink(piece):
        if what == "the sink":
            at(OSError("full"))

    with monkeypatch.context() as patch:
        if what == "the copy":
            patch.setattr(device, "copy_to_host", copy)
        with pytest.raises(DeviceError if what == "the copy" else OSError, match=r"broken|full"):
            copier.onward(allocation, sink)
    assert device.statistics().copies_in_flight == 0
    pieces = []
    copier.onward(allocation, lambda piece: pieces.append(bytes(piece)))  # the staging is usable again
    assert b"".join(pieces) == pattern(1000).tobytes()
    assert device.statistics().pinned_bytes == 200


def test_copies_to_memory_do_not_wait_for_a_disk(device):
    """Two pieces are stuck, and a third waits for their staging; a copy to the host goes its way."""
    copier = Copier(device, CopyPlan(100, staged=True))
    gate = Gate()
    sources = [store(device, pattern(300, seed)) for seed in range(4)]
    with ThreadPoolExecutor(3) as pool:
        stuck = [pool.submit(copier.onward, source, lambda piece: gate.pass_through()) for source in sources[:3]]
        for _ in range(2):
            assert gate.arrived.acquire(timeout=60)
        host = bytearray(300)
        copier.to_host(sources[3], memoryview(host))
        assert host == pattern(300, 3).tobytes()
        gate.open()
        for future in stuck:
            future.result(timeout=60)


def test_the_piece_is_the_smallest_that_is_about_as_fast_as_the_fastest():
    """A millisecond of latency at 1 GB/s: small pieces cost much, and from some size on it does not matter."""
    clock = ManualClock()
    device = SimulatedDevice(256 * MB, bandwidth=1e9, latency=1e-3, checks=False, clock=clock)
    plan = probe(device, clock.now)
    seconds = {chunk: 32 * MB / 1e9 + 32 * MB / chunk * 1e-3 for chunk in (MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB)}
    assert plan.chunk_nbytes == min(chunk for chunk, took in seconds.items() if took <= 1.05 * min(seconds.values()))
    assert device.statistics().live_bytes == device.statistics().pinned_bytes == 0
    no_latency = SimulatedDevice(256 * MB, bandwidth=1e9, checks=False, clock=clock)
    assert probe(no_latency, clock.now).chunk_nbytes == MB


@pytest.mark.parametrize("slow", ["ordinary", "staged"])
def test_pinned_or_not_is_what_was_faster(monkeypatch, slow):
    """Time passes where the test says: in copies whose host end is, or is not, pinned memory of one piece."""
    clock = ManualClock()
    device = SimulatedDevice(256 * MB, bandwidth=1e9, latency=1e-3, checks=False, clock=clock)
    pieces = {}  # with a view of each, so that no other memory gets its address
    pinned, copy = device.pinned, device.copy_to_host

    def pin(nbytes):
        buffer = pinned(nbytes)
        address = np.frombuffer(buffer.view, np.uint8).__array_interface__["data"][0]
        pieces[address, address + nbytes] = buffer.view
        return buffer

    def copy_slowly(allocation, host, stream, *, offset=0):
        address = np.frombuffer(host, np.uint8).__array_interface__["data"][0]
        is_pinned = any(low <= address < high for low, high in pieces)
        if is_pinned == (slow == "staged"):
            clock.advance(0.1)
        return copy(allocation, host, stream, offset=offset)

    monkeypatch.setattr(device, "pinned", pin)
    monkeypatch.setattr(device, "copy_to_host", copy_slowly)
    assert probe(device, clock.now).staged == (slow == "ordinary")


def test_it_is_tried_on_memory_that_nobody_touched(monkeypatch):
    """As what leaves a device finds it: memory that was written before takes copies several times as fast."""
    device = SimulatedDevice(256 * MB, bandwidth=1e9, checks=False, clock=ManualClock())
    mapped = []

    def watch(target):
        memory = target
        while isinstance(memory, np.ndarray | memoryview):
            memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
        if isinstance(memory, mmap.mmap) and not any(memory is each for each in mapped):
            mapped.append(memory)

    copy_on_host, copy_to_host = device.copy_on_host, device.copy_to_host

    def move(target, source):
        watch(target)
        copy_on_host(target, source)

    def copy(allocation, host, stream, *, offset=0):
        watch(host)
        return copy_to_host(allocation, host, stream, offset=offset)

    monkeypatch.setattr(device, "copy_on_host", move)
    monkeypatch.setattr(device, "copy_to_host", copy)
    probe(device, device.clock.now)
    assert len(mapped) == 4  # twice each way: once to make the buffers for staging


def test_without_room_nothing_is_tried(device):
    with pytest.raises(MemoryError, match="too little room"):
        probe(device)
    assert device.statistics().allocations == 0


def test_bytes_are_moved_as_bytes(device, staged):
    copier = Copier(device, CopyPlan(100, staged))
    values = np.arange(100.0)
    allocation = device.allocate(800)
    copier.to_device(memoryview(values), allocation)
    back = np.empty(100)
    copier.to_host(allocation, memoryview(back))
    np.testing.assert_array_equal(back, values)
