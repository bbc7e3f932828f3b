"""Row-coupled attention: engines against rows solved one by one; gradients against small differences."""

import numpy as np
import pytest
import torch

import unsoft
from unsoft.engines.rows import choice
from unsoft.engines.rows.choice import run_rows
from unsoft.engines.rows.rules import RowRule, Threshold

POWERS = {"sparsemax": (1.0, 1.0), "entmax15": (0.5, 2.0), "entmax(1.25)": (0.25, 4.0)}
"""a = max(c s - t, 0)^p: c and p."""


def solved(logits, name):
    """Weights of one row of visible logits, in numpy: t by bisection, or the sticks one after the other."""
    if name == "stick-breaking":
        weights, left = np.zeros_like(logits), 1.0
        for j in range(len(logits) - 1, -1, -1):
            taken = 1 / (1 + np.exp(-logits[j]))
            weights[j], left = taken * left, left * (1 - taken)
        return weights
    if name == "elastic":
        e = np.exp(logits - logits.max())
        return np.maximum(e / e.sum() - 1 / len(logits), 0)
    factor, power = POWERS[name]
    x = factor * (logits - logits.max())
    low, high = -1.0, 0.0
    for _ in range(100):
        middle = (low + high) / 2
        enough = (np.maximum(x - middle, 0) ** power).sum() >= 1
        low, high = (middle, high) if enough else (low, middle)
    return np.maximum(x - low, 0) ** power


def expected(q, k, v, name, rows, first=0):
    """Some rows of causal attention of numpy arrays (L, D), without the keys before ``first``."""
    logits = q @ k.T / np.sqrt(q.shape[1])
    own = 0 if name == "stick-breaking" else 1
    return np.stack(
        [
            solved(logits[i, first : i + own], name) @ v[first : i + own] if i + own > first else 0 * v[0]
            for i in rows
        ]
    )


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype) for shape in shapes]


NAMES = [*POWERS, "elastic", "stick-breaking"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("length", "width", "dtype"),
    [
        (129, 64, torch.float32),
        (257, 80, torch.bfloat16),
        (1000, 128, torch.float32),
        (30, 256, torch.float64),
    ],
)
def test_rows_beyond_a_tile_are_those_solved_one_by_one(name, length, width, dtype):
    """Grouped queries, and a text that is padded on the left."""
    q, k, v = tensors((2, 2, length, width), (2, 1, length, width), (2, 1, length, 7), dtype=dtype)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[1, ..., :5] = False
    module = unsoft.mechanism(name, heads=2, head_dim=width, value_dim=7)
    out = module(q, k, v, mask, is_causal=True, enable_gqa=True, engine="native")
    assert out.dtype == dtype
    allowed = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    rows = sorted({*range(0, length, 41), 4, 5, 23, 24, length - 1})
    for b, h in ((0, 1), (1, 0)):
        given = (x.double().numpy() for x in (q[b, h], k[b, 0], v[b, 0]))
        one = expected(*given, name, rows, first=5 * b)
        np.testing.assert_allclose(out[b, h, rows].double().detach(), one, atol=allowed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["native", "dense"])
def test_gradients_are_those_of_small_differences(name, engine):
    module = unsoft.mechanism(name, heads=2, head_dim=8).double()
    inputs = [x.requires_grad_() for x in tensors(*[(1, 2, 40, 8)] * 3, dtype=torch.float64)]
    bias = tensors((2, 40, 40), dtype=torch.float64, seed=5)[0].requires_grad_()
    with torch.no_grad():
        for parameter in module.parameters():  # at its start elastic has rows that lie on a corner
            parameter += 0.1
    variables = [*inputs, bias, *module.parameters()]
    upstream, *moves = tensors((1, 2, 40, 8), *[x.shape for x in variables], dtype=torch.float64, seed=3)

    def loss():
        out = module(*inputs, bias, is_causal=True, engine=engine)
        return (out * upstream).sum()

    gradients = torch.autograd.grad(loss(), variables)
    with torch.no_grad():
        for x, move, gradient in zip(variables, moves, gradients, strict=True):
            values = []
            for step in (1e-6, -1e-6):
                x += step * move
                values.append(loss())
                x -= step * move
            assert float((gradient * move).sum()) == pytest.approx(
                float(values[0] - values[1]) / 2e-6, rel=1e-5
            )


def test_second_derivatives_of_the_dense_engine():
    module = unsoft.mechanism("entmax15", heads=1, head_dim=3)
    inputs = [x.requires_grad_() for x in tensors(*[(1, 1, 4, 3)] * 3, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda *x: module(*x, engine="dense"), inputs)
    with pytest.raises(NotImplementedError, match="engine='dense'"):
        out = module(*inputs, engine="native")
        (first,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
        torch.autograd.grad(first.sum(), inputs[0])


@pytest.mark.parametrize("engine", ["tiled", "sdpa"])
def test_an_engine_that_cannot_is_refused(engine):
    with pytest.raises(ValueError, match=f"argument 'engine': '{engine}' does not support this call"):
        unsoft.attention(*tensors(*[(1, 1, 4, 3)] * 3), "sparsemax", engine=engine)


@pytest.mark.parametrize("name", ["entmax15", "stick-breaking"])
def test_dropout_drops_the_same_weights_on_every_engine(name):
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 2, 50, 8)] * 3))
    results = []
    for engine in ("native", "dense"):
        torch.manual_seed(1)
        out = unsoft.attention(q, k, v, name, dropout_p=0.4, is_causal=True, engine=engine)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(results[0][0], unsoft.attention(q, k, v, name, is_causal=True))


def test_nan_reaches_the_rows_that_see_it_only():
    q, k, v = tensors(*[(1, 1, 60, 8)] * 3)
    clean = unsoft.attention(q, k, v, "entmax15", is_causal=True)
    k[0, 0, 30] = torch.nan
    out = unsoft.attention(q, k, v, "entmax15", is_causal=True)
    torch.testing.assert_close(out[:, :, :30], clean[:, :, :30])
    assert out[:, :, 30:].isnan().all()


def test_sticks_stop_where_nothing_is_left():
    """Logits of 16 leave 1e-7 each: beyond some keys every weight and gradient is exactly 0."""
    q, k, v = (torch.full((1, 1, 600, 16), 2.0).requires_grad_() for _ in range(3))
    out = unsoft.attention(q, k, v, "stick-breaking", is_causal=True)
    torch.testing.assert_close(out[0, 0, 1:], torch.full((599, 16), 2.0))
    (by_value,) = torch.autograd.grad(out[0, 0, -1].sum(), v)
    assert by_value[0, 0, -2, 0] > 0.99 and (by_value[0, 0, :500] == 0).all()


def test_a_rule_of_ones_own_is_a_line_of_text():
    """Shares of 1/(1 + exp(t - 4s)) with t such that they sum to 1: no weight above 1/2."""
    rule = Threshold("1/(1 + exp(t - 4*(s - m)))/2", low=-90, high=90)
    assert RowRule.from_key(rule.key) == rule
    q, k, v = (x.requires_grad_() for x in tensors(*[(1, 2, 70, 8)] * 3, dtype=torch.float64))
    out, weights = run_rows(q, k, v, rule, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 70, dtype=torch.float64))
    assert weights.min() > 0 and weights.max() <= 0.5
    fast = run_rows(q, k, v, rule, engine="native")
    torch.testing.assert_close(fast, out)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (fast, out)), strict=True):
        torch.testing.assert_close(a, b)


def test_entmax_learns_its_alpha_and_has_its_limits():
    module = unsoft.mechanism("entmax(1.3)", heads=2, head_dim=8)
    torch.testing.assert_close(module.params()["a"], torch.full((2,), 1.3))
    q, k, v = tensors(*[(1, 2, 30, 8)] * 3)
    module(q, k, v).square().sum().backward()
    assert module.logit.grad.abs().min() > 0
    for alpha, other in ((1.0005, "softmax"), (1.9999, "sparsemax")):
        near = unsoft.attention(q, k, v, f"entmax({alpha})")
        torch.testing.assert_close(near, unsoft.attention(q, k, v, other), atol=3e-3, rtol=0)
    with pytest.raises(ValueError, match="strictly between 1 and 2"):
        unsoft.mechanism("entmax(2)", heads=1, head_dim=4)


def test_sticks_need_the_causal_rule():
    with pytest.raises(ValueError, match="argument 'is_causal': this mechanism looks back only"):
        unsoft.attention(*tensors(*[(1, 1, 4, 3)] * 3), "stick-breaking")


@pytest.mark.parametrize("name", ["sparsemax", "elastic"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4)], ids=["a mask of all heads", "a mask per head"])
def test_what_no_row_sees_stays_with_the_compiled_code(name, shape, monkeypatch):
    """The unused end of a cache may hold anything."""

    def never(*unused):
        raise AssertionError("computed by the dense engine")

    monkeypatch.setattr(choice, "dense_rows", never)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 5), (2, 40), (2, 40)))
    seen = torch.rand(*shape, 5, 40, generator=generator) < 0.8
    seen[..., 30:] = False
    results = []
    for end in (0.0, torch.nan):
        k[:, :, 30:], v[:, :, 30:] = end, -end
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = unsoft.attention(*leaves, name, attn_mask=seen, engine="native", enable_gqa=True)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
