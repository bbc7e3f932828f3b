"""Native attention in bfloat16, whose products are pairs of bfloat16 where the CPU multiplies them."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import unsoft

MECHANISMS = (
    "softmax softmax1 cog relu relu2 sigmoid tanh sinh softpick swishmax l2".split()
)  # every way to normalise, signed and not
LENGTH = 300
"""More than one tile of keys (96) and of queries (192), and no multiple of either."""


def inputs(width, *, queries=LENGTH, heads=2, kv_heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries), (kv_heads, LENGTH), (kv_heads, LENGTH), (heads, queries))
    return [torch.randn(1, h, n, width, generator=generator).bfloat16() for h, n in shapes]


def results(attend, tensors, dtype):
    """Output and gradients of query, key and value."""
    *leaves, upstream = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def errors(attend, exact, tensors):
    """Relative error of each result in bfloat16 against ``exact`` in float64."""
    pairs = zip(results(attend, tensors, torch.bfloat16), results(exact, tensors, torch.float64), strict=True)
    return [((y.double() - r).norm() / r.norm()).item() for y, r in pairs]


def mechanism_errors(mechanism, tensors, **options):
    def attend(engine):
        return lambda q, k, v: unsoft.attention(q, k, v, mechanism, engine=engine, **options)

    return errors(attend("native"), attend("dense"), tensors)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_as_exact_as_pytorch(mechanism, width, is_causal):
    tensors = inputs(width)

    def softmax(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    ours, theirs = (
        mechanism_errors(mechanism, tensors, is_causal=is_causal),
        errors(softmax, softmax, tensors),
    )
    assert all(a <= 1.3 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


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
