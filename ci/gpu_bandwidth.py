"""How fast the port copies, beside a raw pinned copy.

``ci/gpu_bandwidth.py [--json FILE] [--check]`` prints the lines that belong in docs/benchmarks.md. With --check it
exits with 1 unless

* a copy through the port into pinned memory reaches 90 % of one call of cudaMemcpyAsync for the whole size, and
* both directions at the same time move at least 1.5 times the bytes a second of the better one alone.

Needs one GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuspill.device.cuda import find as cuda
from gpuspill.device.port import Allocation, CopyPlan, Device, StreamKind
from gpuspill.device.staging import Copier

NBYTES = 512 * 2**20
ROUNDS = 9
KINDS: tuple[StreamKind, StreamKind] = ("to_host", "to_device")
PORT_SHARE = 0.9
BOTH_SHARE = 1.5

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


def raw_copies(nbytes: int) -> dict[str, Callable[[], object]]:
    """Return, by direction, one call of CUDA that copies from or to pinned memory, and a wait for it."""
    from cuda.bindings import runtime

    def checked(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != runtime.cudaError_t.cudaSuccess:
            raise SystemExit(f"CUDA reports {status.name}")
        return values[0] if values else None

    host = checked(runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocDefault))
    device = checked(runtime.cudaMalloc(nbytes))
    stream = checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
    kinds = runtime.cudaMemcpyKind

    def copy(target: int, source: int, kind: Any) -> None:
        checked(runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream))
        checked(runtime.cudaStreamSynchronize(stream))

    return {
        "to_host": lambda: copy(host, device, kinds.cudaMemcpyDeviceToHost),
        "to_device": lambda: copy(device, host, kinds.cudaMemcpyHostToDevice),
    }


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
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is slower than it should be")
    arguments = parser.parse_args(argv)
    found = measure(cuda.device(), raw_copies(NBYTES))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    slow = problems(found)
    print("\n".join(slow), file=sys.stderr, end="\n" if slow else "")
    return int(arguments.check and bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
