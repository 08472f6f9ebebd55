"""Plain advice computed from the statistics of a run. Pure: samples in, sentences out.

Each rule looks for one fault, says what shows it, and what helps. The thresholds are where a fault costs more than the
noise between two runs: a tenth of the time, or of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpuspill.monitoring import units
from gpuspill.monitoring.samples import Sample, changes, combined

__all__ = ["Advice", "Run", "advise"]

#: The share of a run's time, or of its bytes, from which something is worth a word.
_NOTABLE: Final = 0.1
#: The share of the time from which something is what the run was made of.
_MOST: Final = 0.6
#: How often a byte may be read back before the limit counts as too low for the job.
_READ_BACK: Final = 2.0
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
    samples
        As given.
    seconds
        From the first to the last.
    workers
        How many workers there were at most.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise ValueError("a run without a sample has no statistics")
        self.samples = samples
        self.seconds = samples[-1].time - samples[0].time
        self.workers = max(len(sample.workers) for sample in samples)
        self._grown: dict[str, float] = {}
        # Step by step: a worker may come, be started anew and go in between.
        for before, after in pairwise(samples):
            for numbers in changes(before, after).values():
                for name, number in numbers.items():
                    self._grown[name] = self._grown.get(name, 0) + number

    def grew(self, name: str) -> float:
        """Return how much a total grew during the run, over all workers."""
        return self._grown.get(name, 0)

    def most(self, name: str) -> float:
        """Return the largest value of a gauge, over all workers together."""
        return max((combined(sample.workers).get(name) or 0 for sample in self.samples), default=0)

    def share(self, holds: Callable[[dict[str, float]], bool]) -> float:
        """Return the share of all samples of all workers for which something holds; 0 if there is none."""
        seen = [
            holds({name: number or 0 for name, number in numbers.items()})
            for sample in self.samples
            for numbers in sample.workers.values()
        ]
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
            f"{lost:,} records could not be read back. The scheduler computed those values anew, or the tasks that "
            "needed them failed with DataLostError.",
            "Look at the workers' logs for the path and the reason, and at the disk under gpuspill.spill-directory.",
        )


def _disk_refuses(run: Run) -> Iterator[Advice]:
    failures = int(run.grew("spill_failures"))
    if not failures:
        return
    limit = combined(run.samples[-1].workers).get("disk_limit")
    used = run.most("disk_nbytes")
    # Half: a limit refuses the record that does not fit any more, which may be a large one.
    if limit is not None and used > limit / 2:
        yield Advice(
            "disk-limit",
            f"{failures:,} writes were refused: {units.nbytes(used)} of a disk limit of {units.nbytes(limit)} "
            "were in use.",
            "Raise distributed.worker.memory.max-spill (or gpuspill.max-spill), or add workers.",
        )
    else:
        yield Advice(
            "disk-refuses",
            f"{failures:,} values could not be written and stayed in memory.",
            "Look at the workers' logs for the reason: a full disk, or values that cannot be serialised.",
        )


def _cannot_leave(run: Run) -> Iterator[Advice]:
    stuck = run.share(lambda worker: worker["unspillable"] > 0 and _full(worker))
    if stuck > _NOTABLE:
        yield Advice(
            "unspillable",
            f"{int(run.most('unspillable')):,} values cannot be serialised and filled memory that others needed.",
            "The workers' logs name their types. Return something that can be pickled, or give them back sooner.",
        )


def _overcommits(run: Run) -> Iterator[Advice]:
    overruns, waits = run.grew("overruns"), run.grew("waits")
    if not overruns or overruns < _NOTABLE * (waits + overruns):
        return
    pinned = run.share(lambda worker: _full(worker) and worker["pinned_nbytes"] > _TIGHT * worker["host_nbytes"])
    cause = "tasks in progress held most of what was in memory. " if pinned > _NOTABLE else ""
    yield Advice(
        "overcommits",
        f"{int(overruns):,} tasks and transfers were let in beyond the limit, because nothing more could leave memory: "
        f"{cause}Their inputs and outputs are too large for the limit.",
        "Use smaller chunks or partitions, fewer threads per worker, or a larger memory limit.",
    )


def _unmanaged(run: Run) -> Iterator[Advice]:
    share = run.share(lambda worker: _full(worker) and worker["offset_nbytes"] > 0.3 * worker["limit"])
    if share > _NOTABLE:
        yield Advice(
            "unmanaged-memory",
            f"Up to {units.nbytes(run.most('offset_nbytes'))} of process memory belonged to no value, and values were "
            "spilled to make room for it.",
            "Look for memory that tasks keep (caches, global variables), for values whose sizeof is too small, and at "
            "MALLOC_TRIM_THRESHOLD_.",
        )


def _disk_is_the_limit(run: Run) -> Iterator[Advice]:
    waited = run.grew("wait_seconds")
    wrote, seconds = run.grew("written_nbytes"), run.grew("write_seconds")
    if not run.worker_seconds or not seconds or waited < _NOTABLE * run.worker_seconds:
        return
    busy = min(1.0, seconds / run.worker_seconds)
    if busy > _MOST:
        yield Advice(
            "disk-bound",
            f"The disk is the limit: workers wrote to it {busy:.0%} of the time, at "
            f"{units.rate(wrote / seconds)}, and tasks waited {units.duration(waited)} for room.",
            "Put gpuspill.spill-directory on a faster disk, give the workers more memory, or add workers with disks of "
            "their own.",
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
            f"{reads:,} values were read on a worker's event loop, which stood still meanwhile.",
            "Coroutine tasks and client.run functions that read worker.data do this: make those values inputs of the "
            "task.",
        )


def _device_thrash(run: Run) -> Iterator[Advice]:
    failed = int(run.grew("device_out_of_memory"))
    if failed:
        yield Advice(
            "device-out-of-memory",
            f"{failed:,} allocations on the device did not fit at first; values were spilled to make room for them.",
            "Lower gpuspill.device-memory-limit, so that room is there before it is asked for.",
        )


def _full(worker: dict[str, float]) -> bool:
    limit = worker.get("limit") or 0
    return bool(limit) and worker["host_nbytes"] + max(0, worker["offset_nbytes"]) > _TIGHT * limit


_RULES: Final[tuple[Callable[[Run], Iterator[Advice]], ...]] = (
    _lost,
    _disk_refuses,
    _cannot_leave,
    _overcommits,
    _unmanaged,
    _disk_is_the_limit,
    _read_back,
    _pickling,
    _on_the_loop,
    _device_thrash,
)
