#!/usr/bin/env bash
# Install the browser in which a test looks at the dashboard's page: ci/browser.sh       (Debian and Ubuntu, as root)
#
# Without it that test is skipped. Does nothing if there is one.
set -euo pipefail
if ! command -v chromium >/dev/null; then
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends chromium
fi
chromium --version
