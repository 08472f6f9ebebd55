"""Reading and steering the inside of a distributed worker.

Together with :mod:`gpuspill.distributed.worker`, which holds what is overridden, this is all that
gpuspill knows of distributed beyond its documented interface. Every name used here is one that a
release of distributed may change; ``tests/distributed/test_hooks.py`` says which one it was.
"""

from __future__ import annotations

import heapq
import inspect
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, MutableMapping
from dataclasses import fields
from time import time
from typing import TYPE_CHECKING, Any

import distributed
from dask._task_spec import Alias
from distributed import Status
from distributed import worker_state_machine as wsm
from distributed.comm.addressing import get_address_host
from distributed.protocol.serialize import ToPickle
from distributed.spill import SpillBuffer
from distributed.worker import thread_state  # type: ignore[attr-defined]
from tornado.ioloop import PeriodicCallback

from gpuspill.core.sizes import as_nbytes
from gpuspill.distributed.memory import Thresholds

if TYPE_CHECKING:
    from gpuspill.config import Settings
    from gpuspill.core.policy import Order
    from gpuspill.distributed.mapping import SpillStore
    from gpuspill.distributed.task_inputs import TaskInputs

__all__ = [
    "add_periodic_callback",
    "announce",
    "current_store",
    "find_worker",
    "forget_lost",
    "in_use",
    "inputs_of",
    "is_busy",
    "known_of",
    "max_spill",
    "missing_hooks",
    "next_use",
    "passes_on",
    "recover",
    "replace_data",
    "running_here",
    "speaks_gpuspill",
    "swap_class",
    "thresholds",
    "unfinished",
    "upcoming",
    "urgency",
]

logger = logging.getLogger("gpuspill")

_EXECUTED = frozenset({"executing", "long-running"})

_RUNNING = (Status.running, Status.paused, Status.closing_gracefully)

#: What workers with gpuspill tell each other when they connect; they understand each other if it is
#: the same.
PROTOCOL_VERSION = 2


# -- tasks ---------------------------------------------------------------------------------------


def inputs_of(worker: Any, ts: Any) -> list[Hashable]:
    """Return the keys of a task's inputs, but for actors, which are not in the store."""
    actors = worker.state.actors
    if actors:
        return [dep.key for dep in ts.dependencies if dep.key not in actors]
    return [dep.key for dep in ts.dependencies]


def in_use(worker: Any, keys: Collection[Hashable]) -> bool:
    """Return whether a running task has the value of one of `keys` in hand. From any thread."""
    state = worker.state
    found = [ts for key in keys if (ts := state.tasks.get(key)) is not None]
    # Copied first, in one step: on the event loop tasks begin and end meanwhile.
    running = [*state.executing, *state.long_running] if found else ()
    return any(ts in task.dependencies for task in running for ts in found)


def next_use(worker: Any, key: Hashable) -> tuple[Order, tuple[Hashable, ...]] | None:
    """Return priority and inputs of a task that the worker was given; None if it has no inputs."""
    ts = worker.state.tasks.get(key)
    if ts is None or not ts.dependencies or ts.priority is None:
        return None
    return ts.priority, tuple(inputs_of(worker, ts))


def upcoming(worker: Any, count: int) -> Iterator[Iterable[Hashable]]:
    """Yield the inputs of the `count` tasks that run next, in the order of their priorities.

    Walks down from the top of the heap of ready tasks: ``HeapSet.peekn`` sorts all of it, which
    takes milliseconds for thousands of tasks.
    """
    ready = worker.state.ready
    heap = ready._heap
    frontier = [(heap[0], 0)] if heap else []
    while frontier and count > 0:
        (_, _, ref), index = heapq.heappop(frontier)
        ts = ref()
        if ts is not None and ts in ready:
            count -= 1
            yield inputs_of(worker, ts)
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))


def urgency(worker: Any, keys: Iterable[Hashable], source: str | None = None) -> Order:
    """Return how urgent it is to have the values of some keys.

    They are as urgent as the most urgent task here that waits for one of them. If no priority is
    known it is the empty one, which goes before all others.

    Parameters
    ----------
    source
        The worker that they come from. distributed asks a worker for one message at a time, so what
        else it is going to be asked for waits for this one, too.
    """
    state = worker.state
    wanted = [ts for key in keys if (ts := state.tasks.get(key)) is not None]
    if source is not None and source in state.data_needed and state.data_needed[source]:
        wanted.append(state.data_needed[source].peek())
    return min((ts.priority for want in wanted for ts in (want, *want.waiters) if ts.priority), default=())


def running_here() -> Hashable | None:
    """Return the key of the task that the calling thread runs; None if it runs none."""
    return getattr(thread_state, "key", None)


def known_of(worker: Any, key: Hashable) -> tuple[int | None, str | None]:
    """Return what is known of a value that is about to be stored.

    Returns
    -------
    nbytes
        Its size in bytes. The worker knows it from the task's thread, or from the scheduler if the
        value comes from another worker; else it is None.
    prefix
        The kind of the task that has just returned it here; None if it came from elsewhere.
    """
    ts = worker.state.tasks.get(key)
    if ts is None:
        return None, None
    if ts.nbytes is not None:
        # Before distributed adds it up and sends it: what ``sizeof`` returned may be none.
        ts.nbytes = as_nbytes(ts.nbytes)
    return ts.nbytes, ts.prefix if ts.state in _EXECUTED else None


def passes_on(worker: Any, key: Hashable) -> bool:
    """Return whether a task is another name for its input; it runs no code."""
    ts = worker.state.tasks.get(key)
    return ts is not None and type(ts.run_spec) is Alias


def is_busy(worker: Any, comm: Any) -> bool:
    """Return whether ``Worker.get_data`` will answer "busy", so needs no reads."""
    limit = worker.transfer_outgoing_count_limit
    if worker.status == Status.paused:
        limit = 1
    elif limit is not False and get_address_host(comm.peer_address) == get_address_host(worker.address):
        limit *= 2
    return limit is not False and worker.transfer_outgoing_count >= limit


# -- lost values ---------------------------------------------------------------------------------


async def recover(worker: Any, key: Any) -> bool:
    """Find out whether a value that is lost can be had again; if so, give it up here so that it is.

    Returns
    -------
    bool
        Whether it can. If not, the key stays: its readers get
        :exc:`~gpuspill.errors.DataLostError`.
    """
    ts = worker.state.tasks.get(key)
    if ts is None or key not in worker.data:
        return True  # given up already
    if ts.run_spec is None and not await _obtainable(worker, key):
        return False
    forget_lost(worker, key)
    return True


async def _obtainable(worker: Any, key: Any) -> bool:
    """Ask whether another worker has `key`, and whether the scheduler knows how to compute it."""
    try:
        holders = await worker.scheduler.who_has(keys=[key])
        for address in set(holders.get(key, ())) - {worker.address}:
            if await _holds(worker, address, key):
                return True
        found = await worker.scheduler.get_runspec(key=key)
        # Within a process nothing is serialised: it comes in the wrapper in which it was sent.
        return (found.data if isinstance(found, ToPickle) else found) is not None
    except Exception:  # unknown to the scheduler, or no answer: giving it up is right or harmless
        logger.debug("could not ask the scheduler about %r", key, exc_info=True)
        return True


async def _holds(worker: Any, address: str, key: Any) -> bool:
    """Ask another worker whether it has `key` and has not found it lost.

    The scheduler does not know the latter. Of two workers that find the loss at once, each would
    give up its copy for the other. Tasks that wait for a value without a copy and without a recipe
    break the scheduler connection to the worker.
    """
    try:
        # A worker without gpuspill does not know the question, and answers None.
        return await worker.rpc(address).gpuspill_holds(key=key) is not False
    except OSError:
        return False  # it is gone


def answer_who_holds(worker: Any, holds: Callable[[Hashable], bool]) -> None:
    """Let other workers ask this one whether it has a key that is not lost."""
    worker.handlers["gpuspill_holds"] = holds


def forget_lost(worker: Any, key: Any) -> None:
    """Give up a lost value: tell the scheduler, and take back tasks that need it.

    To be called on the event loop.

    Tasks that are running have their inputs, or find out by themselves. Those that have not begun
    are released and rescheduled; the scheduler computes the value anew, or sends them to where
    another copy is.
    """
    ts = worker.state.tasks.get(key)
    if ts is None or ts.state != "memory":
        worker.data.pop_quietly(key)
        return
    logger.warning("gave up %r, whose value is lost; the scheduler was told", key)
    dependents = [dep.key for dep in ts.dependents if dep.state in ("waiting", "ready", "constrained")]
    stimulus_id = f"gpuspill-lost-{time()}"
    # In one event, so that no task can start in between.
    worker.handle_stimulus(wsm.FreeKeysEvent(keys=[*dependents, key], stimulus_id=stimulus_id))
    for dependent in dependents:
        worker.batched_send(wsm.RescheduleMsg(key=dependent, stimulus_id=stimulus_id).to_dict())


async def lost_input(worker: Any, key: Any, run_id: int, job: TaskInputs) -> Any:
    """Return the event that ends a task one of whose inputs turned out to be lost."""
    stimulus_id = f"gpuspill-lost-input-{time()}"
    if job.lost is None or (not job.final and await recover(worker, job.lost.key)):
        return wsm.RescheduleEvent(key=key, stimulus_id=stimulus_id)
    return wsm.ExecuteFailureEvent.from_exception(job.lost, key=key, run_id=run_id, stimulus_id=stimulus_id)


def announce(worker: Any) -> None:
    """Tell everybody to whom the worker opens a connection that it has gpuspill."""
    args = worker.rpc.connection_args
    overrides = {**args.get("handshake_overrides", {}), "gpuspill": PROTOCOL_VERSION}
    worker.rpc.connection_args = {**args, "handshake_overrides": overrides}
    worker.rpc.collect()  # idle connections were opened without it


def speaks_gpuspill(comm: Any) -> bool:
    """Return whether the other side of a connection has gpuspill."""
    return bool(comm.remote_info.get("gpuspill") == PROTOCOL_VERSION)


# -- settings ------------------------------------------------------------------------------------


def thresholds(worker: Any, settings: Settings) -> Thresholds:
    """Return the memory settings; a store's own limit overrides ``target``."""
    manager = worker.memory_manager
    return Thresholds(
        memory_limit=manager.memory_limit,
        target=manager.memory_target_fraction,
        spill=manager.memory_spill_fraction if settings.follow_process_memory else False,
        host_limit=settings.host_limit,
    )


def max_spill(worker: Any, settings: Settings) -> int | None:
    """Return the most bytes that may be on disk; None for no limit."""
    if settings.max_spill != "auto":
        return settings.max_spill
    return worker.memory_manager.max_spill or None


def process_memory(worker: Any) -> int:
    """Return the process's memory in bytes, as distributed measures it."""
    nbytes: int = worker.monitor.get_process_memory()
    return nbytes


# -- attaching -----------------------------------------------------------------------------------


def called(worker: Any) -> str:
    """Return a worker's name for messages: its address once it listens."""
    try:
        name = worker.address
    except ValueError:
        name = worker.name
    return "this worker" if name is None else f"worker {name}"


def find_worker(store: object) -> Any | None:
    """Return the worker of this process whose data `store` is."""
    for worker in list(distributed.Worker._instances):
        if worker.memory_manager.data is store:
            return worker
    return None


def current_store() -> SpillStore | None:
    """Return the store of the worker whose task runs here, or of the only one here.

    In a forked child those of its parent are none.
    """
    from gpuspill.distributed.mapping import SpillStore

    try:
        workers = [distributed.get_worker()]
    except ValueError:
        workers = list(distributed.Worker._instances)
    stores = [worker.memory_manager.data for worker in workers if worker.status in _RUNNING]
    found = [store for store in stores if isinstance(store, SpillStore) and not store.manager.inherited]
    return found[0] if len(found) == 1 else None


def swap_class(worker: Any, new: type) -> None:
    """Give a running worker the class `new`, and renew places with old methods."""
    if type(worker) is not new:
        worker.__class__ = new
    worker.handlers["get_data"] = worker.get_data
    worker.handlers["terminate"] = worker.close
    worker.stream_handlers["close"] = worker.close


def replace_data(worker: Any, store: SpillStore) -> None:
    """Put `store` in the place of the worker's data."""
    worker.memory_manager.data = store
    worker.state.data = store


def add_periodic_callback(worker: Any, name: str, callback: Callable[[], None]) -> None:
    """Call `callback` whenever a running worker monitors its memory."""
    old = worker.periodic_callbacks.pop(name, None)
    if old is not None:
        old.stop()
    interval = worker.memory_manager.memory_monitor_interval
    if not interval:
        return
    worker.periodic_callbacks[name] = periodic = PeriodicCallback(callback, interval * 1000)
    if worker.status in (Status.running, Status.paused, Status.closing_gracefully):
        periodic.start()


def unpack_spill_buffer(
    data: SpillBuffer,
) -> tuple[dict[Any, object], dict[Any, tuple[int, int]], MutableMapping[Any, Any]]:
    """Empty a ``SpillBuffer`` without reading anything from disk.

    Returns
    -------
    resident
        Values in memory by key.
    spilled
        Sizes in memory and on disk, in bytes, of the values on disk, by key.
    files
        What reads and deletes those. The buffer does not know them any more.
    """
    slow = data._slow_uncached
    resident = {key: data.fast.d[key] for key in list(data.fast)}
    spilled = {key: (size.memory, size.disk) for key, size in slow.weight_by_key.items()}
    for key in resident:
        del data.fast[key]
    return resident, spilled, slow.d


def unfinished(worker: Any) -> Iterator[Hashable]:
    """Yield the tasks that the worker was given and that have not ended when their turn comes."""
    for ts in list(worker.state.tasks.values()):
        if ts.state in ("waiting", "ready", "constrained", "executing", "long-running"):
            yield ts.key


# -- checks --------------------------------------------------------------------------------------

_TASK_FIELDS = {
    "annotations",
    "dependencies",
    "dependents",
    "key",
    "nbytes",
    "prefix",
    "priority",
    "run_id",
    "run_spec",
    "startstops",
    "state",
    "waiters",
}
_STATE_SLOTS = {"tasks", "actors", "ready", "data", "data_needed", "executing", "long_running"}

#: How each hook calls what it overrides.
_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "execute": ((None, "key"), {"stimulus_id": ""}),
    "get_data": ((None, None, []), {"who": None, "serializers": None}),
    "gather_dep": ((None, "", [], 0), {"stimulus_id": ""}),
    "_get_client": ((None,), {"timeout": None}),
    "update_data": ((None, {}), {"stimulus_id": None}),
    "_update_metrics_received_data": ((None, 0.0, 0.0, {}, None, ""), {}),
    "close": ((None,), {}),
}


def missing_hooks(base: type) -> dict[str, str]:
    """Return the hooks that do not fit a worker class, and for each what was found in its place.

    Parameters
    ----------
    base
        ``distributed.Worker`` or a subclass.
    """
    found = {name: problem for name, call in _CALLS.items() if (problem := _misfit(getattr(base, name, None), *call))}
    if not isinstance(inspect.getattr_static(base, "data", None), property):
        found["data"] = "Worker.data is not a property"
    absent = _TASK_FIELDS - {field.name for field in fields(wsm.TaskState)}
    absent |= _STATE_SLOTS - set(wsm.WorkerState.__slots__)
    if absent:
        found["execute"] = f"the worker's state has no {', '.join(sorted(absent))}"
    if "data" in found:
        # Without it no one would see the values that were prepared.
        for name in ("execute", "get_data"):
            found.setdefault(name, found["data"])
    client = distributed.Client
    problem = _misfit(client._gather, (None, []), {"errors": "", "direct": None, "local_worker": None})
    problem = problem or _misfit(client._scatter, (None, []), {})
    if problem:
        found["_get_client"] = problem
    return found


def _misfit(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if function is None:
        return "it does not exist"
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return f"{function.__qualname__}{inspect.signature(function)}: {error}"
    return None
