"""Conformance of a device: streams, copies, and what must not be done with them."""

# ruff: noqa: D102 - the name of a test is the sentence that it proves

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspill.device.port import Device, FreedUnderCopy, StreamKind, UnorderedAccess
from gpuspill.testing.device_suite import DeviceSuite, fetch, pattern, store

__all__ = ["CopyTests"]


class CopyTests(DeviceSuite):
    """One test a promise of :mod:`gpuspill.device.port`."""

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
        """Each copy waits on the device for the one before; only the end is observed."""
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
        with pytest.raises(FreedUnderCopy):  # for each caller, each time
            event.done()
