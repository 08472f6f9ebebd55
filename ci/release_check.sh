#!/usr/bin/env bash
# Check that the last commit could be released: ci/release_check.sh
#
# Builds the sdist and, from it, the wheel; checks what they contain and say; renders the conda recipe; validates the
# citation and the workflows. Then installs the wheel into a fresh environment for each Python that is found here, and lets it
# spill there, outside of the checkout: an example, and a project's own tests on the simulated device. Publishes nothing.
#
# PYTHON   interpreter for the tools (default: the python3 found first in PATH)
# PYTHONS  interpreters to install for (default: each of python3.11 to python3.14 that is in PATH, or that pyenv has)
# OUTPUT   where sdist and wheel are left (default: dist)
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
output=${OUTPUT:-dist}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Nothing of the caller's own environment may help or hinder.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME ${!DASK_@} ${!PYTEST_@}
pip() { "$1/bin/python" -m pip --quiet --no-input --disable-pip-version-check "${@:2}"; }

[ -z "$(git status --porcelain)" ] || echo "note: there are changes that are not committed; the last commit is checked"
git clone --quiet --no-hardlinks . "$work/source"

"$python" -m venv "$work/tools"
pip "$work/tools" install build twine cffconvert check-jsonschema py-rattler-build pyyaml

echo "== sdist and wheel"
"$work/tools/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || {
    cat "$work/build.log"
    exit 1
}
"$work/tools/bin/twine" check --strict "$work"/dist/*
"$work/tools/bin/python" ci/release_contents.py "$work/source" "$work"/dist/*.tar.gz "$work"/dist/*.whl

echo "== citation and workflows"
"$work/tools/bin/cffconvert" --validate --infile CITATION.cff
"$work/tools/bin/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml

echo "== conda recipe"
"$work/tools/bin/python" - <<'PYTHON'
from pathlib import Path
from rattler_build import Stage0Recipe
for variant in Stage0Recipe.from_yaml(Path("conda/recipe/recipe.yaml").read_text()).render():
    print(variant.recipe)
PYTHON

# Print an interpreter of a version. What is in PATH may be a shim of pyenv's that only says what there is.
find_python() {
    local candidate
    for candidate in "python$1" "$(pyenv root 2>/dev/null)/versions/$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "note: there is no Python $1 here" >&2
}
if [ -z "${PYTHONS:-}" ]; then
    for version in 3.11 3.12 3.13 3.14; do PYTHONS="${PYTHONS:-} $(find_python "$version")"; done
fi
for interpreter in $PYTHONS; do
    venv=$work/venv-${interpreter//\//-}
    "$interpreter" -m venv "$venv"
    pip "$venv" install "$(echo "$work"/dist/*.whl)" numpy pandas pytest "dask[array]"
    echo "== $("$venv/bin/gpuspill" --version), $("$venv/bin/python" --version)"
    mkdir "$venv/work"
    cp -r examples/own_project examples/park_in_a_task.py "$venv/work"
    (
        cd "$venv/work"
        "$venv/bin/python" -c "
import gpuspill, sys
sys.exit(not gpuspill.__file__.startswith(sys.prefix))" || { echo "error: this is not the gpuspill of the wheel" >&2; exit 1; }
        "$venv/bin/gpuspill" config >/dev/null
        "$venv/bin/python" park_in_a_task.py
        cd own_project
        "$venv/bin/python" -m pytest -q -p no:cacheprovider
    )
done

mkdir -p "$output"
cp "$work"/dist/* "$output"
echo "== $(cd "$root" && ls "$output"/gpuspill-* | tr '\n' ' ')can be released"
