#!/usr/bin/env bash
# Build the documentation into docs/_build/html: ci/docs.sh [arguments for sphinx-build]
#
# Every warning is an error: a link that leads nowhere, a page that no contents list names, a docstring that cannot be
# read. Nothing is fetched, and each build starts anew, so that no page of an earlier one hides a broken link.
#
# VENV   environment to run in (default: .venv, which `make docs` has made)
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf docs/_build
"${VENV:-.venv}/bin/python" -m sphinx -q -W --keep-going -d docs/_build/doctrees -b html "$@" docs docs/_build/html
echo "docs/_build/html/index.html"
