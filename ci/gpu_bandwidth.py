"""How fast the port copies, and the tier, beside a raw pinned copy and dask-cuda's ``DeviceHostFile``.

``ci/gpu_bandwidth.py [--json FILE] [--check]`` prints the lines that belong in docs/benchmarks.md. With --check it
exits with 1 unless

* a copy through the port into pinned memory reaches 90 % of one call of cudaMemcpyAsync for the whole size, and
* both directions at the same time move at least 1.5 times the bytes a second of the better one alone.

Needs one GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dask.utils import format_bytes

from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry, Recipe
from gpuspill.device.cuda import find as cuda
from gpuspill.device.port import Allocation, CopyPlan, Device, Layout, StreamKind
from gpuspill.device.staging import Copier
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.storage.files import FileStore
from gpuspill.testing import standin
from gpuspill.tier import DeviceTier

NBYTES = 512 * 2**20
ROUNDS = 9
KINDS: tuple[StreamKind, StreamKind] = ("to_host", "to_device")
PORT_SHARE = 0.9
BOTH_SHARE = 1.5

#: What the tier moves: so many allocations of one value, and the bytes of each.
SHAPES = ((1, 2**30), (4, 2**28), (200, 2**20), (5000, 2**16))
TIER_ROUNDS = 5
#: Pinned memory beyond what is needed: whole slabs.
PINNED = 4 * 64 * 2**20

Clock = Callable[[], float]


def bandwidth(nbytes: int, work: Callable[[], object], now: Clock = time.perf_counter, rounds: int = ROUNDS) -> float:
    """Return the median bytes a second of `work`, after one run that does not count."""
    work()
    seconds = []
    for _ in range(rounds):
        start = now()
        work()
        seconds.append(now() - start)
    return nbytes / statistics.median(seconds)


def measure(
    device: Device, raw: Mapping[str, Callable[[], object]], nbytes: int = NBYTES, now: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return bytes a second, by what was done.

    Parameters
    ----------
    device
        The device.
    raw
        By direction: copies `nbytes` bytes without the port, and waits.
    nbytes, now
        How much to copy; the time in seconds.
    """
    plan = device.plan()
    found: dict[str, Any] = {"chunk_nbytes": plan.chunk_nbytes, "staged": plan.staged, "nbytes": nbytes}
    memory = {kind: device.allocate(nbytes) for kind in KINDS}
    with device.pinned(nbytes) as down, device.pinned(nbytes) as up:
        pinned = {"to_host": down.view, "to_device": up.view}
        for kind in KINDS:
            found[f"raw_{kind}"] = bandwidth(nbytes, raw[kind], now)
            found[f"port_{kind}"] = bandwidth(nbytes, _copies(device, plan, {kind: memory[kind]}, pinned), now)
        found["port_both"] = bandwidth(2 * nbytes, _copies(device, plan, memory, pinned), now)
    ordinary = memoryview(bytearray(nbytes))
    for staged in (True, False):
        copier = Copier(device, CopyPlan(plan.chunk_nbytes, staged))
        name = "staged" if staged else "pageable"
        found[f"{name}_to_host"] = bandwidth(nbytes, lambda c=copier: c.to_host(memory["to_host"], ordinary), now)  # type: ignore[misc]
        found[f"{name}_to_device"] = bandwidth(nbytes, lambda c=copier: c.to_device(ordinary, memory["to_device"]), now)  # type: ignore[misc]
        copier.close()
    found["port_share"] = min(found[f"port_{kind}"] / found[f"raw_{kind}"] for kind in KINDS)
    found["both_share"] = found["port_both"] / max(found[f"port_{kind}"] for kind in KINDS)
    return found


def _copies(
    device: Device, plan: CopyPlan, memory: Mapping[StreamKind, Allocation], pinned: Mapping[str, memoryview]
) -> Callable[[], None]:
    """Return what copies in pieces through the port, in one direction or both, and waits."""

    def work() -> None:
        events = []
        for start in range(0, len(pinned["to_host"]), plan.chunk_nbytes):
            for kind, allocation in memory.items():
                part, stream = pinned[kind][start : start + plan.chunk_nbytes], device.stream(kind)
                if kind == "to_host":
                    events.append(device.copy_to_host(allocation, part, stream, offset=start))
                else:
                    events.append(device.copy_to_device(part, allocation, stream, offset=start))
        for event in events:
            event.wait()

    return work


def measure_tier(
    device: Device, shapes: Sequence[tuple[int, int]] = SHAPES, now: Clock = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Return bytes a second of the device tier, by shape and direction, and of both directions at the same time.

    Values leave for pinned host memory, which is there before, and come back in the thread that reads them. Each is
    one of several allocations.
    """
    return {_shape(count, nbytes): _tier(device, count, nbytes, now) for count, nbytes in shapes}


def _tier(device: Device, count: int, nbytes: int, now: Clock) -> dict[str, float]:
    total = count * nbytes
    registry = ArrayRegistry(all_adapters(), pointer_device=device.device_of)

    def values() -> Any:
        recipe = Recipe("interface", Layout(0, (nbytes,), (1,), "|u1", 1))
        return tier.proxify([registry.rebuild(recipe, device.allocate(nbytes)) for _ in range(count)])

    def seconds(work: Callable[[], object]) -> float:
        tier.settle()
        start = now()
        work()
        return now() - start

    with TemporaryDirectory(prefix="gpuspill-bandwidth-") as directory:
        host = ProxifyManager(
            limit=None, store=FileStore(directory), serializer=PickleSerializer(), sizeof=lambda value: 8
        )
        tier = DeviceTier(device, host, limit=None, pinned_limit=3 * total + PINNED)
        try:
            tier.pinned.reserve(3 * total)
            make_room = tier.manager.limits.make_room
            first = values()
            down, up = [], []
            for _ in range(TIER_ROUNDS):
                down.append(seconds(lambda: make_room(total)))
                up.append(seconds(lambda: tier.resolve(first)))
            make_room(total)
            second = values()

            def both() -> None:
                other = threading.Thread(target=make_room, args=(total,))
                other.start()
                tier.resolve(first)
                other.join()

            together = seconds(both)
            assert second.device_nbytes == first.device_nbytes == total
        finally:
            first = second = None
            tier.close()
            host.close()
    return {
        "to_host": total / statistics.median(down),
        "to_device": total / statistics.median(up),
        "both": 2 * total / together,
    }


def measure_dask_cuda(
    shapes: Sequence[tuple[int, int]] = SHAPES, now: Clock = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Return bytes a second of what dask-cuda's ``DeviceHostFile`` does with such values; nothing without dask-cuda.

    The values are lists of Numba's arrays. It moves one direction at a time.
    """
    try:
        theirs: Any = importlib.import_module("dask_cuda.device_host_file")
        numba_cuda: Any = importlib.import_module("numba.cuda")
    except ImportError:
        return {}
    found = {}
    for count, nbytes in shapes:
        value: Any = [numba_cuda.device_array(nbytes, "u1") for _ in range(count)]
        down, up = [], []
        for _ in range(TIER_ROUNDS):
            start = now()
            moved = theirs.device_to_host(value)
            down.append(now() - start)
            value = None  # as there: it has left
            numba_cuda.synchronize()
            start = now()
            value = theirs.host_to_device(moved)
            numba_cuda.synchronize()
            up.append(now() - start)
            moved = None
        total = count * nbytes
        found[_shape(count, nbytes)] = {
            "to_host": total / statistics.median(down),
            "to_device": total / statistics.median(up),
        }
        value = None
    return found


def _shape(count: int, nbytes: int) -> str:
    return f"{count} x {format_bytes(nbytes)}"


def raw_copies(nbytes: int) -> dict[str, Callable[[], object]]:
    """Return, by direction, one call of the driver that copies from or to pinned memory, and a wait for it."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != driver.CUresult.CUDA_SUCCESS:
            raise SystemExit(f"CUDA reports {status.name}")
        return values[0] if values else None

    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    host = int(checked(driver.cuMemHostAlloc(nbytes, 0)))
    device = checked(driver.cuMemAlloc(nbytes))
    stream = checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def copy(enqueue: Callable[..., tuple[Any, ...]], target: Any, source: Any) -> None:
        checked(enqueue(target, source, nbytes, stream))
        checked(driver.cuStreamSynchronize(stream))

    return {
        "to_host": lambda: copy(driver.cuMemcpyDtoHAsync, host, device),
        "to_device": lambda: copy(driver.cuMemcpyHtoDAsync, device, host),
    }


def load_stand_in(nbytes: int) -> None:
    """Put the stand-in in the place of the driver, with a device of so many bytes; before anything looks for one."""
    os.environ["STANDIN_MEMORY"] = str(nbytes)
    # RMM asks the driver for what is not documented; NVML has a driver of its own.
    for name in ("rmm", "pynvml"):
        sys.modules[name] = None  # type: ignore[assignment]
    with TemporaryDirectory() as directory:
        standin.load(standin.build(directory))


def table(found: Mapping[str, Any]) -> str:
    """Return the lines for docs/benchmarks.md."""
    lines = ["| GB/s | device to host | host to device | both |", "|---|---|---|---|"]
    names = {
        "raw": "one raw pinned copy",
        "port": f"port, pinned, pieces of {found['chunk_nbytes'] // 2**20} MiB",
        "staged": "to ordinary memory, staged",
        "pageable": "to ordinary memory, directly",
    }
    for key, name in names.items():
        cells = [found.get(f"{key}_{way}") for way in (*KINDS, "both")]
        shown = " | ".join("" if cell is None else f"{cell / 1e9:.1f}" for cell in cells)
        lines.append(f"| {name} | {shown} |")
    for who, key in (("the tier", "tier"), ("dask-cuda's DeviceHostFile", "dask_cuda")):
        for name, speeds in found.get(key, {}).items():
            speed = [f"{speeds[way] / 1e9:.1f}" if way in speeds else "" for way in (*KINDS, "both")]
            lines.append(f"| {who}, {name} | {' | '.join(speed)} |")
    lines.append("")
    lines.append(
        f"The port reaches {found['port_share']:.0%} of a raw copy; both directions move {found['both_share']:.2f} "
        f"times the bytes of one. Chosen: {'staged' if found['staged'] else 'directly'}."
    )
    return "\n".join(lines)


def problems(found: Mapping[str, Any]) -> list[str]:
    """Return what is slower than it should be."""
    slow = []
    if found["port_share"] < PORT_SHARE:
        slow.append(f"the port reaches {found['port_share']:.0%} of a raw pinned copy, less than {PORT_SHARE:.0%}")
    if found["both_share"] < BOTH_SHARE:
        slow.append(f"both directions move {found['both_share']:.2f} times the bytes of one, less than {BOTH_SHARE}")
    return slow


def main(argv: list[str] | None = None) -> int:
    """Measure, print, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--nbytes", type=int, default=NBYTES, help="bytes of a copy; the tier moves twice as many")
    parser.add_argument("--stand-in", action="store_true", help="on the stand-in for the driver: shows that it runs")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is slower than it should be")
    arguments = parser.parse_args(argv)
    if arguments.stand_in:
        load_stand_in(8 * arguments.nbytes)
    device = cuda.device()
    found = measure(device, raw_copies(arguments.nbytes), arguments.nbytes)
    shapes = [(count, nbytes * arguments.nbytes // NBYTES) for count, nbytes in SHAPES]
    found["tier"] = measure_tier(device, shapes)
    found["dask_cuda"] = measure_dask_cuda(shapes)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    slow = problems(found)
    print("\n".join(slow), file=sys.stderr, end="\n" if slow else "")
    return int(arguments.check and bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
