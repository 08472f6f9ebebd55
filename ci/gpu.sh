#!/usr/bin/env bash
# Everything that needs a GPU, on one, in less than ten minutes once the environment is made: ci/gpu.sh
#
# Sections: the conformance suites of the device port on CUDA and on RMM; the arrays of CuPy, Numba, PyTorch and RMM through
# device, host, disk and back; running out of memory; a cluster (the examples); how fast the tier copies, beside a raw pinned
# copy and dask-cuda's. What each found goes to gpu-report/report.json.
#
# PYTHON   interpreter to make the environment with (default: python3)
# VENV     where (default: .venv-gpu)
# WHEELS   folder with all wheels, where there is no network. On a machine with one, with the same Python:
#            pip download -d FOLDER '.[test,demo,dashboard]' setuptools wheel cupy-cuda13x rmm-cu13 'numba-cuda[cu13]' \
#                kvikio-cu13 nvidia-ml-py torch dask-cuda
# CUDA     12 or 13 (default: what the driver says)
# TORCH=0  leaves PyTorch out, which is a large download; its tests are skipped then
# STANDIN=1  runs the same sections on the stand-in for CUDA's driver, in the environment of ci/test_cuda.sh: shows that this
#            script works, and nothing about a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
out=gpu-report
rm -rf "$out" # of the run before
mkdir "$out"
[ -z "${WHEELS:-}" ] || export PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELS"

if [ "${STANDIN:-0}" = 1 ]; then
    export VENV=${VENV:-.venv-cuda} GPUSPILL_STANDIN=1
    [ -x "$VENV/bin/python" ] || {
        echo "error: there is no environment '$VENV'; ci/test_cuda.sh makes one" >&2
        exit 1
    }
    conformance=(tests/standin/test_cuda_driver.py)
    libraries=(tests/standin/test_kvikio.py tests/standin/test_numba.py -k "not more_than_the_device")
    memory=(tests/standin/test_numba.py -k more_than_the_device)
    cluster=(tests/standin/test_cluster.py)
    bandwidth=(--stand-in --nbytes $((16 * 1024 * 1024)))
else
    export VENV=${VENV:-.venv-gpu}
    command -v nvidia-smi >/dev/null || {
        echo "error: there is no nvidia-smi, so no driver for NVIDIA GPUs, on this machine" >&2
        exit 1
    }
    nvidia-smi --list-gpus
    cuda=${CUDA:-$(nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\)\..*/\1/p' | head -1)}
    case $cuda in
    12) ;;
    1[3-9]) cuda=13 ;;
    *)
        echo "error: the driver is for CUDA '$cuda'; 12 or newer is needed. Name one with CUDA=12 if that is wrong" >&2
        exit 1
        ;;
    esac
    if [ ! -e "$VENV/.gpu-$cuda" ]; then
        ci/venv.sh
        "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
            "cupy-cuda${cuda}x" "rmm-cu$cuda" "numba-cuda[cu$cuda]" "kvikio-cu$cuda" nvidia-ml-py
        # Apart, for the bandwidth only: what else runs here is to run without it.
        "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check --no-deps \
            --target "$VENV/dask-cuda" dask-cuda || echo "dask-cuda cannot be had, so it is not measured"
        [ "${TORCH:-1}" = 0 ] || "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check torch
        touch "$VENV/.gpu-$cuda"
    fi
    # One GPU, the first that is visible.
    visible=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${visible%%,*}
    # What is checked without a GPU as well is checked here with the libraries' own functions.
    conformance=(tests/gpu/test_gpu.py tests/device/test_cuda.py tests/device/test_rmm_chain.py
        -k "Conformance or test_cuda or test_rmm_chain")
    libraries=(tests/gpu tests/device/test_kvikio_files.py -k "not Conformance and not out_of_memory and not garbage_is")
    memory=(tests/gpu/test_gpu.py -k "out_of_memory or garbage_is")
    cluster=(tests/docs/test_examples.py)
    bandwidth=(--check)
fi

run() { # run SECTION SECONDS [arguments for pytest]
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout $((seconds + 20)) "$VENV/bin/python" -m pytest -q --session-timeout="$seconds" --junitxml="$out/$name.xml" "$@" ||
        status=1
}

start=$SECONDS
status=0
run conformance 120 "${conformance[@]}"
run libraries 120 "${libraries[@]}"
run out-of-memory 90 "${memory[@]}"
run cluster 120 "${cluster[@]}"
echo "== bandwidth"
PYTHONPATH=.:$VENV/dask-cuda timeout 90 "$VENV/bin/python" ci/gpu_bandwidth.py --json "$out/bandwidth.json" "${bandwidth[@]}" || status=1
"$VENV/bin/python" ci/gpu_report.py "$out" || status=1
took=$((SECONDS - start))
echo "took $took s; see $out/report.json"
[ $took -lt 600 ] || {
    echo "error: that is more than ten minutes" >&2
    status=1
}
exit $status
