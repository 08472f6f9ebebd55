"""Every error gpuspill raises, in one tree.

What a caller needs to know of an error is whether the *data* is still there and whether *trying
again* can help, so the tree is cut along these two lines:

=========================  ================  =======================
error                      data still there  retry can help
=========================  ================  =======================
:class:`ConfigError`       yes               no
:class:`SpillFailed`       yes               see subclasses
:class:`StorageError`      yes               yes
:class:`StorageFull`       yes               once space is freed
:class:`QuotaExceeded`     yes               once space is freed
:class:`Unspillable`       yes               no
:class:`ReadInterrupted`   yes               the one who raised it knows
:class:`DataLostError`     no                no; recompute
=========================  ================  =======================
"""

from __future__ import annotations

import threading
from asyncio import CancelledError
from concurrent import futures
from typing import Final

__all__ = [
    "ConfigError",
    "DataLostError",
    "GpuspillError",
    "InvalidTransition",
    "ManagerClosed",
    "QuotaExceeded",
    "ReadInterrupted",
    "RecordCorrupt",
    "RecordLost",
    "SpillFailed",
    "StorageError",
    "StorageFull",
    "Unspillable",
    "answerable",
    "contained",
    "cut_loose",
    "is_for_caller",
]


class GpuspillError(Exception):
    """Base of everything gpuspill raises on purpose."""


class ConfigError(GpuspillError, ValueError):
    """A setting's value cannot be used; the message names it and what it accepts."""


class InvalidTransition(GpuspillError, RuntimeError):
    """The core's state forbids the move it was asked for: a bug in gpuspill, not in the data."""


class ManagerClosed(GpuspillError, RuntimeError):
    """The store was used after it was closed and the value asked for is no longer in memory."""


class SpillFailed(GpuspillError):
    """A value could not be moved down a tier. It stayed where it was."""


class Unspillable(SpillFailed, TypeError):
    """A value cannot be serialised, so it has to stay in memory. Trying again does not help."""


class StorageError(SpillFailed, OSError):
    """A record could not be read or written now: an interrupted call, a full file table."""


class StorageFull(StorageError):
    """The file system has no room for the record; nothing of it was left behind."""


class QuotaExceeded(StorageError):
    """The record would exceed the quota of its store; nothing was written."""


class ReadInterrupted(GpuspillError, RuntimeError):
    """Bringing a value back ended with something that is no error: the value is where it was.

    A deserialiser raised ``SystemExit``, ``asyncio.CancelledError``, a panic of a library in Rust,
    or the like. Those who wait for the value get this instead: the thing itself would end their
    thread, or pass for their own cancellation. It is the cause of this error.
    """


class DataLostError(GpuspillError, RuntimeError):
    """A value is gone: its only copy was on disk and could not be read back intact.

    Parameters
    ----------
    message
        What was lost, where, and what was found instead.
    key
        The key that was asked for, once it is known; the storage layer, which has no keys, leaves
        it ``None``.
    """

    def __init__(self, message: str, key: object = None) -> None:
        super().__init__(message, key)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return self.message

    def retold(self, message: str, key: object) -> DataLostError:
        """Return the error for another reader, with the same notes and without a traceback."""
        error = DataLostError(message, key)
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error


class RecordLost(DataLostError):
    """A record's file has vanished or is shorter than what was written."""


class RecordCorrupt(DataLostError):
    """A record's bytes are not those that were written (checksum, header or lengths differ)."""


def cut_loose(error: BaseException) -> None:
    """Take the tracebacks off an error and off what led to it.

    They refer to the frames of the failed calls, and these to the arguments, which would look held,
    and to the errors, so that only garbage collection would let go of them.
    """
    left: list[BaseException | None] = [error]
    seen = set()
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            left += found.__cause__, found.__context__


class _Contained:
    """See :data:`contained`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        return kind is not None and not issubclass(kind, KeyboardInterrupt)


#: Suppresses what a value's own code raises when it is asked something, ``SystemExit`` included:
#: such a question may be asked on the event loop, which that would end. KeyboardInterrupt passes.
contained: Final = _Contained()


def is_for_caller(error: BaseException) -> bool:
    """Whether an error is a signal's that interrupts the program, in its main thread."""
    if isinstance(error, Exception | GeneratorExit | CancelledError):
        return False
    return threading.current_thread() is threading.main_thread()


def answerable(error: BaseException) -> Exception:
    """Return what to tell those who wait: `error`, unless they would take it for theirs."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | futures.CancelledError):
        return error
    try:
        shown = str(error)
    except Exception:
        shown = "<cannot be shown>"
    interrupted = ReadInterrupted(f"reading the value ended with {type(error).__qualname__}: {shown}")
    interrupted.__cause__ = error
    return interrupted
