"""What an array on the simulated device says about its memory's layout."""

from __future__ import annotations

from typing import Any

__all__ = ["Flags"]


class Flags:
    """Memory layout of an array, by attribute or name (``flags["C_CONTIGUOUS"]``).

    Attributes
    ----------
    c_contiguous, f_contiguous, forc
        As NumPy's.
    owndata
        Whether the array covers its whole allocation.
    """

    __slots__ = ("c_contiguous", "f_contiguous", "owndata")

    def __init__(self, flags: Any, owndata: bool) -> None:
        self.c_contiguous: bool = flags.c_contiguous
        self.f_contiguous: bool = flags.f_contiguous
        self.owndata = owndata

    @property
    def forc(self) -> bool:
        """Whether it is contiguous in either order."""
        return self.c_contiguous or self.f_contiguous

    def __getitem__(self, name: str) -> bool:
        found: bool = getattr(self, name.lower())
        return found

    def __repr__(self) -> str:
        return f"<Flags c_contiguous={self.c_contiguous} f_contiguous={self.f_contiguous} owndata={self.owndata}>"
