"""What the probes report, with clocks and sizes that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspill.bench.probes import (
    LoopProbe,
    MemoryProbe,
    high_water_bytes,
    lateness_quantile,
    processor_wait,
    resident_bytes,
    stolen_time,
    thread_file_traffic,
)


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """An event loop whose time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def run_until(self, end: float) -> None:
        """Let time pass with the loop free: every callback runs when it is due."""
        while due := [timer for timer in self.timers if not timer.cancelled and timer.when <= end]:
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.callback()
        self.now = max(self.now, end)

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which no callback can run."""
        self.now += seconds


def probe_on(loop: ManualLoop, interval: float = 0.01, **options: object) -> LoopProbe:
    return LoopProbe(loop, interval, **options)  # type: ignore[arg-type]


def test_a_free_loop_is_never_late() -> None:
    loop = ManualLoop()
    probe = probe_on(loop)
    probe.start()
    loop.run_until(101.0)
    summary = probe.summary()
    assert summary.ticks == pytest.approx(100, abs=1)
    assert (summary.longest, summary.p999, summary.stalled) == (pytest.approx(0.0, abs=1e-9),) * 3
    assert summary.stalls == 0
    assert summary.elapsed == pytest.approx(1.0)


def test_a_stall_is_seen_at_its_length() -> None:
    loop = ManualLoop()
    probe = probe_on(loop)
    probe.start()
    loop.run_until(101.0)
    loop.stand_still(0.5)
    loop.run_until(103.0)
    summary = probe.summary()
    # It may have begun up to one interval before the tick that was held up was due.
    assert 0.49 <= summary.longest <= 0.5
    assert summary.stalls == 1
    assert summary.stalled == summary.longest == probe.longest() == pytest.approx(summary.late)
    # A sixth of the time the wait was between 0 and half a second; 0.1 % of the time it was nearly all of it.
    assert summary.longest - 0.01 < summary.p999 < summary.longest


def test_missed_ticks_do_not_run_as_a_burst() -> None:
    loop = ManualLoop()
    probe = probe_on(loop)
    probe.start()
    loop.stand_still(1.0)
    loop.run_until(loop.now)
    assert probe.summary().ticks == 1


def test_reset_and_stop() -> None:
    loop = ManualLoop()
    ticks = []
    probe = probe_on(loop, on_tick=lambda: ticks.append(loop.now))
    probe.start()
    probe.start()
    loop.stand_still(1.0)
    loop.run_until(102.0)
    assert probe.longest() > 0.9
    probe.reset()
    loop.run_until(103.0)
    assert probe.longest() < 1e-6
    assert probe.summary().elapsed == pytest.approx(1.0)
    probe.stop()
    probe.stop()
    seen = len(ticks)
    assert seen > 100
    loop.run_until(200.0)
    assert len(ticks) == seen


def test_what_held_up_the_loop_before_a_reset_does_not_count_after_it() -> None:
    """The garbage that the benchmark collects before it starts the clock is no stall of the job's."""
    loop = ManualLoop()
    probe = probe_on(loop)
    probe.start()
    loop.run_until(101.0)
    loop.stand_still(0.5)
    probe.reset()
    loop.run_until(102.0)
    assert probe.longest() < 1e-6
    assert probe.summary().ticks == pytest.approx(50, abs=1)
    probe.stop()
    probe.reset()
    assert not [timer for timer in loop.timers if not timer.cancelled]


def test_waits_for_a_processor_are_told_apart() -> None:
    loop = ManualLoop()
    waited = 0.0
    probe = probe_on(loop, waited=lambda: waited)
    probe.start()
    loop.run_until(101.0)
    waited += 0.3
    loop.stand_still(0.5)
    loop.run_until(102.0)
    summary = probe.summary()
    assert summary.longest == pytest.approx(0.5, abs=0.01)
    assert summary.longest_own == pytest.approx(0.2, abs=0.01)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel counts no waits")
def test_the_kernel_counts_waits_of_the_calling_thread() -> None:
    before = processor_wait()
    assert processor_wait() >= before >= 0.0
    assert (stolen_time() or 0.0) >= 0.0


def waits(lateness: list[float], elapsed: float, beyond: float) -> float:
    """The share of instants at which a callback would have waited longer, straight from the definition."""
    return sum(max(0.0, late - beyond) for late in lateness) / elapsed


@given(
    st.lists(st.floats(0.0, 2.0), max_size=30),
    st.floats(0.0, 10.0),
    st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]),
)
def test_quantile_is_the_smallest_wait_that_is_rarely_exceeded(
    lateness: list[float], idle: float, quantile: float
) -> None:
    elapsed = sum(lateness) + idle + 0.001
    found = lateness_quantile(lateness, elapsed, quantile)
    allowed = 1.0 - quantile
    assert 0.0 <= found <= max(lateness, default=0.0)
    assert waits(lateness, elapsed, found) <= allowed + 1e-9
    if found > 1e-6:
        assert waits(lateness, elapsed, found - 1e-6) >= allowed - 1e-9


def test_quantile_of_nothing() -> None:
    assert lateness_quantile([], 1.0, 0.999) == 0.0
    assert lateness_quantile([1.0], 0.0, 0.999) == 0.0


def test_memory_probe_reduces_its_samples() -> None:
    sizes = iter([10, 50, 30])
    probe = MemoryProbe(read=lambda: next(sizes))
    for _ in range(3):
        probe.sample()
    summary = probe.summary()
    assert (summary.peak, summary.mean, summary.samples) == (50, 30, 3)
    probe.reset()
    assert probe.summary().samples == probe.summary().peak == probe.summary().mean == 0


def test_memory_probe_samples_in_the_background() -> None:
    sampled = threading.Event()

    def read() -> int:
        sampled.set()
        return 7

    probe = MemoryProbe(interval=0.001, read=read)
    probe.start()
    probe.start()
    assert sampled.wait(30)
    probe.stop()
    probe.stop()
    assert probe.summary().peak == 7
    assert not any(thread.name == "gpuspill-bench-memory" for thread in threading.enumerate())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_resident_memory_is_that_of_this_process() -> None:
    ballast = bytearray(b"x") * 2**26
    now = resident_bytes()
    assert now > len(ballast)
    # Read a moment later, so it can only be larger; the two counts differ by some unsynchronised pages.
    assert high_water_bytes() > now - 2**22


@pytest.mark.skipif(thread_file_traffic() is None, reason="this kernel does not count what a thread reads and writes")
def test_file_traffic_is_counted_by_thread(tmp_path: Path) -> None:
    size = 3_000_000
    seen = {}

    def write() -> None:
        before = thread_file_traffic()
        (tmp_path / "file").write_bytes(bytes(size))
        after = thread_file_traffic()
        assert before is not None
        assert after is not None
        seen["writer"] = (after - before).written

    before = thread_file_traffic()
    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    after = thread_file_traffic()
    assert before is not None
    assert after is not None
    assert seen["writer"] == size
    assert (after - before).written < size // 100
