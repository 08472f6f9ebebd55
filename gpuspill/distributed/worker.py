"""The hooks: what gpuspill overrides in distributed's worker.

Three places in distributed read *values* on the event loop: ``Worker.execute``, ``Worker.get_data``
and ``Client._gather`` with a local worker. A subclass of the worker's own class wraps each of them:
it brings the values into memory first, without holding the loop, and shows them through
``worker.data`` in the context of that call only. Everybody else who reads ``worker.data`` sees the
store itself.

A task's inputs are read in the thread that runs it, before distributed starts its clock:
``executor.submit`` is replaced on the instance, and ``ts.run_spec`` by a stand-in that puts the
values in their place. Executors that are not pools of threads, coroutine tasks and the shared
``offload`` pool get plain values instead, read by the store's threads beforehand.

Each hook is checked (:func:`gpuspill.distributed.internals.missing_hooks`). One that does not fit
the installed distributed is left out with a warning, and the store is read the ordinary, blocking
way in its place; results do not change.

Frames of this file are hidden in users' tracebacks and profiles because distributed hides those of
files called ``distributed/worker.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sized
from contextlib import ExitStack, suppress
from contextvars import ContextVar, copy_context
from functools import lru_cache, partial
from time import time
from types import FunctionType
from typing import Any

import distributed
from dask._task_spec import GraphNode
from distributed import Status
from distributed import worker_state_machine as wsm
from distributed.core import context_meter_to_server_digest
from distributed.utils import _offload_executor
from distributed.utils_comm import unpack_remotedata

from gpuspill.core.sizes import as_nbytes
from gpuspill.distributed.attachment import Attachment
from gpuspill.distributed.internals import (
    inputs_of,
    is_busy,
    lost_input,
    missing_hooks,
    recover,
    running_here,
    speaks_gpuspill,
    urgency,
)
from gpuspill.distributed.lost import LostValue, Poison
from gpuspill.distributed.mapping import SpillStore
from gpuspill.distributed.parking import unproxify
from gpuspill.distributed.sending import Parcel, Receiver, pack
from gpuspill.distributed.sizes import Claims, measure
from gpuspill.distributed.task_inputs import TaskInputs, granted, in_turns
from gpuspill.distributed.views import ClosedView, ResidentView, View
from gpuspill.distributed.wire import Form, Wire, real_type
from gpuspill.errors import DataLostError, ManagerClosed, contained
from gpuspill.manager.transaction import BATCH, at_once

__all__ = ["Unproxied", "claims_of", "spilling_class"]

logger = logging.getLogger("gpuspill")

_VIEW: ContextVar[View | None] = ContextVar("gpuspill_view", default=None)
_JOB: ContextVar[TaskInputs | None] = ContextVar("gpuspill_job", default=None)
#: Takes the result of a task apart, in the thread that made it.
_PREPARE: ContextVar[Callable[[Any], None] | None] = ContextVar("gpuspill_prepare", default=None)
_CALLER: ContextVar[Any] = ContextVar("gpuspill_caller", default=None)


# -- the worker's class --------------------------------------------------------------------------


@lru_cache(maxsize=64)  # one class a base, however many workers
def spilling_class(base: Any) -> Any:
    """Return a subclass of a worker class with the hooks that fit it.

    It has the base's name, since it takes the base's place in messages. A mixin would not do: the
    class of an existing worker can only be changed to one with the same layout.
    """
    if getattr(base, "_gpuspill_hooked", False):
        return base

    class Spilling(base):  # type: ignore[misc]
        _gpuspill_hooked = True
        _gpuspill: Attachment | None = None

        def __reduce__(self) -> Any:
            # No worker can be. But pickle looks for its class first, which is not found by its
            # name, and raises what those do not expect who try, as ``dask cuda config`` does.
            raise TypeError("a worker cannot be pickled")

        @property
        def data(self) -> Any:
            store = self.memory_manager.data
            view = _VIEW.get()
            if view is None or view.store is not store:
                return store
            return view if view.values or isinstance(view, ClosedView) else store

        def execute(self, key: Any, *, stimulus_id: str) -> Awaitable[Any]:
            # No coroutine of its own: every task comes by here, and most often there is nothing to
            # do.
            attachment = self._gpuspill
            ts = self.state.tasks.get(key)
            execute = super().execute
            if attachment is None or ts is None or ts.run_spec is None:
                return execute(key, stimulus_id=stimulus_id)  # type: ignore[no-any-return]
            if key not in self.state.actors:  # an actor stays as it is
                if ts.run_spec.is_coro:
                    execute = partial(_execute_coroutine, execute, attachment.store)
                elif attachment.store.tier is not None:
                    execute = partial(_execute_and_prepare, execute, attachment.store)
            if attachment.runs_freely(ts.prefix):
                return execute(key, stimulus_id=stimulus_id)  # type: ignore[no-any-return]
            inputs = inputs_of(self, ts)
            if len(inputs) > BATCH:
                return _execute_with_many_inputs(self, execute, ts, inputs, stimulus_id)
            job = at_once(attachment.admit(ts.key, ts.prefix, inputs, ts.priority or ()))
            if job is None:
                return execute(key, stimulus_id=stimulus_id)  # type: ignore[no-any-return]
            return _execute_admitted(self, execute, ts, job, stimulus_id)

        async def get_data(
            self,
            comm: Any,
            keys: Collection[Any],
            who: str | None = None,
            serializers: list[str] | None = None,
        ) -> Any:
            attachment = self._gpuspill
            if attachment is None or is_busy(self, comm) or _sends_as_it_is(attachment, comm, keys, who, serializers):
                return await super().get_data(comm, keys, who=who, serializers=serializers)
            # Counted as outgoing while values are read, so that a worker that is busy reading is
            # busy for others too.
            self.transfer_outgoing_count += 1
            try:
                parcel = await _pack(self, comm, keys, who, serializers)
            except ManagerClosed:
                # This worker is being closed. The peer has to take it for gone; by an error its
                # task would fail.
                comm.abort()
                return Status.dont_reply
            finally:
                self.transfer_outgoing_count -= 1
            # Those that were given up meanwhile are not here any more for distributed, which looks
            # up their sizes.
            values = {key: value for key, value in parcel.values.items() if key in self.state.tasks}
            token = _VIEW.set(ClosedView(attachment.store, values))
            del values
            try:
                return await super().get_data(comm, keys, who=who, serializers=serializers)
            finally:
                _VIEW.reset(token)
                parcel.release()  # written

        async def gather_dep(
            self, worker: str, to_gather: Collection[Any], total_nbytes: int, *, stimulus_id: str
        ) -> Any:
            attachment = self._gpuspill
            admission = None
            if attachment is not None:
                tasks = self.state.tasks
                incoming = {k: as_nbytes(tasks[k].get_nbytes()) for k in to_gather if k in tasks}
                admission = attachment.expect(incoming, worker)
            try:
                if attachment is not None and admission is not None and not admission.granted:
                    await attachment.askers.wait(admission, to_gather, worker)
                event = await super().gather_dep(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
                if attachment is not None and isinstance(event, wsm.GatherDepSuccessEvent):
                    names = _type_names(event.data)
                    if names:
                        await _decode_resumed(self, event.data)
                        _after_storing(partial(_name_types, self, names))
                return event
            finally:
                if admission is not None:
                    _after_storing(admission.release)

        def update_data(self, data: dict[Any, Any], stimulus_id: str | None = None) -> Any:
            answer = super().update_data(data, stimulus_id=stimulus_id)
            _name_types(self, _type_names(data))
            return answer

        def _update_metrics_received_data(
            self, start: float, stop: float, data: dict[Any, Any], cause: Any, worker: str
        ) -> None:
            super()._update_metrics_received_data(start, stop, data, cause, worker)
            if Wire in self.bandwidth_types:
                rate, count = self.bandwidth_types.pop(Wire)
                names = set(_type_names(data).values())
                if len(names) == 1:
                    kind = real_type(names.pop())
                    known_rate, known_count = self.bandwidth_types[kind]
                    self.bandwidth_types[kind] = (known_rate + rate, known_count + count)

        def _get_client(self, timeout: float | None = None) -> Any:
            client = super()._get_client(timeout=timeout)
            if self._gpuspill is not None:
                self._gpuspill.askers.may_wait(running_here())
                client.__class__ = _gathering_class(client.__class__)
            return client

        async def close(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().close(*args, **kwargs)
            finally:
                if self._gpuspill is not None and self.status in (Status.closed, Status.failed):
                    await self._gpuspill.close()

    for hook in missing_hooks(base):
        if hook in vars(Spilling):
            delattr(Spilling, hook)
    return _disguise(Spilling, base)


def _disguise(new: type, base: type) -> type:
    new.__name__, new.__qualname__ = base.__name__, base.__qualname__
    new.__module__, new.__doc__ = base.__module__, base.__doc__
    for name, method in vars(new).items():
        if isinstance(method, FunctionType):
            method.__qualname__ = f"{base.__qualname__}.{name}"  # coroutines are shown by it
    return new


def _after_storing(action: Callable[[], object]) -> None:
    """Do something once the state machine has stored what the caller returns.

    A callback that is scheduled when the caller's asyncio task ends stores it; a promise of room
    has to last until then.
    """
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, action)


async def _execute_and_prepare(execute: Callable[..., Any], store: SpillStore, key: Any, *, stimulus_id: str) -> Any:
    """Run a task and take its result apart in its thread, not on the event loop.

    The result itself stays what it is: distributed tells the scheduler its type.
    """
    token = _PREPARE.set(partial(store.prepare, key))
    try:
        return await execute(key, stimulus_id=stimulus_id)
    finally:
        _PREPARE.reset(token)
        _after_storing(partial(store.end_preparing, key))


async def _execute_coroutine(execute: Callable[..., Any], store: SpillStore, key: Any, *, stimulus_id: str) -> Any:
    """Run a coroutine task; search its result for handles of parked values, if any.

    What is on a device is taken apart on the loop, whose current stream may be the one that
    computes it.
    """
    event = await execute(key, stimulus_id=stimulus_id)
    if not store.parked or not isinstance(event, wsm.ExecuteSuccessEvent):
        return event
    outcome: dict[str, Any] = {"result": event.value, "nbytes": event.nbytes, "type": event.type}
    try:
        await asyncio.to_thread(_finish, store.claims, None, outcome)
    except Exception as error:
        logger.error("Exception while reading what task %r returned a handle of", key, exc_info=True)
        return wsm.ExecuteFailureEvent.from_exception(
            error, key=key, run_id=event.run_id, stimulus_id=f"gpuspill-result-{time()}"
        )
    event.value, event.nbytes, event.type = outcome["result"], outcome["nbytes"], outcome["type"]
    return event


# -- a task's inputs -----------------------------------------------------------------------------


async def _execute_with_many_inputs(
    worker: Any, execute: Callable[..., Any], ts: Any, inputs: list[Hashable], stimulus_id: str
) -> Any:
    """Admit a task whose inputs are too many for one turn of the event loop, and run it."""
    job = await in_turns(worker._gpuspill.admit(ts.key, ts.prefix, inputs, ts.priority or ()))
    if job is None:
        return await execute(ts.key, stimulus_id=stimulus_id)
    return await _execute_admitted(worker, execute, ts, job, stimulus_id)


async def _execute_admitted(
    worker: Any, execute: Callable[..., Any], ts: Any, job: TaskInputs, stimulus_id: str
) -> Any:
    """Run a task whose inputs are pinned, and for which room was asked."""
    stored = False
    jobs = worker._gpuspill.askers.jobs
    jobs[ts.key] = job
    try:
        if job.ready:
            event = await execute(ts.key, stimulus_id=stimulus_id)
        else:
            event = await _execute_prepared(worker, execute, ts, job, stimulus_id)
        if job.seceded and isinstance(event, wsm.ExecuteSuccessEvent):
            on_device = worker._gpuspill.store.new_nbytes(ts.key, event.value)
            await job.ask_again(ts.key, max(0, as_nbytes(event.nbytes) - on_device))
        stored = isinstance(event, wsm.ExecuteSuccessEvent)
        return event
    finally:
        if jobs.get(ts.key) is job:
            del jobs[ts.key]
        if stored:
            _after_storing(job.release)
        else:
            job.abandon()


async def _execute_prepared(
    worker: Any, execute: Callable[..., Any], ts: Any, job: TaskInputs, stimulus_id: str
) -> Any:
    """Run a task whose inputs have to be brought first, or that has to wait for room."""
    store = worker._gpuspill.store
    spec, run_id = ts.run_spec, ts.run_id
    stand_in = spec
    executor = worker.executors.get((ts.annotations or {}).get("executor", "default"))
    job_token = _JOB.set(None)
    try:
        if not spec.is_coro and _prepares_inputs(executor):
            values = store.manager.proxies(job.admission.pids)
            stand_in = ts.run_spec = Unproxied(spec, job)
            _JOB.set(job)
        else:
            await job.prepare_later()
            try:
                values = job.take()
            except distributed.Reschedule:
                return await lost_input(worker, ts.key, run_id, job)
            except Exception as error:
                logger.error("Exception while reading the inputs of task %r", ts.key, exc_info=True)
                return wsm.ExecuteFailureEvent.from_exception(
                    error, key=ts.key, run_id=run_id, stimulus_id=f"gpuspill-input-{time()}"
                )
        view_token = _VIEW.set(View(store, values))
        try:
            del values
            event = await execute(ts.key, stimulus_id=stimulus_id)
        finally:
            _VIEW.reset(view_token)
    finally:
        _JOB.reset(job_token)
        if ts.run_spec is stand_in:
            ts.run_spec = spec
    if job.started is not None and job.stopped is not None and job.stopped - job.started > 0.005:
        # What distributed notes of slow reads, for the task stream.
        ts.startstops.append({"action": "disk-read", "start": job.started, "stop": job.stopped})
    if job.lost is not None and isinstance(event, wsm.RescheduleEvent):
        return await lost_input(worker, ts.key, run_id, job)
    return event


class Unproxied(GraphNode):
    """Stands for a task whose inputs are proxies until it is called."""

    __slots__ = ("_inner", "_job")

    def __init__(self, inner: GraphNode, job: TaskInputs) -> None:
        self.key = inner.key
        self._dependencies = inner._dependencies
        self._inner = inner
        self._job = job

    def __call__(self, values: Any) -> Any:
        """Run the task on plain values."""
        return self._inner(self._job.fill(values))

    @property
    def is_coro(self) -> bool:
        """As the task's own."""
        return bool(self._inner.is_coro)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> Any:
        # Other processes want the task; what stands for its inputs pickles as their values.
        return _itself, (self._inner,)


def _itself(node: GraphNode) -> GraphNode:
    return node


def _prepares_inputs(executor: Any) -> bool:
    """Make an executor prepare a task's inputs in the thread that runs it. Idempotent.

    What a task returns is asked there, too, for what it claims to have, and taken apart if it may
    be on a device.
    """
    # The test is distributed's own: it decides how the task is run.
    if "ThreadPoolExecutor" not in str(type(executor)) or executor is _offload_executor:
        return False  # messages are (de)serialised by the one offload thread, so nothing may wait in it
    submit = executor.submit
    if getattr(submit, "claims", None) is not None:
        return True
    claims = Claims()

    def prepare_and_submit(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        job, prepare = _JOB.get(), _PREPARE.get()
        if job is None or job.claimed:
            return submit(_run_and_ask, claims, prepare, fn, *args, **kwargs)
        job.claimed = True
        context = copy_context()  # what is read here is booked on the task

        def run() -> Any:
            context.run(job.prepare)
            return _run_and_ask(claims, prepare, fn, *args, **kwargs)

        return submit(run)

    prepare_and_submit.claims = claims  # type: ignore[attr-defined]
    try:
        executor.submit = prepare_and_submit
    except AttributeError:  # it has slots
        return False
    return True


def _run_and_ask(
    claims: Claims, prepare: Callable[[Any], None] | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    outcome = fn(*args, **kwargs)
    if type(outcome) is dict and outcome.get("op") == "task-finished":
        _finish(claims, prepare, outcome)
    return outcome


def _finish(claims: Claims, prepare: Callable[[Any], None] | None, outcome: dict[str, Any]) -> None:
    """Do what a result needs before it is stored and may take its time.

    Values take the place of handles for them, which other tasks know nothing of. Blocks while those
    are read.
    """
    if claims.parked:
        plain = unproxify(outcome["result"])
        if plain is not outcome["result"]:
            outcome.update(result=plain, nbytes=measure(plain), type=type(plain))
    claims.ask(outcome["result"])
    if prepare is not None:
        with contained:  # then storing it meets the same
            prepare(outcome["result"])


def claims_of(executor: Any, parked: Sized) -> Claims | None:
    """Return where an executor notes what results claim to have; None if it does not.

    As long as `parked` is not empty its tasks' results are searched for handles of parked values.
    """
    if not _prepares_inputs(executor):
        return None
    claims: Claims = executor.submit.claims
    claims.parked = parked
    return claims


# -- sending -------------------------------------------------------------------------------------


@context_meter_to_server_digest("get-data")
async def _pack(
    worker: Any, comm: Any, keys: Collection[Any], who: str | None, serializers: Collection[str] | None
) -> Parcel:
    receiver = _receiver(comm, who, serializers)
    return await pack(worker, worker._gpuspill, keys, receiver, partial(_known_type, worker), urgency(worker, keys))


def _sends_as_it_is(
    attachment: Attachment, comm: Any, keys: Collection[Any], who: str | None, serializers: Collection[str] | None
) -> bool:
    """Whether all of `keys` are in memory, stay there, and are sent as distributed sends values."""
    if not attachment.below_low_watermark(keys):
        return False
    if attachment.store.tier is None or not _receiver(comm, who, serializers).keeps_bytes:
        return True
    return not attachment.store.any_on_device(keys)


def _receiver(comm: Any, who: str | None, serializers: Collection[str] | None) -> Receiver:
    """Find out what the other side takes. `who`: a worker's address; None for others."""
    address = str(comm.peer_address)
    knows_us, same_process = speaks_gpuspill(comm), address.startswith("inproc://")
    form: Form = "serialized"
    if serializers is not None or (same_process and not knows_us):
        form = "value"
    elif knows_us:
        form = "wire"
    substitute: Any = None
    if who is not None:
        substitute = LostValue if knows_us else None
    elif not same_process:
        # A client that gets an answer without its key asks again; one in this process does not
        # unpickle.
        substitute = Poison
    return Receiver(
        form,
        # To encrypt them, this process would read the bytes.
        by_system=address.startswith("tcp://"),
        same_process=same_process,
        takes_device_memory=address.startswith(("ucx://", "ucxx://")),
        serializers=serializers,
        substitute=substitute,
        peer=address if who is None else who,
    )


def _known_type(worker: Any, key: Any) -> type | None:
    ts = worker.state.tasks.get(key)
    return None if ts is None or ts.type is Wire else ts.type


# -- receiving -----------------------------------------------------------------------------------


async def _decode_resumed(worker: Any, data: dict[Any, Any]) -> None:
    """Decode what arrived for tasks that were to be computed here meanwhile.

    Their type goes to the scheduler as soon as they are stored. What cannot be decoded stays as it
    is: the task that needs it will be told why.
    """
    store = worker._gpuspill.store
    with ExitStack() as promises:
        for key, value in data.items():
            ts = worker.state.tasks.get(key)
            if type(value) is Wire and ts is not None and ts.state == "resumed":
                if store.tier is not None and value.encoded.device_nbytes:
                    admission = store.tier.admit(key, (), value.encoded.device_nbytes, order=ts.priority or ())
                    promises.callback(_after_storing, admission.release)
                    await granted(admission)
                with suppress(Exception):
                    data[key] = await asyncio.wrap_future(store.manager.batch.decode(value.encoded))


def _name_types(worker: Any, names: Mapping[Any, str]) -> None:
    """Replace what distributed took for the type of values that arrived as bytes."""
    for key, name in names.items():
        ts = worker.state.tasks.get(key)
        if ts is not None and ts.type is Wire:
            ts.type = real_type(name)


def _type_names(data: Mapping[Any, Any]) -> dict[Any, str]:
    return {key: value.type_name for key, value in data.items() if type(value) is Wire}


@lru_cache(maxsize=16)
def _gathering_class(base: Any) -> Any:
    """Return a subclass of a client class that suits a local worker which spills.

    ``gather`` first brings what that has spilled, and ``scatter`` gives it values in the place of
    handles.
    """
    if getattr(base, "_gpuspill_hooked", False):
        return base

    class Gathering(base):  # type: ignore[misc]
        _gpuspill_hooked = True

        def gather(self, *args: Any, **kwargs: Any) -> Any:
            # What runs on the event loop for it takes over the context of this thread, which runs
            # the task.
            token = _CALLER.set(running_here())
            try:
                return super().gather(*args, **kwargs)
            finally:
                _CALLER.reset(token)

        async def _gather(
            self, futures: Any, errors: str = "raise", direct: Any = None, local_worker: Any = None
        ) -> Any:
            if getattr(local_worker, "_gpuspill", None) is not None:
                local_worker = await _LocalWorker.of(local_worker, futures)
            return await super()._gather(futures, errors, direct, local_worker)

        async def _scatter(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            # The local worker would store handles as they are; any other gets the values that they
            # pickle as.
            return await super()._scatter(await asyncio.to_thread(unproxify, data), *args, **kwargs)

    return _disguise(Gathering, base)


class _LocalWorker:
    """What ``Client._gather`` needs of a local worker: its data, as far as it can be had at once.

    What is spilled again meanwhile is asked of the worker as anybody would.
    """

    def __init__(self, data: ResidentView) -> None:
        self.data = data

    @classmethod
    async def of(cls, worker: Any, futures: Any) -> _LocalWorker:
        """Bring the values of `futures` into memory without holding the loop."""
        _, wanted = unpack_remotedata(futures, byte_keys=True)
        store = worker._gpuspill.store
        keys = [future.key for future in wanted]
        caller = worker.state.tasks.get(_CALLER.get())
        order = () if caller is None else caller.priority or ()
        while True:
            try:
                return cls(ResidentView(store, await store.async_get(keys, missing="omit", order=order)))
            except DataLostError as error:
                if not await recover(worker, error.key):
                    raise
