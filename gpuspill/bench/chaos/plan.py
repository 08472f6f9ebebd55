"""What happens in a run: jobs, settings and faults of each round, derived from a seed. Pure.

Faults are due in units of tasks that the cluster has finished, not of seconds: a slower machine
then meets the same faults at about the same points of the same graphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from gpuspill.errors import ConfigError

__all__ = [
    "FAULTS",
    "JOBS",
    "LONGEST",
    "Fault",
    "JobSpec",
    "Round",
    "choose",
    "describe",
    "dump",
    "load",
    "read",
    "rounds",
    "write",
]

FORMAT = 1
"""Version of the document; counted up when a field changes its meaning."""

JOBS: Mapping[str, int] = {
    "array": 150,
    "persisted": 110,
    "frame": 170,
    "scattered": 30,
    "actor": 20,
    "nested": 40,
    "parked": 6,
    "gathered": 24,
    "objects": 48,
}
"""The kinds of jobs, and about how many tasks each has."""

FAULTS: Mapping[str, str] = {
    "kill": "SIGKILL a worker; its nanny starts another",
    "stop": "SIGSTOP a worker, SIGCONT it later",
    "restart": "restart a worker by way of its nanny",
    "retire": "retire a worker, and start another",
    "add": "start one more worker",
    "flip": "change a byte in spilled files",
    "truncate": "cut spilled files in half",
    "remove": "remove spilled files",
    "remove-directory": "remove the spill directory of a worker",
    "full": "let no file of a worker grow beyond 64 KiB",
    "refuse": "let writes of a worker's store fail (no space left on device)",
    "unreadable": "let two of six reads of a worker's store fail, in a row (input/output error)",
    "slow": "make each file operation of a worker's store 50 ms slower",
}
"""The kinds of faults, and what each does."""

LONGEST = 3.0
"""Seconds that a fault lasts at most, of those that end."""

_LIMITS = (8 * 2**20, 16 * 2**20, 24 * 2**20)

#: A round has each of these as often as it is listed.
_SETTINGS: Sequence[Mapping[str, object]] = (
    {},
    {},
    {"clean_copies": False},
    {"compression": "lz4"},
    {"spill_threads": 1, "restore_threads": 1},
    {"prefetch": 0, "buffer_pool": 0},
    {"admission": False},
    # Less than what the jobs spill.
    {"max_spill": 48 * 2**20},
)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job: its kind, and the seed of its data."""

    kind: str
    seed: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Parameters
    ----------
    after
        Once so many tasks of the round have finished.
    kind
        One of :data:`FAULTS`.
    worker
        Which worker: a place in the line of those that run, counted round and round.
    seconds
        How long it lasts, of those that end.
    share
        Which part of the worker's files it hits, of those that hit files.
    """

    after: int
    kind: str
    worker: int
    seconds: float = 1.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Round:
    """One cluster, from its start to its end.

    Parameters
    ----------
    number
        Counts the rounds of a run from 0.
    workers, threads
        How many workers it starts with, and threads in each.
    limit
        Values to keep in the memory of each worker, bytes.
    at_once
        How many jobs run beside each other.
    shared_directory
        Whether the spill directories of all workers have one parent.
    settings
        Of gpuspill; other arms ignore them.
    jobs, faults
        In order.
    """

    number: int
    workers: int
    threads: int
    limit: int
    at_once: int
    shared_directory: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    jobs: Sequence[JobSpec] = ()
    faults: Sequence[Fault] = ()


def choose(names: str | None, known: Mapping[str, object], option: str) -> list[str]:
    """Turn ``"kill,stop"`` into names; None into all there are.

    Raises
    ------
    ConfigError
        If a name is unknown, or none is given.
    """
    if names is None:
        return list(known)
    listed = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in listed:
        if name not in known:
            raise ConfigError(f"{option}: {name!r} is unknown; choose among {', '.join(known)}")
    if not listed:
        raise ConfigError(f"{option}: none given; choose among {', '.join(known)}")
    return listed


def rounds(seed: int, jobs: Sequence[str] = tuple(JOBS), faults: Sequence[str] = tuple(FAULTS)) -> Iterator[Round]:
    """Yield rounds without end; the same for the same arguments.

    Parameters
    ----------
    seed
        Any number.
    jobs, faults
        Kinds to draw from. Each comes up once before one comes up again.
    """
    random = Random(f"gpuspill chaos {seed}")
    some_job, some_fault = _shuffled(random, jobs), _shuffled(random, faults)
    for number in count():
        specs = [JobSpec(kind, random.randrange(2**31)) for kind in islice(some_job, random.randint(5, 8))]
        tasks = sum(JOBS[spec.kind] for spec in specs)
        # The last of them may come too late: how many tasks there are depends on what has to be
        # computed again.
        due = sorted(random.randrange(tasks) for _ in range(random.randint(4, 8)))
        yield Round(
            number=number,
            workers=random.randint(2, 3),
            threads=random.randint(1, 2),
            limit=random.choice(_LIMITS),
            at_once=random.randint(1, 3),
            shared_directory=random.random() < 0.5,
            settings=random.choice(_SETTINGS),
            jobs=specs,
            faults=[
                Fault(
                    after,
                    kind,
                    worker=random.randrange(16),
                    seconds=round(random.uniform(0.2, LONGEST), 2),
                    share=round(random.uniform(0.1, 1.0), 2),
                )
                for after, kind in zip(due, islice(some_fault, len(due)), strict=True)
            ],
        )


def _shuffled(random: Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from random.sample(list(kinds), len(kinds))


def describe(found: Round) -> Iterator[str]:
    """Yield the lines that say what happens in a round."""
    settings = ", ".join(f"{name}={value}" for name, value in found.settings.items()) or "default settings"
    yield (
        f"round {found.number}: {found.workers} workers, {found.threads} threads, {found.limit // 2**20} MiB each, "
        f"{found.at_once} jobs at once, {settings}"
    )
    yield "  jobs: " + ", ".join(f"{job.kind} {job.seed}" for job in found.jobs)
    for fault in found.faults:
        yield (
            f"  after {fault.after} tasks: {fault.kind}, worker {fault.worker}, {fault.seconds} s, "
            f"{fault.share:.0%} of the files"
        )


def dump(found: Sequence[Round]) -> str:
    """Write rounds down, for :func:`load`."""
    return json.dumps({"format": FORMAT, "rounds": [asdict(one) for one in found]}, indent=1) + "\n"


def write(found: Sequence[Round], path: Path) -> None:
    """Write rounds to a file.

    Raises
    ------
    ConfigError
        If it cannot be written.
    """
    try:
        path.write_text(dump(found))
    except OSError as error:
        raise ConfigError(f"--plan {path}: cannot be written ({error.strerror})") from error


def read(path: Path) -> list[Round]:
    """Read rounds from a file; errors as :func:`load`, also if it cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"--replay {path}: cannot be read ({error.strerror})") from error
    return load(text, f"--replay {path}")


def load(text: str, where: str = "plan") -> list[Round]:
    """Read back what :func:`dump` wrote.

    Parameters
    ----------
    text
        The document.
    where
        Its name, for messages.

    Raises
    ------
    ConfigError
        If it is no such document; the message says what is wrong with it.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"{where}: is no plan of this version of gpuspill bench chaos")
    try:
        return [_round(one) for one in document["rounds"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: is no plan ({type(error).__name__}: {error})") from error


def _round(found: Mapping[str, Any]) -> Round:
    known = {one.name for one in fields(Round)} - {"jobs", "faults"}
    plain = {name: value for name, value in found.items() if name not in ("jobs", "faults")}
    if unknown := set(plain) - known:
        raise KeyError(f"no such field: {', '.join(sorted(unknown))}")
    jobs = [JobSpec(**job) for job in found["jobs"]]
    faults = [Fault(**fault) for fault in found["faults"]]
    for kind, kinds in [*((job.kind, JOBS) for job in jobs), *((fault.kind, FAULTS) for fault in faults)]:
        if kind not in kinds:
            raise KeyError(f"{kind!r} is unknown; there are: {', '.join(kinds)}")
    return Round(**plain, jobs=jobs, faults=sorted(faults, key=lambda fault: fault.after))
