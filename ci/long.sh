#!/usr/bin/env bash
# Run the state machines of the core, of the manager and of the mapping for long, with steps that no run had before:
#   ci/long.sh [steps of each (default 100000), of the mapping a tenth] [seed (default: the time)]
# Where `make test-cuda` has made its environment, also half as many of the device tier on the stand-in for a GPU.
#
# The steps done are printed. A failure is shortened and printed with the seed that repeats it.
#
# VENV   environment to run in (default: .venv, which `make test` has made)
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-100000}
export GPUSPILL_DEVICE_STEPS=$((steps / 2)) GPUSPILL_CORE_STEPS=$steps GPUSPILL_MANAGER_STEPS=$steps GPUSPILL_MAPPING_STEPS=$((steps / 10)) GPUSPILL_SEED=${2:-$(date +%s)}
echo "seed $GPUSPILL_SEED"
status=0
"${VENV:-.venv}/bin/python" -m pytest -s --timeout=0 tests/core/test_state_machine.py tests/test_manager_machine.py \
    tests/distributed/test_mapping_machine.py || status=$?
[ ! -e .venv-cuda/.cuda ] ||
    GPUSPILL_STANDIN=1 .venv-cuda/bin/python -m pytest -s --timeout=0 tests/standin/test_ledger.py || status=$?
exit $status
