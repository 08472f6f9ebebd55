"""Random views of random arrays: the simulated device agrees with NumPy in values, strides and what shares memory."""

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

from gpuspill import simulated
from gpuspill.device.adapters import all_adapters
from gpuspill.device.arrays import ArrayRegistry
from gpuspill.simulated import ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.devices import fetch

DTYPES = ("?", "i1", "u2", "i4", "f4", "f8", "c8", "c16")


@st.composite
def hosts(draw):
    """Return a NumPy array of a few small axes, in C or Fortran order, or with its axes mixed."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    seed = draw(st.integers(0, 2**16))
    axes = draw(st.permutations(range(len(shape))))
    made = np.random.default_rng(seed).integers(0, 2, [shape[axis] for axis in axes]).astype(dtype)
    made += np.arange(made.size).reshape(made.shape).astype(dtype)
    return made.transpose(np.argsort(axes)) if shape else made


slices = st.builds(
    slice,
    st.one_of(st.none(), st.integers(-6, 6)),
    st.one_of(st.none(), st.integers(-6, 6)),
    st.one_of(st.none(), st.sampled_from([-3, -2, -1, 1, 2, 3])),
)


@st.composite
def keys(draw, ndim):
    """Return an index of slices, integers, new axes and at most one ellipsis."""
    parts = [draw(st.one_of(slices, st.integers(-2, 1))) for _ in range(draw(st.integers(0, ndim)))]
    for _ in range(draw(st.integers(0, 2))):
        parts.insert(draw(st.integers(0, len(parts))), None)
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    return tuple(parts)


@st.composite
def steps(draw, ndim):
    """Return a function that makes a view (or, where NumPy must, a copy) of an array, and its name."""
    kind = draw(st.sampled_from(["index", "transpose", "reshape", "ravel", "flip", "squeeze", "swap", "broadcast"]))
    if kind == "index":
        key = draw(keys(ndim))
        # NumPy gives a scalar, which shares nothing, where the device gives a view; with an ellipsis, a view too.
        seen = key if Ellipsis in key else (*key, Ellipsis)
        return f"[{key}]", lambda a: a[seen] if isinstance(a, np.ndarray) else a[key]
    if kind == "transpose":
        axes = draw(st.permutations(range(ndim)))
        return f"transpose({axes})", lambda a: a.transpose(axes)
    if kind == "reshape":
        order = draw(st.sampled_from("CFA"))
        return f"reshape(-1, {order})", lambda a: np.reshape(a, (-1, 2) if a.size % 2 == 0 else -1, order=order)
    if kind == "broadcast":
        return "broadcast_to", lambda a: np.broadcast_to(a, (2, *a.shape))
    if kind == "swap":
        return "swapaxes(0, -1)", lambda a: np.swapaxes(a, 0, -1) if a.ndim else a
    if kind == "flip":
        return "flip", lambda a: np.flip(a) if a.ndim else a
    return kind, {"ravel": np.ravel, "squeeze": np.squeeze}[kind]


def follow(draw, array, host):
    """Apply a few random steps to both; an index out of bounds must be one on both sides."""
    for _ in range(draw(st.integers(0, 4))):
        if host.ndim > 6:
            break
        name, step = draw(steps(host.ndim))
        note(name)
        try:
            host = step(host)
        except (IndexError, ValueError) as error:
            try:
                step(array)
            except type(error):
                continue
            raise AssertionError(f"NumPy raised {error!r}") from error
        array = step(array)
    return array, host


def same_layout(array, host):
    # NumPy gives any strides to axes that are never stepped along.
    return host.size == 0 or all(
        a == b for a, b, length in zip(array.strides, host.strides, host.shape, strict=True) if length > 1
    )


@given(st.data(), hosts())
@settings(max_examples=100, deadline=None)
def test_views_are_numpys(data, original):
    device = SimulatedDevice(1 << 20, clock=ManualClock())
    base = asarray(original, device=device)
    assert base.strides == original.strides or original.size == 0
    array, host = follow(data.draw, base, original)
    assert (array.shape, array.dtype) == (host.shape, host.dtype)
    assert same_layout(array, host)
    np.testing.assert_array_equal(asnumpy(array), host)
    if host.size:
        assert (array.allocation is base.allocation) == np.shares_memory(host, original)


@given(st.data(), hosts())
@settings(max_examples=60, deadline=None)
def test_writing_through_a_view_is_seen_by_all(data, original):
    device = SimulatedDevice(1 << 20, clock=ManualClock())
    base = asarray(original, device=device)
    array, _ = follow(data.draw, base, original)
    other, _ = follow(data.draw, base, original)
    mirror = np.frombuffer(base.allocation.storage.tobytes(), np.uint8).copy()

    def mirrored(a):
        if a.allocation is not base.allocation or 0 in a.shape:
            return asnumpy(a)
        return np.ndarray(a.shape, a.dtype, mirror.data, a.offset, a.strides)

    there, elsewhere = mirrored(array), mirrored(other)
    array[...] = 1
    there[...] = 1
    np.testing.assert_array_equal(asnumpy(other), elsewhere)
    if original.nbytes:
        assert base.allocation.storage.tobytes() == mirror.tobytes()


@given(st.data(), hosts())
@settings(max_examples=60, deadline=None)
def test_views_come_back_on_one_allocation(data, original):
    """Device → host → device, by description: values, strides and sharing survive; memory is counted once."""
    device, registry = SimulatedDevice(1 << 20, clock=ManualClock()), ArrayRegistry(all_adapters())
    base = asarray(original, device=device)
    views = [base] + [follow(data.draw, base, original)[0] for _ in range(data.draw(st.integers(1, 3)))]
    found = [registry.describe(view) for view in views]
    values, strides = [asnumpy(view) for view in views], [view.strides for view in views]
    groups = {}
    for description in found:
        groups.setdefault(description.identity, description.owner)
    assert device.statistics().live_bytes == sum(identity.nbytes for identity in groups)
    device.synchronize()
    spilled = {identity: fetch(device, device.borrow(identity, owner)) for identity, owner in groups.items()}
    plans = [(description.identity, description.recipe) for description in found]
    del base, views, found, groups, description
    assert device.statistics().live_bytes == 0
    restored = {}
    for identity, content in spilled.items():
        restored[identity] = device.allocate(identity.nbytes)
        device.copy_to_device(content, restored[identity], device.stream("to_device")).wait()
    arrays = [registry.rebuild(recipe, restored[identity]) for identity, recipe in plans]
    for array, (identity, _), value, stride in zip(arrays, plans, values, strides, strict=True):
        assert array.allocation is restored[identity]
        assert array.strides == stride
        np.testing.assert_array_equal(asnumpy(array), value)
    device.validate()


@given(hosts(), st.data())
@settings(max_examples=60, deadline=None)
def test_frames_carry_any_view(original, data):
    device = SimulatedDevice(1 << 20, clock=ManualClock())
    array, host = follow(data.draw, asarray(original, device=device), original)
    before = device.statistics().kernels
    header, (frame,) = simulated.to_frames(array)
    assert device.statistics().kernels == before
    rebuilt = simulated.from_frames(header, [asarray(asnumpy(frame), device=device)])
    assert rebuilt.strides == array.strides
    np.testing.assert_array_equal(asnumpy(rebuilt), host)
