#!/usr/bin/env bash
# Run the state machines of the core and of the manager for long, with steps that no run had before:
#   ci/long.sh [steps of each (default 100000)] [seed (default: the time)]
#
# The steps done are printed. A failure is shortened and printed with the seed that repeats it.
#
# VENV   environment to run in (default: .venv, which `make test` has made)
set -euo pipefail
cd "$(dirname "$0")/.."
export GPUSPILL_CORE_STEPS=${1:-100000} GPUSPILL_MANAGER_STEPS=${1:-100000} GPUSPILL_SEED=${2:-$(date +%s)}
echo "seed $GPUSPILL_SEED"
exec "${VENV:-.venv}/bin/python" -m pytest -s --timeout=0 tests/core/test_state_machine.py tests/test_manager_machine.py
