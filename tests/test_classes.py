"""Classes whose metaclasses answer nothing: values of theirs are values like others, and nobody asks."""

from __future__ import annotations

import abc
import ast
import enum
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuspill
from gpuspill import simulated
from gpuspill.classes import ClassTable, attribute_of, is_instance, is_plain, named
from gpuspill.config import Settings
from gpuspill.core.sizes import SizeModel
from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.shared_memory import shared_memory
from gpuspill.distributed.factory import build_store
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray
from gpuspill.walk import replace


class AskedError(BaseException):
    """None that anything would catch by mistake."""


def _asked(*_: Any, **__: Any) -> Any:
    raise AskedError


def _fails(*_: Any, **__: Any) -> Any:
    # Messages of others show classes, among them those that dask raises when it does not know one.
    raise ValueError


#: What a metaclass may define, with what makes trouble if it is used.
HOOKS: dict[str, dict[str, Any]] = {
    "__eq__": {"__eq__": _asked, "__ne__": _asked, "__hash__": type.__hash__},
    "true": {"__eq__": lambda cls, other: ("==", other), "__hash__": lambda cls: hash(list)},
    "no hash": {"__eq__": type.__eq__, "__hash__": None},
    "__hash__": {"__hash__": _asked},
    "__bool__": {"__bool__": _asked, "__len__": _asked},
    "__instancecheck__": {"__instancecheck__": _asked, "__subclasscheck__": _asked},
    "__iter__": {"__iter__": _asked, "__contains__": _asked, "__getitem__": _asked},
    "__call__": {"__call__": _asked},
    "properties": {name: property(_asked) for name in ("__dataclass_fields__", "__cuda_array_interface__", "nbytes")},
    "__repr__": {"__repr__": _fails, "__str__": _fails, "__format__": _fails},
    "__getattr__": {"__getattr__": lambda cls, name: ("made up", name)},
}
METACLASSES: dict[str, type] = {
    name: type(f"Meta{number}", (type,), hooks) for number, (name, hooks) in enumerate(HOOKS.items())
}


def _getattribute(cls: type, name: str) -> Any:
    # NumPy asks the classes of its arrays.
    return type.__getattribute__(cls, name) if name.startswith("__array") else _asked()


METACLASSES["__getattribute__"] = type("MetaAsked", (type,), {"__getattribute__": _getattribute})


def _members() -> dict[str, Any]:
    def answers(self: Any) -> Any:
        raise AskedError

    return {
        "__eq__": answers,
        "__bool__": answers,
        "__len__": answers,
        "__class__": property(answers),
        "__hash__": None,
    }


def make(meta: str, *bases: type, asks: bool = False) -> type:
    """Return a class of a metaclass; with `asks`, one whose objects answer nothing either."""
    return type.__call__(METACLASSES[meta], f"Foreign{meta}", bases or (object,), _members() if asks else {})


@pytest.fixture(params=METACLASSES)
def meta(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["plain", "asks", "list", "dict", "tuple", "array"])
def value(request: pytest.FixtureRequest, meta: str) -> Any:
    """An object of such a class, bare."""
    kinds: dict[str, tuple[Any, ...]] = {"list": (list,), "dict": (dict,), "tuple": (tuple,), "array": (np.ndarray,)}
    bases = kinds.get(request.param, ())
    cls = make(meta, *bases, asks=request.param == "asks")
    return np.ndarray.__new__(cls, (1000,)) if bases == (np.ndarray,) else (*bases, object)[0].__new__(cls)


@pytest.fixture(params=["host", "device"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "host":
        store = build_store(Settings(), str(tmp_path))
        yield store
        store.manager.validate()
        store.close()
        return
    device = SimulatedDevice(1 << 16, clock=ManualClock())
    with simulated.use(device):
        store = build_store(Settings.load(device="simulated"), str(tmp_path))
        yield store
        store.tier.validate()
        store.close()


class TestStore:
    """Store, evict, read, send, count."""

    def test_bare(self, store: Any, value: Any) -> None:
        store.on_store = lambda key, value: 10_000
        store["x"] = value
        store["y"] = np.ones(1000)
        assert store.is_ready("x")
        store.statistics()
        store.manager.limits.evict_all()
        assert not store.manager.is_resident("y"), "others go"
        assert store["x"] is value
        del store["x"], store["y"]
        assert store.statistics().host_nbytes == 0

    def test_in_containers(self, store: Any, value: Any) -> None:
        store.on_store = lambda key, value: 10_000
        containers = [[value, 1], {"a": (value, value)}, Holder(value)]
        if store.tier is not None:
            containers.append([value, asarray(np.ones(10))])
        for key, container in enumerate(containers):
            store[key] = container
        store["y"] = np.ones(1000)
        store.manager.limits.evict_all()
        store.statistics()
        assert not store.manager.is_resident("y"), "others go"
        for key in list(store):
            store[key]
            del store[key]
        assert store.statistics().host_nbytes == 0

    def test_its_size(self, store: Any, value: Any) -> None:
        """When the store has to measure it."""
        store["x"] = value
        assert store.statistics().host_nbytes >= 0
        del store["x"]
        assert store.statistics().host_nbytes == 0

    def test_parked(self, value: Any) -> None:
        handle = gpuspill.proxify(value)
        assert gpuspill.unproxify([handle])[0] is value


@dataclass
class Holder:
    x: Any


def test_parts(meta: str) -> None:
    """What looks at classes, one by one."""
    cls = make(meta)
    item = object.__new__(cls)
    assert replace([item, 1], lambda found: found)[0] is item
    assert shared_memory([item]) is None
    assert shared_memory(item) is None
    registry = ArrayRegistry(all_adapters())
    assert registry.adapter(cls) is None
    assert registry.describe(item) is None
    assert not registry.is_on_device(item)
    sizes = SizeModel()
    assert sizes.learn(cls, 10, 100_000) == 100_000
    assert sizes.estimate(cls, 10) == 100_000
    assert is_instance(item, cls)
    assert not is_instance(item, list, dict)
    assert attribute_of(cls, "nothing") is None
    assert attribute_of(cls, "__weakrefoffset__") == Holder.__weakrefoffset__
    assert named(cls) == f"{__name__}.Foreign{meta}"


def test_who_may_be_asked() -> None:
    for cls in (int, np.ndarray, enum.Enum, abc.ABC, Path):
        assert is_plain(cls)
    assert {name for name in METACLASSES if not is_plain(make(name))} == {
        "__eq__",
        "true",
        "no hash",
        "__hash__",
        "__getattribute__",
    }


class TestClassTable:
    def test_it_keeps_no_class(self) -> None:
        table: ClassTable[int] = ClassTable()
        classes = [make(meta) for meta in METACLASSES]
        for number, cls in enumerate(classes):
            table[cls] = number
        assert [table.get(cls) for cls in classes] == list(range(len(classes)))
        assert all(cls in table for cls in classes)
        assert table.get(int) is None
        assert table.get(int, 5) == 5
        del cls, classes
        gc.collect()
        assert len(table) == 0

    def test_it_goes_before_its_classes(self) -> None:
        table: ClassTable[int] = ClassTable()
        cls = make("__eq__")
        table[cls] = 1
        del table
        del cls
        gc.collect()

    def test_the_last_one_counts(self) -> None:
        table: ClassTable[int] = ClassTable()
        table[int] = 1
        table[int] = 2
        assert (table.get(int), len(table)) == (2, 1)


# -- the code ------------------------------------------------------------------------------------

#: What never sees a user's value.
ELSEWHERE = {"bench", "demo", "testing", "simulated", "config"}
FILES = [
    path
    for path in sorted(Path(gpuspill.__file__).parent.rglob("*.py"))
    if path.relative_to(Path(gpuspill.__file__).parent).parts[0] not in ELSEWHERE
]
#: How values are called.
VALUES = {"value", "item", "part", "container", "obj", "shell", "composite"}


def _is_type_of(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "type"
        and len(node.args) == 1
    )


def asks_a_class(node: ast.AST) -> bool:
    """Whether code compares, hashes or looks into the class of some value, or asks a value for its class."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            asked = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
            return any(isinstance(op, asked) for op in ops) and any(map(_is_type_of, [left, *others]))
        case ast.Subscript(slice=ast.Tuple(elts=[ast.Name(id="type"), *_])):
            return "WeakKey" in ast.unparse(node)
        case ast.Subscript(slice=key):
            return _is_type_of(key)
        case ast.Dict(keys=keys):
            return any(key is not None and _is_type_of(key) for key in keys)
        case ast.Set(elts=elements):
            return any(map(_is_type_of, elements))
        case ast.Attribute(attr="__mro__" | "__weakrefoffset__" | "__subclasses__"):
            return True
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), *_]):
            return name in VALUES
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Attribute(attr="value"), *_]):
            return True
        case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[first, *_]):
            return _is_type_of(first)
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault" | "pop" | "add"), args=[first, *_]):
            return _is_type_of(first)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("singledispatch", "is_dataclass")
    return False


@pytest.mark.parametrize(
    "code",
    [
        "type(x) in (list, tuple)",
        "type(x) not in {list}",
        "type(x) == list",
        "table[type(x)]",
        "table.get(type(x))",
        "{type(x): 1}",
        "{type(x)}",
        "isinstance(value, list)",
        "isinstance(slot.value, list)",
        "hasattr(type(value), 'nbytes')",
        "found: WeakKeyDictionary[type, int]",
        "dataclasses.is_dataclass(cls)",
        "cls.__mro__",
    ],
)
def test_what_is_found(code: str) -> None:
    assert any(map(asks_a_class, ast.walk(ast.parse(code))))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_class_is_asked(path: Path) -> None:
    found = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if asks_a_class(node)}
    assert found - ALLOWED.get(path.name, set()) == set()


#: Of values that are never a user's, and where another library wants it so.
ALLOWED: dict[str, set[str]] = {
    "cluster.py": {"cls.__mro__"},
    "settings_report.py": {"isinstance(value, int)"},
    "serializer.py": {"isinstance(value, DeviceObject)", "isinstance(value, DeviceMemory)"},
    "tier.py": {"isinstance(value, DeviceMemory | DeviceObject)"},
}
