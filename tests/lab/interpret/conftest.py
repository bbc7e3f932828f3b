"""The tiny models of tests/hf."""

from tests.hf.conftest import tiny, words  # noqa: F401
