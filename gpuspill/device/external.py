"""Objects whose library moves their memory by itself: cuDF's, while its own spilling is on.

Moving them as well would be done twice, and asking them for the address of their memory makes cuDF keep it on the
device for good. So they are left alone.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["external_types"]


def external_types() -> tuple[type, ...]:
    """Return the types whose objects are to be left alone now; empty unless cuDF is imported and spills by itself.

    By cuDF's public names only; nothing is imported. Never raises.
    """
    cudf: Any = sys.modules.get("cudf")
    if cudf is None:
        return ()
    try:
        return (cudf.DataFrame, cudf.Series, cudf.Index) if cudf.get_option("spill") else ()
    except (AttributeError, KeyError):
        # It is only half imported, or has no spilling in this version.
        return ()
