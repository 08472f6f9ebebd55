"""The settings of JIT-unspill, which dask-cuda had until 26.04: what they mean here.

They stand at the top of dask's configuration (``jit-unspill: true``, ``DASK_JIT_UNSPILL=True``) and
are read as they are. One of them switches gpuspill on. The others had to do with proxies that stood
for objects, or with files, and have no counterpart; a user who sets one is told what there is
instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache

import dask.config

from gpuspill.config import is_on
from gpuspill.errors import ConfigError

__all__ = ["SHARED_FILESYSTEM", "answer_once", "answers", "jit_unspill"]

logger = logging.getLogger("gpuspill")

SHARED_FILESYSTEM = (
    "every worker keeps its records to itself and sends the stored bytes as they are, so no option says whether "
    "a directory is shared; gpuspill.spill-directory says where the records go"
)

_PLAIN = "tasks, clients and actors get plain objects, never proxies"

#: By name: the value that asks for what gpuspill does anyway, if there is one, and what there is
#: instead.
_REPLACED: Mapping[str, tuple[bool | None, str]] = {
    "jit-unspill-compatibility-mode": (True, f"it is always on: {_PLAIN}"),
    "jit-unspill-incompatible": (None, f"no type needs an exception: {_PLAIN}"),
    "jit-unspill-ignore": (None, f"no type needs an exception: {_PLAIN}"),
    "jit-unspill-shared-fs": (False, SHARED_FILESYSTEM),
    "spill-on-demand": (
        True,
        "it is always on: when the device has no room for an allocation, values are spilled to make it; "
        "gpuspill.device-memory-limit says when spilling starts",
    ),
    "gds-spilling": (
        False,
        "what leaves the device goes to disk by way of host memory, where it is hashed; "
        "gpuspill.gds: auto lets it go past that where GPUDirect Storage is there",
    ),
}


def jit_unspill() -> bool | None:
    """Return whether ``jit-unspill`` is on in dask's configuration; None if it says nothing.

    Raises
    ------
    ConfigError
        It is neither true nor false.
    """
    value = dask.config.get("jit-unspill", None)
    if value is None:
        return None
    on = is_on(value)
    if on is None:
        raise ConfigError(f"jit-unspill (DASK_JIT_UNSPILL): expected true or false, found {value!r}")
    return on


def answers() -> list[str]:
    """Return a sentence for each configured setting of JIT-unspill without effect here."""
    found = []
    for name, (agreed, instead) in _REPLACED.items():
        value = dask.config.get(name, None)
        if value is None or (agreed is not None and is_on(value) is agreed):
            continue
        variable = f"DASK_{name.replace('-', '_').upper()}"
        found.append(f"{name} ({variable}) = {value!r} is a setting of JIT-unspill and changes nothing: {instead}")
    return found


@lru_cache(maxsize=64)  # as many as there are sentences, and a few for other values
def answer_once(text: str) -> None:
    """Log a sentence, unless this process has."""
    logger.warning("%s", text)
