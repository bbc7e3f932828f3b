"""The specification, judged by the definition row by row, by formulas by hand, by numerical slopes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.engines.pairwise import every_other
from unsoft.engines.dense import dense_attention
from unsoft.formula import Formula
from unsoft.mechanisms import formulas, resolve

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = list(formulas())
POSITIONAL = Formula(
    weight="exp(s - tau*abs(i - j) - m)",
    mass="exp(s - tau*abs(i - j) - m)",
    peak="max(s - tau*abs(i - j), sink)",
    offset_mass="exp(sink - m)",
    params={"tau": 0.3, "sink": 0.1},
)
BRANCHES = Formula(
    weight="where(s > c, sqrt(max(s - c, 0.01)), -s*s/n)", mass="max(abs(s), 0.1)", params={"c": 0.2}
)
MECHANISMS = [*NAMES, POSITIONAL, BRANCHES]
KINDS = {
    "plain": {},
    "causal": {"causal": 0},
    "causal, dead rows": {"causal": -3, "length": 5},
    "lower right": {"causal": 2},
    "mask": {"mask": (2, 1, 7, 9)},
    "key padding": {"mask": (2, 1, 1, 9)},
    "bias": {"bias": (1, 4, 7, 9)},
    "bias per key, mask, causal": {"bias": (2, 1, 1, 9), "mask": (1, 4, 7, 9), "causal": 1},
}


def label(x):
    return x if isinstance(x, str) else None


@pytest.mark.parametrize(("mechanism", "kind"), every_other(MECHANISMS, KINDS), ids=label)
def test_weights_and_output_follow_the_definition(mechanism, kind, make_call, by_rows):
    call = make_call(mechanism, **KINDS[kind])
    out, weights = dense_attention(call)
    expected = by_rows(call)
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-12)
    values = call.v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected @ values, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=label)
def test_gradients_follow_the_definition(mechanism, make_call, by_rows, leaves):
    call = make_call(mechanism, batch=1, causal=1, bias=(1, 1, 7, 9), mask=(1, 4, 1, 9))
    g = torch.randn(1, 4, 7, 5, dtype=torch.float64)
    defined = by_rows(call) @ call.v.repeat_interleave(2, 1)
    expected = torch.autograd.grad(defined, leaves(call), g, materialize_grads=True)
    actual = torch.autograd.grad(dense_attention(call)[0], leaves(call), g, materialize_grads=True)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)


BY_HAND = {
    "softmax": lambda s, n: s.softmax(-1),
    "softmax1": lambda s, n: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    "cog": lambda s, n: s.sign() * s.abs().softmax(-1),
    "sinh": lambda s, n: s.sinh() / s.cosh().sum(-1, keepdim=True),
    "relu2": lambda s, n: s.relu() ** 2 / n,
    "sigmoid": lambda s, n: torch.sigmoid(s - math.log(n)),
    "softpick": lambda s, n: torch.expm1(s).relu() / torch.expm1(s).abs().sum(-1, keepdim=True),
    "l2": lambda s, n: s.exp() / s.exp().square().sum(-1, keepdim=True).sqrt(),
    "identity": lambda s, n: s / n,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_built_ins_by_hand(name, make_call):
    call = make_call(name, heads=2)
    s = call.scale * call.q @ call.k.mT
    torch.testing.assert_close(dense_attention(call)[1], BY_HAND[name](s, 9.0), rtol=1e-12, atol=1e-13)


def test_softmax_is_torch_s_softmax(make_call):
    call = make_call("softmax", mask=(2, 1, 7, 9))
    mask = call.visible & torch.ones(2, 4, 7, 9, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(call.q, call.k, call.v, mask, scale=call.scale, enable_gqa=True)
    alive = mask.any(-1, keepdim=True)
    torch.testing.assert_close(dense_attention(call)[0], torch.where(alive, expected, 0.0))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.*:DeprecationWarning"
)  # torch's own, when forward mode loads its rules
@pytest.mark.parametrize("projected", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=label)
def test_gradcheck(mechanism, projected, make_call):
    """First derivatives, reverse and forward mode, of every input, with dead rows, and second derivatives:
    all of them, or projected on random directions, which is much faster."""
    call = make_call(
        mechanism,
        batch=1,
        heads=2,
        kv_heads=1,
        length=3,
        keys=4,
        dim=2,
        value_dim=2,
        causal=-1,
        bias=(1, 2, 3, 4),
        seed=3,
    )
    names = [n for n in ("q", "k", "v", "bias", "params") if getattr(call, n).numel()]

    def run(*inputs):
        return dense_attention(replace(call, **dict(zip(names, inputs, strict=True))))[0]

    inputs = [getattr(call, n) for n in names]
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, fast_mode=projected)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=projected)


def test_vmap(make_call):
    call = make_call("cog", causal=1)

    def run(q, k, v):
        return dense_attention(replace(call, q=q[None], k=k[None], v=v[None]))[0][0]

    torch.testing.assert_close(torch.vmap(run)(call.q, call.k, call.v), dense_attention(call)[0])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=label)
def test_rows_that_see_nothing_are_exact_zeros(mechanism, make_call, leaves):
    call = make_call(mechanism, mask=(2, 1, 7, 9), bias=(1, 4, 7, 9))
    call.visible[:, :, ::2] = False
    out, weights = dense_attention(call)
    assert (out[:, :, ::2] == 0).all() and (weights[:, :, ::2] == 0).all() and (out[:, :, 1::2] != 0).any()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), leaves(call), materialize_grads=True)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, ::2] == 0).all() and (grads[3][:, :, ::2] == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e200])
@pytest.mark.parametrize("mechanism", ["softmax", "cog", "softpick", "relu2", "sigmoid", BRANCHES], ids=label)
def test_what_is_masked_is_inert(mechanism, poison, make_call, leaves):
    clean = make_call(mechanism, mask=(1, 1, 1, 9), bias=(1, 1, 7, 9))
    clean.visible[...] = torch.arange(9) < 6
    with torch.no_grad():
        for x in (clean.k, clean.v):
            x[:, :, 6:] = 0.0
    dirty = replace(clean, **{n: getattr(clean, n).detach().clone() for n in ("k", "v", "bias")})
    dirty.k[:, :, 6:], dirty.v[:, :, 6:] = poison, poison
    if not abs(poison) < torch.inf:
        dirty.bias[..., 6:] = poison
    for x in (dirty.k, dirty.v, dirty.bias):
        x.requires_grad_()
    outs = [dense_attention(call)[0] for call in (clean, dirty)]
    grads = [
        torch.autograd.grad(out.square().sum(), leaves(call))
        for out, call in zip(outs, (clean, dirty), strict=True)
    ]
    assert torch.equal(*outs)
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=label)
def test_what_is_visible_reaches_exactly_the_rows_that_see_it(mechanism, poison, make_call):
    call = make_call(mechanism, causal=0, length=8, keys=8)
    clean = dense_attention(call)[0]
    for name, place in (("q", (0, 1, 2, 3)), ("k", (0, 1, 5, 0)), ("v", (1, 0, 4, 2))):
        x = getattr(call, name).detach().clone()
        x[place] = poison
        out, weights = dense_attention(replace(call, **{name: x}))
        hit = torch.zeros_like(out, dtype=torch.bool)
        if name == "q":
            hit[0, 1, 2] = True
        elif name == "k":
            hit[0, 2:4, 5:] = True  # key head 1 serves query heads 2 and 3
        else:
            hit[1, 0:2, 4:, 2] = True
        assert torch.equal(out.isnan(), hit)
        assert torch.equal(out[~hit], clean[~hit])
        if name != "v":
            assert torch.equal(weights.isnan().any(-1), hit.any(-1))


def test_gradients_beside_a_poisoned_row_are_those_with_zero_in_its_place(make_call, leaves):
    call = make_call("cog", causal=0)
    dirty = replace(call, k=call.k.detach().clone())
    dirty.k[0, 0, 4, 1] = torch.nan
    clean = replace(call, k=torch.where(dirty.k.isnan(), 0.0, dirty.k).requires_grad_())
    dirty.k.requires_grad_()
    rows = slice(0, 4)  # a loss that uses only rows that do not see key 4
    expected = torch.autograd.grad(dense_attention(clean)[0][:, :, rows].sum(), leaves(clean))
    actual = torch.autograd.grad(dense_attention(dirty)[0][:, :, rows].sum(), leaves(dirty))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("mechanism", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_logits_do_not_overflow(mechanism, sign, make_call, leaves):
    call = make_call(mechanism, dtype=torch.float32, dim=1, causal=0)
    with torch.no_grad():
        call.q.fill_(100.0 * sign)
        call.k.copy_(torch.linspace(-100, 100, 9).view(1, 1, 9, 1))
    call = replace(call, scale=1.0)
    out, _ = dense_attention(call)
    assert out.isfinite().all()
    assert all(
        g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves(call), materialize_grads=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(dtype, make_call, in_double):
    call = make_call("cog", dtype=dtype, sigma=3.0)
    out, weights = dense_attention(call)
    assert out.dtype == weights.dtype == dtype
    expected = dense_attention(in_double(call))[0]
    assert (out - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_float16_logits_beyond_its_range(make_call):
    call = make_call("softmax", dtype=torch.float16, dim=4)
    call = replace(call, q=call.q.detach() * 1000, k=call.k.detach() * 1000, scale=1.0)
    assert dense_attention(call)[0].isfinite().all()


@pytest.mark.parametrize(
    "sizes", [{"length": 0}, {"keys": 0}, {"batch": 0}, {"value_dim": 0}, {"dim": 0}], ids=str
)
@pytest.mark.parametrize("mechanism", ["cog", "sigmoid", "l2"])
def test_empty_sizes(mechanism, sizes, make_call, leaves):
    call = make_call(mechanism, **sizes) if "dim" not in sizes else replace(make_call(mechanism), scale=1.0)
    if "dim" in sizes:
        call = replace(
            call, q=call.q.detach()[..., :0].requires_grad_(), k=call.k.detach()[..., :0].requires_grad_()
        )
    out, weights = dense_attention(call)
    assert out.shape == (*call.q.shape[:3], call.v.shape[3]) and weights.shape == (
        *call.q.shape[:3],
        call.k.shape[2],
    )
    assert out.isfinite().all() and ("keys" not in sizes or (out == 0).all())
    grads = torch.autograd.grad(out.sum(), [call.q, call.k, call.v])
    assert all(g.isfinite().all() for g in grads)


def test_shared_key_heads_equal_repeated_ones(make_call):
    call = make_call("cog", heads=6, kv_heads=2)
    repeated = replace(call, k=call.k.repeat_interleave(3, 1), v=call.v.repeat_interleave(3, 1))
    torch.testing.assert_close(dense_attention(call)[0], dense_attention(repeated)[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mechanism", ["cog", "tanh", "swishmax", "identity", "sinh"])
def test_a_strength_bias_never_flips_a_sign(mechanism, make_call):
    assert resolve(mechanism).bias == "strength"
    call = make_call(mechanism, bias=(1, 4, 7, 9))
    signs = dense_attention(replace(call, bias=None))[1].sign()
    biased = dense_attention(replace(call, bias=5 * call.bias))[1]
    assert torch.equal(biased.sign(), signs)


def test_logit_and_strength_bias_agree_for_softmax(make_call):
    softmax = resolve("softmax")
    other = Formula(softmax.weight, softmax.mass, softmax.peak, bias="strength")
    call = make_call(softmax, bias=(1, 4, 7, 9))
    torch.testing.assert_close(dense_attention(call)[0], dense_attention(replace(call, rule=other))[0])


def test_a_normaliser_of_zero_gives_weights_and_gradients_zero(make_call, leaves):
    call = make_call(Formula(weight="relu(s)", mass="relu(s)**2", norm="sqrt"), causal=0)
    with torch.no_grad():
        call.q.copy_(
            call.k.repeat_interleave(2, 1)[:, :, :7] * -1.0
        )  # row 0 sees one key, with a negative logit
    out, weights = dense_attention(call)
    assert (weights[:, :, 0] == 0).all() and (out[:, :, 0] == 0).all()
    grads = torch.autograd.grad(out.sum(), [call.q, call.k, call.v])
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, 0] == 0).all()


@pytest.mark.parametrize(
    ("mechanism", "kind"),
    [
        ("cog", "bias per key, mask, causal"),
        pytest.param("sigmoid", "plain", marks=pytest.mark.slow),
    ],
)
def test_torch_compile(mechanism, kind, make_call):
    call = make_call(mechanism, **KINDS[kind])

    def run(q, k, v, bias):
        return dense_attention(replace(call, q=q, k=k, v=v, bias=bias))[0]

    inputs = (call.q, call.k, call.v, call.bias)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
    plain = run(*inputs)
    torch.testing.assert_close(compiled, plain)
    for a, b in zip(*(torch.autograd.grad(out.sum(), inputs[:3]) for out in (compiled, plain)), strict=True):
        torch.testing.assert_close(a, b)
