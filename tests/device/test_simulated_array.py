"""Arrays of the simulated device: NumPy's protocols, CuPy's manners towards the host, memory."""

import copy
import pickle

import numpy as np
import pytest

from gpuspill import simulated
from gpuspill.device.port import OutOfMemory, UnorderedAccess, UseAfterFree
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.simulated.arrays.launch import launch


@pytest.fixture(autouse=True)
def device():
    """A device for the test alone; it must be empty afterwards, unless the test holds something."""
    with simulated.use(SimulatedDevice(1 << 20, clock=ManualClock())) as device:
        yield device
    device.validate()
    assert device.statistics().violations == 0


@pytest.fixture
def host():
    return np.random.default_rng(0).random((6, 8))


# -- to and from the host ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
        np.arange(24)[::3],
        np.arange(24)[::-1],
        np.broadcast_to(np.arange(3), (2, 3)),
        np.empty((0, 3)),
        np.array(5, "i2"),
        np.array([True, False]),
        np.array([1 + 2j], "c8"),
        np.float32(1.5),
        [[1, 2], [3, 4]],
        7,
    ],
    ids=repr,
)
def test_values_survive_the_round_trip(value, device):
    array = asarray(value)
    expected = np.asarray(value)
    assert (array.shape, array.dtype, array.nbytes) == (expected.shape, expected.dtype, expected.nbytes)
    np.testing.assert_array_equal(asnumpy(array), expected)
    assert device.statistics().bytes_to_device == expected.nbytes


def test_an_array_in_any_order_keeps_its_strides():
    value = np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0)
    array = asarray(value)
    assert array.strides == value.strides
    assert asnumpy(array).strides == value.strides


def test_converting_what_is_there_copies_nothing(device):
    array = asarray([1.0, 2.0])
    before = device.statistics()
    assert asarray(array) is array
    assert asarray(array, dtype=float) is array
    assert device.statistics() == before
    assert asarray(array, dtype="f4").dtype == np.float32
    assert np.array(array, like=array).allocation is not array.allocation


def test_arrays_in_lists_are_put_together_on_the_device(device):
    parts = [asarray([1.0, 2.0]), asarray([3.0, 4.0])]
    before = device.statistics().bytes_to_host
    array = asarray(parts)
    assert device.statistics().bytes_to_host == before
    np.testing.assert_array_equal(asnumpy(array), [[1, 2], [3, 4]])


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]", ">f8", [("a", int)], np.longdouble])
def test_only_booleans_and_numbers_go_on_the_device(dtype):
    with pytest.raises(TypeError, match="cannot be on the simulated device"):
        simulated.empty(3, dtype)


def test_an_array_may_move_to_another_device():
    other = SimulatedDevice(1000)
    array = asarray([1.0, 2.0])
    moved = asarray(array, device=other)
    assert moved.device is other
    np.testing.assert_array_equal(asnumpy(moved), [1, 2])
    with pytest.raises(ValueError, match="another on"):
        array + moved


# -- as CuPy: nothing implicit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        np.asarray,
        np.array,
        lambda a: np.asarray([a, a]),
        lambda a: np.array(a, dtype=float),
        memoryview,
        lambda a: np.frombuffer(a),
        lambda a: a + np.ones(8),
        lambda a: np.ones(8) + a,
        lambda a: np.ones((6, 8)) * a,
        lambda a: np.add(a, a, out=np.empty((6, 8))),
        lambda a: np.concatenate([a, np.ones((1, 8))]),
        lambda a: np.copyto(np.empty((6, 8)), a),
        lambda a: np.save("/dev/null", a),
        lambda a: np.array_repr(a),
        lambda a: a.__setitem__(0, np.ones(8)),
        lambda a: np.ones((6, 8)).__setitem__(slice(None), a),
        lambda a: a.dot(np.ones(8)),
        lambda a: np.where(a > 0, a, np.zeros((6, 8))),
    ],
)
def test_the_host_does_not_get_at_the_memory_unasked(read, host, device):
    array = asarray(host)
    before = device.statistics().bytes_to_host
    with pytest.raises(TypeError):
        read(array)
    assert device.statistics().bytes_to_host == before


@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        (float, 3.0),
        (int, 3),
        (complex, 3 + 0j),
        (bool, True),
        (bytes, np.array([3.0]).tobytes()),
        (lambda a: a.item(), 3.0),
        (lambda a: a.tolist(), [3.0]),
        (lambda a: f"{a:.1f}", "3.0"),
        (lambda a: [10, 11, 12, 13][a.astype(int).reshape(())], 13),
        (lambda a: a.get()[0], 3.0),
    ],
)
def test_asking_for_a_scalar_copies_and_waits(convert, expected, device):
    array = asarray([3.0])
    before = device.statistics()
    assert convert(array) == expected
    assert device.statistics().copies_to_host == before.copies_to_host + 1
    assert device.statistics().copies_in_flight == 0


def test_no_scalar_can_be_made_of_many_elements():
    array = asarray([1.0, 2.0])
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)
    with pytest.raises(ValueError, match="size 1"):
        float(array)


def test_a_representation_reads_nothing(device):
    array = asarray([1.0, 2.0])
    before = device.statistics()
    assert "(2,) float64" in repr(array)
    assert str(array) == repr(array) == f"{array}"
    assert device.statistics() == before


def test_an_array_is_no_key():
    with pytest.raises(TypeError, match="unhashable"):
        hash(asarray(1))


# -- computing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compute",
    [
        lambda a: a + 1,
        lambda a: 1 - a,
        lambda a: -a,
        lambda a: a**2,
        lambda a: a + a.T[:6, :6].sum(),
        lambda a: a @ a.T,
        lambda a: a[:, 0] @ a[:, 1],
        lambda a: np.float32(2) * a,
        lambda a: a > 0.5,
        lambda a: ~(a > 0.5) & (a < 0.9),
        lambda a: divmod(a, 0.3),
        lambda a: np.exp(a),
        lambda a: np.add.reduce(a, axis=1),
        lambda a: np.add.accumulate(a),
        lambda a: np.add.reduceat(a, [0, 3]),
        lambda a: np.multiply.outer(a[0], a[1]),
        lambda a: np.modf(a),
        lambda a: np.add(a, 1, where=a > 0.5, out=np.zeros_like(a)),
        lambda a: a.sum(),
        lambda a: a.sum(axis=0, keepdims=True),
        lambda a: (a.mean(), a.std(axis=1), a.var(), a.min(), a.max(axis=0), a.prod(), a.argmax(), a.argmin(axis=1)),
        lambda a: (a.cumsum(axis=1), a.cumprod(), a.round(1), a.clip(0.2, 0.8), a.trace(), a.any(), a.all(axis=0)),
        lambda a: (a.astype("f4"), a.astype(int), a.conj(), a.flatten(), a.copy(), a.copy("F")),
        lambda a: (a.take([0, 2], axis=1), a.repeat(2, axis=0), a.argsort(), a[0].searchsorted(0.5)),
        lambda a: (a > 0.5).nonzero(),
        lambda a: np.concatenate([a, a], axis=1),
        lambda a: np.stack([a, a]),
        lambda a: np.block([[a, a], [a, a]]),
        lambda a: np.tensordot(a, a, axes=((0,), (0,))),
        lambda a: np.einsum("ij,kj->ik", a, a),
        lambda a: np.where(a > 0.5, a, 0),
        lambda a: (np.sort(a), np.unique(a), np.median(a), np.percentile(a, [10, 50])),
        lambda a: (np.zeros_like(a), np.ones_like(a, dtype=int), np.full_like(a, 3, shape=(2,))),
        lambda a: np.pad(a, 1, mode="edge"),
        lambda a: np.linalg.svd(a),
        lambda a: np.linalg.qr(a).R,
        lambda a: np.split(a + 0, 2),
        lambda a: np.apply_along_axis(np.sum, 0, a),
        lambda a: np.histogram(a, bins=4, range=(0, 1)),
        lambda a: np.cov(a),
        lambda a: (np.real(a + 1j), np.imag(a * 1j), (a + 1j).real, a.imag),
        lambda a: np.asarray([1, 2], like=a),
        lambda a: np.arange(3, like=a),
        lambda a: np.full((2, 2), 7.0, like=a),
        lambda a: np.array([[1, 2]], like=a, ndmin=3),
        lambda a: np.ascontiguousarray(a.T, like=a),
        lambda a: np.asfortranarray(a, like=a),
        lambda a: (a[a > 0.5], a[[0, 2]], a[:, np.array([1, 0])], a[np.array([0, 1]), np.array([2, 3])]),
        lambda a: a[asindex(a, [0, 2, 1])],
    ],
)
def test_results_are_numpys(compute, host):
    expected, found = compute(host), compute(asarray(host))
    if not isinstance(expected, tuple | list):
        expected, found = [expected], [found]
    assert type(found) is type(expected)
    assert len(found) == len(expected)
    for want, got in zip(expected, found, strict=True):
        assert isinstance(got, simulated.Array)
        assert (got.dtype, got.shape) == (np.asarray(want).dtype, np.shape(want))
        np.testing.assert_array_equal(asnumpy(got), want)


def asindex(array, indices):
    return np.asarray(indices, like=array) if isinstance(array, simulated.Array) else np.asarray(indices)


in_place = pytest.mark.parametrize(
    "change",
    [
        lambda a: a.__setitem__(0, 5),
        lambda a: a.__setitem__((slice(None), 2), a[:, 3]),
        lambda a: a.__setitem__(a > 0.5, 0),
        lambda a: a.__setitem__((Ellipsis, 1), 7),
        lambda a: a.__iadd__(1),
        lambda a: a[1:3].__imul__(a[3:5]),
        lambda a: np.add(a, a, out=a),
        lambda a: np.sum(a, axis=0, out=a[0]),
        lambda a: a.sum(axis=1, out=a[:, 0]),
        lambda a: np.add.at(a, [0, 0, 1], 1),
        lambda a: a.fill(3),
        lambda a: a.sort(axis=0),
        lambda a: a.put([0, 5], 9),
        lambda a: np.copyto(a, a[::-1]),
        lambda a: np.fill_diagonal(a, 0),
        lambda a: np.putmask(a, a > 0.5, 0),
    ],
)


@in_place
def test_changes_in_place_are_numpys(change, host):
    array, other = asarray(host), host.copy()
    memory = array.allocation
    change(array)
    change(other)
    np.testing.assert_array_equal(asnumpy(array), other)
    assert array.allocation is memory


@in_place
def test_changing_what_is_being_copied_is_found_out(change, host, device):
    array = asarray(host)
    event = device.copy_to_host(array.allocation, bytearray(array.nbytes), ordered(device.stream("to_host"), device))
    _ = array + 1  # looking is no harm
    with pytest.raises(UnorderedAccess):
        change(array)
    event.wait()
    change(array)
    device._schedule.violations = 0  # it was meant


def ordered(stream, device):
    """Order a stream after all computations so far."""
    stream.wait(device.current_stream().record())
    return stream


def test_what_is_given_as_out_is_returned():
    a, out = asarray([1.0, 2.0]), simulated.empty(2)
    assert np.add(a, a, out=out) is out
    assert a.__iadd__(1) is a


def test_metadata_stays_on_the_host(host):
    array = asarray(host)
    assert (np.shape(array), np.ndim(array), np.size(array)) == ((6, 8), 2, 48)
    assert np.result_type(array, 1.0) == np.float64
    assert isinstance(np.allclose(array, array), bool)


def test_foreign_types_are_left_to_decide():
    class Foreign:
        __array_ufunc__ = None

        def __radd__(self, other):
            return "foreign"

    class Duck:
        def __array_ufunc__(self, *args, **kwargs):
            return "ufunc"

        def __array_function__(self, *args, **kwargs):
            return "function"

    array = asarray([1.0])
    assert array + Foreign() == "foreign"
    assert array + Duck() == "ufunc"
    assert np.concatenate([array, Duck()]) == "function"
    with pytest.raises(TypeError):
        array + "text"


# -- views and memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[1],
        lambda a: a[1, 2],
        lambda a: a[1:, ::-2],
        lambda a: a[:, None],
        lambda a: a[...],
        lambda a: a.T,
        lambda a: a.reshape(4, 12),
        lambda a: a.ravel(),
        lambda a: a.swapaxes(0, 1),
        lambda a: a[:1].squeeze(),
        lambda a: a.view("i8"),
        lambda a: a.diagonal(),
        lambda a: np.transpose(a),
        lambda a: np.broadcast_to(a, (2, 6, 8)),
        lambda a: np.flip(a),
        lambda a: np.moveaxis(a, 0, 1),
        lambda a: np.split(a, 2)[1],
        lambda a: np.expand_dims(a, 0),
        lambda a: a.real,
        lambda a: next(iter(a)),
        lambda a: np.asarray(a, like=a),
        lambda a: simulated.from_frames(*simulated.to_frames(a[1:, ::3])),
        lambda a: simulated.rebuild(*simulated.describe(a[2:4, 1])),
    ],
)
def test_views_share_memory_and_compute_nothing(view, host, device):
    array = asarray(host)
    before = device.statistics()
    found = view(array)
    assert device.statistics() == before
    assert found.allocation is array.allocation
    if 0 not in found.strides:
        found[...] = 7
        assert (asnumpy(array) == (np.int64(7).view(float) if found.dtype == "i8" else 7)).any()


def test_a_view_may_be_taken_of_memory_that_is_not_there_yet(device):
    """Looking at it is no use of it; copying it is."""
    allocation = device.allocate(80)
    event = device.copy_to_device(np.arange(10.0), allocation, device.stream("to_device"))
    array = simulated.rebuild(allocation, 0, (2, 5), (40, 8), "f8")
    view = array.T[1:]
    assert view.shape == (4, 2)
    for use in (lambda: array + 1, lambda: view.reshape(8), lambda: asnumpy(view), lambda: array[[0, 1]]):
        with pytest.raises(UnorderedAccess):
            use()
    event.wait()
    np.testing.assert_array_equal(asnumpy(view), np.arange(10.0).reshape(2, 5).T[1:])
    device._schedule.violations = 0  # they were meant


@pytest.mark.parametrize(
    "compute", [lambda a: a + 1, lambda a: a.sum(axis=0), lambda a: np.exp(a), lambda a: a[[0, 1]]]
)
def test_copying_a_result_has_to_be_ordered_after_its_computation(compute, host, device):
    array = asarray(host)
    result = compute(array)
    stream, buffer = device.stream("to_host"), bytearray(result.nbytes)
    with pytest.raises(UnorderedAccess, match="'default'"):
        device.copy_to_host(result.allocation, buffer, stream)
    stream.wait(device.current_stream().record())
    device.copy_to_host(result.allocation, buffer, stream).wait()
    assert buffer == asnumpy(result).tobytes()
    device._schedule.violations = 0  # it was meant


def test_memory_is_freed_with_the_last_array(device):
    array = asarray(np.zeros(100))
    view = array[50:]
    del array
    assert device.statistics().live_bytes == 800
    scalar = view.sum()
    del view
    assert device.statistics().live_bytes == 8
    assert float(scalar) == 0
    del scalar
    assert device.statistics().live_bytes == 0


def test_results_are_charged_what_they_hold(device):
    array = asarray(np.zeros((100, 100)))
    before = device.statistics().live_bytes
    results = [array.sum(axis=0), array[array == 1], array[:, [0]], np.unique(array)]
    assert device.statistics().live_bytes - before == sum(result.nbytes for result in results)
    assert all(result.allocation.storage.nbytes == result.nbytes for result in results)


@pytest.mark.parametrize("part", [lambda a: (a + 1)[1:3], lambda a: (a + 1)[:, ::2], lambda a: (a + 1).T[0]])
def test_a_result_that_is_part_of_something_larger_keeps_its_part_only(part, host, device):
    result = launch(simulated.Array, part, (asarray(host),), {}, what="part")
    np.testing.assert_array_equal(asnumpy(result), part(host))
    memory = result.allocation.storage
    while memory.base is not None:
        memory = memory.base
    assert memory.nbytes == result.nbytes == result.allocation.nbytes


def test_running_out_of_memory(device):
    array = asarray(np.zeros(1 << 16))  # half of it
    asked = []

    def hook(nbytes, retries):
        asked.append((nbytes, retries))
        return False

    device.on_out_of_memory(hook)
    other = array + 1
    with pytest.raises(OutOfMemory):
        array + 1
    with pytest.raises(OutOfMemory):
        asarray(np.zeros(10))
    with pytest.raises(MemoryError):
        simulated.empty(1)
    assert asked == [(1 << 19, 0), (80, 0), (8, 0)]
    other += 1  # in place needs none
    np.testing.assert_array_equal(asnumpy(other), 2)  # nor does the way out
    np.testing.assert_array_equal(asnumpy(other[::2]), 2)


def test_a_hook_makes_room_for_a_result(device):
    arrays = {"a": asarray(np.ones(1 << 16)), "b": asarray(np.ones(1 << 16))}
    device.on_out_of_memory(lambda nbytes, retries: arrays.pop("b", None) is not None)
    result = arrays["a"] + 1
    np.testing.assert_array_equal(asnumpy(result), 2)


def test_an_array_on_freed_memory_cannot_be_used(device):
    array = asarray([1.0, 2.0])
    device.free(array.allocation)
    for use in (lambda: array + 1, lambda: asnumpy(array), lambda: array[0], lambda: array.__setitem__(0, 1)):
        with pytest.raises(UseAfterFree):
            use()


def test_flags_tell_the_layout():
    array = asarray(np.zeros((3, 4)))
    assert array.flags.c_contiguous
    assert not array.flags["F_CONTIGUOUS"]
    assert array.T.flags["F_CONTIGUOUS"]
    assert array.flags.owndata
    assert not array[1:].flags.owndata
    assert not array[:, 1:].flags.forc


def test_making_arrays(device):
    np.testing.assert_array_equal(asnumpy(simulated.zeros((2, 3), "f4")), np.zeros((2, 3), "f4"))
    np.testing.assert_array_equal(asnumpy(simulated.ones(4)), np.ones(4))
    np.testing.assert_array_equal(asnumpy(simulated.full((2,), 5)), np.full((2,), 5))
    np.testing.assert_array_equal(asnumpy(simulated.arange(2, 8, 3, dtype="i2")), np.arange(2, 8, 3, dtype="i2"))
    assert simulated.empty((2, 3), order="F").strides == (8, 16)
    assert simulated.Array(shape=(0,), dtype="f4").shape == (0,)
    with pytest.raises(ValueError, match="negative"):
        simulated.empty((2, -1))
    with pytest.raises(ValueError, match="not within"):
        simulated.Array((4,), "f8", device.allocate(31))
    with pytest.raises(ValueError, match="not within"):
        simulated.Array((4,), "f8", device.allocate(32), 8, (-8,))
    simulated.Array((4,), "f8", device.allocate(32), 24, (-8,))


# -- copying and pickling -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_goes_through_the_host(protocol, host, device):
    array = asarray(host)[1:, ::2]
    message = pickle.dumps(array, protocol)
    with simulated.use(SimulatedDevice(1000)) as other:
        received = pickle.loads(message)
    assert received.device is other
    np.testing.assert_array_equal(asnumpy(received), host[1:, ::2])


def test_pickling_out_of_band_copies_once(host):
    array = asarray(host)
    buffers = []
    message = pickle.dumps(array, 5, buffer_callback=buffers.append)
    assert len(message) < 1000
    np.testing.assert_array_equal(asnumpy(pickle.loads(message, buffers=buffers)), host)


def test_copies_have_memory_of_their_own(host, device):
    array = asarray(host)
    before = device.statistics().bytes_to_host
    for made in (copy.copy(array), copy.deepcopy(array), array.copy(), copy.deepcopy([array])[0]):
        assert made.allocation is not array.allocation
        assert (asnumpy(made) == host).all()
    assert device.statistics().bytes_to_host == before + 4 * array.nbytes  # by asnumpy only


@pytest.mark.parametrize("key", [np.s_[1:4, ::3], np.s_[::-1], np.s_[4:1:-1, ::-2], np.s_[2, 3], np.s_[:, :0]])
def test_frames_alias_the_memory(key, host, device):
    array = asarray(host)[key]
    header, (frame,) = simulated.to_frames(array)
    assert frame.allocation is array.allocation
    assert (frame.dtype, frame.ndim) == (np.uint8, 1)
    low, high = array.layout.span
    assert (frame.offset, frame.nbytes) == (low, high - low)
    moved = asarray(asnumpy(frame))
    rebuilt = simulated.from_frames(header, [moved])
    np.testing.assert_array_equal(asnumpy(rebuilt), host[key])
    assert rebuilt.strides == array.strides
