"""A directory that belongs to one store, and the removal of those whose owner died.

Every store has a directory of its own, mode 0700, with a lock file in it. The one rule that makes sweeping safe:

    *Only who holds the lock on a directory's lock file may use the directory, or remove anything in it.*

The lock (``flock``) goes with the process, however it ends, so a directory whose lock can be taken has no owner. A
creator cannot make a directory and lock it in one step; a sweeper may come in between. Therefore both make the lock
file if it is missing, both give up on a directory whose lock they do not get at once, and both check, once they have
the lock, that the file they locked is still the one with that name. A creator that loses starts again under another
name; a sweeper that loses leaves the directory alone. Lock and directory are removed last, by who holds the lock.

Everything happens relative to open directories and without following symbolic links, so a directory that is renamed,
or replaced by a link, cannot divert a removal.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
from contextlib import suppress

from gpuspill.errors import StorageError

__all__ = ["PREFIX", "PrivateDirectory", "sweep_leftovers"]

logger = logging.getLogger(__name__)

#: How the names of all directories of stores begin.
PREFIX = "gpuspill-"
_LOCK = "lock"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ATTEMPTS = 100
#: What flock says where the file system has no locks (some network and user-space file systems).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class PrivateDirectory:
    """A new, empty, locked directory.

    Parameters
    ----------
    parent
        Where to make it; made too if it is missing.
    named
        Where `parent` comes from, for messages.

    Attributes
    ----------
    path : str
        Absolute, for messages. Operations go through `fd`.
    fd : int
        The open directory. Valid until :meth:`remove`.

    Raises
    ------
    StorageError
        It cannot be made.

    Notes
    -----
    Not thread-safe: the owner sees to it that nothing uses `fd` once it calls :meth:`remove`.
    """

    def __init__(self, parent: str | os.PathLike[str], named: str = "directory") -> None:
        parent = os.path.abspath(parent)
        try:
            os.makedirs(parent, exist_ok=True)
            self._parent_fd = os.open(parent, _OPEN_DIRECTORY)
        except OSError as exc:
            raise _unusable(exc, parent, named) from exc
        try:
            self._name, self.fd, self._lock_fd = _create(self._parent_fd)
        except OSError as exc:
            os.close(self._parent_fd)
            raise _unusable(exc, parent, named) from exc
        self.path = os.path.join(parent, self._name)
        self._pid = os.getpid()
        self._removed = False

    def empty(self) -> None:
        """Remove all files but the lock. Never raises."""
        if not self._removed and os.getpid() == self._pid:
            _empty(self.fd, self.path)

    @property
    def gone(self) -> bool:
        """Whether somebody else has removed it."""
        return not self._removed and os.fstat(self.fd).st_nlink == 0

    def remove(self) -> None:
        """Remove the directory with all files in it. Idempotent; never raises.

        In a forked child this closes the descriptors and leaves the files to the parent, whose they are.
        """
        if self._removed:
            return
        self._removed = True
        try:
            if os.getpid() == self._pid:
                _remove(self._parent_fd, self._name, self.fd, self.path)
        finally:
            # The lock goes last: until then nobody else may touch the directory. The number is forgotten first, since
            # it may soon be that of somebody else's directory.
            directory_fd, self.fd = self.fd, -1
            for fd in (directory_fd, self._parent_fd, self._lock_fd):
                if fd is not None:
                    os.close(fd)


def sweep_leftovers(parent: str | os.PathLike[str]) -> int:
    """Remove the directories of stores in `parent` whose process died.

    Parameters
    ----------
    parent
        The directory that stores were given.

    Returns
    -------
    int
        How many were removed.

    Notes
    -----
    Never raises, never waits for a lock, never touches the directory of a live store (of this or another process) or
    of another user. May run in any number of processes at once, and beside stores being made and closed.
    """
    parent = os.path.abspath(parent)
    try:
        parent_fd = os.open(parent, _OPEN_DIRECTORY)
    except OSError:
        return 0
    swept = 0
    try:
        for name in os.listdir(parent_fd):
            if name.startswith(PREFIX) and _sweep(parent_fd, name, os.path.join(parent, name)):
                swept += 1
    except OSError as exc:
        logger.warning("Looking for leftovers of spilling in %s failed: %s", parent, exc)
    finally:
        os.close(parent_fd)
    if swept:
        logger.info("Removed %d directories that dead processes left in %s", swept, parent)
    return swept


def _unusable(error: OSError, parent: str, named: str) -> StorageError:
    # A part of the path may be to blame. Names relative to an open directory say nothing to anybody.
    found, culprit = error.strerror or str(error), error.filename
    if isinstance(culprit, str) and os.path.isabs(culprit) and culprit != parent:
        found = f"{found}: {culprit}"
    return StorageError(
        error.errno,
        f"{named}: cannot use {parent} for spilling ({found}). Name a directory that is there, or can be made, and in "
        "which this user may write",
    )


def _create(parent_fd: int) -> tuple[str, int, int | None]:
    for _ in range(_ATTEMPTS):
        # The process number is for people who look at the directory; nothing relies on it.
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
            fd = os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent_fd)
        except (FileExistsError, FileNotFoundError):
            # The name is taken, or a sweeper was faster.
            continue
        try:
            lock_fd = _take_lock(fd)
        except OSError as exc:
            if exc.errno in _NO_LOCKS:
                # No sweeper can take this lock either, so nothing will touch the directory.
                logger.warning(
                    "The file system has no locks (%s): what a killed process leaves there is "
                    "not removed by the next start",
                    exc,
                )
                return name, fd, None
            os.close(fd)
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent_fd)
            raise
        if lock_fd is not None:
            return name, fd, lock_fd
        os.close(fd)
    raise FileExistsError(errno.EEXIST, f"no free name after {_ATTEMPTS} attempts")


def _take_lock(directory_fd: int) -> int | None:
    """Return the open lock file of a directory, locked; None if it is, or was, somebody else's."""
    try:
        fd = os.open(
            _LOCK,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=directory_fd,
        )
    except FileNotFoundError:
        # The directory itself was removed.
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(_LOCK, dir_fd=directory_fd, follow_symlinks=False)
        if os.path.samestat(there, os.fstat(fd)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _sweep(parent_fd: int, name: str, path: str) -> bool:
    try:
        fd = os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent_fd)
    except OSError:
        # Gone, not a directory, a link, or not ours to open.
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        try:
            lock_fd = _take_lock(fd)
        except OSError:
            return False
        if lock_fd is None:
            return False
        try:
            return _remove(parent_fd, name, fd, path)
        finally:
            os.close(lock_fd)
    finally:
        os.close(fd)


def _empty(fd: int, path: str) -> None:
    failed: OSError | None = None
    try:
        names = os.listdir(fd)
    except OSError as exc:
        names, failed = [], exc
    for name in names:
        if name == _LOCK:
            continue
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass
        except OSError as exc:
            # Also for a directory, which no store makes, so it is not ours to remove.
            failed = exc
    if failed is not None:
        logger.warning("Could not remove everything in %s: %s", path, failed)


def _remove(parent_fd: int, name: str, fd: int, path: str) -> bool:
    """Remove a directory whose lock the caller holds. Whether it is gone; never raises."""
    _empty(fd, path)
    with suppress(OSError):
        os.unlink(_LOCK, dir_fd=fd)
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except FileNotFoundError:
        pass
    except OSError as exc:
        # ENOTEMPTY: something else lies in it, or somebody made a lock file anew and has it now.
        logger.debug("Left %s in place: %s", path, exc)
        return False
    return True
