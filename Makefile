# make tune    sets up, tunes a bundled workload on this machine, writes policy.yaml
# make test    sets up, runs linters, types and tests
#
# Override on the command line:
#   make tune WORKLOAD=bert_base BUDGET=300s      (names: amptune/workload/zoo)
#   make test TORCH=torch==2.11.0 PYTHON=python3.12

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
VENV     ?= .venv
WORKLOAD ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo resnet50 || echo digits)
BUDGET   ?= 300s

BIN := $(VENV)/bin

.PHONY: tune test lint setup clean

tune: $(VENV)/tune.stamp
	$(BIN)/amptune probe
	$(BIN)/amptune tune amptune.workload.zoo:$(WORKLOAD) --budget $(BUDGET) -o policy.yaml

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/test.stamp

# torch first and by itself: a version given exactly can come from a local wheel.
$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	@touch $@

$(VENV)/tune.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[digits]'
	@touch $@

# Without the frameworks that amptune plugs into their tests skip.
$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	-$(BIN)/pip install --quiet --disable-pip-version-check -e '.[integrations]'
	@touch $@ $(VENV)/tune.stamp

clean:
	rm -rf $(VENV) .amptune policy.yaml .pytest_cache .mypy_cache .ruff_cache
