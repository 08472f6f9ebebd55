"""What moving bytes costs the host, as a model: to be set, and shipped for a few machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

__all__ = ["MODELS", "HostCosts"]


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What the host pays. Seconds, and bytes a second.

    Attributes
    ----------
    call
        Seconds that a call of the driver takes of the calling thread: a copy that is enqueued, an
        event that is recorded or looked at, an allocation.
    latency
        Seconds that a copy takes on the link besides its bytes.
    memcpy
        Bytes a second that a thread moves between two places in host memory that it has touched
        before.
    fresh
        Bytes a second that it moves into memory that no one has touched: the system finds and
        clears pages meanwhile.
    pin
        Bytes a second at which memory is pinned.

    Raises
    ------
    ValueError
        A number makes no sense; the message names it.
    """

    call: float
    latency: float
    memcpy: float
    fresh: float
    pin: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0 if field.name in ("call", "latency") else value > 0):
                raise ValueError(f"{field.name}: expected a positive number, found {value!r}")


#: The link is the machine's, and is named apart. What the host pays was measured on two cores of a
#: virtual machine, but for the calls, the latency and pinning, which are published measurements of
#: such machines.
MODELS: Final[Mapping[str, HostCosts]] = MappingProxyType(
    {"h200": HostCosts(call=2e-6, latency=1.5e-6, memcpy=15e9, fresh=5e9, pin=6e9)}
)
