"""Where the out-of-memory callback hangs in RMM: an adaptor around the resource that the device has in force.

It knows RMM by the module it is given and imports nothing. RMM's ``FailureCallbackResourceAdaptor`` calls back when its
upstream has no memory, with no lock of RMM's held, and tries again as long as the answer is True. Other adaptors may be
stacked below it and on it, callbacks of others among them: each is asked in its turn, the innermost first.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import Any

from gpuspill.device.cuda.port import FailureCallback
from gpuspill.device.external import CudfFirst

__all__ = ["RmmChain"]


class RmmChain:
    """The callback's place in the resources of one device.

    Parameters
    ----------
    mr
        The module ``rmm.mr``.
    ordinal
        Number of the device.
    cudf
        Whose callback has to be there first.

    Notes
    -----
    :meth:`connect` and :meth:`disconnect` are not to be called at the same time. An adaptor that was dropped by
    ``rmm.reinitialize()`` lives on with the memory that was allocated through it.
    """

    def __init__(self, mr: Any, ordinal: int, cudf: CudfFirst | None = None) -> None:
        self._mr = mr
        self._ordinal = ordinal
        self._cudf = CudfFirst() if cudf is None else cudf
        self._adaptor: Any = None

    def resource(self) -> Any:
        """Return the resource in force."""
        return self._mr.get_per_device_resource(self._ordinal)

    def connected(self) -> bool:
        """Whether the adaptor is in force: on top, or below what others have stacked on it since.

        Also False, so that somebody connects it anew, when it is in cuDF's way.
        """
        return self._in_force() and not self._cudf.pending

    def _in_force(self) -> bool:
        if self._adaptor is None:
            return False
        found = self.resource()
        while found is not self._adaptor:
            if not isinstance(found, self._mr.UpstreamResourceAdaptor):
                return False
            found = found.get_upstream()
        return True

    def connect(self, callback: FailureCallback) -> None:
        """Put an adaptor that calls `callback` on top, once cuDF has its own or has none. The device has to be current.

        While cuDF is awaited nothing happens, and it stays unconnected.
        """
        if self._cudf.pending:
            self.disconnect()
            if not self._cudf.let() or self._in_force():
                return
        upstream = self.resource()

        def failed(nbytes: int) -> bool:
            return callback(nbytes, partial(_fits, upstream))

        self._adaptor = self._mr.FailureCallbackResourceAdaptor(upstream, failed)
        self._mr.set_per_device_resource(self._ordinal, self._adaptor)

    def disconnect(self) -> None:
        """Take the adaptor off, if it is on top. If not it stays where it is, and connected: it cannot be taken out."""
        if self._adaptor is not None and self.resource() is self._adaptor:
            self._mr.set_per_device_resource(self._ordinal, self._adaptor.get_upstream())
            self._adaptor = None


def _fits(upstream: Any, nbytes: int) -> bool:
    """Whether `upstream` has memory, if need be once other libraries have given back what they only keep for later."""
    for attempt in range(2):
        try:
            address = upstream.allocate(nbytes)
        except MemoryError:
            if attempt == 0:
                _empty_caches()
        else:
            upstream.deallocate(address, nbytes)
            return True
    return False


def _empty_caches() -> None:
    """Have libraries that do not allocate through RMM give idle memory back: what their arrays had went to their pools.

    A library that cannot do so now (half imported, no context) has nothing to give.
    """
    with suppress(Exception):
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.get_default_memory_pool().free_all_blocks()
    with suppress(Exception):
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
