#!/usr/bin/env bash
# Style (ruff), types (mypy, strict), the direction of imports (import-linter) and the rules for prose that a program
# can check. Runs all of them, then fails if any did.
#
# VENV   environment to run in (default: .venv, which `make lint` has made)
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
status=0

check() {
    echo "== $*"
    "$bin/$@" || status=1
}

check ruff check .
check ruff format --check .
check mypy
check mypy --strict ci/*.py ci/suite/s*.py docs/_ext/gpuspill_reference.py docs/_ext/gpuspill_drawings.py
check lint-imports --no-logo
check python ci/prose.py
exit $status
