"""Any order of events, judged by a model that shares no code with the state.

``GPUSPILL_CORE_STEPS=100000 pytest tests/core/test_state_machine.py`` runs longer, ``GPUSPILL_SEED`` other steps.
"""

import os

from gpuspill.testing.machines import SpillStateMachine, run_steps


def test_any_order_of_events(record_property):
    wanted = int(os.environ.get("GPUSPILL_CORE_STEPS", "4000"))
    steps = run_steps(SpillStateMachine, wanted, seed=int(os.environ.get("GPUSPILL_SEED", "0")))
    record_property("steps", steps.done)
    print(f"{steps.done} steps of the core's state machine, no contradiction")
    assert steps.done >= wanted
