"""The reference pages, made from the code: options, statistics, metrics, commands.

Returns Markdown, and knows nothing of Sphinx, so that tests can look at it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import click

from gpuspill.cli import gpuspill as command
from gpuspill.config import Settings
from gpuspill.distributed.metrics import LABELS, WAIT
from gpuspill.errors import ConfigError
from gpuspill.manager.statistics import Statistics

__all__ = [
    "GROUPS",
    "Option",
    "commands",
    "documented",
    "options",
    "render_commands",
    "render_labels",
    "render_options",
    "render_statistics",
]

#: Which question a number answers, in the order in which one asks. What is in none of them comes last.
GROUPS: Mapping[str, tuple[str, ...]] = {
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
        "waits",
        "wait_seconds",
        "waiting",
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
    "The device": tuple(field.name for field in fields(Statistics) if field.name.startswith("device_")),
}


def markdown(text: str) -> str:
    """Return a sentence of a docstring as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def documented(cls: type) -> dict[str, str]:
    """Return what the docstring of a class says of each of its attributes.

    Raises
    ------
    ValueError
        A field is not explained, or what is explained is no field.
    """
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes\n----------\n")[2]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^(\w.*)\n((?: {4}.*\n?)+)", section, flags=re.MULTILINE):
        meaning = markdown(" ".join(text.split()))
        found.update((name.strip(), meaning) for name in names.split(","))
    declared = {field.name for field in fields(cls)}
    if found.keys() != declared:
        raise ValueError(f"{cls.__name__}: explained and existing attributes differ: {sorted(found.keys() ^ declared)}")
    return found


@dataclass(frozen=True)
class Option:
    """One option: by its name in YAML, with its default, what it accepts and what it means."""

    name: str
    default: str
    accepts: str
    meaning: str

    @property
    def keyword(self) -> str:
        """Its name in Python."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"DASK_GPUSPILL__{self.keyword.upper()}"


def options() -> list[Option]:
    """Return all options, in the order in which they are declared."""
    meanings = documented(Settings)
    found = []
    for field in fields(Settings):
        accepts = _accepts(field.name)
        if field.default == "auto" and "'auto'" not in accepts:
            accepts = f"'auto', {accepts}"
        found.append(
            Option(field.name.replace("_", "-"), _default(field.name, field.default), accepts, meanings[field.name])
        )
    return found


def _accepts(name: str) -> str:
    """Return what an option accepts, in the words of the error about a value that it does not accept."""
    try:
        Settings.load(**{name: object()})
    except ConfigError as error:
        match = re.search(r": expected (.*), found <object", str(error))
        if match is None:
            raise ValueError(f"the error about {name} does not say what is accepted: {error}") from None
        return match[1]
    raise ValueError(f"{name} accepts anything")


def _default(name: str, value: Any) -> str:
    from gpuspill.distributed.settings_report import text

    if value is None:
        return "None"
    return str(value).lower() if isinstance(value, bool) else text(name, value)


def render_options() -> str:
    """Return the options as `confval` directives, which can be linked to."""
    blocks = []
    for option in options():
        blocks.append(
            f'````{{confval}} {option.name}\n:default: "{option.default}"\n:type: "{option.accepts}"\n\n'
            f"{option.meaning}\n\nKeyword `{option.keyword}`, environment `{option.variable}`.\n````\n"
        )
    return "\n".join(blocks)


def cell(text: str) -> str:
    """Return text that can stand in a cell of a table."""
    return text.replace("|", r"\|")


def unit(name: str) -> str:
    """Return the unit of a statistic, which its name tells."""
    if name.endswith(("_nbytes", "limit")):
        return "bytes"
    return "seconds" if name.endswith("_seconds") else "count"


def grouped() -> Iterator[tuple[str, list[str]]]:
    """Yield the questions, and the statistics that answer each."""
    names = [field.name for field in fields(Statistics)]
    seen: set[str] = set()
    for title, members in GROUPS.items():
        seen.update(members)
        yield title, list(members)
    rest = [name for name in names if name not in seen]
    if rest:
        yield "More", rest


def render_statistics() -> str:
    """Return the statistics as a table for each question."""
    meanings = documented(Statistics)
    lines: list[str] = []
    for title, names in grouped():
        lines += [f"## {title}", "", "| statistic | unit | meaning |", "|---|---|---|"]
        for meaning, members in groupby(names, key=lambda name: meanings[name]):
            together = list(members)  # of several that are explained together
            units = dict.fromkeys(unit(name) for name in together)
            lines.append(f"| {', '.join(f'`{name}`' for name in together)} | {', '.join(units)} | {cell(meaning)} |")
        lines.append("")
    return "\n".join(lines)


def render_labels() -> str:
    """Return the labels under which work is reported to distributed."""
    return "\n".join(f"* `{label}`" for label in [*sorted(LABELS), WAIT])


def commands(
    group: click.Group = command, path: tuple[str, ...] = ("gpuspill",)
) -> Iterator[tuple[str, click.Command]]:
    """Yield every command that does something, by the words that call it."""
    for name in sorted(group.commands):
        found = group.commands[name]
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        elif not found.hidden:
            yield " ".join((*path, name)), found


def render_commands() -> str:
    """Return a section for each command, with its options."""
    lines: list[str] = []
    for words, found in commands():
        context = click.Context(found, info_name=words)
        usage = " ".join(found.collect_usage_pieces(context))
        lines += [f"## `{words}`", "", f"```console\n$ {words} {usage}\n```", ""]
        lines += [re.sub(r"\s+", " ", part).strip() + "\n" for part in (found.help or "").split("\n\n")]
        flags = [parameter for parameter in found.params if isinstance(parameter, click.Option)]
        records = [record for flag in flags if (record := flag.get_help_record(context))]
        if records:
            lines += ["| option | meaning |", "|---|---|"]
            lines += [f"| `{cell(names)}` | {cell(text)} |" for names, text in records]
            lines.append("")
    return "\n".join(lines)
