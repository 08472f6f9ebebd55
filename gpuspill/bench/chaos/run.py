"""Runs rounds on each arm in turns, and counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuspill.bench.arms import BASELINE, Arm, parse_arms
from gpuspill.bench.chaos.cluster import RoundResult, run_round
from gpuspill.bench.chaos.plan import FAULTS, Round, describe
from gpuspill.bench.environment import environment
from gpuspill.bench.report import Result, Row
from gpuspill.bench.runner import Metrics, Sample

__all__ = ["Tally", "chaos", "is_fault_of_ours", "rows"]

VERDICTS = {
    "right": "answers right",
    "wrong": "answers wrong",
    "lost": "lost for good, and said so",
    "refused": "data not taken in",
    "failed": "failed otherwise",
    "hung": "hung",
}


def rows() -> list[Row]:
    """Return the lines of the table."""
    return [
        Row("rounds", "rounds", "count"),
        *(Row(verdict, label, "count") for verdict, label in VERDICTS.items()),
        *(Row(f"fault {kind}", f"  {kind}", "count") for kind in FAULTS),
        Row("faults", "faults injected", "count"),
        Row("problems", "other problems", "count"),
        Row("left", "things left behind", "count"),
        Row("overruns", "admissions beyond the limit", "count"),
        Row("wall", "wall time", "seconds"),
        Row("correct", "nothing wrong, hung or left", "yes"),
    ]


@dataclass(slots=True)
class Tally:
    """What the rounds of one arm came to, all together."""

    rounds: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    overruns: int = 0
    problems: int = 0
    wall: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, number: int, result: RoundResult) -> None:
        """Count a round."""
        self.rounds += 1
        found = Counter(outcome.verdict for outcome in result.outcomes)
        found["hung"] = result.hung
        self.verdicts += found
        self.injected += result.injected
        self.left += result.left
        self.overruns += result.overruns
        self.problems += len(result.problems)
        self.wall += result.seconds
        for outcome in result.outcomes:
            if outcome.verdict != "right":
                self.notes.append(
                    f"round {number}: {outcome.job.kind} {outcome.job.seed} {outcome.verdict} "
                    f"after {outcome.seconds:.1f} s {outcome.detail:.400}".rstrip()
                )
        self.notes += [f"round {number}: {problem}" for problem in result.problems]

    @property
    def correct(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.problems or self.verdicts["wrong"] or self.verdicts["failed"] or self.verdicts["hung"])

    def metrics(self) -> Metrics:
        """Return the numbers, for a sample."""
        return {
            "rounds": self.rounds,
            **{verdict: self.verdicts[verdict] for verdict in VERDICTS},
            **{f"fault {kind}": self.injected[kind] for kind in FAULTS},
            "faults": self.injected.total(),
            "problems": self.problems,
            "left": self.left.total(),
            "overruns": self.overruns,
            "wall": self.wall,
            "correct": self.correct,
        }


def chaos(
    plan: Iterator[Round],
    arms: str,
    minutes: float,
    *,
    patience: float,
    dumps: Path,
    parameters: Mapping[str, object],
    progress: Callable[[str], None] = lambda line: None,
    run: Callable[[Arm, Round, float, Path], RoundResult] = run_round,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Result, list[Round]]:
    """Run rounds until the time is up, each on every arm before the next.

    Parameters
    ----------
    plan
        The rounds; may end sooner.
    arms
        Names of the arms, separated by commas.
    minutes
        After so many no further round is begun, times the number of arms.
    patience, dumps
        See :func:`~gpuspill.bench.chaos.cluster.run_round`.
    parameters
        What was asked for, for the record.
    progress
        Receives the plan of each round before it, and what came of it after.
    run, clock
        Replaced in tests.

    Returns
    -------
    result, rounds
        One sample for each arm, with the numbers of all rounds; and the rounds that were run.

    Raises
    ------
    ConfigError
        If an arm is unknown.
    """
    chosen = parse_arms(arms)
    facts = environment()
    tallies = {arm.name: Tally() for arm in chosen}
    done: list[Round] = []
    deadline = clock() + 60 * minutes * len(chosen)
    for one in plan:
        if clock() >= deadline:
            break
        done.append(one)
        for line in describe(one):
            progress(line)
        for arm in chosen:
            tally = tallies[arm.name]
            seen = len(tally.notes)
            result = run(arm, one, patience, dumps)
            tally.add(one.number, result)
            counts = Counter(outcome.verdict for outcome in result.outcomes)
            told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
            progress(
                f"  {arm.name}: {told or 'no job ended'}, {result.injected.total()} faults, "
                f"{result.overruns} overruns, {result.seconds:.0f} s"
            )
            for line in result.skipped:
                progress(f"    not injected: {line}")
            for note in tally.notes[seen:]:
                progress(f"    {note}")
    samples = [Sample(name, 0, tally.metrics()) for name, tally in tallies.items()]
    notes = [f"{name}, {note}" for name, tally in tallies.items() for note in tally.notes]
    return Result("chaos", parameters, facts, rows(), samples, notes), done


def is_fault_of_ours(result: Result) -> bool:
    """Whether anything was wrong on another arm than stock, whose troubles are findings."""
    return any(not sample.correct for sample in result.samples if sample.arm != BASELINE)
