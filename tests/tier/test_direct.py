"""From the device to disk in pieces, when the host has no room: real files below, simulated copies above."""

import errno
import os
import threading
import time
import tracemalloc
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.port import CopyPlan, DeviceError
from gpuspill.errors import DataLostError, QuotaExceeded
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.storage.files import FileStore
from gpuspill.testing.stores import Gate, GatedStore
from gpuspill.tier import DeviceTier
from tests.threads import in_thread

PIECE = 800
UNIT = 5 * PIECE
FILLER = 2000
#: What is written of a unit besides its bytes: its number.
HEADER = 1


class Rig:
    """A device tier over a host that is full of one value, which could leave, and no more than that."""

    def __init__(
        self,
        directory,
        *,
        memory=64 * UNIT,
        limit=None,
        host_limit=FILLER,
        disk_limit=None,
        piece=PIECE,
        past_host=lambda device: None,
    ):
        self.device = SimulatedDevice(memory, bandwidth=1e6, latency=0.5, clock=ManualClock())
        self.device.plan = lambda: CopyPlan(piece)
        self.files = FileStore(directory)
        self.disk = GatedStore(self.files)
        self.host = ProxifyManager(
            limit=host_limit, disk_limit=disk_limit, store=self.disk, serializer=PickleSerializer(), sizeof=len
        )
        self.host.store("filler", bytearray(FILLER))
        self.allocated = []
        self.past_host = past_host(self.device)
        self.tier = DeviceTier(self.device, self.host, limit=limit, allocate=self.allocate, past_host=self.past_host)
        self.keys = {}

    def allocate(self, nbytes):
        self.allocated.append(nbytes)
        return memoryview(bytearray(nbytes))

    def put(self, key, value, **options):
        self.keys[key] = self.tier.proxify(value, **options)
        self.tier.settle()

    def get(self, key):
        return self.tier.resolve(self.keys[key])

    def drop(self, key):
        del self.keys[key]
        self.tier.settle()

    def leave(self):
        """Let everything leave the device; returns the bytes that were freed."""
        self.tier.settle()
        freed = self.tier.manager.limits.make_room(self.device.statistics().live_bytes)
        self.tier.settle()
        return freed

    def live(self):
        return self.device.statistics().live_bytes

    def statistics(self):
        return self.tier.statistics()

    def records(self):
        """Return the names of the files there are, once what was to be deleted is."""
        deleted = threading.Event()
        self.host.engine.delete(deleted.set)
        assert deleted.wait(60)
        return sorted(set(os.listdir(self.files.path)) - {"lock"})

    def rest(self):
        """Want no more room, and wait until what is on its way has arrived."""
        self.host.limits.set_limit(None, None)
        self.tier.manager.limits.set_limit(None, None)
        deadline = time.monotonic() + 60
        while self.host._metadata.state.disk.reserved or self.host._metadata.state.spilling:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def check(self):
        self.tier.validate()
        self.host.validate()
        self.device.validate()
        assert self.host._metadata.state.disk.reserved == 0
        assert len(self.records()) == self.files.statistics().records
        assert self.device.statistics().copies_in_flight == 0
        assert self.device.statistics().violations == 0

    def close(self):
        self.tier.close()
        self.host.close()
        assert not os.path.exists(self.files.path)
        assert self.device.statistics().pinned_bytes == 0
        assert self.device.statistics().violations == 0


@contextmanager
def making(build):
    """Give a function that builds rigs and uses their devices; bring them to rest, check and close them at the end."""
    rigs = []

    def make(**options):
        rig = build(**options)
        context = simulated.use(rig.device)
        context.__enter__()
        rigs.append((rig, context))
        return rig

    yield make
    for rig, context in reversed(rigs):
        if not rig.host._metadata.closed:
            rig.rest()
            rig.check()
        rig.close()
        context.__exit__(None, None, None)


@pytest.fixture
def make(tmp_path):
    with making(partial(Rig, tmp_path)) as make:
        yield make


@pytest.fixture
def rig(make):
    return make()


def numbers(seed=0):
    return np.random.default_rng(seed).random(UNIT // 8)


def straight(rig, count=1):
    """Assert that so many units went straight to disk and nothing else moved."""
    assert rig.statistics().direct_spills == count
    assert rig.allocated == []
    assert rig.host.memory_total() == FILLER
    assert rig.host.is_resident("filler")
    statistics = rig.host.statistics()
    assert (statistics.spills, statistics.waits, statistics.overruns) == (count, 0, 0)


def test_when_the_host_is_full_it_goes_straight_to_disk(rig):
    rig.put("x", asarray(numbers()))
    assert rig.leave() == UNIT
    straight(rig)
    assert rig.live() == rig.statistics().device_nbytes == 0
    assert rig.statistics().spilled_nbytes == rig.files.statistics().payload_nbytes == UNIT
    assert rig.device.statistics().copies_to_host == 5
    rig.check()

    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    assert rig.live() == UNIT
    assert rig.records() == []  # what came back keeps no record
    assert rig.host.memory_total() == FILLER
    assert rig.leave() == UNIT
    straight(rig, 2)


@pytest.mark.parametrize("room", [UNIT + HEADER, UNIT + HEADER - 1, 0, -1, None])
def test_only_where_the_host_has_no_room(make, room):
    """To the byte; also when the host is over its limit. What nobody accounts for takes room too."""
    rig = make(host_limit=None if room is None else 10**6)
    with rig.host.admission.pin(["filler"]):
        if room is not None:
            rig.host.limits.set_offset(10**6 - FILLER - room)
        rig.put("x", asarray(numbers()))
        rig.leave()
        if room is not None and room < UNIT + HEADER:
            straight(rig)
        else:
            assert rig.statistics().direct_spills == 0
            assert rig.records() == []
            assert rig.host.memory_total() == FILLER + HEADER + UNIT
            assert rig.allocated == [UNIT]
        np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
        rig.host.limits.set_offset(0)  # or the filler would begin to leave


def test_clean_values_make_room_for_it(make):
    """Letting go of what is on disk as well costs no write; the unit would."""
    rig = make(host_limit=UNIT + HEADER)
    rig.host.limits.evict_all()
    assert rig.host.get("filler") == bytearray(FILLER)
    rig.put("x", asarray(numbers()))
    rig.leave()
    assert rig.statistics().direct_spills == 0
    assert not rig.host.is_resident("filler")
    assert rig.host.memory_total() == HEADER + UNIT
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


def test_host_memory_is_bounded_by_two_pieces(make, monkeypatch):
    """Of 8 MiB no more than two pieces of 64 KiB are in host memory at any time, whoever allocates them."""
    nbytes, piece = 8 * 2**20, 64 * 2**10
    rig = make(memory=4 * nbytes, piece=piece)
    rig.put("x", asarray(np.arange(nbytes // 8)))
    totals = []
    writev = os.writev

    def watched(fd, buffers):
        totals.append((rig.host.memory_total(), rig.device.statistics().pinned_bytes))
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", watched)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        assert rig.leave() == nbytes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    straight(rig)
    assert totals == [(FILLER, 2 * piece)] * (nbytes // piece + 1)
    # The rest is for the thread, events and the like.
    assert 2 * piece <= peak - before < 3 * piece
    monkeypatch.undo()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(nbytes // 8))


def test_the_next_piece_is_copied_while_one_is_written(rig, monkeypatch):
    in_flight = []
    writev = os.writev
    monkeypatch.setattr(
        os,
        "writev",
        lambda *args: in_flight.append(rig.device.statistics().copies_in_flight) or writev(*args),
    )
    rig.put("x", asarray(numbers()))
    rig.leave()
    assert in_flight == [1, 1, 1, 1, 0, 0]  # the last piece, and the footer


def test_the_record_is_as_any_other(rig, monkeypatch):
    """Byte for byte what the host's manager writes of a unit that went through its memory."""
    rig.put("x", asarray(numbers()))
    rig.leave()
    with open(os.path.join(rig.files.path, *rig.records()), "rb") as file:
        straight_there = file.read()
    rig.get("x")
    rig.host.limits.set_limit(None, None)
    rig.leave()
    with rig.host.admission.pin(["filler"]):
        rig.host.limits.evict_all()
    with open(os.path.join(rig.files.path, *rig.records()), "rb") as file:
        assert file.read() == straight_there


def test_views_types_strides_and_sharing_come_back(rig):
    base = asarray(np.arange(24, dtype="i2").reshape(4, 6))
    other = asarray(np.arange(6, dtype="c8").reshape(2, 3).T)
    rig.put("base", base)
    rig.put("row", base[1])
    rig.put("mix", {"backwards": base[::-1, ::2], "again": [base, base.T], "other": other[::2]})
    del base, other
    rig.leave()
    straight(rig, 2)
    assert rig.live() == 0
    row, mix, base = rig.get("row"), rig.get("mix"), rig.get("base")
    assert row.allocation is base.allocation is mix["backwards"].allocation
    assert mix["again"][0] is base
    assert mix["backwards"].strides == (-12, 4)
    assert (mix["other"].dtype, mix["other"].strides) == (np.dtype("c8"), (16, 24))
    expected = np.arange(24, dtype="i2").reshape(4, 6)
    np.testing.assert_array_equal(asnumpy(base), expected)
    np.testing.assert_array_equal(asnumpy(mix["backwards"]), expected[::-1, ::2])
    np.testing.assert_array_equal(asnumpy(mix["other"]), np.arange(6, dtype="c8").reshape(2, 3).T[::2])
    base[1, 0] = -1
    assert asnumpy(row)[0] == -1


def test_a_unit_without_bytes(make):
    rig = make(host_limit=0)
    rig.put("x", asarray(np.empty((0, 3))))
    rig.tier.manager.limits.evict_all()
    assert rig.get("x").shape == (0, 3)


def test_four_times_the_device_with_a_full_host(make):
    rig = make(memory=4 * UNIT)
    for number in range(16):
        rig.put(number, asarray(numbers(number)))
    assert rig.statistics().out_of_memory_helped > 0
    for number in range(16):
        np.testing.assert_array_equal(asnumpy(rig.get(number)), numbers(number))
        assert rig.host.memory_total() == FILLER
    assert rig.statistics().direct_spills == rig.statistics().spills > 12
    assert rig.allocated == []


@pytest.mark.fault("record damaged", on="disk→host", outcome="noticed")
def test_a_record_that_was_altered_is_noticed(rig):
    rig.put("x", asarray(numbers()))
    rig.leave()
    with open(os.path.join(rig.files.path, *rig.records()), "r+b") as file:
        file.seek(3 * PIECE)
        byte = file.read(1)
        file.seek(3 * PIECE)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DataLostError):
        rig.get("x")
    rig.drop("x")


# -- failures: it stays where it was, or takes the ordinary way --------------------------------------------


def fail_nth(monkeypatch, target, name, nth, make_error):
    """Make the n-th call fail, counted from 1; all from the first on, if n is 0. Returns the calls."""
    real = getattr(target, name)
    calls = []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == nth or not nth:
            raise make_error()
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, call)
    return calls


@pytest.mark.fault("error of the disk", on="host→disk", outcome="stays in memory, tried again")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 6])
def test_if_the_disk_fails_at_a_piece_it_waits_for_room_in_memory(rig, monkeypatch, nth, number):
    """The disk takes the host's value a moment later; so there is room, and the bytes are copied anew."""
    rig.put("x", asarray(numbers()))
    calls = fail_nth(monkeypatch, os, "writev", nth, lambda: OSError(number, os.strerror(number)))
    rig.host.limits.set_limit(UNIT + HEADER, None)
    assert rig.leave() == UNIT
    assert len(calls) > nth
    assert rig.statistics().direct_spills == 0
    assert rig.host.memory_total() == UNIT + HEADER
    assert not rig.host.is_resident("filler")
    assert len(rig.records()) == 1  # the filler's
    rig.check()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


@pytest.mark.parametrize("name", ["open", "fstat"])
def test_so_it_does_if_the_file_cannot_be_made(rig, monkeypatch, name):
    rig.put("x", asarray(numbers()))
    rig.host.limits.set_limit(UNIT + HEADER, None)
    fail_nth(monkeypatch, os, name, 1, lambda: OSError(errno.EIO, "broken"))
    assert rig.leave() == UNIT
    assert rig.statistics().direct_spills == 0
    rig.check()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


def refuse(header, frames):
    raise QuotaExceeded("it does not fit")


@pytest.mark.fault("disk limit used up", on="host→disk", outcome="stays in memory, tried again")
@pytest.mark.parametrize("who", ["the manager", "the store"])
def test_beyond_the_quota_it_is_kept_in_memory(make, monkeypatch, who):
    """There is nothing else left to do: what is on the device has to leave, and the disk may not be used."""
    rig = make(disk_limit=UNIT if who == "the manager" else None)
    if who == "the store":
        monkeypatch.setattr(rig.files, "write", refuse)
    with rig.host.admission.pin(["filler"]):
        rig.put("x", asarray(numbers()))
        assert rig.leave() == UNIT
        assert rig.statistics().direct_spills == 0
        assert rig.device.statistics().copies_to_host == 5  # the quota is asked before anything is copied
        assert rig.host.memory_total() == FILLER + UNIT + HEADER
        assert rig.host.statistics().overruns == 1
        np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


@pytest.mark.fault("disk full", on="host→disk", outcome="tasks go on")
def test_a_disk_that_stays_full(make, monkeypatch):
    """What has to leave the device ends up in host memory, beyond its limit; nobody waits for ever."""
    rig = make(memory=4 * UNIT)
    with monkeypatch.context() as patch:
        fail_nth(patch, os, "writev", 0, lambda: OSError(errno.ENOSPC, "full"))
        for number in range(12):
            rig.put(number, asarray(numbers(number)))
        assert rig.files.statistics().records == 0
        assert rig.statistics().direct_spills == 0
        for number in range(12):
            np.testing.assert_array_equal(asnumpy(rig.get(number)), numbers(number))
        assert rig.host.is_resident("filler")


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_a_copy_that_fails_once_is_made_again(rig, monkeypatch, nth):
    rig.host.limits.set_limit(UNIT + HEADER, None)
    rig.put("x", asarray(numbers()))
    fail_nth(monkeypatch, rig.device, "copy_to_host", nth, lambda: DeviceError("broken"))
    assert rig.leave() == UNIT
    rig.check()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


@pytest.mark.fault("copy on the device fails", on="host→disk", outcome="stays; tried again")
def test_a_device_that_fails_keeps_the_unit(rig, monkeypatch):
    rig.put("x", asarray(numbers()))
    with monkeypatch.context() as patch:
        fail_nth(patch, rig.device, "copy_to_host", 0, lambda: DeviceError("broken"))
        assert rig.leave() == 0
    assert rig.live() == rig.statistics().device_nbytes == UNIT
    assert rig.files.statistics().payload_nbytes in (0, FILLER)  # the filler may have gone to make room for it
    rig.check()
    assert rig.leave() == UNIT
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


# -- in the middle ----------------------------------------------------------------------------------------


@pytest.fixture
def stuck(rig, monkeypatch):
    """Begin to spill `x` and stop at a piece; returns the gate, and what waits for the end."""

    def stuck(at=3):
        gate = Gate()
        real, calls = os.writev, []

        def writev(fd, buffers):
            calls.append(fd)
            if len(calls) == at:
                gate.pass_through()
            return real(fd, buffers)

        monkeypatch.setattr(os, "writev", writev)
        rig.put("x", asarray(numbers()))
        spill = in_thread(rig.tier.manager.limits.make_room, 1)
        assert gate.arrived.acquire(timeout=60)
        assert len(rig.records()) == rig.files.statistics().records + 1
        return gate, spill

    return stuck


@pytest.mark.fault("used meanwhile", on="host→disk", outcome="stays")
@pytest.mark.fault("deleted meanwhile", on="host→disk", outcome="nothing left")
@pytest.mark.fault("overwritten meanwhile", on="host→disk", outcome="the new one is there")
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("meanwhile", ["read", "delete", "overwrite", "join", "pass on", "view", "evict"])
def test_in_the_middle(rig, stuck, meanwhile, at):
    gate, spill = stuck(at)
    kept = None
    if meanwhile == "read":
        kept = rig.get("x")
    elif meanwhile == "delete":
        rig.drop("x")
    elif meanwhile == "overwrite":
        rig.put("x", asarray(np.ones(3)))
    elif meanwhile == "join":
        rig.put("y", rig.get("x")[3:])
    elif meanwhile == "pass on":
        rig.put("y", rig.get("x"), touched=False)
    elif meanwhile == "view":
        kept = rig.get("x")[3:]
    else:
        rig.host.limits.evict_all()  # what else it has
    gate.open()
    freed = spill()
    rig.tier.settle()
    assert freed == (0 if meanwhile == "read" else UNIT)
    live = {"read": UNIT, "overwrite": 24, "view": UNIT}.get(meanwhile, 0)
    assert rig.live() == live == rig.statistics().device_nbytes + rig.statistics().lingering_nbytes
    if meanwhile in ("read", "delete", "overwrite"):
        assert rig.records() == []
        assert len(rig.host) == 1
    rig.check()
    if meanwhile == "overwrite":
        np.testing.assert_array_equal(asnumpy(rig.get("x")), np.ones(3))
    elif meanwhile != "delete":
        np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    if meanwhile in ("join", "pass on"):
        assert rig.files.statistics().writes == (2 if meanwhile == "join" else 1)
        assert rig.get("y").allocation is rig.get("x").allocation
    del kept


def test_changed_in_place_and_stored_again_when_all_is_copied(rig, monkeypatch):
    gate, real = Gate(), rig.files.write

    def write(header, frames):
        receipt = real(header, frames)
        gate.pass_through()
        return receipt

    monkeypatch.setattr(rig.files, "write", write)
    rig.put("x", asarray(np.ones(UNIT // 8)))
    spill = in_thread(rig.tier.manager.limits.make_room, 1)
    assert gate.arrived.acquire(timeout=60)
    changed = rig.get("x")
    changed += 1
    rig.put("x", changed)
    del changed
    gate.open()
    assert spill() == UNIT  # written anew
    assert rig.live() == 0
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.full(UNIT // 8, 2.0))


@pytest.mark.fault("disk slow or stuck", on="host→disk", outcome="others do not wait")
def test_others_come_and_go_while_the_disk_is_stuck(rig, stuck):
    """No lock is held, of neither manager, and no staging that others need."""
    rig.put("y", asarray(numbers(1)))
    rig.leave()
    gate, spill = stuck()
    np.testing.assert_array_equal(asnumpy(rig.get("y")), numbers(1))
    rig.host.limits.set_limit(None, None)
    assert rig.tier.manager.limits.make_room(1) == UNIT  # by the ordinary way
    assert not rig.tier.is_ready(rig.keys["y"])
    np.testing.assert_array_equal(asnumpy(rig.get("y")), numbers(1))
    assert rig.host.get("filler") == bytearray(FILLER)
    gate.open()
    assert spill() == UNIT


def test_who_runs_out_of_memory_waits_for_it(make, monkeypatch):
    rig = make(memory=UNIT)
    rig.put("x", asarray(numbers()))
    gate = Gate()
    rig.disk.before["write"] = gate
    spill = in_thread(rig.tier.manager.limits.make_room, 1)
    assert gate.arrived.acquire(timeout=60)
    hooked = threading.Event()
    settle = rig.tier._guard._settle
    rig.tier._guard._settle = lambda: (settle(), hooked.set())
    allocate = in_thread(lambda: asarray(numbers(1), device=rig.device))
    assert hooked.wait(60)
    gate.open()
    assert spill() == UNIT
    np.testing.assert_array_equal(asnumpy(allocate()), numbers(1))
    straight(rig)


@pytest.mark.fault("device memory runs out", on="host→disk", outcome="room is made")
def test_who_copies_runs_out_of_memory_in_the_middle(make, monkeypatch):
    """As a finaliser might, that runs between two pieces: what moves is no victim, what else there is leaves."""
    rig = make(memory=2 * UNIT)
    rig.put("x", asarray(numbers()))
    rig.put("y", asarray(numbers(1)))
    made = []
    real, calls = os.writev, []

    def writev(fd, buffers):
        calls.append(fd)
        if len(calls) == 3:
            made.append(asarray(numbers(2), device=rig.device))
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)
    rig.tier.manager.limits.make_room(UNIT)
    rig.tier.settle()
    np.testing.assert_array_equal(asnumpy(made.pop()), numbers(2))
    straight(rig, 2)
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    np.testing.assert_array_equal(asnumpy(rig.get("y")), numbers(1))


@pytest.mark.fault("closed meanwhile", on="device→host", outcome="nothing left on disk")
def test_the_tier_is_closed_in_the_middle(rig, stuck):
    """By another thread than those of the tier, so closing does not wait: it stays on the device, readable."""
    gate, spill = stuck()
    rig.tier.close()
    gate.open()
    assert spill() == 0
    assert rig.records() == []
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


def test_the_host_is_closed_in_the_middle(rig, stuck):
    """Its files are gone, so the unit may not be; nothing else is known of a disk any more."""
    gate, spill = stuck()
    rig.host.close()
    gate.open()
    spill()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    rig.host.validate()
    assert rig.host._metadata.state.disk.reserved == 0
