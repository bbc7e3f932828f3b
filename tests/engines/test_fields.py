"""Fields of formulas on every engine, against attention written out in plain torch."""

import pytest
import torch

import unsoft
from unsoft.engines.arguments import checked_call
from unsoft.formula import Formula

ENGINES = ("dense", "tiled", "native")
B, H, HK, D = 2, 4, 2, 8

# Everything that fields can be in: exponents, factors, norm and offset, beside parameters, signed.
RICH = Formula(
    weight="g_j*exp(t_i*s*b - k2/9 - m)",
    mass="(1 + g_j**2)*exp(t_i*s*b - k2/9 - m)",
    peak="max(t_i*s*b - k2/9, 0)",
    norm="z*(1 + t_i**2)",
    offset_mass="exp(-m)*(2 + t_i + q2)",
    params={"b": 0.7},
    fields={"t": "query", "g": "key"},
    bias="logit",
)


def written(q, k, v, t, g, b, visible, bias):
    """RICH by plain torch, without a peak: its exponents are small here."""
    k, v, g = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v, g))
    scale = D**-0.5
    s = scale * q @ k.mT + bias
    t, g = t[..., :, None], g[..., None, :]
    q2, k2 = scale * q.square().sum(-1)[..., :, None], scale * k.square().sum(-1)[..., None, :]
    exponential = (t * s * b[:, None, None] - k2 / 9).exp()
    total = torch.where(visible, (1 + g**2) * exponential, 0.0).sum(-1, keepdim=True) + 2 + t + q2
    return torch.where(visible, g * exponential, 0.0) / (total * (1 + t**2)) @ v


def draw(length=40, keys=40, field_heads=H, seed=0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    shapes = [(B, H, length, D), (B, HK, keys, D), (B, HK, keys, D), (B, H, length), (B, field_heads, keys)]
    tensors = [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes]
    tensors.append(0.5 + torch.rand(H, generator=source, dtype=torch.float64).to(dtype))
    return [x.requires_grad_() for x in tensors]


def run(engine, tensors, mask=None, is_causal=False, **options):
    q, k, v, t, g, b = tensors
    return unsoft.attention(
        *(q, k, v, RICH, mask),
        is_causal=is_causal,
        enable_gqa=True,
        engine=engine,
        params={"b": b},
        fields={"t": t, "g": g},
        **options,
    )


CASES = {
    "plain": ({}, None, False),
    "causal": ({}, None, True),
    "fields of key heads": ({"field_heads": HK}, None, True),
    "long": ({"length": 230, "keys": 210}, None, False),
    "few queries": ({"length": 3, "keys": 300}, None, "lower_right"),
    "one query, fields of key heads": ({"length": 1, "keys": 600, "field_heads": HK}, None, False),
    "bool mask": ({}, "bool", False),
    "float mask": ({}, "float", True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_output_and_gradients(engine, case):
    sizes, mask, causal = CASES[case]
    tensors = draw(**sizes)
    length, keys = tensors[0].shape[2], tensors[1].shape[2]
    source = torch.Generator().manual_seed(9)
    visible, bias = torch.ones(length, keys, dtype=torch.bool), torch.zeros(length, keys, dtype=torch.float64)
    if causal:
        visible = visible.tril(keys - length if causal == "lower_right" else 0)
    given = None
    if mask == "bool":
        given = torch.rand(B, H, length, keys, generator=source) > 0.3
        given[:, :, 1] = False
        visible = visible & given
    elif mask == "float":
        given = bias = torch.randn(length, keys, generator=source, dtype=torch.float64)
    out = run(engine, tensors, given, causal)
    expected = written(*tensors, visible, bias)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    upstream = torch.randn(out.shape, generator=source, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(x, tensors, upstream) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["tiled", "native"])
def test_narrow_inputs_keep_their_fields_wide(engine, dtype):
    tensors = draw(dtype=dtype)
    fields = [
        x.detach().double().requires_grad_() for x in tensors[3:]
    ]  # fields in float64 beside narrow inputs
    out = run(engine, [*tensors[:3], *fields], is_causal=True)
    wide = [x.detach().double() for x in tensors]
    visible = torch.ones(40, 40, dtype=torch.bool).tril()
    expected = written(*wide[:3], *fields, visible, torch.zeros(40, 40, dtype=torch.float64))
    assert out.dtype == dtype
    off = (out.double() - expected).norm() / expected.norm()
    assert off < (1e-6 if dtype == torch.float32 else 4e-3)
    gradients = torch.autograd.grad(out.double().sum(), fields)
    references = torch.autograd.grad(expected.sum(), fields)
    for a, b in zip(gradients, references, strict=True):
        assert a.dtype == torch.float64 and (a - b).norm() / b.norm() < (
            1e-5 if dtype == torch.float32 else 1e-2
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_field_that_is_not_finite_makes_the_rows_that_see_it_nan(engine):
    tensors = [x.detach() for x in draw()]
    clean = run(engine, tensors, is_causal=True)
    t, g = tensors[3].clone(), tensors[4].clone()
    t[0, 1, 7], g[1, 2, 30] = torch.nan, torch.inf
    bad = torch.zeros(B, H, 40, dtype=torch.bool)
    bad[0, 1, 7], bad[1, 2, 30:] = True, True
    leaves = [x.clone().requires_grad_() for x in (*tensors[:3], t, g, tensors[5])]
    out = run(engine, leaves, is_causal=True)
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
    torch.testing.assert_close(out[~bad], clean[~bad], rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(torch.where(bad[..., None], 0.0, out).nan_to_num().sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)
    masked = torch.ones(1, 1, 1, 40, dtype=torch.bool)
    masked[..., 30] = False
    hidden = run(engine, [*tensors[:4], g, tensors[5]], masked, is_causal=True)
    assert hidden.isfinite().all()


def test_squared_lengths_of_keys_that_are_not_finite():
    formula = Formula("exp(2*s - k2 - m)", "exp(2*s - k2 - m)", "2*s - k2")
    q, k, v = (torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(3))
    broken = k.detach().clone()
    broken[0, 0, 3, 1] = torch.inf
    broken.requires_grad_()
    for engine in ENGINES:
        out = unsoft.attention(q, broken, v, formula, is_causal=True, engine=engine)
        assert out[:, :, :3].isfinite().all() and out[:, :, 3:].isnan().all()
        (gradient,) = torch.autograd.grad(out[:, :, :3].sum(), broken)
        assert gradient.isfinite().all()


def test_dropout_is_the_same_on_all_engines():
    tensors = [x.detach() for x in draw()]
    results = []
    for engine in ENGINES:
        torch.manual_seed(3)
        results.append(run(engine, tensors, is_causal=True, dropout_p=0.3))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[2], results[0], rtol=1e-10, atol=1e-12)


def test_weights_and_other_ways_to_give_fields():
    q, k, v = (torch.randn(3, 5, 4) for _ in range(3))  # no batch
    formula = Formula(
        "exp(s + c_i - c_j - m)", "exp(s + c_i - c_j - m)", "s + c_i - c_j", fields={"c": "query+key"}
    )
    c = torch.randn(3, 5)
    expected = (0.5 * q @ k.mT - c[:, None]).softmax(-1)
    for given in (c, (c, c), (torch.zeros(5), c)):  # c_i cancels
        _, weights = unsoft.attention(q, k, v, formula, fields={"c": given}, return_weights=True)
        torch.testing.assert_close(weights, expected)


def test_operators_keep_torch_s_rules():
    q, k, v, t, g, b = draw(length=20, keys=20)
    call, _ = checked_call(q, k, v, RICH, enable_gqa=True, params={"b": b}, fields={"t": t, "g": g})
    tensors, options = call.flat()
    for name in ("tiled", "native"):
        torch.library.opcheck(
            getattr(torch.ops.unsoft, name).default,
            tensors,
            options,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        (None, ValueError, "lacks 'g': this formula needs fields={'g': tensor}"),
        ({"t": torch.zeros(B, H, 40)}, ValueError, "lacks 'g'"),
        ({"t": 0, "g": 0}, TypeError, r"'fields\['t'\]' must be a tensor of a floating dtype, not int"),
        (
            {"t": torch.zeros(B, H, 41), "g": torch.zeros(B, H, 40)},
            ValueError,
            r"shape \(2, 4, 41\), which does",
        ),
        ({"t": torch.zeros(B, HK, 40), "g": torch.zeros(B, H, 40)}, ValueError, r"broadcast to \(2, 4, 40\)"),
        ({"t": torch.zeros(B, H, 40).int(), "g": 0}, TypeError, "floating dtype, not torch.int32"),
        ({"t": torch.zeros(40), "g": torch.zeros(40), "u": 0}, ValueError, "names 'u', but the fields"),
        ([1], TypeError, "'fields' must be a mapping"),
    ],
)
def test_what_is_said_about_wrong_fields(fields, error, said):
    q, k, v, *_ = (x.detach() for x in draw())
    with pytest.raises(error, match=said):
        unsoft.attention(q, k, v, RICH, enable_gqa=True, fields=fields)


def test_fields_of_both_need_both_unless_tokens_are_the_same():
    formula = Formula("s + c_i - c_j", fields={"c": "query+key"})
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="must be a pair of tensors"):
        unsoft.attention(q, k, k, formula, fields={"c": torch.zeros(1, 2, 5)})
    out = unsoft.attention(q, k, k, formula, fields={"c": (torch.zeros(1, 2, 3), torch.zeros(1, 2, 5))})
    torch.testing.assert_close(out, 0.5 * q @ k.mT @ k)


def test_mechanisms_without_fields_refuse_them():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="the fields of this mechanism are: none"):
        unsoft.attention(q, q, q, "softmax", fields={"c": q[..., 0]})
    with pytest.raises(ValueError, match="argument 'fields' is for formulas"):
        unsoft.attention(q, q, q, "linear-relu", fields={"c": q[..., 0]})
