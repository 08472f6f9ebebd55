"""A proxy: a handle that stands for a value which may be anywhere.

It has its own type and none of the value's methods. Impersonating the value is what made the
predecessor fail at compiled type checks, hashing, truth values and dispatch registries; a handle
cannot be mistaken for the value, and only gpuspill ever sees one.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

from gpuspill.manager.restore import Restorer

__all__ = ["Proxy"]


class Proxy:
    """Stands for the value of one key at the time the proxy was made.

    Parameters
    ----------
    restorer
        Of the manager that owns the value.
    key
        The key through which it was asked for; named in errors.
    pid
        Number of the proxy in the manager.

    Notes
    -----
    Holding one does not keep the value; a pin does. Thread-safe.
    """

    __slots__ = ("_restorer", "key", "pid")

    def __init__(self, restorer: Restorer, key: Hashable, pid: int) -> None:
        self._restorer = restorer
        self.key = key
        self.pid = pid

    @property
    def nbytes(self) -> int:
        """Bytes the value takes in memory (an estimate until it was serialised once)."""
        return self._restorer.nbytes(self.key, self.pid)

    def resolve(self) -> Any:
        """Return the value.

        Blocks while it is read from disk, in the calling thread unless another thread does it
        already.

        Raises
        ------
        KeyError
            The key was deleted and nothing pinned its value.
        DataLostError
            The only copy was on disk and cannot be read back intact.
        """
        return self._restorer.bring(self.key, self.pid)

    def __reduce__(self) -> tuple[Any, ...]:
        # A proxy that leaves the process leaves as its value: the manager never travels, and the
        # other side may not have gpuspill, so rebuilding it takes nothing of ours. Large buffers of
        # the value stay out of band if the pickler allows it.
        return operator.getitem, ((self.resolve(),), 0)

    def __repr__(self) -> str:
        return f"<Proxy of {self.key!r}>"
