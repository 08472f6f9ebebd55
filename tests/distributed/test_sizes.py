"""Sizes of what nobody registered, and of what others manage."""

import sys
import types

import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.serialize import dask_serialize

from gpuspill import simulated
from gpuspill.config import Settings
from gpuspill.core.sizes import UNKNOWN_NBYTES, as_nbytes
from gpuspill.distributed.factory import build_store
from gpuspill.distributed.sizes import external_nbytes, measure, passive_nbytes
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray


class Unknown:
    def __init__(self, nbytes):
        self.nbytes = nbytes


class Interface:
    __cuda_array_interface__ = types.MappingProxyType(
        {"version": 3, "data": (0x1000, False), "shape": (100, 4), "typestr": "<f8", "strides": (64, 8)}
    )


@pytest.fixture
def store(tmp_path):
    store = build_store(Settings(), str(tmp_path))
    # What a worker measures before: Python's own size of an object, for a type that dask does not know.
    store.on_store = lambda key, value: 56
    yield store
    store.manager.validate()
    store.close()


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(Unknown(10_000), 10_000), (Interface(), 99 * 64 + 32), (Unknown("many"), 56), (object(), 56), (b"12", 56)],
)
def test_a_type_that_nobody_knows_is_sized_by_what_it_claims(store, value, nbytes):
    store["x"] = value
    assert store.manager.nbytes("x") == store.statistics().host_nbytes == nbytes
    estimated = nbytes if nbytes != 56 else 0
    assert store.statistics().estimated_nbytes == estimated
    del store["x"]
    assert store.statistics().estimated_nbytes == 0


def test_what_takes_the_place_of_an_estimate(store):
    store["x"] = Unknown(10_000)
    store["x"] = np.ones(3)
    assert store.statistics().estimated_nbytes == 0
    with pytest.raises(KeyError):
        del store["y"]


def test_a_registered_size_is_believed(store):
    class Registered(Unknown):
        pass

    sizeof.register(Registered, lambda value: 123)
    store.on_store = None
    store["x"] = Registered(10_000)
    assert store.manager.nbytes("x") == 123
    assert store.statistics().estimated_nbytes == 0


@pytest.fixture
def foreign(monkeypatch):
    """A type of a library for which dask has something that fails to import: sizes, and ways to serialise."""

    def register():
        raise AttributeError("the library has no such type")

    for dispatch in (sizeof, dask_serialize, cuda_serialize):
        monkeypatch.setitem(dispatch._lazy, "foreign", register)
    return type("Foreign", (Unknown,), {"__module__": "foreign.arrays"})


def test_a_type_for_which_dask_fails_to_find_a_size_or_a_way(store, foreign, caplog):
    store.on_store = None
    store["x"] = foreign(10_000)
    store["y"] = np.ones(3)
    store.manager.limits.evict_all()
    statistics = store.statistics()
    assert store.manager.nbytes("x") == statistics.estimated_nbytes == 10_000
    assert (statistics.unspillable, statistics.disk_keys) == (0, 2), "it is pickled"
    assert store["x"].nbytes == 10_000
    assert not caplog.records


def test_such_a_type_beside_values_on_a_device(tmp_path, foreign):
    device = SimulatedDevice(1 << 16, clock=ManualClock())
    with simulated.use(device):
        store = build_store(Settings.load(device="simulated"), str(tmp_path))
        store["x"] = foreign(10_000)
        store["y"] = [foreign(5_000), asarray(np.ones(10))]
        statistics = store.statistics()
        assert statistics.device_nbytes == 80
        assert statistics.estimated_nbytes == store.manager.nbytes("x") == 10_000
        one, array = store["y"]
        assert type(one) is foreign
        assert simulated.asnumpy(array).sum() == 10
        store.close()


SIZES = {
    "a NumPy scalar": (np.uint64(160_000), 160_000),
    "a signed one": (np.int8(-1), UNKNOWN_NBYTES),
    "a float": (12.5, 12),
    "a NumPy float": (np.float32(4096.0), 4096),
    "negative": (-5, UNKNOWN_NBYTES),
    "infinite": (float("inf"), UNKNOWN_NBYTES),
    "not a number": (float("nan"), UNKNOWN_NBYTES),
    "true": (True, 1),
    "absurd": (10**30, UNKNOWN_NBYTES),
    "nothing": (None, UNKNOWN_NBYTES),
    "text": ("many", UNKNOWN_NBYTES),
}


@pytest.mark.parametrize("way", ["measured", "given"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_no_size_is_charged_as_one(store, size, way):
    """Whatever a ``sizeof`` returns: it is counted, others are evicted, and nothing is left when all is deleted."""

    class Sized:
        pass

    given, expected = SIZES[size]
    sizeof.register(Sized, lambda value: given)
    store.on_store = (lambda key, value: given) if way == "given" and given is not None else None
    store["x"] = Sized()
    store.manager.store("y", np.ones(3), 24)
    assert store.manager.nbytes("x") == expected
    assert type(store.statistics().host_nbytes) is int
    store.manager.limits.evict_all()
    assert not store.manager.is_resident("y")
    store["x"]
    del store["x"], store["y"]
    statistics = store.statistics()
    assert (statistics.host_nbytes, statistics.spilled_nbytes, statistics.estimated_nbytes) == (0, 0, 0)


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, MemoryError])
def test_a_size_that_raises(store, error):
    class Raises:
        def __sizeof__(self):
            raise error

        nbytes = property(__sizeof__)
        __class__ = property(__sizeof__)

    store.on_store = None
    store["x"] = Raises()
    assert store.manager.nbytes("x") == UNKNOWN_NBYTES
    store["y"] = [Raises()]
    del store["x"], store["y"]
    assert store.statistics().host_nbytes == 0


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
def test_a_registered_size_that_raises(store, error, monkeypatch):
    """Asking may be on the event loop, which what is no Exception would end."""

    class Raises:
        nbytes = 5

        def __int__(self):
            raise error

    def size(value):
        raise error

    monkeypatch.setitem(sizeof._lookup, Raises, size)
    value = Raises()
    assert passive_nbytes(value) is None
    assert measure(value) == as_nbytes(value) == UNKNOWN_NBYTES
    assert external_nbytes([value], (Raises,)) == UNKNOWN_NBYTES
    store.on_store = None
    store["x"] = value
    assert store.manager.nbytes("x") == UNKNOWN_NBYTES


@pytest.fixture
def cudf(monkeypatch):
    """cuDF's public names, with its spilling on."""
    module = types.ModuleType("cudf")
    options = {"spill": True}
    module.get_option, module.set_option = options.__getitem__, options.__setitem__

    class DataFrame:
        nbytes = 4000

        def __reduce__(self):
            raise AssertionError("left alone")

    module.DataFrame = DataFrame
    module.Series = module.Index = type("Series", (), {})
    sizeof.register(DataFrame, lambda frame: frame.nbytes)
    monkeypatch.setitem(sys.modules, "cudf", module)
    return module


def test_what_cudf_spills_by_itself_is_external(store, cudf):
    frame = cudf.DataFrame()
    store.on_store = lambda key, value: {"x": 4000, "y": 4100, "z": 24}[key]
    store["x"] = frame
    store["y"] = {"frames": [frame, frame], "more": b"text"}
    store["z"] = np.ones(3)
    statistics = store.statistics()
    assert statistics.device_external_nbytes == 8000
    assert statistics.host_nbytes == 0 + 100 + 24
    store.manager.limits.evict_all()
    assert store.manager.is_resident("x")
    assert store.manager.is_resident("y")
    assert not store.manager.is_resident("z")
    assert store["x"] is frame
    store["x"] = 1
    del store["y"]
    assert store.statistics().device_external_nbytes == 0


def test_with_its_spilling_off_cudf_is_like_any_other(store, cudf):
    cudf.set_option("spill", False)
    store.on_store = None
    store["x"] = cudf.DataFrame()
    statistics = store.statistics()
    assert (statistics.device_external_nbytes, statistics.host_nbytes) == (0, 4000)


def test_beside_values_on_a_device(tmp_path, cudf):
    device = SimulatedDevice(1 << 16, clock=ManualClock())
    with simulated.use(device):
        store = build_store(Settings.load(device="simulated"), str(tmp_path))
        store["x"] = [cudf.DataFrame(), asarray(np.ones(10))]
        statistics = store.statistics()
        assert statistics.device_external_nbytes == 4000
        assert statistics.device_nbytes == 80
        store.close()
