#!/usr/bin/env bash
# Make the development environment, or bring it up to date with pyproject.toml.
#
# PYTHON  interpreter to make it with (default: the python3 found first in PATH)
# VENV    where (default: .venv)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}

fail() {
    echo "error: $*" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    fail "there is no '$python'. gpuspill needs Python 3.11 or newer: install it, or name one with PYTHON=/path/to/python3."
found=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
    fail "'$python' does not run. Name another interpreter with PYTHON=/path/to/python3."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "'$python' is Python $found; gpuspill needs 3.11 or newer. Name another interpreter with PYTHON=/path/to/python3."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "'$python' (Python $found) comes without venv or ensurepip; on Debian and Ubuntu they are in the package python3-venv."

# An environment whose interpreter has gone (an upgrade, a moved folder) cannot be repaired by pip.
if [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [ -f "$venv/pyvenv.cfg" ] || fail "'$venv' exists and is no virtual environment; name another place with VENV=."
    rm -rf "$venv"
fi
echo "Installing gpuspill and what its tests and demo need into $venv (Python $found); the first time takes a minute or two."
rm -f "$venv/.installed"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check --editable '.[test,demo,dashboard]'
touch "$venv/.installed"
