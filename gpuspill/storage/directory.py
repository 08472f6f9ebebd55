"""A directory that belongs to one store, and the removal of those whose owner died.

Every store has a directory of its own, mode 0700, with a lock file in it. Two rules make removing
safe:

    *Only who holds the lock on a directory's lock file may use the directory, or remove anything in
    it.*

    *Only what is proven to be a store's is removed. In doubt, everything stays.*

The lock (``flock``) goes with the process, however it ends, so a directory whose lock can be taken
has no owner. Proven is a directory with a name as stores give, that belongs to this user, has mode
0700, and holds a lock file with the :class:`~gpuspill.storage.marker.Marker` of a store that made
exactly this directory, and nothing else but files with names of records that are regular, have one
link, mode 0600 at most, and belong to this user. All of that is looked at after opening. A sweeper
leaves alone any other directory as a whole, and any whose maker may be alive on another host. It
makes nothing. So a creator that has written no marker yet has nothing to fear; if it dies before,
an empty directory stays. So do directories of versions that wrote no marker: nothing tells them
from a user's.

Everything happens relative to open directories and without following symbolic links, so a directory
that is renamed, or replaced by a link, cannot divert a removal.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from contextlib import suppress

from gpuspill.errors import StorageError
from gpuspill.storage.filesystems import LOCAL, file_system_type
from gpuspill.storage.marker import Marker

__all__ = ["PREFIX", "PrivateDirectory", "sweep_leftovers"]

logger = logging.getLogger(__name__)

#: How the names of all directories of stores begin.
PREFIX = "gpuspill-"
_NAME = re.compile(re.escape(PREFIX) + r"[1-9][0-9]*-[0-9a-f]{12}")
_RECORD = re.compile(r"[1-9][0-9]*")
_LOCK = "lock"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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
            self._parent_fd = os.open(parent, _OPEN_DIRECTORY & ~os.O_NOFOLLOW)
        except OSError as exc:
            raise _unusable(exc, parent, named) from exc
        try:
            self._name, self.fd, self._lock_fd = _create(self._parent_fd, parent)
        except OSError as exc:
            os.close(self._parent_fd)
            raise _unusable(exc, parent, named) from exc
        self.path = os.path.join(parent, self._name)
        # Not the number of the user: a file system may know this one by another, as some do with
        # root.
        self._owner = os.fstat(self._lock_fd).st_uid
        self._pid = os.getpid()
        self._removed = False

    def unlink(self, name: str) -> None:
        """Remove the file of a record.

        Raises
        ------
        OSError
            It cannot be removed, or it is none that a store has made: then it stays.
        """
        _unlink_record(self.fd, name, self._owner)

    def empty(self) -> None:
        """Remove the files of all records. Never raises."""
        if not self._removed and os.getpid() == self._pid:
            _empty(self.fd, self._owner, self.path)

    @property
    def gone(self) -> bool:
        """Whether another process has removed it."""
        if self._removed:
            return False
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError as exc:
            return exc.errno == errno.ESTALE  # network file systems

    def remove(self) -> None:
        """Remove the directory with all records in it. Idempotent; never raises.

        In a forked child this closes the descriptors and leaves the files to the parent, whose they
        are.
        """
        if self._removed:
            return
        self._removed = True
        try:
            if os.getpid() == self._pid:
                _empty(self.fd, self._owner, self.path)
                _remove(self._parent_fd, self._name, self.fd, self._lock_fd, self.path)
        finally:
            # The lock goes last: until then no other process may touch the directory. The number is
            # forgotten first, since it may soon be that of another directory.
            directory_fd, self.fd = self.fd, -1
            for fd in (directory_fd, self._parent_fd, self._lock_fd):
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
    Never raises, never waits for a lock, never makes anything, never touches the directory of a
    live store (of this or another process), or anything that is not proven to be a dead store's.
    May run in any number of processes at once, and beside stores being made and closed.
    """
    parent = os.path.abspath(parent)
    try:
        parent_fd = os.open(parent, _OPEN_DIRECTORY & ~os.O_NOFOLLOW)
    except OSError:
        return 0
    swept = 0
    try:
        names = [name for name in os.listdir(parent_fd) if _NAME.fullmatch(name)]
        local = bool(names) and file_system_type(parent) in LOCAL
        for name in names:
            try:
                swept += _sweep(parent_fd, name, os.path.join(parent, name), local)
            except OSError as exc:
                # Gone, not a directory, a link, not ours to open, or in use.
                logger.debug("Left %s in place: %s", os.path.join(parent, name), exc)
    except OSError as exc:
        logger.warning("Looking for leftovers of spilling in %s failed: %s", parent, exc)
    finally:
        os.close(parent_fd)
    if swept:
        logger.info("Removed %d directories that dead processes left in %s", swept, parent)
    return swept


def _unusable(error: OSError, parent: str, named: str) -> StorageError:
    # A part of the path may be to blame. Names relative to an open directory say nothing to
    # anybody.
    found, culprit = error.strerror or str(error), error.filename
    if isinstance(culprit, str) and os.path.isabs(culprit) and culprit != parent:
        found = f"{found}: {culprit}"
    return StorageError(
        error.errno,
        f"{named}: cannot use {parent} for spilling ({found}). Name a directory that is there, or can be made, and in "
        "which this user may write",
    )


# -- making ----------------------------------------------------------------------------------------


def _create(parent_fd: int, parent: str) -> tuple[str, int, int]:
    for _ in range(_ATTEMPTS):
        # The process number is for people who look at the directory; nothing relies on it.
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        except FileExistsError:
            continue
        fd = -1
        try:
            fd = os.open(name, _OPEN_DIRECTORY, dir_fd=parent_fd)
            return name, fd, _claim(fd, os.path.join(parent, name))
        except BaseException as exc:
            if fd >= 0:
                os.close(fd)
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent_fd)
            if not isinstance(exc, FileExistsError | FileNotFoundError):
                raise
            # Another process removed it, or put something in its place or into it.
    raise FileExistsError(errno.EEXIST, f"no free name after {_ATTEMPTS} attempts")


def _claim(fd: int, path: str) -> int:
    """Return the lock file of a new directory, locked and marked as far as possible."""
    lock_fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        directory, lock = os.fstat(fd), os.fstat(lock_fd)
        if directory.st_uid != lock.st_uid:
            raise FileExistsError(errno.EEXIST, f"{path} was replaced by another user's directory")
        # What the umask took away.
        for each, status, mode in ((fd, directory, 0o700), (lock_fd, lock, 0o600)):
            if status.st_mode & 0o777 != mode:
                os.fchmod(each, mode)
        locked = _try_lock(lock_fd, path)
        try:
            Marker.here(directory, locked=locked).write(lock_fd)
        except OSError as exc:
            logger.warning("Could not mark %s as a store's, so it stays if this process is killed: %s", path, exc)
    except BaseException:
        with suppress(OSError):
            os.unlink(_LOCK, dir_fd=fd)
        os.close(lock_fd)
        raise
    return lock_fd


def _try_lock(fd: int, path: str) -> bool:
    """Lock a file that was just made; False if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(errno.EEXIST, f"the lock of {path} is another process'") from None
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise
        # No sweeper can take this lock either, so nothing will touch the directory.
        logger.warning(
            "The file system has no locks (%s): what a killed process leaves there is not removed by the next start",
            exc,
        )
        return False
    return True


# -- removing --------------------------------------------------------------------------------------


def _is_own(found: os.stat_result, owner: int) -> bool:
    """Whether it is a file as stores make them: regular, with one name, and of this owner."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == owner


def _unlink_record(directory_fd: int, name: str, owner: int) -> None:
    if not _is_own(os.stat(name, dir_fd=directory_fd, follow_symlinks=False), owner):
        raise PermissionError(errno.EPERM, "it is not as a store made it, and is left alone", name)
    os.unlink(name, dir_fd=directory_fd)


def _sweep(parent_fd: int, name: str, path: str, local: bool) -> bool:
    """Remove a directory proven to be a dead store's; whether it is gone. Raises OSError."""
    user = os.geteuid()
    fd = os.open(name, _OPEN_DIRECTORY, dir_fd=parent_fd)
    try:
        directory = os.fstat(fd)
        if directory.st_uid != user or directory.st_mode & 0o777 != 0o700:
            return False
        # Not blocking, as it may be a pipe; writable, since some file systems lock nothing else.
        lock_fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        try:
            if not _is_left(os.fstat(lock_fd), user):
                return False
            marker = Marker.read(lock_fd)
            if marker is None or not marker.is_of(directory, local=local) or not _take_lock(fd, lock_fd):
                return False
            foreign = [entry for entry in os.listdir(fd) if entry != _LOCK and not _is_record(fd, entry, user)]
            if foreign:
                logger.warning(
                    "%s was left by a killed process, but holds what no store has made (%s), so all of it stays",
                    path,
                    ", ".join(sorted(foreign)[:3]),
                )
                return False
            _empty(fd, user, path)
            return _remove(parent_fd, name, fd, lock_fd, path)
        finally:
            os.close(lock_fd)
    finally:
        os.close(fd)


def _take_lock(directory_fd: int, lock_fd: int) -> bool:
    """Lock a directory's lock file, if it is free and locks work here. Raises OSError."""
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    again = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        if not os.path.samestat(os.fstat(again), os.fstat(lock_fd)):
            return False  # another sweeper was faster
        # A file system that lets two have the lock would have given us that of a live store, too.
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    finally:
        os.close(again)


def _is_record(directory_fd: int, name: str, owner: int) -> bool:
    return _RECORD.fullmatch(name) is not None and _is_left(
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False), owner
    )


def _is_left(found: os.stat_result, owner: int) -> bool:
    """Whether a store may have left it. Not asked of a living one's files."""
    return _is_own(found, owner) and not found.st_mode & 0o177


def _empty(fd: int, owner: int, path: str) -> None:
    """Remove the records from a directory whose lock the caller holds. Never raises."""
    failed: OSError | None = None
    try:
        names = os.listdir(fd)
    except OSError as exc:
        names, failed = [], exc
    for name in names:
        if name == _LOCK:
            continue
        try:
            if _RECORD.fullmatch(name) is None:
                raise PermissionError(errno.EPERM, "no store has made it, and it is left alone", name)
            _unlink_record(fd, name, owner)
        except FileNotFoundError:
            pass
        except OSError as exc:
            failed = exc
    if failed is not None:
        logger.warning("Could not remove everything in %s: %s", path, failed)


def _remove(parent_fd: int, name: str, fd: int, lock_fd: int, path: str) -> bool:
    """Remove an empty directory and its lock, which the caller holds; whether it is gone."""
    with suppress(OSError):
        if os.path.samestat(os.stat(_LOCK, dir_fd=fd, follow_symlinks=False), os.fstat(lock_fd)):
            os.unlink(_LOCK, dir_fd=fd)
    try:
        # It may have been renamed, and another one may have its name.
        if os.path.samestat(os.stat(name, dir_fd=parent_fd, follow_symlinks=False), os.fstat(fd)):
            os.rmdir(name, dir_fd=parent_fd)
            return True
    except FileNotFoundError:
        return True
    except OSError as exc:
        # ENOTEMPTY: something else lies in it.
        logger.debug("Left %s in place: %s", path, exc)
    return False
