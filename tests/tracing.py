"""What a finaliser could do: something before any line of gpuspill's own code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import gpuspill

_PACKAGE = os.path.dirname(gpuspill.__file__) + os.sep
_KIT = os.path.join(_PACKAGE, "testing") + os.sep


def interrupted(
    operation: Callable[[], object],
    nth: int,
    action: Callable[[], object],
    counts: Callable[[], bool] = lambda: True,
) -> bool:
    """Do `operation`, and `action` before the n-th line that it runs; return whether there is such a line.

    Lines are those of gpuspill, without its testing kit, before which `counts` says yes. What `operation` raises is
    raised once tracing has ended.
    """
    lines = 0

    def local(frame: FrameType, what: str, argument: Any) -> Any:
        nonlocal lines
        if what == "line" and counts():
            lines += 1
            if lines == nth:
                sys.settrace(None)
                action()
                return None
        return local if lines < nth else None

    def trace(frame: FrameType, what: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return local if name.startswith(_PACKAGE) and not name.startswith(_KIT) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return lines >= nth
