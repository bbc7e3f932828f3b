"""Decoding with a cache, step by step: the compiled step, its growing buffers,
and what it leaves to the general way."""

import copy
import io

import pytest
import torch

import unsoft
from tests.engines.definitions import attention_and_bound
from unsoft.modules.cache import KeyValueCache

HEADS, WIDTH = 4, 64


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def token(x, start, end):
    return x[:, :, start:end]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["cog", "softmax", "relu2", "softpick", "sigmoid"])
@pytest.mark.parametrize(
    ("dtype", "shared", "value_width"),
    [(torch.float32, 4, 64), (torch.bfloat16, 2, 24), (torch.float64, 1, 3)],
)
def test_uneven_chunks_against_the_definition(name, dtype, shared, value_width):
    """Chunks of 1 and of many tokens, past the sizes at which the buffers grow (64, 130, ...)."""
    q, k, v = (
        normal(2, h, 262, d, seed=h + d, dtype=dtype)
        for h, d in ((HEADS, WIDTH), (shared, WIDTH), (shared, value_width))
    )
    if dtype == torch.bfloat16:  # as projections leave them
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH, value_dim=value_width)
    cache, out, ends = layer.new_cache(2), [], [1, 2, 63, 64, 65, 129, 130, 131, 255, 256, 257, 258, 262]
    for start, end in zip([0, *ends], ends, strict=False):
        out.append(layer(*(token(x, start, end) for x in (q, k, v)), cache=cache, enable_gqa=shared != HEADS))
    seen = torch.ones(262, 262, dtype=torch.bool).tril()
    expected, bound = attention_and_bound(name, q, k, v, seen)
    assert ((torch.cat(out, 2).double() - expected).abs() <= bound).all()
    assert cache.length == 262


def steps(layer, q, k, v, start, cache, **options):
    return torch.cat(
        [
            layer(*(token(x, t, t + 1) for x in (q, k, v)), cache=cache, **options)
            for t in range(start, q.shape[2])
        ],
        2,
    )


def test_nan_poisons_the_rows_that_see_it_and_is_appended_once():
    q, k, v = (normal(1, HEADS, 80, WIDTH, seed=t) for t in range(3))
    k[0, 1, 70] = torch.nan
    layer = unsoft.mechanism("cog", heads=HEADS, head_dim=WIDTH)
    cache = layer.new_cache(1)
    actual = steps(layer, q, k, v, 0, cache)
    assert cache.length == 80
    poisoned = actual.isnan().any(-1)
    assert poisoned[0, 1, 70:].all() and poisoned.sum() == 10
    torch.testing.assert_close(
        actual[:, [0, 2, 3]], unsoft.attention(q, k, v, "cog", is_causal=True)[:, [0, 2, 3]]
    )


@pytest.mark.parametrize("wrong", ["batch", "heads", "width", "value", "dtype"])
def test_what_does_not_fit_is_refused_and_the_cache_stays(wrong):
    layer = unsoft.mechanism("cog", heads=HEADS, head_dim=WIDTH)
    cache, x = layer.new_cache(1), normal(1, HEADS, 10, WIDTH)
    before = layer(x, x, x, cache=cache)
    one = normal(1, HEADS, 1, WIDTH, seed=5)
    bad = {
        "batch": (one.expand(2, -1, -1, -1),) * 3,
        "heads": (one, one[:, :1], one[:, :1]),
        "width": (one[..., :8],) * 3,
        "value": (one, one, one[:, :, :0]),
        "dtype": (one, one.double(), one),
    }[wrong]
    with pytest.raises((ValueError, TypeError), match="argument"):
        layer(*bad, cache=cache)
    assert cache.length == 10
    whole = layer(torch.cat([x, one], 2), torch.cat([x, one], 2), torch.cat([x, one], 2), is_causal=True)
    torch.testing.assert_close(torch.cat([before, layer(one, one, one, cache=cache)], 2), whole)


def test_gradients_flow_through_steps():
    q, k, v = (normal(1, HEADS, 6, WIDTH, seed=t) for t in range(3))
    layer = unsoft.mechanism("cog", heads=HEADS, head_dim=WIDTH)
    with torch.enable_grad():
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        actual = torch.autograd.grad(steps(layer, *inputs, 0, layer.new_cache(1)).square().sum(), inputs)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(
            unsoft.attention(*inputs, "cog", is_causal=True).square().sum(), inputs
        )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_options_of_a_step():
    """A scale, a mask and an engine by name, each against the whole."""
    q, k, v = (normal(1, HEADS, 20, WIDTH, seed=t) for t in range(3))
    layer = unsoft.mechanism("cog", heads=HEADS, head_dim=WIDTH)
    for options in ({"scale": 0.5}, {"engine": "dense"}, {"engine": "tiled", "scale": 0.01}):
        whole = layer(q, k, v, is_causal=True, **options)
        torch.testing.assert_close(
            steps(layer, q, k, v, 0, layer.new_cache(1), **options), whole, atol=1e-5, rtol=1e-4
        )
    with pytest.raises(ValueError, match="engine"):
        layer(q, k, v, cache=layer.new_cache(1), engine="nope")


def test_growing_buffer_is_not_copied_at_every_step():
    cache, x = KeyValueCache(1), normal(1, 1, 1, 4)
    cache.append(x, x)
    places = {cache.append(x, x)[0].data_ptr() for _ in range(60)}
    assert len(places) == 1


@pytest.mark.parametrize("name", ["cog", "gpam", "fox", "cubit"])
def test_a_prepared_step_belongs_to_its_own_cache(name):
    """A copy of a cache, beams that change places and a step back each write into the right buffers.

    "cubit" has another cache inside its own."""
    q, k, v = (normal(2, HEADS, 72, WIDTH, seed=seed) for seed in range(3))
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH)
    expected = layer(q, k, v, is_causal=True)[:, :, 66:]
    cache = layer.new_cache(2)
    layer(*(token(x, 0, 60) for x in (q, k, v)), cache=cache)
    for t in range(60, 66):
        layer(*(token(x, t, t + 1) for x in (q, k, v)), cache=cache)
    other = copy.deepcopy(cache)
    steps(layer, *(-x for x in (q, k, v)), 66, other)
    before = cache.snapshot()
    steps(layer, *(-x for x in (q, k, v)), 66, cache)
    cache.restore(before)
    torch.testing.assert_close(steps(layer, q, k, v, 66, cache), expected, rtol=1e-5, atol=1e-5)
    cache.restore(before)
    cache.reorder(torch.tensor([1, 0]))
    swapped = steps(layer, *(x.flip(0) for x in (q, k, v)), 66, cache)
    torch.testing.assert_close(swapped.flip(0), expected, rtol=1e-5, atol=1e-5)


def saved(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED = [
    ("cog", {}),
    ("fox", {}),
    ("magnitude", {}),
    ("magnitude", {"causal": "streaming", "centres": 4, "chunk": 7}),
    ("magnitude+cog", {"where": "mass"}),
    ("magnitude+linear-relu", {}),
    ("density", {}),
    ("density+linear-relu", {}),
]


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
@pytest.mark.parametrize(("name", "options"), COPIED)
def test_a_copied_cache_goes_on_as_the_original_does(name, options, copied):
    """Also after steps by compiled code, which keeps addresses of the cache's tensors."""
    q, k, v = (normal(2, HEADS, 72, WIDTH, seed=seed) for seed in range(3))
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH, **options)
    cache = layer.new_cache(2)
    layer(*(token(x, 0, 60) for x in (q, k, v)), is_causal=True, cache=cache)
    for t in range(60, 62):
        layer(*(token(x, t, t + 1) for x in (q, k, v)), cache=cache)
    one, other = copied(cache), copied(cache)
    steps(layer, *(-x for x in (q, k, v)), 62, other)  # must change neither the original nor the first copy
    expected = steps(layer, q, k, v, 62, cache)
    assert torch.equal(steps(layer, q, k, v, 62, one), expected)
    whole = layer(q, k, v, is_causal=True)[:, :, 62:]
    torch.testing.assert_close(expected, whole, rtol=1e-5, atol=1e-5)


FADING = unsoft.Formula(
    weight="exp(s + (c_i - c_j) - m)",
    mass="exp(s + (c_i - c_j) - m)",
    peak="s + (c_i - c_j)",
    fields={"c": "query+key"},
)


def fading(q, k, v, of_queries, of_keys):
    """softmax(s + c_i - c_j), written out."""
    q, k, v, ci, cj = (x.double() for x in (q, k, v, of_queries, of_keys))
    k, v, cj = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, cj))
    logits = q @ k.mT / WIDTH**0.5 + ci[..., :, None] - cj[..., None, :]
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("dtype", "shared", "field_heads", "close"),
    [(torch.float32, 4, 4, 1e-5), (torch.bfloat16, 2, 4, 2e-2), (torch.float64, 2, 2, 1e-12)],
)
def test_a_field_of_queries_and_keys(dtype, shared, field_heads, close):
    """By the compiled step, past sizes at which the buffers grow, and in chunks."""
    q, k, v = (
        normal(2, h, 140, WIDTH, seed=h + n, dtype=dtype) for n, h in enumerate((HEADS, shared, shared))
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    of_queries, of_keys = (normal(2, h, 140, seed=h + 7, dtype=wide) for h in (HEADS, field_heads))
    layer = unsoft.mechanism(FADING, heads=HEADS, head_dim=WIDTH)
    cache, out, compiled = layer.new_cache(2), [], 0
    ends = [3, 4, 5, 63, 64, 65, 66, 128, *range(129, 141)]
    for start, end in zip([0, *ends], ends, strict=False):
        fields = {"c": (of_queries[..., start:end].clone(), of_keys[..., start:end])}
        new = (token(x, start, end) for x in (q, k, v))
        out.append(layer(*new, cache=cache, fields=fields, enable_gqa=shared != HEADS))
        compiled += cache.step is not None
    assert compiled >= 12 and cache.length == 140
    expected = fading(q, k, v, of_queries, of_keys)
    assert ((torch.cat(out, 2).double() - expected).abs() <= close * (1 + expected.abs())).all()


@pytest.mark.parametrize("side", [0, 1])
def test_a_field_that_is_nan_poisons_the_rows_that_see_it(side):
    q, k, v = (normal(1, HEADS, 70, WIDTH, seed=t) for t in range(3))
    fields = [normal(1, HEADS, 70, seed=t) for t in (3, 4)]
    fields[side][0, 1, 66] = torch.nan
    layer = unsoft.mechanism(FADING, heads=HEADS, head_dim=WIDTH)
    cache, out = layer.new_cache(1), []
    for t in range(70):
        new = (token(x, t, t + 1) for x in (q, k, v))
        out.append(layer(*new, cache=cache, fields={"c": tuple(x[..., t : t + 1] for x in fields)}))
    poisoned = torch.cat(out, 2).isnan().any(-1)
    assert poisoned[0, 1, 66:].tolist() == ([True, False, False, False] if side == 0 else [True] * 4)
    assert poisoned.sum() == (1 if side == 0 else 4) and cache.length == 70


@pytest.mark.parametrize("name", ["gpam", "differential", "differential2", "magnitude+cog"])
def test_a_step_uses_parameters_as_they_are_now(name):
    """Prepared steps keep numbers computed from parameters; a changed parameter replaces them."""
    q, k, v = (normal(1, 2 * HEADS if i == 0 and name == "differential2" else HEADS, 9, 8) for i in range(3))
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=8)
    cache = layer.new_cache(1)
    layer(*(token(x, 0, 6) for x in (q, k, v)), cache=cache)
    layer(*(token(x, 6, 7) for x in (q, k, v)), cache=cache)
    before = cache.snapshot()
    old = layer(*(token(x, 7, 8) for x in (q, k, v)), cache=cache)
    cache.restore(before)
    for parameter in layer.parameters():
        parameter += 0.5
    prepared = layer(*(token(x, 7, 8) for x in (q, k, v)), cache=cache)
    cache.restore(before)
    general = layer(*(token(x, 7, 8) for x in (q, k, v)), cache=cache, engine="dense")
    torch.testing.assert_close(prepared, general, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(prepared, old, rtol=1e-3, atol=1e-3)
