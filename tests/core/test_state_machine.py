"""Any order of events, judged by a model that shares no code with the state.

``ci/long.sh`` runs far more steps. ``GPUSPILL_CORE_STEPS`` and ``GPUSPILL_SEED`` say how many, and which.
"""

import os

import pytest

from gpuspill.testing.machines import SpillStateMachine, walk_core
from gpuspill.testing.walks import run_steps

SEED = int(os.environ.get("GPUSPILL_SEED", "0"))


def wanted(default: int) -> int:
    return int(os.environ.get("GPUSPILL_CORE_STEPS", default))


@pytest.mark.timeout(3600)
def test_any_order_of_events(record_property):
    steps = run_steps(SpillStateMachine, wanted(3000), seed=SEED)
    record_property("steps", steps.done)
    print(f"{steps.done} steps of the core's state machine by Hypothesis, no contradiction")
    assert steps.done >= wanted(3000)


@pytest.mark.timeout(3600)
def test_a_long_walk(record_property):
    steps = walk_core(wanted(20_000), seed=SEED)
    record_property("steps", steps.done)
    print(f"{steps.done} random steps of the core's state machine, no contradiction")
    assert steps.done >= wanted(20_000)
