# One word each, the same here and in CI. Every target bootstraps its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test check lint types docs wheel bench lock clean

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
