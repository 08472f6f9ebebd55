"""Every private part of distributed that gpuspill relies on, one test each: when one changes, its test says which.

The second half takes hooks away and checks that results stay right.
"""

from __future__ import annotations

import ast
import inspect
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path

import distributed
import numpy as np
import pytest
from dask._task_spec import DataNode, GraphNode, Task
from distributed import Client, Worker, wait
from distributed import worker_state_machine as wsm
from distributed.collections import HeapSet
from distributed.comm.core import connect
from distributed.core import _expects_comm
from distributed.threadpoolexecutor import ThreadPoolExecutor
from distributed.utils_test import NO_AMM, gen_cluster, inc
from distributed.worker_memory import WorkerMemoryManager

import gpuspill
from gpuspill.distributed import internals
from gpuspill.distributed import worker as hooks
from gpuspill.distributed.attach import attach
from tests.distributed.clusters import all_spilled, at_rest

PACKAGE = Path(gpuspill.__file__).parent / "distributed"


# -- what is relied on ---------------------------------------------------------------------------


def test_all_hooks_fit_this_version():
    assert internals.missing_hooks(Worker) == {}


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (Worker.execute, ["self", "key", "stimulus_id"]),
        (Worker.get_data, ["self", "comm", "keys", "who", "serializers"]),
        (Worker.gather_dep, ["self", "worker", "to_gather", "total_nbytes", "stimulus_id"]),
        (Worker._get_client, ["self", "timeout"]),
        (Client._gather, ["self", "futures", "errors", "direct", "local_worker"]),
        (Client._scatter, ["self", "data", "workers", "broadcast", "direct", "local_worker", "timeout", "hash"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_signature(method, parameters):
    assert list(inspect.signature(method).parameters) == parameters
    assert inspect.iscoroutinefunction(inspect.unwrap(method)) is (method is not Worker._get_client)


def test_get_data_is_given_its_comm_by_name():
    hooked = hooks.spilling_class(Worker)
    assert _expects_comm(hooked.get_data.__get__(object())) is True


def test_worker_data_is_a_property_over_the_memory_manager():
    assert isinstance(inspect.getattr_static(Worker, "data"), property)
    assert "self.memory_manager.data" in inspect.getsource(Worker.data.fget)


def source_of(function):
    return inspect.getsource(inspect.unwrap(function))


def test_the_three_readers_of_values():
    assert "self.data[dkey]" in source_of(Worker.execute)
    assert "self.data[k] for k in keys if k in self.data" in source_of(Worker.get_data)
    assert "local_worker.data[k] for k in keys if k in local_worker.data" in source_of(Client._gather)
    # Nothing else of the worker reads values by key.
    module = ast.parse(Path(inspect.getfile(Worker)).read_text())
    reads = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "data"
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    ]
    assert len(reads) == 2


def test_the_state_machine_never_reads_values():
    source = Path(inspect.getfile(wsm)).read_text()
    module = ast.parse(source)
    contexts = {
        type(node.ctx).__name__
        for node in ast.walk(module)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "self.data"
    }
    assert contexts == {"Store", "Del"}


def test_run_spec_is_a_node_that_is_called_with_a_dictionary():
    node = Task("x", inc, 1)
    assert isinstance(node, GraphNode)
    assert node({}) == 2
    assert node.is_coro is False
    assert isinstance(DataNode("y", 1), GraphNode)
    assert {"key", "_dependencies"} <= set(GraphNode.__slots__)


def test_fields_of_a_task():
    names = {field.name for field in fields(wsm.TaskState)}
    assert names >= internals._TASK_FIELDS


def test_slots_of_the_state():
    assert set(wsm.WorkerState.__slots__) >= internals._STATE_SLOTS


def test_events_and_messages():
    error = wsm.ExecuteFailureEvent.from_exception(ValueError(), key="x", run_id=1, stimulus_id="s")
    assert isinstance(error, wsm.ExecuteDoneEvent)
    assert wsm.RescheduleEvent(key="x", stimulus_id="s").key == "x"
    assert wsm.FreeKeysEvent(keys=["x"], stimulus_id="s").keys == ["x"]
    assert wsm.RescheduleMsg(key="x", stimulus_id="s").to_dict()["op"] == "reschedule"
    assert "nbytes" in {field.name for field in fields(wsm.ExecuteSuccessEvent)}


def test_scheduler_takes_what_the_worker_sends():
    for handler in (distributed.Scheduler._reschedule, distributed.Scheduler.release_worker_data):
        assert list(inspect.signature(handler).parameters) == ["self", "key", "worker", "stimulus_id"]


@gen_cluster(nthreads=[])
async def test_scheduler_answers_what_the_worker_asks(s):
    assert {"who_has", "get_runspec"} <= set(s.handlers)


def test_thread_pools_are_told_by_their_name():
    assert '"ThreadPoolExecutor" in str(type(e))' in source_of(Worker.execute)
    executor = ThreadPoolExecutor(1)
    executor.submit = executor.submit  # can be replaced on the instance
    executor.shutdown()


def test_ready_tasks_are_in_a_heap():
    class Item:
        def __init__(self, n):
            self.n = n

    items = [Item(n) for n in (3, 1, 2)]
    heap = HeapSet(key=lambda item: item.n)
    for item in items:
        heap.add(item)
    key, _, ref = heap._heap[0]
    assert key == 1
    assert ref() is items[1]


def test_attributes_of_the_memory_manager():
    source = source_of(WorkerMemoryManager.__init__)
    names = "memory_limit memory_target_fraction memory_spill_fraction max_spill memory_monitor_interval"
    for name in names.split():
        assert f"self.{name} = " in source or f"self.{name}: " in source


def test_memory_monitor_keeps_away_from_a_store_that_evicts_by_itself():
    source = source_of(WorkerMemoryManager._maybe_spill)
    assert 'not hasattr(self.data, "fast") or not hasattr(self.data, "evict")' in source


def test_handshake_can_carry_a_flag():
    assert "handshake_overrides" in inspect.signature(connect).parameters


@gen_cluster(nthreads=[("", 1)])
async def test_attributes_of_a_worker(s, a):
    assert a.handlers["get_data"] == a.get_data
    assert a.handlers["terminate"] == a.close
    assert a.stream_handlers["close"] == a.close
    assert a.plugins is a.state.plugins
    assert isinstance(a.metrics, dict)
    assert a in Worker._instances
    assert a.rpc.connection_args is not None
    for name in ("executors", "periodic_callbacks", "transfer_outgoing_count", "transfer_outgoing_count_limit"):
        assert hasattr(a, name)
    assert a.monitor.get_process_memory() > 0


def test_class_of_a_worker_can_be_changed():
    class Other(Worker):
        pass

    worker = object.__new__(Worker)
    worker.__class__ = Other
    worker.__class__ = hooks.spilling_class(Other)
    assert type(worker).__name__ == "Other"
    assert isinstance(worker, Other)


def test_classes_are_made_once():
    hooked = hooks.spilling_class(Worker)
    assert hooks.spilling_class(Worker) is hooked
    assert hooks.spilling_class(hooked) is hooked
    assert (hooked.__name__, hooked.__module__, hooked.__qualname__) == (Worker.__name__, Worker.__module__, "Worker")
    assert hooked.gather_dep.__qualname__ == "Worker.gather_dep"


def test_frames_are_hidden_by_the_name_of_the_file():
    assert Path(hooks.__file__).parts[-2:] == ("distributed", "worker.py")


def test_private_parts_are_used_in_two_modules_only():
    """What a new release of distributed may break is all in one place."""
    private = (
        ".memory_manager",
        ".run_spec",
        "._gather",
        "._scatter",
        "._get_client",
        ".handlers",
        ".connection_args",
        ".executors",
        ".handle_stimulus",
        ".batched_send",
        "._instances",
        "._heap",
        "._slow_uncached",
        "worker_state_machine",
        "_offload_executor",
        "_task_spec",
    )
    for path in PACKAGE.glob("*.py"):
        if path.name in ("worker.py", "internals.py"):
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):  # the docstrings may name them
            if isinstance(node, ast.Attribute) and "getLogger" not in ast.unparse(node):
                assert f".{node.attr}" not in private or path.name == "attach.py", (path.name, node.attr)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                text = ast.unparse(node)
                assert not any(name in text for name in private), (path.name, text)


# -- what stands for a task ----------------------------------------------------------------------


class FakeJob:
    def fill(self, values):
        return {key: value * 10 for key, value in values.items()}


def test_unproxied():
    import pickle

    task = Task("y", lambda x: x + 1, distributed.client.TaskRef("x"))
    node = hooks.Unproxied(task, FakeJob())
    assert isinstance(node, GraphNode)
    assert node({"x": 1}) == 11
    assert node.key == "y"
    assert node.dependencies == {"x"}
    assert node.is_coro is False
    assert repr(node) == repr(task)
    task = Task("y", inc, distributed.client.TaskRef("x"))
    assert type(pickle.loads(pickle.dumps(hooks.Unproxied(task, FakeJob())))) is Task


def test_executors_that_prepare():
    threads = ThreadPoolExecutor(1)
    assert hooks._prepares_inputs(threads)
    submit = threads.submit
    assert hooks._prepares_inputs(threads)
    assert threads.submit is submit
    assert threads.submit(inc, 1).result() == 2
    threads.shutdown()
    with ProcessPoolExecutor(1) as processes:
        assert not hooks._prepares_inputs(processes)
    assert not hooks._prepares_inputs(distributed.utils._offload_executor)
    assert not hooks._prepares_inputs(None)

    class ThreadPoolExecutorWithSlots:
        __slots__ = ()

        def submit(self):
            pass

    assert not hooks._prepares_inputs(ThreadPoolExecutorWithSlots())


# -- without a hook ------------------------------------------------------------------------------

ALL = ["data", "execute", "get_data", "gather_dep", "_get_client", "close"]


def misfit(name):
    """A worker class in which one hook does not fit."""

    async def coroutine(self, something, quite, different):
        raise NotImplementedError

    class Changed(Worker):
        pass

    setattr(Changed, name, coroutine)
    return Changed


@pytest.mark.parametrize("name", ["execute", "get_data", "gather_dep", "_get_client"])
def test_a_hook_that_does_not_fit_is_named_and_left_out(name):
    base = misfit(name)
    problems = internals.missing_hooks(base)
    assert list(problems) == [name]
    assert "different" in problems[name]
    assert name not in vars(hooks.spilling_class(base))


def test_the_property_does_not_fit():
    class Changed(Worker):
        data = None

    problems = internals.missing_hooks(Changed)
    assert set(problems) == {"data", "execute", "get_data"}


def test_the_state_does_not_fit(monkeypatch):
    monkeypatch.setattr(internals, "_TASK_FIELDS", {"no_such_field"})
    assert "no_such_field" in internals.missing_hooks(Worker)["execute"]


def test_close_that_is_not_there():
    class Changed(Worker):
        close = None

    assert "close" in internals.missing_hooks(Changed)


@pytest.mark.cluster
@pytest.mark.parametrize("missing", [*([name] for name in ALL), ALL], ids=str)
def test_results_are_right_without_hooks(missing, monkeypatch, caplog):
    monkeypatch.setattr(internals, "missing_hooks", lambda base: dict.fromkeys(missing, "taken away by the test"))
    monkeypatch.setattr(hooks, "missing_hooks", internals.missing_hooks)
    hooks.spilling_class.cache_clear()

    @gen_cluster(client=True, nthreads=[("", 1)] * 2, config={**NO_AMM, "gpuspill.host-limit": 1})
    async def body(c, s, a, b):
        for worker in (a, b):
            attach(worker)
        x = c.submit(np.ones, 1000, workers=[a.address])
        y = c.submit(np.ones, 2000, workers=[b.address])
        await wait([x, y])

        async def later(x, y):
            return x.sum() + y.sum()

        def nested(x):
            with distributed.worker_client() as client:
                return client.submit(np.sum, x).result()

        for worker in (a, b):
            await all_spilled(a, b)
            assert await c.submit(lambda x, y: x.sum() + y.sum(), x, y, workers=[worker.address], pure=False) == 3000
            await all_spilled(a, b)
            assert await c.submit(later, x, y, workers=[worker.address], pure=False) == 3000
            await all_spilled(a, b)
            assert await c.submit(nested, x, workers=[worker.address], pure=False) == 1000
        for worker in (a, b):
            await at_rest(worker)

    try:
        body()
    finally:
        hooks.spilling_class.cache_clear()
    for name in missing:
        assert f"{name} does not fit this version of distributed" in caplog.text
