# mypy: disallow-untyped-calls=False
"""Does the harm: to processes, to files, to the cluster."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
from distributed import Client, LocalCluster, Nanny, Status
from distributed.diagnostics.plugin import SchedulerPlugin

from gpuspill.bench.chaos.plan import Fault
from gpuspill.bench.chaos.remains import files_of
from gpuspill.bench.chaos.trouble import make_trouble

__all__ = ["Finished", "Injector", "running"]

_LARGEST_FILE = 64 * 2**10
"""Of a worker whose disk is full."""

_NAP = 0.05
"""Seconds between two looks at the processes."""

_PATIENCE = 60.0
"""Seconds that restarting or retiring a worker may take."""


class Finished(SchedulerPlugin):
    """Counts the tasks that have finished; each time that one does."""

    name = "gpuspill-chaos-finished"

    def __init__(self) -> None:
        self.count = 0

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Count; called by the scheduler."""
        if start == "processing" and finish == "memory":
            self.count += 1


class Injector:
    """Injects faults when they are due, and ends those that end. Started at once.

    Parameters
    ----------
    cluster, client
        Whom to do harm.
    faults
        In the order in which they are due.
    finished
        How many tasks have finished.
    notes
        Where stores look for trouble.
    shared
        The directory that the stores of all workers use, if they do.

    Attributes
    ----------
    injected
        How many of each kind, of those that hit something.
    died
        Processes that ended although nothing here ended them.
    failed
        What could not be done, for the record.
    hung
        Kinds of faults that did not end in good time after :meth:`finish`.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        client: Client,
        faults: Sequence[Fault],
        finished: Finished,
        notes: Path,
        shared: Path | None,
    ) -> None:
        self.injected: Counter[str] = Counter()
        self.died: list[str] = []
        self.failed: list[str] = []
        self.hung: list[str] = []
        self._cluster = cluster
        self._client = client
        self._faults = list(faults)
        self._finished = finished
        self._notes = notes
        self._shared = [shared] if shared is not None else []
        self._ends: list[tuple[float, Callable[[], object]]] = []
        self._expected_to_end: set[int] = set()
        self._leaving: set[str] = set()
        self._seen: dict[int, str] = {}
        self._troubles: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._beside: list[threading.Thread] = []
        self._notice_deaths()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-injector", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(_NAP):
            self._notice_deaths()
            self._end_those_due(time.monotonic())
            while self._faults and self._finished.count >= self._faults[0].after:
                fault = self._faults.pop(0)
                try:
                    self._inject(fault)
                except Exception as error:  # a worker that is just going, a cluster that is busy with the fault before
                    self.failed.append(f"{fault.kind}: {type(error).__name__}: {error}")
        self._notice_deaths()

    def finish(self) -> None:
        """Inject nothing more, and end what has not ended. Blocks; idempotent."""
        self._stopping.set()
        self._thread.join()
        self._end_those_due(float("inf"))
        deadline = time.monotonic() + _PATIENCE
        for thread in self._beside:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.hung.append(thread.name.removeprefix("chaos-"))
        self._beside.clear()

    # -- one fault ---------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "add":
            self._cluster.scale(len(self._cluster.worker_spec) + 1)
            self.injected["add"] += 1
            return
        nannies = sorted(running(self._cluster), key=lambda nanny: str(nanny.name))
        if not nannies:
            raise RuntimeError("no worker runs")
        nanny = nannies[fault.worker % len(nannies)]
        pid = nanny.pid
        if pid is None:
            raise RuntimeError("the worker has just ended")
        if getattr(self, "_do_" + fault.kind.replace("-", "_"))(fault, nanny, pid):
            self.injected[fault.kind] += 1

    def _do_kill(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        self._expected_to_end.add(pid)
        os.kill(pid, signal.SIGKILL)
        return True

    def _do_stop(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        self._later(fault, lambda: os.kill(pid, signal.SIGCONT))
        return True

    def _do_restart(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        self._expected_to_end.add(pid)
        address = nanny.worker_address
        self._aside("restart", lambda: self._client.restart_workers([address], timeout=_PATIENCE))
        return True

    def _do_retire(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        # Whatever process is that worker's: it may be killed and started again before it leaves.
        self._leaving.add(str(nanny.name))

        def retire() -> None:
            try:
                self._cluster.sync(self._cluster.scale_down, [nanny.name])
            finally:
                # Counted now: others may have been added or retired meanwhile.
                self._cluster.scale(len(self._cluster.worker_spec) + 1)

        self._aside("retire", retire)
        return True

    # -- files -------------------------------------------------------------------------------------

    def _do_flip(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        random = Random(f"{fault}")

        def flip(path: str) -> None:
            with open(path, "r+b") as file:
                length = os.fstat(file.fileno()).st_size
                if length:
                    place = random.randrange(length)
                    file.seek(place)
                    byte = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 1 << random.randrange(8)]))

        # Of a file that is being written the bytes are hashed as the system has them then, so a
        # change before that is no damage but what was written. No disk can make it: the bytes are
        # in the page cache.
        return self._damage(fault, nanny, pid, flip, spared=_being_written)

    def _do_truncate(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        return self._damage(fault, nanny, pid, lambda path: os.truncate(path, os.stat(path).st_size // 2))

    def _do_remove(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        return self._damage(fault, nanny, pid, os.unlink)

    def _damage(
        self,
        fault: Fault,
        nanny: Nanny,
        pid: int,
        damage: Callable[[str], object],
        spared: Callable[[int], set[int]] = lambda pid: set(),
    ) -> bool:
        hit = 0
        with _standing_still(pid):
            # A file that is mapped was verified, and is being sent. A disk does not change what is
            # in memory already; another writer of the file would.
            untouched = _mapped(pid) | spared(pid)
            paths = [path for path in self._files(nanny, pid) if _inode(path) not in untouched]
            for path in Random(f"{fault}").sample(paths, math.ceil(fault.share * len(paths))):
                with suppress(OSError):  # deleted meanwhile; one without a name cannot be removed
                    damage(path)
                    hit += 1
        return hit > 0

    def _do_remove_directory(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        parents = {os.path.dirname(path) for path in self._files(nanny, pid) if not path.startswith("/proc/")}
        for parent in parents:
            shutil.rmtree(parent, ignore_errors=True)
        return bool(parents)

    def _files(self, nanny: Nanny, pid: int) -> list[str]:
        own = nanny.worker_dir
        return files_of(pid, [*([Path(own)] if own else []), *self._shared])

    # -- disks -------------------------------------------------------------------------------------

    def _do_full(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        process = psutil.Process(pid)
        soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (_LARGEST_FILE, hard))
        self._later(fault, lambda: process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard)))
        return True

    def _do_refuse(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        return self._trouble("refuse", fault, pid)

    def _do_unreadable(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        return self._trouble("unreadable", fault, pid)

    def _do_slow(self, fault: Fault, nanny: Nanny, pid: int) -> bool:
        return self._trouble("slow", fault, pid)

    def _trouble(self, kind: str, fault: Fault, pid: int) -> bool:
        def tell() -> None:
            make_trouble(self._notes, pid, *self._troubles[pid].elements())

        def end() -> None:
            self._troubles[pid][kind] -= 1
            tell()

        self._troubles[pid][kind] += 1
        tell()
        self._later(fault, end)
        return True

    # -- what ends by itself -----------------------------------------------------------------------

    def _aside(self, kind: str, work: Callable[[], object]) -> None:
        """Do what takes as long as the cluster takes, while other faults go on."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # the worker was killed meanwhile; the cluster was busy with the fault before
                self.failed.append(f"{kind}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=f"chaos-{kind}", daemon=True)
        thread.start()
        self._beside.append(thread)

    def _later(self, fault: Fault, end: Callable[[], object]) -> None:
        self._ends.append((time.monotonic() + fault.seconds, end))

    def _end_those_due(self, now: float) -> None:
        for entry in [entry for entry in self._ends if entry[0] <= now]:
            self._ends.remove(entry)
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                entry[1]()

    def _notice_deaths(self) -> None:
        now = {nanny.pid: str(nanny.name) for nanny in running(self._cluster) if nanny.pid is not None}
        for pid in self._seen.keys() - now.keys():
            name = self._seen.pop(pid)
            if pid not in self._expected_to_end and name not in self._leaving:
                self.died.append(f"worker {name}, process {pid}")
        self._seen.update(now)


def running(cluster: LocalCluster) -> list[Nanny]:
    """Return the nannies of the workers that are there now."""
    return [
        nanny
        for nanny in list(cluster.workers.values())
        if isinstance(nanny, Nanny) and nanny.status == Status.running and nanny.process is not None
    ]


@contextmanager
def _standing_still(pid: int) -> Iterator[None]:
    """Stop a process meanwhile, unless it is stopped already."""
    process = psutil.Process(pid)
    running = process.status() != psutil.STATUS_STOPPED
    if running:
        os.kill(pid, signal.SIGSTOP)
    try:
        # One that is in a system call ends it first; one that has ended meanwhile is not going to
        # stop.
        while (status := process.status()) != psutil.STATUS_STOPPED:
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                raise psutil.NoSuchProcess(pid)
            time.sleep(0.001)
        yield
    finally:
        if running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _mapped(pid: int) -> set[int]:
    """Return the inodes of the files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines}


def _being_written(pid: int) -> set[int]:
    """Return the inodes of the files that a process has open for writing."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile, if the process runs
            flags = re.search(r"^flags:\s*([0-7]+)", Path(f"/proc/{pid}/fdinfo/{number}").read_text(), re.MULTILINE)
            if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                found.add(os.stat(f"/proc/{pid}/fd/{number}").st_ino)
    return found


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return -1
