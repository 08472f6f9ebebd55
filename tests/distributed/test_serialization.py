"""Values to bytes and back through dask's serialisation families."""

from __future__ import annotations

import array
import gc
import pickle

import dask.array as da
import msgpack
import numpy as np
import pandas as pd
import pytest
from dask import delayed
from distributed import Client, Event, LocalCluster, Lock, Queue, Variable, wait
from distributed.client import FutureCancelledError
from distributed.protocol import serialize_bytelist
from distributed.protocol.serialize import Serialize, Serialized, ToPickle, dask_deserialize, dask_serialize

import gpuspill
from gpuspill.distributed import pickling
from gpuspill.distributed.serialization import FOREIGN_HEADER, DaskSerializer
from gpuspill.storage.base import FrameStream, in_memory


def through_disk(value, serializer=None):
    """Serialise, copy every byte as a store would, deserialise."""
    serializer = serializer or DaskSerializer()
    header, frames = serializer.dumps(value)
    assert isinstance(header, bytes)
    assert header != FOREIGN_HEADER
    for frame in frames:
        assert frame.contiguous
        assert frame.format == "B"
        assert frame.ndim == 1
    copies = [memoryview(bytearray(frame)) for frame in frames]
    return serializer.loads(header, copies)


class Plain:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is type(self) and other.x == self.x

    __hash__ = None


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        "text" * 1000,
        b"bytes",
        bytearray(b"bytes"),
        b"",
        (),
        [],
        [1, [2, (3,)]],
        {"a": 1, 2: {3}},
        {(1, "a"): 2, None: 3},
        array.array("d", [1.0, 2.0]),
        Plain(5),
        [Plain(1), b"x"],
        memoryview(b"abc"),
    ],
    ids=repr,
)
def test_plain_values(value):
    got = through_disk(value)
    assert type(got) is type(value)
    assert got == value


@pytest.mark.parametrize(
    "value",
    [
        np.arange(10),
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(20)[::2],
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.broadcast_to(np.arange(4), (3, 4)),
        np.array([], dtype="f4"),
        np.array(5),
        np.array(["a", None, 3], dtype=object),
        np.array([("x", 1)], dtype=[("a", "U3"), ("b", "i8")]),
        np.array(["2020-01-01"], dtype="M8[ns]"),
        np.zeros((0, 5)),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}",
)
def test_arrays(value):
    got = through_disk(value)
    np.testing.assert_array_equal(got, value)
    assert got.dtype == value.dtype
    assert got.flags.writeable == value.flags.writeable
    assert got.flags.f_contiguous == value.flags.f_contiguous or not value.flags.contiguous


def test_read_only_array_stays_read_only():
    value = np.arange(10)
    value.flags.writeable = False
    assert not through_disk(value).flags.writeable


@pytest.mark.parametrize("gaps", [lambda x: x[::-1], lambda x: x[:, ::2], lambda x: x])
def test_read_only_arrays_in_collections_stay_read_only(gaps):
    frozen, free = gaps(np.ones((4, 6))), gaps(np.zeros((4, 6)))
    frozen.flags.writeable = False
    got = through_disk({"a": [frozen, free, frozen], "b": ((free, 5), {"deep": frozen}), 3: "text"})
    (first, second, third), ((fourth, _), inner) = got["a"], got["b"]
    found = [first, second, third, fourth, inner["deep"]]
    assert [array.flags.writeable for array in found] == [False, True, False, True, False]
    for item, expected in zip(found, [frozen, free, frozen, free, frozen], strict=True):
        np.testing.assert_array_equal(item, expected)


def test_what_dask_unwraps_on_the_way_stays_what_it_is():
    ones = np.ones(10)
    got = through_disk([ones, Serialize([1, ones])])
    assert [type(item) for item in got[1].data] == [int, np.ndarray]
    assert got[1].data[1] is got[0]


def test_restored_array_can_be_written_to():
    got = through_disk(np.zeros(10))
    got[0] = 1
    assert got[0] == 1


def test_frames():
    columns = {"a": np.arange(5), "b": list("abcde"), "c": pd.Categorical(list("xxyyx"))}
    frame = pd.DataFrame(columns, index=list("vwxyz"))
    pd.testing.assert_frame_equal(through_disk(frame), frame)
    pd.testing.assert_series_equal(through_disk(frame.a), frame.a)


def test_collections_of_arrays():
    value = {"a": [np.arange(5), (np.ones(3), "x")], "b": {1, 2}}
    got = through_disk(value)
    np.testing.assert_array_equal(got["a"][0], np.arange(5))
    assert type(got["a"][1]) is tuple
    assert got["b"] == {1, 2}


def test_frames_alias_the_value():
    value = np.zeros(100_000)
    _, frames = DaskSerializer().dumps(value)
    value[:] = 1
    assert sum(frame.nbytes for frame in frames) == value.nbytes
    assert bytes(frames[0]) == value.tobytes()


def test_loading_does_not_copy():
    serializer = DaskSerializer()
    header, frames = serializer.dumps(np.zeros(100_000))
    buffer = bytearray(frames[0])
    value = serializer.loads(header, [memoryview(buffer)])
    value[0] = 7
    assert np.frombuffer(buffer)[0] == 7


def test_a_header_can_be_used_again():
    serializer = DaskSerializer()
    header, frames = serializer.dumps({"a": np.arange(3), "b": np.arange(4)})
    for _ in range(2):
        got = serializer.loads(header, [memoryview(bytearray(f)) for f in frames])
        assert sorted(got) == ["a", "b"]


@pytest.mark.parametrize("wrapper", [Serialize, ToPickle])
def test_dasks_own_wrappers_stay_wrapped(wrapper):
    """Dask would unwrap them on the way."""
    got = through_disk(wrapper([1, 2]))
    assert type(got) is wrapper
    assert got.data == [1, 2]


def test_serialized_values_stay_serialized():
    got = through_disk(Serialized({"serializer": "pickle"}, [b"abc"]))
    assert type(got) is Serialized
    assert got.frames == [b"abc"]


def test_a_type_with_its_own_way():
    class Registered:
        def __init__(self, data):
            self.data = data

        def __reduce__(self):
            raise AssertionError("was pickled")

    @dask_serialize.register(Registered)
    def _(value):
        return {"n": len(value.data)}, [value.data]

    @dask_deserialize.register(Registered)
    def _(header, frames):
        assert header["n"] == frames[0].nbytes
        return Registered(bytes(frames[0]))

    assert through_disk(Registered(b"abc")).data == b"abc"


def test_frames_with_gaps():
    class Strided:
        pass

    @dask_serialize.register(Strided)
    def _(value):
        fortran = np.asfortranarray(np.arange(6, dtype="i8").reshape(2, 3))
        return {}, [memoryview(bytes(range(10)))[::2], memoryview(fortran)]

    header, frames = DaskSerializer().dumps(Strided())
    assert bytes(frames[0]) == bytes(range(0, 10, 2))
    assert frames[1].nbytes == 48
    assert header


def test_what_cannot_be_serialised_raises():
    class No:
        def __reduce__(self):
            raise ZeroDivisionError("no")

    with pytest.raises(TypeError, match="No"):
        DaskSerializer().dumps(No())


def test_families_can_be_chosen():
    header, _ = DaskSerializer(["pickle"]).dumps(np.ones(3))
    assert msgpack.unpackb(header)["serializer"] == "pickle"
    header, _ = DaskSerializer().dumps(np.ones(3))
    assert msgpack.unpackb(header)["serializer"] == "dask"


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_what_spill_buffer_wrote(compression):
    value = {"a": np.zeros(100_000), "b": "text"}
    blob = bytearray(b"".join(map(bytes, serialize_bytelist(value, compression=compression, on_error="raise"))))
    got = DaskSerializer().loads(FOREIGN_HEADER, [memoryview(blob)])
    np.testing.assert_array_equal(got["a"], value["a"])
    assert got["b"] == "text"


class TestWhatGoesInComesOut:
    """Where dask's way for a base, or pickle's own, makes something else."""

    def test_a_value_that_contains_itself(self):
        value = [np.ones(1000)]
        value.append({"whole": value})
        got = through_disk(value)
        assert got[1]["whole"] is got

    def test_what_is_shared_inside_is_shared(self):
        array, inner = np.ones(10_000), [1]
        first, second, objects, frame = through_disk(
            [
                array,
                {"again": array, "list": inner},
                np.array([{"in": inner}, None]),
                pd.DataFrame({"x": [inner]}, dtype=object),
            ]
        )
        assert second["again"] is first
        assert objects[0]["in"] is second["list"]
        assert frame.x[0] is second["list"]

    def test_arrays_in_containers_are_not_copied(self):
        arrays = [np.zeros(100_000), np.zeros(100_000, "M8[s]"), np.asfortranarray(np.zeros((300, 400)))]
        _, frames = DaskSerializer().dumps({"a": (arrays,), "view": Attributed.of(np.zeros(100_000))})
        for item in arrays:
            item.view("i8")[:] = 1
        assert [frame.nbytes for frame in frames[1:]] == [800_000, 800_000, 960_000, 800_000]
        assert all(set(bytes(frame[::8])) == {1} for frame in frames[1:4])

    def test_a_repeated_element_is_written_once(self):
        array = np.broadcast_to(np.arange(4.0), (100_000, 4))
        _, frames = DaskSerializer().dumps([array])
        assert sum(frame.nbytes for frame in frames) < 2000
        (got,) = through_disk([array])
        np.testing.assert_array_equal(got, array)
        assert got.strides == array.strides

    def test_large_bytes_in_a_container_are_not_copied(self):
        large = bytearray(2**26 + 1)
        header, frames = DaskSerializer().dumps([1, large, "x"])
        assert isinstance(frames[0], FrameStream)
        large[-1] = 7
        got = DaskSerializer().loads(header, [in_memory(frame) for frame in frames])
        assert got == [1, large, "x"]

    def test_an_error_whose_class_wants_something_else(self):
        cause = KeyError("why")
        error = Particular(3, "text")
        error.__cause__ = cause
        error.add_note("a note")
        got = through_disk({"error": error})["error"]
        assert type(got) is Particular
        assert (got.args, got.number, got.__notes__) == (("text: 3",), 3, ["a note"])
        assert (type(got.__cause__), got.__cause__.args) == (KeyError, ("why",))

    @pytest.mark.parametrize(
        "error",
        [OSError(2, "no", "file"), UnicodeDecodeError("utf8", b"x", 0, 1, "why"), StopIteration(5), SystemExit(3)],
    )
    def test_errors_of_pythons_own(self, error):
        got = through_disk([error])[0]
        assert type(got) is type(error)
        assert (got.args, str(got)) == (error.args, str(error))
        assert getattr(got, "filename", None) == getattr(error, "filename", None)

    def test_what_can_only_go_by_its_base(self):
        class Base:
            def __reduce__(self):
                raise TypeError("not by pickle")

        class Derived(Base):
            pass

        dask_serialize.register(Base)(lambda value: ({}, [b"base"]))
        dask_deserialize.register(Base)(lambda header, frames: Base())
        assert type(through_disk(Derived())) is Base
        assert type(through_disk([Derived()])[0]) is Base

    def test_no_room_is_no_fault_of_the_value(self):
        class Large:
            def __reduce__(self):
                raise MemoryError

        with pytest.raises(MemoryError):
            DaskSerializer().dumps([Large()])

    def test_a_class_without_a_hash(self):
        class Meta(type):
            def __eq__(cls, other):
                raise AssertionError("asked")

            __hash__ = None

        global Unhashable
        Unhashable = Meta("Unhashable", (), {"__module__": __name__})
        value = Unhashable()
        value.a = np.ones(3)
        header, frames = DaskSerializer().dumps([value, value])
        first, second = DaskSerializer().loads(header, frames)
        assert first is second
        assert type(first) is Unhashable
        assert first.a.sum() == 3


class Particular(ValueError):
    def __init__(self, number, text):
        super().__init__(f"{text}: {number}")
        self.number = number


class Attributed(np.ndarray):
    """Notes something in the object, which NumPy's pickles do not have."""

    @classmethod
    def of(cls, array):
        made = array.view(cls)
        made.unit = "m"
        return made


def explode(*_):
    raise ZeroDivisionError("cannot be made")


class Unloadable:
    """Can be pickled, and not be made from the pickle."""

    nbytes = 10_000

    def __reduce__(self):
        return explode, (np.ones(1000), {"a": Particular(1, "x")})


class UnloadableState:
    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        raise ZeroDivisionError("cannot be made")


class UnloadableNew(int):
    def __new__(cls, first, second):
        return super().__new__(cls, first + second)


class TestWhatCannotBeMadeAgain:
    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (Unloadable, "explode"),
            (UnloadableState, "UnloadableState"),
            (lambda: UnloadableNew(1, 2), "UnloadableNew"),
        ],
    )
    def test_the_first_fails_by_name_and_others_stay(self, make, name):
        serializer = DaskSerializer()
        with pytest.raises((ZeroDivisionError, TypeError)) as caught:
            through_disk([make()], serializer)
        (note,) = caught.value.__notes__
        assert f"{__name__}.{name} cannot make a value" in note
        for value in (make(), {"deep": [make()]}):
            with pytest.raises(TypeError, match=f"{name} could not make a value from what was written before"):
                serializer.dumps(value)
        assert through_disk([Plain(1)], serializer) == [Plain(1)], "others go on"

    def test_a_library_of_all_values_is_not_to_blame(self):
        class Thing:
            pass

        dask_serialize.register(Thing)(lambda value: ({}, [b"x"]))
        dask_deserialize.register(Thing)(explode)
        serializer = DaskSerializer()
        for value in (Thing(), [Thing(), np.ones(1000)]):
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    through_disk(value, serializer)
        assert through_disk([np.ones(1000)], serializer)[0].sum() == 1000

    def test_no_room_is_not_to_blame(self):
        serializer = DaskSerializer()
        with pytest.raises(MemoryError):
            through_disk(NoRoom(), serializer)
        assert serializer.dumps(NoRoom())

    @pytest.mark.cluster
    @pytest.mark.parametrize("scattered", [False, True])
    def test_a_task_fails_by_name_and_a_client_in_the_process_does_not_ask_for_ever(self, scattered):
        """What can be computed is computed anew for the client, and then stays in memory."""
        data = gpuspill.data(host_limit="5 kB", follow_process_memory=False)
        options = {"n_workers": 1, "processes": False, "dashboard_address": ":0", "silence_logs": 60}
        with LocalCluster(**options, data=data) as cluster, Client(cluster) as client:
            future = client.scatter(Unloadable(), hash=False) if scattered else client.submit(Unloadable)
            wait(future)
            (worker,) = cluster.workers.values()
            worker.data.manager.limits.evict_all()
            assert not worker.data.manager.is_resident(future.key)
            used = client.submit(name_of, future)
            with pytest.raises(ZeroDivisionError) as caught:
                used.result(timeout=30)
            assert "explode cannot make a value" in caught.value.__notes__[0]
            if scattered:
                with pytest.raises(FutureCancelledError):
                    future.result(timeout=30)
                return
            assert type(future.result(timeout=30)) is Unloadable
            worker.data.manager.limits.evict_all()
            assert worker.data.manager.is_resident(future.key)
            assert client.submit(name_of, future, pure=False).result(timeout=30) == "Unloadable"


def name_of(value):
    return type(value).__name__


class NoRoom:
    def __reduce__(self):
        return no_room, ()


def no_room():
    raise MemoryError


class TestBoundObjects:
    """Of which a scheduler must know as long as they are there, and which are of no use without their client."""

    @pytest.fixture
    def bound(self):
        with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as client:
            yield {
                "future": client.submit(int),
                "queue": Queue("q", client=client),
                "variable": Variable("v", client=client),
                "event": Event("e", client=client),
                "lock": Lock("l"),
                "graph": client.persist(delayed(int)()),
                "array": client.persist(da.ones(3)),
            }

    @pytest.mark.cluster
    def test_they_are_not_written(self, bound):
        for name, item in bound.items():
            for value in (item, [np.ones(10_000), {name: item}], np.array([item, None], dtype=object)):
                with pytest.raises(TypeError, match="which scheduler and client must know of"):
                    DaskSerializer().dumps(value)


# -- without holding the interpreter's lock all the time -----------------------------------------------------


class Old:
    """Refers to itself by name in lines, as the oldest pickles do."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_long_pickle_is_read_in_pieces(monkeypatch, protocol):
    pieces = []

    class Reader(pickling._Reader):
        def read(self, nbytes):
            pieces.append(nbytes)
            return super().read(nbytes)

    monkeypatch.setattr(pickling, "_Reader", Reader)
    value = [[n, str(n), Old(n % 7)] for n in range(40_000)] + [b"x" * 200_000, "y" * 300_000, bytearray(100_000)]
    header = {"serializer": "pickle", "writeable": ()}
    pickled = pickle.dumps(value, protocol=protocol)
    assert len(pickled) > 2**20
    got = pickling.unpickled(header, [memoryview(pickled)])
    assert [item[:2] for item in got[:-3]] == [item[:2] for item in value[:-3]]
    assert [item[2].x for item in got[:-3]] == [n % 7 for n in range(40_000)]
    assert got[-3:] == value[-3:]
    if protocol >= 4:
        assert len(pieces) > 10
    assert gc.isenabled()


def test_a_long_pickle_is_written_and_read_in_pieces(monkeypatch):
    """Each piece lets other threads run, the event loop's above all."""
    written, read = [], []

    class Pieces(pickling._Pieces):
        def write(self, piece):
            written.append(len(piece))
            super().write(piece)

    class Reader(pickling._Reader):
        def read(self, nbytes):
            read.append(nbytes)
            return super().read(nbytes)

    monkeypatch.setattr(pickling, "_Pieces", Pieces)
    monkeypatch.setattr(pickling, "_Reader", Reader)
    value = [[n, str(n)] for n in range(100_000)] + [np.arange(10_000)]
    got = through_disk(value)
    assert got[:-1] == value[:-1]
    assert got[-1].flags.writeable
    np.testing.assert_array_equal(got[-1], value[-1])
    assert max(written + read) < 2 * 64 * 1024
    assert min(len(written), len(read)) > 10


@pytest.mark.parametrize("enabled", [True, False])
def test_reading_a_long_pickle_leaves_the_collector_as_it_was(enabled):
    value = [[n, str(n)] for n in range(100_000)]
    header, frames = DaskSerializer().dumps(value)
    cut_off = memoryview(bytearray(frames[0])[:-1000])
    (gc.enable if enabled else gc.disable)()
    try:
        assert DaskSerializer().loads(header, [bytearray(frames[0])]) == value
        assert gc.isenabled() == enabled
        with pytest.raises(Exception, match=r"truncated|Ran out of input"):
            DaskSerializer().loads(header, [cut_off])
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
