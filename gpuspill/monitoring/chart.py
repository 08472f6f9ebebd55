"""Charts over time as SVG: without script or library, so that they open anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from gpuspill.monitoring import units

__all__ = ["Series", "chart", "ticks"]

_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 10, 26
#: More points than this cannot be told apart on a screen.
_POINTS: Final = 600


@dataclass(frozen=True, slots=True)
class Series:
    """One line or area of a chart.

    Attributes
    ----------
    name
        As the legend shows it.
    color
        Name of a colour of the page's style sheet.
    values
        One for each time.
    dashed
        Whether it is a line that others are compared with, such as a limit; never stacked.
    """

    name: str
    color: str
    values: Sequence[float]
    dashed: bool = False


def ticks(most: float, binary: bool, at_most: int = 5) -> list[float]:
    """Return round numbers from 0 to at least `most`, for an axis.

    Parameters
    ----------
    most
        The largest value.
    binary
        Whether the values are bytes: then the steps are powers of two.
    at_most
        How many steps there may be.
    """
    if most <= 0:
        return [0.0, 1.0]
    step = most / at_most
    if binary:
        rounded = 2.0 ** math.ceil(math.log2(max(step, 1)) - 1e-9)
    else:
        magnitude = 10.0 ** math.floor(math.log10(step))
        rounded = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= step * (1 - 1e-9))
    return [number * rounded for number in range(math.ceil(most / rounded - 1e-9) + 1)]


def chart(
    title: str,
    times: Sequence[float],
    series: Sequence[Series],
    text: Callable[[float], str],
    *,
    stacked: bool = False,
    binary: bool = False,
) -> str:
    """Return a chart with its legend as HTML.

    Parameters
    ----------
    title
        What it shows.
    times
        Seconds, ascending.
    series
        What to draw. Stacked series stand on each other, the first at the bottom.
    text
        How a value is shown.
    stacked
        Whether the series are areas on top of each other.
    binary
        Whether the values are bytes.
    """
    if len(times) > _POINTS:
        stride = math.ceil(len(times) / _POINTS)
        # The largest of each group: a peak is what one looks for.
        times = times[::stride]
        series = [
            Series(
                one.name,
                one.color,
                [max(one.values[i : i + stride]) for i in range(0, len(one.values), stride)],
                one.dashed,
            )
            for one in series
        ]
    tops = _stack(series) if stacked else {id(one): list(one.values) for one in series}
    most = max((value for values in tops.values() for value in values), default=0.0)
    axis = ticks(most, binary)
    start, end = (times[0], times[-1]) if times else (0.0, 0.0)
    span = end - start or 1.0

    def x(time: float) -> float:
        return _LEFT + (time - start) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / axis[-1] * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for value in axis:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(text(value))}</text>'
        )
    for time in ticks(end - start, binary=False, at_most=6):
        if time <= end - start:
            anchor = "start" if time == 0 else "middle"
            parts.append(
                f'<text class="tick" x="{x(start + time):.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">'
                f"{escape(_seconds(time))}</text>"
            )
    floor = [0.0] * len(times)
    for one in series:
        top = tops[id(one)]
        line = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in zip(times, top, strict=True))
        about = f"<title>{escape(one.name)}</title>"
        if stacked and not one.dashed:
            back = zip(reversed(times), reversed(floor), strict=True)
            bottom = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in back)
            parts.append(f'<polygon class="area {one.color}" points="{line} {bottom}">{about}</polygon>')
            floor = top
        else:
            kind = "limit" if one.dashed else "line"
            parts.append(f'<polyline class="{kind} {one.color}" points="{line}">{about}</polyline>')
    legend = "".join(
        f'<li><span class="key {"limit" if one.dashed else ""} {one.color}"></span>{escape(one.name)}</li>'
        for one in series
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _seconds(time: float) -> str:
    """Return a round time for an axis: ``2 s`` and not ``2.00 s``."""
    return f"{time:g} s" if time < 120 else units.duration(time)


def _stack(series: Sequence[Series]) -> dict[int, list[float]]:
    """Return the upper edge of each series: what is compared with is not stacked."""
    tops: dict[int, list[float]] = {}
    below: list[float] | None = None
    for one in series:
        if one.dashed:
            tops[id(one)] = list(one.values)
            continue
        below = list(one.values) if below is None else [low + own for low, own in zip(below, one.values, strict=True)]
        tops[id(one)] = below
    return tops
