#!/usr/bin/env bash
# Show that a fresh clone works: ci/fresh.sh [make target...]        (default: lint test demo)
#
# Clones the last commit of this repository into a temporary directory and runs the targets there, with an environment of
# its own. Runs all of them, prints how each ended, and fails if any did. The clone is removed afterwards.
#
# PYTHON  interpreter to use (default: the python3 found first in PATH)
# KEEP=1  leave the clone where it is
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- lint test demo
[ -z "$(git status --porcelain)" ] || echo "note: changes that are not committed are not in the clone" >&2

work=$(mktemp -d)
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
git clone --quiet --no-local . "$work/gpuspill" || exit
cd "$work/gpuspill" || exit
# Nothing of the caller's own environment may help or hinder.
unset VENV VIRTUAL_ENV PYTHONPATH PYTHONHOME ARGS BENCH MAKEFLAGS MAKELEVEL ${!DASK_@} ${!PYTEST_@}
echo "== $(git log -1 --format='%h %s') in $PWD"

status=0
summary=
for target in "$@"; do
    start=$SECONDS
    if make "$target" </dev/null; then outcome=passed; else outcome=FAILED status=1; fi
    summary+=$(printf '%-12s %-8s %5d s' "$target" "$outcome" $((SECONDS - start)))$'\n'
done
printf '\n%s' "$summary"
exit $status
