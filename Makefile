# Two commands matter: `make compare` and `make test`. Each sets up what it needs.
#
# PYTHON chooses the interpreter (3.11 or newer), VENV the environment's folder, ARGS goes to
# the command: make compare ARGS="article --account --slots 80"
#
# torch is pinned, its build is not: pip takes the best one that your indexes offer. Where that
# is the CUDA build and there is no GPU, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.kvalloc-ready
OLD := .venv-transformers-old
# Workers share the cores with numba's and torch's own threads: more than four gain nothing.
PYTEST := $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup compare test test-transformers-old soak coverage check lint types docs figures dist format clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make the environment (.venv, pinned by constraints.txt)

compare: $(STAMP) ## Replay a small trace on every backend; results in out/
	$(BIN)/kvalloc compare $(ARGS)

test: $(STAMP) ## Run the tests
	$(PYTEST) $(ARGS)

test-transformers-old: ## Test what uses transformers with the oldest one (an environment of its own)
	@$(OLD)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(OLD)
	@grep -vE '^(transformers|huggingface_hub)==' constraints.txt >$(OLD)/constraints.txt
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint $(OLD)/constraints.txt --editable . \
	  'transformers==5.17.0' 'huggingface_hub==1.33.0' hypothesis pytest pytest-randomly pytest-xdist
	$(OLD)/bin/pytest -n auto --maxprocesses 4 --dist worksteal tests/test_hf_*.py $(ARGS)

soak: $(STAMP) ## A million random operations on all backends, out/soak.json; ARGS="--operations N --seed S"
	$(BIN)/python -m kvalloc.tests.soak $(ARGS)

coverage: $(STAMP) ## Run the tests and show which lines none of them reaches; build/coverage/html in colour
	@mkdir -p build/coverage
	$(PYTEST) --cov=kvalloc --cov-report=term-missing:skip-covered --cov-report=html $(ARGS)

check: lint types docs ## Format, lint, types, docs, tests; CI adds test-transformers-old
	$(PYTEST)

lint: $(STAMP) ## Formatting and lint, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## mypy (strict) and pyright
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMP) ## The site, in build/site; a warning or a link that leads nowhere is an error
	rm -rf build/api build/lib build/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --target build/api .
	@touch build/api/kvalloc/kernels/__init__.py   # docstrings are only looked for in packages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(STAMP) ## Draw every figure of the docs anew from the results in docs/results/
	$(BIN)/python -m kvalloc.experiments.results_figures

# The fresh environment borrows the dependencies of $(VENV), but not the kvalloc that is there.
dist: $(STAMP) ## Build wheel and sdist, install each in a fresh environment, try it
	rm -rf dist build/lib build/try
	$(BIN)/python -m build --no-isolation . >/dev/null
	@for package in dist/*.whl dist/*.tar.gz; do \
	  $(PYTHON) -m venv --clear --without-pip build/try && \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    >$$(echo build/try/lib/python*/site-packages)/borrowed.pth && \
	  $(BIN)/python -m pip --python build/try/bin/python install --quiet \
	    --disable-pip-version-check --no-deps --no-build-isolation --ignore-installed $$package && \
	  (cd build/try && unset PYTHONPATH && bin/kvalloc --help >/dev/null && bin/python -c \
	    'import kvalloc.vmm, sys; assert kvalloc.__file__.startswith(sys.prefix), kvalloc.__file__; \
	    print(sys.argv[1], "installs:", kvalloc.__version__)' $$package) || exit 1; \
	done

format: $(STAMP) ## Reformat and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and builds (results in out/ stay)
	rm -rf build dist kvalloc.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environment as well
	rm -rf $(VENV) $(OLD) .path

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvalloc needs Python 3.11 or newer, and '$(PYTHON)' is not: $$($(PYTHON) --version 2>&1)." \
	    "Name another one, as in: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 2; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV), a few minutes the first time …"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@mkdir -p .path && ln -sfn .. .path/kvalloc   # mypy and pyright see the package through it
	@touch $@
