"""A value that counts how often it is pickled and unpickled, and clusters of two workers over any protocol."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from contextlib import asynccontextmanager

import dask
import numpy as np
from distributed import Client, Scheduler, Security, Worker, wait
from distributed.utils_test import NO_AMM, async_poll_for

import gpuspill
from tests.distributed.clusters import all_spilled, at_rest

#: What happened to all :class:`Counted` of this process.
COUNTS: Counter[str] = Counter()

NBYTES = 80_000


class Counted:
    """An array of `nbytes` bytes filled with `number`."""

    def __init__(self, nbytes, number=0):
        self.data = np.full(nbytes // 8, float(number))

    def __sizeof__(self):
        return self.data.nbytes

    def __reduce_ex__(self, protocol):
        COUNTS["pickled"] += 1
        return _counted, (self.data,)


def _counted(data):
    COUNTS["unpickled"] += 1
    value = Counted.__new__(Counted)
    value.data = data
    return value


def total(*values):
    """Sum :class:`Counted`, of which there may be lists."""
    return sum(total(*v) if isinstance(v, list) else float(v.data.sum()) for v in values)


def residency(worker):
    """What must not change when a value is sent: where things are, and what was done to get them there."""
    statistics = worker.data.statistics()
    names = "host_keys disk_keys host_nbytes disk_nbytes spills restores hits misses prefetches deserialize_seconds"
    return {name: getattr(statistics, name) for name in names.split()}


async def spilled(c, *workers, n=1, nbytes=NBYTES):
    """Compute `n` values on the first worker and spill them."""
    xs = [c.submit(Counted, nbytes, i + 1, workers=[workers[0].address], key=f"x-{i}") for i in range(n)]
    await wait(xs)
    async with asyncio.timeout(10):
        # The thread that made a value may hold it for a moment.
        while workers[0].data.statistics().disk_keys < n:
            await all_spilled(*workers)
    COUNTS.clear()
    return xs


async def acquired(s, worker, xs):
    """Make a worker fetch values, and wait until the scheduler knows."""
    s.request_acquire_replicas(worker.address, [x.key for x in xs], stimulus_id="test")
    ws = s.workers[worker.address]
    await async_poll_for(lambda: all(ws in s.tasks[x.key].who_has for x in xs), timeout=10)


async def quiet(worker):
    """Check that sending left nothing behind."""
    await at_rest(worker)
    assert worker._gpuspill.window.used == 0
    assert worker.transfer_outgoing_count == 0


def certificate(directory):
    """Make a certificate and return what makes a cluster use it."""
    key, cert = str(directory / "key.pem"), str(directory / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert]
    subprocess.run([*command, "-subj", "/CN=localhost", "-days", "1"], check=True, capture_output=True)
    roles = {
        f"tls_{role}_{part}": path
        for role in ("scheduler", "worker", "client")
        for part, path in (("key", key), ("cert", cert))
    }
    return Security(tls_ca_file=cert, require_encryption=True, **roles)


@asynccontextmanager
async def pair(protocol="tcp", *, limits=(None, None), security=None, client=None):
    """Start two workers that each have a host limit, or 'stock' for one without gpuspill; yields (c, s, a, b)."""
    security = security or Security()
    with dask.config.set(
        {**NO_AMM, "distributed.worker.memory.target": False, "distributed.worker.memory.spill": False}
    ):
        address = "inproc://" if protocol == "inproc" else f"{protocol}://127.0.0.1"
        async with Scheduler(
            host=None if protocol == "inproc" else address,
            protocol=protocol,
            port=0,
            dashboard_address=":0",
            security=security,
        ) as s:
            workers = []
            try:
                for number, limit in enumerate(limits):
                    data = None if limit == "stock" else gpuspill.data(host_limit=limit)
                    workers.append(
                        await Worker(
                            s.address,
                            name=number,
                            nthreads=1,
                            data=data,
                            memory_limit=2**40,
                            security=security,
                            validate=True,
                        )
                    )
                async with Client(s.address, asynchronous=True, security=security, **(client or {})) as c:
                    yield c, s, *workers
            finally:
                for worker in workers:
                    await worker.close()
