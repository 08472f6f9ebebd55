"""On whatever stream memory was filled: what leaves the device is what is there in the end, without waiting for all."""

import gc

import numpy as np
import pytest

from tests.standin.rig import MB, Rig

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed: make test-cuda")

NBYTES = 2 * MB
LEGACY, PER_THREAD, BLOCKING, NON_BLOCKING = 1, 2, 0, 1


class Producer:
    """Fills memory on one stream, late: only when a thread waits for that stream."""

    def __init__(self, kind):
        from cuda.bindings import driver

        self.driver = driver
        self.made = None
        if kind in ("blocking", "non-blocking"):
            self.made = self.call("cuStreamCreate", BLOCKING if kind == "blocking" else NON_BLOCKING)
        self.handle = {"legacy": LEGACY, "per-thread": PER_THREAD}.get(kind) or int(self.made)

    def call(self, name, *arguments):
        error, *result = getattr(self.driver, name)(*arguments)
        assert not error, (name, error)
        return result[0] if result else None

    def fill(self, array, byte):
        self.call("cuMemsetD8Async", array.device_ctypes_pointer.value, byte, array.nbytes, self.handle)

    def close(self):
        if self.made is not None:
            self.call("cuStreamDestroy", self.made)


@pytest.fixture
def fill_and_leave(tmp_path, standin):
    """Return what fills an array on a stream, stores it and has it leave; it returns the bytes that come back."""
    from numba import cuda

    rig = Rig(tmp_path, standin, pinned_limit=32 * MB)
    rig.tier.pinned.reserve(16 * MB)
    producers = []

    def act(kind, *, told=False, fence="stream"):
        rig.device.fence_by_stream = fence == "stream"
        producers.append(producer := Producer(kind))
        array = cuda.to_device(np.zeros(NBYTES, np.uint8))
        rig.device.synchronize()
        gc.collect()
        names = ("cuCtxSynchronize", "cuEventSynchronize", "pageable_copies")
        before = [standin.count(name) for name in names]
        with standin.held():
            producer.fill(array, 7)
            rig.put("x", [array.bind(cuda.external_stream(producer.handle)) if told else array])
            del array
            rig.tier.settle()
            rig.tier.manager.limits.make_room(NBYTES)
            rig.calls = [standin.count(name) - then for name, then in zip(names, before, strict=True)]
        assert rig.tier.statistics().spilled_nbytes == NBYTES
        rig.device.synchronize()
        (found,) = rig.get("x")
        return found.copy_to_host()

    act.rig = rig
    yield act
    rig.close()
    for producer in producers:
        producer.close()
    gc.collect()
    cuda.current_context().memory_manager.deallocations.clear()
    cuda.synchronize()


@pytest.mark.parametrize("kind", ["legacy", "per-thread", "blocking"])
def test_what_is_in_order_with_the_default_stream_is_waited_for_by_an_event_of_that(fill_and_leave, kind):
    assert (fill_and_leave(kind) == 7).all()
    assert fill_and_leave.rig.calls == [0, 1, 0]


@pytest.mark.parametrize("kind", ["blocking", "non-blocking"])
def test_a_stream_that_an_array_is_bound_to_is_waited_for_by_an_event_of_its_own(fill_and_leave, kind):
    assert (fill_and_leave(kind, told=True) == 7).all()
    assert fill_and_leave.rig.calls == [0, 1, 0]


@pytest.mark.parametrize("kind", ["legacy", "per-thread", "blocking", "non-blocking"])
def test_the_whole_device_is_waited_for_if_told(fill_and_leave, kind):
    assert (fill_and_leave(kind, fence="device") == 7).all()
    assert fill_and_leave.rig.calls == [1, 1, 0]


def test_nothing_waits_for_a_stream_that_is_in_no_order_and_of_which_nothing_says(fill_and_leave):
    """What the setting is for: it is not waited for, and what is copied is what was there before."""
    assert not (fill_and_leave("non-blocking") == 7).all()
    assert fill_and_leave.rig.calls == [0, 1, 0]


def test_the_whole_device_is_waited_for_if_a_stream_gives_no_event(fill_and_leave, standin, monkeypatch):
    rig = fill_and_leave.rig
    monkeypatch.setattr(type(rig.device), "produced", lambda self, stream: None)
    assert (fill_and_leave("non-blocking", told=True) == 7).all()
    assert rig.calls == [1, 1, 0]


@pytest.mark.parametrize("kind", ["legacy", "per-thread", "blocking"])
def test_memory_that_is_dropped_is_given_out_again_after_the_work_that_was_enqueued_for_it(fill_and_leave, kind):
    """A task drops an array with work in flight. What comes to the same address is not overwritten by that."""
    from numba import cuda

    rig, producer = fill_and_leave.rig, Producer(kind)
    for byte in (1, 2):
        rig.put(byte, cuda.to_device(np.full(NBYTES, byte, np.uint8)))
    cuda.current_context().memory_manager.deallocations.clear()
    rig.device.synchronize()
    rig.to_host()
    dropped = rig.get(1)
    with rig.standin.held():
        producer.fill(dropped, 7)
        del dropped, rig.skeletons[1]
        gc.collect()
        rig.tier.settle()
        found = rig.get(2)
    rig.device.synchronize()
    np.testing.assert_array_equal(found.copy_to_host(), np.full(NBYTES, 2, np.uint8))
    producer.close()
