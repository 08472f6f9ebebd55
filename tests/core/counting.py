"""Work counted in lines of the core that were run and in comparisons, not in seconds."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import gpuspill.core

CORE = str(Path(gpuspill.core.__file__).parent)


def count_lines(function: Callable[[], object]) -> int:
    """Return how many lines of the core `function` runs, loops counted as often as they go round."""
    lines = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(CORE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


class Comparisons:
    """How often numbers made by :meth:`number` were compared."""

    def __init__(self) -> None:
        self.count = 0

    def number(self, value: float) -> "Counted":
        return Counted(value, self)


class Counted(float):
    """A number that counts its comparisons."""

    def __new__(cls, value: float, counter: Comparisons) -> "Counted":
        number = super().__new__(cls, value)
        number.counter = counter
        return number

    counter: Comparisons

    def __lt__(self, other: float) -> bool:
        self.counter.count += 1
        return super().__lt__(other)

    def __gt__(self, other: float) -> bool:
        self.counter.count += 1
        return super().__gt__(other)

    def __eq__(self, other: object) -> bool:
        self.counter.count += 1
        return super().__eq__(other)

    __hash__ = float.__hash__
