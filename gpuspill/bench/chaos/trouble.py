"""Files of a worker that are slow, cannot be read, or cannot be written: told by a note on disk.

A worker that is stopped or stuck answers no call, and one that was just started again has forgotten
what it was told. So its store looks, before each operation, for a note that is named after its
process.
"""

from __future__ import annotations

import errno
import faulthandler
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from distributed import Worker, WorkerPlugin
from distributed.spill import SpillBuffer

from gpuspill.bench.delay import DelayedFiles
from gpuspill.errors import StorageError, StorageFull
from gpuspill.storage.wrappers import FaultyStore

__all__ = ["SLOW", "Troubled", "make_trouble"]

SLOW = 0.05
"""Seconds that an operation takes longer on a slow disk."""


_UNREADABLE, _READS = 2, 6
"""Of so many reads of an unreadable disk so many fail, in a row: once would only be tried again."""


def make_trouble(directory: Path, pid: int, *kinds: str) -> None:
    """Leave a note for the store of a process; without any kind of trouble, all is well again."""
    note, draft = _note(directory, pid), directory / f"trouble-{pid}.draft"
    draft.write_text(json.dumps(kinds))
    draft.replace(note)


def _note(directory: Path, pid: int) -> Path:
    return directory / f"trouble-{pid}"


def _trouble(directory: Path, operation: str, number: int) -> BaseException | None:
    """Wait if the note says so; return what to raise, with the number of its kind."""
    try:
        kinds = json.loads(_note(directory, os.getpid()).read_text())
    except OSError:
        return None
    if "slow" in kinds:
        time.sleep(SLOW)
    if "refuse" in kinds and operation == "write":
        return StorageFull(errno.ENOSPC, "no space left on the device (so says gpuspill bench chaos)")
    if "unreadable" in kinds and operation == "read" and number % _READS < _UNREADABLE:
        return StorageError(errno.EIO, "input/output error (so says gpuspill bench chaos)")
    return None


class TroubledFiles(DelayedFiles):
    """The files of a ``SpillBuffer``, with the same trouble.

    Parameters
    ----------
    files
        What is really read and written.
    directory
        Where the notes are.
    """

    def __init__(self, files: MutableMapping[str, Any], directory: Path) -> None:
        super().__init__(files, 0.0, lambda _: self._raise("delete"))
        self._directory = directory
        self._operations = itertools.count(1)

    def __getitem__(self, key: str) -> Any:
        self._raise("read")
        return self._files[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._raise("write")
        self._files[key] = value

    def _raise(self, operation: str) -> None:
        error = _trouble(self._directory, operation, next(self._operations))
        if error is not None:
            # As the system would report it.
            raise OSError(*error.args)


class Troubled(WorkerPlugin):
    """Has each worker, also later ones, look for notes, and write stacks at SIGUSR1.

    Parameters
    ----------
    directory
        Where :func:`make_trouble` leaves them.
    """

    name = "gpuspill-chaos-trouble"

    _stacks: TextIO

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def setup(self, worker: Worker) -> None:
        """Wrap the store, and write stacks at a signal. Runs on the event loop."""
        self._stacks = (self._directory / f"stacks-{os.getpid()}").open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        # Of workers that are started later, too: what goes wrong is meant to.
        logging.getLogger("gpuspill").setLevel(logging.CRITICAL)
        data = cast("Any", worker.data)
        if isinstance(data, SpillBuffer):
            slow = cast("Any", data).slow.data  # as in gpuspill.bench.delay
            slow.d = TroubledFiles(slow.d, self._directory)
        elif (records := getattr(data, "records", None)) is not None:
            records.store = FaultyStore(records.store, partial(_trouble, self._directory))

    def teardown(self, worker: Worker) -> None:
        """Take the notes away."""
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()
        with suppress(OSError):
            _note(self._directory, os.getpid()).unlink()
