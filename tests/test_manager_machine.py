"""A whole manager in any order of any events, with real bytes, against a dictionary.

``ci/long.sh`` runs far more steps. ``GPUSPILL_MANAGER_STEPS`` and ``GPUSPILL_SEED`` say how many, and which.
"""

import os

import pytest

from gpuspill.testing.manager_machine import ManagerMachine, walk_manager
from gpuspill.testing.walks import run_steps

SEED = int(os.environ.get("GPUSPILL_SEED", "0"))


def wanted(default: int) -> int:
    return int(os.environ.get("GPUSPILL_MANAGER_STEPS", default))


@pytest.mark.timeout(3600)
def test_any_order_of_events(record_property):
    steps = run_steps(ManagerMachine, wanted(2000), seed=SEED)
    record_property("steps", steps.done)
    print(f"{steps.done} steps of the manager's state machine by Hypothesis, no contradiction")
    assert steps.done >= wanted(2000)


@pytest.mark.timeout(3600)
def test_a_long_walk(record_property):
    steps = walk_manager(wanted(15_000), seed=SEED)
    record_property("steps", steps.done)
    print(f"{steps.done} random steps of the manager's state machine, no contradiction")
    assert steps.done >= wanted(15_000)
