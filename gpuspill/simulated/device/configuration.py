"""How fast and how large a simulated device is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Configuration"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Properties of a simulated device; ``SimulatedDevice`` describes them.

    Raises
    ------
    ValueError
        A value makes no sense; the message names it.
    """

    memory: int
    bandwidth: float | None = None
    latency: float = 0.0
    kernel_latency: float = 0.0
    checks: bool = True
    moves: bool = True

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected bytes a second, or None for no limit, found {self.bandwidth!r}")
        for name in ("memory", "latency", "kernel_latency"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}: expected a number that is not negative, found {value!r}")

    def seconds(self, nbytes: int) -> float:
        """Return how long a copy of `nbytes` takes."""
        return self.latency + (nbytes / self.bandwidth if self.bandwidth else 0.0)
