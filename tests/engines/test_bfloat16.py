"""Native attention in bfloat16, whose products are pairs of bfloat16 where the CPU multiplies them."""

import math
from functools import lru_cache

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import unsoft
from unsoft.modules.registry import names

MODIFIED = "gated+softmax logn+softmax magnitude+cog sink+softmax xsa+softmax".split()
LENGTH = 300
"""More than one tile of keys (96) and of queries (192), and no multiple of either."""


def inputs(width, *, queries=LENGTH, heads=2, kv_heads=2, seed=0, spread=1, outputs=None):
    """Queries, keys, values and a gradient. ``spread``: standard deviation of the logits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries), (kv_heads, LENGTH), (kv_heads, LENGTH), (outputs or heads, queries))
    query, *rest = (torch.randn(1, h, n, width, generator=generator) for h, n in shapes)
    return [x.bfloat16() for x in (spread * query, *rest)]


def results(attend, tensors, dtype):
    """Output and gradients of query, key and value; 0 where the output does not depend on them (decay)."""
    *leaves, upstream = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream, materialize_grads=True)]


def errors(attend, exact, tensors):
    """Relative error of each result in bfloat16 against ``exact`` in float64."""
    pairs = zip(results(attend, tensors, torch.bfloat16), results(exact, tensors, torch.float64), strict=True)
    return [((y.double() - r).norm() / (r.norm() if r.any() else 1)).item() for y, r in pairs]


def mechanism_errors(mechanism, tensors, **options):
    def attend(engine):
        return lambda q, k, v: unsoft.attention(q, k, v, mechanism, engine=engine, **options)

    return errors(attend("native"), attend("dense"), tensors)


@lru_cache
def pytorch_errors(width, spread, is_causal, steepness):
    """Errors of PyTorch's kernel where logits are multiplied by ``steepness``."""

    def softmax(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=steepness * width**-0.5)

    return errors(softmax, softmax, inputs(width, spread=spread))


STEEPNESS = {"rbf": 2.0, "ssmax": 0.43 * math.log(LENGTH)}
"""These multiply the logits themselves. The gradients of larger logits are less exact, in PyTorch too."""


def every_other_shape():
    """Return one causal shape and one that is not for every mechanism; the other two are slow."""
    shapes = [(64, 1, False), (128, 1, True), (128, 3, False), (64, 3, True)]
    for row, mechanism in enumerate((*names(), *MODIFIED)):
        for column, shape in enumerate(shapes):
            later = (row + column // 2) % 2
            yield pytest.param(mechanism, *shape, marks=pytest.mark.slow if later else ())


@pytest.mark.parametrize(("mechanism", "width", "spread", "is_causal"), list(every_other_shape()))
def test_as_exact_as_pytorch(mechanism, width, spread, is_causal):
    width = 32 if mechanism == "linear-taylor2" else width  # it has width^2 features
    layer = unsoft.mechanism(mechanism, heads=2, head_dim=width)
    if layer.causal_only and not is_causal:
        pytest.skip("looks back only")
    tensors = inputs(width, spread=spread, heads=layer.query_heads, outputs=2)

    def attend(q, k, v):
        torch.manual_seed(0)  # parameters that are drawn
        return unsoft.attention(q, k, v, mechanism, is_causal=is_causal)

    ours = errors(attend, attend, tensors)
    theirs = pytorch_errors(width, spread, is_causal, STEEPNESS.get(mechanism, 1))
    assert all(a <= 1.3 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("mechanism", ["relu2", "swishmax"])
def test_one_key_stands_out(mechanism):
    """All logits are ordinary but one in each row, among the last keys: softmax is one-hot."""
    query, key, value, _ = inputs(64)
    query[..., 0] = 4
    key[..., 0] = 0
    key[..., LENGTH - 3, 0] = 40
    exact = unsoft.attention(query.double(), key.double(), value.double(), mechanism, engine="dense")
    out = unsoft.attention(query, key, value, mechanism, engine="native")
    # Nothing but the output is rounded.
    assert (out - exact).norm() <= 1.1 * (exact.bfloat16() - exact).norm()


def test_later_tokens_change_no_bit():
    """Whether a row keeps more digits of its weights is decided by what it sees itself."""
    tensors = inputs(64, spread=3)[:3]
    later = [torch.cat((x[:, :, :210], 5 * x[:, :, 210:]), 2) for x in tensors]
    plain, changed = (
        unsoft.attention(*given, "relu2", is_causal=True, engine="native") for given in (tensors, later)
    )
    assert torch.equal(plain[:, :, :210], changed[:, :, :210])


WINDOW = {"is_causal": True, "window": (130, 0)}
DOCUMENTS = {"documents": torch.arange(LENGTH) // 101}
MASK = {"attn_mask": torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7}


@pytest.mark.parametrize(
    "options", [{}, WINDOW, DOCUMENTS, MASK], ids=["full", "window", "documents", "mask"]
)
@pytest.mark.parametrize("width", [5, 40, 64])
@pytest.mark.parametrize("mechanism", ["softmax", "cog", "relu2"])
def test_structure(mechanism, width, options):
    """Widths that are no multiple of a register, odd ones too; two query heads for each key head."""
    tensors = inputs(width, heads=4, kv_heads=2)
    # 2^-9 for the largest rounding of a weight and of the output each; gradients round twice more.
    assert max(mechanism_errors(mechanism, tensors, enable_gqa=True, **options)) < 4 * 2**-9


@pytest.mark.parametrize("queries", [1, 4, 5, 47, 49])
def test_few_queries(queries):
    assert max(mechanism_errors("cog", inputs(64, queries=queries))) < 4 * 2**-9


@pytest.mark.parametrize("layout", ["columns", "odd start", "rows"])
def test_tensors_that_cannot_be_read_in_place(layout):
    tensors = inputs(64)

    def moved(x):
        if layout == "columns":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        padding = (1, 0) if layout == "odd start" else (0, 3)
        start = padding[0]
        return torch.nn.functional.pad(x, padding)[..., start : start + 64]

    plain, strided = (
        results(lambda q, k, v: unsoft.attention(q, k, v, "cog", engine="native"), given, torch.bfloat16)
        for given in (tensors, [moved(x) for x in tensors])
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


@pytest.mark.parametrize("mechanism", ["softmax", "relu2"])
@pytest.mark.parametrize("which", [1, 2])
def test_nan_reaches_the_rows_that_see_it(mechanism, which):
    """Key 199 has an odd number: it shares a pair with one that earlier rows see."""
    tensors = inputs(64)
    tensors[which][:, :, 199, 3] = torch.nan
    out = unsoft.attention(*tensors[:3], mechanism, engine="native", is_causal=True)
    assert not out[:, :, :199].isnan().any()
    assert out[:, :, 199:, 3].isnan().all()
    if which == 2:
        assert not out[..., 4:].isnan().any()
