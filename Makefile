# What the checks are called. `make test` is the README's test command; `make test-slow` the whole grid of sizes and states,
# for the night: every mechanism at every pair of lengths, widths, dtypes, masks ... (tests/testing/test_sizes.py).
PYTEST = .venv/bin/pytest

.PHONY: test test-slow
test:
	.ci/run

test-slow:
	UNSOFT_TEST_SEED=$${UNSOFT_TEST_SEED:-$$(date +%Y%m%d)} $(PYTEST) -q -n auto -m slow
