"""Everything here compiles for GPUs that are not there; nothing runs in the interpreter."""

import os

import pytest


@pytest.fixture(autouse=True)
def _compiled():
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("compiles, which TRITON_INTERPRET=1 prevents; see make gpu-check")
