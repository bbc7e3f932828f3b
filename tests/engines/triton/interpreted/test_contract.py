"""The mechanism test suite on the GPU engine, and the engine as a registered PyTorch operator."""

import pytest
import torch

import unsoft
from tests.engines.triton.parity import SHARP

pytestmark = pytest.mark.gpu_check
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "relu2", "softpick", "l2")]
THEMES = [
    *("parity", "gradients", "causality", "decoding", "masking", "edges", "nonfinite", "equivariance"),
    *("dtypes", "dropout", "purity", "promises"),
]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["cog", "own", *OTHERS])
def test_battery(name, theme):
    mechanism = SHARP if name == "own" else name
    unsoft.testing.check_mechanism(mechanism, engines=["triton"], quick=True, only=theme)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu_small)], ids=str
)
def test_operator(make_call, dtype):
    call = make_call(SHARP, dtype=dtype, mask=(2, 1, 7, 9), bias=(1, 4, 7, 9), causal=2, dropout=0.3)
    tensors, options = call.flat()
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(torch.ops.unsoft.triton.default, tensors, options, test_utils=tests)


def test_compiled_by_torch():
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))

    def attend(q, k, v):
        return 2 * unsoft.attention(q, k, v, "cog", is_causal=True, engine="triton")

    actual = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(actual, attend(q, k, v))
