"""What each statistic is: its unit, its kind, its question, and its explanation.

The explanation is the docstring of :class:`~gpuspill.manager.statistics.Statistics`: it stands
there and nowhere else.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Final, Literal

from gpuspill.manager.statistics import Statistics

__all__ = ["QUESTIONS", "Metric", "catalogue", "explanations"]

#: Which question a statistic answers, in the order in which one asks.
QUESTIONS: Final[dict[str, tuple[str, ...]]] = {
    "How full is it?": (
        "limit",
        "host_nbytes",
        "pinned_nbytes",
        "reserved_nbytes",
        "offset_nbytes",
        "spilled_nbytes",
        "disk_limit",
        "disk_nbytes",
        "keys",
        "values",
        "host_keys",
        "disk_keys",
        "estimated_nbytes",
    ),
    "What moved so far?": (
        "spills",
        "spilled_total_nbytes",
        "clean_drops",
        "restores",
        "restored_total_nbytes",
        "prefetches",
        "written_nbytes",
        "read_nbytes",
        "raw_nbytes",
        "records_reclaimed",
    ),
    "What does spilling cost?": (
        "hits",
        "misses",
        "waiting",
        "waits",
        "wait_seconds",
        "write_seconds",
        "read_seconds",
        "serialize_seconds",
        "deserialize_seconds",
        "loop_io",
    ),
    "Is anything wrong?": (
        "overruns",
        "unspillable",
        "set_aside",
        "spill_failures",
        "restore_failures",
        "lost",
    ),
    "What does the device do?": tuple(field.name for field in fields(Statistics) if field.name.startswith("device_")),
}
_MORE: Final = "More"

#: Statistics that rise and fall. All others are totals since the store was made.
_GAUGES: Final = frozenset(
    {
        *QUESTIONS["How full is it?"],
        "waiting",
        "unspillable",
        "set_aside",
        "device_limit",
        "device_nbytes",
        "device_pinned_nbytes",
        "device_spilled_nbytes",
        "device_lingering_nbytes",
        "device_external_nbytes",
        "device_host_pinned_nbytes",
        "device_host_pinned_used_nbytes",
    }
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One statistic.

    Attributes
    ----------
    name
        The attribute of :class:`~gpuspill.manager.statistics.Statistics`.
    unit
        Of its values.
    kind
        A ``gauge`` rises and falls; a ``counter`` is a total since the store was made.
    question
        The question it answers, one of :data:`QUESTIONS`.
    explanation
        One or two sentences, in reStructuredText.
    """

    name: str
    unit: Literal["bytes", "seconds", "count"]
    kind: Literal["gauge", "counter"]
    question: str
    explanation: str


def explanations(cls: type) -> dict[str, str]:
    """Return what the docstring of a class says of each of its attributes.

    Raises
    ------
    ValueError
        A field has no explanation, or an explanation has no field.
    """
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes\n----------\n")[2]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^(\w.*)\n((?: {4}.*\n?)+)", section, flags=re.MULTILINE):
        found.update((name.strip(), " ".join(text.split())) for name in names.split(","))
    declared = {field.name for field in fields(cls)}
    if found.keys() != declared:
        raise ValueError(f"{cls.__name__}: explained and existing attributes differ: {sorted(found.keys() ^ declared)}")
    return found


def _unit(name: str) -> Literal["bytes", "seconds", "count"]:
    if name.endswith(("_nbytes", "limit")):
        return "bytes"
    return "seconds" if name.endswith("_seconds") else "count"


@cache  # a constant, made when it is first needed: reading docstrings takes a moment
def catalogue() -> dict[str, Metric]:
    """Return all statistics by name: grouped by question, those that answer none last."""
    explained = explanations(Statistics)
    question = {name: title for title, names in QUESTIONS.items() for name in names}
    order = [*question, *(name for name in explained if name not in question)]
    return {
        name: Metric(
            name,
            _unit(name),
            "gauge" if name in _GAUGES else "counter",
            question.get(name, _MORE),
            explained[name],
        )
        for name in order
    }
