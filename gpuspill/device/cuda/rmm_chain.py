"""The out-of-memory callback in RMM: an adaptor around the device's resource.

It knows RMM by the module it is given and imports nothing. RMM's ``FailureCallbackResourceAdaptor``
calls back when its upstream has no memory, and tries again as long as the answer is True. Adaptors
that only pass requests on may be stacked on it, callbacks of others among them: each is asked in
its turn, the innermost first. A pool is another matter: it holds its lock while it asks below, and
spilling gives memory back to that pool. So an adaptor below a pool answers no, and another one goes
on top.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from gpuspill.device.cuda.idle_pools import empty_pools
from gpuspill.device.cuda.port import FailureCallback
from gpuspill.device.external import CudfFirst

__all__ = ["RmmChain"]

#: What of RMM passes requests on with no lock held. Everything else may hold one: pools, arenas,
#: limits, bins.
_PASS_ON: Final = (
    "FailureCallbackResourceAdaptor",
    "LoggingResourceAdaptor",
    "PrefetchResourceAdaptor",
    "StatisticsResourceAdaptor",
    "TrackingResourceAdaptor",
)


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
    :meth:`connect` and :meth:`disconnect` are not to be called at the same time. Every adaptor that
    was ever made is kept: RMM lets go of the callback, which is Python's, before it takes its own
    resource apart, which may call it.
    """

    def __init__(self, mr: Any, ordinal: int, cudf: CudfFirst | None = None) -> None:
        self._mr = mr
        self._ordinal = ordinal
        self._cudf = CudfFirst() if cudf is None else cudf
        self._adaptor: Any = None
        self._made: list[Any] = []
        self._pass_on = tuple(found for name in _PASS_ON if (found := getattr(mr, name, None)) is not None)

    def resource(self) -> Any:
        """Return the resource in force."""
        return self._mr.get_per_device_resource(self._ordinal)

    def connected(self) -> bool:
        """Whether the adaptor is in force: on top, or below what passes requests on.

        Also False when it is in cuDF's way, so that it is connected anew.
        """
        return self._in_force() and not self._cudf.pending

    def _in_force(self) -> bool:
        adaptor = self._adaptor
        if adaptor is None:
            return False
        found = self.resource()
        while found is not adaptor:
            if not isinstance(found, self._pass_on):
                return False
            found = found.get_upstream()
        return True

    def connect(self, callback: FailureCallback) -> None:
        """Put an adaptor that calls `callback` on top, after cuDF's. On the current device.

        While cuDF is awaited nothing happens, and it stays unconnected.
        """
        if self._cudf.pending:
            self.disconnect()
            if not self._cudf.let() or self._in_force():
                return
        upstream = self.resource()

        def failed(nbytes: int) -> bool:
            # Looked at now: a pool may have been put on top since, whose lock this thread then
            # holds.
            return self._adaptor is adaptor and self._in_force() and callback(nbytes, partial(_fits, upstream))

        adaptor = self._mr.FailureCallbackResourceAdaptor(upstream, failed)
        self._adaptor = adaptor
        self._made.append(adaptor)
        self._mr.set_per_device_resource(self._ordinal, self._adaptor)

    def disconnect(self) -> None:
        """Take the adaptor off if it is on top. Else it stays, connected."""
        if self._adaptor is not None and self.resource() is self._adaptor:
            self._mr.set_per_device_resource(self._ordinal, self._adaptor.get_upstream())
            self._adaptor = None


def _fits(upstream: Any, nbytes: int) -> bool:
    """Whether `upstream` has memory, once other libraries gave back their idle memory."""
    for attempt in range(2):
        try:
            address = upstream.allocate(nbytes)
        except MemoryError:
            if attempt == 0:
                empty_pools()
        else:
            upstream.deallocate(address, nbytes)
            return True
    return False
