"""``device --link``: what the device tier makes of a link, the host's part modelled.

No byte moves and nothing sleeps. The clock adds up the processor time that the tier really takes,
and what a model says of the link, of calls of the driver, of copies in host memory, of fresh pages
and of pinning: see :class:`~gpuspill.simulated.device.modelled.ModelledDevice`. So these are
figures of the tier on a machine that is described, not of the one that it runs on, but for its
processor.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gpuspill import simulated
from gpuspill.bench.arms import Arm
from gpuspill.bench.job import Benchmark
from gpuspill.bench.report import Row
from gpuspill.bench.runner import Metrics, Sample
from gpuspill.errors import ConfigError
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated.device.costs import MODELS
from gpuspill.simulated.device.modelled import ModelledDevice
from gpuspill.simulated.device.thread_clock import ThreadClock
from gpuspill.storage.files import FileStore
from gpuspill.tier import DeviceTier

__all__ = ["ARMS", "ROWS", "LinkJob"]


@dataclass(frozen=True, slots=True)
class _Shape:
    """So many values, of so many units each, of so many bytes."""

    values: int
    units: int
    nbytes: int


_SHAPES: Mapping[str, _Shape] = {
    "1x4GiB": _Shape(1, 1, 4 * 2**30),
    "4x1GiB": _Shape(4, 1, 2**30),
    "200x1MiB": _Shape(1, 200, 2**20),
    "10000x64KiB": _Shape(100, 100, 2**16),
}

ARMS: Mapping[str, Arm] = {
    name: Arm(name, f"{shape.values} values of {shape.units} allocations of {shape.nbytes:,} bytes each")
    for name, shape in _SHAPES.items()
}

ROWS = (
    Row("down", "to the host", "rate"),
    Row("down_share", "  part of the link", "ratio"),
    Row("down_python", "  Python a unit", "microseconds"),
    Row("down_garbage", "  collecting garbage a unit", "microseconds"),
    Row("down_waits", "  waits for the device", "count"),
    Row("up", "to the device", "rate"),
    Row("up_share", "  part of the link", "ratio"),
    Row("up_python", "  Python a unit", "microseconds"),
    Row("both", "both at a time / the faster one", "ratio"),
    Row("pageable", "to and from pageable memory", "bytes"),
    Row("correct", "all came and went", "yes"),
)


@dataclass(frozen=True, slots=True)
class LinkJob(Benchmark):
    """Values that leave a device for host memory, and come back.

    Parameters
    ----------
    link
        Bytes a second in each direction.
    model
        Name of what the host costs.
    fence
        How computations are waited for: as ``gpuspill.device-fence``.

    Raises
    ------
    ConfigError
        There is no such model, or the link has no bandwidth.
    """

    name = "device"
    known_arms = ARMS

    link: float
    model: str = "h200"
    fence: str = "stream"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model: {self.model!r} is unknown; choose among {', '.join(MODELS)}")
        if self.link <= 0:
            raise ConfigError(f"link: must be larger than 0, got {self.link}")

    @property
    def about(self) -> str:
        """See the base class."""
        return f"a link of {self.link / 1e9:g} GB/s, and a host as the model {self.model!r} has it"

    @property
    def rows(self) -> Sequence[Row]:
        """See the base class."""
        return ROWS

    def outcome(self, sample: Sample) -> str:
        """See the base class."""
        return f"{sample.figure('down') / 1e9:.2f} GB/s to the host, {sample.figure('up') / 1e9:.2f} GB/s back"

    def notes(self, arms: Sequence[Arm], samples: Sequence[Sample]) -> list[str]:
        """See the base class."""
        return ["Modelled, but for the processor time of Python, which is this machine's."]

    def run(self, arm: Arm, expected: Any) -> Metrics:
        """Spill all, read all, then do both at once with as much again."""
        shape = _SHAPES[arm.name]
        total, units = shape.values * shape.units * shape.nbytes, shape.values * shape.units
        device = ModelledDevice(
            3 * total + 2**30, bandwidth=self.link, costs=MODELS[self.model], fence_by_stream=self.fence == "stream"
        )
        with ExitStack() as stack:
            # Nothing is to leave the host's memory.
            store = FileStore(stack.enter_context(TemporaryDirectory(prefix="gpuspill-bench-")))
            host = ProxifyManager(limit=None, store=store, serializer=PickleSerializer(), sizeof=lambda value: 8)
            stack.callback(host.close)
            tier = DeviceTier(device, host, limit=None, restore_threads=1, pinned_limit=3 * total + 2**28)
            stack.callback(tier.close)
            with simulated.use(device):
                rig = _Rig(device, tier, shape)
                device.plan()
                rig.run(rig.warm_up)
                tier.pinned.reserve(3 * total)
                first = rig.make()
                rig.wake()
                before = device.calls.get("synchronize", 0)
                down, down_python = rig.run(lambda: rig.leave(total))
                garbage = rig.garbage.seconds
                waits = device.calls.get("synchronize", 0) - before
                gone = tier.statistics().spilled_nbytes
                up, up_python = rig.run(lambda: rig.read(first))
                up_python -= rig.garbage.seconds
                back = tier.statistics().device_nbytes
                rig.leave(total)
                second = rig.make()
                both, _ = rig.run(lambda: rig.leave(total), lambda: rig.read(first))
                correct = gone == total == back and tier.statistics().device_nbytes == total == (
                    sum(skeleton.device_nbytes for skeleton in second)
                )
        return {
            "down": total / down,
            "down_share": total / down / self.link,
            "down_python": (down_python - garbage) / units,
            "down_garbage": garbage / units,
            "down_waits": waits,
            "up": total / up,
            "up_share": total / up / self.link,
            "up_python": up_python / units,
            "both": 2 * total / both / max(total / down, total / up),
            "pageable": device.pageable_nbytes,
            "correct": correct,
        }


class _Garbage:
    """Says how long the collector ran: told apart, as it looks at all of the process.

    Parameters
    ----------
    clock
        Of the processor time that counts. In the simulation it does not, nor does garbage that is
        collected there.
    """

    def __init__(self, clock: ThreadClock) -> None:
        self._clock = clock
        self.seconds = 0.0
        self._start = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Be called by the collector."""
        if phase == "start":
            self._start = time.process_time()
        elif self._clock.counting:
            self.seconds += time.process_time() - self._start


class _Rig:
    """Moves values, and says how long that takes."""

    def __init__(self, device: ModelledDevice, tier: DeviceTier, shape: _Shape) -> None:
        self._device = device
        self._tier = tier
        self._shape = shape
        self.garbage = _Garbage(device.clock)

    def make(self) -> list[Any]:
        """Return skeletons of new values."""
        return [self._value(self._shape.units, self._shape.nbytes) for _ in range(self._shape.values)]

    def _value(self, units: int, nbytes: int) -> Any:
        return self._tier.proxify([simulated.empty(nbytes, np.uint8) for _ in range(units)])

    def warm_up(self) -> None:
        """Have all that is made once be made: staging, streams, what Python compiles."""
        skeleton = self._value(2, 2**16)
        self.leave(2**17)
        self.read([skeleton])

    def leave(self, nbytes: int) -> None:
        """Have as many bytes leave the device, in this thread."""
        self._tier.manager.limits.make_room(nbytes)

    def read(self, skeletons: Sequence[Any]) -> None:
        """Read values, one after the other, as a task does with its inputs."""
        for skeleton in skeletons:
            self._tier.resolve(skeleton)

    def wake(self) -> None:
        """Let go of what is left of earlier steps."""
        self._tier.settle()

    def run(self, *works: Callable[[], object]) -> tuple[float, float]:
        """Do all works at once; return the seconds it takes, and those of Python among them."""
        clock = self._device.clock

        def work(do: Callable[[], object]) -> None:
            # A thread's context is its own.
            with simulated.use(self._device):
                clock.now()
                do()
                clock.now()

        threads = [threading.Thread(target=work, args=(do,)) for do in works[1:]]
        self.garbage.seconds = 0.0
        gc.callbacks.append(self.garbage)
        try:
            clock.begin()
            for thread in threads:
                thread.start()
            works[0]()
            clock.now()
            for thread in threads:
                thread.join()
        finally:
            gc.callbacks.remove(self.garbage)
        return clock.elapsed(), clock.python()
