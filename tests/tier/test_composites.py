"""Composite types and types that nobody knows, on the device: through dask's families, by public API only."""

import logging
import sys
import threading
import types
import weakref

import numpy as np
import pytest
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from gpuspill import simulated
from gpuspill.device.adapters import InterfaceAdapter, all_adapters
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.distributed.serialization import DaskSerializer, DeviceFamilies
from gpuspill.manager import ProxifyManager
from gpuspill.simulated import Array, ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.stores import MemoryStore
from gpuspill.tier import DeviceTier, Skeleton

KB = 1024


class Frame:
    """Columns on the device, and an index on the host; some columns may share memory."""

    def __init__(self, columns, index=b""):
        self.columns = columns
        self.index = index


class Derived(Frame):
    """Found through its base."""


class Failing(Frame):
    pass


class HostOnly(Frame):
    pass


class Opaque:
    """Nobody registered it. It says that it is on the device."""

    def __init__(self, numbers):
        self.numbers = np.array(numbers)

    @property
    def __cuda_array_interface__(self):
        return {"version": 3, "shape": (1000,), "typestr": "<f8", "data": (self.numbers.ctypes.data, False)}


class Named(Opaque):
    """As that, but dask's own family knows it."""


@cuda_serialize.register(Frame)
def _(frame):
    header = {"names": list(frame.columns), "kind": type(frame).__name__}
    return header, [memoryview(frame.index), *frame.columns.values()]


@cuda_deserialize.register(Frame)
def _(header, frames):
    names = header.pop("names")  # dask may change what it is given
    kind = {cls.__name__: cls for cls in (Frame, Derived, HostOnly)}[header["kind"]]
    return kind(dict(zip(names, frames[1:], strict=True)), bytes(frames[0]))


@cuda_serialize.register(Failing)
def _(frame):
    raise ValueError("cannot be taken apart")


@dask_serialize.register(Named)
def _(named):
    return {"by": "dask"}, [named.numbers.data]


@dask_deserialize.register(Named)
def _(header, frames):
    named = Named(np.frombuffer(frames[0]))
    named.by = header["by"]
    return named


class Rig:
    def __init__(self, host_limit=None, registry=None):
        self.device = SimulatedDevice(64 * KB, clock=ManualClock())
        self.store = MemoryStore()
        self.host = ProxifyManager(
            limit=host_limit, store=self.store, serializer=DaskSerializer(), sizeof=lambda value: 8
        )
        self.tier = DeviceTier(self.device, self.host, limit=None, families=DeviceFamilies(), registry=registry)
        self.keys = {}

    def put(self, key, value):
        self.keys[key] = self.tier.proxify(value)

    def get(self, key):
        return self.tier.resolve(self.keys[key])

    def to_host(self):
        self.tier.settle()
        self.tier.manager.limits.evict_all()
        self.tier.settle()

    def to_disk(self):
        self.to_host()
        self.host.limits.evict_all()
        assert self.host.memory_total() == 0

    def live(self):
        return self.device.statistics().live_bytes


@pytest.fixture
def rig():
    rig = Rig(registry=ArrayRegistry(all_adapters(), pointer_device=lambda address: rig.device.identity))
    with simulated.use(rig.device):
        yield rig
        rig.tier.validate()
        rig.host.validate()
        rig.keys.clear()
        statistics = rig.tier.statistics()
        assert (statistics.units, statistics.device_nbytes, statistics.estimated_nbytes) == (0, 0, 0)
        rig.tier.close()
        rig.host.close()
        assert rig.live() == 0
        assert rig.device.statistics().violations == 0


@pytest.mark.parametrize("kind", [Frame, Derived])
def test_a_composite_goes_through_all_tiers(rig, kind):
    x, y = np.arange(100.0), np.arange(50, dtype="i4").reshape(5, 10)
    rig.put("f", kind({"x": asarray(x), "y": asarray(y)}, b"index"))
    assert type(rig.keys["f"]) is Skeleton
    assert rig.tier.statistics().device_nbytes == rig.live() == x.nbytes + y.nbytes
    rig.to_disk()
    assert rig.live() == 0
    assert rig.store.statistics().payload_nbytes == x.nbytes + y.nbytes  # nothing but the memory itself
    found = rig.get("f")
    assert type(found) is kind
    assert found.index == b"index"
    np.testing.assert_array_equal(asnumpy(found.columns["x"]), x)
    np.testing.assert_array_equal(asnumpy(found.columns["y"]), y)
    assert rig.get("f") is found


def test_nothing_is_copied_on_the_device(rig):
    rig.put("f", Frame({"x": asarray(np.arange(40.0).reshape(5, 8))[::2, ::-1]}))
    kernels, peak = rig.device.statistics().kernels, rig.device.statistics().peak_bytes
    rig.to_host()
    assert rig.get("f").columns["x"].strides == (128, -8)
    assert (rig.device.statistics().kernels, rig.device.statistics().peak_bytes) == (kernels, peak)


def test_columns_share_memory_with_each_other_and_with_arrays(rig):
    base = asarray(np.arange(24.0))
    rig.put("f", Frame({"all": base, "odd": base[1::2]}))
    rig.put("g", [Frame({"tail": base[20:]}), {"base": base}])
    del base
    assert rig.tier.statistics().units == 1
    assert rig.tier.statistics().device_nbytes == rig.live() == 192
    rig.to_disk()
    f, (g, rest) = rig.get("f"), rig.get("g")
    allocation = f.columns["all"].allocation
    assert rig.live() == 192
    assert all(array.allocation is allocation for array in (f.columns["odd"], g.columns["tail"], rest["base"]))
    f.columns["all"][21] = -1.0
    assert asnumpy(g.columns["tail"])[1] == -1.0


def test_the_same_composite_under_several_keys_is_one_object(rig):
    frame = Frame({"x": asarray(np.arange(10.0))})
    rig.put("f", frame)
    rig.put("g", {"frames": [frame, frame]})
    assert rig.get("g")["frames"][0] is frame
    ref = weakref.ref(frame)
    del frame
    assert ref() is None
    rig.to_disk()
    found = rig.get("g")["frames"]
    assert found[0] is found[1] is rig.get("f")
    del found, rig.keys["f"]
    rig.to_host()
    np.testing.assert_array_equal(asnumpy(rig.get("g")["frames"][0].columns["x"]), np.arange(10.0))


def test_who_has_a_composite_keeps_it_on_the_device(rig):
    rig.put("f", Frame({"x": asarray(np.arange(10.0))}))
    frame = rig.get("f")
    rig.to_host()
    assert rig.tier.is_ready(rig.keys["f"])
    column = frame.columns["x"]
    copies = rig.device.statistics().copies_to_device
    del frame
    rig.to_host()  # only part of it is in use now: it may go, but its memory lingers
    assert rig.tier.statistics().lingering_nbytes == 80
    assert rig.get("f").columns["x"].allocation is column.allocation
    assert rig.device.statistics().copies_to_device == copies


def test_stored_again_after_it_was_deleted(rig):
    frame = Frame({"x": asarray(np.arange(10.0))})
    rig.put("f", frame)
    del rig.keys["f"]
    rig.tier.settle()
    rig.put("g", frame)
    assert rig.get("g") is frame
    assert rig.tier.statistics().units == 1
    del frame
    rig.to_disk()
    np.testing.assert_array_equal(asnumpy(rig.get("g").columns["x"]), np.arange(10.0))


def test_what_cannot_be_taken_apart_is_left_alone(rig, caplog):
    caplog.set_level(logging.WARNING, "gpuspill")  # what is logged is kept, and with it the traceback
    other = SimulatedDevice(KB)
    for value in (
        Failing({"x": asarray(np.ones(3))}),
        HostOnly({"x": np.ones(3)}),
        Frame({"x": asarray(np.ones(3)), "y": asarray(np.ones(3), device=other)}),
    ):
        assert rig.tier.proxify(value) is value
        assert rig.tier.new_nbytes(value) == 0
        kept = rig.tier.proxify([value, asarray(np.ones(3))])
        assert kept.tree[0] is value
        assert len(kept.units) == 1
        del kept


def test_sizes_of_what_is_not_known_yet(rig):
    base = asarray(np.arange(10.0))
    frame = Frame({"x": base, "y": base[1:], "z": asarray(np.ones(3))})
    assert rig.tier.new_nbytes([frame, base]) == 80 + 24
    rig.put("f", frame)
    assert rig.tier.new_nbytes([frame, base]) == 0
    opaque = Opaque(range(3))
    assert rig.tier.new_nbytes(opaque) == 8000
    rig.put("o", opaque)
    assert rig.tier.new_nbytes(opaque) == 0


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", [Opaque, Named])
def test_a_type_that_nobody_knows_is_sized_by_its_interface_and_moves_whole(rig, kind, full):
    value = kind([1.0, 2.0])
    rig.put("a", value)
    rig.put("b", [value])
    statistics = rig.tier.statistics()
    assert (statistics.units, statistics.device_nbytes, statistics.estimated_nbytes) == (1, 8000, 8000)
    rig.to_host()
    assert rig.get("a") is value  # it is in use
    del value
    if full:
        rig.host.limits.set_limit(0, None)
    rig.to_disk()
    statistics = rig.tier.statistics()
    assert (statistics.device_nbytes, statistics.estimated_nbytes, statistics.direct_spills) == (0, 8000, full)
    assert not rig.tier.is_ready(rig.keys["a"])
    found = rig.get("a")
    assert type(found) is kind
    assert getattr(found, "by", None) == ("dask" if kind is Named else None)
    np.testing.assert_array_equal(found.numbers, [1.0, 2.0])
    assert rig.get("b")[0] is found
    rig.put("c", found)
    assert rig.tier.statistics().units == 1


@pytest.mark.fault("value cannot be serialised", on="device→host", outcome="stays on the device; others go instead")
def test_one_that_cannot_be_moved_stops_nobody(rig, caplog):
    class Local(Opaque):
        def __reduce__(self):
            raise TypeError("not for pickling")

    rig.put("bad", Local([1.0]))
    rig.put("good", Frame({"x": asarray(np.ones(10))}))
    rig.to_host()
    assert rig.live() == 0
    assert rig.tier.is_ready(rig.keys["bad"])
    assert "Local" in caplog.text


def test_frames_of_no_library_come_back_as_memory_with_the_interface():
    """As those of cuDF, which are buffers of its own."""
    registry = ArrayRegistry(all_adapters(), pointer_device=lambda address: "cuda:0")

    class Buffer:
        __cuda_array_interface__ = types.MappingProxyType(
            {"version": 3, "data": (0x10040, False), "shape": (64,), "typestr": "|u1", "strides": None}
        )

    found = registry.describe(Buffer())
    assert found.identity == ("cuda:0", 0x10040, 64)
    from gpuspill.tier.disassemble import _frame_recipe

    recipe = _frame_recipe(found)
    assert recipe.adapter == InterfaceAdapter.name
    memory = types.SimpleNamespace(address=0x20000, nbytes=64, identity=("cuda:0", 0x20000, 64), token="token")
    rebuilt = registry.rebuild(recipe, memory)
    interface = rebuilt.__cuda_array_interface__
    assert (interface["data"], interface["shape"], interface["typestr"]) == ((0x20000, False), (64,), "|u1")
    assert rebuilt.memory is memory
    again = registry.describe(rebuilt)
    assert (again.identity, again.owner, again.layout.offset) == (memory.identity, memory, 0)
    assert again.token == "token"


# -- composites that tell their size: whole until they have to leave ----------------------------------


class Shy(Frame):
    """As cuDF's: it tells its size, and to be looked into is noted, since that may copy on the device."""

    looks: list[int] = []  # noqa: RUF012
    before_look: list = []  # noqa: RUF012

    @property
    def nbytes(self):
        return sum(column.nbytes for column in self.columns.values())


@cuda_serialize.register(Shy)
def _(shy):
    while Shy.before_look:
        Shy.before_look.pop()()
    Shy.looks.append(threading.get_ident())
    return {"names": list(shy.columns)}, list(shy.columns.values())


@cuda_deserialize.register(Shy)
def _(header, frames):
    return Shy(dict(zip(header["names"], frames, strict=True)))


@pytest.fixture
def looks():
    Shy.looks.clear()
    yield Shy.looks
    Shy.looks.clear()
    assert not Shy.before_look


def test_a_composite_is_looked_into_when_it_has_to_leave_and_not_before(rig, looks):
    frame = Shy({"x": asarray(np.arange(10.0)), "y": asarray(np.ones(5))})
    assert rig.tier.new_nbytes([frame]) == 120
    rig.put("f", frame)
    rig.put("g", [frame])
    assert rig.tier.new_nbytes([frame]) == 0
    statistics = rig.tier.statistics()
    assert (statistics.units, statistics.device_nbytes, statistics.estimated_nbytes) == (1, 120, 120)
    assert rig.get("f") is rig.get("g")[0] is frame
    rig.to_host()  # it is in use
    assert looks == []
    del frame
    rig.to_host()
    assert len(looks) == 1
    statistics = rig.tier.statistics()
    assert (statistics.units, statistics.device_nbytes, statistics.estimated_nbytes, rig.live()) == (2, 0, 0, 0)
    found = rig.get("f")
    assert rig.get("g")[0] is found
    np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(10.0))
    np.testing.assert_array_equal(asnumpy(found.columns["y"]), np.ones(5))
    rig.put("h", found)
    del found
    rig.to_disk()
    np.testing.assert_array_equal(asnumpy(rig.get("h").columns["y"]), np.ones(5))
    assert len(looks) == 1
    assert rig.tier.statistics().device_nbytes == rig.live() == 120


def test_composites_share_memory_after_they_were_taken_apart(rig, looks):
    base = asarray(np.arange(24.0))
    rig.put("f", Shy({"all": base, "own": asarray(np.ones(2))}))
    rig.put("g", [Shy({"tail": base[20:]})])
    rig.put("base", base)
    del base
    assert looks == []
    rig.to_disk()
    assert len(looks) == 2
    assert rig.tier.statistics().units == 2
    f, (g,), base = rig.get("f"), rig.get("g"), rig.get("base")
    assert f.columns["all"].allocation is g.columns["tail"].allocation is base.allocation
    assert rig.tier.statistics().device_nbytes == rig.live() == 192 + 16


def test_one_that_shares_memory_with_a_value_in_use_gives_up_the_rest(rig, looks):
    base = asarray(np.arange(24.0))
    rig.put("base", base)
    rig.put("f", Shy({"all": base, "own": asarray(np.ones(2))}))
    assert rig.tier.statistics().device_nbytes == 192 + 192 + 16  # for what each says
    rig.to_host()
    assert rig.tier.statistics().device_nbytes == rig.live() == 192
    assert rig.get("f").columns["all"].allocation is base.allocation


@pytest.mark.parametrize("how", ["out of memory", "limit"])
def test_its_memory_leaves_before_other_values(rig, looks, how):
    rig.put("f", Shy({"x": asarray(np.arange(10.0))}))
    rig.put("other", asarray(np.ones(10)))
    if how == "limit":
        rig.tier.manager.limits.set_limit(120, None)
        with rig.tier.manager.admission.reserve(0) as room:
            assert room.wait(60)
    else:
        rest = rig.device.allocate(64 * KB - 160)
        more = rig.device.allocate(80)
        del rest, more
    assert len(looks) == 1
    assert rig.live() == 80
    assert rig.tier.is_ready(rig.keys["other"])
    assert not rig.tier.is_ready(rig.keys["f"])


def test_one_that_keeps_memory_whose_unit_has_left_gives_it_back_all_the_same(rig, looks):
    base = asarray(np.arange(24.0))
    rig.put("base", base)
    rig.put("f", Shy({"x": base[4:]}))
    kept = rig.get("f")
    del base
    rig.to_host()
    assert rig.tier.statistics().lingering_nbytes == 192
    kept.columns["x"][0] = -1.0
    del kept
    rig.to_host()
    rig.to_host()  # its unit came back first
    assert rig.live() == 0
    assert asnumpy(rig.get("base"))[4] == -1.0
    assert rig.get("f").columns["x"].allocation is rig.get("base").allocation


class Odd(list):
    """Cannot be rebuilt."""

    def __copy__(self):
        raise TypeError("no copies")


def test_a_value_that_stays_whole_keeps_no_memory_when_it_is_gone(rig):
    base = asarray(np.arange(24.0))
    rig.put("base", base)
    value = Odd([base[4:]])
    del base
    rig.to_host()
    assert rig.tier.statistics().lingering_nbytes == 192
    assert rig.tier.proxify(value) is value
    del value
    rig.to_host()
    assert rig.live() == 0


MEANWHILE = ["read", "read later", "delete", "overwrite", "again", "pin"]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_while_it_is_taken_apart(rig, looks, meanwhile):
    rig.put("f", Shy({"x": asarray(np.arange(10.0)), "y": asarray(np.ones(10))}))
    kept = []

    def action():
        if meanwhile == "read":
            kept.append(rig.get("f"))
        elif meanwhile == "read later":
            kept.append(rig.tier.resolve_later({"f": rig.keys["f"]}).result(60)["f"])
        elif meanwhile == "delete":
            del rig.keys["f"]
            rig.tier.settle()
        elif meanwhile == "overwrite":
            rig.put("f", asarray(np.zeros(3)))
        elif meanwhile == "again":
            rig.put("g", rig.get("f"))
        else:
            kept.append(rig.tier.admit(None, [rig.keys["f"]]))

    Shy.before_look.append(action)
    rig.to_host()
    statistics = rig.tier.statistics()
    if meanwhile != "pin":  # which keeps what was there, and is charged for it
        assert rig.live() == statistics.device_nbytes + statistics.lingering_nbytes
    if meanwhile == "pin":
        (admission,) = kept
        assert admission.wait(60)
        found = rig.tier.resolve_all({"f": rig.keys["f"]}, admission)["f"]
        admission.release()
        np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(10.0))
        del found
    elif kept:
        assert rig.get("f") is kept[0]
    kept.clear()
    if meanwhile == "overwrite":
        np.testing.assert_array_equal(asnumpy(rig.get("f")), np.zeros(3))
    elif meanwhile != "delete":
        rig.to_disk()
        assert rig.live() == 0
        found = rig.get("f")
        np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(10.0))
        if meanwhile == "again":
            assert rig.get("g") is found
    assert len(looks) == 1


@pytest.mark.parametrize("later", [False, True])
def test_others_take_its_place_while_it_is_read(rig, looks, monkeypatch, later):
    """Who reads it has asked for its own unit only, which has nothing left then."""
    rig.put("f", Shy({"x": asarray(np.arange(10.0))}))
    pin = rig.tier.manager.admission.pin

    def late(units):
        monkeypatch.undo()
        rig.to_host()
        return pin(units)

    monkeypatch.setattr(rig.tier.manager.admission, "pin", late)
    skeleton = rig.keys["f"]
    found = rig.tier.resolve_later({"f": skeleton}).result(60)["f"] if later else rig.tier.resolve(skeleton)
    np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(10.0))
    assert len(looks) == 1


class Stubborn(Shy):
    """Says how large it is, and cannot be taken apart."""


@cuda_serialize.register(Stubborn)
def _(frame):
    raise ValueError("cannot be taken apart")


def test_one_that_cannot_be_taken_apart_stays_and_others_go(rig, caplog):
    rig.put("bad", Stubborn({"x": asarray(np.ones(3))}))
    rig.put("good", Shy({"x": asarray(np.ones(10))}))
    rig.to_host()
    assert rig.live() == 24
    assert type(rig.get("bad")) is Stubborn
    assert "Stubborn cannot be taken apart" in caplog.text


# -- one composite, several threads: each order made to happen -----------------------------------------


def in_the_middle(rig, monkeypatch, copy, action):
    """Do something, once, in the middle of the next copy of a kind, in the thread that makes it."""
    make = getattr(rig.device, copy)

    def copying(*args, **kwargs):
        monkeypatch.setattr(rig.device, copy, make)
        event = make(*args, **kwargs)
        action()
        return event

    monkeypatch.setattr(rig.device, copy, copying)


@pytest.mark.parametrize("meanwhile", ["read", "delete", "overwrite", "again", "a column", "out of memory"])
def test_in_the_middle_of_a_spill(rig, monkeypatch, meanwhile):
    rig.put("f", Frame({"x": asarray(np.arange(10.0)), "y": asarray(np.ones(10))}))
    kept = []

    def action():
        if meanwhile == "read":
            kept.append(rig.get("f"))
        elif meanwhile == "delete":
            del rig.keys["f"]
        elif meanwhile == "overwrite":
            rig.put("f", asarray(np.zeros(3)))
        elif meanwhile == "again":
            rig.put("g", rig.get("f"))
        elif meanwhile == "a column":
            rig.put("g", rig.get("f").columns["x"][3:])
        else:
            # In a thread of its own that would wait for the spill; here whoever copies asks, and gets the other column.
            assert rig.tier.manager.limits.make_room(0) == 0

    in_the_middle(rig, monkeypatch, "copy_to_host", action)
    rig.tier.manager.limits.make_room(80)
    rig.tier.settle()
    statistics = rig.tier.statistics()
    assert rig.live() == statistics.device_nbytes + statistics.lingering_nbytes
    if meanwhile == "read":
        assert rig.get("f") is kept[0]
        assert rig.live() == 160
    kept.clear()
    if meanwhile == "overwrite":
        np.testing.assert_array_equal(asnumpy(rig.get("f")), np.zeros(3))
    elif meanwhile != "delete":
        rig.to_host()
        found = rig.get("f")
        np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(10.0))
        np.testing.assert_array_equal(asnumpy(found.columns["y"]), np.ones(10))
        if meanwhile == "again":
            assert rig.get("g") is found
        elif meanwhile == "a column":
            assert rig.get("g").allocation is found.columns["x"].allocation


@pytest.mark.parametrize("meanwhile", ["delete", "overwrite", "evict", "other key"])
def test_in_the_middle_of_a_restore(rig, monkeypatch, meanwhile):
    frame = Frame({"x": asarray(np.arange(10.0))})
    rig.put("f", frame)
    rig.put("g", [frame])
    del frame
    rig.to_disk()
    skeleton = rig.keys["f"]

    def action():
        if meanwhile == "delete":
            rig.keys.clear()
        elif meanwhile == "overwrite":
            rig.put("f", asarray(np.zeros(3)))
        elif meanwhile == "evict":
            rig.tier.manager.limits.evict_all()
        else:
            del rig.keys["g"]

    in_the_middle(rig, monkeypatch, "copy_to_device", action)
    found = rig.tier.resolve(skeleton)
    np.testing.assert_array_equal(asnumpy(found.columns["x"]), np.arange(10.0))
    if "g" in rig.keys:
        assert rig.get("g")[0] is found
    del found, skeleton
    rig.tier.settle()
    statistics = rig.tier.statistics()
    assert rig.live() == statistics.device_nbytes + statistics.lingering_nbytes


# -- cuDF ---------------------------------------------------------------------------------------------


@pytest.fixture
def cudf(monkeypatch):
    """The part of cuDF's public surface that matters: its types, and the option that says that it spills by itself."""
    module = types.ModuleType("cudf")
    options = {"spill": False}

    class Serializable:
        pass

    class DataFrame(Serializable):
        def __init__(self, array):
            self.array = array

    class Series(DataFrame):
        @property
        def __cuda_array_interface__(self):
            assert not options["spill"], "asking for the address keeps the memory on the device for good"
            raise NotImplementedError

    class Index(DataFrame):
        pass

    module.DataFrame, module.Series, module.Index = DataFrame, Series, Index
    module.get_option = options.__getitem__
    module.set_option = options.__setitem__
    monkeypatch.setitem(sys.modules, "cudf", module)

    @cuda_serialize.register(Serializable)
    def serialize(frame):
        return {}, [frame.array]

    return module


@pytest.mark.parametrize("kind", ["DataFrame", "Series", "Index"])
def test_cudf_is_left_alone_while_it_spills_by_itself(rig, cudf, kind):
    value = getattr(cudf, kind)(asarray(np.ones(10)))
    cudf.set_option("spill", True)
    assert rig.tier.proxify(value) is value
    assert rig.tier.new_nbytes([value]) == 0
    mixed = rig.tier.proxify([value, asarray(np.ones(3))])
    assert mixed.tree[0] is value
    assert len(mixed.units) == 1
    del mixed
    cudf.set_option("spill", False)
    assert type(rig.tier.proxify(value)) is Skeleton


def test_a_cudf_without_spilling_or_half_imported(rig, cudf):
    value = cudf.DataFrame(asarray(np.ones(10)))
    del cudf.Index
    cudf.set_option("spill", True)
    assert type(rig.tier.proxify(value)) is Skeleton
    del cudf.get_option
    assert type(rig.tier.proxify(value)) is Skeleton


def test_arrays_of_the_device_are_no_composites(rig):
    assert not isinstance(rig.tier.proxify(asarray(np.ones(3))).tree, Array)
