"""Magnitude at the sizes people use, in every form, against its definition in plain torch: solve the system,
or each prefix's.
"""

import math

import pytest
import torch

import unsoft

FORMS = ["auto", "arrival", "prefix", "streaming"]
SOLVERS = ["cg", "cholesky", "lowrank"]

pytestmark = pytest.mark.usefixtures("one_thread")


def system(keys, t, eps):
    """Z + eps of keys (n, d)."""
    squares = (keys[:, None] - keys[None]).square().sum(-1)
    return torch.exp(-t * squares / keys.shape[-1]) + eps * torch.eye(len(keys), dtype=keys.dtype)


def solved(keys, t, eps):
    return torch.linalg.solve(system(keys, t, eps), torch.ones(len(keys), dtype=keys.dtype))


def one_row(layer, q, k, v, head, row, last, where, form):
    """The output of one query, which sees the keys up to ``last``: softmax, gates and sums written out in
    float64.
    """
    t, beta, gamma = (float(p.detach().double()[head]) for p in (layer.log_t, layer.beta, layer.gamma))
    q, k, v = (x[0, head].double() for x in (q, k, v))
    k, v = k[: last + 1], v[: last + 1]
    if form == "prefix":
        w = solved(k, math.exp(t), layer.eps)
    else:
        w = torch.stack([solved(k[: j + 1], math.exp(t), layer.eps)[j] for j in range(len(k))])
    gate = torch.sigmoid(beta * w + gamma)
    weights = (q[row] @ k.mT / k.shape[-1] ** 0.5).softmax(-1) * gate
    if where == "mass":
        weights = weights / weights.sum()
    return weights @ v


def make(causal, where="values", heads=2, width=8, **options):
    torch.manual_seed(1)
    layer = unsoft.mechanism("magnitude", heads=heads, head_dim=width, causal=causal, where=where, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return layer.double()


def inputs(length, keys=None, heads=2, width=8, batch=1, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = (length, keys or length, keys or length)
    return [torch.randn(batch, heads, n, width, generator=g, dtype=torch.float64).to(dtype) for n in sizes]


@pytest.mark.parametrize("where", ["values", "mass"])
@pytest.mark.parametrize("length", [129, 257, 1000])
def test_prefix_at_every_length(length, where):
    layer, (q, k, v) = make("prefix", where), inputs(length)
    out = layer(q, k, v, is_causal=True).detach()
    for row in {0, 1, 127, 128, length // 2, length - 1}:
        expected = one_row(layer, q, k, v, 1, row, row, where, "prefix")
        torch.testing.assert_close(out[0, 1, row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("where", ["values", "mass"])
@pytest.mark.parametrize(("length", "keys"), [(17, 150), (150, 17), (130, 300), (300, 130)])
@pytest.mark.parametrize("alignment", [True, "lower_right"])
def test_prefix_with_more_keys_or_fewer(length, keys, alignment, where):
    layer, (q, k, v) = make("prefix", where), inputs(length, keys)
    out = layer(q, k, v, is_causal=alignment).detach()
    offset = 0 if alignment is True else keys - length
    for row in {0, length // 2, length - 1}:
        last = min(row + offset, keys - 1)
        if last < 0:
            assert out[0, 1, row].eq(0).all()
            continue
        expected = one_row(layer, q, k, v, 1, row, last, where, "prefix")
        torch.testing.assert_close(out[0, 1, row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["auto", "arrival"])
@pytest.mark.parametrize("where", ["values", "mass"])
def test_the_exact_forms(form, where):
    layer, (q, k, v) = make(form, where), inputs(140)
    out = layer(q, k, v, is_causal=True).detach()
    for row in (0, 63, 64, 139):
        expected = one_row(layer, q, k, v, 0, row, row, where, "arrival")
        torch.testing.assert_close(out[0, 0, row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("where", ["values", "mass"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uneven_chunks_are_the_whole(form, where, dtype):
    length = 700 if form in ("auto", "streaming") else 300
    layer, (q, k, v) = make(form, where, width=20).to(dtype), inputs(length, width=20, dtype=dtype)
    whole = layer(q, k, v, is_causal=True).detach()
    for cuts in ([0, 1, 2, 129, 130, 257, length], [0, 250, 256, 257, *range(258, 290), length]):
        cache, steps = layer.new_cache(1), []
        with torch.no_grad():
            for a, b in zip(cuts, cuts[1:], strict=False):
                steps.append(layer(*(x[:, :, a:b] for x in (q, k, v)), cache=cache))
        near = 1e-9 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(torch.cat(steps, dim=2), whole, rtol=near, atol=near)


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_prefix_with_fewer_or_more_queries_than_new_keys(rows):
    """With a cache the queries are the last rows, however many keys are new."""
    layer, (q, k, v) = make("prefix"), inputs(30)
    whole = layer(q, k, v, is_causal=True)
    cache = layer.new_cache(1)
    with torch.no_grad():
        layer(*(x[:, :, :23] for x in (q, k, v)), cache=cache)
        last = layer(q[:, :, 30 - rows :], k[:, :, 23:], v[:, :, 23:], cache=cache)
    torch.testing.assert_close(last, whole[:, :, 30 - rows :].detach())


def test_auto_is_arrival_and_then_streaming():
    """The switch is a matter of position: what follows changes nothing, and the first tokens are exact."""
    q, k, v = inputs(600)
    auto, arrival = make("auto"), make("arrival")
    long, exact = auto(q, k, v, is_causal=True).detach(), arrival(q, k, v, is_causal=True).detach()
    torch.testing.assert_close(long[:, :, :256], exact[:, :, :256], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(long[:, :, 300:], exact[:, :, 300:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(long, exact, rtol=0.1, atol=0.02)
    for length in (1, 255, 256, 257, 448, 449):
        short = auto(*(x[:, :, :length] for x in (q, k, v)), is_causal=True)
        torch.testing.assert_close(short.detach(), long[:, :, :length], rtol=1e-9, atol=1e-9)


def test_auto_has_a_bounded_state():
    layer = unsoft.mechanism("magnitude", heads=2, head_dim=64)
    sizes = []
    with torch.no_grad():
        for length in (600, 2049):
            cache = layer.new_cache(1)
            layer(*inputs(length, width=64, dtype=torch.float32), cache=cache)
            sizes.append(cache.nbytes - cache.inner.nbytes)
    centres, window = 96 * (64 + 96 + 8), 256 * (64 + 96 + 256 + 32)
    assert max(sizes) < 2 * 4 * (centres + window)  # two heads; whatever the length


def with_both_places(bases, options):
    """Every base with every option, on values and on the mass in turn."""
    return [
        (base, option, ("values", "mass")[(i + j) % 2])
        for i, base in enumerate(bases)
        for j, option in enumerate(options)
    ]


OPTIONS = [*({"causal": form} for form in FORMS), *({"solver": solver} for solver in SOLVERS)]


@pytest.mark.parametrize(
    ("base", "options", "where"), with_both_places(["softmax", "cog", "gpam", "differential2"], OPTIONS)
)
def test_empty_sizes(base, options, where):
    layer = unsoft.mechanism(f"magnitude+{base}", heads=2, head_dim=4, where=where, **options)
    causal = "causal" in options
    for batch, length, keys in ((1, 0, 0), (1, 0, 5), (1, 5, 0), (0, 5, 5), (0, 0, 0)):
        q = torch.randn(batch, layer.query_heads, length, 4, requires_grad=True)
        k, v = (torch.randn(batch, 2, keys, 4, requires_grad=True) for _ in range(2))
        out = layer(q, k, v, is_causal=causal)
        assert out.shape == (batch, 2, length, 4) and out.eq(0).all()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert gradient.eq(0).all()
        assert layer(q, k, v, is_causal=causal, return_weights=True)[1].shape == (batch, 2, length, keys)
        if causal:
            cache = layer.new_cache(batch)
            with torch.no_grad():
                assert torch.equal(layer(q, k, v, cache=cache), out)
            assert cache.length == keys


@pytest.mark.parametrize(
    ("base", "form", "where"),
    with_both_places(["softmax", "cog", "gpam", "differential2", "linear-relu"], FORMS),
)
def test_one_row_of_a_padded_batch_with_shared_key_heads(base, where, form):
    """Decoding: keys of two heads for queries of four, left padding, one query; as if every query head had
    keys of its own.
    """
    torch.manual_seed(0)
    layer = unsoft.mechanism(f"magnitude+{base}", heads=4, head_dim=8, where=where, causal=form).double()
    q = torch.randn(2, layer.query_heads, 20, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 20, 8, dtype=torch.float64) for _ in range(2))
    mask = (torch.arange(20) >= torch.tensor([[0], [5]]))[:, None, None]
    with torch.no_grad():
        whole = layer(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)), mask, is_causal=True)
        shared = {"is_causal": "lower_right", "enable_gqa": True}
        torch.testing.assert_close(layer(q[:, :, -1:], k, v, mask, **shared), whole[:, :, -1:])
        cache = layer.new_cache(2)
        layer(*(x[:, :, :19] for x in (q, k, v)), mask[..., :19], cache=cache, enable_gqa=True)
        last = layer(*(x[:, :, 19:] for x in (q, k, v)), mask, cache=cache, enable_gqa=True)
        torch.testing.assert_close(last, whole[:, :, -1:])


@pytest.mark.parametrize("form", [*FORMS, None])
def test_masked_values_that_are_not_finite(form):
    """No gradient knows of them, not even that of the gates."""
    q, k, v = inputs(40)
    mask = torch.arange(40) < 30
    v[:, :, 30:] = torch.inf
    layer = make(form) if form else make("auto", solver="cholesky")
    v.requires_grad_()
    out = layer(q, k, v, mask[None], is_causal=form is not None)
    for gradient in torch.autograd.grad(out.square().sum(), [v, *layer.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["equal", "opposite", "zeros", "tiny"])
def test_keys_that_coincide(form, kind):
    """In float32, at a small eps, over more than one chunk: finite, and decoding agrees."""
    q, k, v = inputs(300, width=64, dtype=torch.float32)
    k = {"equal": k[:, :, :1].expand_as(k), "zeros": 0 * k, "tiny": 1e-20 * k, "opposite": k}[kind].clone()
    if kind == "opposite":
        k = k[:, :, :1] * (1 - 2 * (torch.arange(300) % 2))[:, None]
    layer = make(form, width=64, eps=1e-3).float()
    k.requires_grad_()
    out = layer(q, k, v, is_causal=True)
    (gradient,) = torch.autograd.grad(out.sum(), k)
    assert out.isfinite().all() and gradient.isfinite().all()
    cache, steps = layer.new_cache(1), []
    with torch.no_grad():
        for a, b in ((0, 250), *((t, t + 1) for t in range(250, 300))):
            steps.append(layer(*(x[:, :, a:b] for x in (q, k, v)), cache=cache))
    torch.testing.assert_close(torch.cat(steps, dim=2), out.detach(), rtol=1e-3, atol=1e-3)
