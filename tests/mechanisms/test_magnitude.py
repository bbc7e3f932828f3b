"""The mechanism magnitude against its definition written out, in every form; its promises to users."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import unsoft
from unsoft.magnitude import prefix_weighting, weighting
from unsoft.mechanisms.magnitude import Magnitude
from unsoft.modules.registry import resolve
from unsoft.modules.spec import AppliedModifier, MechanismSpec
from unsoft.testing.family import check_family

BASES = [
    "softmax",
    "cog",
    "softpick",
    "linear-relu",
    "cosformer",
    "gpam",
    "differential",
    "differential2",
    "gated+softmax",
]
VALUES_ONLY = ["relu2", "sigmoid", "retention", "linear-identity"]
FORMS = ["auto", "arrival", "prefix", "streaming"]
PLACES = ("values", "mass")

pytestmark = pytest.mark.usefixtures("one_thread")


def plan(base, **options):
    spec = resolve(base)
    spec = spec if isinstance(spec, MechanismSpec) else MechanismSpec(base, None, spec)
    return replace(
        spec,
        name=f"magnitude+{base} {options}",
        modifiers=(*spec.modifiers, AppliedModifier(partial(Magnitude, **options), ())),
    )


GRID = [(base, where, form) for base in BASES for where in PLACES for form in FORMS]
GRID += [(base, "values", form) for base in VALUES_ONLY for form in FORMS]
SAMPLE = {  # softmax in every form and place, every other base in two forms and both places
    *(case for case in GRID if case[0] == "softmax"),
    *((x, place, FORMS[(i + j) % 4]) for i, x in enumerate(BASES) for j, place in enumerate(PLACES)),
    *((base, "values", form) for base, form in zip(VALUES_ONLY, FORMS, strict=True)),
}


@pytest.mark.parametrize(
    ("base", "where", "causal"),
    [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.slow) for case in GRID],
)
def test_contract(base, where, causal):
    rows = check_family(plan(base, where=where, causal=causal, centres=16, chunk=20), seed=0)
    assert rows and all(row.ok for row in rows), rows


@pytest.mark.parametrize(
    ("where", "causal"),
    [
        pytest.param(where, form, marks=() if (where, form) == ("values", "auto") else pytest.mark.slow)
        for where in ("values", "mass")
        for form in FORMS
    ],
)
def test_contract_of_the_weight_as_gate(where, causal):
    rows = check_family(plan("softmax", gate="weight", where=where, causal=causal), seed=0)
    assert rows and all(row.ok for row in rows), rows


@pytest.mark.parametrize("solver", ["cg", "cholesky", "lowrank"])
def test_contract_of_solvers(solver):
    rows = check_family(plan("softmax", solver=solver, rank=70), seed=0)
    assert rows and all(row.ok for row in rows), rows


def inputs(heads=2, length=30, width=6, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, length, width, generator=g, dtype=dtype) for _ in range(3)]


def moved(**options):
    """A layer whose parameters are not at their start."""
    layer = unsoft.mechanism("magnitude", heads=2, head_dim=6, **options).double()
    with torch.no_grad():
        layer.log_t.copy_(torch.tensor([0.3, -0.2]))
        if layer.beta is not None:
            layer.beta.copy_(torch.tensor([1.5, -0.7]))
            layer.gamma.copy_(torch.tensor([0.4, 0.1]))
    return layer


def gate(layer, w):
    if layer.beta is None:
        return w if layer.where == "values" else w.clamp(min=0)
    more = (1,) * (w.dim() - 2)
    return torch.sigmoid(layer.beta.view(-1, *more) * w + layer.gamma.view(-1, *more))


@pytest.mark.parametrize("passed", ["sigmoid", "weight"])
@pytest.mark.parametrize("where", ["values", "mass"])
@pytest.mark.parametrize("form", ["bidirectional", "arrival", "prefix"])
def test_definition(form, where, passed):
    """Softmax, the gates and the sums written out."""
    q, k, v = inputs()
    options = {"where": where, "gate": passed, "eps": 0.2}
    layer = moved(solver="cholesky", causal="arrival" if form == "bidirectional" else form, **options)
    causal = form != "bidirectional"
    t = layer.log_t.exp()
    if form == "bidirectional":
        g = gate(layer, weighting(k, t, 0.2, "cholesky").weights)[..., None, :]
    else:
        prefix = prefix_weighting(k, t, 0.2)
        g = gate(layer, prefix.newest)[..., None, :] if form == "arrival" else gate(layer, prefix.weights)
    scores = q @ k.mT / 6**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1) * g
    if where == "mass":
        weights = weights / weights.sum(-1, keepdim=True)
    out, returned = layer(q, k, v, is_causal=causal, return_weights=True)
    torch.testing.assert_close(returned, weights)
    torch.testing.assert_close(out, weights @ v)
    torch.testing.assert_close(layer(q, k, v, is_causal=causal), weights @ v)


def crowd_of_fifty():
    """Rosić's example: 50 clones of relevance 1 and one unique key of relevance 20, as logits and
    geometry.
    """
    k = torch.zeros(1, 1, 51, 2, dtype=torch.float64)
    k[..., 50, 0] = 1.0
    q = torch.zeros(1, 1, 1, 2, dtype=torch.float64)
    q[..., 0] = math.log(20) * 2**0.5
    geometry = torch.zeros(1, 1, 51, 2, dtype=torch.float64)
    geometry[..., 50, :] = 30.0
    return q, k, torch.zeros(1, 1, 51, 2, dtype=torch.float64), geometry


@pytest.mark.parametrize("causal", [False, True])
def test_fifty_clones_get_a_fiftieth_each(causal):
    """The 0.02 V of Rosić 2026; causally the clones arrive with 1, 1/2, 1/3, ... (eps = 1e-3)."""
    k, value = torch.zeros(1, 1, 50, 4), torch.ones(1, 1, 50, 4)
    layer = unsoft.mechanism("magnitude", heads=1, head_dim=4, gate="weight", eps=1e-3, causal="arrival")
    out = layer(torch.zeros(1, 1, 50, 4), k, value, is_causal=causal)[..., -1, :]
    expected = sum(1 / j for j in range(1, 51)) / 50 if causal else 0.02
    torch.testing.assert_close(out, torch.full((1, 1, 4), expected), rtol=2e-3, atol=0)


@pytest.mark.parametrize("where", ["values", "mass"])
def test_twenty_against_fifty(where):
    q, k, v, geometry = crowd_of_fifty()
    _, plain = unsoft.attention(q, k, v, return_weights=True)
    assert float(plain[..., 50]) == pytest.approx(20 / 70)
    layer = unsoft.mechanism(
        "magnitude", heads=1, head_dim=2, where=where, solver="cholesky", eps=1e-3
    ).double()
    with torch.no_grad():
        layer.beta.fill_(12.0)
        layer.gamma.fill_(-8.0)
    weights = layer(q, k, v, geometry_keys=geometry, return_weights=True)[1].detach()
    unique, clone = (1 / (1 + math.exp(8.0 - 12.0 * w)) for w in (1 / 1.001, 1 / 50.001))
    share = 20 * unique / (20 * unique + 50 * clone)
    assert share > 0.99
    if where == "mass":
        assert float(weights.sum()) == pytest.approx(1)
        assert float(weights[..., 50]) == pytest.approx(share, rel=1e-9)
    else:
        assert float(weights[..., 50]) == pytest.approx(
            20 / 70 * unique, rel=1e-9
        )  # its size is kept, not restored
        assert float(weights[..., 50] / weights.sum()) == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("where", ["values", "mass"])
@pytest.mark.parametrize("causal", [*FORMS, None])
def test_open_start_changes_almost_nothing(where, causal):
    q, k, v = inputs(dtype=torch.float32)
    k[:, :, 10:20] = k[:, :, :1] + 1e-4 * k[:, :, 10:20]  # near-clones, whose weights are wild
    options = {} if causal is None else {"causal": causal}
    layer = unsoft.mechanism("magnitude", heads=2, head_dim=6, start="open", where=where, eps=1e-3, **options)
    out = layer(q, k, v, is_causal=causal is not None)
    plain = unsoft.attention(q, k, v, is_causal=causal is not None)
    assert float((out - plain).detach().abs().max()) < 1e-3 * float(plain.abs().max())
    gradients = torch.autograd.grad(out.square().sum(), [layer.beta, layer.gamma])
    assert all(g.abs().max() > 0 for g in gradients)


def test_t_is_positive_whatever_is_learned():
    layer = unsoft.mechanism("magnitude", heads=2, head_dim=6, t=0.5)
    assert torch.allclose(layer.log_t.exp(), torch.tensor(0.5))
    with torch.no_grad():
        layer.log_t.fill_(-20.0)
    q, k, v = inputs(dtype=torch.float32)
    assert layer(q, k, v).isfinite().all()


def test_learns_from_every_parameter():
    q, k, v = inputs()
    for options in (
        {"solver": "cg"},
        {"causal": "arrival"},
        {"causal": "prefix"},
        {"causal": "streaming", "chunk": 8},
    ):
        layer = moved(**options)
        out = layer(q, k, v, is_causal="causal" in options)
        slopes = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        assert all(s.isfinite().all() and (s != 0).all() for s in slopes), options


def test_geometry_keys():
    """The geometry comes from other keys, of another width, and rotation of the attended keys no longer
    matters.
    """
    q, k, v = inputs()
    other = torch.randn(2, 2, 30, 3, dtype=torch.float64)
    layer = moved(causal="arrival")
    w = prefix_weighting(other, layer.log_t.exp(), 0.1).newest
    expected = unsoft.attention(q, k, v * gate(layer, w)[..., None], is_causal=True)
    torch.testing.assert_close(layer(q, k, v, is_causal=True, geometry_keys=other), expected)
    cache, steps = layer.new_cache(2), []
    for t in range(30):
        one = [x[:, :, [t]] for x in (q, k, v, other)]
        steps.append(layer(*one[:3], geometry_keys=one[3], cache=cache).detach())
    torch.testing.assert_close(torch.cat(steps, dim=2), expected.detach())


@pytest.mark.parametrize("causal", FORMS)
def test_shared_key_heads(causal):
    """Query heads that share a key head use the mean of their parameters: as if both had it."""
    q = torch.randn(2, 4, 12, 6, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 12, 6, dtype=torch.float64) for _ in range(2))
    shared = unsoft.mechanism("magnitude", heads=4, head_dim=6, causal=causal, chunk=5).double()
    each = unsoft.mechanism("magnitude", heads=4, head_dim=6, causal=causal, chunk=5).double()
    with torch.no_grad():
        for name in ("log_t", "beta", "gamma"):
            values = torch.randn(4, dtype=torch.float64)
            getattr(shared, name).copy_(values)
            getattr(each, name).copy_(values.view(2, 2).mean(-1).repeat_interleave(2))
    whole = each(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)), is_causal=True)
    torch.testing.assert_close(shared(q, k, v, is_causal=True, enable_gqa=True), whole)


@pytest.mark.parametrize("causal", FORMS)
@pytest.mark.parametrize("where", ["values", "mass"])
def test_padded_batches(causal, where):
    """Left padding, whole and decoded: as if the padding were not there."""
    q, k, v = inputs()
    layer = (
        moved(causal=causal, where=where, chunk=7, centres=12)
        if causal != "streaming"
        else moved(causal=causal, where=where, chunk=64)
    )
    padding = torch.arange(30) >= 8
    k[:, :, :8], v[:, :, :8] = torch.nan, torch.inf
    expected = layer(*(x[:, :, 8:] for x in (q, k, v)), is_causal=True)
    masked = layer(q, k, v, padding[None, None, None], is_causal=True)
    torch.testing.assert_close(masked[:, :, 8:], expected)
    cache, steps = layer.new_cache(2), []
    with torch.no_grad():
        for a, b in ((0, 12), (12, 13), (13, 14), (14, 30)):
            piece = [x[:, :, a:b] for x in (q, k, v)]
            steps.append(layer(*piece, padding[None, None, None, :b], cache=cache))
    torch.testing.assert_close(torch.cat(steps, dim=2)[:, :, 8:], expected.detach())


@pytest.mark.parametrize("causal", FORMS)
def test_beams(causal):
    """Reordering a cache is reordering the sequences."""
    q, k, v = inputs()
    layer = moved(causal=causal, chunk=6, centres=12, where="mass")
    cache = layer.new_cache(2)
    with torch.no_grad():
        layer(*(x[:, :, :20] for x in (q, k, v)), cache=cache)
        cache.reorder(torch.tensor([1, 1, 0]))
        q, k, v = (x[[1, 1, 0]] for x in (q, k, v))
        rest = layer(*(x[:, :, 20:] for x in (q, k, v)), cache=cache)
        whole = layer(q, k, v, is_causal=True)
    torch.testing.assert_close(rest, whole[:, :, 20:])
    assert cache.nbytes > 0 and cache.length == 30


def test_rows_before_the_first_key_and_after_the_last():
    q, k, v = inputs()
    for causal in FORMS:
        layer = moved(causal=causal, chunk=6)
        wide = layer(q, k[:, :, :20], v[:, :, :20], is_causal="lower_right")
        assert wide[:, :, :10].eq(0).all() and not wide[:, :, 10:].eq(0).any()
        torch.testing.assert_close(
            wide[:, :, 10:], layer(q[:, :, 10:], k[:, :, :20], v[:, :, :20], is_causal=True)
        )


def test_names():
    assert isinstance(unsoft.mechanism("magnitude", heads=1, head_dim=4), Magnitude)
    assert isinstance(unsoft.mechanism("magnitude+gated+softmax", heads=1, head_dim=4).inner, torch.nn.Module)
    q, k, v = inputs()
    torch.testing.assert_close(
        unsoft.attention(q, k, v, "magnitude"), unsoft.attention(q, k, v, "magnitude+softmax")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "keys"}, "'where' must be 'values' or 'mass', not 'keys'"),
        ({"gate": "none"}, "'gate' must be 'sigmoid' or 'weight', not 'none'"),
        ({"gate": "weight", "start": "open"}, "gate='weight' has no parameters to start with"),
        ({"causal": "yes"}, "'causal' must be 'auto', 'arrival', 'prefix' or 'streaming'"),
        ({"solver": "lu"}, "'solver' must be 'cg', 'cholesky', "),
        ({"start": "closed"}, "'start' must be 'plain' or 'open'"),
        ({"eps": 0.0}, "'eps' must be finite and at least 1e-06, not 0.0"),
        ({"t": 0}, "'t' must be above 0, not 0"),
        ({"iterations": 0}, "'iterations' must be a whole number of at least 1, not 0"),
        ({"chunk": 2.5}, "'chunk' must be a whole number"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        unsoft.mechanism("magnitude", heads=1, head_dim=4, **options)


def test_wrong_calls():
    with pytest.raises(ValueError, match="relu2 has none, and 'values' is the same"):
        unsoft.mechanism("magnitude+relu2", heads=1, head_dim=4, where="mass")
    with pytest.raises(TypeError, match="'magnitude.cog' has no option 'wher'; it has causal, centres"):
        unsoft.mechanism("magnitude+cog", heads=1, head_dim=4, wher="mass")
    q, k, v = inputs()
    layer = moved()
    with pytest.raises(ValueError, match="'attn_mask' differs from row to row"):
        layer(q, k, v, torch.ones(30, 30, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="'geometry_keys' is .*expected a tensor"):
        layer(q, k, v, geometry_keys=k[:, :, 1:])
    with pytest.raises(TypeError, match="new_cache"):
        layer(q, k, v, cache=unsoft.mechanism("softmax", heads=2, head_dim=6).new_cache(2))


def test_nan_keys_reach_only_the_rows_that_see_them():
    q, k, v = inputs()
    k[0, 0, 12] = torch.nan
    for causal in FORMS:
        out = moved(causal=causal, chunk=6)(q, k, v, is_causal=True)
        assert out[0, 0, 12:].isnan().all() and out[0, 0, :12].isfinite().all() and out[1].isfinite().all()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo looks, after a graph break
def test_compiles():
    q, k, v = inputs(dtype=torch.float32)
    layer = unsoft.mechanism("magnitude", heads=2, head_dim=6)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, is_causal=True), layer(q, k, v, is_causal=True))


@pytest.mark.parametrize("causal", FORMS)
def test_autocast_narrows_keys_and_not_their_geometry(causal):
    """Beyond one chunk, with gradients, and step by step: the systems are solved in full precision."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 8, generator=draw).bfloat16() for _ in range(3))
    layer = unsoft.mechanism("magnitude", heads=2, head_dim=8, eps=0.01, causal=causal)
    expected = layer(q, k, v, is_causal=True)
    expected.float().square().sum().backward()
    wanted, layer.beta.grad = layer.beta.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer(*(x.float() for x in (q, k, v)), is_causal=True)
        actual.float().square().sum().backward()
        cache, parts = layer.new_cache(1), []
        for part in zip(*(x.float().split([290, 9, 1], dim=2) for x in (q, k, v)), strict=True):
            with torch.no_grad():
                parts.append(layer(*part, is_causal=True, cache=cache))
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.01)
    torch.testing.assert_close(torch.cat(parts, dim=2), expected, rtol=0.02, atol=0.01)
    torch.testing.assert_close(layer.beta.grad, wanted, rtol=0.02, atol=0.05)
