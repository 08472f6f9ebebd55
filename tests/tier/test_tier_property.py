"""Any order of storing, reading, evicting and deleting values that share memory; the model is made of NumPy arrays."""

import time

import hypothesis.strategies as st
import numpy as np
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gpuspill import simulated
from gpuspill.distributed.serialization import DeviceFamilies
from gpuspill.manager import ProxifyManager
from gpuspill.manager.ports import PickleSerializer
from gpuspill.simulated import Array, ManualClock, SimulatedDevice, asarray, asnumpy
from gpuspill.testing.stores import MemoryStore
from gpuspill.tier import DeviceTier

KEYS = st.sampled_from("abcdef")

#: Ways to look at an array of two axes, with the same meaning in NumPy and on the device.
VIEWS = st.sampled_from(
    [
        lambda x: x,
        lambda x: x[1:],
        lambda x: x[::-1],
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: x[::2, ::-1],
        lambda x: x.reshape(-1)[1:].reshape(1, -1),
        lambda x: x.view("u1"),
    ]
)

#: Containers of two arrays.
SHAPES = st.sampled_from(
    [
        lambda x, y: x,
        lambda x, y: [x, y, x],
        lambda x, y: {"left": x, "right": (y, 5)},
        lambda x, y: ((x,), [{"deep": y}]),
        lambda x, y: Pair(x, y),
        lambda x, y: [Pair(y, x), {"again": x}],
    ]
)


class Pair:
    """A composite: dask's family for devices takes it apart."""

    def __init__(self, left, right):
        self.left, self.right = left, right


@cuda_serialize.register(Pair)
def _(pair):
    return {}, [pair.left, pair.right]


@cuda_deserialize.register(Pair)
def _(header, frames):
    return Pair(*frames)


class Whole(Pair):
    """A composite that tells its size, and so stays whole until it has to leave."""

    @property
    def nbytes(self):
        return self.left.nbytes + self.right.nbytes


@cuda_serialize.register(Whole)
def _(whole):
    return {}, [whole.left, whole.right]


@cuda_deserialize.register(Whole)
def _(header, frames):
    return Whole(*frames)


#: Containers of two arrays with composites that stay whole.
WHOLES = st.sampled_from(
    [
        lambda x, y: Whole(x, y),
        lambda x, y: [Whole(y, x), x],
        lambda x, y: {"one": Whole(x, x), "other": [Whole(x, y), y]},
    ]
)


def arrays(value):
    """Yield the arrays in a value, in a fixed order."""
    if isinstance(value, Array | np.ndarray):
        yield value
    elif isinstance(value, Pair):
        yield value.left
        yield value.right
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays(item)


def root(array):
    """Return the array whose memory a NumPy array looks at."""
    while array.base is not None:
        array = array.base
    return array


def shares(view, array):
    """Whether the view is on the array's memory. The device gives memory of its own to what has no elements."""
    return view.size > 0 and root(view) is root(array)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Tiers(RuleBasedStateMachine):
    """Arrays `held` are those that somebody outside has. The model of a key is the same value made of NumPy arrays."""

    held = Bundle("held")

    @initialize(limit=st.sampled_from([None, 0, 200]), host_limit=st.sampled_from([None, 0, 300]))
    def begin(self, limit, host_limit):
        self.device = SimulatedDevice(1 << 20, clock=ManualClock())
        self.use = simulated.use(self.device)
        self.use.__enter__()
        self.host = ProxifyManager(
            limit=host_limit, store=MemoryStore(), serializer=PickleSerializer(), sizeof=lambda value: 8
        )
        self.tier = DeviceTier(self.device, self.host, limit=limit, families=DeviceFamilies())
        self.keys = {}
        self.model = {}
        self.outside = {}  # id -> (array, its model)
        self.stored = {}  # id -> memory of the model
        self.numbers = 0

    @rule(target=held, shape=st.sampled_from([(1, 1), (2, 3), (4, 4)]), dtype=st.sampled_from(["f8", "i4", "c8"]))
    def make(self, shape, dtype):
        self.numbers += 100
        host = (np.arange(np.prod(shape)).reshape(shape) + self.numbers).astype(dtype)
        # The model's memory is its own, as the array's on the device is.
        return self.hold(asarray(host), host.reshape(-1).copy().reshape(shape))

    def hold(self, array, model):
        number = len(self.outside) + self.numbers * 1000
        self.numbers += 1
        self.outside[number] = array, model
        return number

    @rule(target=held, number=held, view=VIEWS)
    def look(self, number, view):
        array, model = self.outside[number]
        try:
            expected = view(model)
        except ValueError:
            return multiple()
        # A reshape of something with gaps is a copy, and then not the same memory on both sides.
        return self.hold(view(array), expected) if shares(expected, model) else multiple()

    @rule(key=KEYS, one=held, two=held, shape=SHAPES)
    def store(self, key, one, two, shape):
        self.keys.pop(key, None)
        self.keys[key] = self.tier.proxify(shape(self.outside[one][0], self.outside[two][0]))
        self.model[key] = shape(self.outside[one][1], self.outside[two][1])
        self.stored |= {id(root(model)): root(model) for model in arrays(self.model[key])}

    @rule(key=KEYS, view=VIEWS)
    def store_view_of_key(self, key, view):
        if key in self.keys:
            found = next(arrays(self.tier.resolve(self.keys[key])))
            model = next(arrays(self.model[key]))
            try:
                expected = view(model)
            except ValueError:
                return
            if shares(expected, model):
                self.keys["view"] = self.tier.proxify(view(found))
                self.model["view"] = expected

    @rule(number=consumes(held))
    def let_go(self, number):
        del self.outside[number]

    @rule(target=held, key=KEYS)
    def take(self, key):
        if key not in self.keys:
            return multiple()
        return multiple(
            *(
                self.hold(array, model)
                for array, model in zip(arrays(self.tier.resolve(self.keys[key])), arrays(self.model[key]), strict=True)
            )
        )

    @rule(key=KEYS)
    def delete(self, key):
        self.keys.pop(key, None)
        self.model.pop(key, None)

    @rule()
    def to_host(self):
        self.tier.settle()
        self.tier.manager.limits.evict_all()

    @rule(nbytes=st.integers(1, 300))
    def out_of_memory(self, nbytes):
        self.tier.manager.limits.make_room(nbytes)

    @rule()
    def to_disk(self):
        self.host.limits.evict_all()

    @rule(key=KEYS)
    def read(self, key):
        if key in self.keys:
            self.compare(self.tier.resolve(self.keys[key]), self.model[key])

    def compare(self, found, expected):
        pairs = list(zip(arrays(found), arrays(expected), strict=True))
        for array, model in pairs:
            assert array.dtype == model.dtype
            assert array.strides == model.strides
            np.testing.assert_array_equal(asnumpy(array), model)
        for array, model in pairs:
            for other, other_model in pairs:
                assert (array.allocation is other.allocation) == (root(model) is root(other_model))

    @invariant()
    def at_rest(self):
        if not hasattr(self, "tier"):
            return
        with self.tier.manager.admission.reserve(0) as room:
            room.wait(60)
        self.tier.validate()
        self.host.validate()
        self.device.validate()
        statistics = self.tier.statistics()
        roots = {id(root(model)): root(model) for value in self.model.values() for model in arrays(value)}
        # Every allocation once, whatever looks at it. Known here, or nowhere: in the hands of somebody outside.
        assert statistics.units == len(roots)
        assert sum(unit.nbytes for unit in self.tier.manager) == sum(model.nbytes for model in roots.values())
        # What is really on the device: what is known to be there, what somebody still looks at, and what nobody stored.
        foreign = {id(array.allocation): array.nbytes for array, model in self.unknown()}
        # The thread that spilled a unit lets go of it a moment after it is counted as spilled.
        wait_for(lambda: self.device.statistics().live_bytes == self.seen_nbytes() + sum(foreign.values()))
        assert len(self.host) <= statistics.units

    def seen_nbytes(self):
        statistics = self.tier.statistics()
        return statistics.device_nbytes + statistics.lingering_nbytes

    def unknown(self):
        """Yield the arrays outside whose memory was never stored, with all they were made from."""
        for array, model in self.outside.values():
            if id(root(model)) not in self.stored:
                yield Array((array.allocation.nbytes,), "u1", array.allocation), model

    def teardown(self):
        if not hasattr(self, "tier"):
            return
        skeleton = None
        for key, skeleton in self.keys.items():
            self.compare(self.tier.resolve(skeleton), self.model[key])
        self.keys.clear()
        self.outside.clear()
        del skeleton
        # What a spill thread has in hand it lets go of a moment later.
        wait_for(lambda: not (self.tier.statistics().units or self.seen_nbytes()))
        wait_for(lambda: not self.device.statistics().live_bytes)
        assert len(self.host) == 0
        assert self.device.statistics().violations == 0
        self.tier.close()
        self.host.close()
        self.use.__exit__(None, None, None)


class TiersOfWholes(Tiers):
    """With composites that are charged for what they say until they are taken apart, shared memory more than once."""

    @rule(key=KEYS, one=Tiers.held, two=Tiers.held, shape=WHOLES)
    def store_whole(self, key, one, two, shape):
        self.store(key, one, two, shape)

    @rule(key=KEYS, other=KEYS)
    def store_under_another_name(self, key, other):
        if key in self.keys:
            self.keys[other] = self.tier.proxify([self.tier.resolve(self.keys[key])])
            self.model[other] = [self.model[key]]

    @invariant()
    def at_rest(self):
        if hasattr(self, "tier"):
            with self.tier.manager.admission.reserve(0) as room:
                room.wait(60)
            self.tier.validate()
            self.host.validate()
            self.device.validate()


TestTiers = Tiers.TestCase
TestTiersOfWholes = TiersOfWholes.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
TestTiersOfWholes.settings = TestTiers.settings
