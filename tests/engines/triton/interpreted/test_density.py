"""Density correction inside the kernels, against its definition in float64: output and every gradient."""

import pytest
import torch

import unsoft
from tests.engines.triton.parity import started

pytestmark = pytest.mark.gpu_check
SMALL = pytest.mark.gpu_small
PADDING = torch.arange(40)[None] < 33


def results(name, engine, *, causal, keys=40, mask=None, dtype=torch.float64):
    """Return output and gradients of q, k, v, log_t and logit_p, with clones among the keys."""
    torch.manual_seed(1)
    layer = unsoft.mechanism(name, heads=4, head_dim=16).to(dtype)
    layer.set_density(p=0.8, t=2.0)
    q, k, v = (
        torch.randn(1, heads, size, 16, dtype=dtype) for heads, size in ((4, 40), (2, keys), (2, keys))
    )
    k[:, :, 20:30] = k[:, :, 5:6] + 0.01 * k[:, :, 20:30]
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *layer.parameters()]
    options = {"is_causal": causal, "attn_mask": mask, "enable_gqa": True, "engine": engine}
    out = layer(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


CALLS = {
    "causal": ("density", {"causal": True}),
    "causal, padding": ("density+cog", {"causal": True, "mask": PADDING}),
    "more keys than rows": ("density+cog", {"causal": True, "keys": 50}),
    "all rows": ("density", {"causal": False}),
    "all rows, padding": ("density+cog", {"causal": False, "mask": PADDING}),
}


@pytest.mark.parametrize(
    "call", [pytest.param(x, marks=SMALL) if x == "causal, padding" else x for x in CALLS]
)
def test_density(call):
    name, options = CALLS[call]
    with started() as names:
        actual = results(name, "triton", **options)
    assert {"densities", "density_gradients"} <= set(names) and names.count("forward") == 1
    for mine, exact in zip(actual, results(name, "dense", **options), strict=True):
        assert (mine - exact).norm() < 1e-13 * exact.norm()


def test_masked_keys_may_be_nan():
    """NaN in a masked key takes the general path, and has no effect there."""
    layer = unsoft.mechanism("density", heads=1, head_dim=16)
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    mask = PADDING.view(1, 1, 1, 40)
    expected = layer(q, k, v, attn_mask=mask, engine="triton")
    k[..., 35, :], v[..., 36, :] = torch.nan, torch.nan
    torch.testing.assert_close(layer(q, k, v, attn_mask=mask, engine="triton"), expected)
