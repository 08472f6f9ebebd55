"""Memory that libraries keep for later in pools of their own."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["empty_pools"]


def empty_pools() -> bool:
    """Have CuPy and PyTorch give idle memory of their pools back to the device.

    By their public names; imports nothing, never raises. A library that cannot do so now (half
    imported, no context) has nothing to give.

    Returns
    -------
    bool
        Whether one of them did, so that an allocation is worth another try.
    """
    asked = False
    with suppress(Exception):
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.get_default_memory_pool().free_all_blocks()
            asked = True
    with suppress(Exception):
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            asked = True
    return asked
