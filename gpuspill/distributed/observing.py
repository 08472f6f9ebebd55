"""What the scheduler knows of the stores, sampled by a client: for ``top`` and reports.

The workers' heartbeats bring the statistics to the scheduler, so it needs no gpuspill. A worker is
asked only at the beginning and at the end of a recording: what it did since its last heartbeat
belongs to the run as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from distributed import default_client

from gpuspill.distributed.reporting import statistics_of_worker
from gpuspill.monitoring.advice import Run
from gpuspill.monitoring.page import About, render
from gpuspill.monitoring.samples import ClusterSample

__all__ = ["TOPIC", "Recorder", "report", "sample_of", "take_sample"]

#: The topic of the events that workers tell clients of: ``client.get_events("gpuspill")``.
TOPIC: Final = "gpuspill"

#: With so many samples every second one is dropped, and from then on half as many are taken.
_MOST_SAMPLES: Final = 4096
#: The same for so many statistics of a worker; each takes a few kilobytes: there may be hundreds of
#: workers.
_MOST_NUMBERS: Final = 40_000
#: Seconds to wait for the workers' answers: one whose event loop stands still should not hold up
#: the report of it.
_PATIENCE: Final = 5.0


def sample_of(identity: Mapping[str, Any], now: float) -> ClusterSample:
    """Return what a scheduler says of its workers as a sample of the time `now`."""
    workers, tasks, interval = {}, 0, 0.0
    for address, worker in identity["workers"].items():
        metrics = worker.get("metrics", {})
        tasks += metrics.get("task_counts", {}).get("executing", 0)
        interval = max(interval, metrics.get("event_loop_interval") or 0.0)
        if isinstance(metrics.get("gpuspill"), Mapping):
            workers[address] = metrics["gpuspill"]
    return ClusterSample(now, workers, tasks, interval)


async def take_sample(client: Any) -> ClusterSample:
    """Ask the scheduler of a client for a sample. Runs on the client's event loop."""
    return sample_of(await client.scheduler.identity(), time.time())


async def _fresh_sample(client: Any) -> ClusterSample:
    """Ask the workers, too, for a new sample; those that do not answer have an old one."""
    told = await take_sample(client)
    try:
        answers = await asyncio.wait_for(client.run(statistics_of_worker, on_error="return"), _PATIENCE)
    except TimeoutError:
        return told
    asked = {address: numbers for address, numbers in answers.items() if isinstance(numbers, Mapping)}
    return replace(told, time=time.time(), workers={**told.workers, **asked})


class Recorder:
    """Takes samples of a cluster as long as it runs.

    Parameters
    ----------
    client
        Of the cluster.
    interval
        Seconds between two samples; twice as long each time that there are 4,096 of them, or fewer
        of many workers.

    Notes
    -----
    :meth:`start` and :meth:`stop` run on the client's event loop.
    """

    def __init__(self, client: Any, interval: float) -> None:
        self._client = client
        self._interval = interval
        self._task: asyncio.Task[None] | None = None
        self.samples: list[ClusterSample] = []

    async def start(self) -> None:
        """Take the first sample, and go on in the background."""
        self.samples.append(await _fresh_sample(self._client))
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take the last sample. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(OSError):  # the cluster is gone: the samples so far are what there is
            self.samples.append(await _fresh_sample(self._client))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            with suppress(OSError):  # the connection is being made anew
                self.samples.append(await take_sample(self._client))
            numbers = sum(len(sample.workers) for sample in self.samples)
            if len(self.samples) >= _MOST_SAMPLES or (numbers >= _MOST_NUMBERS and len(self.samples) > 2):
                del self.samples[1::2]
                self._interval *= 2


class report:  # a function to its users, as distributed's performance_report is
    """Record what the workers' stores do while a block runs, and write one page about it.

    >>> with gpuspill.report("run.html"):  # doctest: +SKIP
    ...     dask.compute(...)

    The page is self-contained: advice computed from the numbers, where the values were over time,
    what moved, who waited, and the totals of each worker. It complements distributed's
    ``performance_report``.

    Parameters
    ----------
    filename
        Where the page is written when the block ends, also if it raises. An existing file is
        replaced.
    client
        A ``distributed.Client``; by default the current one. With an asynchronous client use
        ``async with``.
    interval
        Seconds between two samples.
    title
        Heading of the page.

    Raises
    ------
    ValueError
        There is no client.
    OSError
        The page cannot be written: raised when the block begins.
    """

    def __init__(
        self,
        filename: str | Path,
        client: Any = None,
        *,
        interval: float = 0.5,
        title: str = "gpuspill: report of a run",
    ) -> None:
        self._path = Path(filename)
        self._client: Any = default_client() if client is None else client  # type: ignore[no-untyped-call]
        self._title = title
        self._began = time.time()
        self._recorder = Recorder(self._client, interval)
        self._notices: list[tuple[float, str, str]] = []

    def __enter__(self) -> Self:
        self._client.sync(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.sync(self._stop)
        self._write()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        await asyncio.to_thread(self._write)

    async def _start(self) -> None:
        with self._path.open("a"):  # what cannot be written should not be found out after the job
            pass
        self._began = time.time()
        await self._recorder.start()

    async def _stop(self) -> None:
        await self._recorder.stop()
        with suppress(OSError):
            events = await self._client.scheduler.events(topic=TOPIC)
            self._notices = [
                (when - self._began, str(message.get("worker", "")), str(message.get("message", "")))
                for when, message in events
                if when >= self._began and isinstance(message, Mapping)
            ]

    def _write(self) -> None:
        facts = {
            "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._began)),
            "gpuspill": metadata.version("gpuspill"),
            "distributed": metadata.version("distributed"),
        }
        page = render(Run(self._recorder.samples), About(self._title, facts, self._notices))
        self._path.write_text(page, encoding="utf-8")
