#!/usr/bin/env bash
# Test against the oldest releases that gpuspill supports, and the newest: ci/nightly.sh [arm...]
#
#   oldest            the dask, distributed and zict that pyproject.toml names as oldest
#   newest            the newest of them, and Numba, whose CUDA simulator some tests want
#   kinds             libraries whose values are spilled, and nothing but the tests of that
#   dask-cuda-oldest  the oldest dask-cuda that it names, with what belongs to it
#   dask-cuda-newest  the newest one
#
# Every arm has an environment of its own, which is brought up to date. First come the tests that compare every hook with
# what is installed, so that a release that has changed one is named as such; then those of the integration. Prints how
# each arm ended, and fails if any did.
#
# PYTHON  interpreter to make the environments with (default: the python3 found first in PATH)
# VENVS   where they are (default: .venvs)
# ARGS    further arguments for pytest
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venvs=${VENVS:-.venvs}
[ $# -gt 0 ] || set -- oldest newest kinds dask-cuda-oldest dask-cuda-newest

# Print "name==version" for the oldest release that pyproject.toml allows of each named package.
oldest() {
    "$python" - "$@" <<'PYTHON'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
required = project["dependencies"] + project["optional-dependencies"]["cuda12"]
for name in sys.argv[1:]:
    (version,) = {m[1] for text in required if (m := re.fullmatch(rf"{name}\s*>=\s*([\d.]+)", text))}
    print(f"{name}=={version}" + ".*" * (version.count(".") < 2))
PYTHON
}

run_arm() {
    local arm=$1 venv=$venvs/$1 requirements hooks tests
    case $arm in
    oldest) requirements=$(oldest dask distributed zict) || return ;;
    newest) requirements="dask distributed zict numba" ;;
    kinds) requirements="scipy sparse awkward xarray shapely geopandas astropy pillow networkx" ;;
    dask-cuda-oldest)
        requirements=$(oldest dask-cuda) || return
        requirements="cuda-bindings==12.* $requirements ${requirements/dask-cuda/rmm-cu12} cupy-cuda12x numba-cuda nvidia-ml-py"
        ;;
    dask-cuda-newest) requirements="cuda-bindings==12.* dask-cuda cupy-cuda12x rmm-cu12 numba-cuda nvidia-ml-py" ;;
    *)
        echo "error: there is no arm '$arm'" >&2
        return 2
        ;;
    esac
    case $arm in
    dask-cuda-*)
        hooks="tests/distributed/test_hooks.py tests/dask_cuda/test_parts.py"
        tests="tests/dask_cuda tests/test_cluster.py tests/distributed/test_effective.py tests/distributed/test_attach.py"
        ;;
    kinds) hooks=tests/distributed/test_hooks.py tests="tests/distributed/test_kinds.py tests/distributed/test_serialization.py" ;;
    *) hooks=tests/distributed/test_hooks.py tests="tests/distributed tests/test_cluster.py" ;;
    esac
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return
    # shellcheck disable=SC2086 # several words
    "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check --upgrade --editable '.[test]' \
        $requirements || return
    "$venv/bin/python" -m pip list 2>/dev/null | grep -iE '^(dask|distributed|dask-cuda|zict|cupy|rmm|numba)'
    # shellcheck disable=SC2086
    if ! "$venv/bin/python" -m pytest -q $hooks; then
        echo "arm $arm: A HOOK HAS CHANGED in the releases listed above; the failures say which"
        return 1
    fi
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pytest -q $tests ${ARGS:-}
}

status=0
summary=
for arm in "$@"; do
    echo "== $arm"
    start=$SECONDS
    if run_arm "$arm" </dev/null; then outcome=passed; else outcome=FAILED status=1; fi
    summary+=$(printf '%-18s %-8s %5d s' "$arm" "$outcome" $((SECONDS - start)))$'\n'
done
printf '\n%s' "$summary"
exit $status
