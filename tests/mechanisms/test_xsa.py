"""Exclusive self attention around others."""

import pytest
import torch

import unsoft

LENGTH, WIDTH = 40, 8


def inputs(dtype=torch.float64, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, LENGTH, WIDTH) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("inner", ["softmax", "cog", "gated+entmax15", "retention", "gated-deltanet"])
def test_nothing_is_left_along_the_own_value(inner):
    module = unsoft.mechanism(f"xsa+{inner}", heads=4, head_dim=WIDTH).double()
    q, k, v = inputs()
    out, weights = module(q, k, v, is_causal=True, enable_gqa=True, return_weights=True)
    own = v.repeat_interleave(2, dim=1)
    assert (out * own).sum(-1).abs().max() < 1e-12
    torch.testing.assert_close(weights @ own, out)
    plain = module.inner(q, k, v, is_causal=True, enable_gqa=True)
    away = plain - out  # what was taken away lies along the own value
    along = (away * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True) * own
    torch.testing.assert_close(away, along)


def test_a_row_that_does_not_see_its_own_key_is_left_alone():
    module = unsoft.mechanism("xsa+softmax", heads=4, head_dim=WIDTH).double()
    q, k, v = inputs(kv_heads=4)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[7, 7] = False
    out, plain = module(q, k, v, mask), unsoft.attention(q, k, v, "softmax", mask)
    assert torch.equal(out[:, :, 7], plain[:, :, 7]) and not torch.allclose(out[:, :, 8], plain[:, :, 8])


def test_the_own_key_is_the_last_one_where_there_are_more_keys():
    module = unsoft.mechanism("xsa+softmax", heads=4, head_dim=WIDTH).double()
    q, k, v = inputs(kv_heads=4)
    whole = module(q, k, v, is_causal=True)
    last = module(q[:, :, -3:], k, v, is_causal="lower_right")
    torch.testing.assert_close(last, whole[:, :, -3:])
    cache = module.new_cache(2)
    steps = [module(*(x[:, :, t : t + 5] for x in (q, k, v)), cache=cache) for t in range(0, LENGTH, 5)]
    torch.testing.assert_close(torch.cat(steps, dim=2), whole)


def test_a_value_of_zero_takes_nothing_away():
    module = unsoft.mechanism("xsa+softmax", heads=4, head_dim=WIDTH)
    q, k, v = inputs(torch.float32, kv_heads=4)
    v[:, :, 3] = 0.0
    v.requires_grad_()
    out = module(q, k, v, is_causal=True)
    plain = unsoft.attention(q, k, v, "softmax", is_causal=True)
    assert torch.equal(out[:, :, 3], plain[:, :, 3])
    (gradient,) = torch.autograd.grad(out.sum(), v)
    assert gradient.isfinite().all()
