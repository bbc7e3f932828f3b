"""The kernels on the CPU, in the strict interpreter: forward and every gradient against dense float64."""

import pytest
import torch

import unsoft
from tests.engines.triton.parity import SHARP, check
from unsoft.engines.triton import launch
from unsoft.engines.triton.launch import TileSizes
from unsoft.formula import Formula
from unsoft.mechanisms import resolve

pytestmark = pytest.mark.gpu_check
SMALL = pytest.mark.gpu_small
ALL = [name for name in unsoft.mechanisms() if isinstance(resolve(name), Formula)]
SOME = ("cog", "softmax", "relu2", "softpick", "sigmoid", "l2")
OWN = {
    "functions": Formula(
        "sin(s) + cos(s)*erf(s) + log1p(s*s) + expm1(tanh(s)) + softplus(s) + sinh(tanh(s))/n"
    ),
    "positions": Formula("cosh(tanh(s))*sqrt(1 + abs(i - j))/(1 + j)"),
    "power": Formula("max(s, 0)**1.5/n**0.7"),
    "whole power": Formula("(s**t + 0.7**tanh(s) + 2*sign(s))/n", params={"t": 3.0}),
    "choices": Formula("where(s < 0.3, min(s, -0.2), relu(s))/n"),
    "norm": Formula(
        "exp(s - m)", "exp(2*s - 2*m)", "max(s, 0)", norm="sqrt", offset_mass="t*exp(-2*m)", params={"t": 0.3}
    ),
    "negative mass": Formula("s*exp(s - m)", "s*exp(s - m)", "s"),
    "operand": resolve("softmax").with_logit(2 * unsoft.formula.parse("s")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=SMALL) if x in ("cog", "relu2", "softpick") else x for x in ALL]
)
def test_every_formula(name):
    check(name, torch.float64, is_causal=True, mask="bool", length=20, keys=24, heads=2, kv_heads=1)


@pytest.mark.parametrize("name", [x if x in SOME else pytest.param(x, marks=pytest.mark.slow) for x in ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes(name, dtype):
    check(name, dtype, is_causal=True, mask="bool")


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("mask", [None, "additive"])
def test_formulas_of_users(name, mask):
    check(OWN[name], torch.float64, is_causal="lower_right", mask=mask, length=20, keys=24, heads=2)


@pytest.mark.parametrize("name", SOME)
def test_plain(name):
    check(name, torch.float16, keys=33, kv_heads=4)


GROWING = {
    "relu2": "relu2",
    "signed": Formula("s*abs(s)*(1 + t*tanh(s))/n", params={"t": 0.1}),
    "with a mass": Formula("s**3", "max(abs(s), 1)**2"),
}


@pytest.mark.parametrize("name", [pytest.param("relu2", marks=SMALL), "signed", "with a mass"])
@pytest.mark.parametrize("length", [1, 40], ids=["few queries", "many"])
def test_weights_beyond_the_range_of_float16(name, length):
    """Logits of 500 and more: s**2 is beyond 65504, and the output is not."""
    check(GROWING[name], torch.float16, length=length, spread=170.0, mask="bool")


@pytest.mark.parametrize("causal", [False, pytest.param("lower_right", marks=SMALL)])
def test_parameter_gradient(causal):
    check(SHARP, torch.float32, tau=True, is_causal=causal)


@pytest.mark.parametrize(
    "name", ["softmax", "cog", "sigmoid", "l2"]
)  # bias on the logit, and on the strength
def test_additive_mask(name):
    check(name, torch.float32, mask="additive", is_causal=True, length=20, keys=24)


@SMALL
def test_dropout_is_that_of_all_engines():
    check("cog", torch.float32, dropout_p=0.3, length=20, keys=24)


@pytest.mark.parametrize("sizes", [(32, 16), (16, 32), (64, 64)], ids=str)
def test_tile_sizes(sizes, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED_SIZES", TileSizes(*sizes, 4, 1))
    check("cog", torch.float32, is_causal="lower_right", length=70, keys=90, heads=2, kv_heads=1)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 50), (17, 16), (50, 3)])
@pytest.mark.parametrize("causal", [True, False, "lower_right"])
def test_unusual_lengths(length, keys, causal):
    check("cog", torch.float64, is_causal=causal, length=length, keys=keys, heads=2)


def test_positions():
    formula = Formula("exp(s - m)/(1 + i)", "exp(s - m)*(1 + abs(i - j))", "s")
    where = (torch.rand(20) * 9, torch.rand(24) * 9)
    check(formula, torch.float64, positions=where, length=20, keys=24, heads=2)


DECODE = {
    "plain": {},
    "causal": {"is_causal": "lower_right"},
    "mask": {"mask": "bool"},
    "additive": {"mask": "additive"},
    "dropout": {"dropout_p": 0.3},
    "parameter": {"mechanism": SHARP, "tau": True},
    "count": {"mechanism": "relu2", "mask": "bool"},
    "norm": {"mechanism": OWN["norm"]},
    "heads": {"heads": 6, "kv_heads": 1},
}


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("length", [1, 5])
def test_few_queries(name, length):
    options = dict(DECODE[name])
    check(options.pop("mechanism", "cog"), torch.float64, length=length, keys=100, **options)


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("name", [pytest.param("cog", marks=SMALL), "relu2", "softmax", "sigmoid"])
def test_nan_and_inf(name, length):
    """Every output and gradient, NaN in the same places, whichever way the call goes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, size, 16, dtype=torch.float64) for size in (length, 40, 40))
    k[0, 0, 7, 3], k[0, 1, 9, 0], v[0, 1, 4, 2], q[0, 0, 0, 5] = torch.inf, torch.nan, -torch.inf, torch.nan
    mask = torch.rand(1, 1, length, 40) < 0.7
    bias = torch.where(mask, torch.randn(1, 1, length, 40, dtype=torch.float64), -torch.inf)
    bias[..., 20] = torch.nan
    for attn_mask in (mask, bias):
        results = []
        for engine in ("triton", "dense"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = unsoft.attention(*leaves, name, attn_mask=attn_mask, engine=engine)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        for mine, exact in zip(*results, strict=True):
            torch.testing.assert_close(mine, exact, equal_nan=True, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize(
    "formula",
    [
        Formula("s*log(i + 1.5)"),
        Formula("tanh(s)", "abs(s) + 0.25", norm="sqrt(z)", offset_mass="0.5 + i/2"),
        Formula("s*exp(s - m)", "exp(s - m)", "s", norm="tau*z*log(i + 2)", params={"tau": 1.0}),
    ],
    ids=["factor", "offset", "norm"],
)
def test_rows_that_see_nothing_where_the_formula_is_undefined(formula, length):
    """i is negative in such rows."""
    options = {"tau": True} if formula.params else {}
    keys, heads = length - 4, {"heads": 2, "kv_heads": 1}
    check(formula, torch.float64, is_causal="lower_right", length=length, keys=keys, **heads, **options)
