"""Compare the GPU engine with the dense engine in float64, for interpreted and compiled code."""

from contextlib import contextmanager
from unittest import mock

import torch

import unsoft
from unsoft.engines.triton import launch

SHARP = unsoft.Formula(
    weight="s*exp(tau*s - m)", mass="abs(s)*exp(tau*s - m)", peak="tau*s", params={"tau": 1.0}
)
"""A user's signed formula with a parameter."""
LIMIT = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest relative error in the Euclidean norm of output and gradients: a few units of the dtype."""


def errors(
    mechanism,
    dtype,
    *,
    length=40,
    keys=50,
    width=32,
    value_width=24,
    heads=4,
    kv_heads=2,
    mask=None,
    tau=False,
    spread=1.0,
    **options,
):
    """Return relative errors of output, dq, dk, dv (and of mask and tau) on random inputs."""
    source = torch.Generator().manual_seed(1)
    shapes = [(1, heads, length, width), (1, kv_heads, keys, width), (1, kv_heads, keys, value_width)]
    leaves = [torch.randn(shape, generator=source).to(dtype) for shape in shapes]
    leaves[0] *= spread
    if mask == "bool":
        options["attn_mask"] = torch.rand(1, 1, length, keys, generator=source) < 0.8
    if mask == "additive":
        leaves.append(torch.randn(1, heads, length, keys, generator=source).to(dtype))
    if tau:
        leaves.append((torch.rand(heads, generator=source) + 0.5).to(dtype))
    grad = torch.randn(1, heads, length, value_width, generator=source).to(dtype)

    def run(engine, kind):
        mine = [x.to(kind).requires_grad_() for x in leaves]
        more = dict(options)
        if mask == "additive":
            more["attn_mask"] = mine[3]
        if tau:
            more["params"] = {"tau": mine[-1]}
        torch.manual_seed(5)
        out = unsoft.attention(*mine[:3], mechanism, engine=engine, enable_gqa=heads != kv_heads, **more)
        return [out.detach(), *torch.autograd.grad(out, mine, grad.to(kind))]

    pairs = zip(run("triton", dtype), run("dense", torch.float64), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def check(mechanism, dtype, **options):
    """Fail unless every error is within the dtype's limit."""
    off = errors(mechanism, dtype, **options)
    assert max(off) < LIMIT[dtype], [f"{x:.1e}" for x in off]


@contextmanager
def started():
    """Yield the list of the names of all kernels that are started inside."""
    names, run = [], launch.run
    with mock.patch.object(launch, "run", lambda made, sizes: (names.append(made.name), run(made, sizes))):
        yield names
