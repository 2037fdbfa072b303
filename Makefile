# make demo   install what users install, and attribute the bundled failing run
# make test   the whole gate but for the slow tests; CI runs the same
# make test-autogen test-crewai   plugs and systems of frameworks that need an environment of their own
PYTHON ?= python3
# Named exactly and first, so that no other package pulls in a GPU build of several gigabytes.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml $(shell find dcl -name '*.py') $(shell find dcl/pretrained -type f)

.PHONY: demo test test-all test-autogen test-crewai lint format clean

demo: $(VENV)/runtime
	$(BIN)/dcl attribute examples/parse_duration.json

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -m "slow or not slow"

# What these two pin fits neither each other nor the rest of the development install.
test-autogen test-crewai: test-%: .venv-%/ready
	.venv-$*/bin/python -m pytest tests/dcl/plugs/test_$*.py tests/injection/test_frameworks.py

# CrewAI pins openai below what [inject] asks for; the version that it brings will do.
.venv-autogen/ready: FRAMEWORK = -e ".[inject,autogen]" "autogen-ext[openai]>=0.7"
.venv-crewai/ready: FRAMEWORK = -e ".[crewai]" openai filelock "jsonargparse[signatures]>=4.49"
.venv-%/ready: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet \
	  $(FRAMEWORK) "pytest>=8.3" "hypothesis>=6.100"
	touch $@

lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-autogen .venv-crewai

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The development install is editable and holds all that the runtime needs.
$(VENV)/runtime: $(SOURCES) | $(BIN)/python
	test -e $(VENV)/dev || $(PIP) install --quiet .
	touch $@

$(VENV)/dev: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet -e ".[dev]"
	touch $@
