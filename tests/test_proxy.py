"""A handle is a handle here, and the value itself wherever it goes."""

import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest

from gpuspill.errors import DataLostError
from gpuspill.manager.proxy import Proxy
from gpuspill.testing.managers import ManagerKit

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    value: Any


@pytest.fixture
def kit() -> Iterator[ManagerKit]:
    kit = ManagerKit()
    yield kit
    kit.close()


class Stranger(pickle.Unpickler):
    """Knows nothing of gpuspill."""

    def find_class(self, module: str, name: str) -> Any:
        assert not module.startswith("gpuspill"), f"needs {module}.{name}"
        return super().find_class(module, name)


def travel(value: Any, protocol: int = 5) -> Any:
    return Stranger(io.BytesIO(pickle.dumps(value, protocol=protocol))).load()


@pytest.mark.parametrize("where", ["in memory", "on disk"])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_it_travels_as_its_value(kit, where, protocol):
    kit.manager.store("a", {"content": [1, 2]})
    proxy = kit.manager.proxy("a")
    if where == "on disk":
        kit.spill("a")
    assert travel(proxy, protocol) == {"content": [1, 2]}
    assert pickle.loads(cloudpickle.dumps(proxy)) == {"content": [1, 2]}
    assert kit.manager.get("a") == {"content": [1, 2]}
    assert kit.manager.statistics().spills == (where == "on disk"), "pickling has no side effects"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda proxy: [proxy, 1],
        lambda proxy: (proxy,),
        lambda proxy: {"key": {"deep": proxy}},
        lambda proxy: OrderedDict(a=proxy),
        lambda proxy: Pair(proxy, 2),
        lambda proxy: Record(proxy),
        lambda proxy: [[[proxy]]],
    ],
)
def test_it_travels_as_its_value_inside_containers(kit, wrap):
    value = [1, "two"]
    kit.manager.store("a", value)
    travelled = travel(wrap(kit.manager.proxy("a")))
    assert travelled == wrap(value)
    assert type(travelled) is type(wrap(value))


def test_one_value_stays_one(kit):
    value = [1, 2]
    kit.manager.store("a", value)
    proxy = kit.manager.proxy("a")
    first, second, third = travel([proxy, value, proxy])
    assert first is second is third


def test_large_buffers_stay_out_of_band(kit):
    kit.manager.store("a", np.arange(1000.0))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps([kit.manager.proxy("a")], protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000
    assert [buffer.raw().nbytes for buffer in buffers] == [8000]
    (array,) = pickle.loads(data, buffers=buffers)
    assert np.shares_memory(array, kit.manager.get("a")), "the original was neither copied nor moved"
    for buffer in buffers:
        buffer.release()


def test_copies(kit):
    value = [[1]]
    kit.manager.store("a", value)
    proxy = kit.manager.proxy("a")
    assert copy.copy(proxy) is value
    deep = copy.deepcopy(proxy)
    assert deep == value
    assert deep is not value
    assert deep[0] is not value[0]


def test_it_does_not_pretend_to_be_the_value(kit):
    kit.manager.store("a", [1, 2])
    proxy = kit.manager.proxy("a")
    assert type(proxy) is proxy.__class__ is Proxy
    assert not isinstance(proxy, list)
    for attempt in (len, iter, lambda p: p[0], lambda p: p + 1, lambda p: p.append):
        with pytest.raises((TypeError, AttributeError)):
            attempt(proxy)
    assert proxy != [1, 2]
    assert bool(proxy)
    assert hash(proxy) == hash(proxy)
    assert "'a'" in repr(proxy)
    with pytest.raises(AttributeError):
        proxy.anything = 1  # type: ignore[attr-defined]


def test_looking_at_a_proxy_reads_nothing(kit):
    kit.manager.store("a", [1], 123)
    kit.spill("a")
    proxy = kit.manager.proxy("a")
    assert (proxy.key, proxy.nbytes) == ("a", 123)
    repr(proxy), bool(proxy), hash(proxy), proxy == 1
    assert kit.store.statistics().reads == 0
    assert proxy.resolve() == [1]


def test_it_stands_for_what_the_key_held_then(kit):
    kit.manager.store("a", ["old"])
    kit.manager.store("b", kit.manager.get("a"))
    proxy = kit.manager.proxy("a")
    kit.manager.store("a", ["new"])
    assert proxy.resolve() == ["old"], "another key keeps it"
    kit.manager.discard("b")
    for attempt in (proxy.resolve, lambda: proxy.nbytes, lambda: pickle.dumps(proxy)):
        with pytest.raises(KeyError, match="'a'"):
            attempt()
    assert kit.manager.get("a") == ["new"]


def test_a_pin_keeps_what_it_stands_for(kit):
    kit.manager.store("a", ["old"])
    proxy = kit.manager.proxy("a")
    with kit.manager.admission.pin(["a"]):
        kit.manager.discard("a")
        assert proxy.resolve() == ["old"]
    with pytest.raises(KeyError):
        proxy.resolve()


def test_a_lost_one_says_so_wherever_it_goes(kit):
    kit.manager.store("a", ["lost"])
    kit.spill("a")
    proxy = kit.manager.proxy("a")
    kit.store.delete(kit.manager._metadata.slots[proxy.pid].receipt)
    for attempt in (proxy.resolve, lambda: pickle.dumps([proxy])):
        with pytest.raises(DataLostError) as caught:
            attempt()
        assert caught.value.key == "a"


def test_errors_travel(kit):
    """They are raised on a worker and caught at a client."""
    error = pickle.loads(pickle.dumps(DataLostError("what happened", ("x", 1))))
    assert (type(error), error.key, error.message, str(error)) == (
        DataLostError,
        ("x", 1),
        "what happened",
        "what happened",
    )
