"""Any order of storing, reading, evicting and deleting host values that share memory.

What is in memory is looked at by the test itself: each base that a value there keeps alive counts once, and the values
are those of a model that is made of copies.
"""

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gpuspill.device.shared_memory import shared_memory
from gpuspill.distributed.serialization import DaskSerializer
from gpuspill.manager.insert import VIEW_NBYTES
from gpuspill.testing.managers import ManagerKit

KEYS = st.sampled_from("abcdef")
ROWS = 40
MINIMUM = 1000

VIEWS = st.sampled_from(
    [
        lambda x: x,
        lambda x: x[1:],
        lambda x: x[::-1],
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: x.view("i8"),
        lambda x: x.reshape(-1)[3:].reshape(1, -1),
    ]
)

SHAPES = st.sampled_from(
    [
        lambda x, y: x,
        lambda x, y: x,
        lambda x, y: [x, y, x],
        lambda x, y: {"left": x, "right": (y, 5)},
        lambda x, y: ((x,), [{"deep": y}, "text"]),
    ]
)


def arrays(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        yield from arrays(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays(item)


def base(array):
    """Return the array whose memory an array looks at."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def sizeof(value):
    return sum(array.nbytes for array in arrays(value))


class Host(RuleBasedStateMachine):
    """Arrays `held` are those that somebody outside has."""

    held = Bundle("held")

    @initialize(limit=st.sampled_from([None, 0, 5000, 20_000]), keep_clean=st.booleans())
    def begin(self, limit, keep_clean):
        self.kit = ManagerKit(
            limit,
            serializer=DaskSerializer(),
            shared=lambda value: shared_memory(value, MINIMUM),
            sizeof=sizeof,
            keep_clean=keep_clean,
        )
        self.limit = limit
        self.model = {}
        self.outside = {}
        self.pins = []
        self.numbers = 0

    @rule(target=held, rows=st.sampled_from([1, ROWS]), dtype=st.sampled_from(["f8", "i8"]))
    def make(self, rows, dtype):
        self.numbers += 1
        return self.hold((np.arange(rows * 8.0).reshape(rows, 8) + 1000 * self.numbers).astype(dtype))

    def hold(self, array):
        self.numbers += 1
        self.outside[self.numbers] = array
        return self.numbers

    @rule(target=held, number=held, view=VIEWS, writeable=st.booleans())
    def look(self, number, view, writeable):
        array = self.outside[number]
        if array.ndim != 2 or array.shape[0] < 2:
            return multiple()
        try:
            found = view(array)
        except ValueError:
            return multiple()
        if found is not array and not writeable:
            found.flags.writeable = False
        return self.hold(found)

    @rule(key=KEYS, one=held, two=held, shape=SHAPES)
    def store(self, key, one, two, shape):
        value = shape(self.outside[one], self.outside[two])
        self.model[key] = (
            shape(self.outside[one].copy(order="K"), self.outside[two].copy(order="K")),
            [array.flags.writeable for array in arrays(value)],
        )
        self.kit.manager.store(key, value)
        assert self.kit.manager.look(key) is value

    @rule(number=consumes(held))
    def let_go(self, number):
        del self.outside[number]

    @rule(target=held, key=KEYS)
    def take(self, key):
        if key not in self.model:
            return multiple()
        return multiple(*map(self.hold, arrays(self.kit.manager.get(key))))

    @rule(key=KEYS)
    def read(self, key):
        if key in self.model:
            self.compare(key)

    @rule(key=KEYS)
    def delete(self, key):
        if key in self.model:
            del self.model[key]
            self.kit.manager.discard(key)

    @rule(keys=st.lists(KEYS))
    def pin(self, keys):
        self.pins.append(self.kit.manager.admission.pin(keys))

    @rule()
    def unpin(self):
        if self.pins:
            self.pins.pop().release()

    @rule(limit=st.sampled_from([0, -1, 3000]))
    def spill(self, limit):
        self.kit.clock.advance(1)
        self.kit.manager.limits.set_limit(limit, None)
        self.kit.engine.spill_all()
        self.kit.manager.limits.set_limit(self.limit, None)

    def compare(self, key):
        expected, writeable = self.model[key]
        found = self.kit.manager.get(key)
        assert type(found) is type(expected)
        for array, model, may_write in zip(arrays(found), arrays(expected), writeable, strict=True):
            assert array.dtype == model.dtype
            assert array.flags.writeable == may_write
            np.testing.assert_array_equal(array, model)

    @invariant()
    def every_base_counts_once(self):
        if not hasattr(self, "kit"):
            return
        kit = self.kit
        kit.engine.reap_all()
        kit.manager.validate()
        entries = kit.manager._ledger.entries
        values = {
            pid: kit.manager._metadata.slots[pid].value for pid in entries if entries[pid].keys or entries[pid].pins
        }
        total, bases = 0, {}
        for value in values.values():
            found = {id(array): array for array in arrays(value)}.values()
            alone = len(found) == 1 and isinstance(value, np.ndarray) and base(value) is value
            shared = [array for array in arrays(value) if base(array).nbytes >= MINIMUM]
            bases |= {id(base(array)): base(array) for array in shared}
            if value is None or alone:
                total += 0 if value is None or shared else value.nbytes
            elif shared:
                total += max(VIEW_NBYTES, sizeof(value) - sum(array.nbytes for array in shared))
            else:
                total += sizeof(value)
        assert kit.manager.memory_total() == total + sum(array.nbytes for array in bases.values())

    def teardown(self):
        if not hasattr(self, "kit"):
            return
        for key in list(self.model):
            self.compare(key)
        for pin in self.pins:
            pin.release()
        for key in list(self.model):
            self.kit.manager.discard(key)
        self.kit.idle()
        assert self.kit.manager.memory_total() == 0
        assert self.kit.manager.statistics().values == 0
        self.kit.close()


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=20, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
