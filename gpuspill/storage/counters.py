"""What operations did, to be summed up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["StorageCounters"]


@dataclass(slots=True)
class StorageCounters:
    """The part of :class:`~gpuspill.storage.base.StoreStatistics` that only ever grows.

    Each operation fills one of its own, without a lock, and the store adds it up under its lock.
    """

    writes: int = 0
    reads: int = 0
    deletes: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    payload_written: int = 0
    payload_read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    checksum_seconds: float = 0.0
    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0
    compressed_frames: int = 0
    write_failures: int = 0
    read_failures: int = 0
    delete_failures: int = 0
    lost: int = 0
    corrupt: int = 0

    def add(self, other: StorageCounters) -> None:
        """Add `other` to this one."""
        for name in _NAMES:
            value = getattr(other, name)
            if value:
                setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


_NAMES = tuple(field.name for field in fields(StorageCounters))
