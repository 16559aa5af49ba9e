# make demo, make test, make lint, make docs: each sets up .venv by itself, once. Needs Python >= 3.10 and make.
#
#   make test ARGS="-k ledger"     arguments for pytest
#   make demo PYTHON=python3.12    the Python that .venv is made with

PYTHON ?= python3
ARGS ?=

VENV_PYTHON := .venv/bin/python
# The stamp carries the folder's checksum: an editable install points at one place, so a clone that was
# moved or copied together with its .venv is installed again.
STAMP := .venv/.installed-$(shell pwd | cksum | cut -d' ' -f1)
DOCS_STAMP := $(STAMP:.venv/.installed-%=.venv/.docs-installed-%)

.PHONY: help setup demo test test-slow test-gpu soak lint docs smoke clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       learn digits task after task in half the bytes of all images; writes demo/"
	@echo "make test       run the test suite (ARGS=... goes to pytest)"
	@echo "make test-slow  the tests that it leaves out: kernels compiled for the CPU, long fits, much memory"
	@echo "make test-gpu   the tests that need a GPU; a row in the ledger says how they ended"
	@echo "make soak       kill, starve and forge for SECONDS=600, then a table of counts and a row of the ledger"
	@echo "make lint       ruff and mypy; a script of a user must pass mypy --strict"
	@echo "make docs       write tables and pictures from the ledger, and build the documentation into site/"
	@echo "make smoke      build wheel and source archive into dist/, install and try them in a clean environment"
	@echo "make setup      only make .venv and install into it"
	@echo "make clean      remove caches, builds, site/ and demo/; .venv stays"

setup: $(STAMP)

demo: $(STAMP)
	.venv/bin/krnet demo --out demo $(ARGS)

# A file of tests goes to one process, in the order of tests/conftest.py: those that take long first. Bytecode is kept,
# whatever the environment says: without it each process compiles all tests, for 7 s.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV_PYTHON) -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		echo "make: no chromium on the PATH: the tests of the report page in a browser are skipped. On Debian: apt install chromium"
	$(PYTEST) $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)

# One process: tests that measure a GPU's memory would see each other's.
test-gpu: $(STAMP)
	$(VENV_PYTHON) tools/test_gpu.py $(ARGS)

# ARGS="--only damage,forgery --seed 7", or ARGS="--replay soak-failed/CASE" for a trial that failed.
SECONDS ?= 600
soak: $(STAMP)
	$(VENV_PYTHON) tools/soak --seconds $(SECONDS) $(ARGS)

# As in a project that uses krnet: its own strict settings, and no messages about krnet's own source.
AS_USER := --config-file= --strict --follow-imports=silent --cache-dir=.mypy_cache/user

lint: $(STAMP)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m mypy
	MYPYPATH=src $(VENV_PYTHON) -m mypy $(AS_USER) tests/typed/user.py

# CHECK=--check writes no table and no picture, and fails where one is out of date.
# The variable silences a notice about the future of mkdocs, which is not about these pages.
docs: $(DOCS_STAMP)
	$(VENV_PYTHON) tools/fill_docs.py $(CHECK)
	$(VENV_PYTHON) tools/draw_docs.py $(CHECK)
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --quiet
	@echo "make: open site/index.html"

$(DOCS_STAMP): $(STAMP)
	$(VENV_PYTHON) -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[docs]'
	@touch $@

# PYTHONS="python3.10 python3.13": an environment of each.
PYTHONS ?= $(PYTHON)
smoke:
	DIST=dist tools/smoke_test.sh $(PYTHONS)

# constraints.txt pins torch; without it pip may choose a build that brings gigabytes of CUDA along.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(VENV_PYTHON) -m pip --version >/dev/null 2>&1; then \
		command -v $(PYTHON) >/dev/null 2>&1 || { \
			echo "make: no '$(PYTHON)' on the PATH; krnet needs Python >= 3.10. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
			echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1); krnet needs Python >= 3.10. Name another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }; \
		$(PYTHON) -c 'import venv, ensurepip' >/dev/null 2>&1 || { \
			echo "make: '$(PYTHON)' cannot make a virtual environment: its venv or ensurepip module is missing. On Debian and Ubuntu: apt install python3-venv. Or name another Python: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }; \
		echo "make: creating .venv with $$($(PYTHON) --version 2>&1)"; \
		$(PYTHON) -m venv .venv && $(VENV_PYTHON) -m pip --version >/dev/null || { \
			echo "make: .venv is there but its Python or pip does not run. Remove it (rm -rf .venv) and call make again." >&2; exit 1; }; \
	fi
	@$(VENV_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: .venv holds $$($(VENV_PYTHON) --version 2>&1); krnet needs Python >= 3.10. Remove it (rm -rf .venv) and call make PYTHON=python3.11 (or later)." >&2; exit 1; }
	$(VENV_PYTHON) -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@rm -f .venv/.installed-*
	@touch $@

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist demo site
	find src tests -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
