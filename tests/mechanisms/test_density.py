"""density against its formula written out in float64, the counts of clones, and its cache."""

import math

import pytest
import torch

import unsoft

HEADS, WIDTH, LENGTH = 4, 8, 150  # more than one block of 128 rows


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(name="density", t=1.0, **options):
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH, t=t, **options).double()
    with torch.no_grad():
        layer.log_t += 0.3 * normal(HEADS, seed=1)
        layer.logit_p += normal(HEADS, seed=2)
    return layer


def tokens(key_heads=HEADS, length=LENGTH, batch=2):
    q, k, v = (
        normal(batch, h, length, WIDTH, seed=3 + n) for n, h in enumerate((HEADS, key_heads, key_heads))
    )
    k[:, :, 5:9] = k[:, :, 2:3]  # some clones
    return q, k, v


def written_out(layer, q, k, v, visible, signed=False, geometry=None):
    """The formula: every sum over l is taken over the keys that row i sees."""
    points = k if geometry is None else geometry
    group = q.shape[1] // k.shape[1]
    t = layer.log_t.unflatten(0, (k.shape[1], -1)).mean(-1).exp()[:, None, None]
    squares = (points[..., :, None, :] - points[..., None, :, :]).square().sum(-1)
    similar = torch.exp(-t * squares / points.shape[-1])
    rho = (visible.to(q.dtype) @ similar).repeat_interleave(group, dim=1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = q @ k.mT / math.sqrt(WIDTH)
    factor = torch.where(visible, rho, 1.0) ** -layer.logit_p.sigmoid()[:, None, None] * visible
    mass = factor * (logits.abs() if signed else logits).exp()
    weights = mass / mass.sum(-1, keepdim=True)
    return (weights * logits.sign() if signed else weights) @ v


@pytest.mark.parametrize("name", ["density", "density+cog"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_output_and_gradients_are_those_of_the_formula(name, causal, key_heads):
    layer = make(name)
    inputs = [x.requires_grad_() for x in tokens(key_heads)]
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    actual = layer(*inputs, is_causal=causal, enable_gqa=key_heads != HEADS)
    expected = written_out(layer, *inputs, visible, signed="cog" in name)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    leaves, upstream = [*inputs, layer.log_t, layer.logit_p], normal(*actual.shape, seed=9)
    ours, theirs = (torch.autograd.grad(y, leaves, upstream) for y in (actual, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_as_if_absent(causal):
    layer, (q, k, v) = make(), tokens()
    there = torch.arange(LENGTH) >= torch.tensor([[3], [40]])
    visible = there[:, None, None].expand(2, 1, LENGTH, LENGTH)
    visible = visible.tril() if causal else visible
    expected = written_out(layer, q, k, v, visible)
    k = torch.where(there[:, None, :, None], k, torch.nan)
    actual = layer(q, k, v, there[:, None, None], is_causal=causal)
    for b, first in enumerate((3, 40)):  # a row before the first key sees nothing
        torch.testing.assert_close(actual[b, :, first:], expected[b, :, first:], rtol=1e-10, atol=1e-10)
        assert not causal or (actual[b, :, :first] == 0).all()


def test_documents_are_separate_calls():
    layer, (q, k, v) = make(), tokens()
    ids = torch.arange(LENGTH).ge(60).long()
    parts = [
        layer(*(x[:, :, part] for x in (q, k, v)), is_causal=True) for part in (slice(60), slice(60, None))
    ]
    assert torch.equal(layer(q, k, v, is_causal=True, documents=ids), torch.cat(parts, dim=2))


@pytest.mark.parametrize("causal", [True, False])
def test_geometry_keys_replace_the_keys_in_distances(causal):
    layer, (q, k, v) = make(), tokens()
    geometry = normal(2, HEADS, LENGTH, 3, seed=8)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    expected = written_out(layer, q, k, v, visible.tril() if causal else visible, geometry=geometry)
    actual = layer(q, k, v, is_causal=causal, geometry_keys=geometry)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["density", "density+cog", "density+linear-relu", "density+fox"])
@pytest.mark.parametrize("geometry", [False, True])
def test_decoding_equals_the_whole(name, geometry):
    """A prompt of several blocks, single tokens and chunks, with padding on the left."""
    layer, (q, k, v) = make(name), tokens()
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [7]]))[:, None, None]
    own = {"geometry_keys": normal(2, HEADS, LENGTH, 3, seed=8)} if geometry else {}
    whole = layer(q, k, v, mask, is_causal=True, **own)
    cache, out, ends = layer.new_cache(2), [], [135, 136, 137, 140, LENGTH]
    for a, b in zip([0, *ends], ends, strict=False):
        new = {n: x[:, :, a:b] for n, x in own.items()}
        out.append(layer(*(x[:, :, a:b] for x in (q, k, v)), mask[..., :b], cache=cache, **new))
    torch.testing.assert_close(torch.cat(out, dim=2), whole, rtol=1e-9, atol=1e-9)
    assert cache.length == LENGTH and cache.densities.shape == (2, HEADS, LENGTH)


def test_a_cache_can_be_restored_and_reordered():
    layer, (q, k, v) = make(), tokens(length=20)
    whole = layer(q, k, v, is_causal=True)
    cache = layer.new_cache(2)
    layer(*(x[:, :, :19] for x in (q, k, v)), cache=cache)
    before, last = cache.snapshot(), [x[:, :, 19:] for x in (q, k, v)]
    layer(*(-x for x in last), cache=cache)
    cache.restore(before)
    cache.reorder(torch.tensor([1, 0]))
    actual = layer(*(x.flip(0) for x in last), cache=cache)
    torch.testing.assert_close(actual.flip(0), whole[:, :, 19:], rtol=1e-10, atol=1e-10)


def odds(layer, clones, causal):
    """The weight of clones over that of a unique key of the same logit, in the last row."""
    k = normal(1, 1, 1, 64, seed=5)
    k = torch.cat([k + 3, k.expand(1, 1, clones, 64)], dim=2)  # far apart: a similarity of exp(-72)
    rows = clones + 1 if causal else 1
    with torch.no_grad():
        _, weights = layer(torch.zeros_like(k[:, :, :rows]), k, k, is_causal=causal, return_weights=True)
    return float(weights[0, 0, -1, 1:].sum() / weights[0, 0, -1, 0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("clones", "most"), [(50, 1.2), (1000, 1.5)])
def test_clones_count_as_one(causal, clones, most):
    layer = unsoft.mechanism("density", heads=1, head_dim=64).double()
    layer.set_density(p=0.99, t=8.0)
    count = odds(layer, clones, causal)
    assert count < most and count == pytest.approx(clones**0.01)


@pytest.mark.parametrize("causal", [True, False])
def test_distinct_keys_are_left_alone(causal):
    q, k, v = (normal(1, 2, 1000, 64, seed=n) for n in range(3))
    layer = unsoft.mechanism("density", heads=2, head_dim=64).double()
    layer.set_density(p=0.99, t=8.0)  # t is the default
    plain = unsoft.attention(q, k, v, "softmax", is_causal=causal)
    assert (layer(q, k, v, is_causal=causal) - plain).norm() < 0.01 * plain.norm()


def test_an_open_start_is_plain_attention():
    q, k, v = tokens()
    layer = unsoft.mechanism("density", heads=HEADS, head_dim=WIDTH, start="open").double()
    other = make().double()
    other.open_start()
    for actual in (layer, other):
        plain = unsoft.attention(q, k, v, "softmax", is_causal=True)
        assert (actual(q, k, v, is_causal=True) - plain).abs().max() < 1e-3


def test_wrong_calls():
    layer, (q, k, v) = make(), tokens()
    with pytest.raises(ValueError, match="'start' must be one of plain, open"):
        make(start="shut")
    with pytest.raises(ValueError, match="'t' must be a positive number"):
        make(t=0.0)
    with pytest.raises(ValueError, match="relu2 has none"):
        make("density+relu2")
    with pytest.raises(ValueError, match="'attn_mask' differs from row to row"):
        layer(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="'window'"):
        layer(q, k, v, is_causal=True, window=(8, 0))
    with pytest.raises(ValueError, match="around linear attention"):
        make("density+linear-relu")(q, k, v, engine="native")
    cache = layer.new_cache(2)
    layer(*(x[:, :, :3] for x in (q, k, v)), cache=cache)
    with pytest.raises(ValueError, match="'geometry_keys' must be given in every step"):
        layer(*(x[:, :, 3:4] for x in (q, k, v)), cache=cache, geometry_keys=k[:, :, 3:4])
