"""The PTX compiled for sm_80 and sm_90, executed: results against dense float64, with races as errors."""

import re

import pytest
import torch

pytest.importorskip("triton")

from tests.engines.triton.compiled.emulate import emulated  # noqa: E402
from tests.engines.triton.compiled.ptx import launch, text  # noqa: E402
from tests.engines.triton.compiled.ptx.errors import PtxError  # noqa: E402
from tests.engines.triton.parity import SHARP, check  # noqa: E402
from unsoft.engines.triton.tile_sizes import KERNELS, TileSizes, candidates  # noqa: E402

pytestmark = pytest.mark.gpu_check
SMALL = TileSizes(32, 32, 2, 2)


@pytest.mark.parametrize("name", ["softmax", "cog", "relu2", "softpick", "sigmoid", "l2"])
def test_causal_masked_and_grouped(name):
    with emulated(SMALL) as done:
        check(name, torch.bfloat16, is_causal=True, mask="bool", heads=2, kv_heads=1)
    assert done == list(KERNELS)


def test_a_formula_of_a_user_with_a_parameter():
    with emulated(SMALL):
        check(SHARP, torch.bfloat16, tau=True, is_causal=True, heads=2, kv_heads=1)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32, "length": 20, "keys": 24},
        {"mask": "additive"},
        {"dropout_p": 0.3},
        {"is_causal": "lower_right", "length": 33, "keys": 70},
        {"width": 64, "value_width": 64},
        {"width": 16, "value_width": 5},
    ],
    ids=str,
)
def test_calls(options):
    with emulated(SMALL):
        check("cog", options.pop("dtype", torch.bfloat16), heads=2, kv_heads=2, **options)


@pytest.mark.parametrize("sizes", [TileSizes(64, 64, 4, 2), TileSizes(64, 128, 8, 2)], ids=str)
@pytest.mark.parametrize("name", ["cog", "relu2"])
def test_hopper(name, sizes):
    shape = {"length": 70, "keys": 150, "width": 64, "value_width": 64, "heads": 2, "kv_heads": 1}
    with emulated(sizes, "sm_90"):
        check(name, torch.bfloat16, is_causal=True, **shape)


@pytest.mark.parametrize("length", [1, 3])
def test_few_queries(length):
    with emulated(SMALL) as done:
        check("cog", torch.bfloat16, length=length, keys=600, heads=4, kv_heads=2, mask="bool")
    assert done[:2] == ["decode", "combine"]


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
