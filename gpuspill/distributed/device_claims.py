"""How much workers of several processes keep on one device, by notes they leave.

Each worker has a limit, and none knows of the others: by default every one of them would fill four
fifths of the same device. A note is a file, named by the device, the process and when that began;
what a dead process left is removed.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from gpuspill.device.port import Device

__all__ = ["Claim", "claim"]

logger = logging.getLogger("gpuspill")


class Claim:
    """A note of one worker.

    Parameters
    ----------
    directory
        Where notes on this device are.
    nbytes
        Bytes of values that the worker may keep there.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._path = directory / f"{os.getpid()}-{_began(os.getpid())}-{secrets.token_hex(4)}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.write_text(str(nbytes))

    def others(self) -> list[int]:
        """Return what other workers that live have noted, in bytes."""
        found = []
        for path in self._path.parent.iterdir():
            process, began, _ = path.name.split("-")
            if path == self._path:
                continue
            with suppress(FileNotFoundError, ValueError):
                if _began(int(process)) == int(began):
                    found.append(int(path.read_text()))
                else:
                    path.unlink()
        return found

    def release(self) -> None:
        """Take the note away. Idempotent."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # others have notes there
            self._path.parent.rmdir()


def _began(process: int) -> int:
    """Return when a process began, in hundredths of a second; 0 if there is none."""
    try:
        return round(100.0 * float(psutil.Process(process).create_time()))
    except psutil.Error:
        return 0


def claim(device: Device, limit: int | None, directory: str | None = None) -> Claim | None:
    """Note a worker's limit, and warn if all limits exceed the device.

    Parameters
    ----------
    device
        The device; nothing is noted of one that has no name beyond the process.
    limit
        Bytes of values to keep on it; None for no limit.
    directory
        Where notes are; by default in the system's directory for temporary files.
    """
    if device.uuid is None:
        return None
    total = device.memory_info().total
    place = Path(directory or tempfile.gettempdir()) / f"gpuspill-device-{os.getuid()}-{device.uuid}"
    try:
        made = Claim(place, total if limit is None else limit)
        others = made.others()
    except (OSError, ValueError) as error:
        logger.debug("cannot look whether others use %r: %s", device, error)
        return None
    wanted = sum(others) + (total if limit is None else limit)
    if others and wanted > total:
        workers = len(others) + 1
        logger.warning(
            "%d workers of this machine spill from %r, and may keep %s bytes of values on it together, of %s. Set "
            "gpuspill.device-memory-limit to %s for each of them, or give each a device of its own (dask-cuda does)",
            workers,
            device,
            f"{wanted:,}",
            f"{total:,}",
            f"{int(0.8 * total / workers):,}",
        )
    return made
