#!/usr/bin/env bash
# Test beside the real dask-cuda, CuPy, RMM and numba-cuda on a machine without a device:
#   ci/test_dask_cuda.sh [--source DIR] [--ref REF] [--only-ours]
#
# Makes an environment with those packages, runs tests/dask_cuda there and those of the CUDA adapter, then dask-cuda's own
# tests: first without gpuspill, to find out which need no device, then those with it. They come from dask-cuda's repository at the tag of the
# installed release: cloned, or from the git directory DIR, at REF.
#
# VENV     where the environment is made (default: .venv-dask-cuda)
# PYTHON   interpreter to make it with (default: the python3 found first in PATH)
# CUDA     12 or 13: for which CUDA the packages are (default: 12)
# OUTPUT   where results of dask-cuda's tests go (default: dask-cuda-suite)
# SPEC     further requirements, such as "dask-cuda==26.6.*"
set -euo pipefail
venv=${VENV:-.venv-dask-cuda}
cuda=${CUDA:-12}
output=${OUTPUT:-dask-cuda-suite}
only_ours=
suite=()
while [ $# -gt 0 ]; do
    case $1 in
    --source | --ref)
        [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
        # As the caller means it: everything below is done from elsewhere.
        if [ "$1" = --source ]; then suite+=("$1" "$(realpath "$2")"); else suite+=("$1" "$2"); fi
        shift 2
        ;;
    --only-ours) only_ours=1; shift ;;
    *)
        echo "usage: ci/test_dask_cuda.sh [--source DIR] [--ref REF] [--only-ours]" >&2
        exit 2
        ;;
    esac
done
cd "$(dirname "$0")/.."

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python
install=("$python" -m pip install -qq --no-input --disable-pip-version-check)
# shellcheck disable=SC2086 # several requirements
"${install[@]}" --editable '.[test]' "cupy-cuda${cuda}x" "rmm-cu$cuda" numba-cuda nvidia-ml-py "dask-cuda[cu$cuda]>=26.6" ${SPEC:-}
"$python" -m pip list 2>/dev/null | grep -iE '^(dask|distributed|dask-cuda|zict|cupy|rmm|numba)' || true

status=0
"$python" -m pytest tests/dask_cuda tests/test_cluster.py tests/distributed/test_effective.py || status=1
# With the libraries' own functions and resources, which need no device.
"$python" -m pytest tests/device/test_cuda.py tests/device/test_rmm_chain.py tests/device/test_device_arrays.py || status=1
[ -z "$only_ours" ] || exit $status

rm -rf "$output"
"$python" -m pip uninstall -qq --yes --disable-pip-version-check gpuspill
stock=0
# From elsewhere, so that the working tree is not found in the place of what is installed.
suite_run() { (cd / && "$python_path" "$here/ci/dask_cuda_suite.py" --output "$output_path" "${suite[@]}" "$@"); }
here=$PWD python_path=$(realpath -s "$python") output_path=$(realpath -m "$output")
suite_run --arms stock || stock=$?
"${install[@]}" --no-deps --editable .
[ $stock -eq 0 ] || exit $stock
suite_run --arms gpuspill,jit-unspill || status=1
exit $status
