#!/usr/bin/env bash
# Test with the real libraries for CUDA on a machine without a GPU: ci/test_cuda.sh [arguments for pytest]
#
# Makes an environment with numba-cuda, cuda-bindings, RMM, CuPy and KvikIO (1.2 GB). Then two processes:
#
# 1. tests/standin: on a stand-in for libcuda.so.1 in host memory, which a C compiler builds; it moves memory, and runs no
#    kernels. numba-cuda, cuda-bindings and KvikIO run on it as they are.
# 2. The suites of the device port on RMM itself and on CuPy's own types, which need no driver for that.
#
# VENV    where the environment is made (default: .venv-cuda)
# PYTHON  interpreter to make it with (default: the python3 found first in PATH)
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${VENV:-.venv-cuda}
python=$VENV/bin/python
stamp=$VENV/.cuda

if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ ci/test_cuda.sh -nt "$stamp" ]; then
    ci/venv.sh
    install=("$python" -m pip install -qq --no-input --disable-pip-version-check)
    "${install[@]}" --editable '.[test-cuda]'
    # Without what they name as requirements: two gigabytes of CUDA's libraries, which are not called here.
    "${install[@]}" --no-deps kvikio-cu13 libkvikio-cu13 nvidia-cufile
    touch "$stamp"
fi

status=0
GPUSPILL_STANDIN=1 "$python" -m pytest --session-timeout=1200 --durations=5 tests/standin "$@" || status=$?
"$python" -m pytest --session-timeout=600 tests/device/test_rmm_chain.py tests/device/test_device_arrays.py \
    tests/device/test_cuda.py "$@" || status=$?
exit $status
