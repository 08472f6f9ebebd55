"""Objects whose library moves their memory by itself: cuDF's, while its own spilling is on.

Moving them as well would be done twice, and asking them for the address of their memory makes cuDF
keep it on the device for good. So they are left alone, and cuDF's own answer to an allocation that
does not fit goes first.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import Any, Final

__all__ = ["CudfFirst", "external_types"]

logger = logging.getLogger("gpuspill")

#: Where cuDF keeps its spill manager: named in its developer guide ("Library design", statistics of
#: spilling), and used by dask-cuda. Asking for the manager makes it, and hangs its callback into
#: RMM.
_MANAGER_MODULE: Final = "cudf.core.buffer.spill_manager"


def external_types() -> tuple[type, ...]:
    """Return the types to leave alone now; empty unless cuDF spills by itself.

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


class CudfFirst:
    """Sees to it that cuDF's out-of-memory callback is in RMM before gpuspill's.

    cuDF hangs it there with the first buffer that it makes, and raises in the task that makes it if
    another callback is there already (``set_spill_on_demand_globally``).

    Notes
    -----
    Thread-safe as far as its owner does not call :meth:`let` twice at a time. Knows cuDF by its
    options and their environment variables, and imports nothing as long as cuDF is not imported.
    """

    def __init__(self) -> None:
        self._settled = False

    @property
    def pending(self) -> bool:
        """Whether cuDF has yet to hang its callback into RMM, as far as known. Cheap."""
        if self._settled:
            return False
        cudf: Any = sys.modules.get("cudf")
        try:
            if cudf is not None:
                return bool(cudf.get_option("spill") and cudf.get_option("spill_on_demand"))
        except AttributeError:
            pass  # half imported: its options will be what the environment says
        except KeyError:
            return False
        return _switched_on("CUDF_SPILL", False) and _switched_on("CUDF_SPILL_ON_DEMAND", True)

    def let(self) -> bool:
        """Have cuDF do it now, with the device current; whether there is no more to wait for.

        Never raises. False only while cuDF is not imported although the environment switches its
        spilling on.
        """
        cudf: Any = sys.modules.get("cudf")
        if not hasattr(cudf, "get_option"):
            return False
        self._settled = True
        try:
            import_module(_MANAGER_MODULE).get_global_manager()
        except ValueError as error:
            logger.warning(
                "cuDF will not spill when an allocation does not fit, only by its own limit, CUDF_SPILL_DEVICE_LIMIT: "
                "%s",
                error,
            )
        except (ImportError, AttributeError) as error:
            logger.warning(
                "cannot let cuDF go first, whose spilling on demand is on: %s. If its first task fails because "
                "a failure callback is registered already, set CUDF_SPILL_ON_DEMAND=off",
                error,
            )
        return True


def _switched_on(name: str, default: bool) -> bool:
    """Read an environment variable as cuDF does."""
    text = os.environ.get(name, "").lower().strip()
    if text in ("true", "on"):
        return True
    if text in ("false", "off"):
        return False
    try:
        return bool(int(text))
    except ValueError:
        return default
