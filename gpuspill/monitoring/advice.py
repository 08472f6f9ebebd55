"""Plain advice computed from the statistics of a run. Pure: samples in, sentences out.

Each rule looks for one fault, says what shows it, and what helps. The thresholds are where a fault
costs more than the noise between two runs: a tenth of the time, or of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from gpuspill.monitoring import units
from gpuspill.monitoring.samples import ClusterSample, Numbers, changes, combined, steps

__all__ = ["Advice", "Run", "advise"]

#: The share of a run's time, or of its bytes, from which something is worth a word.
_NOTABLE: Final = 0.1
#: The share of the time from which something is what the run was made of.
_MOST: Final = 0.6
#: How often a byte may be read back before the limit counts as too low for the job.
_READ_BACK: Final = 2.0
#: The share of the time from which it counts that tasks wait or read. Several do at once, so that
#: it may exceed one.
_TASKS: Final = 0.3
#: A host is tight from this share of its limit on.
_TIGHT: Final = 0.8


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that the numbers say.

    Attributes
    ----------
    rule
        Its name: stable, for tests and for links into the documentation.
    finding
        What was seen, with its figures.
    remedy
        What to do; empty if nothing has to be done.
    """

    rule: str
    finding: str
    remedy: str = ""


class Run:
    """The statistics of a run: its samples, and what happened between the first and the last.

    Parameters
    ----------
    samples
        In the order of their times; at least one.

    Attributes
    ----------
    seconds
        From the first to the last.
    workers
        How many workers there were at most.
    last
        What each worker said last, by its address; also of workers that have left.
    growth
        How much each total of each worker grew during the run.
    """

    def __init__(self, samples: Sequence[ClusterSample]) -> None:
        if not samples:
            raise ValueError("a run without a sample has no statistics")
        self.samples = samples
        self.seconds = samples[-1].time - samples[0].time
        self.workers = max(len(sample.workers) for sample in samples)
        self.last: dict[str, Numbers] = {address: said for s in samples for address, said in s.workers.items()}
        self.growth: dict[str, dict[str, float]] = {address: {} for address in self.last}
        # Step by step: a worker may come, be started anew and go in between.
        for before, after in steps(samples):
            for address, numbers in changes(before, after).items():
                grown = self.growth[address]
                for name, number in numbers.items():
                    grown[name] = grown.get(name, 0) + number

    @cached_property
    def together(self) -> list[dict[str, float | None]]:
        """The statistics of all workers together, for each sample."""
        return [combined(sample.workers) for sample in self.samples]

    def grew(self, name: str) -> float:
        """Return how much a total grew during the run, over all workers."""
        return sum(grown.get(name, 0) for grown in self.growth.values())

    def most(self, name: str) -> float:
        """Return the largest value of a gauge, over all workers together."""
        return max(numbers.get(name) or 0 for numbers in self.together)

    def share(self, holds: Callable[[Numbers], bool]) -> float:
        """Return the share of all samples for which something holds; 0 without any."""
        seen = [holds(numbers) for sample in self.samples for numbers in sample.workers.values()]
        return sum(seen) / len(seen) if seen else 0.0

    @property
    def worker_seconds(self) -> float:
        """The time of all workers together, in seconds."""
        return self.seconds * max(1, self.workers)


def advise(run: Run) -> list[Advice]:
    """Return what the numbers of a run say, the gravest first; never empty."""
    if not run.workers:
        return [
            Advice(
                "no-gpuspill",
                "No worker has gpuspill attached, so there are no statistics.",
                "client.register_plugin(gpuspill.SpillPlugin()) attaches it to the workers of a running cluster.",
            )
        ]
    found = [advice for rule in _RULES for advice in rule(run)]
    if not run.grew("spills") and not run.grew("clean_drops") and not run.grew("device_spills"):
        found.append(
            Advice(
                "nothing-spilled",
                f"Nothing was spilled: at most {units.nbytes(run.most('host_nbytes'))} of values were in memory. "
                "Spilling did not cost this run any time.",
            )
        )
    if not found:
        found.append(Advice("healthy", "Spilling kept up with the tasks: no number of this run calls for a change."))
    return found


def _lost(run: Run) -> Iterator[Advice]:
    lost = int(run.grew("lost"))
    if lost:
        yield Advice(
            "lost",
            f"{_many(lost, 'record', 'records')} could not be read back. The scheduler computed those values anew, or "
            "the tasks that needed them failed with DataLostError.",
            "Look at the workers' logs for the path and the reason, and at the disk under gpuspill.spill-directory.",
        )


def _disk_refuses(run: Run) -> Iterator[Advice]:
    failures = int(run.grew("spill_failures"))
    if not failures:
        return
    # Of each worker: one disk may be full, and the others empty.
    limited = [said for sample in run.samples for said in sample.workers.values() if said.get("disk_limit")]
    fullest = max(limited, key=lambda said: _of(said, "disk_nbytes") / _of(said, "disk_limit"), default={})
    used, limit = _of(fullest, "disk_nbytes"), _of(fullest, "disk_limit")
    # Half: a limit refuses the record that does not fit any more, which may be a large one.
    if limit and used > limit / 2:
        yield Advice(
            "disk-limit",
            f"{_many(failures, 'write was', 'writes were')} refused: a worker used {units.nbytes(used)} of its disk "
            f"limit of {units.nbytes(limit)}.",
            "Raise distributed.worker.memory.max-spill (or gpuspill.max-spill), or add workers.",
        )
    else:
        yield Advice(
            "disk-refuses",
            f"{_many(failures, 'write', 'writes')} failed, and the values stayed in memory.",
            "Look at the workers' logs for the reason: a full disk, or values that cannot be serialised.",
        )


def _cannot_leave(run: Run) -> Iterator[Advice]:
    stuck = run.share(lambda worker: _of(worker, "unspillable") > 0 and _full(worker))
    if stuck > _NOTABLE:
        yield Advice(
            "unspillable",
            f"{_many(run.most('unspillable'), 'value', 'values')} cannot be serialised, and filled memory that others "
            "needed.",
            "The workers' logs name their types. Return something that can be pickled, or give them back sooner.",
        )


def _let_in(run: Run) -> int:
    """Return how many were let in beyond the limit; 0 if they are the usual few."""
    overruns = run.grew("overruns")
    inputs = run.grew("hits") + run.grew("misses")
    return int(overruns) if overruns >= _NOTABLE * max(run.grew("waits") + overruns, inputs) else 0


def _crowded_out(run: Run) -> bool:
    """Return whether memory of no value is what filled the workers."""
    return run.share(lambda worker: _full(worker) and _of(worker, "offset_nbytes") > 0.3 * _of(worker, "limit")) > (
        _NOTABLE
    )


def _overcommits(run: Run) -> Iterator[Advice]:
    let_in = _let_in(run)
    if not let_in or _crowded_out(run):
        return
    yield Advice(
        "overcommits",
        f"{_many(let_in, 'task or transfer was', 'tasks and transfers were')} let in beyond the limit, because nothing "
        "more could leave memory. Inputs and outputs of the tasks that ran at the same time exceed the limit.",
        "Use smaller chunks or partitions, fewer threads per worker, or a larger memory limit.",
    )


def _unmanaged(run: Run) -> Iterator[Advice]:
    if not _crowded_out(run):
        return
    most = max((said for s in run.samples for said in s.workers.values()), key=lambda said: _of(said, "offset_nbytes"))
    let_in = _let_in(run)
    tasks = _many(let_in, "task or transfer was", "tasks and transfers were")
    beyond = f" {tasks} let in beyond the limit." if let_in else ""
    yield Advice(
        "unmanaged-memory",
        f"Up to {units.nbytes(_of(most, 'offset_nbytes'))} of a worker's memory belonged to no value, where values may "
        f"take {units.nbytes(_of(most, 'limit'))}. Values were spilled to make room for it.{beyond}",
        "Give the workers more memory: Python and its libraries alone take a part of it. Then look for memory that "
        "tasks keep (caches, global variables), for values whose sizeof is too small, and at MALLOC_TRIM_THRESHOLD_.",
    )


def _disk_is_the_limit(run: Run) -> Iterator[Advice]:
    waited = run.grew("wait_seconds")
    wrote, seconds = run.grew("written_nbytes"), run.grew("write_seconds")
    if not run.worker_seconds or not seconds or waited < _NOTABLE * run.worker_seconds:
        return
    busy = min(1.0, seconds / run.worker_seconds)
    waits = f"waited {units.duration(waited)} for room"
    if busy > _MOST:
        yield Advice(
            "disk-bound",
            f"The disk is the limit: workers wrote to it {busy:.0%} of the time, at "
            f"{units.rate(wrote / seconds)}, and tasks {waits}.",
            "Put gpuspill.spill-directory on a faster disk, give the workers more memory, or add workers with disks of "
            "their own.",
        )
    elif waited > _TASKS * run.worker_seconds:
        yield Advice(
            "waits",
            f"Tasks and transfers {waits}: memory was full, and values left it more slowly than new ones came.",
            "Give the workers more memory, put gpuspill.spill-directory on a faster disk, or use fewer threads.",
        )


def _waits_for_reads(run: Run) -> Iterator[Advice]:
    misses, restores = run.grew("misses"), run.grew("restores")
    if not restores:
        return
    # Reads ahead cost no task any time. Which reads those were is not known: each counts as much as
    # any other.
    waited = run.grew("read_seconds") * min(1.0, misses / restores)
    if waited > _TASKS * run.worker_seconds:
        yield Advice(
            "reads-in-tasks",
            f"Tasks read {_many(misses, 'input', 'inputs')} from disk before they could begin, which took them about "
            f"{units.duration(waited)}.",
            "Give the workers more memory, put gpuspill.spill-directory on a faster disk, or raise gpuspill.prefetch.",
        )


def _read_back(run: Run) -> Iterator[Advice]:
    back, left = run.grew("restored_total_nbytes"), run.most("spilled_nbytes")
    if left and back > _READ_BACK * left and run.grew("read_seconds") > _NOTABLE * run.worker_seconds:
        yield Advice(
            "limit-too-low",
            f"The limit is low for this job: values were read back {back / left:.1f} times on average "
            f"({units.nbytes(back)} in all).",
            "Give the workers more memory, persist less at once, or compute results that read the same data together.",
        )


def _pickling(run: Run) -> Iterator[Advice]:
    pickling = run.grew("serialize_seconds") + run.grew("deserialize_seconds")
    moving = run.grew("write_seconds") + run.grew("read_seconds")
    if pickling > _NOTABLE * run.worker_seconds and pickling > 2 * moving:
        yield Advice(
            "serialisation-bound",
            f"Most of the time of spilling went into serialisation: {units.duration(pickling)}, beside "
            f"{units.duration(moving)} of disk I/O.",
            "Columns of Python objects are the usual cause: use string[pyarrow], categoricals, or arrays of numbers.",
        )


def _on_the_loop(run: Run) -> Iterator[Advice]:
    reads = int(run.grew("loop_io"))
    if reads:
        yield Advice(
            "reads-on-the-loop",
            f"{_many(reads, 'value was', 'values were')} read on a worker's event loop, which stood still meanwhile.",
            "Coroutine tasks and client.run functions that read worker.data do this: make those values inputs of the "
            "task.",
        )


def _device_thrash(run: Run) -> Iterator[Advice]:
    failed = int(run.grew("device_out_of_memory"))
    if failed:
        yield Advice(
            "device-out-of-memory",
            f"{_many(failed, 'allocation', 'allocations')} on the device did not fit at first. Values were "
            "spilled to make room.",
            "Lower gpuspill.device-memory-limit, so that room is there before it is asked for.",
        )


def _of(worker: Numbers, name: str) -> float:
    return worker.get(name) or 0


def _many(number: float, one: str, several: str) -> str:
    return f"{units.count(number)} {one if int(number) == 1 else several}"


def _full(worker: Numbers) -> bool:
    limit = _of(worker, "limit")
    return limit > 0 and _of(worker, "host_nbytes") + max(0, _of(worker, "offset_nbytes")) > _TIGHT * limit


_RULES: Final[tuple[Callable[[Run], Iterator[Advice]], ...]] = (
    _lost,
    _disk_refuses,
    _cannot_leave,
    _overcommits,
    _unmanaged,
    _disk_is_the_limit,
    _waits_for_reads,
    _read_back,
    _pickling,
    _on_the_loop,
    _device_thrash,
)
