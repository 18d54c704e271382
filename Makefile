# phloem: every target sets up .venv by itself; a second call takes seconds.
#
#   TORCH_INDEX=URL   where pip looks for torch (and only torch); remembered until another is given
#   MODEL=..., ARGS=  what `make serve` serves, and further arguments
#   PYTEST=...        further arguments of pytest
#   WORKERS=N         processes among which `make test` divides the test files; each computes with one thread

VENV   := .venv
PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
MODEL  ?= smollm2-135m
ARGS   ?=
PYTEST ?=
WORKERS ?= 2

TORCH_INDEX ?= $(file < $(STAMPS)/torch-index)
TORCH_PIN   := $(shell grep '^torch==' constraints.txt)
# The stamp's name says which torch is installed, so that another pin or index installs again and nothing else does.
TORCH_STAMP := $(STAMPS)/torch-$(shell printf '%s %s' '$(TORCH_PIN)' '$(TORCH_INDEX)' | cksum | cut -d' ' -f1)
# Modules are compiled when they are first imported: of all that is installed that takes a minute, of what is used seconds.
PIP := $(PY) -m pip --disable-pip-version-check

.PHONY: help install serve test test-slow lint check bench bench-peers docs clean
.DEFAULT_GOAL := help

help:
	@echo 'make install    .venv with phloem (editable), its CPU extras and the test tools'
	@echo 'make serve      install, then serve $(MODEL) on port 30000 (MODEL=..., ARGS=...)'
	@echo 'make test       install, lint, and the tests that take minutes'
	@echo 'make test-slow  all tests: full matrices on the real models'
	@echo 'make lint       ruff, mypy, import-linter, the repository rules'
	@echo 'make bench      phloem and transformers, interleaved, on the workloads in bench/ (ARGS=...)'
	@echo 'make bench-peers  other engines, installed below .peers, beside phloem at equal precision; hours (ARGS=...)'
	@echo 'make docs       write the tables of options into docs/config.md'
	@echo 'make clean      remove .venv and caches'

$(STAMPS)/venv:
	@python=$$(.ci/check-machine.sh) && $$python -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first and by its exact pin: resolved together with other packages, pip could settle on another build of it.
# --no-deps keeps TORCH_INDEX to torch alone; what torch needs comes with the next step.
$(TORCH_STAMP): | $(STAMPS)/venv
	@test -n '$(TORCH_PIN)' || { echo 'constraints.txt does not pin torch' >&2; exit 1; }
	$(PIP) install --no-compile --no-deps $(if $(wildcard $(STAMPS)/torch-*),--force-reinstall) \
		$(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH_PIN)'
	@rm -f $(STAMPS)/torch-*
	@printf '%s' '$(TORCH_INDEX)' > $(STAMPS)/torch-index
	@touch $@

$(STAMPS)/install: pyproject.toml constraints.txt $(TORCH_STAMP)
	$(PIP) install --no-compile -c constraints.txt hatchling editables
	$(PIP) install --no-compile -c constraints.txt --no-build-isolation -e '.[all,dev]'
	@touch $@

install: $(STAMPS)/install

serve: install
	$(VENV)/bin/phloem serve $(MODEL) $(ARGS)

lint: check
	$(PY) -m pytest -q tests/repo/test_rules.py

# What is no test; `make test` runs the repository rules with all the others.
check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

# Whole files go to a worker, in order: fixtures of a module are made once, and the long files come first.
test: check
	$(PY) -m pytest -m 'not slow and not gpu' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

# In one process: what measures time or memory over minutes has the machine to itself.
test-slow: install
	$(PY) -m pytest -m 'not gpu' $(PYTEST)

docs: install
	$(PY) docs/render.py

bench: install
	$(PY) -m bench.run $(ARGS)

bench-peers: install
	$(PY) -m bench.against $(ARGS)

clean:
	rm -rf $(VENV) build dist bench/results .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
