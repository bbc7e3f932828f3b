"""density against its formula written out in float64, the counts of clones, its cache and its kernel."""

import math
import subprocess
import sys

import pytest
import torch

import unsoft
from unsoft.engines.call import Call
from unsoft.engines.native.density import KeyDensities, density_attention
from unsoft.engines.visibility import spans_of
from unsoft.mechanisms.density import Densities

HEADS, WIDTH, LENGTH = 4, 8, 150  # more than one block of 128 rows


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(name="density", t=1.0, width=WIDTH, **options):
    layer = unsoft.mechanism(name, heads=HEADS, head_dim=width, t=t, **options).double()
    with torch.no_grad():
        layer.log_t += 0.3 * normal(HEADS, seed=1)
        layer.logit_p += normal(HEADS, seed=2)
    return layer


def tokens(key_heads=HEADS, length=LENGTH, batch=2, width=WIDTH):
    q, k, v = (
        normal(batch, h, length, width, seed=3 + n) for n, h in enumerate((HEADS, key_heads, key_heads))
    )
    k[:, :, 5:9] = k[:, :, 2:3]  # some clones
    return q, k, v


def written_out(layer, q, k, v, visible, signed=False, geometry=None):
    """The formula: every sum over l is taken over the keys that row i sees."""
    points = k if geometry is None else geometry
    group = q.shape[1] // k.shape[1]
    t = layer.log_t.unflatten(0, (k.shape[1], -1)).mean(-1).exp()[:, None, None]
    # Not by products, whose differences cancel. The differences themselves would take a gigabyte.
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    similar = torch.exp(-t * squares / points.shape[-1])
    rho = (visible.to(q.dtype) @ similar).repeat_interleave(group, dim=1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = q @ k.mT / math.sqrt(q.shape[-1])
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


@pytest.fixture
def only_kernel(monkeypatch):
    """Fail if torch operations compute densities: the call must take the compiled code."""

    def never(*unused):
        raise AssertionError("densities were computed by torch operations")

    monkeypatch.setattr(Densities, "_similar", never)


def relative_errors(layer, inputs, visible, signed=False, **options):
    """Errors of output and gradients in float32 against the formula in float64, each as a part of its
    largest entry."""
    wide = [x.clone().requires_grad_() for x in inputs]
    expected = written_out(layer, *wide, visible, signed)
    upstream = normal(*expected.shape, seed=9)
    theirs = torch.autograd.grad(expected, [*wide, layer.log_t, layer.logit_p], upstream)
    layer = layer.float()
    narrow = [x.float().requires_grad_() for x in inputs]
    actual = layer(*narrow, **options)
    ours = torch.autograd.grad(actual, [*narrow, layer.log_t, layer.logit_p], upstream.float())
    pairs = zip((actual.detach(), *ours), (expected.detach(), *theirs), strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize(
    ("name", "width", "key_heads", "causal"),
    [("density", 64, 2, True), ("density+cog", 128, 1, True), ("density", 96, HEADS, False)],
)
@pytest.mark.usefixtures("only_kernel")
def test_the_kernel_is_as_exact_as_float32(name, width, key_heads, causal):
    """Beyond one tile of 192 rows and 96 keys; key heads that threads divide, and one that is cut."""
    length = 500
    layer, inputs = make(name, width=width), tokens(key_heads, length, 1, width)
    inputs[1][:, :, 200:400] = inputs[1][:, :, 199:200]  # a crowd
    visible = torch.ones(length, length, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    options = {"is_causal": causal, "enable_gqa": key_heads != HEADS}
    *of_tokens, t, p = relative_errors(layer, inputs, visible, "cog" in name, **options)
    assert max(of_tokens) < 3e-6 and max(t, p) < 5e-5  # sums over all tokens, whose terms cancel


@pytest.mark.parametrize(("rows", "keys", "aligned"), [(250, 400, "lower_right"), (400, 250, "upper_left")])
@pytest.mark.usefixtures("only_kernel")
def test_rows_may_begin_after_the_keys_or_end_after_them(rows, keys, aligned):
    layer, (q, k, v) = make(), tokens(2, 400)
    q, k, v = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    offset = keys - rows if aligned == "lower_right" else 0
    visible = torch.arange(keys) <= torch.arange(rows)[:, None] + offset
    errors = relative_errors(layer, (q, k, v), visible, is_causal=aligned, enable_gqa=True)
    assert max(errors) < 1e-5


@pytest.mark.usefixtures("only_kernel")
def test_parameters_and_dropout_of_the_formula_inside():
    """With one value, dropped weights are missing in its output, as in that of the formula without it."""
    layer, (q, k, v) = make("density+sink+softmax"), tokens()
    layer.open_start()
    out = layer(q, k, v, is_causal=True)
    plain = unsoft.mechanism("sink+softmax", heads=HEADS, head_dim=WIDTH).double()
    assert (out - plain(q, k, v, is_causal=True)).abs().max() < 1e-3
    (slope,) = torch.autograd.grad(out.sum(), [layer.inner.inner.values["sink"]])
    assert (slope != 0).all()
    torch.manual_seed(0)
    dropped = layer(q, k, torch.ones_like(v), dropout_p=0.25)
    torch.manual_seed(0)
    expected = plain(q, k, torch.ones_like(v), dropout_p=0.25)
    assert (dropped - expected).abs().max() < 1e-3 and (dropped - dropped.mean()).abs().max() > 0.05


def test_nan_in_a_key_that_is_seen_spreads_as_without_the_kernel():
    layer, (q, k, v) = make(), tokens()
    k[0, 1, 100] = torch.nan
    out = layer(q, k, v, is_causal=True)
    bad = out.isnan().any(-1)
    assert bad[0, 1, 100:].all() and bad.sum() == LENGTH - 100


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_as_if_absent(causal, only_kernel):
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


def in_window(left, right, rows, keys, offset=0):
    i, j = torch.arange(rows)[:, None] + offset, torch.arange(keys)
    return (j >= i - left) & (j <= i + right)


@pytest.mark.parametrize(
    ("name", "engine", "window", "causal"),
    [
        ("density", "native", (40, 0), True),
        ("density+cog", "native", (30, 50), False),
        ("density", "dense", (40, 7), True),
        ("density+cog", "dense", (0, 200), False),
    ],
)
def test_a_window_counts_the_keys_that_its_row_sees(name, engine, window, causal, request):
    if engine == "native":
        request.getfixturevalue("only_kernel")
    layer, inputs = make(name), [x.requires_grad_() for x in tokens(2)]
    left, right = window
    visible = in_window(left, 0 if causal else right, LENGTH, LENGTH)
    options = {"is_causal": causal, "enable_gqa": True, "window": window, "engine": engine}
    actual, expected = layer(*inputs, **options), written_out(layer, *inputs, visible, "cog" in name)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    leaves, upstream = [*inputs, layer.log_t, layer.logit_p], normal(*actual.shape, seed=9)
    ours, theirs = (torch.autograd.grad(y, leaves, upstream) for y in (actual, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "width", "key_heads", "rows", "left"),
    [("density", 64, 2, 600, 130), ("density+cog", 128, 1, 600, 250), ("density", 64, 1, 450, 300)],
)
@pytest.mark.usefixtures("only_kernel")
def test_the_kernel_in_a_window_is_as_exact_as_float32(name, width, key_heads, rows, left):
    """Beyond one tile, one block of rows and one part of them, with a crowd that comes and leaves."""
    layer, (q, k, v) = make(name, width=width), tokens(key_heads, 600, 1, width)
    k[:, :, 100:300] = k[:, :, 99:100] + 0.02 * normal(1, key_heads, 200, width, seed=7)
    visible = in_window(left, 0, rows, 600, 600 - rows)
    options = {"is_causal": "lower_right", "enable_gqa": True, "window": (left, 0)}
    errors = relative_errors(layer, (q[:, :, :rows], k, v), visible, "cog" in name, **options)
    *of_tokens, t, p = errors
    assert max(of_tokens) < 3e-6 and max(t, p) < 5e-5


def test_a_crowd_leaves_a_window_without_rounding():
    """What a row sees decides its densities: as if keys that have left had never been there. They are clones
    but for a little, so that their float32 similarities do not add up exactly."""
    softmax = unsoft.Formula(weight="exp(s - m)", mass="exp(s - m)", peak="s")
    k = normal(1, 1, 1500, 64, seed=5, dtype=torch.float32)
    k[:, :, :1200] = k[:, :, :1] + 0.1 * normal(1, 1, 1200, 64, seed=6, dtype=torch.float32)

    def last_densities(k):
        spans = spans_of(k.shape[2], k.shape[2], 0, window=(400, 0), device=k.device)
        call = Call(k, k, k, softmax, torch.zeros(0, 1), causal_offset=0, spans=spans)
        densities = KeyDensities(k / 8**0.5, None, torch.ones(1), window=(-400, 0))
        return density_attention(call, densities)[1][0, 0, -401:]

    whole, tail = last_densities(k), last_densities(k[:, :, 1000:].contiguous())
    assert tail.max() > 50
    torch.testing.assert_close(whole, tail, rtol=0.0, atol=1e-10)


@pytest.mark.usefixtures("only_kernel")
def test_bfloat16_in_a_window():
    layer = make(width=64)
    inputs = [x.bfloat16() for x in tokens(2, 400, 1, 64)]
    with torch.no_grad():
        expected = written_out(layer, *(x.double() for x in inputs), in_window(150, 0, 400, 400))
        out = layer.float()(*inputs, is_causal=True, enable_gqa=True, window=(150, 0))
    assert out.dtype == torch.bfloat16
    assert float((out - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.parametrize("name", ["density", "density+cog", "density+fox"])
@pytest.mark.parametrize("geometry", [False, True])
def test_decoding_in_a_window_equals_the_whole(name, geometry):
    """Chunks and single tokens, before and after the first key has left, with padding on the left."""
    layer, (q, k, v) = make(name), tokens()
    mask = (torch.arange(LENGTH) >= torch.tensor([[0], [7]]))[:, None, None]
    own = {"geometry_keys": normal(2, HEADS, LENGTH, 3, seed=8)} if geometry else {}
    whole = layer(q, k, v, mask, is_causal=True, window=(50, 0), **own)
    cache, out, ends = layer.new_cache(2), [], [30, 31, 60, 61, 62, 130, LENGTH]
    for a, b in zip([0, *ends], ends, strict=False):
        # As transformers does: a window that hides nothing is not passed.
        more = {"window": (50, 0)} if b > 51 else {}
        with torch.set_grad_enabled(b < 62):
            new = (x[:, :, a:b] for x in (q, k, v))
            out.append(layer(*new, mask[..., :b], cache=cache, **more, **cut(own, a, b)))
    torch.testing.assert_close(torch.cat(out, dim=2), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "geometry"), [("density", True), ("density+cog", False)])
def test_single_tokens_in_a_window_take_the_prepared_step(name, geometry, monkeypatch):
    layer = make(name, width=64).float()
    q, k, v = (x.float() for x in tokens(2, 400, width=64))
    own = {"geometry_keys": normal(2, 2, 400, 24, seed=8).float()} if geometry else {}
    options = {"enable_gqa": True, "window": (290, 0)}
    with torch.no_grad():
        whole = layer(q, k, v, is_causal=True, **options, **own)
        cache, out = layer.new_cache(2), []
        layer(*(x[:, :, :270] for x in (q, k, v)), cache=cache, **options, **cut(own, 0, 270))
        monkeypatch.setattr(layer, "new_points", None)  # what all other steps begin with
        for n in range(270, 400):
            new = (x[:, :, n : n + 1] for x in (q, k, v))
            out.append(layer(*new, cache=cache, **options, **cut(own, n, n + 1)))
    torch.testing.assert_close(torch.cat(out, dim=2), whole[:, :, 270:], rtol=1e-4, atol=1e-5)


def test_a_cache_goes_on_in_another_window():
    layer, (q, k, v) = make(), tokens(length=60)
    cache = layer.new_cache(2)
    with torch.no_grad():
        for a, b, window in ((0, 40, (5, 0)), (40, 41, (20, 0)), (41, 42, (3, 0)), (42, 60, None)):
            new = (x[:, :, a:b] for x in (q, k, v))
            actual = layer(*new, cache=cache, window=window)
            known = (x[:, :, :b] for x in (k, v))
            expected = layer(q[:, :, a:b], *known, is_causal="lower_right", window=window)
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_documents_in_a_window_are_separate_calls():
    layer, ids = make(), torch.arange(LENGTH).ge(60).long()
    inputs = [x.requires_grad_() for x in tokens()]
    options, parts = {"is_causal": True, "window": (20, 0)}, (slice(60), slice(60, None))
    apart = torch.cat([layer(*(x[:, :, part] for x in inputs), **options) for part in parts], dim=2)
    packed = layer(*inputs, documents=ids, **options)
    assert torch.equal(packed, apart)
    ours, theirs = (torch.autograd.grad(y[:, :, 60:].sum(), inputs) for y in (packed, apart))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) and (a[:, :, :60] == 0).all()


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


@pytest.mark.parametrize(("name", "geometry"), [("density", True), ("density+cog", False)])
def test_single_tokens_take_the_prepared_step(name, geometry, monkeypatch):
    """With room for the new tokens, each is one call of compiled code; grouped heads of width 64."""
    layer = make(name, width=64).float()
    q, k, v = (x.float() for x in tokens(2, 300, width=64))
    own = {"geometry_keys": normal(2, 2, 300, 24, seed=8).float()} if geometry else {}
    whole = layer(q, k, v, is_causal=True, enable_gqa=True, **own).detach()
    cache, out = layer.new_cache(2), []
    with torch.no_grad():
        layer(*(x[:, :, :270] for x in (q, k, v)), cache=cache, enable_gqa=True, **cut(own, 0, 270))
        monkeypatch.setattr(layer, "new_points", None)  # what all other steps begin with
        for n in range(270, 300):
            new = (x[:, :, n : n + 1] for x in (q, k, v))
            out.append(layer(*new, cache=cache, enable_gqa=True, **cut(own, n, n + 1)))
    torch.testing.assert_close(torch.cat(out, dim=2), whole[:, :, 270:], rtol=1e-4, atol=1e-5)
    assert cache.length == cache.inner.length == 300 and cache.densities.shape == (2, 2, 300)


def cut(named, low, high):
    return {name: x[:, :, low:high] for name, x in named.items()}


def test_a_cache_can_be_restored_and_reordered():
    layer, (q, k, v) = make(), tokens(length=20)
    whole = layer(q, k, v, is_causal=True)
    cache = layer.new_cache(2)
    layer(*(x[:, :, :19] for x in (q, k, v)), cache=cache)
    before, last = cache.snapshot(), [x[:, :, 19:] for x in (q, k, v)]
    for _ in range(2):
        with torch.no_grad():  # by the prepared step
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
    with pytest.raises(ValueError, match="'start' must be 'plain' or 'open'"):
        make(start="shut")
    with pytest.raises(ValueError, match="'t' must be above 0"):
        make(t=0.0)
    with pytest.raises(ValueError, match="relu2 has none"):
        make("density+relu2")
    with pytest.raises(ValueError, match="'attn_mask' differs from row to row"):
        layer(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="'window': Density looks at all keys"):
        make("density+linear-relu")(q, k, v, is_causal=True, window=(8, 0))
    with pytest.raises(ValueError, match="'window': the kernels of engine 'triton'"):
        layer(q, k, v, is_causal=True, window=(8, 0), engine="triton")
    with pytest.raises(ValueError, match="'window' must be a pair"):
        layer(q, k, v, cache=layer.new_cache(2), window=(-1, 0))
    with pytest.raises(ValueError, match="around linear attention"):
        make("density+linear-relu")(q, k, v, engine="native")
    cache = layer.new_cache(2)
    layer(*(x[:, :, :3] for x in (q, k, v)), cache=cache)
    with pytest.raises(ValueError, match="'geometry_keys' must be given in every step"):
        layer(*(x[:, :, 3:4] for x in (q, k, v)), cache=cache, geometry_keys=k[:, :, 3:4])


MEMORY = """
import torch, unsoft
from unsoft.lab.bench.fresh_process import peak, reset_peak
layer = unsoft.mechanism("density", heads=2, head_dim=16)
inputs = [torch.randn(1, 2, 5000, 16, requires_grad=True) for _ in range(3)]
def step(length):
    out = layer(*(x[:, :, :length] for x in inputs), is_causal=True)
    torch.autograd.grad(out.sum(), [*inputs, *layer.parameters()])
step(300)
before = reset_peak()
step(5000)
print(peak() - before)
"""


def test_memory_of_training_is_linear():
    """One table of rows by keys would take 5000**2 * 4 bytes, 100 MB, for each head."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 25e6
