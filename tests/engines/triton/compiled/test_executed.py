"""The PTX compiled for sm_80 and sm_90, executed: results against dense float64, with races as errors."""

import re
from contextlib import nullcontext

import pytest
import torch

import unsoft

pytest.importorskip("triton")

from tests.engines.triton.compiled.emulate import emulated  # noqa: E402
from tests.engines.triton.compiled.ptx import launch, text  # noqa: E402
from tests.engines.triton.compiled.ptx.errors import PtxError  # noqa: E402
from tests.engines.triton.parity import LIMIT, SHARP, check  # noqa: E402
from unsoft.engines.triton import density  # noqa: E402
from unsoft.engines.triton.launch import KERNELS, TileSizes, candidates  # noqa: E402
from unsoft.mechanisms.fox import FOX  # noqa: E402

pytestmark = pytest.mark.gpu_check
SMALL = TileSizes(32, 32, 2, 2)
DTYPES = (*[torch.bfloat16] * 3, torch.float32)


@pytest.mark.parametrize(
    "name",
    ["softmax", pytest.param("cog", marks=pytest.mark.gpu_small), "relu2", "softpick", "sigmoid", "l2"],
)
def test_causal_masked_and_grouped(name):
    with emulated(SMALL) as done:
        check(name, torch.bfloat16, is_causal=True, mask="bool", heads=2, kv_heads=1)
    lists = [x for kernel in KERNELS for x in ("visible_tiles", kernel)]
    assert done == ["prepare", *lists[:2], "prepare", *lists[2:]]


def test_a_formula_of_a_user_with_a_parameter():
    with emulated(SMALL):
        check(SHARP, torch.bfloat16, tau=True, is_causal=True, heads=2, kv_heads=1)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"mechanism": "relu2", "dtype": torch.float16, "spread": 170.0},
        {"dtype": torch.float32, "length": 20, "keys": 24},
        {"mask": "additive"},
        {"dropout_p": 0.3},
        {"is_causal": "lower_right", "length": 33, "keys": 70},
        {"is_causal": True, "window": (9, 0), "keys": 40},
        {"width": 64, "value_width": 64},
        {"width": 16, "value_width": 5},
    ],
    ids=str,
)
def test_calls(options):
    with emulated(SMALL):
        mechanism, dtype = options.pop("mechanism", "cog"), options.pop("dtype", torch.bfloat16)
        check(mechanism, dtype, heads=2, kv_heads=2, **options)


def test_fields():
    """fox: a field of the queries and one of the keys, and their gradients."""
    source = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(1, 2, 40, 32, generator=source) for _ in range(4))
    c = torch.nn.functional.logsigmoid(torch.randn(1, 2, 40, generator=source) + 2).cumsum(-1)
    with emulated(SMALL) as done:
        leaves = [x.to(dtype).requires_grad_() for x, dtype in zip((q, k, v, c), DTYPES, strict=True)]
        *qkv, field = leaves
        out = unsoft.attention(*qkv, FOX, fields={"c": field}, is_causal=True, engine="triton")
        actual = [out.detach(), *torch.autograd.grad(out, leaves, grad.bfloat16())]
    assert done == ["prepare", "forward", "prepare", "query_gradients", "key_gradients"]
    q, k, v, c = (x.detach().double().requires_grad_() for x in leaves)
    logits = 32**-0.5 * q @ k.mT + c[..., :, None] - c[..., None, :]
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    exact = [expected.detach(), *torch.autograd.grad(expected, (q, k, v, c), grad.bfloat16().double())]
    off = [float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, exact, strict=True)]
    assert max(off) < LIMIT[torch.bfloat16], off


def test_density(monkeypatch):
    """Two blocks of rows, grouped heads, clones: output, dq, dk, dv and the gradients of t and p."""
    monkeypatch.setattr(density, "SIZES", (TileSizes(32, 32, 2, 1),))
    source, results = torch.Generator().manual_seed(2), []
    inputs = [torch.randn(1, heads, 40, 32, generator=source).bfloat16() for heads in (2, 1, 1, 2)]
    inputs[1][:, :, 20:30] = inputs[1][:, :, 5:6]
    for engine, dtype in (("triton", torch.float32), ("dense", torch.float64)):
        layer = unsoft.mechanism("density+cog", heads=2, head_dim=32).to(torch.float64)
        layer.set_density(p=0.8, t=2.0)
        *qkv, grad = (x.to(dtype).requires_grad_() for x in inputs)
        with emulated(SMALL) if engine == "triton" else nullcontext() as done:
            out = layer(*qkv, is_causal=True, enable_gqa=True, engine=engine)
            gradients = torch.autograd.grad(out, [*qkv, *layer.parameters()], grad)
        results.append([out.detach(), *gradients])
        if engine == "triton":
            assert {"densities", "density_gradients"} <= set(done)
    off = [float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    assert max(off) < LIMIT[torch.float32], off


FEW = {
    "one query": {},
    "parameter": {"mechanism": SHARP, "tau": True},
    "count and mask": {"mechanism": "relu2", "mask": "bool", "length": 3},
    "causal": {"is_causal": "lower_right", "length": 3},
    "additive": {"mask": "additive", "keys": 300},
    "window": {"is_causal": "lower_right", "length": 3, "window": (90, None)},
    "float32": {"dtype": torch.float32, "keys": 300},
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", FEW)
def test_few_queries(name, target):
    options = {"length": 1, "keys": 700} | FEW[name]
    mechanism, dtype = options.pop("mechanism", "cog"), options.pop("dtype", torch.bfloat16)
    with emulated(SMALL, target) as done:
        check(mechanism, dtype, heads=4, kv_heads=2, **options)
    assert done[:2] == ["decode", "combine"]


@pytest.mark.parametrize("sizes", [TileSizes(64, 64, 4, 2), TileSizes(64, 128, 8, 2)], ids=str)
@pytest.mark.parametrize("name", ["cog", "relu2"])
def test_hopper(name, sizes):
    shape = {"length": 70, "keys": 150, "width": 64, "value_width": 64, "heads": 2, "kv_heads": 1}
    with emulated(sizes, "sm_90"):
        check(name, torch.bfloat16, is_causal=True, **shape)


def test_the_sizes_that_are_shipped():
    sizes = {kernel: candidates(kernel, "sm_80", 64, 16)[0] for kernel in KERNELS}
    shape = {"length": 200, "keys": 200, "width": 64, "value_width": 64, "heads": 1, "kv_heads": 1}
    with emulated(sizes):
        check("cog", torch.bfloat16, is_causal=True, **shape)


@pytest.mark.parametrize(
    ("target", "remove", "message"),
    [
        ("sm_80", r"^\s*bar\.sync.*$", "barrier"),
        ("sm_80", r"^\s*cp\.async\.wait_group.*$", "waited for"),
        ("sm_90", r"^\s*wgmma\.wait_group.*$", "waited for"),
        ("sm_90", r"^\s*fence\.proxy\.async.*$", "fence"),
    ],
)
def test_missing_synchronisation_is_found(target, remove, message, monkeypatch):
    """Without its barriers or waits a kernel gives the right numbers here, and must still be refused."""
    without = lambda code: text.read(re.sub(remove, "", code, flags=re.M))  # noqa: E731
    monkeypatch.setattr(launch, "read", without)
    sizes = TileSizes(32, 32, 2, 3) if target == "sm_80" else TileSizes(64, 64, 4, 3)
    with emulated(sizes, target), pytest.raises(PtxError, match=message):
        check("cog", torch.bfloat16, heads=1, kv_heads=1, length=64, keys=256, value_width=32)
