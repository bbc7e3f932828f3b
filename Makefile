# What the checks are called. `make check` before every commit; `make test` is the README's test command; `make test-slow` the whole
# grid of sizes and states, for the night: every mechanism at every pair of lengths, widths, dtypes, masks ... (tests/testing/test_sizes.py).
BIN = .venv/bin
PYTEST = $(BIN)/pytest
# What notices most mistakes per second: formulas, the registry, who sees whom, the order of imports, pages.
FAST = tests/formula tests/mechanisms/test_registry.py tests/engines/test_visibility.py tests/hf/test_layers.py \
	tests/test_docs.py tests/test_imports.py tests/test_readme.py

.PHONY: check types test test-slow gpu-small gpu-check gpu-check-slow docs site gallery models conversions bench
check: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -q -n auto $(FAST)

types:
	$(BIN)/mypy

test:
	.ci/run

test-slow:
	UNSOFT_TEST_SEED=$${UNSOFT_TEST_SEED:-$$(date +%Y%m%d)} $(PYTEST) -q -n auto -m 'slow and not gpu_check'

# The few tests of the GPU engine that CI runs, under a minute; skipped with a reason where Triton cannot be installed.
gpu-small:
	.ci/gpu-small

# The GPU engine, as far as that goes without a GPU: interpreted, compiled for six kinds of GPU, its PTX executed. Triton is a gigabyte.
gpu-check: GPU ?= gpu_check and not slow
gpu-check:
	$(BIN)/pip install -q -c constraints.txt --no-deps triton
	TRITON_INTERPRET=1 $(PYTEST) -q -n auto -m "$(GPU)" tests/engines/triton/interpreted
	$(PYTEST) -q -n auto -m "$(GPU)" tests/engines/triton/compiled

# The same with every formula, width and dtype, an hour of one core.
gpu-check-slow: GPU = gpu_check
gpu-check-slow: gpu-check

# Every page and picture that is made from the library; tests/test_docs.py and tests/measure/test_page.py say when one is stale.
docs:
	$(BIN)/python docs/generate/mechanisms.py
	$(BIN)/python docs/generate/readme_table.py
	$(BIN)/python docs/generate/measures.py
	$(BIN)/python docs/generate/picture.py
	$(BIN)/python docs/generate/evidence.py
	$(BIN)/python docs/generate/peers.py
	$(BIN)/python docs/generate/choose.py

# All pages with search, one page for each mechanism and the API, in build/site (extra docs). A warning is an error.
site:
	$(BIN)/sphinx-build -W --keep-going -q -c docs/site docs build/site

# Measured anew, several minutes on a quiet machine.
gallery:
	$(BIN)/unsoft compare --out report --again
	$(BIN)/python docs/generate/gallery.py report
	$(BIN)/python docs/generate/choose.py report
	$(BIN)/python docs/generate/questions.py report

# States and ablated heads of SmolLM2, MiniLM and small trained networks for docs/questions, ten minutes of one core.
models:
	$(BIN)/python experiments/real_models.py
	$(BIN)/python docs/generate/questions.py

# SmolLM2 to other mechanisms, half an hour of one core.
conversions:
	$(BIN)/python docs/generate/converting.py --run

bench:
	$(BIN)/unsoft bench --out benchmarks/results.json
