# Plain targets over one virtual environment. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := transformers,jobs,dev

.DEFAULT_GOAL := help
.PHONY: help test check format demo bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z.]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(STAMP) ## Make the virtual environment; again when what it needs has changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or later is needed, and '$(PYTHON)' is not one:" \
		"say which one is, as in 'make PYTHON=python3.12 $(or $(MAKECMDGOALS),test)'." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu it is in the package" \
		"python3-venv." >&2; exit 1; }
	@echo "Installing into $(VENV): a minute or two." >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest -q $(ARGS)

check: $(STAMP) ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP) ## Format the code and mend what the linter can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(STAMP) ## Two nodes on this machine, a real model, cold against restored (ARGS=--show-race)
	$(BIN)/python examples/quickstart.py $(ARGS)

bench: $(STAMP) ## Run the benchmarks that need no GPU, or those named: ARGS="copy beside"
	@for name in $(or $(ARGS),hashing ray_calls); do \
		echo "# $$name" >&2; $(BIN)/python -m "benchmarks.$$name" || exit 1; done

clean: ## Remove what was built, the environment included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
