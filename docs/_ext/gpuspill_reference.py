"""The reference pages, made from the code: options, statistics, metrics, commands.

Returns Markdown, and knows nothing of Sphinx, so that tests can look at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import click

from gpuspill.cli import gpuspill as command
from gpuspill.config import Settings
from gpuspill.distributed.metrics import LABELS, WAIT
from gpuspill.errors import ConfigError
from gpuspill.monitoring.catalogue import catalogue, explanations
from gpuspill.monitoring.prometheus import exported_name

__all__ = [
    "Option",
    "commands",
    "options",
    "render_commands",
    "render_labels",
    "render_metrics",
    "render_options",
    "render_statistics",
]


def markdown(text: str) -> str:
    """Return a sentence of a docstring as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


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
    meanings = explanations(Settings)
    found = []
    for field in fields(Settings):
        accepts = _accepts(field.name)
        if field.default == "auto" and "'auto'" not in accepts:
            accepts = f"'auto', {accepts}"
        found.append(
            Option(
                field.name.replace("_", "-"),
                _default(field.name, field.default),
                accepts,
                markdown(meanings[field.name]),
            )
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


def render_statistics() -> str:
    """Return the statistics as a table for each question."""
    lines: list[str] = []
    for question, metrics in groupby(catalogue().values(), key=lambda metric: metric.question):
        lines += [f"## {question}", "", "| statistic | unit | meaning |", "|---|---|---|"]
        for explanation, members in groupby(metrics, key=lambda metric: metric.explanation):
            together = list(members)  # of several that are explained together
            names = ", ".join(f"`{metric.name}`" for metric in together)
            units = ", ".join(dict.fromkeys(metric.unit for metric in together))
            lines.append(f"| {names} | {units} | {cell(markdown(explanation))} |")
        lines.append("")
    return "\n".join(lines)


def render_metrics() -> str:
    """Return the metrics that Prometheus gets of a worker, as a list."""
    return "\n".join(
        f"* `{exported_name(metric, 'dask_worker_gpuspill')}` ({metric.kind}): `{metric.name}`"
        for metric in catalogue().values()
    )


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
