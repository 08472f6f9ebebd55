#!/usr/bin/env bash
# What needs a GPU, on one: ci/test_gpu.sh [arguments for pytest]
#
# The conformance suites on CUDA, running out of memory with RMM, arrays of CuPy, Numba, PyTorch and RMM through device, host,
# disk and back, past host memory too, and how fast copies are. Makes an environment of its own first, which takes a few minutes; the rest is to be
# done within six. Figures go to gpu-bandwidth.json, and as lines for docs/benchmarks.md to the terminal.
#
# PYTHON  interpreter to make the environment with (default: python3)
# VENV    where (default: .venv-gpu)
# CUDA    12 or 13 (default: what the driver says)
# TORCH=0 leaves PyTorch out, which is a large download; its tests are skipped then
set -euo pipefail
cd "$(dirname "$0")/.."
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
    [ "${TORCH:-1}" = 0 ] || "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check torch
    touch "$VENV/.gpu-$cuda"
fi

# One GPU, the first that is visible.
visible=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${visible%%,*}
start=$SECONDS
status=0
timeout 300 "$VENV/bin/python" -m pytest -m gpu --session-timeout=280 --durations=5 tests/gpu "$@" || status=$?
# What is checked without a GPU as well, but here with the libraries' own functions.
timeout 60 "$VENV/bin/python" -m pytest -q tests/device/test_cuda.py tests/device/test_rmm_chain.py \
    tests/device/test_kvikio_files.py || status=$?
PYTHONPATH=. timeout 60 "$VENV/bin/python" ci/gpu_bandwidth.py --json gpu-bandwidth.json --check || status=$?
took=$((SECONDS - start))
echo "took $took s"
[ $took -le 360 ] || {
    echo "error: that is more than six minutes" >&2
    status=1
}
exit $status
