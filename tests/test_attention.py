"""``unsoft.attention``: what it accepts, what it raises, and the promises that hold for every mechanism."""

import inspect
import itertools
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from unsoft.attention import attention
from unsoft.engines import POINTWISE
from unsoft.formula import Formula
from unsoft.mechanisms import formulas, mechanisms, resolve
from unsoft.modules.registry import names
from unsoft.nn import LayerSpec, WrittenOut

NAMES = list(formulas())
ENGINES = ["dense", "tiled"]
EVERY = ["auto", *ENGINES]
NAMES_AND_ENGINES = sorted(  # every formula once, and a signed and a non-negative one with every engine
    {*zip(NAMES, itertools.cycle(EVERY), strict=False), *itertools.product(["cog", "softmax"], EVERY)}
)
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def qkv(*leading, length=6, keys=6, dim=8, value_dim=8, dtype=DOUBLE):
    shapes = ((length, dim), (keys, dim), (keys, value_dim))
    return [torch.randn(*leading, *shape, dtype=dtype) for shape in shapes]


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


X = tensor(2, 4, 5, 8)
BAD = {
    "query is a list": (TypeError, "'query' must be a tensor, not list", {"query": [1.0]}),
    "value is None": (TypeError, "'value' must be a tensor, not NoneType", {"value": None}),
    "sparse": (TypeError, "'key' must be a dense tensor", {"key": X.to_sparse()}),
    "integers": (TypeError, r"'query' has dtype torch.int64; supported are float32", {"query": X.long()}),
    "complex": (TypeError, r"'key' has dtype torch.complex64", {"key": X.to(torch.complex64)}),
    "dtypes": (
        TypeError,
        r"'value' has dtype torch.float64, 'query' has torch.float32",
        {"value": X.double()},
    ),
    "devices": (ValueError, r"'key' is on device meta, 'query' is on cpu", {"key": X.to("meta")}),
    "one dimension": (
        ValueError,
        r"'query' has shape \(8,\); expected \(\.\.\., heads",
        {"query": tensor(8)},
    ),
    "ranks": (
        ValueError,
        r"'key' has 3 dimensions \(shape \(4, 5, 8\)\), 'query' has 4 \(shape",
        {"key": tensor(4, 5, 8)},
    ),
    "head dimension": (
        ValueError,
        r"'key' has head dimension 7 \(shape \(2, 4, 5, 7\)\), 'query' has 8 \(shape \(2, 4, 5, 8\)\);"
        " they must match",
        {"key": tensor(2, 4, 5, 7)},
    ),
    "number of keys": (
        ValueError,
        r"'value' has 3 keys \(shape \(2, 4, 3, 8\)\), 'key' has 5 \(shape \(2, 4, 5, 8\)\); they must match",
        {"value": tensor(2, 4, 3, 8)},
    ),
    "batch": (
        ValueError,
        r"'key' has batch size 3 in dimension 0 \(shape \(3, 4, 5, 8\)\)",
        {"key": tensor(3, 4, 5, 8)},
    ),
    "heads of value": (ValueError, r"'value' has 2 heads .* 'key' has 4", {"value": tensor(2, 2, 5, 8)}),
    "heads": (
        ValueError,
        r"'key' has 2 heads \(shape .*\), 'query' has 4 .*unless enable_gqa=True",
        {"key": tensor(2, 2, 5, 8), "value": tensor(2, 2, 5, 8)},
    ),
    "heads not a multiple": (
        ValueError,
        r"'query' has 4 heads .* not a multiple of the 3 heads of 'key'",
        {"key": tensor(2, 3, 5, 8), "value": tensor(2, 3, 5, 8), "enable_gqa": True},
    ),
    "enable_gqa": (TypeError, "'enable_gqa' must be True or False", {"enable_gqa": 1}),
    "mask of integers": (
        TypeError,
        r"'attn_mask' has dtype torch.int64; use bool",
        {"attn_mask": X[0, 0, :, :5].long()},
    ),
    "complex mask": (
        TypeError,
        r"'attn_mask' has dtype torch.complex64",
        {"attn_mask": tensor(5, 5, dtype=torch.complex64)},
    ),
    "mask is a list": (TypeError, "'attn_mask' must be a tensor or None, not list", {"attn_mask": [[True]]}),
    "mask shape": (
        ValueError,
        r"'attn_mask' has shape \(5, 4\), which does not broadcast to \(2, 4, 5, 5\)",
        {"attn_mask": tensor(5, 4)},
    ),
    "mask rank": (
        ValueError,
        r"'attn_mask' has shape \(1, 1, 1, 1, 1\)",
        {"attn_mask": tensor(1, 1, 1, 1, 1)},
    ),
    "mask device": (ValueError, "'attn_mask' is on device meta", {"attn_mask": tensor(5, 5).to("meta")}),
    "causal bias": (
        ValueError,
        r"CausalBias for 5 queries and 7 keys",
        {"attn_mask": causal_upper_left(5, 7)},
    ),
    "dropout above 1": (ValueError, "'dropout_p' must be between 0 and 1, not 1.5", {"dropout_p": 1.5}),
    "dropout below 0": (ValueError, "'dropout_p' must be between 0 and 1, not -0.1", {"dropout_p": -0.1}),
    "dropout nan": (ValueError, "'dropout_p' must be between 0 and 1, not nan", {"dropout_p": float("nan")}),
    "dropout text": (TypeError, "'dropout_p' must be a number, not str", {"dropout_p": "0.1"}),
    "causal text": (
        ValueError,
        "'is_causal' must be True, False, 'upper_left' or",
        {"is_causal": "lower_left"},
    ),
    "causal number": (TypeError, "'is_causal' must be True, False, 'upper_left' or", {"is_causal": 1}),
    "scale": (TypeError, "'scale' must be a number, not Tensor", {"scale": torch.tensor(1.0)}),
    "infinite scale": (ValueError, "'scale' must be finite, not inf", {"scale": float("inf")}),
    "engine": (ValueError, "'engine': unknown name 'tilde'; did you mean 'tiled'", {"engine": "tilde"}),
    "engines are listed": (ValueError, r"known: auto, .*dense", {"engine": "cuda"}),
    "engine type": (TypeError, "'engine' must be a name, not NoneType", {"engine": None}),
    "weights of a fused engine": (
        ValueError,
        "'return_weights' needs engine",
        {"engine": "tiled", "return_weights": True},
    ),
    "mechanism": (ValueError, "did you mean 'softmax'", {"mechanism": "sofmax"}),
    "mechanism type": (TypeError, "mechanism", {"mechanism": 3}),
    "parameter without parameters": (
        ValueError,
        r"'params' names 'tau', but .*: none",
        {"params": {"tau": 1.0}},
    ),
    "params type": (TypeError, "'params' must be a mapping", {"params": [1.0]}),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_named(case):
    error, message, changes = BAD[case]
    arguments = {"query": X, "key": X, "value": X, "mechanism": "softmax"} | changes
    with pytest.raises(error, match=message) as caught:
        attention(**arguments)
    assert "mechanism" in str(caught.value) or str(caught.value).startswith("attention: argument '")


TILTED = Formula(weight="exp(tau*s - m)", mass="exp(tau*s - m)", peak="tau*s", params={"tau": 1.0})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            torch.ones(3),
            ValueError,
            r"params\['tau'\]' has shape \(3,\); use a scalar or one value per query head, shape \(4,\)",
        ),
        (torch.ones(4, dtype=torch.int64), TypeError, r"params\['tau'\]' has dtype torch.int64"),
        (torch.ones(4, device="meta"), ValueError, r"params\['tau'\]' is on device meta"),
        ("1", TypeError, r"params\['tau'\]' must be a number, not str"),
        (float("nan"), ValueError, r"params\['tau'\]' must be finite"),
    ],
)
def test_wrong_parameters_are_named(value, error, message):
    with pytest.raises(error, match=message):
        attention(X, X, X, TILTED, params={"tau": value})


def test_no_kernel_runs_before_the_checks(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("an engine was called")

    monkeypatch.setattr(POINTWISE, "choose", refuse)
    with pytest.raises(ValueError, match="argument 'value'"):
        attention(X, X, tensor(2, 4, 3, 8))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)], ids=str)
def test_any_number_of_leading_dimensions(leading, engine):
    q, k, v = qkv(*leading, length=4, value_dim=5)
    out = attention(q, k, v, engine=engine)
    assert out.shape == (*leading, 4, 5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("engine", ENGINES)
def test_batch_dimensions_broadcast(engine):
    q, k, v = torch.randn(2, 1, 3, 4, 8), torch.randn(1, 5, 3, 6, 8), torch.randn(1, 1, 3, 6, 8)
    out = attention(q, k, v, "cog", engine=engine)
    whole = [x.expand(2, 5, *x.shape[2:]) for x in (q, k, v)]
    assert out.shape == (2, 5, 3, 4, 8)
    torch.testing.assert_close(out, attention(*whole, "cog", engine=engine))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 3), (1, 4), (1, 6))), ids=str)
def test_masks_of_every_broadcastable_shape(shape, kind, engine):
    q, k, v = qkv(2, 3, length=4)
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape, dtype=DOUBLE)
    whole = mask.expand(2, 3, 4, 6)
    out = attention(q, k, v, "softmax", mask, engine=engine)
    assert torch.equal(out, attention(q, k, v, "softmax", whole.contiguous(), engine=engine))
    alive = whole.any(-1, keepdim=True) if kind == "bool" else torch.ones(2, 3, 4, 1, dtype=torch.bool)
    torch.testing.assert_close(
        out[alive[..., 0]], F.scaled_dot_product_attention(q, k, v, whole)[alive[..., 0]]
    )


@pytest.mark.parametrize(
    "shape", [(6,), (4, 6), (3, 4, 6), (2, 1, 1, 1, 6), (1, 2, 3, 4, 6), (2, 2, 1, 4, 1)], ids=str
)
def test_masks_of_lower_rank_and_of_five_dimensions(shape):
    q, k, v = qkv(2, 2, 3, length=4)
    mask = torch.randn(shape, dtype=DOUBLE)
    torch.testing.assert_close(
        attention(q, k, v, "softmax", mask), F.scaled_dot_product_attention(q, k, v, mask)
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("length", "keys"), [(4, 4), (3, 6), (6, 3), (1, 5)])
@pytest.mark.parametrize("alignment", [True, "upper_left", "lower_right"])
@pytest.mark.parametrize("mechanism", ["cog", "sigmoid"])
def test_causal_alignments(mechanism, alignment, length, keys, engine):
    q, k, v = qkv(2, 2, length=length, keys=keys)
    offset = keys - length if alignment == "lower_right" else 0
    mask = torch.arange(keys) <= torch.arange(length)[:, None] + offset
    out = attention(q, k, v, mechanism, is_causal=alignment, engine=engine)
    torch.testing.assert_close(out, attention(q, k, v, mechanism, mask, engine="dense"))


def test_causal_is_torch_s_causal():
    q, k, v = qkv(2, 2, length=3, keys=6)
    torch.testing.assert_close(
        attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    for bias, alignment in (
        (causal_upper_left(3, 6), "upper_left"),
        (causal_lower_right(3, 6), "lower_right"),
    ):
        out = attention(q, k, v, "cog", bias)
        assert torch.equal(out, attention(q, k, v, "cog", is_causal=alignment))
        torch.testing.assert_close(
            attention(q, k, v, "softmax", bias), F.scaled_dot_product_attention(q, k, v, bias)
        )


def test_a_mask_together_with_causal_means_both():
    q, k, v = qkv(2, 2)
    mask = torch.rand(6, 6) > 0.3
    expected = attention(q, k, v, "cog", mask & torch.ones(6, 6, dtype=torch.bool).tril())
    torch.testing.assert_close(attention(q, k, v, "cog", mask, is_causal=True), expected)
    q, k, v = qkv(2, 2, length=3, keys=6)
    stricter = attention(q, k, v, "cog", is_causal=True)
    for bias, alignment in (
        (causal_upper_left(3, 6), "lower_right"),
        (causal_lower_right(3, 6), "upper_left"),
    ):
        torch.testing.assert_close(attention(q, k, v, "cog", bias, is_causal=alignment), stricter)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_shared_key_heads(kv_heads, engine):
    q, _, _ = qkv(2, 6)
    _, k, v = qkv(2, kv_heads)
    repeated = [x.repeat_interleave(6 // kv_heads, 1) for x in (k, v)]
    out = attention(q, k, v, "cog", enable_gqa=True, engine=engine)
    torch.testing.assert_close(out, attention(q, *repeated, "cog", engine="dense"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16, torch.float16], ids=str)
def test_softmax_is_scaled_dot_product_attention(dtype, engine):
    q, k, v = (x.requires_grad_() for x in qkv(2, 3, length=33, keys=65, dim=16, dtype=dtype))
    g = torch.randn(2, 3, 33, 8).to(dtype)
    results = [
        (out := run(q, k, v, scale=0.3), *torch.autograd.grad(out, (q, k, v), g))
        for run in (
            lambda *x, **o: attention(*x, "softmax", engine=engine, **o),
            F.scaled_dot_product_attention,
        )
    ]
    for a, b in zip(*results, strict=True):
        assert a.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=16 * eps, atol=16 * eps)


@pytest.mark.parametrize(("mechanism", "engine"), NAMES_AND_ENGINES)
def test_the_future_is_never_seen(mechanism, engine):
    """Changing keys, values and queries after row i changes nothing up to row i, not by one bit."""
    q, k, v = qkv(1, 2, length=20, keys=20)
    before = attention(q, k, v, mechanism, is_causal=True, engine=engine)
    for x in (q, k, v):
        x[:, :, 12:] = 100 * torch.randn_like(x[:, :, 12:])
    after = attention(q, k, v, mechanism, is_causal=True, engine=engine)
    assert torch.equal(before[:, :, :12], after[:, :, :12])
    assert not torch.equal(before[:, :, 12:], after[:, :, 12:])


POSITIONS = Formula(weight="tanh(s)*(i - j + 1)/n")


@pytest.mark.parametrize(
    ("mechanism", "engine"), [*NAMES_AND_ENGINES, *((POSITIONS, engine) for engine in EVERY)], ids=str
)
def test_a_prefix_never_changes_and_decoding_gives_the_same(mechanism, engine):
    q, k, v = qkv(1, 2, length=16, keys=16)
    whole = attention(q, k, v, mechanism, is_causal=True, engine=engine)
    for n in (1, 2, 7, 15):
        prefix = attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], mechanism, is_causal=True, engine=engine)
        torch.testing.assert_close(prefix, whole[:, :, :n], rtol=1e-11, atol=1e-12)
        step = attention(
            q[:, :, n : n + 1],
            k[:, :, : n + 1],
            v[:, :, : n + 1],
            mechanism,
            is_causal="lower_right",
            engine=engine,
        )
        torch.testing.assert_close(step, whole[:, :, n : n + 1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("masked", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("mechanism", "engine"), NAMES_AND_ENGINES)
def test_a_masked_key_is_a_removed_key(mechanism, masked, engine):
    q, k, v = qkv(2, 2, length=5, keys=9, dtype=torch.float32)
    keep = torch.tensor([0, 2, 3, 7])
    mask = torch.full((9,), masked)
    mask[keep] = 0.5
    expected = attention(q, k[:, :, keep], v[:, :, keep], mechanism, torch.full((4,), 0.5), engine="dense")
    for x in (k, v):
        x[:, :, 4] = torch.nan
    out = attention(q, k, v, mechanism, mask, engine=engine)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    hidden = attention(q, k, v, mechanism, torch.full((5, 9), masked), engine=engine)
    assert (hidden == 0).all()


@pytest.mark.parametrize("mechanism", [name for name in NAMES if resolve(name).signed])
def test_a_float_mask_never_flips_the_sign_of_a_weight(mechanism):
    q, k, v = qkv(2, 2)
    _, plain = attention(q, k, v, mechanism, return_weights=True)
    _, biased = attention(q, k, v, mechanism, 8 * torch.randn(6, 6, dtype=DOUBLE), return_weights=True)
    assert torch.equal(plain.sign(), biased.sign()) and (plain < 0).any()


@pytest.mark.parametrize("engine", EVERY)
@pytest.mark.parametrize("mechanism", ["softmax", "cog", "sinh", "l2"])
def test_a_huge_float_mask_selects_without_overflow(mechanism, engine):
    q, k, v = qkv(2, 2, dtype=torch.float32)
    mask = torch.zeros(6, 6).fill_diagonal_(1e4)
    alone = attention(q, k, v, mechanism, torch.eye(6, dtype=torch.bool), engine="dense")
    torch.testing.assert_close(attention(q, k, v, mechanism, mask, engine=engine), alone)


def test_a_float_mask_is_added_to_the_logits_of_a_non_negative_mechanism():
    q, k, v = qkv(2, 2)
    mask = torch.randn(6, 6, dtype=DOUBLE)
    s = q @ k.mT / 8**0.5 + mask
    torch.testing.assert_close(attention(q, k, v, "relu2", mask), (s.relu() ** 2 / 6) @ v)


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_per_head_with_gradients(engine):
    q, k, v = qkv(2, 4)
    per_head = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=DOUBLE, requires_grad=True)
    out = attention(q, k, v, TILTED, params={"tau": per_head}, engine=engine)
    for h in range(4):
        alone = attention(
            q[:, h], k[:, h], v[:, h], TILTED, params={"tau": per_head[h].item()}, engine=engine
        )
        torch.testing.assert_close(out[:, h], alone)
    shared = torch.tensor(1.5, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda tau: attention(q, k, v, TILTED, params={"tau": tau}, engine=engine), [per_head]
    )
    attention(q, k, v, TILTED, params={"tau": shared}, engine=engine).sum().backward()
    assert shared.grad.shape == () and shared.grad.dtype == torch.float32 and shared.grad != 0


def test_defaults():
    q, k, v = qkv(2, 2, dim=9)
    torch.testing.assert_close(attention(q, k, v), attention(q, k, v, "softmax", scale=1 / 3))
    torch.testing.assert_close(attention(q, k, v, TILTED), attention(q, k, v))
    nothing = attention(q[..., :0], k[..., :0], v)
    torch.testing.assert_close(nothing, v.mean(-2, keepdim=True).expand_as(nothing))


def test_return_weights():
    q, k, v = qkv(2, 2, 3, length=4)
    out, weights = attention(q, k, v, "cog", return_weights=True)
    assert out.shape == (2, 2, 3, 4, 8) and weights.shape == (2, 2, 3, 4, 6)
    torch.testing.assert_close(out, weights @ v)
    out, weights = attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0], "cog", return_weights=True)
    assert out.shape == (4, 8) and weights.shape == (4, 6)


@pytest.mark.parametrize("engine", EVERY)
@pytest.mark.parametrize("mechanism", ["softmax", "cog", "sigmoid"])
@pytest.mark.parametrize("shape", [(0, 2, 4, 6), (2, 0, 4, 6), (2, 2, 0, 6), (2, 2, 4, 0)], ids=str)
def test_empty_inputs(shape, mechanism, engine):
    *leading, length, keys = shape
    q, k, v = (x.requires_grad_() for x in qkv(*leading, length=length, keys=keys))
    out = attention(q, k, v, mechanism, is_causal=True, engine=engine)
    assert out.shape == (*leading, length, 8) and (out == 0).all()
    out.sum().backward()
    assert all((x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("engine", EVERY)
def test_inputs_are_not_changed_and_not_aliased(engine):
    inputs = [*qkv(2, 2), torch.randn(6, 6, dtype=DOUBLE)]
    copies = [x.clone() for x in inputs]
    out = attention(*inputs[:3], "cog", inputs[3], engine=engine)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert out.data_ptr() not in [x.data_ptr() for x in inputs]


def test_autocast_narrows_the_inputs_and_nothing_else():
    q, k, v = qkv(2, 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, "cog", engine="dense")
        reference = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == reference.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), "cog", engine="dense"))


@pytest.mark.parametrize("name", names())
def test_autocast_takes_dtypes_that_differ(name):
    """Keys from an operation that autocast leaves in float32; without autocast they are refused."""
    q, k, v = qkv(2, 2, length=9, keys=9, dtype=torch.float32)
    narrow = [x.bfloat16() for x in (q, k, v)]

    def run(*inputs):
        torch.manual_seed(0)  # performer draws its features
        return attention(*inputs, name, is_causal=True)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(narrow[0], k, v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, run(*narrow), rtol=0.05, atol=0.05)
    with pytest.raises(TypeError, match="argument 'key' has dtype torch.float32, 'query' has torch.bfloat16"):
        run(narrow[0], k, v)


def test_autocast_leaves_written_out_weights_their_precision():
    class Squares(WrittenOut):
        def weights(self, logits, visible):
            return logits.square()

    q, k, v = qkv(2, 2, dtype=torch.float32)
    layer = Squares(LayerSpec(heads=2, head_dim=8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(q, k.bfloat16(), v)
    assert torch.equal(found, layer(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_transforms_fall_back_to_dense():
    q, k, v = qkv(3, 2, length=50, keys=50)
    out = torch.vmap(lambda *x: attention(*x, "cog"))(q, k, v)
    torch.testing.assert_close(out, attention(q, k, v, "cog"))
    with pytest.raises(ValueError, match="'tiled' does not support this call: .*transforms"):
        torch.vmap(lambda *x: attention(*x, "cog", engine="tiled"))(q, k, v)
    _, tangent = torch.func.jvp(lambda x: attention(x, k, v, "cog").sum(), (q,), (torch.ones_like(q),))
    assert tangent.isfinite()


@pytest.mark.parametrize("engine", ENGINES)
def test_torch_compile(engine):
    q, k, v = (x.requires_grad_() for x in qkv(2, 2))
    mask = torch.randn(6, 6, dtype=DOUBLE)

    def run(q, k, v):
        return attention(q, k, v, "cog", mask, is_causal="lower_right", engine=engine)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled, run(q, k, v))
    for a, b in zip(
        *(torch.autograd.grad(out.sum(), (q, k, v)) for out in (compiled, run(q, k, v))), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_torch_compile_with_changing_sizes():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(
        lambda q, k, v, mask: attention(q, k, v, "sigmoid", mask, is_causal=True, engine="tiled"),
        backend=count,
        fullgraph=True,
        dynamic=True,
    )
    for length, keys in ((5, 9), (17, 33), (30, 21)):
        q, k, v = qkv(2, 3, length=length, keys=keys)
        mask = torch.randn(2, 1, 1, keys)
        expected = attention(q, k, v, "sigmoid", mask, is_causal=True, engine="dense")
        torch.testing.assert_close(run(q, k, v, mask), expected)
    assert len(graphs) == 1


def test_every_documented_argument_exists():
    parameters = inspect.signature(attention).parameters
    documented = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)$", attention.__doc__, flags=re.MULTILINE)
    named = {name for line in documented for name in line.split(", ")}
    assert named | {"enable_gqa"} == set(parameters)


NO_TRANSFORMS = ("density", "magnitude")
"""As docs/engines.md lists them."""


def transformed(name, function):
    """What ``function`` returns, or None for a mechanism that has to refuse, and does so clearly."""
    if name not in NO_TRANSFORMS:
        return function()
    with pytest.raises(NotImplementedError, match=rf"{name}: torch\.func\.\w+ is not supported.*use torch"):
        function()
    return None


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if i % 2 else ()) for i, x in enumerate(mechanisms())],
)
def test_torch_func_of_every_mechanism(name):
    """Against a loop over the batch, autograd, and the product with a Jacobian by two backward passes."""
    inputs = qkv(3, 2, length=5, keys=5, dim=4, value_dim=4)
    tangents = tuple(torch.randn_like(x) for x in inputs)

    def run(*x, engine="auto"):
        return attention(*x, name, is_causal=True, engine=engine)

    mapped = transformed(name, lambda: torch.func.vmap(run)(*inputs))
    found = transformed(name, lambda: torch.func.grad(lambda *x: run(*x).square().sum(), (0, 1, 2))(*inputs))
    pushed = transformed(name, lambda: torch.func.jvp(run, tuple(inputs), tangents)[1])
    if mapped is None:
        return
    torch.testing.assert_close(mapped, torch.stack([run(*(x[[b]] for x in inputs))[0] for b in range(3)]))
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    assert out.requires_grad  # the module that was made inside a transform serves other calls too
    expected = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    by_two_passes = torch.autograd.functional.jvp(lambda *x: run(*x, engine="dense"), tuple(inputs), tangents)
    torch.testing.assert_close(pushed, by_two_passes[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "cog", "tda", "sparsemax", "entmax", "linear-exp", "deltanet"])
def test_hessian(name):
    q, k, v = qkv(1, 2, length=3, keys=3, dim=2, value_dim=2)

    def loss(q, engine="auto"):
        return attention(q, k, v, name, is_causal=True, engine=engine).square().sum()

    expected = torch.autograd.functional.hessian(lambda q: loss(q, "dense"), q)
    torch.testing.assert_close(torch.func.hessian(loss)(q), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(q), expected, rtol=1e-9, atol=1e-12)


def test_forward_mode_twice_is_refused():
    """torch.autograd.Function would answer 0."""
    q, k, v = qkv(1, 2, length=3, keys=3, dim=2, value_dim=2)
    with pytest.raises(NotImplementedError, match="jacfwd of jacfwd.*use torch.func.hessian"):
        torch.func.jacfwd(torch.func.jacfwd(lambda q: attention(q, k, v, "cog").sum()))(q)


@pytest.mark.parametrize("leading", [(2,), (2, 1, 2)], ids=str)
def test_squared_lengths_for_any_batch_dimensions(leading):
    q, k, v = qkv(*leading)
    whole = attention(q.reshape(-1, 2, 6, 8), k.reshape(-1, 2, 6, 8), v.reshape(-1, 2, 6, 8), "rbf")
    torch.testing.assert_close(attention(q, k, v, "rbf"), whole.reshape(q.shape))


def test_the_first_call_of_a_process_may_be_inside_a_transform():
    """Formulas and modules that are made there must not belong to it."""
    program = (
        "import torch, unsoft\n"
        "q = torch.randn(3, 2, 5, 4)\n"
        "def run(q):\n"
        "    own = unsoft.attention(q, q, q, unsoft.Formula('s*s/n'))\n"
        "    return own + unsoft.attention(q, q, q, 'entmax')\n"
        "torch.testing.assert_close(torch.func.vmap(run)(q), run(q))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
