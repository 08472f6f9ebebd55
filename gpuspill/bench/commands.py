"""The command ``gpuspill bench``, one function a benchmark.

Everything heavy is imported by the function that needs it: a worker process started by a benchmark
imports this module again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

    from gpuspill.bench.job import Benchmark

__all__ = ["ByteSize", "bench", "console", "progress"]

WIDTH = 140
"""Columns of the output where it goes to no terminal."""

F = TypeVar("F", bound=Callable[..., Any])


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """An amount of memory: ``32MiB``, ``1 GB``, ``4096``; at least one byte."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Turn text into bytes; fails with one line that says what is accepted."""
        from dask.utils import parse_bytes

        try:
            size = int(parse_bytes(value))
        except ValueError:
            self.fail(f"{value!r} is no amount of memory; write it like 512MiB or 1GB", param, ctx)
        if size <= 0:
            self.fail(f"{value!r} must be larger than 0", param, ctx)
        return size


SIZE = ByteSize()
JSON_OPTION = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write every sample and the facts about the machine to this file.",
)


def progress(line: str) -> None:
    """Say how far a command is."""
    # To stderr: what is on stdout is the result.
    click.echo(line, err=True)


def console() -> Console:
    """Return where a command prints its result."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _measure(job: Benchmark, arms: str, repeat: int, json_path: Path | None) -> None:
    from gpuspill.bench.job import benchmark
    from gpuspill.bench.report import render, save

    result = benchmark(job, arms, repeat, progress=progress)
    render(result, console())
    if json_path is not None:
        save(result, json_path)
    if not result.correct:
        raise SystemExit(1)


@click.group()
def bench() -> None:
    """Measure gpuspill beside stock spilling, in turns, on this machine."""


def _arms_option(default: str, choices: str = "stock, gpuspill, nospill") -> Callable[[F], F]:
    return click.option(
        "--arms",
        default=default,
        show_default=True,
        help=f"What to run, in this order: {choices}.",
    )


def _repeat_option(default: int) -> Callable[[F], F]:
    return click.option(
        "--repeat",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="How many rounds; each round runs every arm once.",
    )


@bench.command("persist-sum")
@_arms_option("stock,gpuspill,nospill")
@_repeat_option(5)
@click.option("--limit", type=SIZE, default="1GiB", show_default=True, help="Memory of the worker.")
@click.option(
    "--ratio",
    type=float,
    help="Size of the array divided by the limit.  [default: 2.5, with --delay 1.25]",
)
@click.option("--chunk", type=SIZE, help="Size of a chunk.  [default: 32MiB, with --delay 64MiB]")
@click.option("--compressible", is_flag=True, help="Make every second value zero.")
@click.option(
    "--delay",
    type=float,
    default=0.0,
    show_default=True,
    help="Slow every file operation of every store down by so many seconds.",
)
@click.option("--nthreads", type=click.IntRange(min=1), default=2, show_default=True)
@JSON_OPTION
def persist_sum(
    arms: str,
    repeat: int,
    limit: int,
    ratio: float | None,
    chunk: int | None,
    compressible: bool,
    delay: float,
    nthreads: int,
    json_path: Path | None,
) -> None:
    """Persist a random array larger than memory, then sum it twice."""
    from gpuspill.bench.persist_sum import PersistSum

    job = PersistSum(
        limit=limit,
        # With slow files stock takes minutes for the whole array; half of it shows the same.
        ratio=ratio if ratio is not None else (1.25 if delay else 2.5),
        chunk=chunk if chunk is not None else (64 if delay else 32) * 2**20,
        threads=nthreads,
        compressible=compressible,
        delay=delay,
    )
    _measure(job, arms, repeat, json_path)


@bench.command()
@_arms_option("stock,control,gpuspill", "stock, control (another one like it), gpuspill, nospill")
@_repeat_option(5)
@click.option("--tasks", type=int, default=20_000, show_default=True, help="How many tasks an arm.")
@click.option(
    "--mode",
    type=click.Choice(["processes", "inprocess"]),
    default="processes",
    show_default=True,
    help="Whether the worker is a process of its own.",
)
@click.option("--nthreads", type=click.IntRange(min=1), default=2, show_default=True)
@JSON_OPTION
def tiny(arms: str, repeat: int, tasks: int, mode: str, nthreads: int, json_path: Path | None) -> None:
    """Run trivial tasks that need no spilling: what a task costs."""
    from gpuspill.bench.tiny import Tiny

    job = Tiny(tasks=tasks, mode=mode, threads=nthreads)
    _measure(job, arms, repeat, json_path)


@bench.command(short_help="Time an urgent task while memory is full.")
@_arms_option("gpuspill,unadmitted", "gpuspill, unadmitted (nothing waits for room), stock")
@_repeat_option(3)
@click.option("--limit", type=SIZE, default="80MB", show_default=True, help="Bytes of values in a worker's memory.")
@click.option("--chunk", type=SIZE, default="8MB", show_default=True, help="Size of a value.")
@click.option(
    "--delay",
    type=float,
    default=0.2,
    show_default=True,
    help="Slow every file operation of every store down by so many seconds.",
)
@JSON_OPTION
def priority(arms: str, repeat: int, limit: int, chunk: int, delay: float, json_path: Path | None) -> None:
    """Time an urgent task behind a stream of others, where memory is full and the disk slow."""
    from gpuspill.bench.priority import Priority

    _measure(Priority(limit=limit, chunk=chunk, delay=delay), arms, repeat, json_path)


@bench.command(short_help="Time how long others' work holds up tasks.")
@_repeat_option(3)
@click.option("--lists", type=int, default=600_000, show_default=True, help="Small lists in one value.")
@click.option("--inputs", type=int, default=20_000, show_default=True, help="Inputs of one task.")
@click.option("--floats", type=int, default=20_000, show_default=True, help="Floats older than what has to leave.")
@JSON_OPTION
def fair(repeat: int, lists: int, inputs: int, floats: int, json_path: Path | None) -> None:
    """Time how long the event loop, and tasks, stand still for what others do."""
    from gpuspill.bench.fair import Fair

    _measure(Fair(lists=lists, inputs=inputs, floats=floats), "gpuspill", repeat, json_path)


@bench.command(short_help="Time a store that holds more and more keys.")
@_arms_option("stock,gpuspill")
@_repeat_option(3)
@click.option(
    "--sizes",
    default="1000,2000,5000,10000,20000,50000,100000",
    show_default=True,
    help="Numbers of keys, ascending.",
)
@click.option("--value", type=SIZE, default="1kB", show_default=True, help="Size of a value.")
@JSON_OPTION
def keys(arms: str, repeat: int, sizes: str, value: int, json_path: Path | None) -> None:
    """Time the operations of a store that holds more and more small keys."""
    from gpuspill.bench.keys import Keys

    try:
        numbers = sorted(int(size) for size in sizes.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{sizes!r} is no list of numbers; write it like 1000,10000", param_hint="--sizes"
        ) from None
    _measure(Keys(numbers, value), arms, repeat, json_path)


@bench.command(short_help="Hand more data than memory to a peer.")
@_arms_option("stock,gpuspill,memory", "stock, gpuspill, memory")
@_repeat_option(5)
@click.option("--limit", type=SIZE, default="1GiB", show_default=True, help="Memory of the sender.")
@click.option("--ratio", type=float, default=3.0, show_default=True, help="Size of the data divided by the limit.")
@click.option("--chunk", type=SIZE, default="16MiB", show_default=True, help="Size of a value.")
@click.option(
    "--peer",
    type=click.Choice(["enough", "limited"]),
    default="enough",
    show_default=True,
    help="Whether the peer has memory for everything, or as much as the sender.",
)
@click.option("--nthreads", type=click.IntRange(min=1), default=1, show_default=True)
@JSON_OPTION
def transfer(
    arms: str,
    repeat: int,
    limit: int,
    ratio: float,
    chunk: int,
    peer: Literal["enough", "limited"],
    nthreads: int,
    json_path: Path | None,
) -> None:
    """Let a worker with more data than memory hand all of it to a peer."""
    from gpuspill.bench.transfer import TransferBenchmark

    job = TransferBenchmark(limit=limit, ratio=ratio, chunk=chunk, threads=nthreads, peer=peer)
    _measure(job, arms, repeat, json_path)


@bench.command(short_help="Compute a + a.T of more than memory holds.")
@_arms_option("stock,gpuspill,nospill")
@_repeat_option(5)
@click.option("--limit", type=SIZE, default="1GiB", show_default=True, help="Memory of each of the two workers.")
@click.option(
    "--ratio", type=float, default=2.6, show_default=True, help="Size of the array divided by the memory of both."
)
@click.option("--chunk", type=SIZE, default="16MiB", show_default=True, help="Size of a block.")
@click.option(
    "--persist",
    type=click.Choice(["array", "sum"]),
    default="array",
    show_default=True,
    help="What is persisted before the rest is computed.",
)
@click.option("--nthreads", type=click.IntRange(min=1), default=1, show_default=True)
@JSON_OPTION
def transpose(
    arms: str,
    repeat: int,
    limit: int,
    ratio: float,
    chunk: int,
    persist: Literal["array", "sum"],
    nthreads: int,
    json_path: Path | None,
) -> None:
    """Compute a + a.T and its mean, of a random array larger than the memory of two workers."""
    from gpuspill.bench.transpose import Transpose

    job = Transpose(limit=limit, ratio=ratio, chunk=chunk, persisted=persist, threads=nthreads)
    _measure(job, arms, repeat, json_path)


@bench.command(short_help="Run everyday jobs on more data than memory.")
@_arms_option("stock,gpuspill,nospill")
@_repeat_option(3)
@click.option("--limit", type=SIZE, default="1GiB", show_default=True, help="Memory of each of the two workers.")
@click.option(
    "--ratio",
    type=float,
    default=2.5,
    show_default=True,
    help="Bytes that should be alive at once, divided by the memory of both.",
)
@click.option("--chunk", type=SIZE, default="16MiB", show_default=True, help="Size of a piece.")
@click.option("--only", default="", help="Names of workloads, separated by commas.  [default: all]")
@click.option("--nthreads", type=click.IntRange(min=1), default=1, show_default=True)
@JSON_OPTION
def suite(
    arms: str,
    repeat: int,
    limit: int,
    ratio: float,
    chunk: int,
    only: str,
    nthreads: int,
    json_path: Path | None,
) -> None:
    """Run what people do with dask, each with more data than memory: what it costs."""
    from gpuspill.bench.suite import Suite

    _measure(Suite(limit=limit, ratio=ratio, chunk=chunk, only=only, threads=nthreads), arms, repeat, json_path)


@bench.command(short_help="Copy blocks while a simulated device computes.")
@click.option("--arms", help="What to run, in this order.  [default: gpuspill,fits]")
@_repeat_option(5)
@click.option("--limit", type=SIZE, default="4GiB", show_default=True, help="Values to keep on the device.")
@click.option("--ratio", type=float, default=3.0, show_default=True, help="Size of the array divided by the limit.")
@click.option("--chunk", type=SIZE, default="256MiB", show_default=True, help="Size of a block.")
@click.option("--passes", type=int, default=4, show_default=True, help="How often to go over the array.")
@click.option(
    "--balance",
    type=float,
    default=1.0,
    show_default=True,
    help="Seconds of all kernels by those of copying the array in one direction.",
)
@click.option("--bandwidth", type=SIZE, default="10GB", show_default=True, help="Of the link, a second and direction.")
@click.option("--thin", type=int, default=16, show_default=True, help="Of so many bytes one is really there.")
@click.option("--nthreads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--link",
    type=click.FloatRange(min=0, min_open=True),
    help="Measure the device tier alone instead, on a link of so many GB/s in each direction. No byte moves and "
    "nothing sleeps: what the host pays is modelled at full scale. The arms are sizes of values then, by default all.",
)
@click.option("--model", default="h200", show_default=True, help="With --link: what the host pays.")
@click.option(
    "--fence",
    type=click.Choice(["device", "stream"]),
    default="stream",
    show_default=True,
    help="With --link: how computations are waited for, as gpuspill.device-fence.",
)
@JSON_OPTION
def device(
    arms: str | None,
    repeat: int,
    limit: int,
    ratio: float,
    chunk: int,
    passes: int,
    balance: float,
    bandwidth: int,
    thin: int,
    nthreads: int,
    link: float | None,
    model: str,
    fence: str,
    json_path: Path | None,
) -> None:
    """Run kernels on a simulated device while blocks are copied to and from it."""
    if link is not None:
        from gpuspill.bench.link import ARMS, LinkJob

        _measure(LinkJob(link=link * 1e9, model=model, fence=fence), arms or ",".join(ARMS), repeat, json_path)
        return
    from gpuspill.bench.device import DeviceJob

    job = DeviceJob(
        limit=limit,
        ratio=ratio,
        chunk=chunk,
        passes=passes,
        balance=balance,
        bandwidth=bandwidth,
        thin=thin,
        threads=nthreads,
    )
    _measure(job, arms or "gpuspill,fits", repeat, json_path)


@bench.command(short_help="Damage a cluster while it runs known jobs.")
@_arms_option("gpuspill", "gpuspill, stock")
@click.option("--minutes", type=float, default=5.0, show_default=True, help="How long to begin rounds, each arm.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which plan.")
@click.option("--faults", help="Kinds of faults, separated by commas.  [default: all]")
@click.option("--jobs", help="Kinds of jobs, separated by commas.  [default: all]")
@click.option(
    "--patience", type=float, default=90.0, show_default=True, help="Seconds after which a job counts as hung."
)
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the rounds that were run to this file.",
)
@click.option(
    "--replay",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run the rounds of a file that --plan has written, whatever the time and the seed.",
)
@click.option(
    "--dumps",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path("."),
    help="Where the state of a cluster that hangs is written to.  [default: here]",
)
@JSON_OPTION
def chaos(
    arms: str,
    minutes: float,
    seed: int,
    faults: str | None,
    jobs: str | None,
    patience: float,
    plan_path: Path | None,
    replay: Path | None,
    dumps: Path,
    json_path: Path | None,
) -> None:
    """Kill, stop and damage a cluster while it runs jobs whose answers are known."""
    from gpuspill.bench.chaos import plan as plans
    from gpuspill.bench.chaos.run import chaos as run
    from gpuspill.bench.chaos.run import is_fault_of_ours
    from gpuspill.bench.report import render, save

    kinds = plans.choose(faults, plans.FAULTS, "--faults")
    chosen = plans.choose(jobs, plans.JOBS, "--jobs")
    rounds = plans.rounds(seed, chosen, kinds) if replay is None else iter(plans.read(replay))
    result, done = run(
        rounds,
        arms,
        minutes if replay is None else float("inf"),
        patience=patience,
        dumps=dumps,
        parameters={"minutes": minutes, "seed": seed, "faults": kinds, "jobs": chosen, "patience": patience},
        progress=progress,
    )
    if plan_path is not None:
        plans.write(done, plan_path)
    render(result, console())
    if json_path is not None:
        save(result, json_path)
    if is_fault_of_ours(result):
        raise SystemExit(1)


@bench.command(short_help="Print the tables of saved results.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
def show(files: tuple[Path, ...]) -> None:
    """Print the tables of results that 'gpuspill bench ... --json FILE' has written."""
    from gpuspill.bench.report import load, render

    screen = console()
    for path in files:
        render(load(path), screen)
