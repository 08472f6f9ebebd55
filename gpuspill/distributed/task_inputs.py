"""One task on its way to its inputs: waiting for room, reading what is on disk, handing it over.

Pure of distributed's private parts; :mod:`gpuspill.distributed.worker` fits a :class:`TaskInputs`
into the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from time import time
from typing import Any, TypeVar, cast

from distributed import Reschedule
from distributed.metrics import context_meter

from gpuspill.classes import is_instance
from gpuspill.core.budget import Kind
from gpuspill.distributed.lost import LostValue
from gpuspill.distributed.metrics import WAIT
from gpuspill.errors import DataLostError, answerable
from gpuspill.manager import ProxifyManager
from gpuspill.manager.admission import Admission
from gpuspill.manager.transaction import BATCH
from gpuspill.tier import DeviceTier

__all__ = ["OutputSizes", "TaskInputs", "granted", "in_turns", "in_turns_later"]

T = TypeVar("T")


class OutputSizes:
    """What the outputs of tasks of a kind usually take, learned as they finish.

    Parameters
    ----------
    weight
        Weight of the newest output in the moving average.
    capacity
        How many kinds to remember. Beyond it everything is forgotten: so many kinds of task are
        made up names that never come back.

    Notes
    -----
    Not thread-safe; used on the event loop.
    """

    def __init__(self, weight: float = 0.3, capacity: int = 10_000) -> None:
        self._weight = weight
        self._capacity = capacity
        self._average: dict[str, float] = {}

    def expected(self, kind: str) -> int:
        """Bytes to expect; 0 for a kind that was never seen."""
        return int(self._average.get(kind, 0))

    def learn(self, kind: str, nbytes: int) -> None:
        """Take an output of `nbytes` bytes into account."""
        before = self._average.get(kind)
        if before is None:
            if len(self._average) >= self._capacity:
                self._average.clear()
            self._average[kind] = nbytes
        else:
            self._average[kind] = before + self._weight * (nbytes - before)


class TaskInputs:
    """Pins and room for one task, and its inputs once they are in memory.

    Parameters
    ----------
    admission
        With the inputs pinned.
    wait
        Whether to wait for room before reading.
    tier, device_admission
        The device's tier, if there is one, and the admission there, with what the inputs have on it
        pinned.

    Attributes
    ----------
    claimed
        Whether a thread is going to call :meth:`prepare` before the task runs.
    lost
        The input that is gone, once that is known.
    final
        Whether it is known that it cannot be computed again.
    started, stopped
        When reading began and ended, seconds since the epoch; None if there was none.
    seceded
        Whether the task has left its thread to others.
    """

    __slots__ = (
        "_abandoned",
        "_device_admission",
        "_error",
        "_manager",
        "_output",
        "_prepared",
        "_tier",
        "_values",
        "_wait",
        "admission",
        "claimed",
        "final",
        "lost",
        "seceded",
        "started",
        "stopped",
    )

    def __init__(
        self,
        manager: ProxifyManager,
        admission: Admission,
        *,
        wait: bool,
        tier: DeviceTier | None = None,
        device_admission: Admission | None = None,
    ) -> None:
        self._tier = tier
        self._device_admission = device_admission
        self._manager = manager
        self.admission = admission
        self._wait = wait
        self.claimed = False
        self.seceded = False
        self._output: Admission | None = None
        self.lost: DataLostError | None = None
        self.final = False
        self.started: float | None = None
        self.stopped: float | None = None
        self._prepared = False
        self._abandoned = False
        self._error: Exception | None = None
        self._values: dict[Hashable, Any] | None = None

    @property
    def ready(self) -> bool:
        """Whether the task could run at once: there is room and every input is in memory."""
        manager, device = self._manager, self._device_admission
        if self._wait and not all(admission.granted for admission in self._admissions):
            return False
        if len(self.admission.pids) > BATCH:
            return False  # looking at so many is not for the event loop
        return all(manager.is_resident(key) for key in self.admission.pids) and (
            self._tier is None or device is None or all(map(self._tier.manager.is_resident, device.pids))
        )

    @property
    def _admissions(self) -> tuple[Admission, ...]:
        return (self.admission,) if self._device_admission is None else (self.admission, self._device_admission)

    def prepare(self) -> None:
        """Wait for room and read what is on disk, in the calling thread.

        Blocks. Never raises; errors come out of :meth:`take`.
        """
        self._prepared = True
        for admission in self._admissions:
            if self._wait and not admission.granted:
                asked = time()
                admission.wait()
                context_meter.digest_metric(WAIT, time() - asked, "seconds")
        if self._abandoned:
            return
        self.started = time()
        try:
            values = self._manager.batch.materialize(self.admission)
            if self._tier is not None:
                values = self._tier.resolve_all(values, self._device_admission)
            self._accept(values)
        except DataLostError as error:
            self.lost = error
        except BaseException as error:
            self._error = answerable(error)
        self.stopped = time()

    async def prepare_later(self) -> None:
        """Do as :meth:`prepare` does on the manager's threads, without holding the event loop.

        Cancelling it gives up; reads that have begun end in the background.
        """
        self._prepared = True
        for admission in self._admissions:
            if self._wait and not admission.granted:
                asked = time()
                await granted(admission)
                context_meter.digest_metric(WAIT, time() - asked, "seconds")
        self.started = time()
        source: Future[dict[Hashable, Any]] = self._manager.batch.materialize_later(self.admission)
        try:
            values = await asyncio.wrap_future(source)
            if self._tier is not None:
                values = await asyncio.wrap_future(self._tier.resolve_later(values, self._device_admission))
            self._accept(values)
        except DataLostError as error:
            self.lost = error
        except Exception as error:
            self._error = error
        finally:
            source.cancel()
        self.stopped = time()

    def _accept(self, values: dict[Hashable, Any]) -> None:
        for value in values.values():
            if is_instance(value, LostValue):
                self.final = True
                raise value.error
        self._values = values

    def take(self) -> dict[Hashable, Any]:
        """Return the inputs and let go of them.

        Raises
        ------
        distributed.Reschedule
            An input is lost. The worker's hooks look at :attr:`lost` and decide whether trying
            again can help.
        Exception
            What reading an input raised.
        """
        if not self._prepared:
            self.prepare()
        if self.lost is not None or self._abandoned:
            raise Reschedule
        if self._error is not None:
            raise self._error
        values, self._values = self._values, None
        assert values is not None, "inputs taken twice"
        return values

    def fill(self, stand_ins: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return a copy of `stand_ins` with the inputs in their place. Raises as :meth:`take`."""
        values = self.take()
        return {key: values.get(key, value) for key, value in stand_ins.items()}

    def detach(self) -> None:
        """The task may wait for other tasks: those do not wait for its end. Any thread."""
        for manager, admission in self._asked():
            manager.admission.detach(admission)

    def secede(self) -> None:
        """The task left its thread to others: what its output was promised serves them."""
        self.seceded = True
        self.detach()
        for manager, admission in self._asked():
            manager.admission.give_back_output(admission)

    def _asked(self) -> Iterator[tuple[ProxifyManager, Admission]]:
        yield self._manager, self.admission
        if self._tier is not None and self._device_admission is not None:
            yield self._tier.manager, self._device_admission

    async def ask_again(self, key: Hashable, nbytes: int) -> None:
        """The task seceded and ended: wait for room for its output, off the event loop.

        Parameters
        ----------
        key
            Of the output.
        nbytes
            Bytes that it takes in host memory. What it has on a device is there already.
        """
        order = self.admission.reservation.order
        self._output = self._manager.admission.reserve(nbytes, Kind.TASK, order=order, outputs={key: nbytes})
        if self._wait:
            await granted(self._output)

    def abandon(self) -> None:
        """The task will not run. A thread that waits for room stops waiting."""
        self._abandoned = True
        self.release()

    def release(self) -> None:
        """Undo the pins and give back what is left of the promises. Idempotent.

        On the event loop; if there are many pins, it goes on when the loop comes round again.
        """
        for admission in self._admissions:
            in_turns_later(admission.release_in_pieces())
        if self._output is not None:
            self._output.release()


async def in_turns(pieces: Generator[None, None, T]) -> T:
    """Do what is offered in pieces, and let the event loop run between them; return its result.

    Cancelling it gives up.
    """
    try:
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return cast(T, end.value)
            await asyncio.sleep(0)
    finally:
        pieces.close()


def in_turns_later(pieces: Generator[None, None, None]) -> None:
    """Do the first piece now, and one more each time the event loop comes round."""
    if next(pieces, pieces) is None:
        asyncio.get_running_loop().call_soon(in_turns_later, pieces)


async def granted(admission: Admission) -> None:
    """Wait for room without holding the loop. Cancelling leaves the admission alone."""
    if admission.granted:
        return
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop is closed: no one waits any more
            loop.call_soon_threadsafe(done.set)

    admission.add_done_callback(notify)
    await done.wait()
