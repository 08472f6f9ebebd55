"""What every device has to do, as tests.

To test a device adapter of your own, derive from :class:`DeviceTests` and give it a fixture::

    class TestMyDevice(DeviceTests):
        @pytest.fixture
        def device(self):
            device = MyDevice(...)
            yield device
            device.close()

and, for the array type of a library that lives on it, from :class:`ArrayTests`. The device should have a small capacity
of its own (:attr:`DeviceTests.capacity` bytes or more, and little more): the tests fill it. Call
``pytest.register_assert_rewrite("gpuspill.testing.devices")`` before importing this, for messages that show values.

Nothing here is a measurement: how fast copies are, and whether they overlap, is for benchmarks.
"""

# ruff: noqa: D102 - the name of a test is the sentence that it proves

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.base import (
    Allocation,
    Device,
    FreedUnderCopy,
    Layout,
    OutOfMemory,
    StreamKind,
    UnorderedAccess,
    UseAfterFree,
)

__all__ = ["ArrayTests", "DeviceTests", "fetch", "store"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SIZES = (0, 1, 255, 256, 4099, 1 << 18)


def pattern(nbytes: int, seed: int = 1) -> Bytes:
    """Return bytes that are different for different seeds, and nowhere the same for long."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def store(device: Device, data: Any) -> Allocation:
    """Return a new allocation that holds `data`, observed to be there."""
    allocation = device.allocate(len(data))
    device.copy_to_device(data, allocation, device.stream("to_device")).wait()
    return allocation


def fetch(device: Device, allocation: Allocation) -> bytes:
    """Return what an allocation holds; its producer must have been observed."""
    host = bytearray(allocation.nbytes)
    device.copy_to_host(allocation, host, device.stream("to_host")).wait()
    return bytes(host)


class DeviceTests:
    """Conformance: what a device has to do. One test a promise of :mod:`gpuspill.device.base`."""

    detects_misuse: ClassVar[bool] = False
    """Whether unordered and early use is always found out. Then that is tested too."""

    capacity: ClassVar[int] = 1 << 20
    """Bytes that can be allocated at least. Twice as many cannot."""

    @pytest.fixture
    def device(self) -> Any:
        """Yield a device on which nothing is allocated; close it afterwards."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _is_valid_afterwards(self, device: Device) -> Iterator[None]:
        yield
        device.validate()
        assert device.statistics().copies_in_flight == 0

    @pytest.fixture
    def needs_detection(self) -> None:
        """Skip the test if misuse is not detected."""
        if not self.detects_misuse:
            pytest.skip("this device cannot tell")

    # -- memory ------------------------------------------------------------------------------------

    def test_bytes_survive_the_round_trip(self, device: Device) -> None:
        for nbytes in _SIZES:
            data = pattern(nbytes)
            assert fetch(device, store(device, data)) == data.tobytes()

    def test_an_allocation_says_what_it_is(self, device: Device) -> None:
        allocation = device.allocate(1000)
        assert allocation.device is device
        assert allocation.nbytes == 1000
        assert allocation.identity == (device.identity, allocation.address, 1000)

    def test_live_allocations_have_different_identities(self, device: Device) -> None:
        allocations = [device.allocate(nbytes) for nbytes in (0, 0, 1, 1, 256, 256)]
        assert len({a.identity for a in allocations}) == len(allocations)

    def test_live_ranges_do_not_overlap(self, device: Device) -> None:
        ranges = []
        kept = []
        for nbytes in (1, 300, 1, 4096, 300):
            allocation = device.allocate(nbytes)
            kept.append(allocation)
            ranges.append((allocation.address, allocation.address + nbytes))
            if nbytes == 1:
                kept.pop()
                ranges.pop()
                del allocation
        ranges.sort()
        assert all(high <= low for (_, high), (low, _) in itertools.pairwise(ranges))

    def test_memory_is_freed_with_the_last_reference(self, device: Device) -> None:
        before = device.statistics()
        first = device.allocate(1000)
        second = first
        assert device.statistics().live_bytes == before.live_bytes + 1000
        assert device.statistics().live_allocations == before.live_allocations + 1
        del first
        assert device.statistics().live_bytes == before.live_bytes + 1000
        del second
        assert device.statistics().live_bytes == before.live_bytes
        assert device.statistics().live_allocations == before.live_allocations
        assert device.statistics().peak_bytes >= before.live_bytes + 1000

    def test_freeing_gives_memory_up_while_there_are_references(self, device: Device) -> None:
        before = device.statistics().live_bytes
        allocation = device.allocate(1000)
        device.free(allocation)
        assert device.statistics().live_bytes == before
        del allocation
        assert device.statistics().live_bytes == before

    def test_freeing_twice_is_an_error(self, device: Device) -> None:
        allocation = device.allocate(10)
        device.free(allocation)
        with pytest.raises(UseAfterFree):
            device.free(allocation)

    def test_copying_what_was_freed_is_an_error(self, device: Device) -> None:
        allocation = device.allocate(10)
        device.free(allocation)
        with pytest.raises(UseAfterFree):
            device.copy_to_host(allocation, bytearray(10), device.stream("to_host"))
        with pytest.raises(UseAfterFree):
            device.copy_to_device(bytes(10), allocation, device.stream("to_device"))

    def test_memory_info_has_free_and_total_bytes(self, device: Device) -> None:
        free, total = device.memory_info()
        assert 0 < free <= total

    def test_a_negative_size_is_an_error(self, device: Device) -> None:
        with pytest.raises(ValueError, match="-1"):
            device.allocate(-1)

    def test_memory_can_be_borrowed_from_its_owner(self, device: Device) -> None:
        data = pattern(1000)
        allocation = store(device, data)
        identity, owner = allocation.identity, allocation.owner
        del allocation
        borrowed = device.borrow(identity, owner)
        assert borrowed.identity == identity
        del owner
        assert fetch(device, borrowed) == data.tobytes()

    # -- streams and copies ------------------------------------------------------------------------

    def test_there_is_one_stream_a_direction(self, device: Device) -> None:
        down, up = device.stream("to_host"), device.stream("to_device")
        assert down is device.stream("to_host")
        assert up is device.stream("to_device")
        assert down is not up
        assert down.device is device

    def test_chunks_go_where_their_offsets_say(self, device: Device) -> None:
        data = pattern(1000)
        allocation = device.allocate(1000)
        up, down = device.stream("to_device"), device.stream("to_host")
        cuts = [0, 1, 256, 300, 999, 1000]
        for low, high in itertools.pairwise(cuts):
            device.copy_to_device(data[low:high], allocation, up, offset=low)
        up.synchronize()
        host = np.zeros(1000, np.uint8)
        for low, high in reversed(list(itertools.pairwise(cuts))):
            device.copy_to_host(allocation, host[low:high], down, offset=low)
        down.synchronize()
        np.testing.assert_array_equal(host, data)

    def test_copies_of_one_stream_are_done_in_order(self, device: Device) -> None:
        allocation = device.allocate(1 << 16)
        stream = device.stream("to_device")
        sources = [pattern(1 << 16, seed) for seed in range(5)]
        events = [device.copy_to_device(source, allocation, stream) for source in sources]
        events[-1].wait()
        assert all(event.done() for event in events)
        assert fetch(device, allocation) == sources[-1].tobytes()

    def test_a_stream_can_wait_for_another_without_a_thread_waiting(self, device: Device) -> None:
        data = pattern(1 << 16)
        allocation = device.allocate(1 << 16)
        host = bytearray(1 << 16)
        up, down = device.stream("to_device"), device.stream("to_host")
        down.wait(device.copy_to_device(data, allocation, up))
        device.copy_to_host(allocation, host, down).wait()
        assert host == data.tobytes()

    def test_one_event_covers_what_it_is_ordered_after(self, device: Device) -> None:
        data = pattern(1000)
        allocation = device.allocate(1000)
        host = bytearray(1000)
        up, down = device.stream("to_device"), device.stream("to_host")
        first = device.copy_to_device(data, allocation, up)
        down.wait(first)
        second = device.copy_to_host(allocation, host, down)
        up.wait(second)
        last = device.copy_to_device(data[::-1].copy(), allocation, up)
        last.wait()
        assert host == data.tobytes()
        assert first.done()
        assert second.done()
        assert device.statistics().copies_in_flight == 0

    def test_a_recorded_event_covers_what_came_before(self, device: Device) -> None:
        data = pattern(1000)
        allocation = device.allocate(1000)
        up = device.stream("to_device")
        device.copy_to_device(data, allocation, up)
        event = up.record()
        assert event.wait()
        assert event.done()
        assert fetch(device, allocation) == data.tobytes()

    def test_an_event_of_nothing_is_done(self, device: Device) -> None:
        event = device.stream("to_host").record()
        assert event.wait(timeout=60)
        assert event.done()

    def test_synchronising_observes_every_stream(self, device: Device) -> None:
        data = pattern(1000)
        source = store(device, data)
        target = device.allocate(1000)
        host = bytearray(1000)
        events = [
            device.copy_to_host(source, host, device.stream("to_host")),
            device.copy_to_device(data, target, device.stream("to_device")),
        ]
        device.synchronize()
        assert all(event.done() for event in events)
        assert host == data.tobytes()
        assert device.statistics().copies_in_flight == 0
        device.free(source)
        device.free(target)

    def test_copies_are_counted(self, device: Device) -> None:
        before = device.statistics()
        fetch(device, store(device, pattern(1000)))
        after = device.statistics()
        assert after.copies_to_device - before.copies_to_device == 1
        assert after.copies_to_host - before.copies_to_host == 1
        assert after.bytes_to_device - before.bytes_to_device == 1000
        assert after.bytes_to_host - before.bytes_to_host == 1000

    def test_a_read_only_buffer_is_a_source_and_no_destination(self, device: Device) -> None:
        data = pattern(100).tobytes()
        allocation = store(device, data)
        assert fetch(device, allocation) == data
        with pytest.raises(ValueError, match="read-only"):
            device.copy_to_host(allocation, bytes(100), device.stream("to_host"))

    @pytest.mark.parametrize("kind", ["to_host", "to_device"])
    def test_arguments_that_make_no_sense_are_refused(self, device: Device, kind: StreamKind) -> None:
        allocation = device.allocate(100)
        stream = device.stream(kind)

        def copy(host: Any, offset: int = 0) -> None:
            if kind == "to_host":
                device.copy_to_host(allocation, host, stream, offset=offset)
            else:
                device.copy_to_device(host, allocation, stream, offset=offset)

        before = device.statistics()
        for host, offset in ((bytearray(101), 0), (bytearray(2), 99), (bytearray(1), -1)):
            with pytest.raises(ValueError, match="bytes"):
                copy(host, offset)
        with pytest.raises(ValueError, match="contiguous"):
            copy(np.zeros(20, np.uint8)[::2])
        with pytest.raises(TypeError, match="buffer"):
            copy(object())
        assert device.statistics() == before

    def test_buffers_of_any_format_are_bytes(self, device: Device) -> None:
        data = np.arange(50.0).reshape(5, 10)
        allocation = device.allocate(data.nbytes)
        device.copy_to_device(data, allocation, device.stream("to_device")).wait()
        host = np.empty((10, 5))
        device.copy_to_host(allocation, host, device.stream("to_host")).wait()
        np.testing.assert_array_equal(host.ravel(), data.ravel())

    @given(
        st.lists(
            st.tuples(st.sampled_from(["to_host", "to_device"]), st.integers(0, 63), st.integers(0, 64)), max_size=12
        )
    )
    @settings(
        max_examples=50,
        deadline=None,
        # Each example starts from memory of its own; and a suite is run by several classes.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    def test_copies_that_are_ordered_agree_with_a_model(
        self, device: Device, copies: list[tuple[StreamKind, int, int]]
    ) -> None:
        """Each copy waits for the one before, on the device; nobody observes anything until the end."""
        model, source = bytearray(pattern(64).tobytes()), pattern(64, 2)
        allocation = store(device, bytes(model))
        expected, fetched, sources = [], [], []
        last = device.stream("to_host").record()
        for number, (kind, offset, length) in enumerate(copies):
            high = min(offset + length, 64)
            stream = device.stream(kind)
            stream.wait(last)
            if kind == "to_device":
                sources.append((source[offset:high] + np.uint8(number)).copy())
                last = device.copy_to_device(sources[-1], allocation, stream, offset=offset)
                model[offset:high] = sources[-1].tobytes()
            else:
                host = bytearray(high - offset) if high > offset else bytearray()
                last = device.copy_to_host(allocation, host, stream, offset=offset)
                fetched.append(host)
                expected.append(bytes(model[offset:high]))
        last.wait()
        assert [bytes(host) for host in fetched] == expected
        assert fetch(device, allocation) == bytes(model)

    def test_many_threads_copy_at_once(self, device: Device) -> None:
        barrier = threading.Barrier(4, timeout=60)

        def work(seed: int) -> list[bool]:
            barrier.wait()
            return [
                fetch(device, store(device, pattern(4096, seed + i))) == pattern(4096, seed + i).tobytes()
                for i in range(10)
            ]

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, (0, 100, 200, 300)))
        assert all(map(all, results))

    # -- misuse ------------------------------------------------------------------------------------

    @pytest.mark.usefixtures("needs_detection")
    def test_reading_what_a_copy_may_still_be_writing_is_found_out(self, device: Device) -> None:
        allocation = device.allocate(100)
        event = device.copy_to_device(pattern(100), allocation, device.stream("to_device"))
        before = device.statistics()
        with pytest.raises(UnorderedAccess, match="to_device"):
            device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
        after = device.statistics()
        assert after.copies_in_flight == before.copies_in_flight
        assert after.violations == before.violations + 1
        event.wait()
        fetch(device, allocation)

    @pytest.mark.usefixtures("needs_detection")
    def test_overwriting_what_a_copy_may_still_be_reading_is_found_out(self, device: Device) -> None:
        allocation = store(device, pattern(100))
        event = device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
        with pytest.raises(UnorderedAccess, match="to_host"):
            device.copy_to_device(pattern(100), allocation, device.stream("to_device"))
        event.wait()
        device.copy_to_device(pattern(100), allocation, device.stream("to_device")).wait()

    @pytest.mark.usefixtures("needs_detection")
    def test_using_a_staging_buffer_again_too_early_is_found_out(self, device: Device) -> None:
        source, target = store(device, pattern(100)), device.allocate(100)
        with device.pinned(100) as staging:
            event = device.copy_to_host(source, staging.view, device.stream("to_host"))
            with pytest.raises(UnorderedAccess, match="host memory"):
                device.copy_to_device(staging.view, target, device.stream("to_device"))
            event.wait()
            device.copy_to_device(staging.view, target, device.stream("to_device")).wait()
        assert fetch(device, target) == pattern(100).tobytes()

    @pytest.mark.usefixtures("needs_detection")
    def test_freeing_under_a_copy_is_refused(self, device: Device) -> None:
        allocation = store(device, pattern(100))
        host = bytearray(100)
        event = device.copy_to_host(allocation, host, device.stream("to_host"))
        with pytest.raises(FreedUnderCopy):
            device.free(allocation)
        event.wait()
        assert host == pattern(100).tobytes()
        device.free(allocation)

    @pytest.mark.usefixtures("needs_detection")
    def test_dropping_the_last_reference_under_a_copy_is_found_out(self, device: Device) -> None:
        allocation = store(device, pattern(100))
        event = device.copy_to_host(allocation, bytearray(100), device.stream("to_host"))
        del allocation
        with pytest.raises(FreedUnderCopy):
            event.wait()
        with pytest.raises(FreedUnderCopy):  # whoever asks, and however often
            event.done()

    # -- pinned memory -----------------------------------------------------------------------------

    def test_pinned_memory_can_be_copied_from_and_to(self, device: Device) -> None:
        before = device.statistics().pinned_bytes
        data = pattern(5000)
        with device.pinned(5000) as buffer:
            assert buffer.nbytes == 5000
            assert (buffer.view.ndim, buffer.view.format, buffer.view.readonly) == (1, "B", False)
            assert device.statistics().pinned_bytes == before + 5000
            buffer.view[:] = data.data
            allocation = device.allocate(5000)
            device.copy_to_device(buffer.view, allocation, device.stream("to_device")).wait()
            buffer.view[:] = bytes(5000)
            device.copy_to_host(allocation, buffer.view[1000:3000], device.stream("to_host"), offset=1000).wait()
            assert bytes(buffer.view[1000:3000]) == data[1000:3000].tobytes()
            assert bytes(buffer.view[:1000]) == bytes(1000)
        assert device.statistics().pinned_bytes == before

    def test_releasing_pinned_memory_twice_is_no_error(self, device: Device) -> None:
        before = device.statistics().pinned_bytes
        buffer = device.pinned(10)
        buffer.release()
        buffer.release()
        assert device.statistics().pinned_bytes == before
        with pytest.raises(ValueError, match="released"):
            buffer.view  # noqa: B018

    @pytest.mark.usefixtures("needs_detection")
    def test_releasing_pinned_memory_under_a_copy_is_refused(self, device: Device) -> None:
        allocation = store(device, pattern(100))
        buffer = device.pinned(1000)
        event = device.copy_to_host(allocation, buffer.view[500:600], device.stream("to_host"))
        with pytest.raises(FreedUnderCopy):
            buffer.release()
        event.wait()
        assert bytes(buffer.view[500:600]) == pattern(100).tobytes()
        buffer.release()

    # -- out of memory -----------------------------------------------------------------------------

    def test_what_does_not_fit_raises(self, device: Device) -> None:
        before = device.statistics()
        with pytest.raises(OutOfMemory, match=str(2 * self.capacity)):
            device.allocate(2 * self.capacity)
        after = device.statistics()
        assert after.live_bytes == before.live_bytes
        assert after.out_of_memory == before.out_of_memory + 1
        assert after.failed_allocations == before.failed_allocations + 1

    def test_a_hook_is_told_the_size_and_how_often_it_was_asked(self, device: Device) -> None:
        asked: list[tuple[int, int]] = []

        def hook(nbytes: int, retries: int) -> bool:
            asked.append((nbytes, retries))
            return retries < 2

        device.on_out_of_memory(hook)
        with pytest.raises(MemoryError):
            device.allocate(2 * self.capacity)
        assert asked == [(2 * self.capacity, 0), (2 * self.capacity, 1), (2 * self.capacity, 2)]

    def test_a_hook_is_not_asked_when_there_is_room(self, device: Device) -> None:
        device.on_out_of_memory(lambda nbytes, retries: pytest.fail("asked"))
        device.allocate(self.capacity // 2)

    def test_a_hook_that_spills_makes_room(self, device: Device) -> None:
        half = self.capacity // 4 * 3
        data = pattern(half)
        held = {"victim": store(device, data)}
        spilled = bytearray(half)

        def hook(nbytes: int, retries: int) -> bool:
            victim = held.pop("victim", None)
            if victim is None:
                return False
            device.copy_to_host(victim, spilled, device.stream("to_host")).wait()
            return True

        device.on_out_of_memory(hook)
        before = device.statistics()
        kept = store(device, data[::-1].copy())
        after = device.statistics()
        assert spilled == data.tobytes()
        assert fetch(device, kept) == data[::-1].tobytes()
        assert after.out_of_memory == before.out_of_memory + 1
        assert after.failed_allocations == before.failed_allocations

    @staticmethod
    def _refusing(name: str, note: Callable[[str], None]) -> Callable[[int, int], bool]:
        def hook(nbytes: int, retries: int) -> bool:
            note(name)
            return False

        return hook

    def test_every_hook_of_the_chain_is_asked(self, device: Device) -> None:
        asked: set[str] = set()
        for name in ("first", "second", "third"):
            device.on_out_of_memory(self._refusing(name, asked.add))
        with pytest.raises(MemoryError):
            device.allocate(2 * self.capacity)
        assert asked == {"first", "second", "third"}

    def test_a_hook_can_be_taken_out_and_put_back(self, device: Device) -> None:
        asked: list[str] = []
        other = device.on_out_of_memory(self._refusing("other", asked.append))
        installation = device.on_out_of_memory(self._refusing("ours", asked.append))

        def ask() -> list[str]:
            asked.clear()
            with pytest.raises(MemoryError):
                device.allocate(2 * self.capacity)
            return sorted(asked)

        def installed() -> tuple[bool, bool]:
            return other.installed, installation.installed

        assert installed() == (True, True)
        assert ask() == ["other", "ours"]
        installation.uninstall()
        installation.uninstall()
        assert installed() == (True, False)
        assert ask() == ["other"]
        installation.reinstall()
        installation.reinstall()
        assert installed() == (True, True)
        assert ask() == ["other", "ours"]

    def test_a_hook_is_not_asked_from_within_a_hook(self, device: Device) -> None:
        asked: list[int] = []

        def hook(nbytes: int, retries: int) -> bool:
            asked.append(nbytes)
            with pytest.raises(MemoryError):
                device.allocate(3 * self.capacity)
            return False

        device.on_out_of_memory(hook)
        with pytest.raises(MemoryError):
            device.allocate(2 * self.capacity)
        assert asked == [2 * self.capacity]
        with pytest.raises(MemoryError):  # the guard is gone again
            device.allocate(2 * self.capacity)
        assert len(asked) == 2

    def test_what_a_hook_raises_reaches_who_allocates(self, device: Device) -> None:
        def hook(nbytes: int, retries: int) -> bool:
            raise ZeroDivisionError

        device.on_out_of_memory(hook)
        with pytest.raises(ZeroDivisionError):
            device.allocate(2 * self.capacity)
        device.allocate(self.capacity // 2)

    def test_no_lock_is_held_while_a_hook_runs(self, device: Device) -> None:
        """Another thread uses every part of the device while this one is in a hook."""
        with ThreadPoolExecutor(1) as pool:

            def elsewhere() -> bool:
                device.memory_info()
                device.statistics()
                device.synchronize()
                return fetch(device, store(device, pattern(100))) == pattern(100).tobytes()

            done: list[bool] = []

            def hook(nbytes: int, retries: int) -> bool:
                done.append(pool.submit(elsewhere).result(timeout=60))
                return False

            device.on_out_of_memory(hook)
            with pytest.raises(MemoryError):
                device.allocate(2 * self.capacity)
        assert done == [True]

    # -- the end -----------------------------------------------------------------------------------

    def test_closing_waits_for_copies_and_may_be_done_twice(self, device: Device) -> None:
        allocation = store(device, pattern(100))
        host = bytearray(100)
        event = device.copy_to_host(allocation, host, device.stream("to_host"))
        installation = device.on_out_of_memory(lambda nbytes, retries: False)
        device.close()
        device.close()
        assert event.done()
        assert host == pattern(100).tobytes()
        assert not installation.installed


class ArrayTests:
    """Conformance: an array type whose memory is on a device, and its adapter."""

    @pytest.fixture
    def device(self) -> Any:
        """Yield the device that new arrays are on; close it afterwards."""
        raise NotImplementedError

    @pytest.fixture
    def registry(self) -> ArrayRegistry:
        """Return a registry that knows the array type."""
        return ArrayRegistry()

    def asarray(self, host: Any) -> Any:
        """Return a NumPy array as an array on the device."""
        raise NotImplementedError

    def asnumpy(self, array: Any) -> Any:
        """Return an array on the device as a NumPy array."""
        raise NotImplementedError

    def views(self, array: Any) -> list[Any]:
        """Return views of an array of shape (6, 8), as many kinds as the library has."""
        return [array, array[1:], array[:, 2:5], array[2, 3:], array[::2], array.T, array[1:3].T]

    def test_views_share_an_identity_and_have_their_own_layouts(self, registry: ArrayRegistry, device: Device) -> None:
        views = self.views(self.asarray(np.arange(48.0).reshape(6, 8)))
        found = [registry.describe(view) for view in views]
        assert all(description is not None and not description.estimated for description in found)
        assert len({description.identity for description in found if description}) == 1
        for view, description in zip(views, found, strict=True):
            assert description is not None
            low, high = description.layout.span
            assert 0 <= low <= high <= description.identity.nbytes
            assert description.layout.shape == tuple(view.shape)
            assert registry.is_on_device(view)

    def test_arrays_of_their_own_have_identities_of_their_own(self, registry: ArrayRegistry, device: Device) -> None:
        arrays = [self.asarray(np.arange(48.0)) for _ in range(3)]
        assert len({d.identity for d in map(registry.describe, arrays) if d is not None}) == 3

    def test_a_description_keeps_the_memory(self, registry: ArrayRegistry, device: Device) -> None:
        array = self.asarray(np.arange(48.0))
        description = registry.describe(array)
        assert description is not None
        del array
        device.synchronize()
        borrowed = device.borrow(description.identity, description.owner)
        low, high = description.layout.span
        assert fetch(device, borrowed)[low:high] == np.arange(48.0).tobytes()

    def test_views_are_spilled_and_restored_together(self, registry: ArrayRegistry, device: Device) -> None:
        """The whole way down and up: one copy each way, and the restored views share their memory again."""
        views = self.views(self.asarray(np.arange(48.0).reshape(6, 8)))
        expected = [self.asnumpy(view) for view in views]
        found = [description for view in views if (description := registry.describe(view)) is not None]
        recipes = [description.recipe for description in found]
        identity = found[0].identity
        host = bytearray(identity.nbytes)
        before = device.statistics()
        device.synchronize()
        source = device.borrow(identity, found[0].owner)
        device.copy_to_host(source, host, device.stream("to_host")).wait()
        del source, found, views
        restored = device.allocate(identity.nbytes)
        device.copy_to_device(host, restored, device.stream("to_device")).wait()
        arrays = [registry.rebuild(recipe, restored) for recipe in recipes if recipe is not None]
        after = device.statistics()
        assert after.copies_to_host - before.copies_to_host == 1
        assert after.copies_to_device - before.copies_to_device == 1
        assert len(arrays) == len(expected)
        for array, values in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(self.asnumpy(array), values)
        identities = {d.identity for d in map(registry.describe, arrays) if d is not None}
        assert identities == {restored.identity}
        arrays[0][2, 3] = -1.0
        assert self.asnumpy(arrays[3])[0] == -1.0  # [2, 3:] of the same memory

    def test_a_rebuilt_array_keeps_the_memory(self, registry: ArrayRegistry, device: Device) -> None:
        before = device.statistics().live_bytes
        allocation = store(device, np.arange(6.0).tobytes())
        recipe_of = registry.describe(self.asarray(np.zeros(6)))
        assert recipe_of is not None
        assert recipe_of.recipe is not None
        recipe = recipe_of.recipe
        del recipe_of
        array = registry.rebuild(recipe, allocation)
        del allocation
        assert device.statistics().live_bytes == before + 48
        np.testing.assert_array_equal(self.asnumpy(array), np.arange(6.0))
        del array
        assert device.statistics().live_bytes == before

    def test_an_array_beyond_its_memory_is_refused(self, registry: ArrayRegistry, device: Device) -> None:
        description = registry.describe(self.asarray(np.arange(48.0)))
        assert description is not None
        assert description.recipe is not None
        too_large = Layout(8, (48,), (8,), description.layout.dtype, 8)
        recipe = type(description.recipe)(description.recipe.adapter, too_large)
        with pytest.raises(ValueError, match="within"):
            registry.rebuild(recipe, device.allocate(48 * 8))
