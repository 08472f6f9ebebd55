"""Conformance of a device: memory, pinned memory, running out of memory, the end."""

# ruff: noqa: D102 - the name of a test is the sentence that it proves

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspill.device.port import Device, FreedUnderCopy, OutOfMemory, UseAfterFree
from gpuspill.testing.device_suite import DeviceSuite, fetch, pattern, store

__all__ = ["MemoryTests"]

_SIZES = (0, 1, 255, 256, 4099, 1 << 18)


class MemoryTests(DeviceSuite):
    """One test a promise of :mod:`gpuspill.device.port`."""

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
