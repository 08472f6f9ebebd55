#!/usr/bin/env bash
# Make the pictures of docs/monitoring.md again, in docs/_static: ci/screenshots.sh
#
# VENV     environment to use (default: .venv)
# BROWSER  a Chromium (default: the one in PATH, which ci/browser.sh installs)
set -euo pipefail
cd "$(dirname "$0")/.."
browser=${BROWSER:-chromium}
command -v "$browser" >/dev/null || {
    echo "error: there is no '$browser': ci/browser.sh installs it, or name one with BROWSER=/path/to/chromium" >&2
    exit 1
}
exec "${VENV:-.venv}/bin/python" ci/screenshots.py "$browser"
