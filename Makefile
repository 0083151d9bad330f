# One word each, the same here and in CI. Every target bootstraps its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUTSIDE := tests/outside/node_modules/.package-lock.json

.PHONY: setup demo test outside check lint types docs wheel bench lock clean

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "evalpurse needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

demo: $(READY)
	$(BIN)/python examples/library-qa/demo.py

test: $(READY)
	$(BIN)/python -m pytest

# MCP clients that others wrote, and node to run them: about 250 MB that `make test` does without.
outside: $(OUTSIDE)

$(OUTSIDE): $(READY) tests/outside/package-lock.json tests/outside/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r tests/outside/requirements.lock
	$(BIN)/python -m tests.outside.install
	@touch $(OUTSIDE)

check: lint types docs wheel

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m pytest -q tests/test_docs.py
	$(BIN)/agentskills validate skill/evalpurse

wheel: $(READY)
	$(BIN)/python .ci/try_wheel.py

bench: $(READY)
	@for script in bench/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script --json || exit 1; done

lock: $(READY)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
	  --no-emit-find-links --python-version 3.11 --group dev pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV)
