"""Where one proxy's value is: its copies, the one move in flight and its pins.

A value may have a copy in several tiers at once; after a restore the record on disk stays as a
*clean copy*. So a proxy is not "in memory or on disk" but has a **set of copies**, plus at most one
**move** in flight that is about to add one. Everything else follows: a spill is a move down and
then a drop of the upper copy, and until the move is complete the source is the authoritative copy
(two-phase release).

The table of states and transitions is in ``docs/design/contract.md``; this module is its executable
form.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gpuspill.errors import InvalidTransition

__all__ = ["Residency", "State", "Tier"]


class Tier(enum.IntEnum):
    """A kind of memory, fastest first. The numeric order is the order of speed."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class State(enum.Enum):
    """The names that ``docs/design/contract.md`` gives to the combinations of copies and move."""

    RESIDENT = "resident"  # in memory only
    CLEAN = "clean"  # in memory, and an identical copy below
    SPILLING = "spilling"  # in memory, copy below in the making
    SPILLED = "spilled"  # below only
    RESTORING = "restoring"  # below, copy in memory in the making
    LOST = "lost"  # no copy left


_BIT = {tier: 1 << tier for tier in Tier}


@dataclass(slots=True, kw_only=True, eq=False)
class Residency:
    """The copies, the move and the pins of one proxy.

    Parameters
    ----------
    origin
        The tier in which the value enters. Counts as *memory*; every lower tier is "below".

    Notes
    -----
    Not thread-safe: the owner holds the metadata lock. Every method either succeeds or raises
    :class:`~gpuspill.errors.InvalidTransition` and changes nothing.
    """

    origin: Tier = Tier.HOST
    source: Tier | None = None
    target: Tier | None = None
    pins: int = 0
    _copies: int = -1

    def __post_init__(self) -> None:
        if self._copies < 0:
            self._copies = _BIT[self.origin]

    @property
    def copies(self) -> frozenset[Tier]:
        """The tiers that hold a valid copy."""
        return frozenset(tier for tier in Tier if self._copies & _BIT[tier])

    def has(self, tier: Tier) -> bool:
        """Whether `tier` holds a valid copy."""
        return bool(self._copies & _BIT[tier])

    @property
    def resident(self) -> bool:
        """Whether the value is in the memory it came from, and can be handed out at once."""
        return bool(self._copies & _BIT[self.origin])

    @property
    def moving(self) -> bool:
        """Whether a move is in flight."""
        return self.target is not None

    @property
    def lost(self) -> bool:
        """Whether no copy is left."""
        return not self._copies

    @property
    def state(self) -> State:
        """The name of the current combination."""
        if self.lost:
            return State.LOST
        if self.resident:
            if self.moving:
                return State.SPILLING
            return State.RESIDENT if self._copies == _BIT[self.origin] else State.CLEAN
        return State.RESTORING if self.moving else State.SPILLED

    def settle_below(self, tier: Tier) -> None:
        """The value was never here in memory: its only copy is in `tier`.

        Allowed before anything else happened.
        """
        if self._copies != _BIT[self.origin] or self.moving or self.pins or tier <= self.origin:
            raise InvalidTransition(f"cannot enter in {tier!r} with {self.copies}")
        self._copies = _BIT[tier]

    def begin(self, source: Tier, target: Tier) -> None:
        """Start a move: `target` will hold a copy of what `source` holds."""
        if self.moving:
            raise InvalidTransition(f"a move to {self.target!r} is already in flight")
        if not self.has(source) or self.has(target):
            raise InvalidTransition(f"cannot move {source!r} -> {target!r} with {self.copies}")
        self.source, self.target = source, target

    def complete(self) -> None:
        """The move's bytes have arrived and were verified: `target` holds a copy too."""
        if self.target is None:
            raise InvalidTransition("no move in flight")
        self._copies |= _BIT[self.target]
        self.source = self.target = None

    def fail(self) -> None:
        """The move came to nothing. The copies are what they were."""
        if self.target is None:
            raise InvalidTransition("no move in flight")
        self.source = self.target = None

    def drop(self, tier: Tier) -> None:
        """Forget the copy in `tier`; another copy must stay, and this one not be in use."""
        if not self.has(tier):
            raise InvalidTransition(f"no copy in {tier!r} to drop")
        if self._copies == _BIT[tier]:
            raise InvalidTransition(f"{tier!r} holds the only copy")
        if self.pins and tier == self.origin:
            raise InvalidTransition(f"pinned {self.pins} times")
        if self.source == tier:
            raise InvalidTransition(f"a move reads from {tier!r}")
        self._copies &= ~_BIT[tier]

    def lose(self, tier: Tier) -> None:
        """The copy in `tier` is gone or damaged. A move that read it must have failed before."""
        if not self.has(tier):
            raise InvalidTransition(f"no copy in {tier!r} to lose")
        if self.source == tier:
            raise InvalidTransition(f"a move reads from {tier!r}")
        self._copies &= ~_BIT[tier]

    def pin(self) -> None:
        """One more user: the copy in memory must stay."""
        self.pins += 1

    def unpin(self) -> None:
        """One user less."""
        if not self.pins:
            raise InvalidTransition("not pinned")
        self.pins -= 1
