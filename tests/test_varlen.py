"""varlen_attn against a loop over documents, and the same arguments in MultiheadAttention."""

import inspect

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn

import unsoft

QUERIES, KEYS = torch.tensor([0, 4, 5, 12]), torch.tensor([0, 9, 12, 19])


def loop(q, k, v, ends, key_ends, window_size, mechanism):
    """Every document by itself, with a mask aligned at its lower right."""
    outputs = []
    for a, b, c, d in zip(ends, ends[1:], key_ends, key_ends[1:], strict=False):
        i = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        j, (left, right) = torch.arange(d - c), window_size
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        seen = seen if left == -1 else seen & (j >= i - left)
        seen = seen if right == -1 else seen & (j <= i + right)
        parts = [x[s].transpose(0, 1) for x, s in ((q, slice(a, b)), (k, slice(c, d)), (v, slice(c, d)))]
        out = unsoft.attention(*parts, mechanism, attn_mask=seen, enable_gqa=True, engine="dense")
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("mechanism", ["softmax", "cog", "relu2"])
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 0), (2, 1), (-1, 1), (2, -1)])
@pytest.mark.parametrize("key_ends", [QUERIES, KEYS])
def test_it_equals_a_loop_over_documents(mechanism, window_size, key_ends):
    random = torch.Generator().manual_seed(0)
    q = torch.randn(12, 4, 8, generator=random, dtype=torch.float64)
    k, v = (torch.randn(int(key_ends[-1]), 2, 8, generator=random, dtype=torch.float64) for _ in range(2))
    options = {"window_size": window_size, "enable_gqa": True, "mechanism": mechanism}
    actual = unsoft.varlen_attn(q, k, v, QUERIES.int(), key_ends.int(), 7, 9, **options)
    expected = loop(q, k, v, QUERIES, key_ends, window_size, mechanism)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_it_has_the_arguments_of_torch():
    ours, theirs = (inspect.signature(f).parameters for f in (unsoft.varlen_attn, torch_varlen_attn))
    assert [*theirs, "mechanism"] == list(ours)
    assert all(ours[name].default == theirs[name].default for name in theirs)


@pytest.mark.parametrize("argument", ["return_aux", "seqused_k", "block_table"])
def test_what_it_does_not_support_raises(argument):
    x = torch.randn(12, 4, 8)
    with pytest.raises(ValueError, match=f"argument '{argument}' is unsupported"):
        unsoft.varlen_attn(x, x, x, QUERIES, QUERIES, 7, 7, **{argument: torch.ones(3)})
    with pytest.raises(ValueError, match=r"'window_size' must be .* not \(-2, 0\)"):
        unsoft.varlen_attn(x, x, x, QUERIES, QUERIES, 7, 7, window_size=(-2, 0))


@pytest.mark.parametrize("mechanism", ["cog", "magnitude"])
def test_layers_pass_documents_on(mechanism):
    torch.manual_seed(0)
    layer = unsoft.nn.MultiheadAttention(16, 4, mechanism=mechanism, batch_first=True)
    x = torch.randn(2, 12, 16)
    packed, _ = layer(x, x, x, is_causal=True, documents=torch.tensor([0] * 5 + [1] * 7))
    alone = [layer(part, part, part, is_causal=True)[0] for part in x.split([5, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def test_layers_pass_windows_on():
    layer, x = unsoft.nn.MultiheadAttention(16, 4, mechanism="cog", batch_first=True), torch.randn(2, 9, 16)
    _, weights = layer(x, x, x, is_causal=True, window=(2, 0), average_attn_weights=False)
    assert torch.equal(weights != 0, torch.ones(2, 4, 9, 9, dtype=torch.bool).tril().triu(-2))
    layer = unsoft.nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True)
    with pytest.raises(ValueError, match="'window' and 'documents' .* add_zero_attn"):
        layer(x, x, x, window=(2, 0))
