"""Everything here runs in Triton's interpreter, made strict."""

import os

import pytest


@pytest.fixture(autouse=True)
def _strict():
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 from the start of the process; see make gpu-check")
    from tests.engines.triton.interpreted.strict import strict

    with strict():
        yield
