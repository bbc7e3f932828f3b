"""Windows, packed documents, key lengths and masks with empty tiles: results, and tiles that are skipped."""

import pytest
import torch

import unsoft
from tests.engines.triton.interpreted import strict
from tests.engines.triton.parity import SHARP, check
from unsoft.mechanisms.fox import FOX

pytestmark = pytest.mark.gpu_check
SMALL = pytest.mark.gpu_small
DOCUMENTS = torch.tensor([0] * 13 + [1] * 21 + [2] * 6)
CALLS = {
    "window": {"window": (9, 0), "is_causal": True, "keys": 40},
    "window of both sides": {"window": (5, 3), "mask": "bool", "mechanism": "relu2"},
    "documents": {"documents": DOCUMENTS, "keys": 40, "is_causal": True, "mechanism": SHARP, "tau": True},
    "documents, mask, dropout": {"documents": DOCUMENTS, "keys": 40, "mask": "bool", "dropout_p": 0.2},
    "documents, additive mask": {"documents": DOCUMENTS, "keys": 40, "mask": "additive", "window": (4, 4)},
    "more queries than keys": {"length": 50, "keys": 20, "window": (6, 2), "is_causal": True},
    "key lengths": {"key_lengths": torch.tensor([21])},
    "few queries, window": {"length": 3, "keys": 100, "is_causal": "lower_right", "window": (20, None)},
    "few queries, key lengths": {"length": 1, "keys": 100, "key_lengths": torch.tensor([33])},
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=SMALL) if "mask, d" in x else x for x in CALLS])
def test_structured_visibility(name):
    options = dict(CALLS[name])
    check(options.pop("mechanism", "cog"), torch.float64, **options)


def test_documents_of_a_batch_with_fields():
    """Other documents in every row of the batch, and fields with gradients."""
    torch.manual_seed(0)
    documents = torch.stack([DOCUMENTS, DOCUMENTS.flip(0).neg()])
    leaves = [torch.randn(2, 2, 40, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]
    leaves.append(torch.rand(2, 2, 40, dtype=torch.float64).neg().cumsum(-1).requires_grad_())
    results = []
    for engine in ("triton", "dense"):
        *qkv, c = leaves
        options = {"fields": {"c": c}, "documents": documents, "is_causal": True, "engine": engine}
        out = unsoft.attention(*qkv, FOX, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


BANDED = (torch.arange(64)[:, None] - torch.arange(64)).abs() < 8


@pytest.mark.parametrize(
    ("options", "tiles"),
    [({"window": (7, 7)}, 10), ({"attn_mask": BANDED}, 10), ({"window": (7, 0), "is_causal": True}, 7)],
    ids=["window", "mask", "causal window"],
)
def test_invisible_tiles_are_skipped(options, tiles, monkeypatch):
    """Forward has two matrix products a tile, the gradients of queries three and those of keys four."""
    operands, original = [], strict.operand
    monkeypatch.setattr(strict, "operand", lambda *x: (operands.append(0), original(*x))[1])
    x = torch.randn(1, 1, 64, 16).requires_grad_()
    unsoft.attention(x, x, x, "cog", engine="triton", **options).sum().backward()
    assert len(operands) == 2 * (2 + 3 + 4) * tiles
