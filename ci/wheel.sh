#!/usr/bin/env bash
# Show that the wheel works where there is no checkout and no device: ci/wheel.sh [arguments for pytest]
#
# Builds the wheel, installs it into a fresh environment outside of the checkout, and lets every way of switching gpuspill
# on start, compute, spill on a simulated device and stop: first without dask-cuda, then beside it (both cluster classes,
# the flag, the preload, the worker class, the plugin). Removes everything afterwards.
#
# PYTHON     interpreter to use (default: the python3 found first in PATH)
# DASK_CUDA  which dask-cuda (default: "dask-cuda[cu12]>=26.6")
# KEEP=1     leave the environment where it is
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
# Nothing of the caller's own environment may help or hinder.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME CUDA_VISIBLE_DEVICES ${!DASK_@} ${!PYTEST_@}
pip=("$work/venv/bin/python" -m pip --no-input --disable-pip-version-check)

"$python" -m venv "$work/venv"
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$work" .
wheel=$(ls "$work"/gpuspill-*.whl)
echo "== $(basename "$wheel") in a fresh environment"
"${pip[@]}" install --quiet "$wheel" numpy pandas pytest pytest-timeout

mkdir "$work/tests"
cp tests/test_cluster.py tests/dask_cuda/test_ways.py "$work/tests"
printf '[pytest]\nmarkers = cluster\ntimeout = 300\naddopts = -p no:cacheprovider -ra\n' >"$work/tests/pytest.ini"
cd "$work/tests"
export PATH=$work/venv/bin:$PATH
python -c "
import gpuspill, sys
print(f'gpuspill {gpuspill.__version__} from {gpuspill.__file__}, Python {sys.version.split()[0]}')
sys.exit(not gpuspill.__file__.startswith(sys.prefix))
" || { echo "error: this is not the gpuspill of the wheel" >&2; exit 1; }
gpuspill --version
gpuspill config

status=0
echo "== without dask-cuda"
python -m pytest test_cluster.py "$@" || status=1
echo "== beside dask-cuda"
"${pip[@]}" install --quiet "${DASK_CUDA:-dask-cuda[cu12]>=26.6}"
"${pip[@]}" list 2>/dev/null | grep -iE '^(dask|distributed|dask-cuda|zict) '
dask cuda worker --help | grep -A1 -e --enable-jit-unspill || { echo "error: there is no such flag" >&2; status=1; }
python -m pytest test_cluster.py test_ways.py "$@" || status=1
exit $status
