"""From the device to disk and back past host memory, and what happens when that is not possible.

What has to hold whichever way the bytes take is run on both; see test_direct.py for the way in pieces alone.
"""

import errno
import logging
import os
import threading

import numpy as np
import pytest

from gpuspill.device.past_host import FileDriverError, PastHost, Trust
from gpuspill.device.port import DeviceError
from gpuspill.errors import DataLostError
from gpuspill.simulated import asarray, asnumpy
from gpuspill.testing.fake_files import FakeFiles
from gpuspill.testing.stores import Gate
from tests.threads import in_thread
from tests.tier.test_direct import FILLER, HEADER, Rig, making, refuse, straight

PAGE = 4096
#: Not whole pages.
UNIT = 5 * PAGE + 104
PIECES = 6


def rig_for(way, directory, **options):
    files = []

    def past_host(device):
        files.append(FakeFiles(device))
        return PastHost(files[0], trust=Trust(minimum=PAGE), piece=PAGE) if way == "past the host" else None

    rig = Rig(directory, piece=PAGE, past_host=past_host, **{"memory": 64 * UNIT, **options})
    (rig.storage,) = files
    rig.way = way
    return rig


@pytest.fixture(params=["past the host", "in pieces"])
def way(request):
    return request.param


@pytest.fixture
def make(way, tmp_path):
    rigs = []

    def build(**options):
        rigs.append(rig_for(way, tmp_path, **options))
        return rigs[-1]

    with making(build) as make:
        yield make
    assert not any(rig.storage.under_way for rig in rigs)


@pytest.fixture
def rig(make):
    return make()


only_past = pytest.mark.parametrize("way", ["past the host"], indirect=True)


def numbers(seed=0):
    return np.random.default_rng(seed).random(UNIT // 8)


def went_past(rig, spills, restores=None):
    """Assert how many units went past the host: all or none, by the way."""
    past = rig.way == "past the host"
    assert rig.statistics().past_host_spills == (spills if past else 0)
    if past:
        assert rig.past_host.reads == (spills if restores is None else restores)


# -- whichever way ----------------------------------------------------------------------------------------


def test_there_and_back_and_there_again(rig):
    rig.put("x", asarray(numbers()) + 1.0)  # computed on a stream that nobody waited for
    assert rig.leave() == UNIT
    straight(rig)
    assert rig.live() == 0
    assert rig.files.statistics().payload_nbytes == UNIT
    went_past(rig, 1, 0)
    rig.check()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers() + 1)
    assert rig.records() == []
    assert rig.host.memory_total() == FILLER
    went_past(rig, 1)
    assert rig.leave() == UNIT
    straight(rig, 2)
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers() + 1)
    went_past(rig, 2)


def test_views_and_sharing_come_back(rig):
    base = asarray(numbers().reshape(31, 83))
    rig.put("base", base)
    rig.put("mix", {"row": base[3], "again": [base, base.T[::2]]})
    del base
    rig.leave()
    straight(rig)
    mix, base = rig.get("mix"), rig.get("base")
    assert mix["row"].allocation is base.allocation
    assert mix["again"][0] is base
    np.testing.assert_array_equal(asnumpy(mix["again"][1]), numbers().reshape(31, 83).T[::2])
    base[3, 0] = -1
    assert asnumpy(mix["row"])[0] == -1
    went_past(rig, 1)


def test_four_times_the_device(make):
    """In the middle of allocations that do not fit, with memory that is used again at once."""
    rig = make(memory=4 * UNIT)
    for number in range(16):
        rig.put(number, asarray(numbers(number)))
    assert rig.statistics().out_of_memory_helped > 0
    for number in range(16):
        np.testing.assert_array_equal(asnumpy(rig.get(number)), numbers(number))
        assert rig.host.memory_total() == FILLER
    assert rig.statistics().direct_spills == rig.statistics().spills > 12
    went_past(rig, rig.statistics().spills, rig.statistics().restores)
    assert rig.allocated == []


def fail(monkeypatch, target, name, error, when=lambda calls, *args: True):
    real, calls = getattr(target, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if when(len(calls), *args):
            raise error()
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, call)
    return calls


def test_a_disk_that_is_full(rig, monkeypatch):
    """It is noticed before anything is written, and read as what it is."""
    name = "posix_fallocate" if rig.way == "past the host" else "writev"
    fail(monkeypatch, os, name, lambda: OSError(errno.ENOSPC, "full"), lambda calls, *args: calls == 1)
    rig.put("x", asarray(numbers()))
    rig.host.limits.set_limit(UNIT + HEADER, None)
    assert rig.leave() == UNIT
    assert rig.statistics().direct_spills == 0
    assert rig.host.memory_total() == UNIT + HEADER
    assert len(rig.records()) == 1  # the filler's, which made room
    went_past(rig, 0)
    if rig.way == "past the host":
        assert rig.storage.opened == 0
        assert rig.past_host.worth(UNIT)  # the disk's fault
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


@pytest.mark.parametrize("who", ["the manager", "the store"])
def test_beyond_the_quota_it_is_kept_in_memory(make, monkeypatch, who):
    rig = make(disk_limit=UNIT if who == "the manager" else None)
    if who == "the store":
        monkeypatch.setattr(rig.files, "write", refuse)
    with rig.host.admission.pin(["filler"]):
        rig.put("x", asarray(numbers()))
        assert rig.leave() == UNIT
        assert rig.statistics().direct_spills == rig.storage.opened == 0
        assert rig.host.memory_total() == FILLER + UNIT + HEADER
        np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


@pytest.fixture
def stuck(rig, monkeypatch):
    """Begin to spill `x` and stop between two pieces; returns the gate, and what waits for the end."""

    def stuck(at=3):
        gate = Gate()

        def pause(number):
            if number == at:
                gate.pass_through()

        if rig.way == "past the host":
            rig.storage.fault = lambda what, number: pause(number)
        else:
            real, calls = os.writev, []

            def writev(*args):
                calls.append(args)
                pause(len(calls))
                return real(*args)

            monkeypatch.setattr(os, "writev", writev)
        rig.put("x", asarray(numbers()))
        spill = in_thread(rig.tier.manager.limits.make_room, 1)
        assert gate.arrived.acquire(timeout=60)
        assert len(rig.records()) == rig.files.statistics().records + 1
        assert rig.live() == UNIT  # it stays until all is there
        return gate, spill

    return stuck


@pytest.mark.parametrize("at", [1, PIECES])
@pytest.mark.parametrize("meanwhile", ["read", "delete", "overwrite", "view"])
def test_in_the_middle(rig, stuck, meanwhile, at):
    gate, spill = stuck(at)
    kept = None
    if meanwhile == "read":
        kept = rig.get("x")
    elif meanwhile == "delete":
        rig.drop("x")
    elif meanwhile == "overwrite":
        rig.put("x", asarray(np.ones(3)))
    else:
        kept = rig.get("x")[3:]
    gate.open()
    freed = spill()
    rig.tier.settle()
    assert freed == (0 if meanwhile == "read" else UNIT)
    if meanwhile != "view":
        assert rig.records() == []
    rig.check()
    if meanwhile == "overwrite":
        np.testing.assert_array_equal(asnumpy(rig.get("x")), np.ones(3))
    elif meanwhile != "delete":
        np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    del kept


@pytest.mark.parametrize("who", ["tier", "host"])
def test_closed_in_the_middle(rig, stuck, who):
    """The next piece is not begun; nothing of the record is left; the value can still be read."""
    gate, spill = stuck(1)
    getattr(rig, who).close()
    gate.open()
    spill()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    assert rig.storage.under_way == 0
    if who == "tier":
        assert rig.records() == []
    went_past(rig, rig.statistics().past_host_spills, 0)


def test_a_device_that_fails_keeps_the_unit(rig, monkeypatch):
    rig.put("x", asarray(numbers()))
    with monkeypatch.context() as patch:
        fail(patch, rig.device, "fence", lambda: DeviceError("broken"))
        assert rig.leave() == 0
    assert rig.live() == UNIT
    rig.check()
    assert rig.leave() == UNIT
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())


# -- past the host only -----------------------------------------------------------------------------------


@only_past
def test_what_is_small_goes_in_pieces_and_is_hashed(rig):
    """So does what is opaque, or in a record with something else."""
    rig.put("x", asarray(np.arange(PAGE // 8 - 1)))
    rig.leave()
    assert rig.statistics().direct_spills == 1
    assert rig.storage.opened == 0
    (receipt,) = rig.files._records.values()
    assert receipt.hashed
    np.testing.assert_array_equal(asnumpy(rig.get("x")), np.arange(PAGE // 8 - 1))


@only_past
def test_nothing_of_it_is_in_host_memory(rig):
    rig.put("x", asarray(numbers()))
    rig.leave()
    rig.get("x")
    went_past(rig, 1)
    assert rig.allocated == []
    assert rig.device.statistics().pinned_bytes == 0


@only_past
def test_what_had_the_memory_before_is_done_with_it(rig):
    """On the stream on which it was allocated: what reads files waits for none."""
    rig.put("x", asarray(numbers()))
    rig.leave()
    other = rig.device.allocate(8)
    late = rig.device.copy_to_device(bytes(8), other, rig.device.stream("to_device"))
    found = []
    rig.storage.fault = lambda what, number: found.append(rig.device.statistics().copies_in_flight)
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    went_past(rig, 1)
    assert found == [0] * PIECES
    assert late.done()


def broken(what, nth):
    def fault(kind, number):
        if kind == what and number == nth:
            raise FileDriverError("broken")

    return fault


def short(what, nth):
    return lambda kind, number: 100 if (kind, number) == (what, nth) else None


@pytest.mark.fault("GPUDirect Storage fails", on="host→disk", outcome="goes through host memory")
@only_past
@pytest.mark.parametrize("fault", [broken, short])
@pytest.mark.parametrize("nth", [1, 3, PIECES])
def test_a_write_that_fails_half_way_is_done_in_pieces(rig, caplog, fault, nth):
    """Of the same record, which is byte for byte one that nobody tried to write otherwise."""
    rig.storage.fault = fault("write", nth)
    rig.put("x", asarray(numbers()))
    assert rig.leave() == UNIT
    straight(rig)
    went_past(rig, 0, 0)
    (receipt,) = rig.files._records.values()
    assert receipt.hashed
    assert receipt.nbytes < UNIT + PAGE - 104
    rig.check()
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "GPUDirect Storage failed to write 20,584 bytes to a file" in line.getMessage()
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    rig.leave()
    assert rig.statistics().past_host_spills == 1  # once is no habit


@pytest.mark.fault("GPUDirect Storage fails", on="disk→host", outcome="goes through host memory")
@only_past
@pytest.mark.parametrize("fault", [broken, short])
@pytest.mark.parametrize("nth", [1, PIECES])
def test_a_read_that_fails_half_way_goes_through_host_memory(rig, caplog, fault, nth):
    rig.put("x", asarray(numbers()))
    rig.leave()
    rig.storage.fault = fault("read", nth)
    np.testing.assert_array_equal(asnumpy(rig.get("x")), numbers())
    went_past(rig, 1, 0)
    assert rig.allocated == [UNIT]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert rig.live() == UNIT


@only_past
def test_a_driver_that_disappears(rig, caplog):
    """In the middle of a write. Nothing is lost, it is said once, and after a while nobody asks any more."""
    for number in range(8):
        rig.put(number, asarray(numbers(number)))
    rig.leave()
    went_past(rig, 8, 0)
    rig.storage.fault = lambda what, number: setattr(rig.storage, "gone", True)
    for number in range(8):
        np.testing.assert_array_equal(asnumpy(rig.get(number)), numbers(number))
    opened = rig.storage.opened
    assert not rig.past_host.worth(UNIT)
    rig.leave()
    for number in range(8):
        np.testing.assert_array_equal(asnumpy(rig.get(number)), numbers(number))
    assert rig.storage.opened == opened == 9
    went_past(rig, 8, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@only_past
@pytest.mark.parametrize("damage", ["footer", "longer", "shorter", "gone"])
def test_a_record_whose_length_or_footer_is_not_as_written(rig, damage):
    rig.put("x", asarray(numbers()))
    rig.leave()
    path = os.path.join(rig.files.path, *rig.records())
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        if damage == "footer":
            file.seek(-20, os.SEEK_END)
            byte = file.read(1)
            file.seek(-20, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        else:
            file.truncate(size + {"longer": 1, "shorter": -1, "gone": 0}[damage])
    if damage == "gone":
        os.unlink(path)
    with pytest.raises(DataLostError):
        rig.get("x")
    assert rig.past_host.reads == 0
    rig.drop("x")


@only_past
def test_the_bytes_themselves_are_not_checked(rig):
    """What docs/guarantees.md says of it: never-wrong."""
    rig.put("x", asarray(np.zeros(UNIT // 8, "u8")))
    rig.leave()
    with open(os.path.join(rig.files.path, *rig.records()), "r+b") as file:
        file.write(b"\x01")
    assert asnumpy(rig.get("x"))[0] == 1


@only_past
def test_the_record_is_deleted_while_it_is_read(rig):
    rig.put("x", asarray(numbers()))
    rig.leave()
    gate = Gate()
    rig.storage.fault = lambda what, number: gate.pass_through() if what == "read" and number == 2 else None
    get = in_thread(rig.get, "x")
    assert gate.arrived.acquire(timeout=60)
    os.unlink(os.path.join(rig.files.path, *rig.records()))
    gate.open()
    np.testing.assert_array_equal(asnumpy(get()), numbers())


@only_past
def test_two_at_once(make):
    """Each thread has a file of its own, and no lock is held while one waits."""
    rig = make(memory=8 * UNIT)
    for number in range(2):
        rig.put(number, asarray(numbers(number)))
    barrier = threading.Barrier(2)
    first = set()

    def fault(what, number):
        if what == "write" and threading.get_ident() not in first:
            first.add(threading.get_ident())
            barrier.wait(60)

    rig.storage.fault = fault
    spills = [in_thread(rig.tier.manager.limits.make_room, 1) for _ in range(2)]
    assert sum(spill() for spill in spills) == 2 * UNIT
    went_past(rig, 2, 0)
    for number in range(2):
        np.testing.assert_array_equal(asnumpy(rig.get(number)), numbers(number))
