"""Numbers as people read them."""

from __future__ import annotations

from typing import Final

from gpuspill.monitoring.catalogue import Metric

__all__ = ["amount", "count", "duration", "nbytes", "rate"]

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUTE, _HOUR = 60, 3600


def nbytes(number: float) -> str:
    """Return bytes with three digits: ``1.25 GiB``."""
    scaled = float(number)
    unit = _BINARY[0]
    for unit in _BINARY:  # the last unit is for all that is larger
        if abs(scaled) < 999.5 or unit == _BINARY[-1]:
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{_three_digits(scaled)} {unit}"


def rate(number: float) -> str:
    """Return bytes per second: ``312 MiB/s``."""
    return f"{nbytes(number)}/s"


def duration(seconds: float) -> str:
    """Return seconds with their unit: ``350 ms``, ``12.4 s``, ``3 min 20 s``."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms"
    if abs(seconds) < _MINUTE:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) < _HOUR:
        return f"{int(seconds // _MINUTE)} min {int(seconds % _MINUTE)} s"
    return f"{int(seconds // _HOUR)} h {int(seconds % _HOUR // _MINUTE)} min"


def count(number: float) -> str:
    """Return a count with its thousands apart: ``12,345``."""
    return f"{int(number):,}"


def amount(metric: Metric, number: float | None) -> str:
    """Return a statistic as text; ``none`` for a limit that does not exist."""
    if number is None:
        return "none"
    return {"bytes": nbytes, "seconds": duration, "count": count}[metric.unit](number)


def _three_digits(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
