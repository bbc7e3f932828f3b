"""Mechanisms that are modules: what holds for all of them, and what each promises."""

import math
import sys

import pytest
import torch

import unsoft
from unsoft.mechanisms.differential import first_lambda
from unsoft.modules.registry import resolve
from unsoft.modules.spec import MechanismSpec

FAMILIES = [name for name, actual in unsoft.mechanisms().items() if isinstance(actual, MechanismSpec)]
COMPOSED = [
    "logn+cog",
    "sink+softmax",
    "sink+logn+sinh",
    "gated+softmax",
    "gated+logn+gpam",
    "gated+linear-relu",
    "gated+differential2",
    "xsa+softmax",
    "density+cog",
    "density+gated+differential2",
    "density+linear-relu",
    "density+fox",
    "performer(32)",
    "cosformer(99)",
    "retention(0.9)",
]
ALL = FAMILIES + COMPOSED
HEADS, WIDTH, LENGTH = 4, 6, 70


def make(name, dtype=torch.float64, perturb=0.1, heads=HEADS, **options):
    torch.manual_seed(0)
    module = unsoft.mechanism(name, heads=heads, head_dim=WIDTH, **options).to(dtype).eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.requires_grad and "gain" not in name:
                p += perturb * torch.randn_like(p)
    return module


def inputs(module, length=LENGTH, kv_heads=HEADS, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, length, WIDTH) for heads in (module.query_heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def grouped(v, heads):
    return v.repeat_interleave(heads // v.shape[1], dim=1)


@pytest.mark.parametrize("name", [name for name in ALL if name != "gau"])  # it has a gate for every channel
def test_weights_times_values_are_the_output(name):
    module = make(name)
    q, k, v = inputs(module)
    out, weights = module(q, k, v, is_causal=True, return_weights=True)
    torch.testing.assert_close(weights @ v, out, rtol=1e-10, atol=1e-10)
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("alignment", [True, "lower_right", False])
def test_the_fast_form_equals_the_weights_written_out(name, alignment):
    module = make(name)
    q, k, v = inputs(module)
    if alignment == "lower_right":
        q = q[:, :, 13:]
    if alignment is False and module.causal_only:
        with pytest.raises(ValueError, match="is_causal"):
            module(q, k, v)
        return
    variables = [x.requires_grad_() for x in (q, k, v)] + [p for p in module.parameters() if p.requires_grad]
    upstream = torch.randn(
        2, HEADS, q.shape[2], WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    fast = module(q, k, v, is_causal=alignment)
    written, _ = module(q, k, v, is_causal=alignment, return_weights=True)
    torch.testing.assert_close(fast, written, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(y, variables, upstream, allow_unused=True) for y in (fast, written))
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_decoding_in_any_pieces_equals_the_whole_sequence(name):
    module = make(name)
    q, k, v = inputs(module)
    whole = module(q, k, v, is_causal=True)
    for cuts in ([0, 1, 2, 3, LENGTH], [0, 33, 34, 35, LENGTH], list(range(0, LENGTH + 1, 7))):
        cache = module.new_cache(batch=2)
        with torch.no_grad():
            pieces = [
                module(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], cache=cache)
                for a, b in zip(cuts, cuts[1:], strict=False)
            ]
        torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-9, atol=1e-9)
        assert cache.length == LENGTH and cache.nbytes > 0


@pytest.mark.parametrize("name", ALL)
def test_the_future_changes_nothing(name):
    module = make(name, torch.float32)
    q, k, v = inputs(module, dtype=torch.float32)
    before = module(q, k, v, is_causal=True)
    for x in (q, k, v):
        x[:, :, 40:] = torch.randn_like(x[:, :, 40:]) * 3
    after = module(q, k, v, is_causal=True)
    assert torch.equal(before[:, :, :40], after[:, :, :40]), "rows before the change"
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])


@pytest.mark.parametrize("name", ALL)
def test_a_masked_key_is_as_if_removed(name):
    module = make(name)
    q, k, v = inputs(module)
    mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., 60:] = False
    alignment = {"is_causal": True} if module.causal_only else {}
    expected = module(q, k[:, :, :60], v[:, :, :60], **alignment)
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.inf
    torch.testing.assert_close(module(q, k, v, mask, **alignment), expected, rtol=1e-9, atol=1e-9)


# The geometry of magnitude and density belongs to a key head, so heads that share one share its parameters:
# see tests/mechanisms/test_magnitude.py and test_density.py
@pytest.mark.parametrize(
    "name",
    [name for name in ALL if "differential2" not in name and not name.startswith(("magnitude", "density"))],
)
def test_grouped_queries_read_the_key_head_of_their_group(name):
    module = make(name)
    q, k, v = inputs(module, kv_heads=2)
    out = module(q, k, v, is_causal=True, enable_gqa=True)
    if module.key_head_multiple == 2:  # pairs of key heads: query pair p reads key pair p // group
        k, v = (x.unflatten(1, (1, 2)).repeat_interleave(2, dim=1).flatten(1, 2) for x in (k, v))
    else:
        k, v = grouped(k, HEADS), grouped(v, HEADS)
    torch.testing.assert_close(out, module(q, k, v, is_causal=True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_low_precision_and_saving(name, tmp_path):
    module = make(name, torch.float32)
    q, k, v = inputs(module, dtype=torch.float32)
    exact = module(q, k, v, is_causal=True)
    narrow = module(*(x.bfloat16() for x in (q, k, v)), is_causal=True)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - exact).norm() < 0.05 * exact.norm()
    again = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH).eval()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(q, k, v, is_causal=True), exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_function_runs_a_family_at_its_start(name):
    module = unsoft.mechanism(name, heads=HEADS, head_dim=WIDTH)
    q, k, v = inputs(module, dtype=torch.float32)
    state = torch.get_rng_state()
    y = unsoft.attention(q, k, v, name, is_causal=True)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    assert torch.equal(y, unsoft.attention(q, k, v, name, is_causal=True))
    with pytest.raises(ValueError, match="params"):
        unsoft.attention(q, k, v, name, params={"tau": 1.0})


@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"fixed": 0.3}, {"opposed": False}, {"bound": 2.0, "start": 1.5}]
)
def test_gpam_keeps_its_row_sum_and_range(options):
    module = make("gpam", perturb=1.0, **options)
    plus, minus = (x[:, None] for x in module.strengths())
    assert (plus >= 0).all() and (minus >= 0).all() and (plus <= options.get("bound", 1.0)).all()
    _, weights = module(*(4 * x for x in inputs(module)), return_weights=True)
    torch.testing.assert_close(weights.sum(-1), (1 + plus - minus).expand(2, HEADS, LENGTH))
    assert (weights >= -minus[..., None] - 1e-12).all() and (weights <= 1 + plus[..., None] + 1e-12).all()
    assert (weights < 0).any()
    if "tied" in options:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, LENGTH, dtype=torch.float64))


def test_gpam_sees_what_a_fused_optimizer_changes():
    """Such a step does not count the versions of parameters up, and what was known before is not used."""
    module = unsoft.mechanism("gpam", heads=2, head_dim=4)
    q, k, v = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, fused=True)
    before = None
    for _ in range(3):
        with torch.no_grad():
            actual = module(q, k, v)
        assert torch.equal(actual, module(q, k, v).detach()) and (before is None or not actual.equal(before))
        before = actual
        module(q, k, v).square().sum().backward()
        optimizer.step()


def test_gpam_starts_opposed():
    module = unsoft.mechanism("gpam", heads=2, head_dim=3)
    assert torch.equal(module.negative_map, -torch.eye(3).expand(2, 3, 3))


def test_differential_against_its_definition():
    """Written out from the paper for one pair of heads."""
    module = make("differential", layer=3, heads=2)
    q, k, v = inputs(make("softmax", heads=2), kv_heads=2)
    with torch.no_grad():
        module.gain.uniform_(0.5, 1.5)
    maps = [(q[:, h] @ k[:, h].mT / math.sqrt(WIDTH)).softmax(-1) for h in (0, 1)]
    a1, b1, a2, b2 = module.vectors
    strength = (a1 @ b1).exp() - (a2 @ b2).exp() + (0.8 - 0.6 * math.exp(-0.9))
    joined = (maps[0] - strength * maps[1]) @ torch.cat([v[:, 0], v[:, 1]], dim=-1)
    normed = torch.nn.functional.rms_norm(joined, (2 * WIDTH,), module.gain, eps=1e-5) * (
        0.6 * math.exp(-0.9) + 0.2
    )
    out = module(q, k, v)
    torch.testing.assert_close(out[:, 0], normed[..., :WIDTH])
    torch.testing.assert_close(out[:, 1], normed[..., WIDTH:])
    assert first_lambda(0) == pytest.approx(0.2)


def test_differential2_pairs_and_uses_the_hidden_state():
    module = make("differential2", heads=2, hidden_dim=5)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 4, 9, WIDTH, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(1, 1, 9, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden = torch.randn(1, 9, 5, generator=generator, dtype=torch.float64)
    out = module(q, k, v, hidden=hidden)
    strength = (hidden @ module.factor.weight + module.factor.constant.T).sigmoid()[0]
    for head in (0, 1):
        maps = [(q[0, 2 * head + which] @ k[0, 0].mT / math.sqrt(WIDTH)).softmax(-1) for which in (0, 1)]
        torch.testing.assert_close(out[0, head], (maps[0] - strength[:, head, None] * maps[1]) @ v[0, 0])
    with pytest.raises(ValueError, match="hidden"):
        module(q, k, v)
    with pytest.raises(ValueError, match="two for each"):
        module(q[:, :3], k, v, hidden=hidden)


def test_linear_identity_is_the_formula_identity():
    module = make("linear-identity")
    q, k, v = inputs(module)
    for options in ({}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}):
        expected = unsoft.attention(q, k, v, "identity", engine="dense", **options)
        torch.testing.assert_close(module(q, k, v, **options), expected)


def test_taylor2_is_the_polynomial():
    module = make("linear-taylor2")
    q, k, v = inputs(module)
    s = q @ k.mT / math.sqrt(WIDTH)
    weights = 1 + s + s**2 / 2
    torch.testing.assert_close(module(q, k, v), weights / weights.sum(-1, keepdim=True) @ v)


def test_performer_approaches_softmax():
    q, k, v = inputs(make("softmax"))
    q, k = q / 2, k / 2  # the number of features needed grows exponentially with the logits
    exact = unsoft.attention(q, k, v, "softmax")
    errors = [(make(f"performer({m})")(q, k, v) - exact).norm() / exact.norm() for m in (16, 256, 4096)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] and errors[2] < 0.05


def test_decay_and_retention_weights():
    q, k, v = inputs(make("softmax"))
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    faded = torch.where(distance >= 0, 0.9 ** distance.clamp(min=0).double(), 0.0)
    _, weights = make("decay(0.9)")(q, k, v, is_causal=True, return_weights=True)
    torch.testing.assert_close(weights[0, 0], faded, rtol=1e-5, atol=1e-7)
    _, weights = make("retention(0.9)")(q, k, v, is_causal=True, return_weights=True)
    torch.testing.assert_close(weights, q @ k.mT / math.sqrt(WIDTH) * faded, rtol=1e-4, atol=1e-6)
    published = unsoft.mechanism("retention", heads=3, head_dim=4).decay()
    torch.testing.assert_close(published, torch.tensor([1 - 2**-5, 1 - 2**-6, 1 - 2**-7]))
    learnable = unsoft.mechanism("retention", heads=3, head_dim=4, learnable=True)
    learnable(*(x[:, :3, :, :4].float() for x in (q, k, v)), is_causal=True).sum().backward()
    assert learnable.logit.grad.abs().min() > 0


def test_cosformer_rows_without_features_are_zero():
    module = unsoft.mechanism("cosformer(8)", heads=1, head_dim=4)
    x = torch.rand(1, 1, 8, 4)
    query = -x
    query.requires_grad_()
    out = module(query, x, x)
    out.sum().backward()
    assert (out == 0).all() and (query.grad == 0).all()


def test_the_state_of_linear_attention_does_not_grow():
    module = make("cosformer")
    sizes = []
    for length in (8, 64):
        cache = module.new_cache(2)
        module(*inputs(module, length), cache=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


def test_logn_leaves_rows_of_its_length_alone_and_sharpens_longer_ones():
    q, k, v = inputs(make("softmax"))
    _, plain = unsoft.attention(q, k, v, "softmax", return_weights=True)
    _, same = unsoft.attention(q, k, v, f"logn({LENGTH})+softmax", return_weights=True)
    torch.testing.assert_close(plain, same)
    bias = torch.randn(LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scaled = q * (math.log(LENGTH) / math.log(512))
    expected = unsoft.attention(scaled, k, v, "softmax", bias)
    torch.testing.assert_close(unsoft.attention(q, k, v, "logn+softmax", bias), expected)


def test_sink_is_softmax1_at_zero_and_learns():
    q, k, v = inputs(make("softmax"))
    torch.testing.assert_close(
        unsoft.attention(q, k, v, "sink+softmax"),
        unsoft.attention(q, k, v, "softmax1"),
        rtol=1e-10,
        atol=1e-10,
    )
    module = unsoft.mechanism("sink+cog", heads=HEADS, head_dim=WIDTH).double()
    module(q, k, v).sum().backward()
    assert module.values["sink"].grad.abs().min() > 0


def test_the_gate_is_the_factor_it_says():
    module = make("gated+softmax")
    q, k, v = inputs(module)
    gate = (q @ module.factor.weight + module.factor.constant[:, None]).sigmoid()
    torch.testing.assert_close(module(q, k, v), gate * unsoft.attention(q, k, v, "softmax"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gated", "needs one after it"),
        ("logm+cog", "did you mean 'logn'"),
        ("cog+softmax", "unknown modifier 'cog'"),
        ("logn+linear-relu", "rewrites a formula"),
        ("logn+gated+cog", "must stand directly before"),
        ("sink+relu2", "normalised by exponentials"),
        ("sink+sink+softmax", "has a sink already"),
        ("logn(1)+softmax", "above 1"),
        ("gpam(3)", "takes no number"),
        ("cosformr", "did you mean 'cosformer'"),
        ("decay(1.5)", "strictly between 0 and 1"),
        ("performer(0)", "whole number of at least 1"),
        ("first_last(softmax)+cog", "pass layer= and layers="),
    ],
)
def test_mistakes_in_names_are_explained(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        unsoft.mechanism(text, heads=2, head_dim=4)


def test_first_last_by_layer():
    kinds = [
        unsoft.mechanism("first_last(softmax)+logn+cog", heads=2, head_dim=4, layer=t, layers=4).formula
        for t in range(4)
    ]
    assert kinds[0] == kinds[3] == resolve("softmax") and kinds[1] == kinds[2] == resolve("logn+cog")


def test_caches_of_the_wrong_kind_or_size():
    module, other = make("cog"), make("linear-relu")
    q, k, v = inputs(module)
    with pytest.raises(TypeError, match="cache"):
        module(q, k, v, cache=other.new_cache(2))
    with pytest.raises(TypeError, match="cache"):
        other(q, k, v, cache=module.new_cache(2))
    for mechanism in (module, other):
        with pytest.raises(ValueError, match="batch of 3"):
            mechanism(q, k, v, cache=mechanism.new_cache(3))
        with pytest.raises(TypeError, match="batch"):
            mechanism.new_cache("two")


@pytest.mark.parametrize("name", ["cog", "linear-relu"])
def test_reordering_a_cache_follows_the_beams(name):
    module = make(name)
    q, k, v = inputs(module)
    cache = module.new_cache(2)
    module(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], cache=cache)
    cache.reorder(torch.tensor([1, 1]))
    last = [x[[1, 1], :, -1:] for x in (q, k, v)]
    expected = module(q, k, v, is_causal=True)[[1, 1], :, -1:]
    torch.testing.assert_close(module(*last, cache=cache), expected)


@pytest.mark.parametrize(
    "name", ["linear-relu", "linear-identity", "cosformer", "retention", "decay", "performer(32)"]
)
def test_segments_change_nothing(name, monkeypatch):
    module = make(name)
    q, k, v = (x.requires_grad_() for x in inputs(module))
    mask = torch.rand(2, 1, 1, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.8
    variables = [q, k, v, *(p for p in module.parameters() if p.requires_grad)]

    def results():
        outs = [module(q, k, v, is_causal=True), module(q, k, v, mask, is_causal=True)]
        return outs + list(torch.autograd.grad(outs[0].square().sum(), variables, allow_unused=True))

    whole = results()
    monkeypatch.setattr(sys.modules["unsoft.engines.linear.choice"], "SEGMENT", 16)
    for a, b in zip(results(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_masked_keys_are_not_counted_while_decoding():
    """linear-identity divides by the number of keys seen; two texts,
    of which one begins with two keys that are not there."""
    layer = unsoft.mechanism("linear-identity", heads=2, head_dim=4)
    q, k, v = (torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., :2] = False
    whole = layer(q, k, v, mask, is_causal=True)
    cache, parts = layer.new_cache(2), []
    for start, end in ((0, 1), (1, 4), (4, 6)):
        piece = (x[:, :, start:end] for x in (q, k, v))
        parts.append(layer(*piece, mask[..., :end], cache=cache))
    assert torch.allclose(torch.cat(parts, dim=2), whole, atol=1e-6)
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.seen.flatten().tolist() == [4, 4, 6]


def test_affine_scaled_moves_its_mean_in_training_only():
    module = make("affine-scaled", perturb=1.0, momentum=0.75)
    q, k, v = inputs(module)
    alpha = (0.1 * (q @ module.factor.weight + module.factor.constant[:, None]) + 0.5).clamp(0, 1)
    module(q, k, v)
    assert (module.mean == 0.5).all()
    module.train()
    _, weights = module(q, k, v, return_weights=True)
    torch.testing.assert_close(module.mean, 0.75 * 0.5 + 0.25 * alpha.mean((0, 2, 3)).detach())
    torch.testing.assert_close(weights.sum(-1), module.mean[:, None].expand(2, HEADS, LENGTH))


def test_gau_gates_channels_by_the_hidden_state():
    torch.manual_seed(0)
    layer = unsoft.nn.MultiheadAttention(HEADS * WIDTH, HEADS, mechanism="gau+softmax", bias=False)
    gau = layer.mechanism
    torch.nn.init.normal_(gau.factor.weight)
    x = torch.randn(5, 1, HEADS * WIDTH)
    q, k, v = (x[:, 0] @ layer.in_proj_weight.T).view(5, 3, HEADS, WIDTH).permute(1, 2, 0, 3)[:, None]
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, torch.nn.functional.silu(v))
    gate = torch.nn.functional.silu(x[:, 0] @ gau.factor.weight + gau.factor.constant.flatten())
    expected = (gate * attended[0].transpose(0, 1).flatten(1)) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x, x, x)[0][:, 0], expected)


@pytest.mark.parametrize(
    "visibility", [{"is_causal": True}, {"window": (9, 4)}, {"scale": 0.3, "mask": True}]
)
def test_parallax_by_kernels_equals_its_weights_written_out(visibility):
    module = make("parallax")
    q, k, v = inputs(module, kv_heads=2)
    options = visibility | {"enable_gqa": True}
    if options.pop("mask", False):
        options["attn_mask"] = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
        options["attn_mask"][7] = False
        v[0, 0, 5] = torch.nan
    expected = module(q, k, v, **options)
    with torch.no_grad():
        torch.testing.assert_close(
            module(q, k, v, **options), expected.detach(), rtol=1e-9, atol=1e-9, equal_nan=True
        )
