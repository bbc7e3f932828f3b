"""Mechanisms made of formulas with fields: where the fields come from, and what decoding keeps of them."""

import copy
import math

import pytest
import torch
from torch.nn.functional import cosine_similarity, logsigmoid

import unsoft
from unsoft.mechanisms.tda import direction
from unsoft.modules.plugins import unregister
from unsoft.modules.pointwise import FieldCache, FieldSource
from unsoft.modules.registry import resolve

B, H, D, L = 2, 4, 8, 30
GATED = unsoft.Formula(
    "exp(s + g_j - m)*t_i", "exp(s + g_j - m)", "s + g_j", fields={"g": "key", "t": "query"}
)


def tensors(*shapes, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]


def moved(name, **options):
    """The mechanism with parameters away from their start."""
    torch.manual_seed(0)
    module = unsoft.mechanism(name, heads=H, head_dim=D, **options).double()
    with torch.no_grad():
        for p in module.parameters():
            p += 0.3 * torch.randn_like(p)
    return module


def causal(logits):
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def decoded(module, q, k, v, hidden=None, cuts=(0, 7, 8, 9, L), **options):
    cache = module.new_cache(B)
    outs = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        part = {} if hidden is None else {"hidden": hidden[:, a:b]}
        outs.append(module(*(x[:, :, a:b] for x in (q, k, v)), cache=cache, **part, **options))
    return torch.cat(outs, dim=2), cache


# -- each mechanism against its paper, written once more


def test_fox_is_softmax_plus_the_gates_between():
    module = moved("fox", hidden_dim=12)
    q, k, v, x = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D), (B, L, 12))
    gate = module.source.gate
    log_gates = logsigmoid(x @ gate.weight + gate.constant[:, 0]).mT  # (B, H, L)
    fading = torch.zeros(B, H, L, L, dtype=torch.float64)
    for i in range(L):
        for j in range(i):
            fading[..., i, j] = log_gates[..., j + 1 : i + 1].sum(-1)
    expected = causal(q @ k.mT / math.sqrt(D) + fading) @ v
    torch.testing.assert_close(module(q, k, v, is_causal=True, hidden=x), expected)
    pieces, cache = decoded(module, q, k, v, x)
    torch.testing.assert_close(pieces, expected)
    assert isinstance(cache, FieldCache) and cache.fields["c"].shape == (B, H, L)


def test_rbf_ranks_by_distance():
    module = moved("rbf")
    q, k, v = tensors((B, H, L, D), (B, 2, L, D), (B, 2, L, D))
    far = torch.cdist(q, k.repeat_interleave(2, dim=1)).square() / math.sqrt(D)
    expected = (-far).softmax(-1) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(module(q, k, v, enable_gqa=True), expected)


def test_dynamic_alibi_starts_as_alibi():
    module = unsoft.mechanism("dynamic-alibi", heads=8, head_dim=D).double()
    q, k, v = tensors((B, 8, L, D), (B, 8, L, D), (B, 8, L, D))
    slopes = torch.tensor([0.5**h for h in range(1, 9)], dtype=torch.float64)
    distance = torch.arange(L)[:, None] - torch.arange(L)
    expected = causal(q @ k.mT / math.sqrt(D) - slopes[:, None, None] * distance) @ v
    torch.testing.assert_close(module(q, k, v, is_causal=True), expected)


def test_ssmax_is_a_power_of_the_count():
    module = moved("ssmax")
    q, k, v = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D))
    n = torch.arange(1, L + 1, dtype=torch.float64)[:, None]
    powers = n ** (module.values["a"][:, None, None] * (q @ k.mT) / math.sqrt(D))
    powers = powers.tril()
    expected = powers / powers.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(module(q, k, v, is_causal=True), expected)


def test_tda_is_the_authors_formula():
    """As in snap-research/TDA: q and k of length 1, threshold by position i + 1, squared, l clamped."""
    module = moved("tda")
    q, k, v = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D))
    with torch.no_grad():
        module.strength[0] = 1.7
    values = torch.cat([v[:, ::2], v[:, 1::2]], dim=-1)
    out = []
    for which in (0, 1):
        cosines = cosine_similarity(q[:, which::2, :, None], k[:, which::2, None], dim=-1)
        position = torch.arange(1, L + 1, dtype=torch.float64)[:, None]
        threshold = module.beta[:, None, None] * (2 * position.log() / D).sqrt()
        out.append((cosines - threshold).relu().square().tril() @ values)
    strength = torch.tensor([1.0, float(module.strength[1].detach())], dtype=torch.float64)[:, None, None]
    difference = out[0] - strength * out[1]
    expected = torch.stack(difference.chunk(2, dim=-1), dim=2).flatten(1, 2)
    torch.testing.assert_close(module(q, k, v, is_causal=True), expected)


# -- fields_from, caches, errors


class Weight(FieldSource):
    """A gate of keys from the keys themselves, and a factor of queries from the hidden state."""

    uses_hidden = True

    def __init__(self, layer_spec, gain=1.0):
        super().__init__(layer_spec)
        self.gain = torch.nn.Parameter(torch.tensor(float(gain)))

    def forward(self, tokens):
        return {"g": self.gain * tokens.key[..., 0], "t": tokens.hidden.sum(-1)[:, None]}


def test_a_gate_of_ones_own_is_one_class():
    q, k, v, x = tensors((B, H, L, D), (B, 2, L, D), (B, 2, L, D), (B, L, 3))
    layer = unsoft.mechanism(GATED, heads=H, head_dim=D, hidden_dim=3, fields_from=Weight, gain=2.0).double()
    wide = [y.repeat_interleave(2, dim=1) for y in (k, v)]
    logits = q @ wide[0].mT / math.sqrt(D) + 2.0 * wide[0][..., None, :, 0]
    expected = causal(logits) * x.sum(-1)[:, None, :, None] @ wide[1]
    out = layer(q, k, v, is_causal=True, enable_gqa=True, hidden=x)
    torch.testing.assert_close(out, expected)
    (gradient,) = torch.autograd.grad(out.sum(), layer.source.gain)
    torch.testing.assert_close(gradient, torch.autograd.grad(_of_gain(q, wide, x), _GAIN)[0])
    pieces, _ = decoded(layer, q, k, v, x, enable_gqa=True)
    torch.testing.assert_close(pieces, expected)


_GAIN = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


def _of_gain(q, wide, x):
    logits = q @ wide[0].mT / math.sqrt(D) + _GAIN * wide[0][..., None, :, 0]
    return (causal(logits) * x.sum(-1)[:, None, :, None] @ wide[1]).sum()


def test_fields_given_to_a_layer_are_kept_by_its_cache():
    layer = unsoft.mechanism(GATED, heads=H, head_dim=D)
    q, k, v, g, t = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D), (B, H, L), (B, H, L))
    whole = layer(q, k, v, is_causal=True, fields={"g": g, "t": t})
    cache = layer.new_cache(B)
    outs, before = [], None
    for a, b in ((0, 11), (11, 12), (12, L)):
        part = {"g": g[..., a:b], "t": t[..., a:b]}
        if a == 12:  # another continuation, then back
            before = cache.snapshot()
            layer(
                q[:, :, :5], k[:, :, :5], v[:, :, :5], fields={"g": g[..., :5], "t": t[..., :5]}, cache=cache
            )
            cache.restore(before)
        outs.append(layer(*(x[:, :, a:b] for x in (q, k, v)), fields=part, cache=cache))
    torch.testing.assert_close(torch.cat(outs, dim=2), whole)
    cache.reorder(torch.tensor([1, 0]))
    assert torch.equal(cache.fields["g"], g.flip(0))
    assert copy.deepcopy(cache).nbytes == cache.nbytes > 0


def test_what_is_said():
    q = torch.randn(1, H, 5, D)
    with pytest.raises(ValueError, match="argument 'is_causal': this mechanism looks back only"):
        unsoft.attention(q, q, q, "fox")
    with pytest.raises(ValueError, match="holds 5 tokens .* but there are 3 keys"):
        layer = unsoft.mechanism("fox", heads=H, head_dim=D, hidden_dim=3)
        layer(q, q[:, :, :3], q[:, :, :3], is_causal=True, hidden=torch.randn(1, 5, 3))
    with pytest.raises(ValueError, match="argument 'fields' is for formulas that declare fields"):
        unsoft.mechanism("fox", heads=H, head_dim=D)(q, q, q, is_causal=True, fields={"c": q[..., 0]})
    with pytest.raises(TypeError, match="'rbf' has no option 'start'"):
        unsoft.mechanism("rbf", heads=H, head_dim=D, start=1)
    with pytest.raises(ValueError, match="'heads' must be even"):
        unsoft.mechanism("tda", heads=3, head_dim=D)
    with pytest.raises(ValueError, match="lacks 'g'"):
        unsoft.mechanism(GATED, heads=H, head_dim=D)(q, q, q)


def test_registered_with_its_source():
    unsoft.register("heavy", GATED, fields_from=Weight)
    try:
        layer = unsoft.mechanism("heavy", heads=H, head_dim=D, hidden_dim=3)
        q, x = torch.randn(1, H, 5, D), torch.randn(1, 5, 3)
        assert layer(q, q, q, hidden=x).shape == q.shape
        assert "heavy" in unsoft.mechanisms()
    finally:
        unregister("heavy")
    with pytest.raises(TypeError, match="'fields_from' is for formulas"):
        unsoft.register("heavy", Weight, fields_from=Weight)


def test_modifiers_rewrite_a_formula_with_fields():
    module = moved("sink+fox")
    q, k, v = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D))
    gate = module.source.gate
    c = logsigmoid((k @ gate.weight)[..., 0] + gate.constant).cumsum(-1)
    logits = q @ k.mT / math.sqrt(D) + c[..., None] - c[..., None, :]
    logits = logits.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -torch.inf)
    with_sink = torch.cat([logits, module.values["sink"][:, None, None].expand(B, H, L, 1)], dim=-1)
    expected = with_sink.softmax(-1)[..., :L] @ v
    torch.testing.assert_close(module(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("name", ["fox", "dynamic-alibi"])
def test_open_start_is_almost_softmax(name):
    module = unsoft.mechanism(name, heads=H, head_dim=D).double()
    module.open_start()
    q, k, v = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D))
    plain = unsoft.attention(q, k, v, "softmax", is_causal=True)
    torch.testing.assert_close(module(q, k, v, is_causal=True), plain, rtol=1e-3, atol=1e-3)


def test_compiled_is_the_same():
    module = moved("fox")
    q, k, v = tensors((B, H, L, D), (B, H, L, D), (B, H, L, D))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, is_causal=True), module(q, k, v, is_causal=True))


def test_a_formula_of_lengths_needs_no_more_than_its_name():
    assert resolve("rbf").formula.symbols.key == ("k2",)


def test_directions_of_denormal_vectors_have_finite_gradients():
    """1 / |x| of such a vector is beyond the largest number; they count as 0."""
    x = torch.full((3, 4), 1e-310, dtype=torch.float64)
    x[1] = 2.5e-300
    x.requires_grad_()
    actual = direction(x)
    (gradient,) = torch.autograd.grad(actual[:, 0].sum(), x)
    assert actual[0].tolist() == [0.0] * 4 and torch.allclose(actual[1], torch.full((4,), 0.5).double())
    assert gradient.isfinite().all() and gradient[1].abs().max() > 1e298
