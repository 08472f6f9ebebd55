"""``Worker.data`` in any order of any events, with real bytes in memory, on the simulated device and on disk.

``ci/long.sh`` runs far more steps. ``GPUSPILL_MAPPING_STEPS`` and ``GPUSPILL_SEED`` say how many, and which.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuspill import simulated
from gpuspill.config import Settings
from gpuspill.distributed.factory import build_store
from gpuspill.testing.walks import run_steps

SEED = int(os.environ.get("GPUSPILL_SEED", "0"))
WANTED = int(os.environ.get("GPUSPILL_MAPPING_STEPS", "5000"))

KEYS = st.sampled_from([f"key-{number}" for number in range(8)])
SIZES = st.integers(0, 3000)
KINDS = st.sampled_from(["bytes", "array", "view", "device", "mixed", "frozen"])


def make(kind, size, seed):
    """Return a value, and what it looks like to somebody who cannot tell devices from hosts."""
    array = np.random.default_rng(seed).integers(0, 256, size, dtype="u1")
    if kind == "bytes":
        return array.tobytes(), array.tobytes()
    if kind == "array":
        return array, array.copy()
    if kind == "view":
        return array[::3], array[::3].copy()
    if kind == "frozen":
        array.flags.writeable = False
        return {"frozen": array}, {"frozen": array.copy()}
    if kind == "device":
        return simulated.asarray(array), array.copy()
    return [simulated.asarray(array), (array, seed)], [array.copy(), (array.copy(), seed)]


def same(got, expected):
    """Whether a value is what was stored, and plain: arrays of the device are looked at through the device."""
    if isinstance(got, simulated.Array):
        got = simulated.asnumpy(got)
    if isinstance(expected, np.ndarray):
        return type(got) is np.ndarray and got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(expected, dict):
        return (
            type(got) is dict
            and got.keys() == expected.keys()
            and not got["frozen"].flags.writeable
            and all(same(got[name], expected[name]) for name in expected)
        )
    if isinstance(expected, (list, tuple)):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    return type(got) is type(expected) and got == expected


class Mapping(RuleBasedStateMachine):
    """A store, and a dictionary that says what has to be in it."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.model = {}
        self.pending = []
        self.made = 0
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.mkdtemp(prefix="gpuspill-test-")
        self.device = simulated.SimulatedDevice(16_000)
        self.previous = simulated.use(self.device)
        self.previous.__enter__()
        self.store = None

    @initialize(limit=st.sampled_from([None, 1, 3000, 10_000]), device_limit=st.sampled_from([1, 5000, None]))
    def build(self, limit, device_limit):
        settings = Settings(device="simulated", device_memory_limit=device_limit, host_limit=limit)
        self.store = build_store(settings, self.directory)
        self.store.manager.limits.set_limit(limit, None)

    @rule(key=KEYS, kind=KINDS, size=SIZES)
    def put(self, key, kind, size):
        self.made += 1
        value, self.model[key] = make(kind, size, self.made)
        self.store[key] = value

    @precondition(lambda self: self.model)
    @rule(key=KEYS, of=st.integers(0, 7))
    def alias(self, key, of):
        source = sorted(self.model)[of % len(self.model)]
        self.store[key] = self.store[source]
        self.model[key] = self.model[source]

    @rule(key=KEYS)
    def delete(self, key):
        if self.model.pop(key, None) is None:
            with pytest.raises(KeyError):
                del self.store[key]
        else:
            del self.store[key]

    @rule(key=KEYS)
    def get(self, key):
        if key in self.model:
            assert same(self.store[key], self.model[key])
        else:
            with pytest.raises(KeyError):
                self.store[key]

    @rule(keys=st.sets(KEYS), missing=st.sampled_from(["raise", "omit"]))
    def gather(self, keys, missing):
        """What is asked for now is delivered as it is now, whatever happens to the keys before it is awaited."""
        expected = {key: self.model[key] for key in keys if key in self.model}

        async def begin():
            return asyncio.ensure_future(self.store.async_get(keys, missing=missing))

        self.pending.append(
            (self.loop.run_until_complete(begin()), expected, len(keys) if missing == "raise" else None)
        )

    @precondition(lambda self: self.pending)
    @rule(cancel=st.booleans())
    def settle(self, cancel):
        future, expected, wanted = self.pending.pop(0)
        if cancel and not future.done():
            future.cancel()
        try:
            got = self.loop.run_until_complete(future)
        except asyncio.CancelledError:
            assert cancel
        except KeyError:
            assert wanted is not None
            assert len(expected) < wanted
        else:
            assert wanted is None or len(expected) == wanted
            assert got.keys() == expected.keys()
            assert all(same(got[key], expected[key]) for key in expected)

    @rule(nbytes=st.integers(-5000, 12_000))
    def offset(self, nbytes):
        self.store.set_offset(nbytes)

    @rule(limit=st.sampled_from([None, 1, 3000, 10_000]))
    def limit(self, limit):
        self.store.manager.limits.set_limit(limit, None)

    @rule()
    def evict(self):
        self.store.manager.limits.evict_all()

    @invariant()
    def holds_the_keys(self):
        if self.store is None:
            return
        self.steps.done += 1
        assert len(self.store) == len(self.model)
        assert set(self.store) == self.model.keys()
        assert all((f"key-{number}" in self.store) == (f"key-{number}" in self.model) for number in range(8))
        assert self.store.memory_total() >= 0
        self.store.manager.validate()

    def teardown(self):
        try:
            while self.pending:
                self.settle(cancel=False)
            if self.store is not None:
                assert all(same(self.store[key], value) for key, value in self.model.items())
                for key in list(self.store):
                    del self.store[key]
                self.store.close()
                self.loop.run_until_complete(asyncio.sleep(0))  # callbacks have what nobody waited for
                assert self.store.memory_total() == 0
                assert self.store.manager.spilled_total == (0, 0)
                self.store.tier.settle()  # of what those let go of
                assert self.device.statistics().live_bytes == 0
                assert not list(Path(self.directory).rglob("*.*"))
        finally:
            if self.store is not None:
                self.store.close()
            self.previous.__exit__(None, None, None)
            self.loop.close()
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.mark.timeout(3600)
def test_any_order_of_events(record_property):
    steps = run_steps(Mapping, WANTED, seed=SEED)
    record_property("steps", steps.done)
    print(f"{steps.done} steps of the mapping's state machine by Hypothesis, no contradiction")
    assert steps.done >= WANTED
