# Every target does its own set-up. `make help` lists them.
#
#   make setup                                                    the virtual environment, dev tools included
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu   with PyTorch's CPU build: without it, on Linux,
#                                                                 pip takes the CUDA build and gigabytes with it
#   make setup PYTHON=/path/to/python3.12                         with an interpreter of your choice

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter of a supported version that can make virtual environments, otherwise the first of one.
PYTHON ?= $(shell for modules in sys,ensurepip,venv sys; do for python in python3.12 python3.11 python3; do \
	$$python -c "import $$modules; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))" 2>/dev/null && \
	{ echo $$python; exit; }; done; done)
TORCH_INDEX ?=
BUF := npx --yes --loglevel=error @bufbuild/buf@1.75.0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --constraint constraints.txt

# Not among the dev tools: it brings thirty packages. It gets an environment of its own, the first time it can be used.
AUDIT_VENV := .audit-venv
PIP_AUDIT := $(AUDIT_VENV)/bin/pip-audit
# Whether advisories can be had: a version that is known to have one says so.
AUDIT_PROBE := $(BIN)/python -c 'import json, sys, urllib.request as web; \
	sys.exit(not json.load(web.urlopen("https://pypi.org/pypi/jinja2/3.1.2/json", timeout=5))["vulnerabilities"])'

.PHONY: help setup demo test chaos clients check audit format protos docs bench pair clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv with everything, dev tools included (nothing to do when it is up to date)

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Outrider needs Python 3.11 or 3.12: install one, or name it with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: run 'sudo apt-get install python3-venv' and try again" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(BIN)/python -m outrider.deploy.compile_loops
	@touch $@

demo: setup ## start a service of its own, stream one completion, stop it
	@printf 'import json\nfrom pathlib import Path\n\n\ndef read_settings(path):\n    ' | \
		$(BIN)/outrider generate - --local --temperature 0.7 --seed 5 --max-new-tokens 160

# Three processes on two cores: two of them begin with tests of whole services, which wait a good part of their time, and
# the third with Triton's interpreter, which never does. Each has one thread (tests/conftest.py).
# Bytecode is kept, whatever the environment says: many of the processes that tests start import the same modules.
test: setup ## run the tests, three side by side
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q --numprocesses 3

FAULTS ?= 60
SEED ?=

chaos: setup ## faults in a running service: FAULTS=60, SEED=... for the same ones again
	@$(BIN)/python benchmarks/chaos.py --faults $(FAULTS) $(if $(SEED),--seed $(SEED))

clients: setup ## run examples/clients, each in an environment of its own out of PyPI
	@$(BIN)/python -m pytest -q -m clients tests/end_to_end/test_examples.py

check: setup ## formatting, lint, types, generated code, known vulnerabilities
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@PYTHON=$(BIN)/python sh protos/generate.sh --check
	@if $(BUF) --version >/dev/null 2>&1; then cd protos && $(BUF) lint; \
		else echo "left out the lint of protos: no buf (npx, from npm) on this machine"; fi
	@$(MAKE) --no-print-directory audit

# An advisory that does not matter here: make audit AUDIT_IGNORE="ID ID", or better, name it in this line with its reason.
AUDIT_IGNORE :=
audit: setup ## known vulnerabilities of the pinned packages
	@left_out() { echo "left out the audit of dependencies: $$1"; exit 0; }; \
	$(AUDIT_PROBE) 2>/dev/null || left_out "PyPI's advisories cannot be had on this machine"; \
	test -x $(PIP_AUDIT) || { $(BIN)/python -m venv $(AUDIT_VENV) && \
		$(AUDIT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1; } || \
		left_out "pip-audit cannot be installed"; \
	rm -f $(AUDIT_VENV)/found; \
	$(PIP_AUDIT) --requirement constraints.txt --disable-pip --no-deps --progress-spinner off --timeout 10 \
		$(AUDIT_IGNORE:%=--ignore-vuln %) --output $(AUDIT_VENV)/found 2>$(AUDIT_VENV)/log && exit 0; \
	test -s $(AUDIT_VENV)/found || left_out "$$(tail -n 1 $(AUDIT_VENV)/log)"; \
	cat $(AUDIT_VENV)/found; echo "raise these in constraints.txt" >&2; exit 1

format: setup ## format the code and mend what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

protos: setup ## generate the code of protos/outrider/v1 anew
	@PYTHON=$(BIN)/python sh protos/generate.sh

docs: setup ## write docs/reference, docs/results.md and README's table anew
	@$(BIN)/python docs/generate.py

bench: setup ## what speculation gains on this machine, by kind of prompt
	@$(BIN)/outrider bench

pair: setup ## train the embedded pair anew (hours on a CPU, minutes on a GPU)
	@$(BIN)/python recipes/embedded_pair/train.py

clean: ## remove the environments and everything built
	rm -rf $(VENV) .protos-venv $(AUDIT_VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
