# Everything here works in a fresh clone with nothing but Python (>= 3.11, with venv and pip): each target
# makes the environment it needs in $(VENV) first, and makes it again when pyproject.toml has changed.
#
#   make demo         see it spill: a cluster smaller than its data, checked against plain computation
#   make test         the whole test suite        (ARGS="-k name" is passed on to pytest)
#   make test-quick   the unit layers only: no clusters, nothing marked slow
#   make test-numba   the tests with Numba's CUDA simulator, which takes 210 MB more
#   make test-cuda    the real libraries for CUDA on a stand-in for the driver, in .venv-cuda, which takes 1.2 GB
#   make lint         ruff, mypy, direction of imports
#   make docs         the documentation, in docs/_build/html; every warning is an error
#   make coverage     how much of the package the unit layers run
#   make release-check   whether the last commit could be released; sdist and wheel are left in dist/
#   make bench        the headline benchmark      (BENCH="tiny" for another one)
#   make clean        remove all that these targets made
#
# PYTHON=/path/to/python3.12 chooses the interpreter for a new environment.

PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
ARGS ?=
BENCH ?= persist-sum --arms stock,gpuspill,nospill --repeat 5
export PYTHON VENV

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-numba test-cuda lint docs coverage release-check bench venv clean

help:
	@sed -n 's/^#  *\(make \)/  \1/p' Makefile

# The stamp is the last thing the script writes, so an interrupted installation is taken up again.
$(VENV)/.installed: pyproject.toml ci/venv.sh
	@ci/venv.sh

venv: $(VENV)/.installed

demo: $(VENV)/.installed
	@$(VENV)/bin/gpuspill demo $(ARGS)

test: $(VENV)/.installed
	@ci/test.sh all $(ARGS)

test-quick: $(VENV)/.installed
	@ci/test.sh quick $(ARGS)

test-numba: $(VENV)/.installed
	@$(VENV)/bin/python -m pip install -qq --no-input --disable-pip-version-check --editable '.[test-numba]'
	@ci/test.sh all tests/distributed/test_numba.py $(ARGS)

test-cuda:
	@VENV=$(CUDA_VENV) ci/test_cuda.sh $(ARGS)

lint: $(VENV)/.installed
	@ci/lint.sh

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(VENV)/bin/python -m pip install -qq --no-input --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs
	@ci/docs.sh $(ARGS)

coverage: $(VENV)/.installed
	@ci/coverage.sh $(ARGS)

# Makes environments of its own.
release-check:
	@ci/release_check.sh

bench: $(VENV)/.installed
	@$(VENV)/bin/gpuspill bench $(BENCH) $(ARGS)

clean:
	rm -rf $(VENV) .venv-cuda build dist docs/_build bench-results dask-scratch-space
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
