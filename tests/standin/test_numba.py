"""Numba's arrays, by Numba itself."""

import gc

import numpy as np
import pytest

from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.device.cuda.device import GpuDevice
from gpuspill.device.cuda.driver import CudaDriver
from gpuspill.device.port import CopyPlan
from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.testing.devices import ArrayTests
from tests.standin.rig import MB, Rig

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed: make test-cuda")


@pytest.fixture(scope="module")
def cuda():
    from numba import cuda

    gc.freeze()  # what was imported is looked at no more
    return cuda


@pytest.fixture(autouse=True)
def nothing_is_left(cuda, standin):
    """Numba frees late; then nothing is on the device that was not before."""
    free(cuda)
    before = standin.count("live_bytes")
    yield
    free(cuda)
    assert standin.count("live_bytes") == before


def free(cuda):
    gc.collect()
    cuda.current_context().memory_manager.deallocations.clear()
    cuda.synchronize()


def live(standin, cuda):
    free(cuda)
    return standin.count("live_bytes")


class TestArrays(ArrayTests):
    @pytest.fixture
    def device(self, cuda):
        self.cuda = cuda
        device = GpuDevice(CudaDriver(), plan=CopyPlan())
        yield device
        device.close()

    @pytest.fixture(autouse=True)
    def _is_valid_afterwards(self):
        return

    def asarray(self, host):
        return self.cuda.to_device(host)

    def asnumpy(self, array):
        return array.copy_to_host()

    def views(self, array):
        return [array, array[1:], array[:, 2:5], array[2, 3:], array[::2]]  # its transpose is a kernel

    def write(self, array, index, value):
        row, column = index
        array[row, column : column + 1].copy_to_device(np.array([value]))  # an assignment is a kernel

    def forget(self):
        free(self.cuda)


@pytest.fixture
def rig(tmp_path, standin):
    rig = Rig(tmp_path, standin)
    yield rig
    rig.close()


@pytest.mark.parametrize("way", ["to_host", "to_disk"])
def test_each_value_is_itself_after_each_way(rig, cuda, way):
    """Numba frees late, ten at a time: few values would pass by luck."""
    for number in range(40):
        rig.put(number, cuda.to_device(np.full(1000, float(number))))
        assert rig.tier.statistics().units == number + 1
    for _ in range(3):
        getattr(rig, way)()
        assert rig.tier.statistics().device_nbytes == 0
        for number in range(40):
            np.testing.assert_array_equal(rig.get(number).copy_to_host(), np.full(1000, float(number)))


def test_the_last_view_keeps_the_memory(rig, cuda, standin):
    """What is stored is a view, and the array it was made of is gone."""
    array = cuda.to_device(np.arange(1000.0))
    rig.put("view", array[100:200])
    del array
    for _ in range(20):
        cuda.to_device(np.zeros(1000))
    free(cuda)
    np.testing.assert_array_equal(rig.get("view").copy_to_host(), np.arange(100.0, 200.0))
    rig.to_disk()
    np.testing.assert_array_equal(rig.get("view").copy_to_host(), np.arange(100.0, 200.0))


def test_an_address_that_comes_again_is_another_unit(rig, cuda):
    addresses = set()
    for number in range(12):
        array = cuda.to_device(np.full(1000, float(number)))
        addresses.add(array.device_ctypes_pointer.value)
        rig.put(number, array)
        del array
        rig.to_host()
        free(cuda)
    assert len(addresses) < 12
    assert rig.tier.statistics().units == 12
    for number in range(12):
        assert rig.get(number).copy_to_host()[0] == number


def test_an_address_that_comes_again_while_other_code_refers_to_the_old_memory(rig, cuda):
    """Numba frees memory with the last of those that own it: that an object of it is there says nothing."""
    array = cuda.to_device(np.full(1000, 1.0))
    rig.put("old", array)
    address, kept = array.device_ctypes_pointer.value, array.gpu_data.owner
    del array
    rig.to_host()
    free(cuda)
    for _ in range(20):
        other = cuda.to_device(np.full(1000, 5.0))
        if other.device_ctypes_pointer.value == address:
            break
    assert other.device_ctypes_pointer.value == address
    rig.put("new", other)
    del other
    assert rig.tier.statistics().units == 2
    rig.to_host()
    assert rig.get("old").copy_to_host()[0] == 1.0
    assert rig.get("new").copy_to_host()[0] == 5.0
    del kept


def test_an_address_that_comes_again_while_the_old_arrays_memory_lingers(rig, cuda, standin):
    """A view that the store does not know keeps the memory; it is counted, and never taken for another value's."""
    array = cuda.to_device(np.full(1000, 1.0))
    view = array[10:20]
    rig.put("old", array)
    del array
    rig.to_host()
    assert rig.tier.statistics().lingering_nbytes == 8000
    rig.put("view", view)
    np.testing.assert_array_equal(rig.get("old").copy_to_host(), np.full(1000, 1.0))
    address = view.device_ctypes_pointer.value - 80
    del view, rig.skeletons["view"]
    rig.to_host()
    free(cuda)
    assert rig.tier.statistics().lingering_nbytes == 0
    for _ in range(20):
        other = cuda.to_device(np.full(1000, 5.0))
        if other.device_ctypes_pointer.value == address:
            break
    rig.put("new", other)
    del other
    assert rig.get("new").copy_to_host()[0] == 5.0
    assert rig.get("old").copy_to_host()[0] == 1.0


def test_views_share_an_allocation_through_all_tiers(rig, cuda, standin):
    array = cuda.to_device(np.arange(1000.0).reshape(20, 50))
    rig.put("a", array)
    rig.put("b", {"x": [array[3:7, ::2], array[0]]})
    del array
    assert rig.tier.statistics().units == 1
    for _ in range(2):
        rig.to_disk()
        assert live(standin, cuda) == 0
        whole, part = rig.get("a"), rig.get("b")
        assert rig.tier.statistics().device_nbytes == 8000
        whole[3, :1].copy_to_device(np.array([-1.0]))
        assert part["x"][0].copy_to_host()[0, 0] == -1.0
        whole[3, :1].copy_to_device(np.array([150.0]))
        np.testing.assert_array_equal(part["x"][1].copy_to_host(), np.arange(50.0))
        del whole, part


def test_views_share_an_allocation_after_they_were_sent(rig, cuda, standin):
    """A list of arrays pickles each by itself; they are put on one piece of memory, with what they reach over."""
    host = np.arange(10_000.0).reshape(20, 500)
    array = cuda.to_device(host)
    value = [array[3:7], array[5], array[3:9, ::2], cuda.to_device(host[:1])]
    del array
    header, frames = DaskSerializer().dumps(value, rig.tier.overlaps(value))
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [5 * 4000 + 499 * 8]  # the small one is in the pickle
    del value
    sent = DaskSerializer().loads(header, [bytearray(frame) for frame in frames])
    rig.put("sent", sent)
    statistics = rig.tier.statistics()
    assert (statistics.units, statistics.device_nbytes) == (2, 5 * 4000 + 499 * 8 + 4000)
    for part, expected in zip(sent, [host[3:7], host[5], host[3:9, ::2], host[:1]], strict=True):
        assert part.strides == expected.strides or part.ndim == 1
        np.testing.assert_array_equal(part.copy_to_host(), expected)
    sent[1][:1].copy_to_device(np.array([-1.0]))
    del sent, part
    rig.to_disk()
    assert live(standin, cuda) == 0
    whole, row, columns, _ = rig.get("sent")
    assert whole.copy_to_host()[2, 0] == row.copy_to_host()[0] == columns.copy_to_host()[2, 0] == -1.0


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype([("a", "<i4"), ("b", "<f8")]),
        np.dtype({"names": ["a", "b"], "formats": ["<i2", "<f4"], "offsets": [0, 4], "itemsize": 12}),
        np.dtype("<M8[ns]"),
        np.dtype("<c16"),
        np.dtype("?"),
        np.dtype("f2"),
    ],
    ids=str,
)
def test_element_types_come_back(rig, cuda, dtype):
    host = np.frombuffer(np.random.default_rng(1).integers(0, 2, 96 * dtype.itemsize, np.uint8), dtype)
    rig.put("x", [cuda.to_device(host), cuda.to_device(host)[::3]])
    rig.to_disk()
    whole, part = rig.get("x")
    assert (whole.dtype, part.dtype) == (dtype, dtype)
    assert whole.copy_to_host().tobytes() == host.tobytes()
    np.testing.assert_array_equal(part.copy_to_host(), host[::3])


def test_an_array_stays_on_the_stream_it_is_bound_to(rig, cuda):
    stream = cuda.stream()
    rig.put("x", cuda.to_device(np.arange(100.0), stream=stream))
    rig.to_disk()
    array = rig.get("x")
    assert array.stream is stream
    host = array.copy_to_host()
    stream.synchronize()
    np.testing.assert_array_equal(host, np.arange(100.0))


def test_what_a_stream_has_not_done_yet_is_waited_for(rig, cuda, standin):
    """A non-blocking stream that the port knows nothing of, and copies that are done late."""
    standin.speed(latency=0.05)
    stream = cuda.stream()
    pinned = cuda.pinned_array(1000)
    pinned[:] = 7.0
    array = cuda.device_array(1000)
    array.copy_to_device(pinned, stream=stream)
    rig.put("x", array)
    del array
    rig.to_disk()
    np.testing.assert_array_equal(rig.get("x").copy_to_host(), np.full(1000, 7.0))


def test_subclasses_stay_as_they_are(rig, cuda):
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    class Special(DeviceNDArray):
        more = "more"

    plain = cuda.to_device(np.arange(10.0))
    special = Special(plain.shape, plain.strides, plain.dtype, gpu_data=plain.gpu_data)
    value = [special]
    assert rig.tier.proxify(value) is value
    assert rig.tier.new_nbytes(value) == 0


def test_arrays_of_other_devices_are_left_alone(rig, cuda):
    with cuda.gpus[1]:
        array = cuda.to_device(np.arange(10.0))
        value = {"x": array}
        assert rig.tier.proxify(value) is value
        assert ArrayRegistry(all_adapters()).describe(array).identity.device == "cuda:1"
        del array, value
        free(cuda)
    assert rig.tier.statistics().units == 0


def test_empty_arrays(rig, cuda):
    rig.put("x", [cuda.device_array((0, 3)), cuda.device_array((0,), "i4")])
    rig.to_disk()
    first, second = rig.get("x")
    assert (first.shape, second.shape, second.dtype) == ((0, 3), (0,), np.dtype("i4"))


def test_more_than_the_device(tmp_path, cuda, standin):
    """Four times as much as it has, within a limit, all of it right at the end."""
    rig = Rig(tmp_path, standin, limit=8 * MB, host_limit=16 * MB)
    for number in range(64):
        with rig.tier.admit(number, [], MB) as admission:  # as a worker does before it runs a task
            admission.wait()
            rig.skeletons[number] = rig.tier.proxify(cuda.to_device(np.full(MB // 8, float(number))), number)
    for number in range(64):
        assert (rig.get(number).copy_to_host() == number).all()
    assert rig.tier.statistics().spills >= 48
    assert rig.disk.statistics().records
    rig.close()


def test_memory_lingers_for_views_of_arrays_that_were_built_on_it_anew(rig, cuda):
    """Whoever holds it: the array that was stored is gone, and what was handed out in its place was a new one."""
    array = cuda.to_device(np.arange(100.0))
    view = array[50:]
    rig.put("x", array)
    del array
    other = rig.get("x")[:10]
    rig.to_host()
    assert rig.tier.statistics().lingering_nbytes == 800
    del view
    rig.to_host()
    assert rig.tier.statistics().lingering_nbytes == 800
    del other
    rig.to_host()
    assert rig.tier.statistics().lingering_nbytes == 0


@pytest.mark.parametrize("anew", [False, True])
def test_what_is_stored_again_after_it_left_is_put_back_on_its_memory(rig, cuda, anew):
    """It may have been changed in place meanwhile, and what was written is of before that."""
    array = cuda.to_device(np.arange(100.0))
    rig.put("x", array)
    if anew:  # an array that is built on the memory of the one that was stored
        del array
        array = rig.get("x")
    view = array[50:]
    del array
    rig.to_host()
    assert (rig.tier.statistics().device_nbytes, rig.tier.statistics().lingering_nbytes) == (0, 800)
    view.copy_to_device(np.full(50, -1.0))
    rig.put("view", view)
    assert (rig.tier.statistics().device_nbytes, rig.tier.statistics().lingering_nbytes) == (800, 0)
    assert rig.tier.statistics().units == 1
    del view
    rig.to_host()
    assert rig.tier.statistics().device_nbytes == 0
    np.testing.assert_array_equal(rig.get("x").copy_to_host(), [*range(50), *[-1] * 50])


COUNT = 20


def values(count=COUNT):
    return [np.full(200_000, number, np.uint8) for number in range(count)]


@pytest.mark.parametrize("by_stream", [True, False])
@pytest.mark.parametrize("streams", ["default", "own"])
def test_many_leave_by_one_wait_each_way(cuda, standin, tmp_path, by_stream, streams):
    """Counted by the driver: waits for the device, and for events; copies to memory that is not pinned."""
    rig = Rig(tmp_path, standin, pinned_limit=16 * MB)
    rig.device.fence_by_stream = by_stream
    rig.tier.pinned.reserve(8 * MB)
    # Streams of Numba's wait for the default one.
    stream = cuda.stream() if streams == "own" else 0
    rig.put("frame", [cuda.to_device(each, stream=stream) for each in values()])
    gc.collect()
    rig.tier.settle()
    names = ("cuCtxSynchronize", "cuEventSynchronize", "pageable_copies")
    before = [standin.count(name) for name in names]
    rig.tier.manager.limits.make_room(COUNT * 200_000)
    assert rig.tier.statistics().spilled_nbytes == COUNT * 200_000
    down = [standin.count(name) for name in names]
    counted = [now - then for now, then in zip(down, before, strict=True)]
    assert counted == ([0, 1, 0] if by_stream else [1, 1, 0])
    assert rig.tier.statistics().host_pinned_used_nbytes >= COUNT * 200_000
    found = rig.get("frame")
    up = [standin.count(name) for name in names]
    assert [now - then for now, then in zip(up, down, strict=True)] == [0, 1, 0]
    np.testing.assert_array_equal([each.copy_to_host() for each in found], values())
    del found
    rig.close()
