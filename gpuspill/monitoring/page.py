"""One self-contained page about a run: advice, where the values were, what moved, who waited.

It needs no server, no script and no network, so it can be kept beside distributed's
``performance_report``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from gpuspill.monitoring import units
from gpuspill.monitoring.advice import Run, advise
from gpuspill.monitoring.catalogue import QUESTIONS, catalogue
from gpuspill.monitoring.chart import Series, chart
from gpuspill.monitoring.samples import combined, rates, steps

__all__ = ["About", "render"]

#: Columns of more workers than this make a table that cannot be read.
_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class About:
    """What a page says of the run besides its numbers.

    Attributes
    ----------
    title
        Its heading.
    facts
        Such as versions and the time of day, by what they are.
    notices
        Rare events of the run: ``(seconds since its start, worker, message)``.
    """

    title: str = "gpuspill: report of a run"
    facts: Mapping[str, str] = field(default_factory=dict)
    notices: Sequence[tuple[float, str, str]] = ()


def render(run: Run, about: About) -> str:
    """Return the page as HTML."""
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in about.facts.items())
    body = [f"<h1>{escape(about.title)}</h1>", f'<p class="about">{facts}</p>', _facts(run), _advice(run)]
    if run.workers:
        body += ["<h2>Over time</h2>", *_charts(run)]
    if about.notices:
        body.append(_notices(about.notices))
    if run.workers:
        body.append(_totals(run))
    style = files("gpuspill.monitoring").joinpath("page.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(about.title)}</title><style>{style}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _facts(run: Run) -> str:
    facts = {
        "Time": units.duration(run.seconds),
        "Workers": units.count(run.workers),
        "Most on disk": units.nbytes(run.most("spilled_nbytes")),
        "Written": units.nbytes(run.grew("written_nbytes")),
        "Read back": units.nbytes(run.grew("read_nbytes")),
        "Tasks waited for room": units.duration(run.grew("wait_seconds")),
    }
    if run.most("device_limit"):
        facts["Device spills"] = units.count(run.grew("device_spills"))
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _advice(run: Run) -> str:
    items = []
    for one in advise(run):
        remedy = f"<p>{escape(one.remedy)}</p>" if one.remedy else ""
        items.append(f'<li class="{"" if one.remedy else "fine"}"><p>{escape(one.finding)}</p>{remedy}</li>')
    return f'<h2>Advice</h2><ul class="advice">{"".join(items)}</ul>'


def _charts(run: Run) -> list[str]:
    start = run.samples[0].time
    times = [sample.time - start for sample in run.samples]
    together = run.together

    def gauge(name: str) -> list[float]:
        return [numbers.get(name) or 0.0 for numbers in together]

    tiers = [
        Series("in host memory", "host", gauge("host_nbytes")),
        Series("on disk only", "disk", gauge("spilled_nbytes")),
    ]
    if run.most("device_nbytes"):
        tiers.insert(0, Series("on the device", "device", gauge("device_nbytes")))
    if all(numbers.get("limit") is not None for numbers in together):
        tiers.append(Series("limit of host memory", "limitcolor", gauge("limit"), dashed=True))
    speeds: dict[str, list[float]] = {"written_nbytes": [0.0], "read_nbytes": [0.0], "wait_seconds": [0.0]}
    for before, after in steps(run.samples):
        found = rates(before, after)
        for name, values in speeds.items():
            values.append(sum(numbers.get(name, 0.0) for numbers in found.values()))
    return [
        chart("Where the values are", times, tiers, units.nbytes, stacked=True, binary=True),
        chart(
            "Disk I/O",
            times,
            [
                Series("written", "write", speeds["written_nbytes"]),
                Series("read", "read", speeds["read_nbytes"]),
            ],
            units.rate,
            binary=True,
        ),
        chart(
            "Tasks",
            times,
            [
                Series("running", "tasks", [float(sample.tasks) for sample in run.samples]),
                Series("tasks and transfers waiting for room", "waiting", gauge("waiting")),
            ],
            lambda number: f"{number:g}",
        ),
        chart(
            "Time between two turns of a worker's event loop (longest of all workers)",
            times,
            [Series("interval", "waiting", [sample.loop_interval for sample in run.samples])],
            units.duration,
        ),
    ]


def _notices(notices: Sequence[tuple[float, str, str]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(units.duration(max(0.0, when)))}</td><td style='text-align:left'>{escape(worker)}</td>"
        f"<td style='text-align:left; white-space:normal'>{escape(message)}</td></tr>"
        for when, worker, message in notices
    )
    return f'<h2>Notices</h2><div class="table"><table><tbody>{rows}</tbody></table></div>'


def _totals(run: Run) -> str:
    """Return the statistics of each worker: last values of gauges, growth of totals."""
    columns = {address: {**run.last[address], **run.growth[address]} for address in sorted(run.last)}
    count = len(columns)
    if count > 1:
        together = {f"all {count:,}": combined(columns)}
        fullest = sorted(columns, key=lambda address: -(columns[address].get("spilled_total_nbytes") or 0))[:_COLUMNS]
        columns = together | {address: columns[address] for address in sorted(fullest)}
    left_out = f"<p>Of {count:,} workers, the {_COLUMNS} that spilled most.</p>" if count > _COLUMNS else ""
    heading = "".join(f"<th>{escape(address)}</th>" for address in columns)
    rows = []
    for question, names in QUESTIONS.items():
        lines = []
        for name in names:
            metric = catalogue()[name]
            cells = [numbers.get(name) for numbers in columns.values()]
            if any(cells):
                shown = "".join(f"<td>{escape(units.amount(metric, cell))}</td>" for cell in cells)
                lines.append(
                    f"<tr><td title='{escape(metric.explanation, quote=True)}'><code>{name}</code></td>{shown}</tr>"
                )
        if lines:
            rows.append(f'<tr><th colspan="{len(columns) + 1}" style="text-align:left">{escape(question)}</th></tr>')
            rows += lines
    return (
        f"<h2>Statistics of each worker</h2>{left_out}<div class='table'><table><thead><tr><th></th>"
        f"{heading}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
