#!/usr/bin/env bash
# Run the tests: ci/test.sh all|quick [arguments for pytest]
#
# all    everything (tests marked gpu are skipped, with the reason, where there is no device)
# quick  the unit layers: nothing marked slow, cluster or gpu
#
# VENV   environment to run in (default: .venv, which `make test` has made)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
which=${1:-all}
[ $# -eq 0 ] || shift

case $which in
# The session limit only ends a run that hangs; the suite itself should take less than 15 minutes on 2 cores.
all) options=(--durations=10 --session-timeout=3000) ;;
quick) options=(-m "not slow and not cluster and not gpu" --session-timeout=600) ;;
*)
    echo "usage: ci/test.sh all|quick [arguments for pytest]" >&2
    exit 2
    ;;
esac
exec "$python" -m pytest "${options[@]}" "$@"
