# make tune          sets up, tunes a bundled workload on this machine, writes policy.yaml
# make test          sets up, runs linters, types and tests: ten minutes on two slow cores
# make test-all      the same with all that takes long, and `make frozen`: about half an hour on two cores
# make test-newest   `make test` in an environment of its own, with the newest version of every package but torch
# make constraints   the same, and if it is green its versions are those that `make` installs from then on
# make docs          builds the site of docs/ into site/, in an environment of its own: half a minute
# make frozen        holds what amptune does against what was recorded (tests/frozen)
#
# Override on the command line:
#   make tune WORKLOAD=bert_base BUDGET=300s      (resnet50, bert_base or digits)
#   make tune FORCE=1               (replace a policy.yaml of another workload, or one that was edited)
#   make test TORCH=torch==2.11.0 PYTHON=python3.12
#   make test CONSTRAINTS=          (without the tested versions, if they do not fit that torch or Python)

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
VENV     ?= .venv
# The versions that `make test` was green with, so that it is green tomorrow too. torch and what CUDA needs are not in it.
CONSTRAINTS ?= tests/package/constraints.txt
GPU      := $(shell nvidia-smi -L 2>/dev/null)
WORKLOAD ?= $(if $(GPU),resnet50,digits)
BUDGET   ?= 300s
# Where this repository is: the site's links to files outside docs/ begin with it.
ADDRESS  ?= $(shell sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)
# Tests run beside each other in so many processes; those that need a GPU have it to themselves.
BESIDE   ?= 2

# Bytecode is written when it is needed, whatever the environment says: without it `import torch` takes three times as long.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
NEWEST := $(VENV)/newest
SITE := $(VENV)/docs
PIP := $(BIN)/pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))
PYTEST := $(BIN)/python -m pytest

.PHONY: tune test test-all test-newest constraints frozen docs checked lint frameworks setup clean

tune: $(VENV)/tune.stamp
	$(BIN)/amptune probe
	$(BIN)/amptune tune amptune.workload.zoo:$(WORKLOAD) --budget $(BUDGET) -o policy.yaml $(if $(FORCE),--force)

test: checked
	$(PYTEST) -n $(BESIDE) --dist worksteal -m "not slow and not gpu"
	$(if $(GPU),$(PYTEST) -m gpu)

test-all: checked frozen
	HYPOTHESIS_PROFILE=new $(PYTEST) -n $(BESIDE) --dist worksteal -m "not gpu"
	$(if $(GPU),$(PYTEST) -m gpu)

test-newest:
	rm -rf $(NEWEST)
	$(MAKE) test VENV=$(NEWEST) CONSTRAINTS=

constraints: test-newest
	$(NEWEST)/bin/pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools --exclude torch \
	  --exclude triton | grep -Ev '^(cuda-|nvidia-[^m])' > tests/package/constraints.txt

frozen: $(VENV)/test.stamp
	PYTHONPATH=tests $(BIN)/python -m frozen check

# zensical takes links that leave docs/ for mistakes, and on a site they are: in the copy that it reads they are addresses.
docs: $(SITE)/docs.stamp
	rm -rf build/pages site && mkdir -p build/pages
	cp docs/*.md docs/*.svg docs/*.html docs/*.css build/pages
	sed -i 's|](\.\./|]($(ADDRESS)/blob/main/|g' build/pages/*.md
	$(SITE)/bin/zensical build --strict --clean

$(SITE)/docs.stamp: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check --requirement docs/requirements.txt
	@touch $@

# The frameworks install while the linters run: neither needs the other.
checked: $(VENV)/test.stamp
	$(MAKE) --no-print-directory --jobs 2 lint $(VENV)/frameworks.stamp

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(BESIDE)

setup: $(VENV)/test.stamp $(VENV)/frameworks.stamp

# torch first and by itself: a version given exactly can come from a local wheel.
$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile '$(TORCH)'
	@touch $@

$(VENV)/tune.stamp: $(VENV)/torch.stamp pyproject.toml $(CONSTRAINTS)
	$(PIP) --no-compile -e '.[tune,digits]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml $(CONSTRAINTS)
	$(PIP) --no-compile -e '.[test]'
	@touch $@ $(VENV)/tune.stamp

# Without the frameworks that amptune plugs into their tests skip.
$(VENV)/frameworks.stamp: $(VENV)/test.stamp
	-$(PIP) --no-compile -e '.[integrations]'
	@touch $@

clean:
	rm -rf $(VENV) build/pages site .cache .amptune policy.yaml .pytest_cache .mypy_cache .ruff_cache
