#!/usr/bin/env bash
# Say how much of the package the unit layers run, line by line: ci/coverage.sh [arguments for pytest]
#
# Only the tests of `make test-quick`: what runs in workers' own processes is not counted, and the whole suite under
# measurement would take twice as long.
#
# VENV   environment to run in (default: .venv, which `make coverage` has made)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
"$python" -m pip install -qq --no-input --disable-pip-version-check coverage
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
export COVERAGE_FILE=$data/coverage
"$python" -m coverage run --source gpuspill -m pytest -q -m "not slow and not cluster and not gpu" "$@"
"$python" -m coverage report --skip-covered --sort=cover | tail -40
