"""What has to be done when an object dies, once no code can take hold of it any more."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Ending"]


class Ending:
    """Calls a function when it is given up. A part of an object that can be weakly referenced.

    The object's own ``__del__`` runs while weak references to it still work. Another thread may so
    take hold of it in the middle of that: of memory, for one, that is being freed. When its parts
    go, they are dead.

    Parameters
    ----------
    act
        The function. It is called in any thread, at any point, and must not refer to the object.
    """

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def cancel(self) -> None:
        """Do nothing in the end."""
        self._act = None

    def __del__(self) -> None:
        if self._act is not None:
            self._act()
