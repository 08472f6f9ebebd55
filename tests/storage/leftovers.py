"""What a store leaves whose process was killed, made by hand."""

import itertools
import os
from pathlib import Path

from gpuspill.storage.directory import PREFIX
from gpuspill.storage.marker import Marker

_numbers = itertools.count(1)


def create(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Make a file of exactly this mode."""
    path.write_bytes(content)
    path.chmod(mode)


def leave(parent: Path, files: tuple[str, ...] = ("1", "2"), **changes: object) -> Path:
    """Make the directory of a dead store, whose marker differs from a right one in `changes`, and return it."""
    path = parent / f"{PREFIX}12345-{next(_numbers):012x}"
    path.mkdir()
    path.chmod(0o700)
    create(path / "lock", b"")
    mark(path, **changes)
    for file in files:
        create(path / file, b"old")
    return path


def mark(path: Path, **changes: object) -> None:
    """Write the marker into the lock file of a directory."""
    right = Marker.here(path.stat(), locked=True)
    fields = {name: getattr(right, name) for name in right.__slots__} | changes
    with open(path / "lock", "r+b") as file:
        file.truncate()
        Marker(**fields).write(file.fileno())  # type: ignore[arg-type]


def snapshot(parent: Path) -> dict[str, tuple[object, ...]]:
    """Return all that there is to know of a tree, by path."""
    found: dict[str, tuple[object, ...]] = {}
    for where, folders, files in os.walk(parent):
        for name in folders + files:
            path = Path(where, name)
            status = path.lstat()
            content: object = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            found[str(path)] = (
                status.st_mode,
                status.st_ino,
                status.st_nlink,
                status.st_uid,
                status.st_mtime_ns,
                content,
            )
    return found
